/* SPDX-License-Identifier: MIT */
/*
 * Making a buffer (placed, populated by threads, locked, checked page by page) against what a program without offstage
 * does for the same memory: mmap with MAP_POPULATE, then mlock. And, because that one gets base pages where transparent
 * huge pages are for those who ask, against the same with MADV_HUGEPAGE. Each is freed before the next is made.
 */
#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include "bench.h"
#include "../../tools/command.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

static int system_failed(const char *call, uint64_t bytes)
{
	fprintf(stderr, "offstage: %s of %llu bytes: %s\n", call, (unsigned long long)bytes, strerror(errno));
	return STATUS_FAILED;
}

/* mmap, populate, mlock; huge: ask for transparent huge pages first. */
static int by_hand(uint64_t bytes, bool huge, double *seconds)
{
	double begin = seconds_now();
	void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | (huge ? 0 : MAP_POPULATE), -1, 0);
	int status = 0;

	if (at == MAP_FAILED)
		return system_failed("mmap", bytes);
	if (huge && (madvise(at, bytes, MADV_HUGEPAGE) || madvise(at, bytes, MADV_POPULATE_WRITE)))
		status = system_failed("madvise", bytes);
	else if (mlock(at, bytes))
		status = system_failed("mlock", bytes);
	*seconds = seconds_now() - begin;
	munmap(at, bytes);
	return status;
}

static int by_library(struct offstage *ctx, uint64_t bytes, double *seconds, struct offstage_buffer_info *info)
{
	struct offstage_buffer *buffer;
	double begin = seconds_now();

	if (offstage_buffer_create(ctx, bytes, NULL, &buffer))
		return library_failed();
	*seconds = seconds_now() - begin;
	*info = (struct offstage_buffer_info){ .size = sizeof(*info) };
	if (offstage_buffer_info(buffer, info)) {
		offstage_buffer_close(buffer);
		return library_failed();
	}
	offstage_buffer_close(buffer);
	return 0;
}

int bench_pool(const struct bench_options *options)
{
	uint64_t bytes = options->size ? options->size : (uint64_t)1 << 30;
	uint32_t repeat = options->repeat ? options->repeat : 7;
	struct offstage_options o = { .size = sizeof(o), .threads = options->threads };
	struct samples ours = { 0 }, populate = { 0 }, huge = { 0 };
	struct offstage_buffer_info info;
	struct offstage *ctx;
	struct json j;
	int status = 0;

	if (offstage_open(&o, &ctx))
		return library_failed();
	for (uint32_t i = 0; i < repeat && !status; i++) {
		double seconds;

		status = by_library(ctx, bytes, &seconds, &info);
		if (status)
			break;
		sample_add(&ours, seconds);
		status = by_hand(bytes, false, &seconds);
		if (status)
			break;
		sample_add(&populate, seconds);
		status = by_hand(bytes, true, &seconds);
		sample_add(&huge, seconds);
	}
	offstage_close(ctx);
	if (status)
		return status;

	printf("Making %.2f GiB of locked memory, medians of %u repetitions in turn\n", (double)bytes / (1u << 30), repeat);
	printf("offstage buffer             %9.1f ms   %s, %.0f%% in huge pages, %llu bytes for %llu asked\n",
	       sample_median(&ours) * 1e3, info.memory, 100.0 * (double)info.huge / (double)info.backed,
	       (unsigned long long)info.backed, (unsigned long long)info.requested);
	printf("mmap MAP_POPULATE, mlock    %9.1f ms   offstage takes %.3f of it\n", sample_median(&populate) * 1e3,
	       sample_ratio(&ours, &populate));
	printf("the same with MADV_HUGEPAGE %9.1f ms   offstage takes %.3f of it\n", sample_median(&huge) * 1e3,
	       sample_ratio(&ours, &huge));
	if (!options->json)
		return 0;
	if (!json_open(&j, options->json))
		return STATUS_FAILED;
	json_number(&j, "over_populate_mlock", sample_ratio(&ours, &populate));
	json_number(&j, "over_hugepage_populate_mlock", sample_ratio(&ours, &huge));
	json_integer(&j, "bytes", bytes);
	json_integer(&j, "backed", info.backed);
	json_integer(&j, "huge", info.huge);
	json_string(&j, "memory", info.memory);
	json_integer(&j, "repetitions", repeat);
	json_number(&j, "seconds", sample_median(&ours));
	json_number(&j, "populate_mlock_seconds", sample_median(&populate));
	json_number(&j, "hugepage_populate_mlock_seconds", sample_median(&huge));
	return json_close(&j, options->json) ? 0 : STATUS_FAILED;
}
