/* SPDX-License-Identifier: MIT */
/*
 * Buffers: what every provider has in common. A provider is a table of operations in a file of its own (user.c; the
 * kernel module's will be kmod.c) and one line in staging.c. Nothing above knows which one is in use.
 *
 * The common part checks options and limits before a provider is asked, keeps the accounts (budget, requested, backed,
 * locked), and verifies placement after it (law 6).
 */
#ifndef STAGING_H
#define STAGING_H

#include <offstage.h>
#include <stdbool.h>
#include "placement.h"

/* What was asked for, checked and complete: no defaults left, nodes resolved, copied out of the caller's memory. */
struct staging_request {
	uint64_t bytes;
	uint32_t flags;
	uint32_t huge;			/* PREFER, REQUIRE or NEVER */
	uint32_t lock;
	struct placement placement;
};

struct offstage_buffer {
	_Atomic unsigned refs;		/* the handle's, and one per arena */
	struct offstage *ctx;
	const struct staging_ops *ops;
	void *data;
	uint64_t mapped;		/* bytes of address space from data on */
	int fd;				/* -1: private memory */
	struct offstage_buffer_info info;
};

struct staging_ops {
	const char *name;
	/* 0 if it can be used here, else a negative errno and the sentence that says why not. */
	int (*probe)(void);
	/*
	 * Makes the memory of a buffer: mapped, placed, populated, locked, zeroed; fills data, mapped, fd, and in info:
	 * backed, huge, locked, page_size, memory, why. On failure nothing is left.
	 */
	int (*create)(struct offstage_buffer *buffer, const struct staging_request *request);
	int (*import)(struct offstage_buffer *buffer, int fd, uint32_t lock);
	/* Bytes on each node, of pages that are there. */
	int (*nodes)(struct offstage_buffer *buffer, uint64_t *bytes, uint32_t n);
	void (*destroy)(struct offstage_buffer *buffer);
};

/* The provider named (NULL: OFFSTAGE_PROVIDER, else the first whose probe succeeds). -ENOENT with a sentence. */
int staging_pick(const char *name, const struct staging_ops **ops);

extern const struct staging_ops user_ops;

#endif
