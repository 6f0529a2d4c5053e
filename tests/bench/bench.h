/* SPDX-License-Identifier: MIT */
/*
 * What the benchmarks share: each is a function that the command's `bench` calls with its options, prints a table and
 * ratios, and writes its JSON if asked. Contestants of a ratio run in turn within one process, so that what the machine
 * does meanwhile hits both; a ratio is the median over the repetitions of the ratio within each.
 */
#ifndef BENCH_H
#define BENCH_H

#include <stdint.h>
#include <offstage.h>

#define BENCH_REPEAT_MAX 101u

struct bench_options {
	const char *json;	/* path, or NULL */
	uint32_t repeat;	/* 0: the benchmark's own */
	uint32_t threads;	/* 0: the library's own */
	uint64_t params;	/* elements; 0: the benchmark's own */
	uint64_t size;		/* bytes, of pool and kmod; 0: the benchmark's own */
};

int bench_adam(const struct bench_options *options);
int bench_step(const struct bench_options *options);
int bench_pool(const struct bench_options *options);
int bench_kmod(const struct bench_options *options);
int bench_scale(const struct bench_options *options);

struct samples {
	uint32_t n;
	double value[BENCH_REPEAT_MAX];
};
void sample_add(struct samples *s, double value);
double sample_median(const struct samples *s);
/* Median over the repetitions of a's value over b's. */
double sample_ratio(const struct samples *a, const struct samples *b);

/* A context with the threads asked for, whose buffers are locked if that can be had. */
int bench_open(const struct bench_options *options, struct offstage **ctx);

#endif
