/* SPDX-License-Identifier: MIT */
/*
 * The whole step on an emulated link, whose bandwidth is set so that all three stages take about as long: that is
 * where overlap matters most. In each repetition, in turn:
 *
 *	drain		all gradients into slots, norm included; nothing else runs
 *	update		Adam alone, over as many elements, in place like a slot
 *	refill		all parameters cast and sent; nothing else runs
 *	step		from offstage_step(), gradients having drained, to the last parameter's arrival
 *	early		from the first drain to the last arrival, with updates that start while gradients drain
 *	serial		drain, update into fp32, cast to bf16, refill, one after another, as the peers' offload does
 *
 * The refill of `serial` stands in for a plain copy over the same link: the library's own, whose cast is a small part
 * of it. Copies cost CPU and memory bandwidth here, which a DMA engine wouldn't. What that alone costs is measured, too:
 *
 *	beside		Adam alone, while a thread copies as many bytes as a refill at the link's pace
 */
#include <pthread.h>
#include <string.h>
#include <time.h>
#include "bench.h"
#include "../../tools/arrays.h"
#include "../../tools/command.h"

#define TENSORS 96u

struct bench {
	struct offstage *ctx;
	struct offstage_device *device;
	struct offstage_optimizer *optimizer;
	struct offstage_buffer *grads, *params;	/* the emulated device's memory */
	struct arrays in_place, to_fp32;	/* for update alone, and for serial order */
	uint16_t *cast;				/* what serial order casts into */
	struct offstage_buffer *cast_buffer;
	uint64_t n, each, bandwidth;
	uint32_t threads;
	struct offstage_group group;
	struct samples drain, update, refill, slowest, beside, bound, step, whole, early, serial;
};

static uint16_t *grad_of(struct bench *b, uint32_t i)
{
	return (uint16_t *)offstage_buffer_data(b->grads) + b->each * i;
}

static uint16_t *param_of(struct bench *b, uint32_t i)
{
	return (uint16_t *)offstage_buffer_data(b->params) + b->each * i;
}

/* ---- set-up ---------------------------------------------------------------------------------------------------------- */

static int plain_buffer(struct offstage *ctx, uint64_t bytes, struct offstage_buffer **buffer)
{
	struct offstage_buffer_options o = { .size = sizeof(o), .lock = OFFSTAGE_NEVER };

	return offstage_buffer_create(ctx, bytes, &o, buffer);
}

/* A link that carries all gradients in the time that an update takes. */
static int set_bandwidth(struct bench *b)
{
	struct samples update = { 0 };
	int ret = arrays_adam(b->ctx, &b->in_place, b->n, 1, 0);

	for (uint32_t i = 0; i < 5 && !ret; i++) {
		double begin = seconds_now();

		ret = arrays_adam(b->ctx, &b->in_place, b->n, i + 2, 0);
		sample_add(&update, seconds_now() - begin);
	}
	if (!ret)
		b->bandwidth = (uint64_t)((double)(2 * b->n) / sample_median(&update));
	return ret;
}

static int set_up_optimizer(struct bench *b)
{
	struct offstage_device_options link = { .size = sizeof(link), .latency_ns = 10000, .d2h_bytes_per_s = b->bandwidth,
						.h2d_bytes_per_s = b->bandwidth };
	struct offstage_optimizer_options o = { .size = sizeof(o), .subgroup = 2u << 20 };
	struct offstage_tensor tensors[TENSORS];
	char names[TENSORS][16];
	int ret = offstage_device_open(b->ctx, &link, &b->device);

	if (ret)
		return ret;
	o.device = b->device;
	ret = offstage_optimizer_create(b->ctx, &o, &b->optimizer);
	for (uint32_t i = 0; i < TENSORS; i++) {
		snprintf(names[i], sizeof(names[i]), "layer.%u", i);
		tensors[i] = (struct offstage_tensor){ .size = sizeof(*tensors), .name = names[i], .count = b->each,
						       .param_dtype = OFFSTAGE_BF16, .grad_dtype = OFFSTAGE_BF16,
						       .param = param_of(b, i) };
	}
	return ret ? ret : offstage_optimizer_add(b->optimizer, tensors, TENSORS);
}

static int set_up(struct bench *b)
{
	int ret = plain_buffer(b->ctx, 2 * b->n, &b->grads);

	if (!ret)
		ret = plain_buffer(b->ctx, 2 * b->n, &b->params);
	if (!ret)
		ret = plain_buffer(b->ctx, 2 * b->n, &b->cast_buffer);
	if (!ret)
		ret = arrays_create(b->ctx, &b->in_place, b->n, OFFSTAGE_BF16, OFFSTAGE_BF16);
	if (!ret)
		ret = arrays_create(b->ctx, &b->to_fp32, b->n, OFFSTAGE_BF16, OFFSTAGE_F32);
	if (ret)
		return ret;
	b->in_place.param = b->in_place.grad;
	b->cast = offstage_buffer_data(b->cast_buffer);
	fill_elements(grad_of(b, 0), b->n, OFFSTAGE_BF16, 0.01f);
	fill_elements(param_of(b, 0), b->n, OFFSTAGE_BF16, 0.05f);
	ret = set_bandwidth(b);
	return ret ? ret : set_up_optimizer(b);
}

static void take_down(struct bench *b)
{
	offstage_optimizer_close(b->optimizer);
	offstage_device_close(b->device);
	arrays_close(&b->in_place);
	arrays_close(&b->to_fp32);
	offstage_buffer_close(b->cast_buffer);
	offstage_buffer_close(b->grads);
	offstage_buffer_close(b->params);
	offstage_close(b->ctx);
}

/* ---- the contestants --------------------------------------------------------------------------------------------- */

static int drain_all(struct bench *b)
{
	int ret = 0;

	for (uint32_t i = 0; i < TENSORS && !ret; i++)
		ret = offstage_drain(b->optimizer, i, grad_of(b, i), NULL);
	return ret;
}

static int refill_all(struct bench *b)
{
	int ret = offstage_refill(b->optimizer, NULL, 0);

	return ret ? ret : offstage_wait(b->optimizer, OFFSTAGE_ALL, NULL);
}

static struct offstage_step_options step_options(struct bench *b)
{
	return (struct offstage_step_options){ .size = sizeof(struct offstage_step_options), .groups = &b->group,
					       .n_groups = 1, .flags = OFFSTAGE_STEP_APPLY_NONFINITE };
}

/* drain, then the step. */
static int run_step(struct bench *b)
{
	struct offstage_step_options options = step_options(b);
	double begin = seconds_now(), drained, end;
	int ret = drain_all(b);

	if (!ret)
		ret = offstage_drain_finish(b->optimizer, NULL);
	drained = seconds_now();
	if (!ret)
		ret = offstage_step(b->optimizer, &options, NULL);
	if (!ret)
		ret = offstage_wait(b->optimizer, OFFSTAGE_ALL, NULL);
	end = seconds_now();
	sample_add(&b->drain, drained - begin);
	sample_add(&b->step, end - drained);
	sample_add(&b->whole, end - begin);
	return ret;
}

static int run_early(struct bench *b)
{
	struct offstage_step_options options = step_options(b);
	double begin = seconds_now();
	int ret = offstage_step_early(b->optimizer, &options);

	if (!ret)
		ret = drain_all(b);
	if (!ret)
		ret = offstage_step(b->optimizer, NULL, NULL);
	if (!ret)
		ret = offstage_wait(b->optimizer, OFFSTAGE_ALL, NULL);
	sample_add(&b->early, seconds_now() - begin);
	return ret;
}

static int run_update(struct bench *b, uint64_t t)
{
	double begin;
	int ret;

	/* The last update left parameters where gradients were. */
	fill_elements(b->in_place.grad, b->n, OFFSTAGE_BF16, 0.01f);
	begin = seconds_now();
	ret = arrays_adam(b->ctx, &b->in_place, b->n, t, 0);
	sample_add(&b->update, seconds_now() - begin);
	return ret;
}

/* What the emulated link does at least: pieces of 1 MiB, each when the link would have carried those before it. */
static void *copy_paced(void *arg)
{
	const uint64_t piece = 1 << 20;
	struct bench *b = arg;
	double begin = seconds_now();

	for (uint64_t at = 0; at < 2 * b->n; at += piece) {
		double ahead = (double)at / (double)b->bandwidth - (seconds_now() - begin);

		if (ahead > 0)
			nanosleep(&(struct timespec){ .tv_nsec = (long)(ahead * 1e9) }, NULL);
		memcpy((char *)b->cast + at, (char *)param_of(b, 0) + at, 2 * b->n - at < piece ? 2 * b->n - at : piece);
	}
	return NULL;
}

static int run_beside(struct bench *b, uint64_t t)
{
	pthread_t copier;
	double begin;
	int ret;

	fill_elements(b->in_place.grad, b->n, OFFSTAGE_BF16, 0.01f);
	begin = seconds_now();
	ret = -pthread_create(&copier, NULL, copy_paced, b);
	if (ret)
		return ret;
	ret = arrays_adam(b->ctx, &b->in_place, b->n, t, 0);
	pthread_join(copier, NULL);
	sample_add(&b->beside, seconds_now() - begin);
	return ret;
}

static int run_refill(struct bench *b)
{
	double begin = seconds_now();
	int ret = refill_all(b);

	sample_add(&b->refill, seconds_now() - begin);
	return ret;
}

/* fp32 to bf16 as a pass of its own, by as many threads as the update has. */
struct cast_share {
	pthread_t thread;
	const float *from;
	uint16_t *to;
	uint64_t n;
};

#if defined(__GNUC__) && !defined(__clang__)
__attribute__((optimize("O3")))	/* gcc -O2 doesn't vectorize it: the peer's pass must not be slow for that */
#endif
static void *cast_one(void *arg)
{
	const struct cast_share *share = arg;
	const float *restrict from = share->from;
	uint16_t *restrict to = share->to;

	for (uint64_t i = 0; i < share->n; i++) {
		uint32_t bits;

		memcpy(&bits, from + i, sizeof(bits));
		to[i] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
	}
	return NULL;
}

static void cast_all(struct bench *b)
{
	struct cast_share share[64] = { 0 };
	uint32_t n = b->threads < 64 ? b->threads : 64;
	uint64_t at = 0;

	for (uint32_t i = 0; i < n; i++) {
		uint64_t end = b->n / n * (i + 1);

		if (i == n - 1)
			end = b->n;
		share[i] = (struct cast_share){ .from = (const float *)b->to_fp32.param + at, .to = b->cast + at, .n = end - at };
		at = end;
		if (i && pthread_create(&share[i].thread, NULL, cast_one, &share[i])) {
			/* Fewer threads than hoped: this one does it. */
			cast_one(&share[i]);
			share[i].n = 0;
		}
	}
	cast_one(&share[0]);
	for (uint32_t i = 1; i < n; i++)
		if (share[i].n)
			pthread_join(share[i].thread, NULL);
}

static int run_serial(struct bench *b, uint64_t t)
{
	double begin = seconds_now();
	int ret = drain_all(b);

	if (!ret)
		ret = offstage_drain_finish(b->optimizer, NULL);
	if (!ret)
		ret = arrays_adam(b->ctx, &b->to_fp32, b->n, t, 0);
	if (!ret)
		cast_all(b);
	/* What was drained has served: the optimizer sends parameters only between steps. */
	if (!ret)
		ret = offstage_abandon(b->optimizer);
	if (!ret)
		ret = refill_all(b);
	sample_add(&b->serial, seconds_now() - begin);
	return ret;
}

static int repetition(struct bench *b, uint64_t t)
{
	uint32_t i = b->step.n;
	double slowest;
	int ret = run_step(b);

	if (!ret)
		ret = run_update(b, t);
	if (!ret)
		ret = run_beside(b, t);
	if (!ret)
		ret = run_refill(b);
	if (!ret)
		ret = run_early(b);
	if (!ret)
		ret = run_serial(b, t);
	if (ret)
		return ret;
	slowest = b->update.value[i];
	if (b->refill.value[i] > slowest)
		slowest = b->refill.value[i];
	if (b->drain.value[i] > slowest)
		slowest = b->drain.value[i];
	sample_add(&b->slowest, slowest);
	sample_add(&b->bound, b->beside.value[i] > slowest ? b->beside.value[i] : slowest);
	return 0;
}

/* ---- the report ------------------------------------------------------------------------------------------------------ */

static void line(const char *name, const struct samples *s)
{
	printf("  %-42s%9.2f ms\n", name, sample_median(s) * 1e3);
}

static void print(struct bench *b, uint32_t repeat)
{
	printf("Step of %llu bf16 parameters in %u tensors; %s; %u threads; medians of %u repetitions in turn\n",
	       (unsigned long long)b->n, TENSORS, offstage_device_name(b->device), b->threads, repeat);
	line("drain alone (emulated link)", &b->drain);
	line("update alone", &b->update);
	line("update beside copies at the link's pace", &b->beside);
	line("refill alone (emulated link)", &b->refill);
	line("step: update and refill overlapped", &b->step);
	line("drain, then step", &b->whole);
	line("early: all three overlapped", &b->early);
	line("serial: drain, update, cast, refill", &b->serial);
	printf("step over the slowest stage               %6.3f\n", sample_ratio(&b->step, &b->slowest));
	printf("step over update beside copies            %6.3f\n", sample_ratio(&b->step, &b->bound));
	printf("early over the slowest stage              %6.3f\n", sample_ratio(&b->early, &b->slowest));
	printf("serial over drain, then step              %6.3f\n", sample_ratio(&b->serial, &b->whole));
	printf("serial over early                         %6.3f\n", sample_ratio(&b->serial, &b->early));
}

static int write_json(struct bench *b, const char *path, uint32_t repeat)
{
	struct json j;

	if (!json_open(&j, path))
		return STATUS_FAILED;
	json_number(&j, "over_slowest_stage", sample_ratio(&b->step, &b->slowest));
	json_number(&j, "speedup_over_serial", sample_ratio(&b->serial, &b->whole));
	json_number(&j, "over_slowest_stage_beside_copies", sample_ratio(&b->step, &b->bound));
	json_number(&j, "early_over_slowest_stage", sample_ratio(&b->early, &b->slowest));
	json_number(&j, "early_speedup_over_serial", sample_ratio(&b->serial, &b->early));
	json_string(&j, "link", offstage_device_name(b->device));
	json_bool(&j, "link_is_emulated", true);
	json_integer(&j, "params", b->n);
	json_integer(&j, "threads", b->threads);
	json_integer(&j, "repetitions", repeat);
	json_object(&j, "seconds");
	json_number(&j, "drain", sample_median(&b->drain));
	json_number(&j, "update", sample_median(&b->update));
	json_number(&j, "update_beside_copies", sample_median(&b->beside));
	json_number(&j, "refill", sample_median(&b->refill));
	json_number(&j, "step", sample_median(&b->step));
	json_number(&j, "drain_then_step", sample_median(&b->whole));
	json_number(&j, "early", sample_median(&b->early));
	json_number(&j, "serial", sample_median(&b->serial));
	json_end_object(&j);
	return json_close(&j, path) ? 0 : STATUS_FAILED;
}

int bench_step(const struct bench_options *options)
{
	uint64_t n = options->params ? options->params : 96u << 20;
	uint32_t repeat = options->repeat ? options->repeat : 9;
	struct offstage_info info = { .size = sizeof(info) };
	static struct bench b;
	int ret, status = 0;

	b.each = (n + TENSORS - 1) / TENSORS;
	b.n = b.each * TENSORS;
	b.group = (struct offstage_group){ .size = sizeof(b.group), .lr = 1e-4, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8,
					   .weight_decay = 0.01 };
	if (bench_open(options, &b.ctx))
		return library_failed();
	ret = offstage_info(b.ctx, &info);
	b.threads = info.threads;
	if (!ret)
		ret = set_up(&b);
	/* Once for nothing: the first step finds cold memory. */
	if (!ret)
		ret = repetition(&b, 2);
	b.drain.n = b.update.n = b.refill.n = b.slowest.n = b.beside.n = b.bound.n = b.step.n = b.whole.n = b.early.n = b.serial.n = 0;
	for (uint32_t i = 0; i < repeat && !ret; i++)
		ret = repetition(&b, i + 3);
	if (ret) {
		status = library_failed();
	} else {
		print(&b, repeat);
		if (options->json)
			status = write_json(&b, options->json, repeat);
	}
	take_down(&b);
	return status;
}
