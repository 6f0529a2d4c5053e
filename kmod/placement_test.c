// SPDX-License-Identifier: GPL-2.0
/* Placement's arithmetic: which huge page goes where, and every refusal. */
#include <kunit/test.h>
#include "offstage.h"

static struct placement *place(struct kunit *test, u32 kind, u32 n, const u32 *nodes, const u32 *weights)
{
	struct placement *placement = kunit_kzalloc(test, sizeof(*placement), GFP_KERNEL);
	u32 i;

	KUNIT_ASSERT_NOT_NULL(test, placement);
	placement->kind = kind;
	placement->n = n;
	for (i = 0; i < n && i < OFFSTAGE_IOC_NODES_MAX; i++) {
		placement->nodes[i] = nodes ? nodes[i] : i;
		placement->weights[i] = weights ? weights[i] : 0;
	}
	return placement;
}

static void test_bind_gives_every_page_to_its_one_node(struct kunit *test)
{
	static const u32 node[] = { 5 };
	struct placement *p = place(test, OFFSTAGE_IOC_BIND, 1, node, NULL);

	KUNIT_EXPECT_EQ(test, placement_check(p), 0);
	KUNIT_EXPECT_EQ(test, placement_index(p, 0), 0);
	KUNIT_EXPECT_EQ(test, placement_index(p, 12345), 0);
	KUNIT_EXPECT_EQ(test, placement_index(p, ULONG_MAX), 0);
}

static void test_interleave_takes_turns_over_any_number_of_nodes(struct kunit *test)
{
	u32 n;

	for (n = 1; n <= OFFSTAGE_IOC_NODES_MAX; n++) {
		struct placement *p = place(test, OFFSTAGE_IOC_INTERLEAVE, n, NULL, NULL);
		unsigned long i;

		KUNIT_EXPECT_EQ(test, placement_check(p), 0);
		for (i = 0; i < 3 * n + 1; i++)
			KUNIT_EXPECT_EQ(test, placement_index(p, i), i % n);
		kunit_kfree(test, p);
	}
}

static void test_order_of_nodes_is_the_callers(struct kunit *test)
{
	static const u32 nodes[] = { 7, 0, 3 };
	struct placement *p = place(test, OFFSTAGE_IOC_INTERLEAVE, 3, nodes, NULL);

	KUNIT_EXPECT_EQ(test, placement_check(p), 0);
	KUNIT_EXPECT_EQ(test, p->nodes[placement_index(p, 0)], 7);
	KUNIT_EXPECT_EQ(test, p->nodes[placement_index(p, 1)], 0);
	KUNIT_EXPECT_EQ(test, p->nodes[placement_index(p, 2)], 3);
	KUNIT_EXPECT_EQ(test, p->nodes[placement_index(p, 3)], 7);
}

struct weights {
	const char *name;
	u32 n, weights[5];
};

static const struct weights weights[] = {
	{ "one node", 1, { 7 } },
	{ "equal", 2, { 1, 1 } },
	{ "three to one", 2, { 3, 1 } },
	{ "an odd set", 3, { 2, 3, 5 } },
	{ "five nodes", 5, { 1, 1, 4, 1, 9 } },
	{ "the smallest beside the largest", 2, { 1, 1000 } },
	{ "the largest", 3, { 1000, 1000, 1000 } },
};

KUNIT_ARRAY_PARAM_DESC(weights, weights, name);

static void test_every_turn_has_each_node_as_often_as_its_weight(struct kunit *test)
{
	const struct weights *w = test->param_value;
	struct placement *p = place(test, OFFSTAGE_IOC_WEIGHTED, w->n, NULL, w->weights);
	unsigned long i, total = 0, from;
	u32 node, turn;

	KUNIT_ASSERT_EQ(test, placement_check(p), 0);
	for (node = 0; node < w->n; node++)
		total += w->weights[node];
	for (turn = 0, from = 0; turn < 3; turn++, from += total) {
		u32 seen[5] = {};

		for (i = 0; i < total; i++) {
			node = placement_index(p, from + i);
			KUNIT_ASSERT_LT(test, node, w->n);
			seen[node]++;
		}
		for (node = 0; node < w->n; node++)
			KUNIT_EXPECT_EQ(test, seen[node], w->weights[node]);
	}
}

static void test_indices_that_overflow_32_bits_stay_in_turn(struct kunit *test)
{
	static const u32 three[] = { 1, 1, 1 };
	struct placement *interleave = place(test, OFFSTAGE_IOC_INTERLEAVE, 3, NULL, NULL);
	struct placement *weighted = place(test, OFFSTAGE_IOC_WEIGHTED, 3, NULL, three);
	static const unsigned long at[] = { U32_MAX - 1ul, U32_MAX, U32_MAX + 1ul, U32_MAX + 2ul, ULONG_MAX };
	u32 i;

	for (i = 0; i < ARRAY_SIZE(at); i++) {
		KUNIT_EXPECT_EQ(test, placement_index(interleave, at[i]), at[i] % 3);
		KUNIT_EXPECT_EQ(test, placement_index(weighted, at[i]), at[i] % 3);
	}
}

static void test_largest_sum_of_weights_is_no_overflow(struct kunit *test)
{
	struct placement *p = place(test, OFFSTAGE_IOC_WEIGHTED, OFFSTAGE_IOC_NODES_MAX, NULL, NULL);
	u32 i;

	for (i = 0; i < OFFSTAGE_IOC_NODES_MAX; i++)
		p->weights[i] = 1000;
	KUNIT_EXPECT_EQ(test, placement_index(p, 0), 0);
	KUNIT_EXPECT_EQ(test, placement_index(p, 63999), 63);
	KUNIT_EXPECT_EQ(test, placement_index(p, 64000), 0);
	KUNIT_EXPECT_EQ(test, placement_index(p, 64000ul * 1000000 + 999), 0);
	KUNIT_EXPECT_EQ(test, placement_index(p, 64000ul * 1000000 + 1000), 1);
}

/* Spilling goes by what is free, not by the index: pool_test.c and the virtual machine's tests see to the rest. */
static void test_spill_begins_with_the_first_node(struct kunit *test)
{
	static const u32 nodes[] = { 2, 1, 0 };
	struct placement *p = place(test, OFFSTAGE_IOC_SPILL, 3, nodes, NULL);

	KUNIT_EXPECT_EQ(test, placement_check(p), 0);
	KUNIT_EXPECT_EQ(test, placement_index(p, 9), 0);
}

struct refusal {
	const char *name;
	int error;
	u32 kind, n;
	u32 nodes[3], weights[3];
};

static const struct refusal refusals[] = {
	{ "no node", -EINVAL, OFFSTAGE_IOC_INTERLEAVE, 0 },
	{ "more nodes than there can be", -EINVAL, OFFSTAGE_IOC_INTERLEAVE, OFFSTAGE_IOC_NODES_MAX + 1 },
	{ "a number of nodes that overflows", -EINVAL, OFFSTAGE_IOC_SPILL, U32_MAX },
	{ "bind to none", -EINVAL, OFFSTAGE_IOC_BIND, 0 },
	{ "bind to two", -EINVAL, OFFSTAGE_IOC_BIND, 2, { 0, 1 } },
	{ "a node twice", -EINVAL, OFFSTAGE_IOC_INTERLEAVE, 2, { 1, 1 } },
	{ "a node twice, apart", -EINVAL, OFFSTAGE_IOC_SPILL, 3, { 1, 0, 1 } },
	{ "the first node past all", -ENODEV, OFFSTAGE_IOC_BIND, 1, { MAX_NUMNODES } },
	{ "a negative node", -ENODEV, OFFSTAGE_IOC_INTERLEAVE, 2, { 0, U32_MAX } },
	{ "weight 0", -EINVAL, OFFSTAGE_IOC_WEIGHTED, 2, { 0, 1 }, { 1, 0 } },
	{ "weight 1001", -EINVAL, OFFSTAGE_IOC_WEIGHTED, 2, { 0, 1 }, { 1001, 1 } },
	{ "a weight that overflows", -EINVAL, OFFSTAGE_IOC_WEIGHTED, 2, { 0, 1 }, { U32_MAX, 1 } },
};

KUNIT_ARRAY_PARAM_DESC(refusals, refusals, name);

static void test_placements_that_cannot_be_are_refused(struct kunit *test)
{
	const struct refusal *r = test->param_value;
	struct placement *p = place(test, r->kind, min(r->n, 3u), r->nodes, r->weights);

	p->n = r->n;
	KUNIT_EXPECT_EQ(test, placement_check(p), r->error);
}

static void test_weights_at_their_limits_are_taken(struct kunit *test)
{
	static const u32 extremes[] = { 1, 1000 };

	KUNIT_EXPECT_EQ(test, placement_check(place(test, OFFSTAGE_IOC_WEIGHTED, 2, NULL, extremes)), 0);
}

static void test_weights_mean_nothing_elsewhere(struct kunit *test)
{
	static const u32 nodes[] = { 0, MAX_NUMNODES - 1 }, rubbish[] = { 0, U32_MAX };

	KUNIT_EXPECT_EQ(test, placement_check(place(test, OFFSTAGE_IOC_INTERLEAVE, 2, nodes, rubbish)), 0);
	KUNIT_EXPECT_EQ(test, placement_check(place(test, OFFSTAGE_IOC_SPILL, 2, nodes, rubbish)), 0);
}

static struct kunit_case cases[] = {
	KUNIT_CASE(test_bind_gives_every_page_to_its_one_node),
	KUNIT_CASE(test_interleave_takes_turns_over_any_number_of_nodes),
	KUNIT_CASE(test_order_of_nodes_is_the_callers),
	KUNIT_CASE_PARAM(test_every_turn_has_each_node_as_often_as_its_weight, weights_gen_params),
	KUNIT_CASE(test_indices_that_overflow_32_bits_stay_in_turn),
	KUNIT_CASE(test_largest_sum_of_weights_is_no_overflow),
	KUNIT_CASE(test_spill_begins_with_the_first_node),
	KUNIT_CASE_PARAM(test_placements_that_cannot_be_are_refused, refusals_gen_params),
	KUNIT_CASE(test_weights_at_their_limits_are_taken),
	KUNIT_CASE(test_weights_mean_nothing_elsewhere),
	{}
};

static struct kunit_suite suite = { .name = "offstage_placement", .test_cases = cases };
kunit_test_suite(suite);
