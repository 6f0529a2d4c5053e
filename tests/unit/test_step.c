/* SPDX-License-Identifier: MIT */
/* The step engine's promises: laws 1 to 5, orderings, failures, and what a trainer relies on. */
#include <math.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "unit.h"
#include "../../lib/heap.h"
#include "../../lib/optimizer.h"

/* ---- a model: tensors of odd sizes, with parameters and gradients in "device" memory --------------------------------- */

#define TENSORS 9
static const uint64_t counts[TENSORS] = { 1, 5000, 0, 31, 70001, 4096, 3, 130000, 8191 };

struct model {
	struct offstage *ctx;
	struct offstage_optimizer *o;
	uint32_t dtype;
	void *param[TENSORS], *grad[TENSORS];
	char names[TENSORS][16];
};

struct setup {
	uint32_t dtype, moment_dtype, threads, flags;
	uint64_t subgroup;
	struct offstage_device_options *device;
	const char *isa, *provider;
};

static uint64_t seed_state;

static float random_float(void)
{
	seed_state = seed_state * 6364136223846793005u + 1442695040888963407u;
	return (float)((double)(seed_state >> 11) / 9007199254740992.0 * 2 - 1);
}

static void put(const struct model *m, void *array, uint64_t i, float value)
{
	uint32_t u;

	memcpy(&u, &value, 4);
	if (m->dtype == OFFSTAGE_F32)
		((float *)array)[i] = value;
	else if (m->dtype == OFFSTAGE_BF16)
		((uint16_t *)array)[i] = (uint16_t)(u >> 16);
	else
		m->ctx->adam->narrow[OFFSTAGE_F16]((uint16_t *)array + i, &value, 1);
}

static void fill_gradients(const struct model *m, uint64_t seed)
{
	seed_state = seed;
	for (int k = 0; k < TENSORS; k++)
		for (uint64_t i = 0; i < counts[k]; i++)
			put(m, m->grad[k], i, random_float());
}

static struct offstage_device *device_of_model;

static void model_open(struct model *m, const struct setup *s)
{
	struct offstage_options options = { .size = sizeof(options), .threads = s->threads, .isa = s->isa,
					    .provider = s->provider, .lock = OFFSTAGE_PREFER };
	struct offstage_optimizer_options o = { .size = sizeof(o), .flags = s->flags, .subgroup = s->subgroup,
						.moment_dtype = s->moment_dtype, .seed = 7 };
	struct offstage_tensor tensors[TENSORS] = { { 0 } };

	memset(m, 0, sizeof(*m));
	OK(offstage_open(&options, &m->ctx));
	m->dtype = s->dtype;
	device_of_model = NULL;
	if (s->device)
		OK(offstage_device_open(m->ctx, s->device, &device_of_model));
	o.device = device_of_model;
	OK(offstage_optimizer_create(m->ctx, &o, &m->o));
	seed_state = 1;
	for (int k = 0; k < TENSORS; k++) {
		m->param[k] = calloc(counts[k] + 1, 4);
		m->grad[k] = calloc(counts[k] + 1, 4);
		for (uint64_t i = 0; i < counts[k]; i++)
			put(m, m->param[k], i, random_float());
		snprintf(m->names[k], sizeof(m->names[k]), "layer.%d", TENSORS - k);
		tensors[k] = (struct offstage_tensor){ .size = sizeof(tensors[k]), .name = m->names[k], .count = counts[k],
						       .param_dtype = s->dtype, .grad_dtype = s->dtype, .param = m->param[k] };
	}
	OK(offstage_optimizer_add(m->o, tensors, TENSORS));
}

static void model_close(struct model *m)
{
	offstage_optimizer_close(m->o);
	if (device_of_model)
		OK(offstage_device_close(device_of_model));
	device_of_model = NULL;
	offstage_close(m->ctx);
	for (int k = 0; k < TENSORS; k++) {
		free(m->param[k]);
		free(m->grad[k]);
	}
}

static const struct offstage_group adamw = { .size = sizeof(adamw), .lr = 1e-2, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8,
					     .weight_decay = 0.01 };

static struct offstage_step_options step_options(void)
{
	return (struct offstage_step_options){ .size = sizeof(struct offstage_step_options), .groups = &adamw, .n_groups = 1 };
}

static void drain_all(struct model *m)
{
	for (uint32_t k = 0; k < TENSORS; k++)
		OK(offstage_drain(m->o, k, m->grad[k], NULL));
}

static struct offstage_step_result step_with(struct model *m, const struct offstage_step_options *options)
{
	struct offstage_step_result r = { .size = sizeof(r) };

	OK(offstage_step(m->o, options, &r));
	OK(offstage_wait(m->o, OFFSTAGE_ALL, NULL));
	return r;
}

static struct offstage_step_result step(struct model *m)
{
	struct offstage_step_options options = step_options();

	return step_with(m, &options);
}

/* Everything a step may change, as one array of bytes. */
static void *snapshot(struct model *m, size_t *size)
{
	size_t bytes = 0, at = 0;
	char *all;

	for (int k = 0; k < TENSORS; k++)
		bytes += counts[k] * 16 + 8;
	all = calloc(1, bytes);
	for (uint32_t k = 0; k < TENSORS; k++) {
		size_t param = counts[k] * adam_dtype_size(m->dtype);

		for (int which = 0; which < 3; which++, at += counts[k] * 4)
			OK(offstage_state_read(m->o, k, (enum offstage_state)which, 0, counts[k], (float *)(all + at)));
		if (param)
			memcpy(all + at, m->param[k], param);
		at += counts[k] * 4;
		OK(offstage_steps_get(m->o, k, (uint64_t *)(all + at)));
		at += 8;
	}
	*size = bytes;
	return all;
}

static void *train(const struct setup *s, int steps, size_t *size)
{
	struct model m;
	void *bits;

	model_open(&m, s);
	for (int i = 0; i < steps; i++) {
		fill_gradients(&m, 100 + (uint64_t)i);
		drain_all(&m);
		step(&m);
	}
	bits = snapshot(&m, size);
	model_close(&m);
	return bits;
}

static void assert_same_bits(const struct setup *a, const struct setup *b)
{
	size_t n, n2;
	void *x = train(a, 3, &n), *y = train(b, 3, &n2);

	assert_int_equal(n, n2);
	assert_memory_equal(x, y, n);
	free(x);
	free(y);
}

/* ---- what a step computes ------------------------------------------------------------------------------------------------ */

static void test_step_is_adam_over_each_tensor(void **unused)
{
	(void)unused;
	for (uint32_t dtype = 0; dtype < 3; dtype++) {
		struct setup s = { .dtype = dtype, .subgroup = 20000 };
		struct model m;

		model_open(&m, &s);
		for (uint64_t t = 1; t <= 2; t++) {
			fill_gradients(&m, t);
			drain_all(&m);
			for (uint32_t k = 0; k < TENSORS; k++) {
				float *w = calloc(counts[k] + 1, 4), *a = calloc(counts[k] + 1, 4), *q = calloc(counts[k] + 1, 4);
				void *p = calloc(counts[k] + 1, 4);
				struct offstage_adam adam = { .size = sizeof(adam), .n = counts[k], .master = w, .exp_avg = a,
					.exp_avg_sq = q, .grad = m.grad[k], .param = p, .grad_dtype = dtype, .param_dtype = dtype,
					.group = &adamw, .t = t };

				/* State before this step is what the last one left: both start from the same. */
				OK(offstage_abandon(m.o));
				for (int which = 0; which < 3; which++)
					OK(offstage_state_read(m.o, k, (enum offstage_state)which, 0, counts[k],
							       which == 0 ? w : which == 1 ? a : q));
				OK(offstage_adam(m.ctx, &adam));
				OK(offstage_drain(m.o, k, m.grad[k], NULL));
				step(&m);
				if (counts[k])
					assert_memory_equal(p, m.param[k], counts[k] * adam_dtype_size(dtype));
				free(w), free(a), free(q), free(p);
			}
		}
		model_close(&m);
	}
}

static void test_subgroup_size_changes_no_bit(void **unused)
{
	(void)unused;
	for (uint32_t dtype = 0; dtype < 3; dtype++) {
		struct setup whole = { .dtype = dtype }, small = { .dtype = dtype, .subgroup = 1 },
			     odd = { .dtype = dtype, .subgroup = 33333 };

		assert_same_bits(&whole, &small);
		assert_same_bits(&whole, &odd);
	}
}

static void test_number_of_threads_changes_no_bit(void **unused)
{
	struct setup one = { .dtype = OFFSTAGE_BF16, .threads = 1 }, many = { .dtype = OFFSTAGE_BF16, .threads = 7 };

	(void)unused;
	assert_same_bits(&one, &many);
}

static void test_isa_changes_no_bit(void **unused)
{
	(void)unused;
	for (unsigned i = 0; adam_all[i]; i++) {
		struct setup plain = { .dtype = OFFSTAGE_BF16, .isa = "c", .moment_dtype = OFFSTAGE_BF16,
				       .flags = OFFSTAGE_OPTIMIZER_STOCHASTIC };
		struct setup other = plain;

		other.isa = adam_all[i]->name;
		other.subgroup = 5000;
		if (adam_all[i]->usable())
			assert_same_bits(&plain, &other);
	}
}

static void test_provider_changes_no_bit(void **unused)
{
	struct offstage_options options = { .size = sizeof(options), .provider = "kmod" };
	struct offstage *ctx;

	(void)unused;
	if (offstage_open(&options, &ctx))
		SKIP("%s", offstage_error());
	offstage_close(ctx);
	for (uint32_t dtype = 0; dtype < 3; dtype++) {
		struct setup user = { .dtype = dtype, .subgroup = 20000, .provider = "user" },
			     module = { .dtype = dtype, .subgroup = 20000, .provider = "kmod" };

		assert_same_bits(&user, &module);
	}
}

static void test_emulated_link_changes_no_bit(void **unused)
{
	struct offstage_device_options slow = { .size = sizeof(slow), .d2h_bytes_per_s = 200000000, .h2d_bytes_per_s = 300000000,
						.latency_ns = 20000 };
	struct setup fast = { .dtype = OFFSTAGE_F16 }, linked = { .dtype = OFFSTAGE_F16, .device = &slow, .subgroup = 9000 };

	(void)unused;
	assert_same_bits(&fast, &linked);
}

static void test_early_step_gives_the_same_bits(void **unused)
{
	struct setup s = { .dtype = OFFSTAGE_BF16, .subgroup = 10000 };
	size_t n, n2;
	void *late = train(&s, 3, &n), *early;
	struct model m;

	(void)unused;
	model_open(&m, &s);
	for (int i = 0; i < 3; i++) {
		struct offstage_step_options options = step_options();
		struct offstage_step_result r = { .size = sizeof(r) };

		options.flags = OFFSTAGE_STEP_APPLY_NONFINITE;
		fill_gradients(&m, 100 + (uint64_t)i);
		OK(offstage_step_early(m.o, &options));
		for (uint32_t k = TENSORS; k-- > 0;)
			OK(offstage_drain(m.o, k, m.grad[k], NULL));
		OK(offstage_step(m.o, NULL, &r));
		OK(offstage_wait(m.o, OFFSTAGE_ALL, NULL));
		assert_int_equal(r.updated, TENSORS);
	}
	early = snapshot(&m, &n2);
	assert_int_equal(n, n2);
	assert_memory_equal(late, early, n);
	free(late);
	free(early);
	model_close(&m);
}

static void test_early_step_with_absent_gradients_updates_the_others(void **unused)
{
	struct setup s = { .dtype = OFFSTAGE_F32, .subgroup = 10000, .flags = OFFSTAGE_OPTIMIZER_ACCUMULATE };
	struct offstage_step_options options = step_options();
	struct offstage_step_result r = { .size = sizeof(r) };
	struct model m;
	uint64_t steps;

	(void)unused;
	options.flags = OFFSTAGE_STEP_APPLY_NONFINITE;
	model_open(&m, &s);
	fill_gradients(&m, 5);
	OK(offstage_drain(m.o, 7, m.grad[7], NULL));	/* an earlier micro-batch */
	OK(offstage_step_early(m.o, &options));
	OK(offstage_drain(m.o, 1, m.grad[1], NULL));
	OK(offstage_drain(m.o, 7, m.grad[7], NULL));
	OK(offstage_step(m.o, NULL, &r));
	OK(offstage_wait(m.o, OFFSTAGE_ALL, NULL));
	for (uint32_t k = 0; k < TENSORS; k++) {
		OK(offstage_steps_get(m.o, k, &steps));
		assert_int_equal(steps, k == 1 || k == 7);
	}
	step(&m);	/* nothing drained: skipped, and everything is whole */
	model_close(&m);
}

static void test_early_step_applies_what_only_earlier_micro_batches_had(void **unused)
{
	struct setup s = { .dtype = OFFSTAGE_F32, .subgroup = 10000, .flags = OFFSTAGE_OPTIMIZER_ACCUMULATE };
	struct offstage_step_options options = step_options();
	struct offstage_step_result r = { .size = sizeof(r) };
	size_t n, n2;
	void *bits[2];
	struct model m;

	(void)unused;
	options.flags = OFFSTAGE_STEP_APPLY_NONFINITE;
	for (int announced = 0; announced < 2; announced++) {
		model_open(&m, &s);
		fill_gradients(&m, 5);
		for (uint32_t k = 0; k < TENSORS; k++)
			if (k != 3)
				OK(offstage_drain(m.o, k, m.grad[k], NULL));
		/* The last micro-batch uses two of them, as experts of a model do. */
		if (announced)
			OK(offstage_step_early(m.o, &options));
		OK(offstage_drain(m.o, 1, m.grad[1], NULL));
		OK(offstage_drain(m.o, 7, m.grad[7], NULL));
		OK(offstage_step(m.o, announced ? NULL : &options, &r));
		OK(offstage_wait(m.o, OFFSTAGE_ALL, NULL));
		assert_int_equal(r.updated, TENSORS - 1);
		bits[announced] = snapshot(&m, announced ? &n2 : &n);
		model_close(&m);
	}
	assert_int_equal(n, n2);
	assert_memory_equal(bits[0], bits[1], n);
	free(bits[0]), free(bits[1]);
}

static void test_early_step_refuses_what_it_cannot_know(void **unused)
{
	struct setup s = { .dtype = OFFSTAGE_F32 };
	struct offstage_step_options options = step_options();
	struct model m;

	(void)unused;
	model_open(&m, &s);
	REFUSED(offstage_step_early(m.o, &options), -EINVAL, "before the norm is known");
	options.flags = OFFSTAGE_STEP_APPLY_NONFINITE;
	options.max_norm = 1;
	REFUSED(offstage_step_early(m.o, &options), -EINVAL, "before the norm is known");
	options.max_norm = 0;
	OK(offstage_drain(m.o, 1, m.grad[1], NULL));
	REFUSED(offstage_step_early(m.o, &options), -EBUSY, "before the first one");
	OK(offstage_abandon(m.o));
	OK(offstage_step_early(m.o, &options));
	REFUSED(offstage_step(m.o, &options, NULL), -EINVAL, "options NULL");
	OK(offstage_abandon(m.o));
	model_close(&m);
}

static void test_micro_batches_add_up_in_fp32(void **unused)
{
	struct setup s = { .dtype = OFFSTAGE_BF16, .subgroup = 30000, .flags = OFFSTAGE_OPTIMIZER_ACCUMULATE };
	struct setup wide = { .dtype = OFFSTAGE_F32, .subgroup = 50000 };
	struct model m, sum;
	double a, b;

	(void)unused;
	model_open(&m, &s);
	model_open(&sum, &wide);
	for (int batch = 0; batch < 3; batch++) {
		fill_gradients(&m, 40 + (uint64_t)batch);
		drain_all(&m);
		OK(offstage_drain_wait(m.o, OFFSTAGE_ALL, NULL));
		for (int k = 0; k < TENSORS; k++)
			for (uint64_t i = 0; i < counts[k]; i++) {
				uint32_t u = (uint32_t)((uint16_t *)m.grad[k])[i] << 16;
				float f;

				memcpy(&f, &u, 4);
				((float *)sum.grad[k])[i] = batch ? ((float *)sum.grad[k])[i] + f : f;
			}
	}
	drain_all(&sum);
	OK(offstage_drain_finish(m.o, &a));
	OK(offstage_drain_finish(sum.o, &b));
	assert_memory_equal(&a, &b, sizeof(a));
	/* Same gradients in fp32, and masters that differ only by how parameters started out. */
	step(&m);
	step(&sum);
	for (uint32_t k = 0; k < TENSORS; k++) {
		float *x = calloc(counts[k] + 1, 4), *y = calloc(counts[k] + 1, 4);

		OK(offstage_state_read(m.o, k, OFFSTAGE_EXP_AVG, 0, counts[k], x));
		OK(offstage_state_read(sum.o, k, OFFSTAGE_EXP_AVG, 0, counts[k], y));
		assert_memory_equal(x, y, counts[k] * 4 + 4);
		free(x), free(y);
	}
	model_close(&sum);
	model_close(&m);
}

static void test_second_gradient_without_accumulation_is_refused(void **unused)
{
	struct setup s = { .dtype = OFFSTAGE_F32 };
	struct model m;

	(void)unused;
	model_open(&m, &s);
	OK(offstage_drain(m.o, 1, m.grad[1], NULL));
	REFUSED(offstage_drain(m.o, 1, m.grad[1], NULL), -EALREADY, "ACCUMULATE");
	OK(offstage_drain_finish(m.o, NULL));
	REFUSED(offstage_drain(m.o, 3, m.grad[3], NULL), -EBUSY, "offstage_drain_finish");
	model_close(&m);
}

static void test_absent_gradient_leaves_its_tensor_untouched(void **unused)
{
	struct setup s = { .dtype = OFFSTAGE_BF16, .subgroup = 8192 };
	struct model m;
	size_t n;

	(void)unused;
	model_open(&m, &s);
	fill_gradients(&m, 3);
	for (uint32_t absent = 0; absent < TENSORS; absent++) {
		char *before = snapshot(&m, &n), *after;
		size_t at = 0;

		for (uint32_t k = 0; k < TENSORS; k++)
			if (k != absent)
				OK(offstage_drain(m.o, k, m.grad[k], NULL));
		assert_int_equal(step(&m).updated, TENSORS - 1);
		after = snapshot(&m, &n);
		for (uint32_t k = 0; k < TENSORS; k++) {
			size_t bytes = counts[k] * 16 + 8;

			if (k == absent)
				assert_memory_equal(before + at, after + at, bytes);
			else
				assert_memory_not_equal(before + at, after + at, bytes);
			at += bytes;
		}
		free(before), free(after);
	}
	model_close(&m);
}

static void test_norm_and_clip_are_those_of_torch(void **unused)
{
	struct setup s = { .dtype = OFFSTAGE_F32, .subgroup = 12345 };
	struct offstage_step_options options = step_options();
	struct offstage_step_result r;
	struct model m;
	long double sum = 0;

	(void)unused;
	model_open(&m, &s);
	fill_gradients(&m, 8);
	for (int k = 0; k < TENSORS; k++)
		for (uint64_t i = 0; i < counts[k]; i++)
			sum += (long double)((float *)m.grad[k])[i] * ((float *)m.grad[k])[i];
	drain_all(&m);
	options.max_norm = 0.5;
	options.loss_scale = 4;
	r = step_with(&m, &options);
	/* Under valgrind a long double is a double, and this plain sum the less precise of the two. */
	assert_true(fabs(r.norm / (double)(sqrtl(sum) / 4) - 1) < (getenv("OFFSTAGE_UNDER_VALGRIND") ? 1e-11 : 1e-14));
	assert_true(r.clip == 0.5 / (r.norm + 1e-6));
	drain_all(&m);
	options.max_norm = 1e6;
	r = step_with(&m, &options);
	assert_true(r.clip == 1);
	model_close(&m);
}

static void test_norm_is_the_same_bits_for_any_cut(void **unused)
{
	static const uint64_t subgroups[] = { 0, 1, 20000, 100000 };
	double first = 0;

	(void)unused;
	for (size_t i = 0; i < 4; i++) {
		struct setup s = { .dtype = OFFSTAGE_F32, .subgroup = subgroups[i], .threads = (uint32_t)i + 1 };
		struct model m;
		double sumsq;

		model_open(&m, &s);
		fill_gradients(&m, 77);
		drain_all(&m);
		OK(offstage_drain_finish(m.o, &sumsq));
		if (i == 0)
			first = sumsq;
		assert_memory_equal(&first, &sumsq, sizeof(sumsq));
		model_close(&m);
	}
}

/* ---- all or nothing ------------------------------------------------------------------------------------------------------ */

static void test_skipped_step_leaves_every_bit(void **unused)
{
	static const float bad[] = { INFINITY, -INFINITY, NAN };

	(void)unused;
	for (uint32_t dtype = 0; dtype < 3; dtype++) {
		for (int b = 0; b < 3; b++) {
			struct setup s = { .dtype = dtype, .subgroup = 9999,
					   .flags = b == 1 ? OFFSTAGE_OPTIMIZER_ACCUMULATE : 0 };
			struct offstage_step_result r;
			void *before, *after;
			struct model m;
			size_t n;

			model_open(&m, &s);
			fill_gradients(&m, 1);
			drain_all(&m);
			step(&m);
			before = snapshot(&m, &n);
			put(&m, m.grad[7], 129999, bad[b]);
			drain_all(&m);
			r = step(&m);
			assert_int_equal(r.skipped, OFFSTAGE_SKIP_NONFINITE);
			assert_int_equal(r.nonfinite, 7);
			after = snapshot(&m, &n);
			assert_memory_equal(before, after, n);
			free(after);
			/* And the next one goes on as if nothing had been. */
			fill_gradients(&m, 2);
			drain_all(&m);
			assert_int_equal(step(&m).skipped, OFFSTAGE_NOT_SKIPPED);
			free(before);
			model_close(&m);
		}
	}
}

static void test_nonfinite_gradients_are_applied_when_asked(void **unused)
{
	struct setup s = { .dtype = OFFSTAGE_F32 };
	struct offstage_step_options options = step_options();
	struct offstage_step_result r;
	struct model m;

	(void)unused;
	options.flags = OFFSTAGE_STEP_APPLY_NONFINITE;
	model_open(&m, &s);
	fill_gradients(&m, 1);
	((float *)m.grad[1])[17] = NAN;
	drain_all(&m);
	r = step_with(&m, &options);
	assert_int_equal(r.skipped, 0);
	assert_int_equal(r.nonfinite, 1);
	assert_true(isnan(((float *)m.param[1])[17]));
	assert_false(isnan(((float *)m.param[1])[16]));
	model_close(&m);
}

static void test_given_norm_hides_no_infinity(void **unused)
{
	struct setup s = { .dtype = OFFSTAGE_F32 };
	struct offstage_step_options options = step_options();
	struct offstage_step_result r;
	struct model m;
	size_t n;
	void *before, *after;

	(void)unused;
	model_open(&m, &s);
	before = snapshot(&m, &n);
	fill_gradients(&m, 1);
	((float *)m.grad[4])[77] = INFINITY;
	drain_all(&m);
	options.flags = OFFSTAGE_STEP_SUMSQ_GIVEN;
	options.sumsq = 1;
	r = step_with(&m, &options);
	assert_int_equal(r.skipped, OFFSTAGE_SKIP_NONFINITE);
	assert_int_equal(r.nonfinite, 4);
	after = snapshot(&m, &n);
	assert_memory_equal(before, after, n);
	free(before), free(after);
	model_close(&m);
}

static void test_loss_scale_that_fp32_cannot_undo_is_refused(void **unused)
{
	static const double bad[] = { 1e-39, 1e-300, 1e46, 1e300 }, good[] = { 1e-38, 0x1p127, 3e38 };
	struct setup s = { .dtype = OFFSTAGE_F32 };
	struct offstage_step_options options = step_options();
	struct model m;

	(void)unused;
	model_open(&m, &s);
	for (int i = 0; i < 4; i++) {
		options.loss_scale = bad[i];
		fill_gradients(&m, 1);
		drain_all(&m);
		REFUSED(offstage_step(m.o, &options, NULL), -EINVAL, "loss scale");
		OK(offstage_abandon(m.o));
	}
	for (int i = 0; i < 3; i++) {
		float master;

		options.loss_scale = good[i];
		drain_all(&m);
		assert_int_equal(step_with(&m, &options).updated, TENSORS);
		OK(offstage_state_read(m.o, 0, OFFSTAGE_MASTER, 0, 1, &master));
		assert_true(isfinite(master));
	}
	model_close(&m);
}

static void test_no_step_has_the_number_zero(void **unused)
{
	struct setup s = { .dtype = OFFSTAGE_F32 };
	struct model m;
	uint64_t steps;
	float master;

	(void)unused;
	model_open(&m, &s);
	/* The next one would be number 0, and its bias correction a division by zero. */
	REFUSED(offstage_steps_set(m.o, 0, UINT64_MAX), -EINVAL, "2^53");
	OK(offstage_steps_set(m.o, 0, (uint64_t)1 << 53));
	fill_gradients(&m, 1);
	drain_all(&m);
	step(&m);
	OK(offstage_steps_get(m.o, 0, &steps));
	assert_int_equal(steps, ((uint64_t)1 << 53) + 1);
	OK(offstage_state_read(m.o, 0, OFFSTAGE_MASTER, 0, 1, &master));
	assert_true(isfinite(master));
	model_close(&m);
}

static void test_failed_drain_changes_nothing_and_is_told(void **unused)
{
	struct setup s = { .dtype = OFFSTAGE_BF16, .subgroup = 20000 };
	struct offstage_step_options options = step_options();
	void *before, *after;
	struct model m;
	size_t n;

	(void)unused;
	model_open(&m, &s);
	fill_gradients(&m, 1);
	before = snapshot(&m, &n);
	host_fail_copy(5);
	drain_all(&m);
	REFUSED(offstage_step(m.o, &options, NULL), -EIO, "state and parameters are as they were");
	after = snapshot(&m, &n);
	assert_memory_equal(before, after, n);
	drain_all(&m);
	assert_int_equal(step(&m).updated, TENSORS);
	free(before), free(after);
	model_close(&m);
}

static void test_failed_refill_is_told_and_can_be_sent_again(void **unused)
{
	struct setup s = { .dtype = OFFSTAGE_BF16, .subgroup = 20000 };
	struct offstage_step_options options = step_options();
	size_t n, n2;
	void *good = train(&s, 1, &n), *again;
	struct model m;

	(void)unused;
	model_open(&m, &s);
	fill_gradients(&m, 100);
	drain_all(&m);
	OK(offstage_drain_finish(m.o, NULL));
	host_fail_copy(3);
	OK(offstage_step(m.o, &options, NULL));
	REFUSED(offstage_wait(m.o, OFFSTAGE_ALL, NULL), -EIO, "offstage_refill() sends it again");
	OK(offstage_refill(m.o, NULL, 0));
	OK(offstage_wait(m.o, OFFSTAGE_ALL, NULL));
	again = snapshot(&m, &n2);
	assert_memory_equal(good, again, n);
	free(good), free(again);
	model_close(&m);
}

static void test_failed_refill_is_told_until_it_was_sent_again(void **unused)
{
	struct setup s = { .dtype = OFFSTAGE_BF16 };
	struct offstage_step_options options = step_options();
	uint32_t first = 1, second = 4;
	struct model m;

	(void)unused;
	options.order = (uint32_t[]){ 4 };
	options.n_order = 1;
	model_open(&m, &s);
	fill_gradients(&m, 100);
	drain_all(&m);
	OK(offstage_drain_finish(m.o, NULL));
	host_fail_copy(1);
	OK(offstage_step(m.o, &options, NULL));
	REFUSED(offstage_wait(m.o, OFFSTAGE_ALL, NULL), -EIO, "'layer.5'");
	/* Neither others that are sent, nor a step without it, makes it arrive. */
	OK(offstage_refill(m.o, &first, 1));
	REFUSED(offstage_wait(m.o, second, NULL), -EIO, "'layer.5'");
	OK(offstage_drain(m.o, first, m.grad[first], NULL));
	OK(offstage_step(m.o, &options, NULL));
	REFUSED(offstage_wait(m.o, OFFSTAGE_ALL, NULL), -EIO, "'layer.5'");
	OK(offstage_refill(m.o, &second, 1));
	OK(offstage_wait(m.o, OFFSTAGE_ALL, NULL));
	/* What lies somewhere else now is the business of whoever moved it. */
	fill_gradients(&m, 101);
	drain_all(&m);
	OK(offstage_drain_finish(m.o, NULL));
	host_fail_copy(1);
	OK(offstage_step(m.o, &options, NULL));
	REFUSED(offstage_wait(m.o, second, NULL), -EIO, "'layer.5'");
	OK(offstage_rebind(m.o, second, NULL));
	OK(offstage_wait(m.o, OFFSTAGE_ALL, NULL));
	model_close(&m);
}

static void test_failed_reload_changes_no_master(void **unused)
{
	struct setup s = { .dtype = OFFSTAGE_F32, .subgroup = 20000 };
	struct model m;
	size_t n;

	(void)unused;
	model_open(&m, &s);
	for (int which = 1; which <= 12; which++) {
		void *before, *after;

		before = snapshot(&m, &n);
		for (int k = 0; k < TENSORS; k++)
			for (uint64_t i = 0; i < counts[k]; i++)
				((float *)m.param[k])[i] += 1;
		host_fail_copy((uint64_t)which);
		REFUSED(offstage_reload(m.o, OFFSTAGE_ALL), -EIO, "from the device");
		for (int k = 0; k < TENSORS; k++)
			for (uint64_t i = 0; i < counts[k]; i++)
				((float *)m.param[k])[i] -= 1;
		OK(offstage_refill(m.o, NULL, 0));
		OK(offstage_wait(m.o, OFFSTAGE_ALL, NULL));
		after = snapshot(&m, &n);
		assert_memory_equal(before, after, n);
		free(before), free(after);
	}
	OK(offstage_reload(m.o, OFFSTAGE_ALL));
	fill_gradients(&m, 3);
	drain_all(&m);
	assert_int_equal(step(&m).updated, TENSORS);
	model_close(&m);
}

static void test_elements_that_overflow_a_size_are_refused(void **unused)
{
	enum { MANY = 16384 };
	struct offstage_tensor *tensors = calloc(MANY, sizeof(*tensors));
	char (*names)[8] = calloc(MANY, sizeof(*names));
	struct offstage_optimizer_options options = { .size = sizeof(options), .subgroup = (uint64_t)1 << 40 };
	struct offstage_optimizer *o;
	struct offstage *ctx;

	(void)unused;
	OK(offstage_open(NULL, &ctx));
	OK(offstage_optimizer_create(ctx, &options, &o));
	/* 12 bytes of state and 4 of slot for each of 2^62 elements come to 0 in 64 bits. */
	for (int i = 0; i < MANY; i++) {
		snprintf(names[i], sizeof(names[i]), "%d", i);
		tensors[i] = (struct offstage_tensor){ .size = sizeof(*tensors), .name = names[i], .count = (uint64_t)1 << 48 };
	}
	REFUSED(offstage_optimizer_add(o, tensors, MANY), -EINVAL, "2^48");
	offstage_optimizer_close(o);
	/* As many segments as would overflow their number. */
	options.subgroup = 4096;
	OK(offstage_optimizer_create(ctx, &options, &o));
	REFUSED(offstage_optimizer_add(o, tensors, 1), -EINVAL, "subgroup");
	offstage_optimizer_close(o);
	offstage_close(ctx);
	free(tensors), free(names);
}

static void test_failed_load_adds_no_tensor(void **unused)
{
	struct setup s = { .dtype = OFFSTAGE_F32 };
	struct offstage_optimizer_info info = { .size = sizeof(info) };
	struct offstage_tensor tensor = { .size = sizeof(tensor), .name = "late", .count = 5000 };
	struct offstage_stats before = { .size = sizeof(before) }, after = { .size = sizeof(after) };
	struct model m;
	uint32_t found;

	(void)unused;
	model_open(&m, &s);
	tensor.param = m.grad[7];
	OK(offstage_stats(m.ctx, &before));
	host_fail_copy(1);
	REFUSED(offstage_optimizer_add(m.o, &tensor, 1), -EIO, "'late'");
	OK(offstage_stats(m.ctx, &after));
	assert_int_equal(before.backed_bytes, after.backed_bytes);
	OK(offstage_optimizer_info(m.o, &info));
	assert_int_equal(info.tensors, TENSORS);
	REFUSED(offstage_tensor_find(m.o, "late", &found), -ENOENT, "late");
	OK(offstage_optimizer_add(m.o, &tensor, 1));
	OK(offstage_tensor_find(m.o, "late", &found));
	assert_int_equal(found, TENSORS);
	fill_gradients(&m, 4);
	drain_all(&m);
	OK(offstage_drain(m.o, found, m.grad[7], NULL));
	assert_int_equal(step(&m).updated, TENSORS + 1);
	model_close(&m);
}

static void test_abandoned_gradients_are_gone(void **unused)
{
	struct setup s = { .dtype = OFFSTAGE_BF16, .flags = OFFSTAGE_OPTIMIZER_ACCUMULATE };
	struct offstage_step_result r;
	double once, again;
	struct model m;

	(void)unused;
	model_open(&m, &s);
	fill_gradients(&m, 6);
	drain_all(&m);
	OK(offstage_drain_finish(m.o, &once));
	OK(offstage_abandon(m.o));
	drain_all(&m);
	OK(offstage_drain_finish(m.o, &again));
	assert_true(once == again);	/* the sum began anew */
	OK(offstage_abandon(m.o));
	r = step(&m);
	assert_int_equal(r.skipped, OFFSTAGE_SKIP_EMPTY);
	model_close(&m);
}

static void test_every_failing_allocation_unwinds(void **unused)
{
	struct offstage_tensor tensors[] = {
		{ .size = sizeof(*tensors), .name = "a", .count = 10000 },
		{ .size = sizeof(*tensors), .name = "b", .count = 5 },
	};
	struct offstage_options options = { .size = sizeof(options), .threads = 2, .lock = OFFSTAGE_PREFER };
	struct offstage_optimizer_options oo = { .size = sizeof(oo), .flags = OFFSTAGE_OPTIMIZER_ACCUMULATE, .subgroup = 4096 };
	struct offstage_stats stats = { .size = sizeof(stats) };
	struct offstage *ctx;
	int n, whole = 0;

	(void)unused;
	OK(offstage_open(&options, &ctx));
	for (n = 1; !whole && n < 1000; n++) {
		struct offstage_optimizer *o = NULL;
		int ret;

		heap_fail_nth((uint64_t)n);
		ret = offstage_optimizer_create(ctx, &oo, &o);
		if (ret) {
			assert_int_equal(ret, -ENOMEM);
			assert_null(o);
		} else {
			ret = offstage_optimizer_add(o, tensors, 1);
			if (!ret)
				ret = offstage_optimizer_add(o, tensors + 1, 1);
			whole = ret == 0;
			if (ret)
				assert_int_equal(ret, -ENOMEM);
		}
		heap_fail_nth(0);
		offstage_optimizer_close(o);
		OK(offstage_stats(ctx, &stats));
		assert_int_equal(stats.backed_bytes, 0);
	}
	assert_true(whole);
	assert_true(n > 20);
	for (n = 1, whole = 0; !whole && n < 100; n++) {
		struct offstage *other;

		heap_fail_nth((uint64_t)n);
		whole = offstage_open(&options, &other) == 0;
		heap_fail_nth(0);
		if (whole)
			offstage_close(other);
	}
	offstage_close(ctx);
}

/* ---- orderings --------------------------------------------------------------------------------------------------------------- */

static sem_t gate;

static void wait_at_gate(void *unused)
{
	(void)unused;
	sem_wait(&gate);
}

static void write_gradients(void *model)
{
	fill_gradients(model, 100);
}

static void spoil_gradients(void *model)
{
	fill_gradients(model, 12345);
}

static void test_drain_waits_for_the_trainers_stream(void **unused)
{
	struct offstage_device_options link = { .size = sizeof(link) };
	struct setup s = { .dtype = OFFSTAGE_BF16, .subgroup = 20000, .device = &link };
	struct offstage_stream *stream;
	size_t n, n2;
	void *good = train(&s, 1, &n), *got;
	struct model m;

	(void)unused;
	sem_init(&gate, 0, 0);
	model_open(&m, &s);
	OK(offstage_stream_create(device_of_model, &stream));
	OK(offstage_stream_call(stream, wait_at_gate, NULL));
	OK(offstage_stream_call(stream, write_gradients, &m));
	for (uint32_t k = 0; k < TENSORS; k++)
		OK(offstage_drain(m.o, k, m.grad[k], stream));
	/* The stream waits until the gradients have left, and only then are they spoiled. */
	sem_post(&gate);
	OK(offstage_drain_wait(m.o, OFFSTAGE_ALL, stream));
	OK(offstage_stream_call(stream, spoil_gradients, &m));
	step(&m);
	OK(offstage_stream_wait(stream));
	got = snapshot(&m, &n2);
	assert_memory_equal(good, got, n);
	free(good), free(got);
	offstage_stream_close(stream);
	model_close(&m);
}

static void read_first_parameter(void *model)
{
	struct model *m = model;

	memcpy(m->grad[1], m->param[1], counts[1] * 2);
}

static void test_stream_waits_for_a_parameter(void **unused)
{
	struct offstage_device_options link = { .size = sizeof(link), .h2d_bytes_per_s = 50000000 };
	struct setup s = { .dtype = OFFSTAGE_BF16, .subgroup = 20000, .device = &link };
	struct offstage_step_options options = step_options();
	struct offstage_stream *stream;
	struct model m;

	(void)unused;
	model_open(&m, &s);
	OK(offstage_stream_create(device_of_model, &stream));
	fill_gradients(&m, 9);
	drain_all(&m);
	OK(offstage_step(m.o, &options, NULL));
	OK(offstage_wait(m.o, 1, stream));
	OK(offstage_stream_call(stream, read_first_parameter, &m));
	OK(offstage_wait(m.o, OFFSTAGE_ALL, NULL));
	OK(offstage_stream_wait(stream));
	assert_memory_equal(m.grad[1], m.param[1], counts[1] * 2);
	offstage_stream_close(stream);
	model_close(&m);
}

/* How long an update and a refill were under way together, by the spans themselves. */
static uint64_t overlap_of_spans(const struct trace *trace)
{
	uint64_t both = 0;

	for (uint32_t i = 0; i < trace->n; i++)
		for (uint32_t k = 0; k < trace->n; k++) {
			const struct trace_span *a = &trace->spans[i], *b = &trace->spans[k];
			uint64_t from = a->begin_ns > b->begin_ns ? a->begin_ns : b->begin_ns;
			uint64_t to = a->end_ns < b->end_ns ? a->end_ns : b->end_ns;

			if (strcmp(a->track, "update") == 0 && strcmp(b->track, "refill") == 0 && from < to)
				both += to - from;
		}
	return both;
}

#define MANY 12

/* Equal tensors, each a subgroup of its own, on a slow link; spans of the trace say what happened when. */
static void ordered_step(const uint32_t *order, uint32_t n, uint32_t *refilled, bool *overlapped)
{
	struct offstage_stats stats = { .size = sizeof(stats) };
	struct offstage_device_options link = { .size = sizeof(link), .h2d_bytes_per_s = 100000000 };
	struct offstage_options open = { .size = sizeof(open), .lock = OFFSTAGE_PREFER };
	struct offstage_optimizer_options oo = { .size = sizeof(oo), .subgroup = 200000 };
	struct offstage_step_options options = step_options();
	struct offstage_tensor tensors[MANY] = { { 0 } };
	static float param[MANY][200000], grad[MANY][200000];
	uint64_t last_update = 0, first_refill = UINT64_MAX;
	struct offstage_optimizer *o;
	struct offstage_device *device;
	struct offstage *ctx;
	uint32_t at = 0;

	OK(offstage_open(&open, &ctx));
	OK(offstage_device_open(ctx, &link, &device));
	oo.device = device;
	OK(offstage_optimizer_create(ctx, &oo, &o));
	for (int k = 0; k < MANY; k++) {
		static const char names[] = "abcdefghijkl";
		static char name[MANY][2];

		name[k][0] = names[k];
		tensors[k] = (struct offstage_tensor){ .size = sizeof(tensors[k]), .name = name[k], .count = 200000,
						       .param = param[k] };
	}
	OK(offstage_optimizer_add(o, tensors, MANY));
	OK(offstage_trace_start(ctx, 1000));
	for (uint32_t k = 0; k < MANY; k++)
		OK(offstage_drain(o, k, grad[k], NULL));
	options.order = order;
	options.n_order = n;
	OK(offstage_step(o, &options, NULL));
	OK(offstage_wait(o, OFFSTAGE_ALL, NULL));
	for (uint32_t i = 0; i < ctx->trace.n; i++) {
		struct trace_span *span = &ctx->trace.spans[i];

		if (strcmp(span->track, "refill") == 0) {
			assert_true(at < MANY);
			refilled[at++] = span->subgroup;
			if (span->begin_ns < first_refill)
				first_refill = span->begin_ns;
		}
		if (strcmp(span->track, "update") == 0 && span->end_ns > last_update)
			last_update = span->end_ns;
	}
	assert_int_equal(at, MANY);
	OK(offstage_stats(ctx, &stats));
	assert_int_equal(stats.overlap_ns, overlap_of_spans(&ctx->trace));
	*overlapped = first_refill < last_update;
	offstage_optimizer_close(o);
	OK(offstage_device_close(device));
	offstage_close(ctx);
}

static void test_parameters_come_back_in_the_order_asked(void **unused)
{
	static const uint32_t order[] = { 7, 3, 11, 0 }, expected[MANY] = { 7, 3, 11, 0, 1, 2, 4, 5, 6, 8, 9, 10 };
	uint32_t refilled[MANY];
	bool overlapped;

	(void)unused;
	ordered_step(order, 4, refilled, &overlapped);
	assert_memory_equal(refilled, expected, sizeof(expected));
}

/* The scheduler may keep the copy thread away for a whole step, but not each time. */
static void test_refill_begins_before_the_update_ends(void **unused)
{
	uint32_t refilled[MANY];
	bool overlapped = false;

	(void)unused;
	for (int attempt = 0; attempt < 50 && !overlapped; attempt++)
		ordered_step(NULL, 0, refilled, &overlapped);
	assert_true(overlapped);
}

struct hook {
	struct model *m;
	uint32_t first;
};

static void *drain_some(void *arg)
{
	struct hook *h = arg;

	for (uint32_t k = h->first; k < TENSORS; k += 3)
		OK(offstage_drain(h->m->o, k, h->m->grad[k], NULL));
	return NULL;
}

static void test_hooks_may_drain_from_several_threads(void **unused)
{
	struct setup s = { .dtype = OFFSTAGE_BF16, .subgroup = 20000 };
	struct hook hooks[3];
	pthread_t threads[3];
	size_t n, n2;
	void *good = train(&s, 3, &n), *got;
	struct model m;

	(void)unused;
	model_open(&m, &s);
	for (int i = 0; i < 3; i++) {
		fill_gradients(&m, 100 + (uint64_t)i);
		for (uint32_t k = 0; k < 3; k++) {
			hooks[k] = (struct hook){ &m, k };
			assert_int_equal(pthread_create(&threads[k], NULL, drain_some, &hooks[k]), 0);
		}
		for (int k = 0; k < 3; k++)
			pthread_join(threads[k], NULL);
		step(&m);
	}
	got = snapshot(&m, &n2);
	assert_memory_equal(good, got, n);
	free(good), free(got);
	model_close(&m);
}

/* The next step's gradients may be drained while this one's parameters are still on their way. */
static void *wait_for_all(void *model)
{
	struct model *m = model;

	for (int i = 0; i < 400; i++)
		OK(offstage_wait(m->o, 7, NULL));
	return NULL;
}

static void test_waiting_goes_on_while_tensors_are_added(void **unused)
{
	struct offstage_device_options link = { .size = sizeof(link), .h2d_bytes_per_s = 100000000 };
	struct setup s = { .dtype = OFFSTAGE_F32, .device = &link };
	struct offstage_step_options options = step_options();
	struct model m;

	(void)unused;
	model_open(&m, &s);
	for (int i = 0; i < 10; i++) {
		struct offstage_tensor tensor = { .size = sizeof(tensor), .name = (char[]){ 'a' + (char)i, 0 }, .count = 10 };
		pthread_t threads[4];

		drain_all(&m);
		OK(offstage_step(m.o, &options, NULL));
		for (int k = 0; k < 4; k++)
			assert_int_equal(pthread_create(&threads[k], NULL, wait_for_all, &m), 0);
		OK(offstage_optimizer_add(m.o, &tensor, 1));
		for (int k = 0; k < 4; k++)
			pthread_join(threads[k], NULL);
	}
	model_close(&m);
}

static void test_drain_may_run_into_the_last_refill(void **unused)
{
	struct offstage_device_options link = { .size = sizeof(link), .h2d_bytes_per_s = 40000000 };
	struct setup plain = { .dtype = OFFSTAGE_F32, .subgroup = 20000 }, slow = plain;
	struct offstage_step_options options = step_options();
	size_t n, n2;
	void *good = train(&plain, 3, &n), *got;
	struct model m;

	(void)unused;
	slow.device = &link;
	model_open(&m, &slow);
	for (int i = 0; i < 3; i++) {
		fill_gradients(&m, 100 + (uint64_t)i);
		drain_all(&m);
		OK(offstage_step(m.o, &options, NULL));
	}
	OK(offstage_wait(m.o, OFFSTAGE_ALL, NULL));
	got = snapshot(&m, &n2);
	assert_memory_equal(good, got, n);
	free(good), free(got);
	model_close(&m);
}

/* ---- law 1 --------------------------------------------------------------------------------------------------------------------- */

static bool numa_balancing(void)
{
	FILE *file = fopen("/proc/sys/kernel/numa_balancing", "r");
	int on = 0;

	if (file) {
		if (fscanf(file, "%d", &on) != 1)
			on = 0;
		fclose(file);
	}
	return on && access("/sys/devices/system/node/node1", F_OK) == 0;
}

static void test_drain_may_run_into_a_refill(void **unused)
{
	struct setup s = { .dtype = OFFSTAGE_BF16, .subgroup = 5000 };
	size_t n, n2;
	void *alone = train(&s, 3, &n), *together;
	struct model m;

	(void)unused;
	model_open(&m, &s);
	for (int i = 0; i < 3; i++) {
		/* Slots are free that the refill is going to use. */
		fill_gradients(&m, 100 + (uint64_t)i);
		OK(offstage_refill(m.o, NULL, 0));
		for (uint32_t k = TENSORS; k-- > 0;)
			OK(offstage_drain(m.o, k, m.grad[k], NULL));
		step(&m);
	}
	together = snapshot(&m, &n2);
	assert_int_equal(n, n2);
	assert_memory_equal(alone, together, n);
	free(alone), free(together);
	model_close(&m);
}

static void test_steps_after_the_first_allocate_pin_and_fault_nothing(void **unused)
{
	struct offstage_stats before = { .size = sizeof(before) }, after = { .size = sizeof(after) };
	struct setup s = { .dtype = OFFSTAGE_BF16, .subgroup = 20000, .flags = OFFSTAGE_OPTIMIZER_ACCUMULATE };
	struct model m;

	(void)unused;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
	SKIP("a sanitizer's shadow memory faults on its own");
#endif
	if (numa_balancing())
		SKIP("NUMA balancing unmaps the test's own memory to see who uses it (kernel.numa_balancing)");
	if (getenv("OFFSTAGE_UNDER_VALGRIND"))
		SKIP("valgrind's own memory faults");
	model_open(&m, &s);
	fill_gradients(&m, 1);
	/* The first steps: threads touch their stacks, and each code path has run once on each thread. */
	for (int i = 0; i < 20; i++) {
		drain_all(&m);
		step(&m);
	}
	OK(offstage_stats(m.ctx, &before));
	for (int i = 0; i < 100; i++) {
		drain_all(&m);
		step(&m);
	}
	OK(offstage_stats(m.ctx, &after));
	assert_int_equal(after.steps - before.steps, 100);
	assert_int_equal(after.allocations - before.allocations, 0);
	assert_int_equal(after.buffers - before.buffers, 0);
	assert_int_equal(after.pins - before.pins, 0);
	assert_int_equal(after.threads - before.threads, 0);
	assert_int_equal(after.minor_faults - before.minor_faults, 0);
	assert_int_equal(after.major_faults - before.major_faults, 0);
	model_close(&m);
}

static void test_each_byte_crosses_the_link_once(void **unused)
{
	struct offstage_stats before = { .size = sizeof(before) }, after = { .size = sizeof(after) };
	struct setup s = { .dtype = OFFSTAGE_BF16, .subgroup = 20000 };
	uint64_t elements = 0;
	struct model m;

	(void)unused;
	for (int k = 0; k < TENSORS; k++)
		elements += counts[k];
	model_open(&m, &s);
	OK(offstage_stats(m.ctx, &before));
	drain_all(&m);
	step(&m);
	OK(offstage_stats(m.ctx, &after));
	assert_int_equal(after.drained_bytes - before.drained_bytes, elements * 2);
	assert_int_equal(after.refilled_bytes - before.refilled_bytes, elements * 2);
	model_close(&m);
}

/* ---- slots ------------------------------------------------------------------------------------------------------------------------ */

static void debug_model(struct model *m)
{
	struct setup s = { .dtype = OFFSTAGE_BF16, .subgroup = 20000 };

	setenv("OFFSTAGE_DEBUG", "1", 1);
	model_open(m, &s);
	unsetenv("OFFSTAGE_DEBUG");
	fill_gradients(m, 1);
	drain_all(m);
	step(m);	/* undisturbed, nothing is found */
}

static void test_debug_mode_catches_a_write_to_a_landed_gradient(void **unused)
{
	struct offstage_step_options options = step_options();
	void *before;
	struct model m;
	size_t n;

	(void)unused;
	debug_model(&m);
	before = snapshot(&m, &n);
	drain_all(&m);
	OK(offstage_drain_finish(m.o, NULL));
	m.o->subgroups[m.o->n_subgroups - 1].memory[1] ^= 1;
	REFUSED(offstage_step(m.o, &options, NULL), -EBADMSG, "changed in slot");
	/* Stopped for good, with the same answer. */
	REFUSED(offstage_drain(m.o, 0, m.grad[0], NULL), -EBADMSG, "changed in slot");
	free(before);
	model_close(&m);
}

static void test_debug_mode_catches_a_write_to_a_free_slot(void **unused)
{
	struct model m;

	(void)unused;
	debug_model(&m);
	m.o->subgroups[0].memory[m.o->subgroups[0].bytes - 1] = 0;
	for (uint32_t k = 0; k < TENSORS; k++)
		if (offstage_drain(m.o, k, m.grad[k], NULL) != 0)
			break;
	REFUSED(offstage_drain_finish(m.o, NULL), -EBADMSG, "written to while it was free");
	model_close(&m);
}

static void spoil_slot(void *model)
{
	struct model *m = model;

	m->o->subgroups[0].memory[0] ^= 1;
}

static void test_debug_mode_catches_a_write_to_a_slot_that_refills(void **unused)
{
	struct offstage_step_options options = step_options();
	struct model m;

	(void)unused;
	debug_model(&m);
	/* On the refill's own stream, right before its copies: the slot has been handed over and is being sent. */
	drain_all(&m);
	OK(offstage_drain_finish(m.o, NULL));
	sem_init(&gate, 0, 0);
	OK(offstage_stream_call(m.o->refills.stream, wait_at_gate, NULL));
	OK(offstage_stream_call(m.o->refills.stream, spoil_slot, &m));
	OK(offstage_step(m.o, &options, NULL));
	pthread_mutex_lock(&m.o->lock);
	while (m.o->queue_head != m.o->queue_tail)
		pthread_cond_wait(&m.o->progress, &m.o->lock);
	pthread_mutex_unlock(&m.o->lock);
	sem_post(&gate);
	REFUSED(offstage_wait(m.o, OFFSTAGE_ALL, NULL), -EBADMSG, "while it was refilled");
	model_close(&m);
}

static void test_stopped_optimizer_sends_nothing(void **unused)
{
	struct offstage_step_options options = step_options();
	struct setup s = { .dtype = OFFSTAGE_BF16, .subgroup = 20000 };
	char *before;
	struct model m;

	(void)unused;
	setenv("OFFSTAGE_DEBUG", "1", 1);
	model_open(&m, &s);
	unsetenv("OFFSTAGE_DEBUG");
	fill_gradients(&m, 1);
	options.flags = OFFSTAGE_STEP_APPLY_NONFINITE;
	OK(offstage_step_early(m.o, &options));
	OK(offstage_drain(m.o, 1, m.grad[1], NULL));
	OK(offstage_drain_wait(m.o, 1, NULL));
	slot_grad(m.o, &m.o->segments[m.o->tensors[1].first_segment])[99] ^= 1;
	before = malloc(counts[1] * 2);
	memcpy(before, m.param[1], counts[1] * 2);
	for (uint32_t k = 0; k < TENSORS; k++)
		if (k != 1 && offstage_drain(m.o, k, m.grad[k], NULL) != 0)
			break;
	REFUSED(offstage_step(m.o, NULL, NULL), -EBADMSG, "'layer.8'");
	offstage_optimizer_close(m.o);
	m.o = NULL;
	/* Its slot held the gradient, which is no parameter. */
	assert_memory_equal(before, m.param[1], counts[1] * 2);
	free(before);
	model_close(&m);
}

static void test_slot_moves_in_no_other_order(void **unused)
{
	struct setup s = { .dtype = OFFSTAGE_F32 };
	struct model m;

	(void)unused;
	model_open(&m, &s);
	pthread_mutex_lock(&m.o->lock);
	slot_move(m.o, 0, SLOT_FREE, SLOT_FILLING);
	assert_int_equal(m.o->fault, 0);
	slot_move(m.o, 0, SLOT_FULL, SLOT_IN_USE);	/* it is filling: a copy may still write to it */
	pthread_mutex_unlock(&m.o->lock);
	REFUSED(offstage_drain(m.o, 0, m.grad[0], NULL), -EPROTO, "is filling");
	model_close(&m);
}

/* ---- state ------------------------------------------------------------------------------------------------------------------------ */

static void test_state_round_trips_by_name_through_a_small_buffer(void **unused)
{
	struct setup s = { .dtype = OFFSTAGE_BF16, .subgroup = 5000 };
	size_t n, n2;
	void *good = train(&s, 2, &n), *got;
	struct model from, to;
	float part[777];

	(void)unused;
	model_open(&from, &s);
	model_open(&to, &s);
	fill_gradients(&from, 100);
	drain_all(&from);
	step(&from);
	for (uint32_t k = 0; k < TENSORS; k++) {
		uint64_t steps;
		uint32_t i, j;

		OK(offstage_tensor_find(from.o, from.names[k], &i));
		OK(offstage_tensor_find(to.o, from.names[k], &j));
		assert_int_equal(i, k);
		assert_int_equal(j, k);
		for (int which = 0; which < 3; which++)
			for (uint64_t at = 0; at < counts[k]; at += 777) {
				uint64_t m = counts[k] - at < 777 ? counts[k] - at : 777;

				OK(offstage_state_read(from.o, i, (enum offstage_state)which, at, m, part));
				OK(offstage_state_write(to.o, j, (enum offstage_state)which, at, m, part));
			}
		OK(offstage_steps_get(from.o, i, &steps));
		OK(offstage_steps_set(to.o, j, steps));
	}
	OK(offstage_refill(to.o, NULL, 0));
	OK(offstage_wait(to.o, OFFSTAGE_ALL, NULL));
	fill_gradients(&to, 101);
	drain_all(&to);
	step(&to);
	got = snapshot(&to, &n2);
	assert_memory_equal(good, got, n);
	free(good), free(got);
	model_close(&from);
	model_close(&to);
}

static void test_state_past_the_end_is_refused(void **unused)
{
	struct setup s = { .dtype = OFFSTAGE_F32 };
	struct model m;
	float x[4];

	(void)unused;
	model_open(&m, &s);
	REFUSED(offstage_state_read(m.o, 3, OFFSTAGE_MASTER, 30, 2, x), -ERANGE, "it has 31");
	REFUSED(offstage_state_read(m.o, 3, OFFSTAGE_MASTER, UINT64_MAX, 2, x), -ERANGE, "it has 31");
	REFUSED(offstage_state_read(m.o, 3, (enum offstage_state)3, 0, 2, x), -EINVAL, "enum offstage_state");
	REFUSED(offstage_state_read(m.o, TENSORS, OFFSTAGE_MASTER, 0, 1, x), -EINVAL, "no tensor");
	REFUSED(offstage_state_write(m.o, 3, OFFSTAGE_MASTER, 0, 1, NULL), -EINVAL, "NULL");
	OK(offstage_drain(m.o, 0, m.grad[0], NULL));
	REFUSED(offstage_state_read(m.o, 3, OFFSTAGE_MASTER, 0, 1, x), -EBUSY, "between steps");
	model_close(&m);
}

static void test_parameter_changed_by_others_is_reloaded(void **unused)
{
	struct setup s = { .dtype = OFFSTAGE_BF16, .subgroup = 5000 };
	uint16_t *elsewhere;
	struct model m;
	float x;

	(void)unused;
	model_open(&m, &s);
	put(&m, m.param[4], 70000, 42);
	OK(offstage_reload(m.o, 4));
	OK(offstage_state_read(m.o, 4, OFFSTAGE_MASTER, 70000, 1, &x));
	assert_true(x == 42);
	elsewhere = calloc(counts[4], 2);
	OK(offstage_rebind(m.o, 4, elsewhere));
	OK(offstage_refill(m.o, (uint32_t[]){ 4 }, 1));
	OK(offstage_wait(m.o, 4, NULL));
	assert_memory_equal(elsewhere, m.param[4], counts[4] * 2);
	OK(offstage_rebind(m.o, 4, NULL));
	REFUSED(offstage_reload(m.o, 4), -EINVAL, "offstage_rebind()");
	free(elsewhere);
	model_close(&m);
}

/* ---- life ---------------------------------------------------------------------------------------------------------------------------- */

static void test_child_of_fork_can_only_close(void **unused)
{
	struct setup s = { .dtype = OFFSTAGE_F32 };
	struct model m;
	int status;
	pid_t child;

	(void)unused;
	model_open(&m, &s);
	fill_gradients(&m, 1);
	drain_all(&m);
	child = fork();
	if (child == 0) {
		alarm(30);	/* a deadlock ends the child by a signal */
		if (offstage_step(m.o, NULL, NULL) != -ECHILD || !strstr(offstage_error(), "fork"))
			_exit(1);
		offstage_optimizer_close(m.o);
		offstage_close(m.ctx);
#ifndef __SANITIZE_THREAD__	/* it can't start threads in a child */
		struct offstage *own;

		if (offstage_open(NULL, &own) != 0)
			_exit(2);
		offstage_close(own);
#endif
		_exit(0);
	}
	assert_int_equal(waitpid(child, &status, 0), child);
	assert_true(WIFEXITED(status));
	assert_int_equal(WEXITSTATUS(status), 0);
	assert_int_equal(step(&m).updated, TENSORS);	/* the parent never noticed */
	model_close(&m);
}

static void test_streams_may_outlive_the_optimizer_they_wait_for(void **unused)
{
	struct setup s = { .dtype = OFFSTAGE_F32 };
	struct offstage_device_options link = { .size = sizeof(link), .h2d_bytes_per_s = 20000000 };
	struct offstage_step_options options = step_options();
	struct offstage_stream *stream;
	struct model m;

	(void)unused;
	s.device = &link;
	model_open(&m, &s);
	OK(offstage_stream_create(device_of_model, &stream));
	sem_init(&gate, 0, 0);
	OK(offstage_stream_call(stream, wait_at_gate, NULL));
	fill_gradients(&m, 1);
	drain_all(&m);
	OK(offstage_step(m.o, &options, NULL));
	OK(offstage_wait(m.o, 7, stream));
	offstage_optimizer_close(m.o);
	m.o = NULL;
	sem_post(&gate);
	OK(offstage_stream_wait(stream));
	offstage_stream_close(stream);
	model_close(&m);
}

static void test_stream_of_another_device_is_refused(void **unused)
{
	struct setup s = { .dtype = OFFSTAGE_F32 };
	struct offstage_device *other;
	struct offstage_stream *stream;
	struct model m;

	(void)unused;
	model_open(&m, &s);
	OK(offstage_device_open(m.ctx, NULL, &other));
	OK(offstage_stream_create(other, &stream));
	REFUSED(offstage_drain(m.o, 1, m.grad[1], stream), -EINVAL, "another device");
	REFUSED(offstage_drain_wait(m.o, OFFSTAGE_ALL, stream), -EINVAL, "another device");
	REFUSED(offstage_wait(m.o, OFFSTAGE_ALL, stream), -EINVAL, "another device");
	offstage_stream_close(stream);
	OK(offstage_device_close(other));
	model_close(&m);
}

static void *restart_trace(void *ctx)
{
	for (int i = 0; i < 300; i++)
		OK(offstage_trace_start(ctx, i % 3 ? 1000 : 0));
	return NULL;
}

static void test_trace_may_be_restarted_during_a_step(void **unused)
{
	struct setup s = { .dtype = OFFSTAGE_BF16, .subgroup = 5000 };
	pthread_t thread;
	struct model m;

	(void)unused;
	model_open(&m, &s);
	assert_int_equal(pthread_create(&thread, NULL, restart_trace, m.ctx), 0);
	fill_gradients(&m, 1);
	for (int i = 0; i < 20; i++) {
		drain_all(&m);
		step(&m);
		OK(offstage_trace_save(m.ctx, "/dev/null"));
	}
	pthread_join(thread, NULL);
	model_close(&m);
}

static void test_memory_is_what_was_said(void **unused)
{
	struct offstage_optimizer_info info = { .size = sizeof(info) };
	struct offstage_stats stats = { .size = sizeof(stats) };
	struct setup s = { .dtype = OFFSTAGE_BF16 };
	uint64_t elements = 0;
	struct model m;

	(void)unused;
	for (int k = 0; k < TENSORS; k++)
		elements += counts[k];
	model_open(&m, &s);
	OK(offstage_optimizer_info(m.o, &info));
	assert_int_equal(info.elements, elements);
	assert_int_equal(info.subgroups, 1);
	/* 12 bytes of state and 2 of slot per element, up to a base page and 31 elements of alignment per tensor. */
	assert_in_range(info.state_bytes, elements * 12, elements * 12 + TENSORS * 31 * 12 + 4096);
	assert_in_range(info.slot_bytes, elements * 2, elements * 2 + TENSORS * 31 * 2 + 4096);
	assert_int_equal(info.landing_bytes, 0);
	OK(offstage_stats(m.ctx, &stats));
	assert_int_equal(stats.backed_bytes, info.state_bytes + info.slot_bytes);
	offstage_optimizer_close(m.o);
	m.o = NULL;
	OK(offstage_stats(m.ctx, &stats));
	assert_int_equal(stats.backed_bytes, 0);
	model_close(&m);
}

static void test_bad_requests_are_refused_with_a_sentence(void **unused)
{
	struct setup s = { .dtype = OFFSTAGE_F32 };
	struct offstage_optimizer_options oo = { .size = sizeof(oo) };
	struct offstage_tensor t = { .size = sizeof(t), .name = "x", .count = 1 };
	struct offstage_step_options so = step_options();
	struct offstage_group group = adamw;
	struct offstage_optimizer *o;
	struct model m;

	(void)unused;
	model_open(&m, &s);
	REFUSED(offstage_optimizer_create(NULL, NULL, &o), -EINVAL, "NULL");
	REFUSED(offstage_optimizer_create(m.ctx, NULL, NULL), -EINVAL, "no place");
	oo.flags = 1u << 31;
	REFUSED(offstage_optimizer_create(m.ctx, &oo, &o), -EINVAL, "flags");
	oo = (struct offstage_optimizer_options){ .size = sizeof(oo), .moment_dtype = OFFSTAGE_F16 };
	REFUSED(offstage_optimizer_create(m.ctx, &oo, &o), -EINVAL, "moments");
	oo = (struct offstage_optimizer_options){ .size = sizeof(oo), .flags = OFFSTAGE_OPTIMIZER_STOCHASTIC };
	REFUSED(offstage_optimizer_create(m.ctx, &oo, &o), -EINVAL, "stochastic");
	oo = (struct offstage_optimizer_options){ .size = sizeof(oo), .tier = "tape" };
	REFUSED(offstage_optimizer_create(m.ctx, &oo, &o), -ENOENT, "'tape'");
	oo = (struct offstage_optimizer_options){ .size = sizeof(oo), .subgroup = UINT64_MAX };
	REFUSED(offstage_optimizer_create(m.ctx, &oo, &o), -EINVAL, "subgroup");

	REFUSED(offstage_optimizer_add(m.o, NULL, 1), -EINVAL, "NULL");
	t.name = NULL;
	REFUSED(offstage_optimizer_add(m.o, &t, 1), -EINVAL, "no name");
	t.name = m.names[3];
	REFUSED(offstage_optimizer_add(m.o, &t, 1), -EEXIST, m.names[3]);
	t.name = "x";
	t.param_dtype = 3;
	REFUSED(offstage_optimizer_add(m.o, &t, 1), -EINVAL, "dtype");
	t.param_dtype = 0;
	t.count = UINT64_MAX;
	REFUSED(offstage_optimizer_add(m.o, &t, 1), -EINVAL, "2^48");
	t.count = (uint64_t)1 << 45;	/* more memory than there is: nothing is left behind */
	assert_true(offstage_optimizer_add(m.o, &t, 1) < 0);
	t.size = 0;
	REFUSED(offstage_optimizer_add(m.o, &t, 1), -EINVAL, "size");

	REFUSED(offstage_drain(m.o, TENSORS, m.grad[0], NULL), -EINVAL, "no tensor");
	REFUSED(offstage_drain(m.o, 1, NULL, NULL), -EINVAL, "NULL");
	REFUSED(offstage_step(m.o, NULL, NULL), -EINVAL, "groups");
	so.loss_scale = -1;
	REFUSED(offstage_step(m.o, &so, NULL), -EINVAL, "loss scale");
	so.loss_scale = 0;
	so.max_norm = NAN;
	REFUSED(offstage_step(m.o, &so, NULL), -EINVAL, "maximum norm");
	so.max_norm = 0;
	group.beta2 = 1;
	so.groups = &group;
	REFUSED(offstage_step(m.o, &so, NULL), -EINVAL, "group 0");
	so.groups = &adamw;
	so.order = (uint32_t[]){ 99 };
	so.n_order = 1;
	REFUSED(offstage_step(m.o, &so, NULL), -EINVAL, "order[0]");
	so = step_options();
	so.flags = 1u << 30;
	REFUSED(offstage_step(m.o, &so, NULL), -EINVAL, "flags");
	/* After all of that, it works. */
	drain_all(&m);
	assert_int_equal(step(&m).updated, TENSORS);
	model_close(&m);
}

static void test_order_may_name_a_tensor_twice(void **unused)
{
	struct setup s = { .dtype = OFFSTAGE_F32, .subgroup = 20000 };
	struct offstage_step_options options = step_options();
	struct model m;

	(void)unused;
	options.order = (uint32_t[]){ 7, 7, 2, 1, 7 };
	options.n_order = 5;
	model_open(&m, &s);
	drain_all(&m);
	assert_int_equal(step_with(&m, &options).updated, TENSORS);
	model_close(&m);
}

static void test_scaler_follows_gradscaler(void **unused)
{
	struct offstage_scaler s;

	(void)unused;
	offstage_scaler_init(&s);
	assert_true(s.scale == 65536);
	offstage_scaler_update(&s, 1);
	assert_true(s.scale == 32768);
	for (int i = 0; i < 1999; i++)
		offstage_scaler_update(&s, 0);
	assert_true(s.scale == 32768);
	offstage_scaler_update(&s, 0);
	assert_true(s.scale == 65536);
	s.growth_interval = 1;
	for (int i = 0; i < 1000; i++)
		offstage_scaler_update(&s, 0);
	assert_true(isfinite((float)s.scale));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_step_is_adam_over_each_tensor),
		cmocka_unit_test(test_subgroup_size_changes_no_bit),
		cmocka_unit_test(test_number_of_threads_changes_no_bit),
		cmocka_unit_test(test_isa_changes_no_bit),
		cmocka_unit_test(test_provider_changes_no_bit),
		cmocka_unit_test(test_emulated_link_changes_no_bit),
		cmocka_unit_test(test_early_step_gives_the_same_bits),
		cmocka_unit_test(test_early_step_with_absent_gradients_updates_the_others),
		cmocka_unit_test(test_early_step_applies_what_only_earlier_micro_batches_had),
		cmocka_unit_test(test_early_step_refuses_what_it_cannot_know),
		cmocka_unit_test(test_micro_batches_add_up_in_fp32),
		cmocka_unit_test(test_second_gradient_without_accumulation_is_refused),
		cmocka_unit_test(test_absent_gradient_leaves_its_tensor_untouched),
		cmocka_unit_test(test_norm_and_clip_are_those_of_torch),
		cmocka_unit_test(test_norm_is_the_same_bits_for_any_cut),
		cmocka_unit_test(test_skipped_step_leaves_every_bit),
		cmocka_unit_test(test_nonfinite_gradients_are_applied_when_asked),
		cmocka_unit_test(test_given_norm_hides_no_infinity),
		cmocka_unit_test(test_loss_scale_that_fp32_cannot_undo_is_refused),
		cmocka_unit_test(test_no_step_has_the_number_zero),
		cmocka_unit_test(test_failed_drain_changes_nothing_and_is_told),
		cmocka_unit_test(test_failed_refill_is_told_and_can_be_sent_again),
		cmocka_unit_test(test_failed_refill_is_told_until_it_was_sent_again),
		cmocka_unit_test(test_failed_reload_changes_no_master),
		cmocka_unit_test(test_elements_that_overflow_a_size_are_refused),
		cmocka_unit_test(test_failed_load_adds_no_tensor),
		cmocka_unit_test(test_abandoned_gradients_are_gone),
		cmocka_unit_test(test_every_failing_allocation_unwinds),
		cmocka_unit_test(test_drain_waits_for_the_trainers_stream),
		cmocka_unit_test(test_stream_waits_for_a_parameter),
		cmocka_unit_test(test_parameters_come_back_in_the_order_asked),
		cmocka_unit_test(test_refill_begins_before_the_update_ends),
		cmocka_unit_test(test_hooks_may_drain_from_several_threads),
		cmocka_unit_test(test_waiting_goes_on_while_tensors_are_added),
		cmocka_unit_test(test_drain_may_run_into_the_last_refill),
		cmocka_unit_test(test_drain_may_run_into_a_refill),
		cmocka_unit_test(test_steps_after_the_first_allocate_pin_and_fault_nothing),
		cmocka_unit_test(test_each_byte_crosses_the_link_once),
		cmocka_unit_test(test_debug_mode_catches_a_write_to_a_landed_gradient),
		cmocka_unit_test(test_debug_mode_catches_a_write_to_a_free_slot),
		cmocka_unit_test(test_debug_mode_catches_a_write_to_a_slot_that_refills),
		cmocka_unit_test(test_stopped_optimizer_sends_nothing),
		cmocka_unit_test(test_slot_moves_in_no_other_order),
		cmocka_unit_test(test_state_round_trips_by_name_through_a_small_buffer),
		cmocka_unit_test(test_state_past_the_end_is_refused),
		cmocka_unit_test(test_parameter_changed_by_others_is_reloaded),
		cmocka_unit_test(test_child_of_fork_can_only_close),
		cmocka_unit_test(test_streams_may_outlive_the_optimizer_they_wait_for),
		cmocka_unit_test(test_stream_of_another_device_is_refused),
		cmocka_unit_test(test_trace_may_be_restarted_during_a_step),
		cmocka_unit_test(test_memory_is_what_was_said),
		cmocka_unit_test(test_bad_requests_are_refused_with_a_sentence),
		cmocka_unit_test(test_order_may_name_a_tensor_twice),
		cmocka_unit_test(test_scaler_follows_gradscaler),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
