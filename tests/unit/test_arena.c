/* SPDX-License-Identifier: MIT */
/* Arenas: thousands of pieces of one buffer never overlap, come back whole, and every wrong free is caught. */
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
#include "unit.h"
#include "../../lib/context.h"
#include "../../lib/heap.h"
#include "../../lib/staging.h"

#define MiB ((uint64_t)1 << 20)

static struct offstage *ctx;

static int open_context(void **unused)
{
	struct offstage_options options = { .size = sizeof(options), .threads = 1, .lock = OFFSTAGE_NEVER };

	(void)unused;
	return offstage_open(&options, &ctx);
}

/* Whatever a test did, nothing of it is left. */
static int close_context(void **unused)
{
	struct trace_counters *c = &ctx->trace.counters;

	(void)unused;
	assert_int_equal(c->requested_bytes, 0);
	assert_int_equal(c->backed_bytes, 0);
	assert_int_equal(ctx->refs, 1);
	offstage_close(ctx);
	return 0;
}

/* An arena over a buffer of its own, which lives as long as the arena. */
static struct offstage_arena *arena_of(uint64_t bytes, char **data)
{
	struct offstage_buffer *buffer;
	struct offstage_arena *arena;

	OK(offstage_buffer_create(ctx, bytes, NULL, &buffer));
	if (data)
		*data = offstage_buffer_data(buffer);
	OK(offstage_arena_create(buffer, &arena));
	offstage_buffer_close(buffer);
	return arena;
}

static void test_pieces_are_aligned_and_the_arena_holds_the_buffer(void **unused)
{
	struct offstage_arena *arena;
	uint64_t used, longest;
	void *a, *b;

	(void)unused;
	arena = arena_of(MiB, NULL);
	OK(offstage_arena_alloc(arena, 1, &a));
	OK(offstage_arena_alloc(arena, 65, &b));
	assert_int_equal((uintptr_t)a % 64, 0);
	assert_int_equal((char *)b - (char *)a, 64);
	memset(a, 1, 64);
	memset(b, 2, 65);
	offstage_arena_usage(arena, &used, &longest);
	assert_int_equal(used, 64 + 128);
	assert_int_equal(longest, MiB - 192);
	offstage_arena_usage(arena, NULL, NULL);
	offstage_arena_close(arena);
	offstage_arena_close(NULL);
}

static void test_last_byte_of_an_unaligned_buffer_can_be_had(void **unused)
{
	struct offstage_arena *arena;
	uint64_t used, longest;
	void *a, *b;

	(void)unused;
	arena = arena_of(1000, NULL);
	REFUSED(offstage_arena_alloc(arena, 1001, &a), -ENOSPC, "1001 bytes doesn't fit into a buffer of 1000 bytes");
	OK(offstage_arena_alloc(arena, 960, &a));
	REFUSED(offstage_arena_alloc(arena, 41, &b), -ENOSPC, "the longest of this arena's is 40 bytes");
	assert_null(b);
	OK(offstage_arena_alloc(arena, 40, &b));
	offstage_arena_usage(arena, &used, &longest);
	assert_int_equal(used, 1000);
	assert_int_equal(longest, 0);
	OK(offstage_arena_free(arena, a));
	OK(offstage_arena_free(arena, b));
	OK(offstage_arena_alloc(arena, 1000, &a));
	offstage_arena_close(arena);
}

static void test_nothing_costs_nothing(void **unused)
{
	struct offstage_arena *arena;
	uint64_t used, longest;
	void *piece = &used;

	(void)unused;
	arena = arena_of(0, NULL);
	OK(offstage_arena_alloc(arena, 0, &piece));
	assert_null(piece);
	OK(offstage_arena_free(arena, NULL));
	REFUSED(offstage_arena_alloc(arena, 1, &piece), -ENOSPC, "buffer of 0 bytes");
	REFUSED(offstage_arena_free(arena, &used), -EINVAL, "isn't in this arena");
	offstage_arena_usage(arena, &used, &longest);
	assert_int_equal(used + longest, 0);
	offstage_arena_close(arena);
}

static void test_wrong_frees_are_caught_and_change_nothing(void **unused)
{
	struct offstage_arena *arena, *none;
	char *data, *a, *b;
	uint64_t used;

	(void)unused;
	arena = arena_of(MiB, &data);
	OK(offstage_arena_alloc(arena, 1000, (void **)&a));
	OK(offstage_arena_alloc(arena, 1000, (void **)&b));
	OK(offstage_arena_free(arena, a));
	REFUSED(offstage_arena_free(arena, a), -EINVAL, "freed before");
	REFUSED(offstage_arena_free(arena, b + 64), -EINVAL, "is inside the piece");
	REFUSED(offstage_arena_free(arena, data + MiB / 2), -EINVAL, "isn't a live piece");
	REFUSED(offstage_arena_free(arena, data + MiB), -EINVAL, "isn't in this arena");
	REFUSED(offstage_arena_free(arena, data - 64), -EINVAL, "isn't in this arena");
	REFUSED(offstage_arena_free(arena, &used), -EINVAL, "isn't in this arena");
	REFUSED(offstage_arena_free(NULL, b), -EINVAL, "the arena is NULL");
	REFUSED(offstage_arena_alloc(arena, UINT64_MAX, (void **)&a), -ENOSPC, "doesn't fit");
	REFUSED(offstage_arena_alloc(arena, 1, NULL), -EINVAL, "no place");
	REFUSED(offstage_arena_create(NULL, &none), -EINVAL, "needs a buffer");
	assert_null(none);
	offstage_arena_usage(arena, &used, NULL);
	assert_int_equal(used, 1024);
	OK(offstage_arena_free(arena, b));
	offstage_arena_close(arena);
}

/* A model that knows only what was handed out. */
struct piece {
	unsigned char *at;
	uint64_t bytes;
	unsigned char mark;
};

#define PIECES 4000

static void check_marks(const struct piece *piece)
{
	for (uint64_t i = 0; i < piece->bytes; i += 61)
		assert_int_equal(piece->at[i], piece->mark);
	if (piece->bytes)
		assert_int_equal(piece->at[piece->bytes - 1], piece->mark);
}

static void test_thousands_of_pieces_never_overlap_and_come_back_whole(void **unused)
{
	static struct piece pieces[PIECES];
	struct offstage_arena *arena;
	uint64_t used = 0, told, longest, size = 8 * MiB + 40;
	unsigned seed = 11, refused = 0;

	(void)unused;
	memset(pieces, 0, sizeof(pieces));
	arena = arena_of(size, NULL);
	for (int round = 0; round < 60000; round++) {
		struct piece *piece = &pieces[(unsigned)rand_r(&seed) % PIECES];

		if (piece->at) {
			check_marks(piece);
			OK(offstage_arena_free(arena, piece->at));
			used -= (piece->bytes + 63) / 64 * 64;
			piece->at = NULL;
		} else {
			int ret;

			piece->bytes = 1 + (uint64_t)rand_r(&seed) % (rand_r(&seed) % 16 ? 6000 : 100000);
			piece->mark = (unsigned char)rand_r(&seed);
			ret = offstage_arena_alloc(arena, piece->bytes, (void **)&piece->at);
			if (ret) {
				/* Refused only if no free run is long enough. */
				assert_int_equal(ret, -ENOSPC);
				offstage_arena_usage(arena, NULL, &longest);
				assert_true(longest < (piece->bytes + 63) / 64 * 64);
				assert_null(piece->at);
				refused++;
				continue;
			}
			memset(piece->at, piece->mark, piece->bytes);
			used += (piece->bytes + 63) / 64 * 64;
		}
		offstage_arena_usage(arena, &told, NULL);
		/* The piece at the very end may have been handed out unaligned. */
		assert_true(told <= used && told + 63 >= used);
	}
	assert_true(refused > 0);
	for (int i = 0; i < PIECES; i++)
		if (pieces[i].at) {
			check_marks(&pieces[i]);
			OK(offstage_arena_free(arena, pieces[i].at));
		}
	offstage_arena_usage(arena, &told, &longest);
	assert_int_equal(told, 0);
	assert_int_equal(longest, size);
	offstage_arena_close(arena);
}

static void test_each_failing_allocation_leaves_the_arena_as_it_was(void **unused)
{
	struct offstage_buffer *buffer;
	struct offstage_arena *arena;
	uint64_t used;
	void *piece;
	int failed = 0;

	(void)unused;
	OK(offstage_buffer_create(ctx, MiB, NULL, &buffer));
	for (uint64_t nth = 1; nth <= 2; nth++) {
		heap_fail_nth(nth);
		REFUSED(offstage_arena_create(buffer, &arena), -ENOMEM, "heap");
		assert_null(arena);
	}
	heap_fail_nth(0);
	assert_int_equal(buffer->refs, 1);
	OK(offstage_arena_create(buffer, &arena));
	for (uint64_t i = 0; i < 1000; i++) {
		heap_fail_nth(1);
		if (offstage_arena_alloc(arena, 64, &piece)) {
			failed++;
			assert_null(piece);
			offstage_arena_usage(arena, &used, NULL);
			assert_int_equal(used, i * 64);
			OK(offstage_arena_alloc(arena, 64, &piece));
		}
		assert_ptr_equal(piece, (char *)offstage_buffer_data(buffer) + i * 64);
	}
	heap_fail_nth(0);
	/* Room grows geometrically: a thousand pieces are a handful of allocations. */
	assert_in_range(failed, 3, 6);
	offstage_arena_close(arena);
	offstage_buffer_close(buffer);
}

static void *churn(void *arg)
{
	unsigned seed = (unsigned)(uintptr_t)pthread_self();
	struct offstage_arena *arena = arg;
	unsigned char *mine[32] = { 0 };

	for (int i = 0; i < 20000; i++) {
		unsigned k = (unsigned)rand_r(&seed) % 32;

		if (mine[k]) {
			if (mine[k][0] != (unsigned char)k || offstage_arena_free(arena, mine[k]))
				return "a piece was changed, or couldn't be freed";
			mine[k] = NULL;
		} else if (offstage_arena_alloc(arena, 1 + (uint64_t)rand_r(&seed) % 3000, (void **)&mine[k]) == 0) {
			mine[k][0] = (unsigned char)k;
		}
	}
	for (unsigned k = 0; k < 32; k++)
		if (mine[k] && offstage_arena_free(arena, mine[k]))
			return "a piece couldn't be freed";
	return NULL;
}

static void test_threads_share_an_arena(void **unused)
{
	struct offstage_arena *arena;
	uint64_t used, longest;
	pthread_t threads[4];
	void *wrong;

	(void)unused;
	arena = arena_of(MiB, NULL);
	for (int i = 0; i < 4; i++)
		assert_int_equal(pthread_create(&threads[i], NULL, churn, arena), 0);
	for (int i = 0; i < 4; i++) {
		pthread_join(threads[i], &wrong);
		if (wrong)
			fail_msg("%s", (char *)wrong);
	}
	offstage_arena_usage(arena, &used, &longest);
	assert_int_equal(used, 0);
	assert_int_equal(longest, MiB);
	offstage_arena_close(arena);
}

static void test_child_of_fork_can_only_close(void **unused)
{
	struct offstage_arena *arena;
	uint64_t used = 1;
	void *piece, *more;
	pid_t child;
	int status;

	(void)unused;
	arena = arena_of(MiB, NULL);
	OK(offstage_arena_alloc(arena, 100, &piece));
	child = fork();
	if (!child) {
		alarm(10);
		if (offstage_arena_alloc(arena, 1, &more) != -ECHILD || offstage_arena_free(arena, piece) != -ECHILD)
			_exit(1);
		offstage_arena_usage(arena, &used, NULL);
		if (used)
			_exit(2);
		offstage_arena_close(arena);
		_exit(0);
	}
	assert_int_equal(waitpid(child, &status, 0), child);
	assert_int_equal(status, 0);
	OK(offstage_arena_free(arena, piece));
	offstage_arena_close(arena);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(test_pieces_are_aligned_and_the_arena_holds_the_buffer, open_context, close_context),
		cmocka_unit_test_setup_teardown(test_last_byte_of_an_unaligned_buffer_can_be_had, open_context, close_context),
		cmocka_unit_test_setup_teardown(test_nothing_costs_nothing, open_context, close_context),
		cmocka_unit_test_setup_teardown(test_wrong_frees_are_caught_and_change_nothing, open_context, close_context),
		cmocka_unit_test_setup_teardown(test_thousands_of_pieces_never_overlap_and_come_back_whole, open_context, close_context),
		cmocka_unit_test_setup_teardown(test_each_failing_allocation_leaves_the_arena_as_it_was, open_context, close_context),
		cmocka_unit_test_setup_teardown(test_threads_share_an_arena, open_context, close_context),
		cmocka_unit_test_setup_teardown(test_child_of_fork_can_only_close, open_context, close_context),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
