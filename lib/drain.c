/* SPDX-License-Identifier: MIT */
/*
 * Drain: gradients cross the link into slots, each byte once. offstage_drain() puts a tensor in line and starts as
 * many copies as may be in flight; the lander waits for them in order, takes each piece's sums of squares (or adds it
 * to this step's earlier micro-batches) while the next piece is crossing, and starts further copies in its place.
 */
#include <stdio.h>
#include <string.h>
#include "error.h"
#include "optimizer.h"
#include "threads.h"

/* The first error of this step's copies, with the sentence that the device left. */
static void keep_error(struct offstage_optimizer *o, int err)
{
	if (o->drain_error)
		return;
	o->drain_error = err;
	snprintf(o->drain_error_text, sizeof(o->drain_error_text), "%s", offstage_error());
}

/* The next copy of tensor t, started. false: its slot isn't free yet, whoever frees it calls drain_issue() again. */
static bool issue_piece(struct offstage_optimizer *o, struct tensor *t)
{
	const struct device_ops *ops = o->device->ops;
	struct flight *f = &o->drains;
	struct copy *c = flight_next(f);
	size_t size = adam_dtype_size(t->grad_dtype);
	uint32_t i = t->first_segment;
	struct segment *s;
	int ret;

	while (t->issued >= o->segments[i].start + o->segments[i].count)
		i++;
	s = &o->segments[i];
	/* A slot that is free may be in line for a cast of parameters, see offstage_refill(). */
	if (o->subgroups[s->subgroup].slot == SLOT_FREE && !o->subgroups[s->subgroup].queued)
		slot_move(o, s->subgroup, SLOT_FREE, SLOT_FILLING);
	else if (o->subgroups[s->subgroup].slot != SLOT_FILLING)
		return false;
	c->segment = i;
	c->start = t->issued;
	c->count = s->start + s->count - t->issued;
	if (c->count > PIECE)
		c->count = PIECE;
	if (!o->accumulate)
		c->landed = slot_grad(o, s) + (c->start - s->start) * size;
	ret = t->fenced ? ops->stream_wait(f->stream, t->ready) : 0;
	t->fenced = false;
	if (!ret)
		ret = ops->event_record(c->begin, f->stream);
	if (!ret)
		ret = ops->copy(f->stream, D2H, c->landed, (const char *)t->grad + c->start * size, c->count * size);
	/* Recorded even if the copy couldn't be put in line: the lander ends it like one that failed on the way. */
	if (ops->event_record(c->end, f->stream) != 0 || ret)
		keep_error(o, ret ? ret : -EIO);
	t->issued += c->count;
	t->drain_entry = (uint32_t)(f->tail % f->limit);
	f->tail++;
	pthread_cond_signal(&o->drain_work);
	return true;
}

void drain_issue(struct offstage_optimizer *o)
{
	while (o->pending_first != NONE && !flight_full(&o->drains)) {
		struct tensor *t = &o->tensors[o->pending_first];

		if (!issue_piece(o, t))
			return;
		if (t->issued < t->count)
			continue;
		o->pending_first = t->next_pending;
		if (o->pending_first == NONE)
			o->pending_last = NONE;
		t->next_pending = NONE;
		pthread_cond_broadcast(&o->progress);
	}
}

/* ---- landing --------------------------------------------------------------------------------------------------- */

struct landing {
	struct offstage_optimizer *o;
	struct tensor *t;
	const char *grad;	/* the piece, as it landed */
	float *sum;		/* ACCUMULATE: where it is added */
	double *leaf;		/* of the piece's first leaf */
	uint64_t count;
};

static void land_block(void *arg, size_t i)
{
	const struct landing *l = arg;
	const struct adam_ops *adam = l->o->ctx->adam;
	size_t size = adam_dtype_size(l->t->grad_dtype);
	uint64_t end = (i + 1) * (uint64_t)BLOCK;

	if (end > l->count)
		end = l->count;
	for (uint64_t at = i * (uint64_t)BLOCK; at < end; at += ADAM_LEAF) {
		size_t n = end - at < ADAM_LEAF ? end - at : ADAM_LEAF;
		const char *grad = l->grad + at * size;

		l->leaf[at / ADAM_LEAF] = l->sum ?
			adam->accumulate[l->t->grad_dtype](l->sum + at, grad, n, !l->t->more) :
			adam->sumsq[l->t->grad_dtype](grad, n);
	}
}

/* Norm and sum of a piece. No lock: while its copy counts as in flight, the piece is the lander's. */
static void land(struct offstage_optimizer *o, const struct copy *c)
{
	struct segment *s = &o->segments[c->segment];
	struct tensor *t = &o->tensors[s->tensor];
	struct landing l = { .o = o, .t = t, .grad = c->landed, .leaf = t->leaf + c->start / ADAM_LEAF, .count = c->count };

	if (o->accumulate)
		l.sum = (float *)slot_grad(o, s) + (c->start - s->start);
	threads_run(o->ctx->threads, land_block, &l, (size_t)((c->count + BLOCK - 1) / BLOCK));
	if (o->debug)
		slot_seal_gradient(o, s, c->start, c->count);
}

/* Updating early: a segment that is complete may complete its subgroup. Lock held. */
static void complete_early(struct offstage_optimizer *o, struct segment *s, uint64_t count)
{
	struct subgroup *g = &o->subgroups[s->subgroup];

	s->landed += count;
	if (s->landed < s->count || --g->waiting)
		return;
	slot_move(o, s->subgroup, SLOT_FILLING, SLOT_FULL);
	update_queue(o, s->subgroup);
}

void *drain_thread(void *arg)
{
	struct offstage_optimizer *o = arg;
	const struct device_ops *ops = o->device->ops;
	struct trace *trace = &o->ctx->trace;

	threads_seat_self(o->ctx->threads);
	pthread_mutex_lock(&o->lock);
	for (;;) {
		struct flight *f = &o->drains;
		uint64_t begin, crossed, bytes;
		struct segment *s;
		struct tensor *t;
		struct copy *c;
		int ret;

		while (f->head == f->tail && !o->stop)
			pthread_cond_wait(&o->drain_work, &o->lock);
		if (f->head == f->tail)
			break;
		c = &f->copy[f->head % f->limit];
		s = &o->segments[c->segment];
		t = &o->tensors[s->tensor];
		bytes = c->count * adam_dtype_size(t->grad_dtype);
		pthread_mutex_unlock(&o->lock);

		ret = ops->event_wait(c->end);
		begin = ops->event_ns(c->begin);
		crossed = ops->event_ns(c->end);
		trace_span(trace, "drain", "drain", s->subgroup, bytes, begin, crossed);
		count(&trace->counters.drain_ns, crossed - begin);
		count(&trace->counters.drained_bytes, bytes);
		if (!ret) {
			begin = now_ns();
			land(o, c);
			crossed = now_ns();
			trace_span(trace, "norm", o->accumulate ? "accumulate" : "norm", s->subgroup, bytes, begin, crossed);
			count(&trace->counters.norm_ns, crossed - begin);
		}

		pthread_mutex_lock(&o->lock);
		if (ret)
			keep_error(o, ret);
		f->head++;
		t->landed += c->count;
		if (t->landed == t->count)
			t->more = true;
		if (o->early && !ret)
			complete_early(o, s, c->count);
		drain_issue(o);
		pthread_cond_broadcast(&o->progress);
	}
	pthread_mutex_unlock(&o->lock);
	return NULL;
}

/* ---- the caller's side --------------------------------------------------------------------------------------------- */

/* A fence behind what the trainer's stream holds now; the tensor's first copy waits for it. */
static int fence(struct offstage_optimizer *o, struct tensor *t, struct offstage_stream *stream)
{
	const struct device_ops *ops = o->device->ops;
	int ret = 0;

	t->fenced = false;
	if (!stream || !t->count)
		return 0;
	ret = optimizer_check_stream(o, stream);
	/* One per tensor, made at its first drain: a fence is waited for before the same one is set again. */
	if (!ret && !t->ready)
		ret = ops->event_create(o->device, &t->ready);
	if (!ret)
		ret = ops->event_record(t->ready, stream);
	t->fenced = !ret;
	return ret;
}

int offstage_drain(struct offstage_optimizer *o, uint32_t tensor, const void *grad, struct offstage_stream *stream)
{
	struct tensor *t;
	int ret = optimizer_enter(o);

	if (ret)
		return ret;
	ret = optimizer_check_tensor(o, tensor, false);
	if (ret)
		goto leave;
	t = &o->tensors[tensor];
	if (!grad && t->count)
		ret = fail(-EINVAL, "the gradient of '%s' is NULL: pass its device address, or don't drain a tensor that has none",
			   t->name);
	else if (o->finished)
		ret = fail(-EBUSY, "the gradient of '%s' comes after offstage_drain_finish(): take the step or abandon it first",
			   t->name);
	else if (t->drained && !o->accumulate)
		ret = fail(-EALREADY, "the gradient of '%s' was drained already in this step: make the optimizer with "
			   "OFFSTAGE_OPTIMIZER_ACCUMULATE to sum micro-batches", t->name);
	else if (o->early && t->action == UPDATE)
		ret = fail(-EALREADY, "the last gradient of '%s' in this early step was drained already: call offstage_step() to "
			   "end the step", t->name);
	if (ret)
		goto leave;
	/*
	 * An earlier micro-batch of the same tensor must be through: its cursors are used again. Tensors may be added, and
	 * the array replaced, before who waits here runs again.
	 */
	while (t->landed < t->count && !o->fault) {
		pthread_cond_wait(&o->progress, &o->lock);
		t = &o->tensors[tensor];
	}
	ret = optimizer_fault(o);
	if (!ret)
		ret = fence(o, t, stream);
	if (ret)
		goto leave;

	if (!t->drained) {
		t->drained = true;
		t->more = false;
		o->drained++;
	}
	if (o->early)
		t->action = UPDATE;
	if (t->count) {
		t->grad = grad;
		t->issued = t->landed = 0;
		if (o->pending_last == NONE)
			o->pending_first = tensor;
		else
			o->tensors[o->pending_last].next_pending = tensor;
		o->pending_last = tensor;
		drain_issue(o);
	}
leave:
	optimizer_leave(o);
	return ret;
}

int offstage_drain_wait(struct offstage_optimizer *o, uint32_t tensor, struct offstage_stream *stream)
{
	uint32_t first, last;
	int ret = optimizer_enter_wait(o, tensor, stream, &first, &last);

	if (ret)
		return ret;
	for (uint32_t i = first; !ret && i < last; i++) {
		struct tensor *t = &o->tensors[i];

		while ((stream ? t->issued : t->landed) < t->count && !o->fault) {
			pthread_cond_wait(&o->progress, &o->lock);
			t = &o->tensors[i];	/* offstage_optimizer_add() may have replaced the array */
		}
		if (stream && t->landed < t->count)
			ret = o->device->ops->stream_wait(stream, o->drains.copy[t->drain_entry].end);
		if (!ret)
			ret = optimizer_fault(o);
	}
	if (!ret && o->drain_error)
		ret = fail(o->drain_error, "%s", o->drain_error_text);
	optimizer_leave(o);
	return ret;
}

/* This step's gradients are used up, or dropped: their slots are free, but those that the updater has. */
void drain_forget(struct offstage_optimizer *o)
{
	for (uint32_t i = 0; i < o->n_tensors; i++)
		o->tensors[i].drained = o->tensors[i].more = false;
	for (uint32_t k = 0; k < o->n_subgroups; k++) {
		struct subgroup *g = &o->subgroups[k];

		if (!g->queued && (g->slot == SLOT_FILLING || g->slot == SLOT_FULL))
			slot_move(o, k, g->slot, SLOT_FREE);
	}
	o->drained = 0;
	o->finished = false;
	o->drain_error = 0;
}

void drain_wait_landed(struct offstage_optimizer *o)
{
	while ((o->pending_first != NONE || o->drains.head != o->drains.tail) && !o->fault)
		pthread_cond_wait(&o->progress, &o->lock);
}

int drain_settle(struct offstage_optimizer *o, double *sumsq)
{
	int ret;

	drain_wait_landed(o);
	ret = optimizer_fault(o);
	if (ret)
		return ret;
	if (o->drain_error)
		return fail(o->drain_error, "%s; this step's gradients were dropped, state and parameters are as they were",
			    o->drain_error_text);
	for (uint32_t i = 0; i < o->n_tensors; i++) {
		struct tensor *t = &o->tensors[i];

		o->sums[i] = t->drained ? adam_tree_sum(t->leaf, (size_t)((t->count + ADAM_LEAF - 1) / ADAM_LEAF)) : 0;
	}
	if (sumsq)
		*sumsq = adam_tree_sum(o->sums, o->n_tensors);
	for (uint32_t k = 0; k < o->n_subgroups; k++)
		if (o->subgroups[k].slot == SLOT_FILLING)
			slot_move(o, k, SLOT_FILLING, SLOT_FULL);
	o->finished = true;
	return 0;
}

int offstage_drain_finish(struct offstage_optimizer *o, double *sumsq)
{
	int ret = optimizer_enter(o);

	if (ret)
		return ret;
	ret = drain_settle(o, sumsq);
	if (ret && !o->fault && !o->early)
		drain_forget(o);
	optimizer_leave(o);
	return ret;
}

int offstage_abandon(struct offstage_optimizer *o)
{
	int ret = optimizer_enter(o);

	if (ret)
		return ret;
	drain_wait_landed(o);
	ret = optimizer_fault(o);
	if (!ret && o->early && o->queue_tail)
		ret = fail(-EALREADY, "%u of %u subgroups have been updated early and can't be taken back: end the step with "
			   "offstage_step()", o->queue_tail, o->n_subgroups);
	if (!ret) {
		for (uint32_t i = 0; i < o->n_tensors && o->early; i++)
			o->tensors[i].action = KEEP;
		if (o->early)
			o->step_begin_ns = 0;
		o->early = false;
		drain_forget(o);
	}
	optimizer_leave(o);
	return ret;
}
