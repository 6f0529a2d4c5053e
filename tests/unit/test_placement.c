/* SPDX-License-Identifier: MIT */
/* The arithmetic of placement: every byte goes to one named node, in the proportion asked for, in few extents. */
#include <stdlib.h>
#include "unit.h"
#include "../../lib/placement.h"

#define MiB ((uint64_t)1 << 20)
#define GiB ((uint64_t)1 << 30)
#define GRAIN (2 * MiB)

static const uint32_t three[] = { 0, 2, 5 }, twice[] = { 1, 3, 1 };

static int check(uint32_t kind, uint32_t n, const uint32_t *nodes, const uint32_t *weights, struct placement *out)
{
	struct offstage_buffer_options options = {
		.size = sizeof(options), .placement = kind, .n_nodes = n, .nodes = nodes, .weights = weights,
	};

	return placement_check(out, &options, 7);
}

static void test_wrong_options_are_refused_with_their_reason(void **unused)
{
	const uint32_t good[] = { 12, 5, 1 }, zero[] = { 12, 0, 1 }, large[] = { 12, 1001, 1 };
	uint32_t many[OFFSTAGE_NODES_MAX + 1];
	struct placement p;

	(void)unused;
	for (uint32_t i = 0; i <= OFFSTAGE_NODES_MAX; i++)
		many[i] = i;
	REFUSED(check(5, 0, NULL, NULL, &p), -EINVAL, "enum offstage_placement");
	REFUSED(check(OFFSTAGE_LOCAL, 1, three, NULL, &p), -EINVAL, "names no nodes");
	REFUSED(check(OFFSTAGE_LOCAL, 0, three, NULL, &p), -EINVAL, "names no nodes");
	REFUSED(check(OFFSTAGE_BIND, 0, NULL, NULL, &p), -EINVAL, "needs nodes");
	REFUSED(check(OFFSTAGE_BIND, 1, NULL, NULL, &p), -EINVAL, "needs nodes");
	REFUSED(check(OFFSTAGE_BIND, 2, three, NULL, &p), -EINVAL, "takes one node");
	REFUSED(check(OFFSTAGE_INTERLEAVE, 0, three, NULL, &p), -EINVAL, "needs nodes");
	REFUSED(check(OFFSTAGE_INTERLEAVE, 3, twice, NULL, &p), -EINVAL, "node 1 is named twice");
	REFUSED(check(OFFSTAGE_SPILL, OFFSTAGE_NODES_MAX + 1, many, NULL, &p), -EINVAL, "at most 64");
	REFUSED(check(OFFSTAGE_SPILL, 3, three, good, &p), -EINVAL, "isn't OFFSTAGE_WEIGHTED");
	REFUSED(check(OFFSTAGE_LOCAL, 0, NULL, good, &p), -EINVAL, "isn't OFFSTAGE_WEIGHTED");
	REFUSED(check(OFFSTAGE_WEIGHTED, 3, three, NULL, &p), -EINVAL, "needs a weight");
	REFUSED(check(OFFSTAGE_WEIGHTED, 3, three, zero, &p), -EINVAL, "weight of node 2 is 0");
	REFUSED(check(OFFSTAGE_WEIGHTED, 3, three, large, &p), -EINVAL, "weights are 1 to 1000");
	OK(check(OFFSTAGE_SPILL, OFFSTAGE_NODES_MAX, many, NULL, &p));
	OK(check(OFFSTAGE_WEIGHTED, 3, three, good, &p));
	assert_int_equal(p.weights[1], 5);
}

static void test_local_becomes_bind_to_the_local_node(void **unused)
{
	struct placement p;

	(void)unused;
	OK(check(OFFSTAGE_LOCAL, 0, NULL, NULL, &p));
	assert_int_equal(p.kind, OFFSTAGE_BIND);
	assert_int_equal(p.n, 1);
	assert_int_equal(p.nodes[0], 7);
}

/* Plans and checks what holds for every plan; returns the number of extents. share gets the bytes per node. */
static int plan(const struct placement *p, uint64_t bytes, uint64_t grain, const uint64_t *room, uint64_t *share)
{
	struct placement_extent extents[PLACEMENT_EXTENTS];
	int n = placement_plan(p, bytes, grain, room, extents, PLACEMENT_EXTENTS);
	uint64_t sum = 0, shares = 0;

	if (n < 0)
		return n;
	assert_true(n <= PLACEMENT_EXTENTS);
	for (int k = 0; k < n; k++) {
		assert_true(extents[k].bytes > 0);
		if (k + 1 < n)
			assert_int_equal(extents[k].bytes % grain, 0);
		if (k)
			assert_int_not_equal(extents[k].node, extents[k - 1].node);
		sum += extents[k].bytes;
	}
	assert_int_equal(sum, bytes);
	placement_share(p, extents, n, bytes, share);
	for (uint32_t i = 0; i < p->n; i++)
		shares += share[i];
	assert_true(shares >= bytes && shares <= bytes + p->n);
	return n;
}

static void test_bind_is_one_extent_and_nothing_is_none(void **unused)
{
	uint64_t share[OFFSTAGE_NODES_MAX];
	struct placement p;

	(void)unused;
	OK(check(OFFSTAGE_BIND, 1, three + 1, NULL, &p));
	assert_int_equal(plan(&p, 3 * GiB + 4096, GRAIN, NULL, share), 1);
	assert_int_equal(share[0], 3 * GiB + 4096);
	assert_int_equal(plan(&p, 0, GRAIN, NULL, share), 0);
	assert_int_equal(share[0], 0);
}

static void test_interleave_shares_evenly(void **unused)
{
	uint64_t share[OFFSTAGE_NODES_MAX];
	struct placement p;

	(void)unused;
	OK(check(OFFSTAGE_INTERLEAVE, 3, three, NULL, &p));
	assert_int_equal(plan(&p, 3 * GiB + 1, GRAIN, NULL, share), 1);
	assert_int_equal(share[0], GiB + 1);
	assert_int_equal(share[2], GiB + 1);
}

static void test_weights_are_kept_at_any_size(void **unused)
{
	const uint32_t weights[] = { 12, 5, 1 }, extreme[] = { 1000, 1, 1 };
	uint64_t share[OFFSTAGE_NODES_MAX];
	struct placement p;

	(void)unused;
	OK(check(OFFSTAGE_WEIGHTED, 2, three, weights, &p));
	/* 17 grains are 12 and 5, and so are 17 times as many as fit. */
	assert_int_equal(plan(&p, 17 * GRAIN, GRAIN, NULL, share), 2);
	assert_int_equal(share[0], 12 * GRAIN);
	assert_int_equal(plan(&p, 170 * GRAIN, GRAIN, NULL, share), 20);
	assert_int_equal(share[1], 50 * GRAIN);
	/* A terabyte has as many extents as are allowed, and not one more. */
	assert_int_equal(plan(&p, 1024 * GiB, GRAIN, NULL, share), PLACEMENT_EXTENTS);
	assert_true(share[0] / 12 - share[1] / 5 < PLACEMENT_EXTENTS * GRAIN ||
		    share[1] / 5 - share[0] / 12 < PLACEMENT_EXTENTS * GRAIN);
	OK(check(OFFSTAGE_WEIGHTED, 3, three, weights, &p));
	for (uint64_t bytes = 1; bytes < 4 * GiB; bytes = bytes * 3 + 4093) {
		int n = plan(&p, bytes, 4096, NULL, share);

		OK(n);
		for (uint32_t i = 0; i < 3; i++) {
			uint64_t ideal = bytes * weights[i] / 18;

			assert_true(share[i] + 4096 * 2 > ideal && share[i] < ideal + 4096 * 2);
		}
	}
	OK(check(OFFSTAGE_WEIGHTED, 3, three, extreme, &p));
	OK(plan(&p, GiB, GRAIN, NULL, share));
	assert_true(share[0] >= GiB - 2 * GRAIN);
}

static void test_any_weights_cover_every_byte_once(void **unused)
{
	uint32_t nodes[OFFSTAGE_NODES_MAX], weights[OFFSTAGE_NODES_MAX];
	uint64_t share[OFFSTAGE_NODES_MAX];
	unsigned seed = 3;
	struct placement p;

	(void)unused;
	for (int round = 0; round < 3000; round++) {
		uint32_t n = 1 + (uint32_t)rand_r(&seed) % OFFSTAGE_NODES_MAX;
		uint64_t bytes = ((uint64_t)rand_r(&seed) << 24 ^ (uint64_t)rand_r(&seed)) >> rand_r(&seed) % 50;

		for (uint32_t i = 0; i < n; i++) {
			nodes[i] = i * 3;
			weights[i] = 1 + (uint32_t)rand_r(&seed) % 1000;
		}
		OK(check(OFFSTAGE_WEIGHTED, n, nodes, weights, &p));
		OK(plan(&p, bytes, rand_r(&seed) % 2 ? 4096 : GRAIN, NULL, share));
	}
	/* The largest that a request may be doesn't overflow. */
	OK(plan(&p, (uint64_t)1 << 56, 4096, NULL, share));
}

static void test_spill_fills_in_order_and_says_when_it_cannot(void **unused)
{
	const uint64_t room[] = { GiB + 4096, 0, 512 * MiB };
	uint64_t share[OFFSTAGE_NODES_MAX];
	struct placement p;

	(void)unused;
	OK(check(OFFSTAGE_SPILL, 3, three, NULL, &p));
	assert_int_equal(plan(&p, GiB + 4096, GRAIN, room, share), 1);
	assert_int_equal(share[0], GiB + 4096);
	/* What is filled up ends at a whole grain; a node with no room is passed over. */
	assert_int_equal(plan(&p, GiB + 8192, GRAIN, room, share), 2);
	assert_int_equal(share[0], GiB);
	assert_int_equal(share[1], 0);
	assert_int_equal(share[2], 8192);
	assert_int_equal(plan(&p, GiB + 512 * MiB, GRAIN, room, share), 2);
	REFUSED(plan(&p, GiB + 513 * MiB, GRAIN, room, share), -ENOMEM, "have room for 1.50 GiB in all");
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_wrong_options_are_refused_with_their_reason),
		cmocka_unit_test(test_local_becomes_bind_to_the_local_node),
		cmocka_unit_test(test_bind_is_one_extent_and_nothing_is_none),
		cmocka_unit_test(test_interleave_shares_evenly),
		cmocka_unit_test(test_weights_are_kept_at_any_size),
		cmocka_unit_test(test_any_weights_cover_every_byte_once),
		cmocka_unit_test(test_spill_fills_in_order_and_says_when_it_cannot),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
