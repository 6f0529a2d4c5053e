/* SPDX-License-Identifier: MIT */
/*
 * The context that every handle refers to: what was picked at offstage_open(), the limits, and the counters.
 *
 * Ownership: each handle (buffer, device, optimizer) holds a reference to its context; an arena holds one to its
 * buffer, an optimizer to its device. The last reference frees.
 */
#ifndef CONTEXT_H
#define CONTEXT_H

#include <offstage.h>
#include <stdbool.h>
#include "trace.h"

struct offstage {
	_Atomic unsigned refs;
	unsigned forks;			/* forks_seen() when it was opened */
	const struct staging_ops *staging;
	const struct adam_ops *adam;
	struct threads *threads;
	struct trace trace;
	uint64_t budget;
	uint32_t lock;			/* enum offstage_want */
	char threads_why[160];
};

struct offstage *context_get(struct offstage *ctx);	/* takes a reference; returns ctx */
void context_put(struct offstage *ctx);

/* Is this a child that inherited the context by fork()? Then only closing is allowed. */
bool context_forked(const struct offstage *ctx);
/* 0, or -ECHILD with the sentence. */
int context_check(const struct offstage *ctx);

/*
 * Takes a caller's struct, of its size or another version's, into ours: *in of in->size bytes into out of `size`
 * bytes. Missing fields become 0. -EINVAL: no size; -E2BIG: fields that this version doesn't know are in use.
 * `what` names the struct in the sentence.
 */
int struct_in(void *out, size_t size, const void *in, const char *what);
/* Hands ours out: at most out->size bytes, out->size set to what was written. -EINVAL: no size. */
int struct_out(void *out, const void *in, size_t size, const char *what);

#endif
