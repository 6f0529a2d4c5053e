/* SPDX-License-Identifier: MIT */
/*
 * Refill: parameters cross the link back from their slots, in the order that was asked for. Copies are started by
 * whoever makes one possible (the updater when a subgroup is done, the returner when one is through); the returner
 * waits for them in order, and frees a slot when its last one has arrived.
 */
#include <string.h>
#include "error.h"
#include "optimizer.h"

void refill_issue(struct offstage_optimizer *o)
{
	const struct device_ops *ops = o->device->ops;
	struct flight *f = &o->refills;

	while (o->send_head < o->send_tail && !flight_full(f) && !o->fault) {
		struct segment *s = &o->segments[o->send[o->send_head]];
		struct tensor *t = &o->tensors[s->tensor];
		size_t size = adam_dtype_size(t->param_dtype);
		struct copy *c = flight_next(f);
		int ret;

		/* Strictly in order: what comes first is what the next forward pass waits for. */
		if (!o->subgroups[s->subgroup].updated)
			return;
		c->segment = o->send[o->send_head++];
		/* An error stands until what failed to arrive is sent again. */
		if (!t->sent)
			t->refill_error = 0;
		ret = ops->event_record(c->begin, f->stream);
		if (!ret)
			ret = ops->copy(f->stream, H2D, (char *)t->param + s->start * size, slot_param(o, s), s->count * size);
		if (ops->event_record(c->end, f->stream) != 0 && !ret)
			ret = -EIO;
		if (ret)
			t->refill_error = ret;
		t->sent++;
		t->refill_entry = (uint32_t)(f->tail % f->limit);
		f->tail++;
		pthread_cond_signal(&o->refill_work);
		pthread_cond_broadcast(&o->progress);
	}
}

/*
 * How much of [begin, end) an update was under way, too: those that have ended, and the one that is running. Both kinds
 * of span come in order of time. Lock held.
 */
static uint64_t overlap(struct offstage_optimizer *o, uint64_t begin, uint64_t end)
{
	uint64_t sum = 0;

	for (uint32_t i = o->overlap_at; i < o->queue_head + o->updating; i++) {
		uint64_t from = o->update_begin_ns[i] > begin ? o->update_begin_ns[i] : begin;
		uint64_t to = o->update_end_ns[i] < end ? o->update_end_ns[i] : end;

		if (from < to)
			sum += to - from;
		if (o->update_end_ns[i] <= begin)
			o->overlap_at = i + 1;
	}
	return sum;
}

void *refill_thread(void *arg)
{
	struct offstage_optimizer *o = arg;
	const struct device_ops *ops = o->device->ops;
	struct trace_counters *counters = &o->ctx->trace.counters;
	struct flight *f = &o->refills;

	pthread_mutex_lock(&o->lock);
	for (;;) {
		uint64_t begin, end, bytes;
		struct subgroup *g;
		struct segment *s;
		struct tensor *t;
		struct copy *c;
		bool intact;
		int ret;

		while (f->head == f->tail && !o->stop)
			pthread_cond_wait(&o->refill_work, &o->lock);
		if (f->head == f->tail)
			break;
		c = &f->copy[f->head % f->limit];
		s = &o->segments[c->segment];
		t = &o->tensors[s->tensor];
		g = &o->subgroups[s->subgroup];
		bytes = s->count * adam_dtype_size(t->param_dtype);
		pthread_mutex_unlock(&o->lock);

		ret = ops->event_wait(c->end);
		begin = ops->event_ns(c->begin);
		end = ops->event_ns(c->end);
		intact = !o->debug || slot_parameter_intact(o, s);
		trace_span(&o->ctx->trace, "refill", "refill", s->subgroup, bytes, begin, end);
		count(&counters->refill_ns, end - begin);
		count(&counters->refilled_bytes, bytes);

		pthread_mutex_lock(&o->lock);
		if (!intact)
			optimizer_set_fault(o, -EBADMSG, "the parameter '%s' changed in slot %u while it was refilled: somebody writes to "
					    "memory that isn't theirs; the optimizer is stopped", t->name, s->subgroup);
		if (ret)
			t->refill_error = ret;
		count(&counters->overlap_ns, overlap(o, begin, end));
		f->head++;
		t->returning--;
		if (--g->returning == 0) {
			slot_move(o, s->subgroup, SLOT_DRAINING, SLOT_FREE);
			drain_issue(o);
		}
		refill_issue(o);
		step_end_if_idle(o);
		pthread_cond_broadcast(&o->progress);
	}
	pthread_mutex_unlock(&o->lock);
	return NULL;
}

int offstage_wait(struct offstage_optimizer *o, uint32_t tensor, struct offstage_stream *stream)
{
	uint32_t first, last;
	int ret = optimizer_enter_wait(o, tensor, stream, &first, &last);

	if (ret)
		return ret;
	for (uint32_t i = first; !ret && i < last; i++) {
		struct tensor *t = &o->tensors[i];

		/* For a stream it is enough that the tensor's last copy is on its way; one that isn't in flight has arrived. */
		while (t->returning && !o->fault && !(stream && t->sent == t->segments)) {
			pthread_cond_wait(&o->progress, &o->lock);
			t = &o->tensors[i];	/* offstage_optimizer_add() may have replaced the array */
		}
		if (stream && t->returning)
			ret = o->device->ops->stream_wait(stream, o->refills.copy[t->refill_entry].end);
		if (!ret)
			ret = optimizer_fault(o);
		if (!ret && t->refill_error)
			ret = fail(t->refill_error, "the refill of '%s' failed (%s): its master is right, offstage_refill() sends it again",
				   t->name, strerror(-t->refill_error));
	}
	/* All of them: the last slot is free, too, and the step is over. */
	if (!ret && tensor == OFFSTAGE_ALL && !stream && !o->early) {
		optimizer_wait_idle(o);
		ret = optimizer_fault(o);
	}
	optimizer_leave(o);
	return ret;
}

int offstage_refill(struct offstage_optimizer *o, const uint32_t *order, uint32_t n)
{
	int ret = optimizer_enter(o);

	if (ret)
		return ret;
	ret = optimizer_between_steps(o, "offstage_refill()");
	for (uint32_t i = 0; !ret && order && i < n; i++) {
		ret = optimizer_check_tensor(o, order[i], false);
		if (ret)
			ret = fail_in(ret, "order[%u]", i);
	}
	if (!ret) {
		step_cast(o, order, n);
		ret = optimizer_fault(o);
	}
	optimizer_leave(o);
	return ret;
}
