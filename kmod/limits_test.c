// SPDX-License-Identifier: GPL-2.0
/* Limits: of an open file, of a user, of all; at the byte. Run while nobody has a buffer. */
#include <kunit/test.h>
#include <linux/cred.h>
#include "offstage.h"

static u64 file_before, user_before, all_before;

static int remember(struct kunit *test)
{
	file_before = limit_file;
	user_before = limit_user;
	all_before = limit_all;
	limit_file = 0;
	limit_user = 0;
	limit_all = 0;
	return 0;
}

static void restore(struct kunit *test)
{
	limit_file = file_before;
	limit_user = user_before;
	limit_all = all_before;
}

static void put(void *session)
{
	session_put(session);
}

/* A session of that user, put when the test ends. */
static struct session *session_of(struct kunit *test, uid_t uid)
{
	struct cred *other = prepare_creds();
	const struct cred *before;
	struct session *session;

	KUNIT_ASSERT_NOT_NULL(test, other);
	other->uid = KUIDT_INIT(uid);
	before = override_creds(other);
	session = session_create();
	revert_creds(before);
	put_cred(other);
	KUNIT_ASSERT_NOT_NULL(test, session);
	KUNIT_ASSERT_EQ(test, kunit_add_action_or_reset(test, put, session), 0);
	return session;
}

static void expect_used(struct kunit *test, struct session *session, u64 file, u64 user, u64 all)
{
	u64 is_file, is_user, is_all;

	limits_used(session, &is_file, &is_user, &is_all);
	KUNIT_EXPECT_EQ(test, is_file, file);
	KUNIT_EXPECT_EQ(test, is_user, user);
	KUNIT_EXPECT_EQ(test, is_all, all);
}

static void expect_taken(struct kunit *test, struct session *session, u64 bytes)
{
	u32 limit = 99;

	KUNIT_EXPECT_EQ(test, limits_charge(session, bytes, &limit), 0);
	KUNIT_EXPECT_EQ(test, limit, OFFSTAGE_IOC_LIMIT_NONE);
}

/* And nothing is charged. */
static void expect_refused(struct kunit *test, struct session *session, u64 bytes, u32 by)
{
	u64 file, user, all;
	u32 limit = 99;

	limits_used(session, &file, &user, &all);
	KUNIT_EXPECT_EQ(test, limits_charge(session, bytes, &limit), -EDQUOT);
	KUNIT_EXPECT_EQ(test, limit, by);
	expect_used(test, session, file, user, all);
}

static void test_file_may_have_its_limit_and_no_byte_more(struct kunit *test)
{
	struct session *session = session_of(test, 4001), *other = session_of(test, 4001);

	limit_file = 10000;
	expect_refused(test, session, 10001, OFFSTAGE_IOC_LIMIT_FILE);
	expect_taken(test, session, 9999);
	expect_refused(test, session, 2, OFFSTAGE_IOC_LIMIT_FILE);
	expect_taken(test, session, 1);
	expect_refused(test, session, 1, OFFSTAGE_IOC_LIMIT_FILE);
	expect_taken(test, other, 10000);	/* another file of the same user's */
	expect_used(test, session, 10000, 20000, 20000);
	limits_uncharge(session, 10000);
	expect_taken(test, session, 10000);
	limits_uncharge(session, 10000);
	limits_uncharge(other, 10000);
	expect_used(test, session, 0, 0, 0);
}

static void test_user_may_have_their_limit_over_all_files(struct kunit *test)
{
	struct session *a = session_of(test, 4001), *b = session_of(test, 4001), *other = session_of(test, 4002);

	limit_user = 10000;
	expect_taken(test, a, 6000);
	expect_refused(test, b, 4001, OFFSTAGE_IOC_LIMIT_USER);
	expect_taken(test, b, 4000);
	expect_refused(test, a, 1, OFFSTAGE_IOC_LIMIT_USER);
	expect_taken(test, other, 10000);	/* somebody else has one of their own */
	expect_used(test, b, 4000, 10000, 20000);
	expect_used(test, other, 10000, 10000, 20000);
	limits_uncharge(a, 6000);
	expect_taken(test, b, 6000);
	limits_uncharge(b, 10000);
	limits_uncharge(other, 10000);
	expect_used(test, a, 0, 0, 0);
}

static void test_all_together_may_have_theirs(struct kunit *test)
{
	struct session *a = session_of(test, 4001), *b = session_of(test, 4002);

	limit_all = 10000;
	expect_taken(test, a, 9000);
	expect_refused(test, b, 1001, OFFSTAGE_IOC_LIMIT_ALL);
	expect_taken(test, b, 1000);
	expect_refused(test, a, 1, OFFSTAGE_IOC_LIMIT_ALL);
	limits_uncharge(a, 9000);
	limits_uncharge(b, 1000);
	expect_used(test, a, 0, 0, 0);
}

static void test_nearest_limit_is_named_first(struct kunit *test)
{
	struct session *session = session_of(test, 4001);

	limit_file = 1;
	limit_user = 1;
	limit_all = 1;
	expect_refused(test, session, 2, OFFSTAGE_IOC_LIMIT_FILE);
	limit_file = 0;
	expect_refused(test, session, 2, OFFSTAGE_IOC_LIMIT_USER);
	limit_user = 0;
	expect_refused(test, session, 2, OFFSTAGE_IOC_LIMIT_ALL);
}

static void test_zero_is_no_limit(struct kunit *test)
{
	struct session *session = session_of(test, 4001);

	expect_taken(test, session, S64_MAX);
	limits_uncharge(session, S64_MAX);
	expect_used(test, session, 0, 0, 0);
}

static void test_sums_that_overflow_are_refused(struct kunit *test)
{
	struct session *session = session_of(test, 4001);

	limit_file = U64_MAX;
	expect_taken(test, session, 5);
	expect_refused(test, session, U64_MAX, OFFSTAGE_IOC_LIMIT_FILE);
	expect_refused(test, session, U64_MAX - 4, OFFSTAGE_IOC_LIMIT_FILE);
	expect_taken(test, session, U64_MAX - 5);
	expect_refused(test, session, 1, OFFSTAGE_IOC_LIMIT_FILE);
	limits_uncharge(session, U64_MAX);
	expect_used(test, session, 0, 0, 0);
}

static void test_what_is_over_a_lowered_limit_stays_and_may_not_grow(struct kunit *test)
{
	struct session *session = session_of(test, 4001);

	expect_taken(test, session, 8000);
	limit_user = 4000;
	expect_refused(test, session, 1, OFFSTAGE_IOC_LIMIT_USER);
	expect_used(test, session, 8000, 8000, 8000);
	limits_uncharge(session, 4001);
	expect_taken(test, session, 1);
	limits_uncharge(session, 4000);
	expect_used(test, session, 0, 0, 0);
}

/* An account goes with its last session; the next one begins at nothing. */
static void test_account_lives_as_long_as_a_session(struct kunit *test)
{
	struct session *session = session_of(test, 4001), *held = session_of(test, 4003);

	expect_taken(test, held, 100);
	kref_get(&held->ref);		/* as a buffer does */
	kunit_release_action(test, put, held);
	expect_used(test, held, 100, 100, 100);
	expect_used(test, session_of(test, 4003), 0, 100, 100);
	limits_uncharge(held, 100);
	session_put(held);
	expect_used(test, session, 0, 0, 0);
}

static struct kunit_case cases[] = {
	KUNIT_CASE(test_file_may_have_its_limit_and_no_byte_more),
	KUNIT_CASE(test_user_may_have_their_limit_over_all_files),
	KUNIT_CASE(test_all_together_may_have_theirs),
	KUNIT_CASE(test_nearest_limit_is_named_first),
	KUNIT_CASE(test_zero_is_no_limit),
	KUNIT_CASE(test_sums_that_overflow_are_refused),
	KUNIT_CASE(test_what_is_over_a_lowered_limit_stays_and_may_not_grow),
	KUNIT_CASE(test_account_lives_as_long_as_a_session),
	{}
};

static struct kunit_suite suite = { .name = "offstage_limits", .init = remember, .exit = restore, .test_cases = cases };
kunit_test_suite(suite);
