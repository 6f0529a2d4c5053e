/* SPDX-License-Identifier: MIT */
/*
 * Placement: which bytes of a buffer go to which node. Pure arithmetic, no system calls; the kernel module's
 * placement has the same rules.
 */
#ifndef PLACEMENT_H
#define PLACEMENT_H

#include <offstage.h>

struct placement {
	uint32_t kind;			/* enum offstage_placement, never LOCAL: that has become BIND */
	uint32_t n;
	uint32_t nodes[OFFSTAGE_NODES_MAX];
	uint32_t weights[OFFSTAGE_NODES_MAX];
};

/* Bytes from the last extent's end on that lie on one node; node is PLACEMENT_INTERLEAVED for all of them in turn. */
struct placement_extent {
	uint64_t bytes;
	uint32_t node;
};
#define PLACEMENT_INTERLEAVED UINT32_MAX
#define PLACEMENT_EXTENTS 64	/* of one buffer: each is a mapping of its own, of which a process has 65530 */

/* -EINVAL with a sentence: kinds, node numbers, duplicates, weights, what must not be given. */
int placement_check(struct placement *out, const struct offstage_buffer_options *options, uint32_t local_node);

/*
 * Cuts `bytes` into extents, each a multiple of `grain` but the last; at most max of them, which is at least n
 * (weighted blocks grow until they fit). No two neighbours are on the same node. room[i] is what nodes[i] can take:
 * SPILL fills by it, the others ignore it. Returns the number of extents, or -ENOMEM with a sentence when SPILL
 * doesn't fit.
 */
int placement_plan(const struct placement *placement, uint64_t bytes, uint64_t grain, const uint64_t *room,
		   struct placement_extent *extents, uint32_t max);

/* Bytes that each of nodes[i] must take, for checking room before anything is allocated. */
void placement_share(const struct placement *placement, const struct placement_extent *extents, int n,
		     uint64_t bytes, uint64_t *share);

#endif
