// SPDX-License-Identifier: GPL-2.0
/*
 * A pool's book-keeping, on the real pools of this machine's nodes. Run at load, when nobody has a buffer; what was
 * reserved before is reserved afterwards.
 */
#include <kunit/test.h>
#include <linux/delay.h>
#include <linux/kthread.h>
#include "offstage.h"

#define PAGES 6	/* that a test has a pool hold: 12 MiB */
#define PATTERN 0x5a

static u64 reserved_before[MAX_NUMNODES];

static struct pool_counts counts_of(int node)
{
	struct pool_counts counts;

	pool_counts(node, &counts);
	return counts;
}

static u64 huge_pages(u64 n)
{
	return n << PMD_SHIFT;
}

static void put(void *session)
{
	session_put(session);
}

static int remember(struct kunit *test)
{
	int node;

	test->priv = session_create();
	if (!test->priv)
		return -ENOMEM;
	node = kunit_add_action_or_reset(test, put, test->priv);
	if (node)
		return node;

	for_each_node_state(node, N_NORMAL_MEMORY) {
		reserved_before[node] = counts_of(node).reserved;
		if (pool_resize(node, 0))
			return -EBUSY;
	}
	return 0;
}

static void restore(struct kunit *test)
{
	int node;

	for_each_node_state(node, N_NORMAL_MEMORY)
		pool_resize(node, reserved_before[node]);
}

/* The one that the tests are about; pools know nothing of each other. */
static int here(void)
{
	return first_node(node_states[N_NORMAL_MEMORY]);
}

static void *bytes_of(struct page *page)
{
	return page_address(page);
}

static bool is_zero(struct page *page)
{
	return !memchr_inv(bytes_of(page), 0, PMD_SIZE);
}

/* The scrubber has nothing left: ten seconds are for ever. */
static bool scrubbed(int node)
{
	int i;

	for (i = 0; i < 500 && counts_of(node).scrubbing; i++)
		msleep(20);
	return !counts_of(node).scrubbing;
}

static struct page *take(struct kunit *test, int node)
{
	bool from_pool = false;
	struct page *page = pool_take(node, true, false, &from_pool);

	KUNIT_ASSERT_FALSE(test, IS_ERR(page));
	KUNIT_EXPECT_TRUE(test, from_pool);
	KUNIT_EXPECT_EQ(test, page_to_nid(page), node);
	KUNIT_EXPECT_EQ(test, page_ref_count(page), 1);
	KUNIT_EXPECT_EQ(test, compound_order(page), HUGE_ORDER);
	return page;
}

/* Nobody has pinned it. */
static void give(struct kunit *test, struct page *page, bool from_pool)
{
	KUNIT_EXPECT_TRUE(test, pool_give(page, from_pool, test->priv));
}

static void expect_counts(struct kunit *test, int node, u64 reserved, u64 free, u64 in_use)
{
	struct pool_counts counts = counts_of(node);

	KUNIT_EXPECT_EQ(test, counts.reserved, huge_pages(reserved));
	KUNIT_EXPECT_EQ(test, counts.free, huge_pages(free));
	KUNIT_EXPECT_EQ(test, counts.in_use, huge_pages(in_use));
}

static void test_every_node_has_a_pool_that_grows_and_shrinks(struct kunit *test)
{
	int node;

	for_each_node_state(node, N_NORMAL_MEMORY) {
		KUNIT_EXPECT_EQ(test, pool_node_check(node), 0);
		expect_counts(test, node, 0, 0, 0);
		KUNIT_EXPECT_EQ(test, pool_resize(node, huge_pages(PAGES)), huge_pages(PAGES));
		expect_counts(test, node, PAGES, PAGES, 0);
		KUNIT_EXPECT_EQ(test, pool_resize(node, huge_pages(2)), huge_pages(2));
		expect_counts(test, node, 2, 2, 0);
		KUNIT_EXPECT_EQ(test, pool_resize(node, 0), 0);
		expect_counts(test, node, 0, 0, 0);
	}
}

static void test_size_is_rounded_down_to_huge_pages(struct kunit *test)
{
	KUNIT_EXPECT_EQ(test, pool_resize(here(), huge_pages(2) - 1), huge_pages(1));
	KUNIT_EXPECT_EQ(test, pool_resize(here(), huge_pages(2)), huge_pages(2));
	KUNIT_EXPECT_EQ(test, pool_resize(here(), PMD_SIZE - 1), 0);
}

static void test_sizes_and_nodes_that_cannot_be_are_refused(struct kunit *test)
{
	u64 present = (u64)node_present_pages(here()) << PAGE_SHIFT;

	KUNIT_EXPECT_EQ(test, pool_resize(here(), present + PMD_SIZE), -ENOMEM);
	KUNIT_EXPECT_EQ(test, pool_resize(here(), U64_MAX), -ENOMEM);
	KUNIT_EXPECT_EQ(test, pool_resize(-1, 0), -ENODEV);
	KUNIT_EXPECT_EQ(test, pool_resize(MAX_NUMNODES - 1, 0), -ENODEV);
	KUNIT_EXPECT_EQ(test, pool_resize(MAX_NUMNODES, 0), -ENODEV);
	KUNIT_EXPECT_EQ(test, pool_resize(INT_MIN, 0), -ENODEV);
	KUNIT_EXPECT_EQ(test, pool_node_check(-1), -ENODEV);
	KUNIT_EXPECT_EQ(test, pool_node_check(MAX_NUMNODES), -ENODEV);
	KUNIT_EXPECT_EQ(test, pool_node_check(MAX_NUMNODES - 1), -ENODEV);
	expect_counts(test, here(), 0, 0, 0);
}

/* It isn't had whole: what was got is told, kept, and not waited for. */
static void test_more_than_there_is_gives_a_partial_result(struct kunit *test)
{
	u64 present = (u64)node_present_pages(here()) << PAGE_SHIFT;
	u64 failed = counts_of(here()).failed;
	s64 held = pool_resize(here(), present);

	KUNIT_ASSERT_GT(test, held, 0);
	KUNIT_EXPECT_LT(test, held, (s64)round_down(present, PMD_SIZE));
	KUNIT_EXPECT_EQ(test, counts_of(here()).reserved, held);
	KUNIT_EXPECT_GT(test, counts_of(here()).failed, failed);
	give(test, take(test, here()), true);
	KUNIT_EXPECT_EQ(test, counts_of(here()).reserved, held);
	KUNIT_EXPECT_EQ(test, pool_resize(here(), 0), 0);
	expect_counts(test, here(), 0, 0, 0);
}

static void test_page_is_taken_and_given_back(struct kunit *test)
{
	struct page *page[PAGES];
	bool from_pool = true;
	u32 i;

	pool_resize(here(), huge_pages(PAGES));
	for (i = 0; i < PAGES; i++) {
		page[i] = take(test, here());
		expect_counts(test, here(), PAGES, PAGES - i - 1, i + 1);
	}
	KUNIT_EXPECT_EQ(test, PTR_ERR(pool_take(here(), true, false, &from_pool)), -ENOMEM);
	KUNIT_EXPECT_FALSE(test, from_pool);
	expect_counts(test, here(), PAGES, 0, PAGES);
	for (i = 0; i < PAGES; i++) {
		give(test, page[i], true);
		expect_counts(test, here(), PAGES, i + 1, PAGES - i - 1);
	}
}

static void test_page_that_comes_back_is_scrubbed_in_the_background(struct kunit *test)
{
	struct page *page;

	pool_resize(here(), huge_pages(1));
	page = take(test, here());
	memset(bytes_of(page), PATTERN, PMD_SIZE);
	give(test, page, true);
	KUNIT_EXPECT_TRUE(test, scrubbed(here()));
	KUNIT_EXPECT_TRUE(test, is_zero(page));	/* nobody has taken it */
	expect_counts(test, here(), 1, 1, 0);
}

/* Whether the scrubber was first or not: a page that is wanted at once is clear. */
static void test_page_that_is_taken_at_once_is_zero(struct kunit *test)
{
	struct page *page[2];
	int round;

	pool_resize(here(), huge_pages(2));
	for (round = 0; round < 10; round++) {
		page[0] = take(test, here());
		page[1] = take(test, here());
		KUNIT_EXPECT_TRUE(test, is_zero(page[0]));
		KUNIT_EXPECT_TRUE(test, is_zero(page[1]));
		memset(bytes_of(page[0]), PATTERN, PMD_SIZE);
		memset(bytes_of(page[1]), PATTERN, PMD_SIZE);
		give(test, page[0], true);
		give(test, page[1], true);
	}
	expect_counts(test, here(), 2, 2, 0);
}

static u64 charged(struct kunit *test)
{
	u64 file, user, all;

	limits_used(test->priv, &file, &user, &all);
	return file;
}

/* Two pages: the one that somebody has pinned, and one that nobody has, which must not be taken for it. */
static void test_page_that_somebody_holds_is_theirs_until_they_let_go(struct kunit *test)
{
	struct page *page, *other;
	u32 limit;
	int i;

	KUNIT_ASSERT_EQ(test, limits_charge(test->priv, PMD_SIZE, &limit), 0);	/* as its buffer was */
	pool_resize(here(), huge_pages(2));
	page = take(test, here());
	get_page(page);
	memset(bytes_of(page), PATTERN, PMD_SIZE);
	KUNIT_EXPECT_FALSE(test, pool_give(page, true, test->priv));
	KUNIT_EXPECT_EQ(test, counts_of(here()).orphaned, PMD_SIZE);
	KUNIT_EXPECT_EQ(test, charged(test), PMD_SIZE);
	expect_counts(test, here(), 2, 1, 0);
	other = take(test, here());
	KUNIT_EXPECT_PTR_NE(test, other, page);
	give(test, other, true);
	KUNIT_EXPECT_TRUE(test, scrubbed(here()));
	msleep(2500);	/* longer than it takes to look for orphans: it isn't cleared under their hands */
	KUNIT_EXPECT_NULL(test, memchr_inv(bytes_of(page), PATTERN, PMD_SIZE));
	KUNIT_EXPECT_EQ(test, counts_of(here()).orphaned, PMD_SIZE);
	KUNIT_EXPECT_EQ(test, pool_resize(here(), 0), huge_pages(1));	/* what is in use isn't taken */
	KUNIT_EXPECT_EQ(test, pool_resize(here(), huge_pages(2)), huge_pages(2));
	put_page(page);
	for (i = 0; i < 500 && counts_of(here()).orphaned; i++)
		msleep(20);
	KUNIT_EXPECT_EQ(test, counts_of(here()).orphaned, 0);
	KUNIT_EXPECT_EQ(test, charged(test), 0);
	expect_counts(test, here(), 2, 2, 0);
	KUNIT_EXPECT_TRUE(test, scrubbed(here()));
	page = take(test, here());
	other = take(test, here());
	KUNIT_EXPECT_TRUE(test, is_zero(page));
	KUNIT_EXPECT_TRUE(test, is_zero(other));
	give(test, page, true);
	give(test, other, true);
}

static void test_target_below_what_is_in_use_takes_pages_as_they_come_back(struct kunit *test)
{
	struct page *page[3];
	u32 i;

	pool_resize(here(), huge_pages(4));
	for (i = 0; i < 3; i++)
		page[i] = take(test, here());
	KUNIT_EXPECT_EQ(test, pool_resize(here(), huge_pages(1)), huge_pages(3));
	expect_counts(test, here(), 3, 0, 3);
	give(test, page[0], true);
	expect_counts(test, here(), 2, 0, 2);
	give(test, page[1], true);
	expect_counts(test, here(), 1, 0, 1);
	give(test, page[2], true);
	expect_counts(test, here(), 1, 1, 0);
}

static void test_system_serves_when_the_pool_is_empty(struct kunit *test)
{
	bool from_pool = true;
	struct page *page;

	page = pool_take(here(), false, true, &from_pool);
	KUNIT_ASSERT_FALSE(test, IS_ERR(page));
	KUNIT_EXPECT_FALSE(test, from_pool);
	KUNIT_EXPECT_TRUE(test, is_zero(page));
	expect_counts(test, here(), 0, 0, 1);
	give(test, page, false);
	expect_counts(test, here(), 0, 0, 0);
}

static void test_base_pages_are_counted_and_go_back_to_the_system(struct kunit *test)
{
	struct page *page = pool_take_base(here());

	KUNIT_ASSERT_FALSE(test, IS_ERR(page));
	KUNIT_EXPECT_EQ(test, compound_order(page), 0);
	KUNIT_EXPECT_NULL(test, memchr_inv(bytes_of(page), 0, PAGE_SIZE));
	KUNIT_EXPECT_EQ(test, counts_of(here()).in_use, PAGE_SIZE);
	give(test, page, false);
	expect_counts(test, here(), 0, 0, 0);
}

static void test_nodes_limit_is_for_what_the_system_gives(struct kunit *test)
{
	u64 before = limit_node;
	struct page *reserved, *huge, *base;
	bool from_pool;

	pool_resize(here(), huge_pages(1));
	limit_node = PMD_SIZE + PAGE_SIZE;
	reserved = take(test, here());	/* counts for nothing */
	huge = pool_take(here(), false, true, &from_pool);
	base = pool_take_base(here());
	KUNIT_EXPECT_FALSE(test, IS_ERR(huge));
	KUNIT_EXPECT_FALSE(test, IS_ERR(base));
	KUNIT_EXPECT_EQ(test, PTR_ERR(pool_take_base(here())), -EDQUOT);
	KUNIT_EXPECT_EQ(test, PTR_ERR(pool_take(here(), false, true, &from_pool)), -EDQUOT);
	give(test, base, false);
	KUNIT_EXPECT_EQ(test, PTR_ERR(pool_take(here(), false, true, &from_pool)), -EDQUOT);
	give(test, huge, false);
	give(test, reserved, true);
	huge = pool_take(here(), false, true, &from_pool);
	KUNIT_EXPECT_TRUE(test, from_pool);	/* the reserve comes first */
	give(test, huge, from_pool);
	limit_node = before;
	expect_counts(test, here(), 1, 1, 0);
}

#define TAKERS 3

struct taker {
	struct task_struct *task;
	struct session *session;
	unsigned int taken, dirty, kept;
};

static int take_and_give(void *argument)
{
	struct taker *taker = argument;
	struct page *page[2];
	bool from_pool;
	u32 i, n;

	while (!kthread_should_stop()) {
		for (n = 0; n < 2; n++) {
			page[n] = pool_take(here(), true, false, &from_pool);
			if (IS_ERR(page[n]))
				break;
			taker->dirty += !is_zero(page[n]);
			memset(bytes_of(page[n]), PATTERN, PMD_SIZE);
		}
		for (i = 0; i < n; i++)
			taker->kept += !pool_give(page[i], true, taker->session);
		taker->taken += n;
		cond_resched();
	}
	return 0;
}

static void test_pool_is_resized_while_others_take_from_it(struct kunit *test)
{
	static const u64 sizes[] = { 6, 1, 4, 0, 3, 5, 2 };
	struct taker takers[TAKERS] = {};
	u32 i;

	pool_resize(here(), huge_pages(PAGES));
	for (i = 0; i < TAKERS; i++) {
		takers[i].session = test->priv;
		takers[i].task = kthread_run(take_and_give, &takers[i], "offstage-taker");
		KUNIT_EXPECT_FALSE(test, IS_ERR(takers[i].task));
	}
	for (i = 0; i < 20 * ARRAY_SIZE(sizes); i++) {
		u64 wanted = sizes[i % ARRAY_SIZE(sizes)];
		s64 held = pool_resize(here(), huge_pages(wanted));

		/* What is in use stays: not less than wanted, and not more than that and what they have. */
		KUNIT_EXPECT_GE(test, held, (s64)huge_pages(wanted));
		KUNIT_EXPECT_LE(test, held, (s64)huge_pages(wanted + 2 * TAKERS));
		usleep_range(200, 2000);
	}
	for (i = 0; i < TAKERS; i++) {
		if (IS_ERR(takers[i].task))
			continue;
		kthread_stop(takers[i].task);
		KUNIT_EXPECT_GT(test, takers[i].taken, 0);
		KUNIT_EXPECT_EQ(test, takers[i].dirty, 0);
		KUNIT_EXPECT_EQ(test, takers[i].kept, 0);
	}
	expect_counts(test, here(), sizes[ARRAY_SIZE(sizes) - 1], sizes[ARRAY_SIZE(sizes) - 1], 0);
	KUNIT_EXPECT_TRUE(test, scrubbed(here()));
}

static struct kunit_case cases[] = {
	KUNIT_CASE(test_every_node_has_a_pool_that_grows_and_shrinks),
	KUNIT_CASE(test_size_is_rounded_down_to_huge_pages),
	KUNIT_CASE(test_sizes_and_nodes_that_cannot_be_are_refused),
	KUNIT_CASE(test_more_than_there_is_gives_a_partial_result),
	KUNIT_CASE(test_page_is_taken_and_given_back),
	KUNIT_CASE(test_page_that_comes_back_is_scrubbed_in_the_background),
	KUNIT_CASE(test_page_that_is_taken_at_once_is_zero),
	KUNIT_CASE(test_page_that_somebody_holds_is_theirs_until_they_let_go),
	KUNIT_CASE(test_target_below_what_is_in_use_takes_pages_as_they_come_back),
	KUNIT_CASE(test_system_serves_when_the_pool_is_empty),
	KUNIT_CASE(test_base_pages_are_counted_and_go_back_to_the_system),
	KUNIT_CASE(test_nodes_limit_is_for_what_the_system_gives),
	KUNIT_CASE(test_pool_is_resized_while_others_take_from_it),
	{}
};

static struct kunit_suite suite = { .name = "offstage_pool", .init = remember, .exit = restore, .test_cases = cases };
kunit_test_suite(suite);
