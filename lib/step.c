/* SPDX-License-Identifier: MIT */
/*
 * Step: the decision (norm, skip, clip), then the update, subgroup by subgroup in the order in which parameters are
 * wanted back. The decision changes nothing until nothing can fail any more (law 5); the updater hands each subgroup on
 * to refill.c as soon as it is done, so that update and refill overlap.
 */
#include <math.h>
#include <stdio.h>
#include "error.h"
#include "optimizer.h"
#include "threads.h"

/* ---- the updater --------------------------------------------------------------------------------------------------- */

struct update {
	struct offstage_optimizer *o;
	struct subgroup *g;
	char *state;
};

/* The part of a segment that lies in a block of its subgroup: Adam, or the cast of the master. */
static void update_run(const struct update *u, const struct segment *s, uint64_t offset, uint64_t n)
{
	const struct adam_ops *adam = u->o->ctx->adam;
	const struct tensor *t = &u->o->tensors[s->tensor];
	uint32_t grad = grad_dtype_in_slot(u->o, t);
	size_t moment = u->o->moments == ADAM_MOMENTS_F32 ? 4 : 2;
	uint64_t at = s->at + offset;
	struct adam_span span = {
		.master = (float *)u->state + at,
		.exp_avg = u->state + u->g->exp_avg_at + at * moment,
		.exp_avg_sq = u->state + u->g->exp_avg_sq_at + at * moment,
		.grad = slot_grad(u->o, s) + offset * adam_dtype_size(grad),
		.param = slot_param(u->o, s) + offset * adam_dtype_size(t->param_dtype),
		.index = s->start + offset,
		.n = (size_t)n,
	};

	if (t->action == UPDATE)
		adam->update[grad][t->param_dtype][u->o->moments](&span, &t->factors);
	else if (t->action == CAST)
		adam->narrow[t->param_dtype](span.param, span.master, span.n);
}

/* One block of a subgroup's elements, whatever segments lie in it: small tensors share a block, large ones have many. */
static void update_block(void *arg, size_t i)
{
	const struct update *u = arg;
	const struct segment *s = &u->o->segments[u->g->first_segment], *end = s + u->g->segments;
	uint64_t from = i * (uint64_t)BLOCK, to = from + BLOCK;
	size_t low = 0, high = u->g->segments;

	/* The last segment that starts at `from` or before it. */
	while (high - low > 1) {
		size_t middle = (low + high) / 2;

		if (s[middle].at <= from)
			low = middle;
		else
			high = middle;
	}
	for (s += low; s < end && s->at < to; s++) {
		uint64_t begin = s->at > from ? s->at : from;
		uint64_t stop = s->at + s->count < to ? s->at + s->count : to;

		if (begin < stop)
			update_run(u, s, begin - s->at, stop - begin);
	}
}

/* Updates one subgroup. No lock: its slot is in use, by this thread. */
static int update_subgroup(struct offstage_optimizer *o, uint32_t subgroup)
{
	struct subgroup *g = &o->subgroups[subgroup];
	struct update u = { .o = o, .g = g };
	bool dirty = false;
	int ret;

	for (uint32_t i = g->first_segment; i < g->first_segment + g->segments; i++) {
		enum action action = o->tensors[o->segments[i].tensor].action;

		dirty |= action == UPDATE;
		if (o->debug && action == UPDATE && !slot_gradient_intact(o, &o->segments[i]))
			return fail(-EBADMSG, "the gradient of '%s' changed in slot %u after it had landed: somebody writes to memory "
				    "that isn't theirs; the optimizer is stopped", o->tensors[o->segments[i].tensor].name, subgroup);
	}
	ret = g->tier->ops->acquire(g->tier, g->place, (void **)&u.state);
	if (ret)
		return ret;
	threads_run(o->ctx->threads, update_block, &u, (size_t)((g->elements + BLOCK - 1) / BLOCK));
	if (o->debug)
		for (uint32_t i = g->first_segment; i < g->first_segment + g->segments; i++)
			slot_seal_parameter(o, &o->segments[i]);
	return g->tier->ops->release(g->tier, g->place, dirty);
}

void update_queue(struct offstage_optimizer *o, uint32_t subgroup)
{
	o->subgroups[subgroup].queued = true;
	o->queue[o->queue_tail++] = subgroup;
	pthread_cond_signal(&o->update_work);
}

/* Lock held: what has been updated goes out, or its slot is free at once. */
static void hand_on(struct offstage_optimizer *o, uint32_t subgroup)
{
	struct subgroup *g = &o->subgroups[subgroup];

	g->queued = false;
	g->updated = true;
	g->returning = 0;
	for (uint32_t i = g->first_segment; i < g->first_segment + g->segments; i++) {
		struct tensor *t = &o->tensors[o->segments[i].tensor];

		if (t->action == KEEP || !t->param)
			continue;
		g->returning++;
		/* Early steps send in the order of completion; others have put the order they were asked for into send. */
		if (o->early) {
			t->returning++;
			o->send[o->send_tail++] = i;
		}
	}
	slot_move(o, subgroup, SLOT_IN_USE, SLOT_DRAINING);
	if (!g->returning) {
		slot_move(o, subgroup, SLOT_DRAINING, SLOT_FREE);
		drain_issue(o);
	}
	refill_issue(o);
}

void *update_thread(void *arg)
{
	struct offstage_optimizer *o = arg;

	threads_seat_self(o->ctx->threads);
	pthread_mutex_lock(&o->lock);
	for (;;) {
		uint32_t at, subgroup;
		uint64_t begin, end;
		struct subgroup *g;
		int ret;

		while (o->queue_head == o->queue_tail && !o->stop)
			pthread_cond_wait(&o->update_work, &o->lock);
		if (o->queue_head == o->queue_tail)
			break;
		at = o->queue_head;
		subgroup = o->queue[at];
		g = &o->subgroups[subgroup];
		if (at + 1 < o->queue_tail && g->tier->ops->prefetch) {
			struct subgroup *next = &o->subgroups[o->queue[at + 1]];

			next->tier->ops->prefetch(next->tier, next->place);
		}
		slot_move(o, subgroup, g->slot == SLOT_FREE ? SLOT_FREE : SLOT_FULL, SLOT_IN_USE);
		if (o->fault) {		/* now or before: what else is in line stays as it is */
			o->queue_head = o->queue_tail;
			pthread_cond_broadcast(&o->progress);
			continue;
		}
		begin = now_ns();
		o->update_begin_ns[at] = begin;
		o->update_end_ns[at] = UINT64_MAX;
		o->updating = true;
		pthread_mutex_unlock(&o->lock);

		ret = update_subgroup(o, subgroup);

		/* With the lock held: who finds an update without an end counts it as under way until then. */
		pthread_mutex_lock(&o->lock);
		end = now_ns();
		o->update_end_ns[at] = end;
		pthread_mutex_unlock(&o->lock);
		trace_span(&o->ctx->trace, "update", "update", subgroup, g->elements, begin, end);
		count(&o->ctx->trace.counters.update_ns, end - begin);

		pthread_mutex_lock(&o->lock);
		if (ret)
			optimizer_set_fault(o, ret, "%s", offstage_error());
		o->updating = false;
		o->queue_head++;
		/* After a fault, what lies in slots may be no parameter: nothing is sent. */
		if (!o->fault)
			hand_on(o, subgroup);
		step_end_if_idle(o);
		pthread_cond_broadcast(&o->progress);
	}
	pthread_mutex_unlock(&o->lock);
	return NULL;
}

void step_end_if_idle(struct offstage_optimizer *o)
{
	if (!o->step_begin_ns || o->early || !optimizer_idle(o))
		return;
	count(&o->ctx->trace.counters.step_ns, now_ns() - o->step_begin_ns);
	o->step_begin_ns = 0;
}

/* ---- the decision ---------------------------------------------------------------------------------------------------- */

static int check_options(struct offstage_optimizer *o, struct offstage_step_options *out,
			 const struct offstage_step_options *options)
{
	int ret = struct_in(out, sizeof(*out), options, "offstage_step_options");

	if (ret)
		return ret;
	if (out->flags & ~(OFFSTAGE_STEP_APPLY_NONFINITE | OFFSTAGE_STEP_SUMSQ_GIVEN))
		return fail(-EINVAL, "offstage_step_options.flags is %#x: use OFFSTAGE_STEP_* of this version", out->flags);
	if (!out->loss_scale)
		out->loss_scale = 1;
	/* Gradients are unscaled in fp32: there the inverse must be neither 0 nor Inf. */
	if (!(out->loss_scale > 0) || !isfinite(out->loss_scale) || !isfinite((float)(1 / out->loss_scale)) ||
	    (float)(1 / out->loss_scale) == 0)
		return fail(-EINVAL, "the loss scale is %g: it must be positive and finite, and so must its inverse in fp32",
			    out->loss_scale);
	if (!(out->max_norm >= 0) || !isfinite(out->max_norm))
		return fail(-EINVAL, "the maximum norm is %g: it must be positive and finite, or 0 for no clipping", out->max_norm);
	if ((out->flags & OFFSTAGE_STEP_SUMSQ_GIVEN) && out->sumsq < 0)
		return fail(-EINVAL, "the given sum of squares is %g: it can't be negative", out->sumsq);
	if (!out->groups || !out->n_groups)
		return fail(-EINVAL, "a step needs the hyperparameters of at least one group: set groups and n_groups");
	for (uint32_t i = 0; i < out->n_groups; i++) {
		const void *at = (const char *)out->groups + (size_t)out->groups->size * i;
		struct offstage_group group;
		char name[24];

		snprintf(name, sizeof(name), "group %u", i);
		ret = struct_in(&group, sizeof(group), at, "offstage_group");
		if (!ret)
			ret = adam_check_group(&group, name);
		if (ret)
			return ret;
	}
	for (uint32_t i = 0; i < o->n_tensors; i++)
		if (o->tensors[i].group >= out->n_groups)
			return fail(-EINVAL, "tensor '%s' is in group %u and the step has hyperparameters of %u groups: pass all of "
				    "them", o->tensors[i].name, o->tensors[i].group, out->n_groups);
	if (out->n_order && !out->order)
		return fail(-EINVAL, "the order has %u tensors and its array is NULL", out->n_order);
	for (uint32_t i = 0; i < out->n_order; i++) {
		ret = optimizer_check_tensor(o, out->order[i], false);
		if (ret)
			return fail_in(ret, "order[%u]", i);
	}
	return 0;
}

static void set_factors(struct offstage_optimizer *o, uint32_t tensor, const struct offstage_step_options *options,
			double clip)
{
	const void *at = (const char *)options->groups + (size_t)options->groups->size * o->tensors[tensor].group;
	struct tensor *t = &o->tensors[tensor];
	struct offstage_group group;

	struct_in(&group, sizeof(group), at, "offstage_group");
	adam_factors(&t->factors, &group, clip / options->loss_scale, t->steps + 1, o->options.seed, tensor);
}

static void begin_stages(struct offstage_optimizer *o)
{
	for (uint32_t i = 0; i < o->n_tensors; i++) {
		o->tensors[i].action = KEEP;
		o->tensors[i].returning = o->tensors[i].sent = 0;
	}
	for (uint32_t k = 0; k < o->n_subgroups; k++)
		o->subgroups[k].updated = o->subgroups[k].queued = false;
	o->queue_head = o->queue_tail = o->send_head = o->send_tail = o->overlap_at = 0;
}

/* Puts tensor's subgroups in line for the updater and its segments for the refill, unless that was done. */
static void enlist(struct offstage_optimizer *o, uint32_t tensor)
{
	struct tensor *t = &o->tensors[tensor];

	if (t->action == KEEP || t->returning)
		return;
	for (uint32_t i = t->first_segment; i < t->first_segment + t->segments; i++) {
		if (!o->subgroups[o->segments[i].subgroup].queued)
			update_queue(o, o->segments[i].subgroup);
		if (t->param) {
			t->returning++;
			o->send[o->send_tail++] = i;
		}
	}
}

static void enlist_all(struct offstage_optimizer *o, const uint32_t *order, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++)
		enlist(o, order[i]);
	for (uint32_t i = 0; i < o->n_tensors; i++)
		enlist(o, i);
}

void step_cast(struct offstage_optimizer *o, const uint32_t *order, uint32_t n)
{
	begin_stages(o);
	for (uint32_t i = 0; order ? i < n : i < o->n_tensors; i++) {
		struct tensor *t = &o->tensors[order ? order[i] : i];

		t->action = t->param ? CAST : KEEP;
	}
	enlist_all(o, order, order ? n : 0);
}

/* Debug mode: all slots as they were sealed, before anything is changed. An early step has checked each in its turn. */
static int verify_gradients(struct offstage_optimizer *o)
{
	for (uint32_t i = 0; i < o->n_segments && o->debug && !o->early; i++) {
		const struct tensor *t = &o->tensors[o->segments[i].tensor];

		if (t->drained && !slot_gradient_intact(o, &o->segments[i])) {
			optimizer_set_fault(o, -EBADMSG, "the gradient of '%s' changed in slot %u after it had landed: somebody writes "
					    "to memory that isn't theirs; the optimizer is stopped", t->name,
					    o->segments[i].subgroup);
			return optimizer_fault(o);
		}
	}
	return 0;
}

static uint32_t first_nonfinite(const struct offstage_optimizer *o)
{
	for (uint32_t i = 0; i < o->n_tensors; i++)
		if (!isfinite(o->sums[i]))
			return i;
	return OFFSTAGE_ALL;
}

/*
 * An early step's subgroups are sent in the order of completion, until its last one is updated; the rest of the refill
 * goes on after the step has ended, as in any other. What never became complete has absent gradients in it, or some that
 * only earlier micro-batches had: these count as in any other step.
 */
static void end_early(struct offstage_optimizer *o, bool whole)
{
	/* The updater may be reading the action of the others; these have no subgroup in line. */
	for (uint32_t i = 0; whole && i < o->n_tensors; i++)
		if (o->tensors[i].drained && o->tensors[i].action == KEEP)
			o->tensors[i].action = UPDATE;
	for (uint32_t i = 0; whole && i < o->n_segments; i++) {
		const struct segment *s = &o->segments[i];
		struct subgroup *g = &o->subgroups[s->subgroup];

		if (o->tensors[s->tensor].action == UPDATE && !g->queued && !g->updated)
			update_queue(o, s->subgroup);
	}
	while (o->queue_head != o->queue_tail && !o->fault)
		pthread_cond_wait(&o->progress, &o->lock);
	/* Tensors that were updated have had a step, even when others failed to arrive. */
	for (uint32_t i = 0; i < o->n_tensors; i++) {
		struct tensor *t = &o->tensors[i];
		bool updated = t->action == UPDATE;

		for (uint32_t k = t->first_segment; k < t->first_segment + t->segments; k++)
			updated &= o->subgroups[o->segments[k].subgroup].updated;
		t->steps += updated;
	}
	o->early = false;
	step_end_if_idle(o);
}

int offstage_step(struct offstage_optimizer *o, const struct offstage_step_options *options,
		  struct offstage_step_result *out)
{
	struct offstage_step_options s = { .loss_scale = 1 };
	struct offstage_step_result r = { .clip = 1 };
	struct trace_counters *counters;
	uint64_t begin = now_ns();
	double sumsq;
	int ret = optimizer_enter(o);

	if (ret)
		return ret;
	counters = &o->ctx->trace.counters;
	if (out && out->size < sizeof(out->size))
		ret = struct_out(out, &r, sizeof(r), "offstage_step_result");
	else if (!o->early)
		ret = check_options(o, &s, options);
	else if (options)
		ret = fail(-EINVAL, "this step's options were given to offstage_step_early(): end it with options NULL");
	if (ret)
		goto leave;
	if (!o->early)
		optimizer_wait_idle(o);
	ret = drain_settle(o, &sumsq);
	if (!ret)
		ret = verify_gradients(o);
	if (ret) {
		if (o->fault)
			goto leave;
		if (o->early) {
			ret = fail_in(ret, "%u of %u subgroups had been updated early and stay so", o->queue_tail, o->n_subgroups);
			end_early(o, false);
		}
		goto forget;
	}

	if (s.flags & OFFSTAGE_STEP_SUMSQ_GIVEN)
		sumsq = s.sumsq;
	if (o->early)
		s.loss_scale = o->early_loss_scale;
	r.norm = sqrt(sumsq) / s.loss_scale;
	r.nonfinite = first_nonfinite(o);
	r.updated = o->drained;
	if (s.max_norm) {
		r.clip = s.max_norm / (r.norm + 1e-6);
		/* With Inf the factor is 0 and with NaN it is NaN, as torch's clip_grad_norm_ has it. */
		if (r.clip > 1)
			r.clip = 1;
	}
	/* A norm that was given may have been taken of something else: what lies here decides, too. */
	if (!o->early && (!isfinite(sumsq) || r.nonfinite != OFFSTAGE_ALL) && !(s.flags & OFFSTAGE_STEP_APPLY_NONFINITE))
		r.skipped = OFFSTAGE_SKIP_NONFINITE;
	else if (!o->drained)
		r.skipped = OFFSTAGE_SKIP_EMPTY;

	if (r.skipped) {
		r.updated = 0;
		o->step_begin_ns = 0;
		count(&counters->steps_skipped, 1);
		goto forget;
	}
	count(&counters->steps, 1);
	if (o->early) {
		end_early(o, true);
		ret = optimizer_fault(o);
		goto forget;
	}
	begin_stages(o);
	for (uint32_t i = 0; i < o->n_tensors; i++) {
		if (!o->tensors[i].drained)
			continue;
		o->tensors[i].action = UPDATE;
		set_factors(o, i, &s, r.clip);
		o->tensors[i].steps++;
	}
	o->step_begin_ns = begin;
	enlist_all(o, s.order, s.n_order);
forget:
	o->early = false;
	drain_forget(o);
	drain_issue(o);
leave:
	if (!ret && out)
		ret = struct_out(out, &r, sizeof(r), "offstage_step_result");
	optimizer_leave(o);
	return ret;
}

int offstage_step_early(struct offstage_optimizer *o, const struct offstage_step_options *options)
{
	struct offstage_step_options s;
	int ret = optimizer_enter(o);

	if (ret)
		return ret;
	ret = check_options(o, &s, options);
	if (ret)
		goto leave;
	if (s.max_norm || !(s.flags & OFFSTAGE_STEP_APPLY_NONFINITE) || (s.flags & OFFSTAGE_STEP_SUMSQ_GIVEN)) {
		ret = fail(-EINVAL, "an early step updates before the norm is known: it needs max_norm 0 and "
			   "OFFSTAGE_STEP_APPLY_NONFINITE, and no given norm; use offstage_step() else");
		goto leave;
	}
	if (o->early || o->finished || (o->drained && !o->accumulate)) {
		ret = fail(-EBUSY, "%u gradients of this step were drained before it was announced: call offstage_step_early() "
			   "before the first one (with ACCUMULATE: before the last micro-batch)", o->drained);
		goto leave;
	}
	optimizer_wait_idle(o);
	/* Earlier micro-batches land before the last one counts. */
	drain_wait_landed(o);
	ret = optimizer_fault(o);
	if (ret)
		goto leave;
	begin_stages(o);
	for (uint32_t i = 0; i < o->n_tensors; i++)
		set_factors(o, i, &s, 1);
	for (uint32_t i = 0; i < o->n_segments; i++)
		o->segments[i].landed = 0;
	for (uint32_t k = 0; k < o->n_subgroups; k++)
		o->subgroups[k].waiting = o->subgroups[k].segments;
	o->early = true;
	o->early_loss_scale = s.loss_scale;
	o->step_begin_ns = now_ns();
leave:
	optimizer_leave(o);
	return ret;
}
