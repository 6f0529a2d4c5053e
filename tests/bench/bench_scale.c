/* SPDX-License-Identifier: MIT */
/*
 * How an update of bf16 gradients and parameters scales: from 1e6 to 4e8 parameters (as far as memory goes), with one
 * thread, two, four, … and all that the context would take. The arrays of the largest are made once; smaller ones are
 * their beginnings.
 */
#include <string.h>
#include "bench.h"
#include "../../tools/arrays.h"
#include "../../tools/command.h"

#define POINTS_MAX 256

struct point {
	uint64_t params;
	uint32_t threads;
	double seconds, of_ceiling;
};

static int measure(struct offstage *ctx, const struct arrays *a, uint32_t repeat, struct point *p)
{
	/* Small ones are over in no time: as many passes as make at least some tens of ms. */
	uint64_t passes = 1 + 64000000 / p->params;
	struct samples update = { 0 }, ceiling = { 0 };
	int ret = arrays_adam(ctx, a, p->params, 1, 0);

	for (uint32_t i = 0; i < repeat && !ret; i++) {
		double begin = seconds_now(), middle;

		for (uint64_t k = 0; k < passes && !ret; k++)
			ret = arrays_adam(ctx, a, p->params, i + 2, 0);
		middle = seconds_now();
		for (uint64_t k = 0; k < passes && !ret; k++)
			ret = arrays_adam(ctx, a, p->params, 1, OFFSTAGE_ADAM_CEILING);
		sample_add(&update, (middle - begin) / (double)passes);
		sample_add(&ceiling, (seconds_now() - middle) / (double)passes);
	}
	p->seconds = sample_median(&update);
	p->of_ceiling = sample_ratio(&ceiling, &update);
	return ret;
}

/* 1e6, 4e6, 1e7, 4e7, 1e8, 4e8. */
static uint64_t next_size(uint64_t n)
{
	uint64_t power = 1;

	while (power * 10 <= n)
		power *= 10;
	return n == power ? 4 * power : 10 * power;
}

int bench_scale(const struct bench_options *options)
{
	uint64_t most = options->params ? options->params : 400000000, traffic;
	uint32_t repeat = options->repeat ? options->repeat : 5, n_points = 0, all;
	struct offstage_info info = { .size = sizeof(info) };
	struct bench_options with = *options;
	static struct point points[POINTS_MAX];
	struct offstage *ctx;
	struct arrays a;
	struct json j;
	int ret;

	if (bench_open(options, &ctx))
		return library_failed();
	ret = offstage_info(ctx, &info);
	/* A quarter of the memory is left to everybody else. */
	while (!options->params && most > 1000000 && most * 16 > info.memory_available / 4 * 3)
		most /= 2;
	if (!ret)
		ret = arrays_create(ctx, &a, most, OFFSTAGE_BF16, OFFSTAGE_BF16);
	if (ret) {
		offstage_close(ctx);
		return library_failed();
	}
	traffic = arrays_traffic(&a);
	all = info.threads;

	printf("Adam bf16 to bf16, %s, medians of %u repetitions\n%12s", info.isa, repeat, "parameters");
	printf("%9s %12s %9s %9s %11s\n", "threads", "ms", "GB/s", "M/s", "of ceiling");
	for (uint32_t threads = 1; !ret; threads = threads * 2 < all ? threads * 2 : all) {
		struct offstage *some;

		with.threads = threads;
		ret = bench_open(&with, &some);
		if (ret)
			break;
		for (uint64_t n = 1000000; !ret && n <= most && n_points < POINTS_MAX; n = next_size(n)) {
			struct point *p = &points[n_points++];

			*p = (struct point){ .params = n, .threads = threads };
			ret = measure(some, &a, repeat, p);
			if (!ret)
				printf("%12llu %8u %12.2f %9.1f %9.0f %11.3f\n", (unsigned long long)n, threads,
				       p->seconds * 1e3, (double)(n * traffic) / p->seconds * 1e-9,
				       (double)n / p->seconds * 1e-6, p->of_ceiling);
			fflush(stdout);
		}
		offstage_close(some);
		if (threads == all)
			break;
	}
	arrays_close(&a);
	offstage_close(ctx);
	if (ret)
		return library_failed();
	if (!options->json)
		return 0;
	if (!json_open(&j, options->json))
		return STATUS_FAILED;
	json_string(&j, "isa", info.isa);
	json_integer(&j, "repetitions", repeat);
	json_array(&j, "points");
	for (uint32_t i = 0; i < n_points; i++) {
		const struct point *p = &points[i];

		json_object(&j, NULL);
		json_integer(&j, "params", p->params);
		json_integer(&j, "threads", p->threads);
		json_number(&j, "seconds", p->seconds);
		json_number(&j, "gb_per_s", (double)(p->params * traffic) / p->seconds * 1e-9);
		json_number(&j, "params_per_s", (double)p->params / p->seconds);
		json_number(&j, "of_ceiling", p->of_ceiling);
		json_end_object(&j);
	}
	json_end_array(&j);
	return json_close(&j, options->json) ? 0 : STATUS_FAILED;
}
