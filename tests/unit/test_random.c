/* SPDX-License-Identifier: MIT */
/*
 * The whole optimizer against a simple model of it, over random lists of tensors and random sequences of calls. The model
 * keeps plain arrays, and updates a tensor with one call of the reference arithmetic: no slots, no threads, no order.
 * Everything that can be read is compared after each step, bit for bit.
 *
 * OFFSTAGE_TEST_SEED chooses the first seed, OFFSTAGE_TEST_ROUNDS how many follow it.
 */
#include <math.h>
#include <stdlib.h>
#include "unit.h"
#include "../../lib/heap.h"
#include "../../lib/optimizer.h"

enum { TENSORS_MAX = 60, GROUPS = 3 };

struct one {
	char name[16];
	uint64_t count, steps;
	uint32_t group, param_dtype, grad_dtype;
	void *param, *grad;		/* on the "device" */
	float *master, *sum;
	void *exp_avg, *exp_avg_sq;
	bool drained;
};

static struct one ones[TENSORS_MAX];
static uint32_t n_ones;
static uint64_t random_state, seed;
static struct offstage *ctx;
static struct offstage_optimizer *o;
static uint32_t moment_dtype;
static bool accumulate, stochastic;
static bool failing;			/* a copy of this step is made to fail */

static uint32_t any(uint32_t below)
{
	random_state ^= random_state << 13;
	random_state ^= random_state >> 7;
	random_state ^= random_state << 17;
	return (uint32_t)(random_state >> 20) % below;
}

static bool chance(uint32_t percent)
{
	return any(100) < percent;
}

static void fill(uint32_t dtype, void *array, uint64_t n)
{
	for (uint64_t i = 0; i < n; i++) {
		float x = ((float)any(2000001) - 1000000) / 500000;

		adam_c.narrow[dtype]((char *)array + i * adam_dtype_size(dtype), &x, 1);
	}
}

static void load(struct one *t)
{
	if (t->param)
		adam_c.widen[t->param_dtype](t->master, t->param, t->count);
}

static void add(uint32_t n)
{
	struct offstage_tensor tensors[TENSORS_MAX] = { { 0 } };

	if (n > TENSORS_MAX - n_ones)
		n = TENSORS_MAX - n_ones;
	for (uint32_t i = 0; i < n; i++) {
		struct one *t = &ones[n_ones + i];

		memset(t, 0, sizeof(*t));
		snprintf(t->name, sizeof(t->name), "t%u", (n_ones + i) * 7919 % 1000);
		t->count = chance(10) ? 0 : chance(60) ? any(200) : chance(80) ? any(20000) : any(300000);
		t->group = any(GROUPS);
		t->param_dtype = any(3);
		t->grad_dtype = any(3);
		t->master = calloc(t->count + 1, 4);
		t->sum = calloc(t->count + 1, 4);
		t->exp_avg = calloc(t->count + 1, 4);
		t->exp_avg_sq = calloc(t->count + 1, 4);
		t->grad = calloc(t->count + 1, 4);
		if (chance(90))
			t->param = calloc(t->count + 1, 4);
		if (t->param)
			fill(t->param_dtype, t->param, t->count);
		load(t);
		tensors[i] = (struct offstage_tensor){ .size = sizeof(*tensors), .group = t->group, .name = t->name,
			.count = t->count, .param_dtype = t->param_dtype, .grad_dtype = t->grad_dtype, .param = t->param };
	}
	/* A failure on the way, and then as if it had never been; of this, not of a refill that is under way. */
	OK(offstage_wait(o, OFFSTAGE_ALL, NULL));
	for (uint64_t k = 1 + any(20); n && chance(30); k = 1 + any(20)) {
		int ret;

		if (chance(50))
			heap_fail_nth(k);
		else
			host_fail_copy(k);
		ret = offstage_optimizer_add(o, tensors, n);
		heap_fail_nth(0);
		host_fail_copy(0);
		if (ret == 0) {
			n_ones += n;
			return;
		}
		assert_true(ret == -ENOMEM || ret == -EIO);
	}
	OK(offstage_optimizer_add(o, tensors, n));
	n_ones += n;
}

/* Drains some tensors in random order; those that have been are told apart by `drained`. */
static void drain_some(struct offstage_stream *stream, uint32_t percent)
{
	for (uint32_t i = 0, k = any(n_ones); i < n_ones; i++, k = (k + 1) % n_ones) {
		struct one *t = &ones[k];

		if (!chance(percent) || (t->drained && !accumulate))
			continue;
		if (t->drained)
			assert_true(offstage_drain_wait(o, k, NULL) == 0 || failing);
		fill(t->grad_dtype, t->grad, t->count);
		for (uint64_t at = 0; at < t->count; at += ADAM_LEAF) {
			size_t n = t->count - at < ADAM_LEAF ? t->count - at : ADAM_LEAF;

			adam_c.accumulate[t->grad_dtype](t->sum + at, (char *)t->grad + at * adam_dtype_size(t->grad_dtype), n,
							 !t->drained);
		}
		OK(offstage_drain(o, k, t->grad, chance(50) ? stream : NULL));
		t->drained = true;
	}
}

static void forget(void)
{
	for (uint32_t k = 0; k < n_ones; k++)
		ones[k].drained = false;
}

static void update(const struct offstage_group *groups, double scale)
{
	enum adam_moments moments = moment_dtype == OFFSTAGE_F32 ? ADAM_MOMENTS_F32 :
				    stochastic ? ADAM_MOMENTS_BF16_STOCHASTIC : ADAM_MOMENTS_BF16;

	for (uint32_t k = 0; k < n_ones; k++) {
		struct one *t = &ones[k];
		struct adam_factors f;
		struct adam_span span = { t->master, t->exp_avg, t->exp_avg_sq, t->sum, t->param, 0, t->count };

		if (!t->drained)
			continue;
		adam_factors(&f, &groups[t->group], scale, ++t->steps, seed, k);
		adam_c.update[OFFSTAGE_F32][t->param_dtype][moments](&span, &f);
	}
}

static void compare(void **params)
{
	float *out = malloc(300000 * 4), *want = malloc(300000 * 4);

	for (uint32_t k = 0; k < n_ones; k++) {
		struct one *t = &ones[k];
		const void *arrays[] = { t->master, t->exp_avg, t->exp_avg_sq };
		uint64_t steps;

		OK(offstage_steps_get(o, k, &steps));
		assert_int_equal(steps, t->steps);
		for (int which = 0; which < 3; which++) {
			OK(offstage_state_read(o, k, (enum offstage_state)which, 0, t->count, out));
			adam_c.widen[which ? moment_dtype : OFFSTAGE_F32](want, arrays[which], t->count);
			if (memcmp(out, want, t->count * 4) != 0)
				fail_msg("seed %llu: state %d of tensor %u differs", (unsigned long long)seed, which, k);
		}
		if (params[k] && memcmp(params[k], t->param, t->count * adam_dtype_size(t->param_dtype)) != 0)
			fail_msg("seed %llu: parameter %u differs", (unsigned long long)seed, k);
	}
	free(out), free(want);
}

static void one_step(struct offstage_stream *stream)
{
	struct offstage_group groups[GROUPS];
	struct offstage_step_options options = { .size = sizeof(options), .groups = groups, .n_groups = GROUPS };
	struct offstage_step_result r = { .size = sizeof(r) };
	uint32_t order[TENSORS_MAX], percent = chance(50) ? 100 : any(101);
	bool early = chance(25);
	void *params[TENSORS_MAX] = { NULL };
	double scale;
	int ret;

	for (int i = 0; i < GROUPS; i++)
		groups[i] = (struct offstage_group){ .size = sizeof(*groups), .flags = any(4), .lr = any(10) * 1e-3,
			.beta1 = any(10) * 0.1, .beta2 = any(10) * 0.1, .eps = 1e-8 * any(3) + 1e-30, .weight_decay = any(3) * 0.1 };
	options.loss_scale = chance(50) ? 0 : ldexp(1, (int)any(40) - 20);
	options.n_order = any(n_ones + 1);
	for (uint32_t i = 0; i < options.n_order; i++)
		order[i] = any(n_ones);
	options.order = order;
	failing = false;
	for (uint32_t batch = accumulate ? any(3) : 0; batch; batch--)
		drain_some(stream, percent);
	if (early) {
		options.flags = OFFSTAGE_STEP_APPLY_NONFINITE;
		OK(offstage_step_early(o, &options));
	} else if (chance(30)) {
		options.max_norm = 0.5;
	}
	if (!early && chance(15)) {
		/* A refill that is still under way would take the failure. */
		OK(offstage_wait(o, OFFSTAGE_ALL, NULL));
		host_fail_copy(1 + any(10));
		failing = true;
	}
	drain_some(stream, percent);
	if (chance(10)) {
		ret = offstage_abandon(o);
		assert_true(ret == 0 || (early && ret == -EALREADY));
		if (ret == 0) {
			host_fail_copy(0);
			forget();
			return;
		}
	}
	/* The model writes parameters, too, so the library's are kept beside. */
	ret = offstage_drain_finish(o, NULL);
	host_fail_copy(0);
	if (ret) {
		assert_true(failing && ret == -EIO);
		forget();
		return;
	}
	OK(offstage_step(o, early ? NULL : &options, &r));
	if (chance(50)) {
		uint32_t k = any(n_ones);

		OK(offstage_wait(o, k, chance(50) ? stream : NULL));
	}
	OK(offstage_wait(o, OFFSTAGE_ALL, NULL));
	for (uint32_t k = 0; k < n_ones; k++) {
		size_t bytes = ones[k].count * adam_dtype_size(ones[k].param_dtype);

		if (ones[k].param) {
			params[k] = malloc(bytes + 1);
			memcpy(params[k], ones[k].param, bytes);
		}
	}
	scale = r.clip / (options.loss_scale ? options.loss_scale : 1);
	if (r.skipped) {
		assert_int_equal(r.skipped, OFFSTAGE_SKIP_EMPTY);
	} else {
		update(groups, scale);
	}
	forget();
	compare(params);
	for (uint32_t k = 0; k < n_ones; k++)
		free(params[k]);
}

static void between_steps(void)
{
	uint32_t k = any(n_ones);
	struct one *t = &ones[k];

	switch (any(4)) {
	case 0:
		add(1 + any(5));
		break;
	case 1:
		if (!t->param)
			break;
		fill(t->param_dtype, t->param, t->count);
		OK(offstage_reload(o, k));
		load(t);
		break;
	case 2:
		if (!t->count)
			break;
		t->master[t->count - 1] = 3;
		OK(offstage_state_write(o, k, OFFSTAGE_MASTER, t->count - 1, 1, &t->master[t->count - 1]));
		if (t->param)
			adam_c.narrow[t->param_dtype](t->param, t->master, t->count);
		OK(offstage_refill(o, chance(50) ? NULL : &k, 1));
		if (chance(50))
			OK(offstage_wait(o, k, NULL));
		break;
	case 3:
		t->steps = any(1000);
		OK(offstage_steps_set(o, k, t->steps));
		break;
	}
}

static void round_of(uint64_t this_seed)
{
	struct offstage_options options = { .size = sizeof(options), .lock = OFFSTAGE_PREFER };
	struct offstage_device_options link = { .size = sizeof(link) };
	struct offstage_optimizer_options oo = { .size = sizeof(oo), .seed = this_seed };
	struct offstage_device *device;
	struct offstage_stream *stream;

	seed = this_seed;
	random_state = seed * 0x9e3779b97f4a7c15u + 1;
	options.threads = 1 + any(4);
	if (chance(30)) {
		link.d2h_bytes_per_s = link.h2d_bytes_per_s = 500000000;
		link.latency_ns = any(20000);
	}
	accumulate = chance(50);
	stochastic = chance(30);
	moment_dtype = stochastic || chance(30) ? OFFSTAGE_BF16 : OFFSTAGE_F32;
	oo.flags = (accumulate ? OFFSTAGE_OPTIMIZER_ACCUMULATE : 0) | (stochastic ? OFFSTAGE_OPTIMIZER_STOCHASTIC : 0);
	oo.moment_dtype = moment_dtype;
	oo.subgroup = 1 + any(chance(50) ? 10000 : 300000);
	if (chance(30))
		setenv("OFFSTAGE_DEBUG", "1", 1);
	OK(offstage_open(&options, &ctx));
	OK(offstage_device_open(ctx, &link, &device));
	OK(offstage_stream_create(device, &stream));
	oo.device = device;
	OK(offstage_optimizer_create(ctx, &oo, &o));
	unsetenv("OFFSTAGE_DEBUG");
	n_ones = 0;
	add(1 + any(20));
	for (int i = 0; i < 8; i++) {
		one_step(stream);
		if (chance(40))
			between_steps();
	}
	offstage_optimizer_close(o);
	offstage_stream_close(stream);
	OK(offstage_device_close(device));
	offstage_close(ctx);
	for (uint32_t k = 0; k < n_ones; k++) {
		struct one *t = &ones[k];

		free(t->param), free(t->grad), free(t->master), free(t->sum), free(t->exp_avg), free(t->exp_avg_sq);
	}
}

static void test_any_sequence_of_calls_gives_the_models_bits(void **unused)
{
	const char *first = getenv("OFFSTAGE_TEST_SEED"), *rounds = getenv("OFFSTAGE_TEST_ROUNDS");
	uint64_t from = first ? strtoull(first, NULL, 10) : 1, n = rounds ? strtoull(rounds, NULL, 10) : 20;

	(void)unused;
	for (uint64_t i = 0; i < n; i++) {
		if (rounds)
			print_message("seed %llu\n", (unsigned long long)(from + i));
		round_of(from + i);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_any_sequence_of_calls_gives_the_models_bits),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
