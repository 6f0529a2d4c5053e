/* SPDX-License-Identifier: MIT */
/*
 * Work over the pages of one buffer by short-lived threads that run on the node where the pages lie: populating and
 * looking. The pool of threads.h isn't used, because its threads are pinned to where Adam runs.
 */
#ifndef POPULATE_H
#define POPULATE_H

#include <stdint.h>
#include "placement.h"
#include "trace.h"

/*
 * Cuts the extents, which lie one after another from `start` on, into pieces of 32 MiB, and
 * calls fn(arg, piece, bytes) for each, until one returns non-zero; its value is returned. Pieces of different nodes
 * are worked on at the same time. Threads that can't be started are done without: the caller works too. fn must not
 * call fail(), whose sentence would be lost with its thread.
 */
int populate_run(char *start, const struct placement_extent *extents, int n, struct trace_counters *counters,
		 int (*fn)(void *arg, char *piece, uint64_t bytes), void *arg);

#endif
