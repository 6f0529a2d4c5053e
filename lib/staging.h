/* SPDX-License-Identifier: MIT */
/*
 * Buffers: what every provider has in common. A provider is a table of operations in a file of its own (user.c,
 * kmod.c) and one line in staging.c. Nothing above knows which one is in use.
 *
 * The common part checks options and limits before a provider is asked, keeps the accounts (budget, requested, backed,
 * locked), and verifies placement after it (law 6).
 *
 * After a fork, a child may close what it inherited: nothing on that way takes a lock or waits.
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

	/* Set by the common part: an attempt with memory from a pool failed, plan without. */
	bool without_pool;

	/* The plan. By the provider, from facts alone. */
	const char *memory;		/* as in offstage_buffer_info */
	uint32_t page_size;		/* which backed is a multiple of */
	uint64_t backed;
	uint64_t missing;		/* of it, bytes that have to be allocated: all of it, less for an import */
	bool pooled;			/* they were set aside before, and are never swapped: no room nor locking needed */
	/* By the provider for pooled memory, else by the common part. They cover `backed`. */
	struct placement_extent extents[PLACEMENT_EXTENTS];
	int n_extents;
};

struct offstage_buffer {
	_Atomic unsigned refs;		/* the handle's, and one per arena */
	struct offstage *ctx;
	const struct staging_ops *ops;
	void *data;
	uint64_t mapped;		/* bytes of address space from data on */
	int fd;				/* -1: it can't be passed on */
	struct offstage_buffer_info info;
};

struct staging_ops {
	const char *name;
	/* 0 if it can be used here, else a negative errno and the sentence that says why not. */
	int (*probe)(void);
	/* Fills the plan for a new buffer. -ENOSR: huge pages are required and can't be had. */
	int (*plan)(struct staging_request *request);
	/*
	 * Makes the memory of a buffer: mapped, placed, populated, locked, zeroed; fills data, mapped, fd, and in info:
	 * huge, locked, page_size, why. On failure nothing is left. -EAGAIN: pooled memory wasn't got, plan without.
	 */
	int (*create)(struct offstage_buffer *buffer, const struct staging_request *request);
	/* Fills bytes and the plan from a file that somebody else made. -EBADF, -EINVAL: it's no such file. */
	int (*inspect)(int fd, struct staging_request *request);
	/* Like create, for that file, whose descriptor stays the caller's. */
	int (*import)(struct offstage_buffer *buffer, int fd, const struct staging_request *request);
	/*
	 * Adds to bytes[node] what lies there of pages that are there, for nodes below n. The extents cover the buffer;
	 * elsewhere counts bytes that are on another node than their extent's.
	 */
	int (*nodes)(struct offstage_buffer *buffer, const struct placement_extent *extents, int n_extents,
		     uint64_t *bytes, uint32_t n, uint64_t *elsewhere);
	/* Unmaps and closes. In a child of fork, what it doesn't have isn't touched. */
	void (*destroy)(struct offstage_buffer *buffer);
};

/* The provider named (NULL: OFFSTAGE_PROVIDER, else the first whose probe succeeds). -ENOENT with a sentence. */
int staging_pick(const char *name, const struct staging_ops **ops);

struct offstage_buffer *buffer_get(struct offstage_buffer *buffer);	/* takes a reference; returns buffer */
void buffer_put(struct offstage_buffer *buffer);

extern const struct staging_ops user_ops, kmod_ops;

#endif
