/* SPDX-License-Identifier: MIT */
/* The context and the rules of every public struct: sizes of other versions, sentences, counters, the trace file. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "unit.h"
#include "../../lib/context.h"
#include "../../lib/heap.h"

static void test_older_struct_is_taken_as_if_the_rest_were_zero(void **unused)
{
	struct offstage_options options = { .size = offsetof(struct offstage_options, budget), .budget = 1 };
	struct offstage *ctx;

	(void)unused;
	OK(offstage_open(&options, &ctx));
	assert_int_equal(ctx->budget, 0);
	offstage_close(ctx);
}

static void test_newer_struct_is_taken_if_what_is_new_is_unused(void **unused)
{
	struct { struct offstage_options o; uint64_t later; } newer = { { .size = sizeof(newer) }, 0 };
	struct offstage *ctx;

	(void)unused;
	OK(offstage_open(&newer.o, &ctx));
	offstage_close(ctx);
	newer.later = 1;
	REFUSED(offstage_open(&newer.o, &ctx), -E2BIG, "use a newer library");
	assert_null(ctx);
}

static void test_struct_with_no_size_is_refused(void **unused)
{
	struct offstage_options options = { 0 };
	struct offstage_info info = { 0 };
	struct offstage *ctx;

	(void)unused;
	REFUSED(offstage_open(&options, &ctx), -EINVAL, "size");
	OK(offstage_open(NULL, &ctx));
	REFUSED(offstage_info(ctx, &info), -EINVAL, "size");
	REFUSED(offstage_info(ctx, NULL), -EINVAL, "struct offstage_info");
	offstage_close(ctx);
}

static void test_struct_of_an_older_caller_is_filled_no_further(void **unused)
{
	struct { struct offstage_stats stats; } out;
	struct offstage *ctx;

	(void)unused;
	memset(&out, 0x5a, sizeof(out));
	out.stats.size = offsetof(struct offstage_stats, pins);
	OK(offstage_open(NULL, &ctx));
	OK(offstage_stats(ctx, &out.stats));
	assert_int_equal(out.stats.size, offsetof(struct offstage_stats, pins));
	assert_int_equal(out.stats.pins, 0x5a5a5a5a5a5a5a5a);
	offstage_close(ctx);
}

static void test_bad_options_are_refused(void **unused)
{
	struct offstage_options o = { .size = sizeof(o), .provider = "tape" };
	struct offstage *ctx;

	(void)unused;
	REFUSED(offstage_open(&o, &ctx), -ENOENT, "'tape'");
	o = (struct offstage_options){ .size = sizeof(o), .isa = "z80" };
	REFUSED(offstage_open(&o, &ctx), -ENOENT, "z80");
	o = (struct offstage_options){ .size = sizeof(o), .lock = 9 };
	REFUSED(offstage_open(&o, &ctx), -EINVAL, "lock");
	REFUSED(offstage_open(NULL, NULL), -EINVAL, "no place");
	REFUSED(offstage_stats(NULL, NULL), -EINVAL, "NULL");
	offstage_close(NULL);
}

static void test_context_lives_as_long_as_what_was_made_from_it(void **unused)
{
	struct offstage_buffer_options options = { .size = sizeof(options), .lock = OFFSTAGE_PREFER };
	struct offstage_buffer *buffer;
	struct offstage *ctx;

	(void)unused;
	OK(offstage_open(NULL, &ctx));
	OK(offstage_buffer_create(ctx, 100, &options, &buffer));
	offstage_close(ctx);
	memset(offstage_buffer_data(buffer), 1, 100);
	offstage_buffer_close(buffer);
}

static void test_info_says_what_was_got(void **unused)
{
	struct offstage_options o = { .size = sizeof(o), .isa = "c", .threads = 2, .provider = "user" };
	struct offstage_info info = { .size = sizeof(info) };
	struct offstage *ctx;

	(void)unused;
	OK(offstage_open(&o, &ctx));
	OK(offstage_info(ctx, &info));
	assert_string_equal(info.version, offstage_version());
	assert_string_equal(info.provider, "user");
	assert_string_equal(info.isa, "c");
	assert_non_null(strstr(info.isas, "c"));
	assert_int_equal(info.threads, 2);
	assert_int_equal(info.page_size, sysconf(_SC_PAGESIZE));
	assert_true(info.memory_available > 0);
	offstage_close(ctx);
}

static void test_features_say_why_they_are_off(void **unused)
{
	struct offstage_feature f = { .size = sizeof(f) };
	uint32_t i;

	(void)unused;
	for (i = 0; offstage_feature(i, &f) == 0; i++) {
		assert_true(f.name[0] != '\0');
		assert_true(f.on ? f.why[0] == '\0' : f.why[0] != '\0');
	}
	assert_true(i > 0);
	REFUSED(offstage_feature(i, &f), -ENOENT, "numbered from 0");
}

static void test_trace_keeps_the_first_spans_and_is_valid_json(void **unused)
{
	static const char path[] = "/tmp/offstage-test-trace.json";
	struct offstage *ctx;
	char text[4096] = { 0 };
	FILE *file;

	(void)unused;
	OK(offstage_open(NULL, &ctx));
	OK(offstage_trace_start(ctx, 2));
	for (unsigned i = 0; i < 5; i++)
		trace_span(&ctx->trace, "update", "update", i, 0, 1000000 + i * 1000, 1000500 + i * 1000);
	OK(offstage_trace_save(ctx, path));
	file = fopen(path, "r");
	assert_non_null(file);
	assert_true(fread(text, 1, sizeof(text) - 1, file) > 0);
	fclose(file);
	assert_non_null(strstr(text, "\"ts\":1.000,\"dur\":0.500,\"args\":{\"subgroup\":1,"));
	assert_null(strstr(text, "\"subgroup\":2,"));
	assert_string_equal(text + strlen(text) - 3, "]}\n");
	unlink(path);
	REFUSED(offstage_trace_save(ctx, "/nonexistent/trace.json"), -ENOENT, "/nonexistent/trace.json");
	REFUSED(offstage_trace_save(ctx, NULL), -EINVAL, "path");
	OK(offstage_trace_start(ctx, 0));
	OK(offstage_trace_save(ctx, path));
	unlink(path);
	offstage_close(ctx);
}

static void test_full_disk_leaves_no_half_trace(void **unused)
{
	struct offstage *ctx;

	(void)unused;
	if (access("/dev/full", W_OK) != 0)
		SKIP("/dev/full isn't there to stand in for a full disk");
	OK(offstage_open(NULL, &ctx));
	/* Through a link, so that what gets removed is the link. */
	unlink("/tmp/offstage-test-full");
	assert_int_equal(symlink("/dev/full", "/tmp/offstage-test-full"), 0);
	REFUSED(offstage_trace_save(ctx, "/tmp/offstage-test-full"), -ENOSPC, "was removed");
	assert_int_equal(access("/tmp/offstage-test-full", F_OK), -1);
	offstage_close(ctx);
}

static void test_sentences_of_threads_are_their_own_and_layers_add_up(void **unused)
{
	(void)unused;
	assert_int_equal((fail)(-EIO, "disk %d is gone", 3), -EIO);
	assert_int_equal(fail_in(-EIO, "writing %s", "it"), -EIO);
	assert_string_equal(offstage_error(), "writing it: disk 3 is gone");
	assert_string_equal(BYTES(10), "10 bytes");
	assert_string_equal(BYTES(1536ull << 20), "1.50 GiB");
	assert_string_equal(BYTES(64ull << 30), "64.0 GiB");
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_older_struct_is_taken_as_if_the_rest_were_zero),
		cmocka_unit_test(test_newer_struct_is_taken_if_what_is_new_is_unused),
		cmocka_unit_test(test_struct_with_no_size_is_refused),
		cmocka_unit_test(test_struct_of_an_older_caller_is_filled_no_further),
		cmocka_unit_test(test_bad_options_are_refused),
		cmocka_unit_test(test_context_lives_as_long_as_what_was_made_from_it),
		cmocka_unit_test(test_info_says_what_was_got),
		cmocka_unit_test(test_features_say_why_they_are_off),
		cmocka_unit_test(test_trace_keeps_the_first_spans_and_is_valid_json),
		cmocka_unit_test(test_full_disk_leaves_no_half_trace),
		cmocka_unit_test(test_sentences_of_threads_are_their_own_and_layers_add_up),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
