/* SPDX-License-Identifier: MIT */
/* Provider `kmod`: the library's buffers from /dev/offstage. Skipped where there is none; run in scripts/vm. */
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include "unit.h"
#include "../../lib/context.h"
#include "../../lib/topology.h"

#define MiB ((uint64_t)1 << 20)
#define HUGE (2 * MiB)

static struct offstage *ctx;

static int open_context(void **unused)
{
	struct offstage_options options = { .size = sizeof(options), .provider = "kmod" };

	(void)unused;
	ctx = NULL;
	if (offstage_open(&options, &ctx) != 0) {
		printf("skipped: %s\n", offstage_error());
		fflush(stdout);
	}
	return 0;
}

static int close_context(void **unused)
{
	(void)unused;
	offstage_close(ctx);
	return 0;
}

#define NEEDS_MODULE() do { (void)unused; if (!ctx) skip(); } while (0)

static struct offstage_buffer_info info_of(struct offstage_buffer *buffer)
{
	struct offstage_buffer_info info = { .size = sizeof(info) };

	OK(offstage_buffer_info(buffer, &info));
	return info;
}

static void test_module_is_chosen_when_it_is_there(void **unused)
{
	struct offstage_info info = { .size = sizeof(info) };
	struct offstage_feature feature = { .size = sizeof(feature) };
	struct offstage *any;
	bool found = false;

	NEEDS_MODULE();
	OK(offstage_open(NULL, &any));
	OK(offstage_info(any, &info));
	assert_string_equal(info.provider, "kmod");
	offstage_close(any);
	for (uint32_t i = 0; offstage_feature(i, &feature) == 0; i++)
		found |= strcmp(feature.name, "module") == 0 && feature.on;
	assert_true(found);
}

static void test_buffers_cost_what_was_asked_and_are_zero(void **unused)
{
	static const uint64_t sizes[] = { 0, 1, 4097, HUGE, 3 * HUGE + 1 };

	NEEDS_MODULE();
	for (size_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++) {
		struct offstage_buffer *buffer;
		struct offstage_buffer_info info;
		const char *data;

		OK(offstage_buffer_create(ctx, sizes[i], NULL, &buffer));
		info = info_of(buffer);
		assert_int_equal(info.requested, sizes[i]);
		assert_int_equal(info.backed, (sizes[i] + 4095) / 4096 * 4096);
		assert_int_equal(info.locked, info.backed);
		assert_int_equal(info.huge, sizes[i] / HUGE * HUGE);
		assert_string_equal(info.memory, sizes[i] ? "kmod" : "none");
		data = offstage_buffer_data(buffer);
		for (uint64_t k = 0; k < info.backed; k++)
			if (data[k])
				fail_msg("byte %llu isn't zero", (unsigned long long)k);
		offstage_buffer_close(buffer);
	}
}

static void test_placement_is_the_modules_and_can_be_asked(void **unused)
{
	uint32_t nodes[2] = { 1, 0 }, weights[2] = { 3, 1 };
	uint64_t bytes[2];

	NEEDS_MODULE();
	if (topology_nodes(NULL, 0) < 2)
		SKIP("this machine has one node");
	for (uint32_t kind = OFFSTAGE_BIND; kind <= OFFSTAGE_SPILL; kind++) {
		struct offstage_buffer_options o = { .size = sizeof(o), .placement = kind, .nodes = nodes,
			.n_nodes = kind == OFFSTAGE_BIND ? 1 : 2, .weights = kind == OFFSTAGE_WEIGHTED ? weights : NULL };
		struct offstage_buffer *buffer;

		OK(offstage_buffer_create(ctx, 8 * HUGE, &o, &buffer));
		OK(offstage_buffer_nodes(buffer, bytes, 2));
		assert_int_equal(bytes[1], kind == OFFSTAGE_INTERLEAVE ? 4 * HUGE : kind == OFFSTAGE_WEIGHTED ? 6 * HUGE : 8 * HUGE);
		assert_int_equal(bytes[0] + bytes[1], 8 * HUGE);
		offstage_buffer_close(buffer);
	}
}

static void test_descriptor_is_imported_as_the_same_bytes(void **unused)
{
	struct offstage_buffer_options o = { .size = sizeof(o), .flags = OFFSTAGE_BUFFER_SHAREABLE };
	struct offstage_buffer *buffer, *twin;

	NEEDS_MODULE();
	OK(offstage_buffer_create(ctx, HUGE + 5, &o, &buffer));
	OK(offstage_buffer_import(ctx, offstage_buffer_fd(buffer), &twin));
	assert_int_equal(info_of(twin).requested, HUGE + 5);
	*(char *)offstage_buffer_data(buffer) = 9;
	assert_int_equal(*(char *)offstage_buffer_data(twin), 9);
	offstage_buffer_close(buffer);
	*(char *)offstage_buffer_data(twin) = 8;
	offstage_buffer_close(twin);
	OK(offstage_buffer_create(ctx, HUGE, NULL, &buffer));
	REFUSED(offstage_buffer_fd(buffer), -EOPNOTSUPP, "SHAREABLE");
	offstage_buffer_close(buffer);
}

static void test_memory_of_the_other_provider_is_imported(void **unused)
{
	struct offstage_options user = { .size = sizeof(user), .provider = "user" };
	struct offstage_buffer_options o = { .size = sizeof(o), .flags = OFFSTAGE_BUFFER_SHAREABLE };
	struct offstage_buffer *buffer, *twin;
	struct offstage *other;

	NEEDS_MODULE();
	OK(offstage_open(&user, &other));
	OK(offstage_buffer_create(other, 10000, &o, &buffer));
	OK(offstage_buffer_import(ctx, offstage_buffer_fd(buffer), &twin));
	assert_string_equal(info_of(twin).memory, "shmem");
	offstage_buffer_close(twin);
	offstage_buffer_close(buffer);
	offstage_close(other);
}

static void test_refusals_name_the_limit(void **unused)
{
	struct offstage_buffer_options o = { .size = sizeof(o), .huge = OFFSTAGE_REQUIRE };
	struct offstage_buffer *buffer;

	NEEDS_MODULE();
	REFUSED(offstage_buffer_create(ctx, (uint64_t)1 << 50, NULL, &buffer), -EDQUOT, "limit_user");
	REFUSED(offstage_buffer_create(ctx, 100, &o, &buffer), -ENOSR, "less than one");
	assert_null(buffer);
}

static bool write_text(const char *path, const char *text)
{
	FILE *file = fopen(path, "w");
	bool ok = file && fputs(text, file) >= 0;

	return file && fclose(file) == 0 && ok;
}

static void test_limit_of_all_says_when_pools_are_in_the_way(void **unused)
{
	static const char limit[] = "/sys/module/offstage/parameters/limit_all",
			  pool[] = "/sys/class/offstage/offstage/node0/reserved";
	struct offstage_buffer_options o = { .size = sizeof(o), .huge = OFFSTAGE_NEVER };
	struct offstage_buffer *buffer;
	char before[32] = "";
	FILE *file;

	NEEDS_MODULE();
	file = fopen(limit, "r");
	assert_non_null(file);
	assert_non_null(fgets(before, sizeof(before), file));
	fclose(file);
	if (!write_text(pool, "8M"))
		SKIP("pools and limits are root's");
	assert_true(write_text(limit, "10M"));
	REFUSED(offstage_buffer_create(ctx, 16 * MiB, &o, &buffer), -EDQUOT, "limit_all leaves, which is");
	REFUSED(offstage_buffer_create(ctx, 4 * MiB, &o, &buffer), -EDQUOT, "beside the pools");
	assert_true(write_text(limit, before));
	assert_true(write_text(pool, "0"));
	OK(offstage_buffer_create(ctx, 4 * MiB, &o, &buffer));
	offstage_buffer_close(buffer);
}

static void test_child_of_fork_closes_without_harm(void **unused)
{
	struct offstage_buffer_options o = { .size = sizeof(o), .flags = OFFSTAGE_BUFFER_DONTFORK };
	struct offstage_buffer *buffer;
	int status;

	NEEDS_MODULE();
	OK(offstage_buffer_create(ctx, 2 * HUGE, &o, &buffer));
	if (fork() == 0) {
		alarm(30);
		offstage_buffer_close(buffer);
		_exit(0);
	}
	wait(&status);
	assert_true(WIFEXITED(status));
	memset(offstage_buffer_data(buffer), 1, 2 * HUGE);
	offstage_buffer_close(buffer);
}

int main(void)
{
#define T(test) cmocka_unit_test_setup_teardown(test, open_context, close_context)
	const struct CMUnitTest tests[] = {
		T(test_module_is_chosen_when_it_is_there),
		T(test_buffers_cost_what_was_asked_and_are_zero),
		T(test_placement_is_the_modules_and_can_be_asked),
		T(test_descriptor_is_imported_as_the_same_bytes),
		T(test_memory_of_the_other_provider_is_imported),
		T(test_refusals_name_the_limit),
		T(test_limit_of_all_says_when_pools_are_in_the_way),
		T(test_child_of_fork_closes_without_harm),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
