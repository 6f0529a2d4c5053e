/* SPDX-License-Identifier: MIT */
/*
 * Adam against its ceiling: the same loads and stores by the same threads with no arithmetic. of_ceiling 0.97 says
 * that the update takes 1/0.97 of the time that memory alone takes. The peers' columns are null here; peers.py, which
 * runs them against the library within one process, fills them in.
 */
#include "bench.h"
#include "../../tools/arrays.h"
#include "../../tools/command.h"

struct result {
	struct samples update, ceiling;
	uint64_t traffic;
};

static int measure(struct offstage *ctx, uint32_t dtype, uint64_t n, uint32_t repeat, struct result *r)
{
	struct arrays a;
	int ret = arrays_create(ctx, &a, n, dtype, dtype);

	if (ret)
		return ret;
	r->traffic = arrays_traffic(&a) * n;
	/* Once each for nothing: the first pass finds cold caches and sleeping threads. */
	ret = arrays_adam(ctx, &a, n, 1, 0);
	if (!ret)
		ret = arrays_adam(ctx, &a, n, 1, OFFSTAGE_ADAM_CEILING);
	for (uint32_t i = 0; i < repeat && !ret; i++) {
		double begin = seconds_now(), middle, end;

		ret = arrays_adam(ctx, &a, n, i + 2, 0);
		middle = seconds_now();
		if (ret)
			break;
		ret = arrays_adam(ctx, &a, n, 1, OFFSTAGE_ADAM_CEILING);
		end = seconds_now();
		sample_add(&r->update, middle - begin);
		sample_add(&r->ceiling, end - middle);
	}
	arrays_close(&a);
	return ret;
}

static void print(const char *name, const struct result *r)
{
	double update = sample_median(&r->update), ceiling = sample_median(&r->ceiling);

	printf("%-14s %9.2f ms %7.1f GB/s   ceiling %9.2f ms %7.1f GB/s   of ceiling %.3f\n", name, update * 1e3,
	       (double)r->traffic / update * 1e-9, ceiling * 1e3, (double)r->traffic / ceiling * 1e-9,
	       sample_ratio(&r->ceiling, &r->update));
}

static void write_one(struct json *j, const char *name, const struct result *r, uint64_t n)
{
	double update = sample_median(&r->update), ceiling = sample_median(&r->ceiling);

	json_object(j, name);
	json_number(j, "of_ceiling", sample_ratio(&r->ceiling, &r->update));
	json_null(j, "over_deepspeed");
	json_null(j, "over_torch");
	json_number(j, "seconds", update);
	json_number(j, "ceiling_seconds", ceiling);
	json_number(j, "gb_per_s", (double)r->traffic / update * 1e-9);
	json_number(j, "ceiling_gb_per_s", (double)r->traffic / ceiling * 1e-9);
	json_number(j, "params_per_s", (double)n / update);
	json_end_object(j);
}

int bench_adam(const struct bench_options *options)
{
	uint64_t n = options->params ? options->params : 64u << 20;
	uint32_t repeat = options->repeat ? options->repeat : 15;
	struct offstage_info info = { .size = sizeof(info) };
	struct result bf16 = { 0 }, fp32 = { 0 };
	struct offstage *ctx;
	struct json j;
	int ret;

	if (bench_open(options, &ctx))
		return library_failed();
	ret = offstage_info(ctx, &info);
	if (!ret)
		ret = measure(ctx, OFFSTAGE_BF16, n, repeat, &bf16);
	if (!ret)
		ret = measure(ctx, OFFSTAGE_F32, n, repeat, &fp32);
	offstage_close(ctx);
	if (ret)
		return library_failed();

	printf("Adam, %llu parameters, %s, %u threads, medians of %u repetitions in turn\n", (unsigned long long)n, info.isa,
	       info.threads, repeat);
	print("bf16 to bf16", &bf16);
	print("fp32 to fp32", &fp32);
	if (!options->json)
		return 0;
	if (!json_open(&j, options->json))
		return STATUS_FAILED;
	json_string(&j, "isa", info.isa);
	json_integer(&j, "threads", info.threads);
	json_integer(&j, "params", n);
	json_integer(&j, "repetitions", repeat);
	write_one(&j, "bf16", &bf16, n);
	write_one(&j, "fp32", &fp32, n);
	return json_close(&j, options->json) ? 0 : STATUS_FAILED;
}
