/* SPDX-License-Identifier: MIT */
/*
 * Placement: arithmetic on bytes and nodes. See placement.h.
 *
 * Weighted blocks are cut by one rule: with U grains to place in R rounds, node i has floor(U * w[i] * r / (R * W)) of
 * them after round r, W being the sum of the weights, and the few that rounding leaves go to the first nodes in the
 * last round. So every node's sum is within a grain of its share at any size, and exact when U is a multiple of W:
 * 12:5 over 17 grains is 12 and 5.
 */
#include <string.h>
#include "error.h"
#include "placement.h"

#define WEIGHT_MAX 1000

int placement_check(struct placement *out, const struct offstage_buffer_options *options, uint32_t local_node)
{
	const uint32_t *nodes = options->nodes, n = options->n_nodes;

	memset(out, 0, sizeof(*out));
	if (options->placement > OFFSTAGE_SPILL)
		return fail(-EINVAL, "placement is %u: use an enum offstage_placement", options->placement);
	if (options->placement != OFFSTAGE_WEIGHTED && options->weights)
		return fail(-EINVAL, "weights are given and the placement isn't OFFSTAGE_WEIGHTED: leave them NULL");
	if (options->placement == OFFSTAGE_LOCAL) {
		if (n || nodes)
			return fail(-EINVAL, "OFFSTAGE_LOCAL names no nodes and %u are given: use OFFSTAGE_BIND, or leave them out", n);
		out->kind = OFFSTAGE_BIND;
		out->n = 1;
		out->nodes[0] = local_node;
		return 0;
	}
	if (!n || !nodes)
		return fail(-EINVAL, "the placement needs nodes: set nodes to their numbers and n_nodes to how many there are");
	if (n > OFFSTAGE_NODES_MAX)
		return fail(-EINVAL, "%u nodes are named and at most %d may be", n, OFFSTAGE_NODES_MAX);
	if (options->placement == OFFSTAGE_BIND && n != 1)
		return fail(-EINVAL, "OFFSTAGE_BIND takes one node and %u are named: use OFFSTAGE_INTERLEAVE, _WEIGHTED or _SPILL", n);
	if (options->placement == OFFSTAGE_WEIGHTED && !options->weights)
		return fail(-EINVAL, "OFFSTAGE_WEIGHTED needs a weight for each of the %u nodes", n);
	for (uint32_t i = 0; i < n; i++) {
		for (uint32_t k = 0; k < i; k++)
			if (nodes[k] == nodes[i])
				return fail(-EINVAL, "node %u is named twice: name each once", nodes[i]);
		out->nodes[i] = nodes[i];
		if (options->placement != OFFSTAGE_WEIGHTED)
			continue;
		if (options->weights[i] < 1 || options->weights[i] > WEIGHT_MAX)
			return fail(-EINVAL, "the weight of node %u is %u: weights are 1 to %d", nodes[i], options->weights[i],
				    WEIGHT_MAX);
		out->weights[i] = options->weights[i];
	}
	out->kind = options->placement;
	out->n = n;
	/* One node needs no turns; its pages are checked more strictly as BIND. */
	if (n == 1)
		out->kind = OFFSTAGE_BIND;
	return 0;
}

/* Adds bytes on a node, to the last extent if that is on it. */
static int add(struct placement_extent *extents, int n, uint64_t bytes, uint32_t node)
{
	if (!bytes)
		return n;
	if (n && extents[n - 1].node == node) {
		extents[n - 1].bytes += bytes;
		return n;
	}
	extents[n] = (struct placement_extent){ bytes, node };
	return n + 1;
}

static int plan_weighted(const struct placement *placement, uint64_t bytes, uint64_t grain,
			 struct placement_extent *extents, uint32_t max)
{
	uint64_t units = bytes / grain + (bytes % grain != 0), weights = 0, rounds, left = bytes, spare = units;
	uint64_t taken[OFFSTAGE_NODES_MAX] = { 0 };
	int n = 0;

	for (uint32_t i = 0; i < placement->n; i++)
		weights += placement->weights[i];
	for (uint32_t i = 0; i < placement->n; i++)
		spare -= (uint64_t)((unsigned __int128)units * placement->weights[i] / weights);
	rounds = units / weights;
	if (rounds > max / placement->n)
		rounds = max / placement->n;
	if (!rounds)
		rounds = 1;
	for (uint64_t r = 1; r <= rounds; r++) {
		for (uint32_t i = 0; i < placement->n; i++) {
			uint64_t goal = (uint64_t)((unsigned __int128)units * placement->weights[i] * r / (rounds * weights));
			uint64_t block = (goal - taken[i] + (r == rounds && i < spare)) * grain;

			if (block > left)	/* the last grain needn't be whole */
				block = left;
			n = add(extents, n, block, placement->nodes[i]);
			taken[i] = goal;
			left -= block;
		}
	}
	return n;
}

static int plan_spill(const struct placement *placement, uint64_t bytes, uint64_t grain, const uint64_t *room,
		      struct placement_extent *extents)
{
	uint64_t left = bytes, all = 0;
	int n = 0;

	for (uint32_t i = 0; i < placement->n; i++) {
		uint64_t fits = room[i] / grain * grain, take = left <= room[i] ? left : fits;

		all = all + fits < all ? UINT64_MAX : all + fits;
		n = add(extents, n, take, placement->nodes[i]);
		left -= take;
	}
	if (left)
		return fail(-ENOMEM, "%s are needed and the %u nodes named have room for %s in all: ask for less, name more "
			    "nodes, or free memory on them", BYTES(bytes), placement->n, BYTES(all));
	return n;
}

int placement_plan(const struct placement *placement, uint64_t bytes, uint64_t grain, const uint64_t *room,
		   struct placement_extent *extents, uint32_t max)
{
	if (!bytes)
		return 0;
	switch (placement->kind) {
	case OFFSTAGE_WEIGHTED:
		return plan_weighted(placement, bytes, grain, extents, max);
	case OFFSTAGE_SPILL:
		return plan_spill(placement, bytes, grain, room, extents);
	case OFFSTAGE_INTERLEAVE:
		return add(extents, 0, bytes, PLACEMENT_INTERLEAVED);
	default:
		return add(extents, 0, bytes, placement->nodes[0]);
	}
}

void placement_share(const struct placement *placement, const struct placement_extent *extents, int n,
		     uint64_t bytes, uint64_t *share)
{
	for (uint32_t i = 0; i < placement->n; i++) {
		share[i] = 0;
		for (int k = 0; k < n; k++)
			if (extents[k].node == placement->nodes[i])
				share[i] += extents[k].bytes;
			else if (extents[k].node == PLACEMENT_INTERLEAVED)
				share[i] += bytes / placement->n + (bytes % placement->n != 0);
	}
}
