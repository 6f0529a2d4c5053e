/* SPDX-License-Identifier: MIT */
/*
 * offstage selftest: does it work on this machine, and as fast as its memory allows? One line a check:
 *
 *	OK    it is as it should be
 *	WARN  it works, slower or with less than it could; the line says what to do
 *	FAIL  it doesn't work, and exit status 1
 */
#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include "arrays.h"
#include "command.h"

struct selftest {
	struct offstage *ctx;
	struct offstage_info info;
	bool quick;		/* small arrays, and no word about speed */
	uint32_t failed;
};

static void help(void)
{
	puts("usage: offstage selftest [--quick]\n\n"
	     "  --quick   small arrays and no measurements: only whether it works\n\n"
	     "Exit status 1 if a check fails.");
}

enum verdict { OK, WARN, FAIL };

static void say(struct selftest *s, enum verdict verdict, const char *name, const char *format, ...)
	__attribute__((format(printf, 4, 5)));
static void say(struct selftest *s, enum verdict verdict, const char *name, const char *format, ...)
{
	static const char *const words[] = { [OK] = "OK", [WARN] = "WARN", [FAIL] = "FAIL" };
	va_list args;

	printf("%-4s  %-16s  ", words[verdict], name);
	va_start(args, format);
	vprintf(format, args);
	va_end(args);
	putchar('\n');
	fflush(stdout);
	s->failed += verdict == FAIL;
}

/* ---- memory and Adam -------------------------------------------------------------------------------------------------- */

#define SPEED_REPEAT 7

static int compare(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static void test_speed(struct selftest *s)
{
	uint64_t n = s->quick ? 1u << 16 : 16u << 20;
	double ceiling[SPEED_REPEAT], ratio[SPEED_REPEAT], bandwidth;
	struct arrays a;
	int ret = arrays_create(s->ctx, &a, n, OFFSTAGE_BF16, OFFSTAGE_BF16);

	if (ret) {
		say(s, FAIL, "memory-bandwidth", "%s", offstage_error());
		return;
	}
	ret = arrays_adam(s->ctx, &a, n, 1, 0);
	if (!ret)
		ret = arrays_adam(s->ctx, &a, n, 1, OFFSTAGE_ADAM_CEILING);
	for (uint32_t i = 0; i < SPEED_REPEAT && !ret; i++) {
		double begin = seconds_now(), middle;

		ret = arrays_adam(s->ctx, &a, n, 1, OFFSTAGE_ADAM_CEILING);
		middle = seconds_now();
		if (!ret)
			ret = arrays_adam(s->ctx, &a, n, i + 2, 0);
		ceiling[i] = middle - begin;
		ratio[i] = ceiling[i] / (seconds_now() - middle);
	}
	if (ret) {
		say(s, FAIL, "memory-bandwidth", "%s", offstage_error());
		arrays_close(&a);
		return;
	}
	qsort(ceiling, SPEED_REPEAT, sizeof(*ceiling), compare);
	qsort(ratio, SPEED_REPEAT, sizeof(*ratio), compare);
	bandwidth = (double)(arrays_traffic(&a) * n) / ceiling[SPEED_REPEAT / 2] * 1e-9;
	arrays_close(&a);
	if (s->quick) {
		say(s, OK, "adam", "runs with %s (not measured: --quick)", s->info.isa);
		return;
	}
	say(s, OK, "memory-bandwidth", "%.1f GB/s with %u threads: %.2f G parameters/s is the most that Adam can reach",
	    bandwidth, s->info.threads, bandwidth / 28);
	if (ratio[SPEED_REPEAT / 2] < 0.9)
		say(s, WARN, "adam", "%.2f of the memory's bandwidth with %s; 0.90 is usual: is something else running, or OFFSTAGE_ISA set (can run: %s)?",
		    ratio[SPEED_REPEAT / 2], s->info.isa, s->info.isas);
	else
		say(s, OK, "adam", "%.2f of the memory's bandwidth with %s", ratio[SPEED_REPEAT / 2], s->info.isa);
}

/* One step of two dtypes over values that trouble rounding; the sum of all result bits. */
static int digest_isa(const char *isa, uint64_t *digest)
{
	struct offstage_options o = { .size = sizeof(o), .threads = 1, .isa = isa, .lock = OFFSTAGE_PREFER };
	static const uint32_t dtypes[] = { OFFSTAGE_F32, OFFSTAGE_BF16, OFFSTAGE_F16 };
	const uint64_t n = 65536 + 13;	/* no multiple of any vector */
	struct offstage *ctx;
	int ret = offstage_open(&o, &ctx);

	if (ret)
		return ret;
	*digest = 14695981039346656037u;
	for (uint32_t d = 0; d < 3 && !ret; d++) {
		struct arrays a;

		ret = arrays_create(ctx, &a, n, dtypes[d], dtypes[d]);
		if (ret)
			break;
		if (dtypes[d] != OFFSTAGE_F32)	/* every 16-bit value there is: denormals, Inf, NaN */
			for (uint32_t i = 0; i < 65536; i++)
				((uint16_t *)a.grad)[i] = (uint16_t)i;
		for (uint64_t t = 1; t <= 3 && !ret; t++)
			ret = arrays_adam(ctx, &a, n, t, 0);
		for (uint64_t i = 0; i < n; i++) {
			uint32_t bits[4] = { 0 };

			memcpy(&bits[0], a.master + i, 4);
			memcpy(&bits[1], a.exp_avg + i, 4);
			memcpy(&bits[2], a.exp_avg_sq + i, 4);
			memcpy(&bits[3], (char *)a.param + i * dtype_size(dtypes[d]), dtype_size(dtypes[d]));
			for (uint32_t k = 0; k < 4; k++)
				*digest = (*digest ^ bits[k]) * 1099511628211u;
		}
		arrays_close(&a);
	}
	offstage_close(ctx);
	return ret;
}

static void test_same_bits(struct selftest *s)
{
	char isas[sizeof(s->info.isas)], *rest = isas;
	uint64_t first = 0, digest;
	const char *name, *first_name = NULL;

	memcpy(isas, s->info.isas, sizeof(isas));
	while ((name = strtok_r(rest, " ", &rest))) {
		if (digest_isa(name, &digest)) {
			say(s, FAIL, "same-bits", "%s: %s", name, offstage_error());
			return;
		}
		if (!first_name) {
			first_name = name;
			first = digest;
		} else if (digest != first) {
			say(s, FAIL, "same-bits", "%s and %s give different results: a fault of the library or of this CPU; please report it with the output of offstage info",
			    first_name, name);
			return;
		}
	}
	say(s, OK, "same-bits", "the same results from each of: %s", s->info.isas);
}

/* ---- placement and memory -------------------------------------------------------------------------------------------- */

static void test_node(struct selftest *s, const struct offstage_node_info *node)
{
	uint64_t bytes = s->quick ? 1u << 20 : 16u << 20, found[OFFSTAGE_NODES_MAX] = { 0 };
	struct offstage_buffer_options o = { .size = sizeof(o), .lock = OFFSTAGE_PREFER, .placement = OFFSTAGE_BIND,
					     .n_nodes = 1, .nodes = &node->node };
	struct offstage_buffer_info info = { .size = sizeof(info) };
	struct offstage_buffer *buffer;
	char name[32];

	snprintf(name, sizeof(name), "placement-node%u", node->node);
	if (!(node->flags & OFFSTAGE_NODE_ALLOWED)) {
		say(s, WARN, name, "outside this process's cpuset, not tried: add it to cpuset.mems to use it");
		return;
	}
	if (!(node->flags & OFFSTAGE_NODE_NORMAL)) {
		say(s, WARN, name, "has movable memory only, which can't be pinned for long: online it as online_kernel to use it");
		return;
	}
	if (offstage_buffer_create(s->ctx, bytes, &o, &buffer)) {
		say(s, FAIL, name, "%s", offstage_error());
		return;
	}
	if (offstage_buffer_nodes(buffer, found, OFFSTAGE_NODES_MAX) || offstage_buffer_info(buffer, &info))
		say(s, FAIL, name, "%s", offstage_error());
	else if (node->node < OFFSTAGE_NODES_MAX && found[node->node] < bytes)
		say(s, FAIL, name, "only %llu of %llu bytes lie there", (unsigned long long)found[node->node],
		    (unsigned long long)info.backed);
	else
		say(s, OK, name, "%llu MiB asked for there lie there", (unsigned long long)bytes >> 20);
	offstage_buffer_close(buffer);
}

static void test_placement(struct selftest *s)
{
	struct offstage_feature f;
	int ret;

	for (uint32_t i = 0;; i++) {
		f = (struct offstage_feature){ .size = sizeof(f) };
		if (offstage_feature(i, &f))
			break;
		if (!f.on && strstr(f.name, "numa")) {
			say(s, WARN, "placement", "%s", f.why);
			return;
		}
	}
	for (uint32_t i = 0;; i++) {
		struct offstage_node_info node = { .size = sizeof(node) };

		ret = offstage_node_info(s->ctx, i, &node);
		if (ret == -ENOENT)
			return;
		if (ret) {
			say(s, FAIL, "placement", "%s", offstage_error());
			return;
		}
		test_node(s, &node);
	}
}

static void test_huge(struct selftest *s, const char *name, uint32_t flags)
{
	struct offstage_buffer_options o = { .size = sizeof(o), .flags = flags, .lock = OFFSTAGE_PREFER };
	struct offstage_buffer_info info = { .size = sizeof(info) };
	struct offstage_buffer *buffer;
	unsigned int percent;

	if (offstage_buffer_create(s->ctx, s->quick ? 4u << 20 : 64u << 20, &o, &buffer)) {
		say(s, FAIL, name, "%s", offstage_error());
		return;
	}
	if (offstage_buffer_info(buffer, &info)) {
		say(s, FAIL, name, "%s", offstage_error());
	} else {
		percent = info.backed ? (unsigned int)(info.huge * 100 / info.backed) : 0;
		if (percent >= 90)
			say(s, OK, name, "%u%% of a buffer (%s)", percent, info.memory);
		else
			say(s, WARN, name, "%u%% of a buffer (%s)%s%s", percent, info.memory, *info.why ? ": " : "",
			    info.why);
	}
	offstage_buffer_close(buffer);
}

static void test_limits(struct selftest *s)
{
	const struct offstage_info *i = &s->info;
	double gib = (double)i->memory_available / (1u << 30);

	if (i->memlock_limit == UINT64_MAX)
		say(s, OK, "locked-memory", "unlimited");
	else
		say(s, WARN, "locked-memory", "at most %llu KiB: raise it with ulimit -l unlimited, LimitMEMLOCK=infinity in a service, or docker run --ulimit memlock=-1",
		    (unsigned long long)i->memlock_limit >> 10);
	if (i->memory_available < (uint64_t)1 << 30)
		say(s, WARN, "memory", "%.2f GiB available (%s): too little for any real model", gib, i->memory_limit);
	else
		say(s, OK, "memory", "%.1f GiB available (%s), state for %.1f G parameters", gib, i->memory_limit, gib * 1.0737 / 14);
	if (strcmp(i->thp, "never") == 0 || !i->huge_page_size)
		say(s, WARN, "transparent-huge", "off: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled");
	else
		say(s, OK, "transparent-huge", "%s", i->thp);
	say(s, OK, "hugetlb", "%llu MiB reserved and free%s", (unsigned long long)i->hugetlb_free >> 20,
	    i->hugetlb_free ? "" : "; none are needed while transparent huge pages can be had");
	say(s, OK, "threads", "%u: %s", i->threads, i->threads_why);
}

/* ---- the step ---------------------------------------------------------------------------------------------------------- */

/* A small model on an emulated link: does it move, and is the steady state free (law 1)? */
static int run_steps(struct selftest *s, struct offstage_optimizer *optimizer, const void *grad, uint32_t steps)
{
	struct offstage_group group = { .size = sizeof(group), .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8 };
	struct offstage_step_options o = { .size = sizeof(o), .groups = &group, .n_groups = 1, .max_norm = 1 };

	for (uint32_t k = 0; k < steps; k++) {
		struct offstage_step_result result = { .size = sizeof(result) };
		int ret = offstage_drain(optimizer, 0, grad, NULL);

		if (!ret)
			ret = offstage_step(optimizer, &o, &result);
		if (!ret)
			ret = offstage_wait(optimizer, OFFSTAGE_ALL, NULL);
		if (ret || result.skipped) {
			if (ret)
				say(s, FAIL, "step", "%s", offstage_error());
			else
				say(s, FAIL, "step", "skipped though its gradients are finite");
			return -1;
		}
	}
	return 0;
}

static void test_step(struct selftest *s)
{
	enum { N = 100003 };
	struct offstage_optimizer_options o = { .size = sizeof(o), .subgroup = 16384 };
	struct offstage_buffer_options placed = { .size = sizeof(placed), .lock = OFFSTAGE_PREFER };
	struct offstage_stats before = { .size = sizeof(before) }, after = { .size = sizeof(after) };
	struct offstage_optimizer *optimizer = NULL;
	uint16_t *grad = malloc(N * sizeof(*grad)), *param = malloc(N * sizeof(*param));
	struct offstage_tensor tensor = { .size = sizeof(tensor), .name = "weight", .count = N, .param_dtype = OFFSTAGE_BF16,
					  .grad_dtype = OFFSTAGE_BF16, .param = param };
	uint16_t first;

	if (!grad || !param) {
		say(s, FAIL, "step", "out of memory");
		goto out;
	}
	fill_elements(grad, N, OFFSTAGE_BF16, 0.01f);
	fill_elements(param, N, OFFSTAGE_BF16, 0.05f);
	first = param[0];
	o.state = o.staging = &placed;
	if (offstage_optimizer_create(s->ctx, &o, &optimizer) || offstage_optimizer_add(optimizer, &tensor, 1)) {
		say(s, FAIL, "step", "%s", offstage_error());
		goto out;
	}
	if (run_steps(s, optimizer, grad, 1))
		goto out;
	offstage_stats(s->ctx, &before);
	if (run_steps(s, optimizer, grad, 3))
		goto out;
	offstage_stats(s->ctx, &after);
	if (param[0] == first)
		say(s, FAIL, "step", "parameters came back unchanged");
	else if (after.allocations != before.allocations || after.pins != before.pins || after.threads != before.threads)
		say(s, FAIL, "step", "later steps allocated %llu times, locked %llu ranges and started %llu threads: please report it",
		    (unsigned long long)(after.allocations - before.allocations),
		    (unsigned long long)(after.pins - before.pins), (unsigned long long)(after.threads - before.threads));
	else
		say(s, OK, "step", "drain, update and refill work, and steps after the first allocate and lock nothing");
out:
	offstage_optimizer_close(optimizer);
	free(grad);
	free(param);
}

int command_selftest(int argc, char **argv)
{
	struct offstage_options o = { .size = sizeof(o), .lock = OFFSTAGE_PREFER };
	struct selftest s = { .info = { .size = sizeof(s.info) } };
	int status = arguments_only(argc, argv, "--quick", help, &s.quick);

	if (status >= 0)
		return status;
	if (offstage_open(&o, &s.ctx) || offstage_info(s.ctx, &s.info)) {
		status = library_failed();
		offstage_close(s.ctx);
		return status;
	}
	test_speed(&s);
	test_same_bits(&s);
	test_step(&s);
	test_placement(&s);
	test_huge(&s, "huge-pages", 0);
	test_huge(&s, "huge-shareable", OFFSTAGE_BUFFER_SHAREABLE);
	test_limits(&s);
	offstage_close(s.ctx);
	return s.failed ? STATUS_FAILED : 0;
}
