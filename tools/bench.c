/* SPDX-License-Identifier: MIT */
/* offstage bench: reads the options, and runs one of the benchmarks in tests/bench/. */
#include <stdlib.h>
#include <string.h>
#include "command.h"
#include "../tests/bench/bench.h"

static const struct {
	const char *name;
	int (*run)(const struct bench_options *options);
	const char *what;
} benches[] = {
	{ "adam", bench_adam, "an update against the same loads and stores with no arithmetic" },
	{ "step", bench_step, "drain, update and refill on an emulated link, against the slowest of them and against serial order" },
	{ "pool", bench_pool, "making a buffer against mmap, MAP_POPULATE and mlock" },
	{ "kmod", bench_kmod, "the module's memory against MAP_POPULATE and mlock, and hugetlb; needs root and /dev/offstage" },
	{ "scale", bench_scale, "updates of 1e6 to 4e8 parameters, with 1 to all threads" },
};
#define N_BENCHES (sizeof(benches) / sizeof(*benches))

static void help(FILE *out)
{
	fputs("usage: offstage bench NAME [OPTIONS]\n\n", out);
	for (size_t i = 0; i < N_BENCHES; i++)
		fprintf(out, "  %-16s%s\n", benches[i].name, benches[i].what);
	fputs("\n  --json FILE     write the results there too (-: to standard output)\n"
	      "  --params N      parameters, as 1e8 (adam, step; the most of scale)\n"
	      "  --size BYTES    of the buffer, as 1G (pool, kmod)\n"
	      "  --repeat N      repetitions\n"
	      "  --threads N     of the update\n", out);
}

int command_bench(int argc, char **argv)
{
	struct arguments a = { .argc = argc, .argv = argv, .at = 1 };
	struct bench_options options = { 0 };
	int (*run)(const struct bench_options *options) = NULL;
	uint64_t number;

	while (arguments_next(&a)) {
		bool ok = true;

		if (arguments_is(&a, "--help")) {
			help(stdout);
			return 0;
		} else if (arguments_is(&a, "--json")) {
			options.json = arguments_value(&a);
			ok = options.json && *options.json;
		} else if (arguments_is(&a, "--params")) {
			ok = parse_count(arguments_value(&a), &options.params) && options.params;
		} else if (arguments_is(&a, "--size")) {
			ok = parse_bytes(arguments_value(&a), &options.size) && options.size;
		} else if (arguments_is(&a, "--repeat")) {
			ok = parse_count(arguments_value(&a), &number) && number && number <= BENCH_REPEAT_MAX;
			options.repeat = ok ? (uint32_t)number : 0;
		} else if (arguments_is(&a, "--threads")) {
			ok = parse_count(arguments_value(&a), &number) && number && number <= 4096;
			options.threads = ok ? (uint32_t)number : 0;
		} else if (a.name[0] == '-' || run) {
			return usage_error("bench", "'%s' isn't an option", a.name);
		} else {
			for (size_t i = 0; i < N_BENCHES && !run; i++)
				if (strcmp(a.name, benches[i].name) == 0)
					run = benches[i].run;
			if (!run)
				return usage_error("bench", "there is no benchmark '%s'", a.name);
		}
		if (!ok)
			return usage_error("bench", "the value of '%s' can't be used", a.name);
	}
	if (!run) {
		help(stderr);
		return STATUS_USAGE;
	}
	return run(&options);
}

/* ---- what the benchmarks share ------------------------------------------------------------------------------------- */

void sample_add(struct samples *s, double value)
{
	if (s->n < BENCH_REPEAT_MAX)
		s->value[s->n++] = value;
}

static int ascending(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

double sample_median(const struct samples *s)
{
	double sorted[BENCH_REPEAT_MAX];

	if (!s->n)
		return 0;
	memcpy(sorted, s->value, s->n * sizeof(*sorted));
	qsort(sorted, s->n, sizeof(*sorted), ascending);
	return (sorted[(s->n - 1) / 2] + sorted[s->n / 2]) / 2;
}

double sample_ratio(const struct samples *a, const struct samples *b)
{
	struct samples ratio = { 0 };

	for (uint32_t i = 0; i < a->n && i < b->n; i++)
		sample_add(&ratio, a->value[i] / b->value[i]);
	return sample_median(&ratio);
}

int bench_open(const struct bench_options *options, struct offstage **ctx)
{
	struct offstage_options o = { .size = sizeof(o), .threads = options->threads, .lock = OFFSTAGE_PREFER };

	return offstage_open(&o, ctx);
}
