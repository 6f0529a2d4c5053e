/* SPDX-License-Identifier: MIT */
/*
 * The optimizer's life: made, given tensors, asked and told about state, closed. See optimizer.h for the whole.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "error.h"
#include "heap.h"
#include "optimizer.h"
#include "threads.h"

int optimizer_enter(struct offstage_optimizer *o)
{
	int ret;

	if (!o)
		return fail(-EINVAL, "the optimizer is NULL: make one first and check what that returns");
	ret = context_check(o->ctx);
	if (ret)
		return ret;
	pthread_mutex_lock(&o->lock);
	ret = optimizer_fault(o);
	if (ret)
		pthread_mutex_unlock(&o->lock);
	return ret;
}

void optimizer_leave(struct offstage_optimizer *o)
{
	pthread_mutex_unlock(&o->lock);
}

int optimizer_fault(struct offstage_optimizer *o)
{
	return o->fault ? fail(o->fault, "%s", o->fault_text) : 0;
}

int optimizer_check_tensor(struct offstage_optimizer *o, uint32_t tensor, bool all)
{
	if (tensor < o->n_tensors || (all && tensor == OFFSTAGE_ALL))
		return 0;
	return fail(-EINVAL, "there is no tensor %u: the optimizer has %u, numbered from 0", tensor, o->n_tensors);
}

int optimizer_check_stream(struct offstage_optimizer *o, const struct offstage_stream *stream)
{
	if (!stream || stream->device == o->device)
		return 0;
	return fail(-EINVAL, "the stream belongs to another device than the optimizer's: use a stream of that one");
}

int optimizer_enter_wait(struct offstage_optimizer *o, uint32_t tensor, const struct offstage_stream *stream,
			 uint32_t *first, uint32_t *last)
{
	int ret = optimizer_enter(o);

	if (ret)
		return ret;
	ret = optimizer_check_tensor(o, tensor, true);
	if (!ret)
		ret = optimizer_check_stream(o, stream);
	if (ret) {
		optimizer_leave(o);
		return ret;
	}
	*first = tensor == OFFSTAGE_ALL ? 0 : tensor;
	*last = tensor == OFFSTAGE_ALL ? o->n_tensors : tensor + 1;
	return 0;
}

bool optimizer_idle(const struct offstage_optimizer *o)
{
	return o->queue_head == o->queue_tail && o->send_head == o->send_tail && o->refills.head == o->refills.tail;
}

void optimizer_wait_idle(struct offstage_optimizer *o)
{
	while (!optimizer_idle(o) && !o->fault)
		pthread_cond_wait(&o->progress, &o->lock);
}

int optimizer_between_steps(struct offstage_optimizer *o, const char *what)
{
	if (o->drained || o->early)
		return fail(-EBUSY, "%s is for between steps, and %u gradients have been drained: take the step or abandon it "
			    "first", what, o->drained);
	optimizer_wait_idle(o);
	return optimizer_fault(o);
}

/* ---- made and closed ------------------------------------------------------------------------------------------------- */

/* Keeps the caller's placement: its arrays are copied, and children of fork() don't get the memory. */
static int keep_placement(struct offstage_optimizer *o, int which, const struct offstage_buffer_options *given,
			  struct offstage_buffer_options *kept)
{
	int ret = struct_in(kept, sizeof(*kept), given, "offstage_buffer_options");

	if (ret)
		return ret;
	kept->size = sizeof(*kept);
	kept->flags |= OFFSTAGE_BUFFER_DONTFORK;
	if (kept->n_nodes > OFFSTAGE_NODES_MAX || (kept->n_nodes && !kept->nodes))
		return fail(-EINVAL, "a placement names %u nodes in an array at %p: at most %d, in an array that is there",
			    kept->n_nodes, (const void *)kept->nodes, OFFSTAGE_NODES_MAX);
	if (kept->n_nodes)
		kept->nodes = memcpy(o->nodes[which], kept->nodes, kept->n_nodes * sizeof(*kept->nodes));
	if (kept->n_nodes && kept->weights)
		kept->weights = memcpy(o->weights[which], kept->weights, kept->n_nodes * sizeof(*kept->weights));
	return 0;
}

static int make_flight(struct offstage_optimizer *o, struct flight *f, uint32_t limit)
{
	const struct device_ops *ops = o->device->ops;
	int ret = ops->stream_create(o->device, &f->stream);

	f->limit = limit;
	for (uint32_t i = 0; !ret && i < limit; i++) {
		ret = ops->event_create(o->device, &f->copy[i].begin);
		if (!ret)
			ret = ops->event_create(o->device, &f->copy[i].end);
	}
	return ret;
}

static void free_flight(struct offstage_optimizer *o, struct flight *f)
{
	const struct device_ops *ops = o->device->ops;

	if (f->stream)
		ops->stream_destroy(f->stream);
	for (uint32_t i = 0; i < IN_FLIGHT; i++) {
		if (f->copy[i].begin)
			ops->event_destroy(f->copy[i].begin);
		if (f->copy[i].end)
			ops->event_destroy(f->copy[i].end);
	}
}

static int start_threads(struct offstage_optimizer *o)
{
	static void *(*const bodies[])(void *) = { drain_thread, update_thread, refill_thread };
	static const char *const names[] = { "offstage-drain", "offstage-step", "offstage-refill" };

	while (o->started < 3) {
		int err = thread_start(&o->threads[o->started], names[o->started], bodies[o->started], o);

		if (err)
			return fail(-err, "an optimizer needs 3 threads and %u could be started (%s): raise RLIMIT_NPROC or the cgroup's "
				    "pids.max", o->started, strerror(err));
		count(&o->ctx->trace.counters.threads, 1);
		o->started++;
	}
	return 0;
}

static void stop_threads(struct offstage_optimizer *o)
{
	pthread_mutex_lock(&o->lock);
	o->stop = true;
	pthread_cond_broadcast(&o->drain_work);
	pthread_cond_broadcast(&o->update_work);
	pthread_cond_broadcast(&o->refill_work);
	pthread_mutex_unlock(&o->lock);
	while (o->started)
		pthread_join(o->threads[--o->started], NULL);
}

void offstage_optimizer_close(struct offstage_optimizer *o)
{
	struct offstage *ctx;

	if (!o)
		return;
	ctx = o->ctx;
	if (!context_forked(ctx)) {
		pthread_mutex_lock(&o->lock);
		while ((o->pending_first != NONE || o->drains.head != o->drains.tail || !optimizer_idle(o)) && !o->fault)
			pthread_cond_wait(&o->progress, &o->lock);
		pthread_mutex_unlock(&o->lock);
		stop_threads(o);
	}
	if (o->device) {
		free_flight(o, &o->drains);
		free_flight(o, &o->refills);
	}
	layout_free(o);
	if (o->device) {
		struct offstage_device *device = o->device;

		/* A child of fork may have closed the caller's device before. */
		if (o->own_device) {
			device->users--;
			offstage_device_close(device);
		} else {
			device_put(device);
		}
	}
	heap_free(o);
	context_put(ctx);
}

static int check_options(struct offstage_optimizer *o, const struct offstage_optimizer_options *given)
{
	struct offstage_optimizer_options *p = &o->options;
	int ret = struct_in(p, sizeof(*p), given, "offstage_optimizer_options");

	if (ret)
		return ret;
	if (p->flags & ~(OFFSTAGE_OPTIMIZER_ACCUMULATE | OFFSTAGE_OPTIMIZER_STOCHASTIC) || p->reserved)
		return fail(-EINVAL, "offstage_optimizer_options.flags is %#x and reserved is %u: use OFFSTAGE_OPTIMIZER_* of this "
			    "version, and 0", p->flags, p->reserved);
	if (p->moment_dtype != OFFSTAGE_F32 && p->moment_dtype != OFFSTAGE_BF16)
		return fail(-EINVAL, "moments can't be kept in dtype %u: use OFFSTAGE_F32 or OFFSTAGE_BF16", p->moment_dtype);
	if ((p->flags & OFFSTAGE_OPTIMIZER_STOCHASTIC) && p->moment_dtype == OFFSTAGE_F32)
		return fail(-EINVAL, "stochastic rounding is for moments in bf16, and these are fp32: set moment_dtype too");
	if (!p->subgroup)
		p->subgroup = SUBGROUP_DEFAULT;
	if (p->subgroup > (uint64_t)1 << 40)
		return fail(-EINVAL, "a subgroup of %llu elements is too large: at most 2^40; 0 takes the default",
			    (unsigned long long)p->subgroup);
	p->subgroup = (p->subgroup + ADAM_LEAF - 1) / ADAM_LEAF * ADAM_LEAF;
	o->accumulate = p->flags & OFFSTAGE_OPTIMIZER_ACCUMULATE;
	o->moments = p->moment_dtype == OFFSTAGE_F32 ? ADAM_MOMENTS_F32 :
		     p->flags & OFFSTAGE_OPTIMIZER_STOCHASTIC ? ADAM_MOMENTS_BF16_STOCHASTIC : ADAM_MOMENTS_BF16;
	ret = tier_pick(p->tier, &o->tier);
	if (!ret)
		ret = keep_placement(o, 0, p->state, &o->state_options);
	if (!ret)
		ret = keep_placement(o, 1, p->staging, &o->staging_options);
	return ret;
}

int offstage_optimizer_create(struct offstage *ctx, const struct offstage_optimizer_options *options,
			      struct offstage_optimizer **out)
{
	const char *debug = getenv("OFFSTAGE_DEBUG");
	struct offstage_optimizer *o;
	int ret = context_check(ctx);

	if (ret)
		return ret;
	if (!out)
		return fail(-EINVAL, "there is no place for the optimizer: pass a pointer to a struct offstage_optimizer *");
	*out = NULL;
	o = heap_alloc(1, sizeof(*o));
	if (!o)
		return -ENOMEM;
	o->ctx = context_get(ctx);
	o->debug = debug && *debug && strcmp(debug, "0") != 0;
	o->pending_first = o->pending_last = NONE;
	pthread_mutex_init(&o->lock, NULL);
	pthread_cond_init(&o->drain_work, NULL);
	pthread_cond_init(&o->update_work, NULL);
	pthread_cond_init(&o->refill_work, NULL);
	pthread_cond_init(&o->progress, NULL);
	ret = check_options(o, options);
	if (!ret && o->options.device) {
		if (o->options.device->ctx != ctx)
			ret = fail(-EINVAL, "the device was opened in another context: open it in the optimizer's");
		else
			o->device = o->options.device;
	} else if (!ret) {
		ret = offstage_device_open(ctx, NULL, &o->device);
		o->own_device = !ret;
	}
	if (!ret) {
		o->device->users++;
		ret = make_flight(o, &o->drains, o->accumulate ? LANDINGS : IN_FLIGHT);
	}
	if (!ret)
		ret = make_flight(o, &o->refills, IN_FLIGHT);
	if (!ret)
		ret = start_threads(o);
	if (ret) {
		offstage_optimizer_close(o);
		return ret;
	}
	*out = o;
	return 0;
}

/* ---- tensors ----------------------------------------------------------------------------------------------------------- */

struct widening {
	struct offstage_optimizer *o;
	const struct tensor *t;
	const char *from;
	float *to;
	uint64_t count;
};

static void widen_block(void *arg, size_t i)
{
	const struct widening *w = arg;
	uint64_t at = i * (uint64_t)BLOCK, n = w->count - at < BLOCK ? w->count - at : BLOCK;

	w->o->ctx->adam->widen[w->t->param_dtype](w->to + at, w->from + at * adam_dtype_size(w->t->param_dtype), (size_t)n);
}

/* Starts the copies of tensors' parameters into their slots, all of them, and waits for the last. */
static int fetch(struct offstage_optimizer *o, uint32_t first, uint32_t last)
{
	const struct device_ops *ops = o->device->ops;
	struct event *end = o->drains.copy[0].end;
	int ret = 0, err;

	for (uint32_t i = first; !ret && i < last; i++) {
		const struct tensor *t = &o->tensors[i];
		size_t size = adam_dtype_size(t->param_dtype);

		for (uint32_t k = t->first_segment; !ret && t->param && k < t->first_segment + t->segments; k++) {
			const struct segment *s = &o->segments[k];

			if (o->subgroups[s->subgroup].slot != SLOT_FILLING)
				slot_move(o, s->subgroup, SLOT_FREE, SLOT_FILLING);
			ret = ops->copy(o->drains.stream, D2H, slot_param(o, s), (const char *)t->param + s->start * size,
					s->count * size);
		}
		if (ret)
			ret = fail_in(ret, "reading the parameter '%s' from the device", t->name);
	}
	/* Those that were started are waited for, whatever became of the others. */
	err = ops->event_record(end, o->drains.stream);
	if (!err)
		err = ops->event_wait(end);
	if (err && !ret)
		ret = fail_in(err, "reading the parameters '%s' to '%s' from the device", o->tensors[first].name,
			      o->tensors[last - 1].name);
	return ret;
}

/*
 * Masters from the device's parameters, through the slots. Lock held, between steps: the slots are free. No master is
 * changed before all parameters have arrived (law 5).
 */
static int load(struct offstage_optimizer *o, uint32_t first, uint32_t last)
{
	int ret = first < last ? fetch(o, first, last) : 0;

	for (uint32_t i = first; !ret && i < last; i++) {
		struct tensor *t = &o->tensors[i];

		t->refill_error = 0;	/* what lies on the device is right by now */
		for (uint32_t k = t->first_segment; !ret && t->param && k < t->first_segment + t->segments; k++) {
			struct segment *s = &o->segments[k];
			struct subgroup *g = &o->subgroups[s->subgroup];
			char *state;

			ret = g->tier->ops->acquire(g->tier, g->place, (void **)&state);
			if (!ret) {
				struct widening w = { o, t, slot_param(o, s), (float *)state + s->at, s->count };

				threads_run(o->ctx->threads, widen_block, &w, (size_t)((s->count + BLOCK - 1) / BLOCK));
				ret = g->tier->ops->release(g->tier, g->place, true);
			}
		}
	}
	for (uint32_t k = 0; k < o->n_subgroups; k++)
		if (o->subgroups[k].slot == SLOT_FILLING)
			slot_move(o, k, SLOT_FILLING, SLOT_FREE);
	return ret ? ret : optimizer_fault(o);
}

int offstage_optimizer_add(struct offstage_optimizer *o, const struct offstage_tensor *tensors, uint32_t n)
{
	uint32_t before;
	int ret = optimizer_enter(o);

	if (ret)
		return ret;
	if (n && !tensors)
		ret = fail(-EINVAL, "%u tensors are to be added and their array is NULL", n);
	if (!ret)
		ret = optimizer_between_steps(o, "offstage_optimizer_add()");
	if (ret || !n)
		goto leave;
	before = o->n_tensors;
	ret = layout_add(o, tensors, n);
	if (!ret) {
		ret = load(o, before, o->n_tensors);
		if (ret)
			layout_take_back(o, before);
	}
leave:
	optimizer_leave(o);
	return ret;
}

int offstage_rebind(struct offstage_optimizer *o, uint32_t tensor, void *param)
{
	int ret = optimizer_enter(o);

	if (ret)
		return ret;
	ret = optimizer_check_tensor(o, tensor, false);
	if (!ret)
		ret = optimizer_between_steps(o, "offstage_rebind()");
	if (!ret) {
		o->tensors[tensor].param = param;
		o->tensors[tensor].refill_error = 0;	/* it was about another place */
	}
	optimizer_leave(o);
	return ret;
}

int offstage_reload(struct offstage_optimizer *o, uint32_t tensor)
{
	int ret = optimizer_enter(o);

	if (ret)
		return ret;
	ret = optimizer_check_tensor(o, tensor, true);
	if (!ret)
		ret = optimizer_between_steps(o, "offstage_reload()");
	if (!ret && tensor != OFFSTAGE_ALL && !o->tensors[tensor].param)
		ret = fail(-EINVAL, "'%s' has no parameter on the device to read from: offstage_rebind() it first",
			   o->tensors[tensor].name);
	if (!ret)
		ret = tensor == OFFSTAGE_ALL ? load(o, 0, o->n_tensors) : load(o, tensor, tensor + 1);
	optimizer_leave(o);
	return ret;
}

int offstage_tensor_find(struct offstage_optimizer *o, const char *name, uint32_t *tensor)
{
	uint32_t low = 0, high;
	int ret = optimizer_enter(o);

	if (ret)
		return ret;
	if (!name || !tensor) {
		ret = fail(-EINVAL, "a tensor is found by name, and its number needs a place; one of them is NULL");
		goto leave;
	}
	high = o->n_tensors;
	while (low < high) {
		uint32_t middle = low + (high - low) / 2;
		int order = strcmp(o->tensors[o->by_name[middle]].name, name);

		if (order == 0) {
			*tensor = o->by_name[middle];
			goto leave;
		}
		if (order < 0)
			low = middle + 1;
		else
			high = middle;
	}
	ret = fail(-ENOENT, "there is no tensor '%s' among the optimizer's %u: names are those given to offstage_optimizer_add()",
		   name, o->n_tensors);
leave:
	optimizer_leave(o);
	return ret;
}

int offstage_optimizer_info(struct offstage_optimizer *o, struct offstage_optimizer_info *out)
{
	struct offstage_buffer_info buffer = { .size = sizeof(buffer) };
	struct offstage_optimizer_info info = { 0 };
	int ret = optimizer_enter(o);

	if (ret)
		return ret;
	info.tensors = o->n_tensors;
	info.elements = o->elements;
	info.subgroups = o->n_subgroups;
	for (struct extent *e = o->extents; e; e = e->next) {
		struct tier_info tier;

		e->tier->ops->info(e->tier, &tier);
		offstage_buffer_info(e->slots, &buffer);
		info.state_bytes += tier.bytes;
		info.slot_bytes += buffer.backed;
		info.huge += tier.huge + buffer.huge;
		info.locked += tier.locked + buffer.locked;
	}
	if (o->landing) {
		offstage_buffer_info(o->landing, &buffer);
		info.landing_bytes = buffer.backed;
		info.huge += buffer.huge;
		info.locked += buffer.locked;
	}
	snprintf(info.tier, sizeof(info.tier), "%s", o->tier->name);
	snprintf(info.device, sizeof(info.device), "%s", o->device->name);
	ret = struct_out(out, &info, sizeof(info), "offstage_optimizer_info");
	optimizer_leave(o);
	return ret;
}

/* ---- state ------------------------------------------------------------------------------------------------------------- */

/* Walks over the part [offset, offset + count) of a tensor's state, segment by segment. */
static int state_copy(struct offstage_optimizer *o, uint32_t tensor, enum offstage_state which, uint64_t offset,
		      uint64_t count, float *out, const float *in)
{
	uint32_t dtype;
	struct tensor *t;
	int ret = optimizer_enter(o);

	if (ret)
		return ret;
	ret = optimizer_check_tensor(o, tensor, false);
	if (!ret && (unsigned)which > OFFSTAGE_EXP_AVG_SQ)
		ret = fail(-EINVAL, "there is no state %u: use an enum offstage_state", which);
	if (!ret && count && !out && !in)
		ret = fail(-EINVAL, "%llu elements are to be copied and the memory for them is NULL", (unsigned long long)count);
	if (!ret)
		ret = optimizer_between_steps(o, in ? "offstage_state_write()" : "offstage_state_read()");
	if (ret)
		goto leave;
	t = &o->tensors[tensor];
	if (offset > t->count || count > t->count - offset) {
		ret = fail(-ERANGE, "elements %llu to %llu of '%s' were asked for and it has %llu", (unsigned long long)offset,
			   (unsigned long long)(offset + count), t->name, (unsigned long long)t->count);
		goto leave;
	}
	dtype = which == OFFSTAGE_MASTER ? OFFSTAGE_F32 : o->options.moment_dtype;
	for (uint32_t i = t->first_segment; !ret && count && i < t->first_segment + t->segments; i++) {
		struct segment *s = &o->segments[i];
		struct subgroup *g = &o->subgroups[s->subgroup];
		uint64_t at, n;
		char *state;

		if (offset >= s->start + s->count)
			continue;
		at = offset - s->start;
		n = s->count - at < count ? s->count - at : count;
		ret = g->tier->ops->acquire(g->tier, g->place, (void **)&state);
		if (ret)
			break;
		state += which == OFFSTAGE_MASTER ? 0 : which == OFFSTAGE_EXP_AVG ? g->exp_avg_at : g->exp_avg_sq_at;
		state += (s->at + at) * adam_dtype_size(dtype);
		if (in)
			o->ctx->adam->narrow[dtype](state, in, (size_t)n);
		else
			o->ctx->adam->widen[dtype](out, state, (size_t)n);
		ret = g->tier->ops->release(g->tier, g->place, in != NULL);
		offset += n;
		count -= n;
		in = in ? in + n : NULL;
		out = out ? out + n : NULL;
	}
leave:
	optimizer_leave(o);
	return ret;
}

int offstage_state_read(struct offstage_optimizer *o, uint32_t tensor, enum offstage_state which, uint64_t offset,
			uint64_t count, float *out)
{
	return state_copy(o, tensor, which, offset, count, out, NULL);
}

int offstage_state_write(struct offstage_optimizer *o, uint32_t tensor, enum offstage_state which, uint64_t offset,
			 uint64_t count, const float *in)
{
	return state_copy(o, tensor, which, offset, count, NULL, in);
}

int offstage_steps_get(struct offstage_optimizer *o, uint32_t tensor, uint64_t *steps)
{
	int ret = optimizer_enter(o);

	if (ret)
		return ret;
	ret = optimizer_check_tensor(o, tensor, false);
	if (!ret && !steps)
		ret = fail(-EINVAL, "the number of steps needs a place, which is NULL");
	if (!ret)
		*steps = o->tensors[tensor].steps;
	optimizer_leave(o);
	return ret;
}

int offstage_steps_set(struct offstage_optimizer *o, uint32_t tensor, uint64_t steps)
{
	int ret = optimizer_enter(o);

	if (ret)
		return ret;
	ret = optimizer_check_tensor(o, tensor, false);
	/* Counted in double by the bias correction; and the one after the last 64-bit number would be step 0. */
	if (!ret && steps > (uint64_t)1 << 53)
		ret = fail(-EINVAL, "%llu steps are more than can be counted: at most 2^53", (unsigned long long)steps);
	if (!ret)
		ret = optimizer_between_steps(o, "offstage_steps_set()");
	if (!ret)
		o->tensors[tensor].steps = steps;
	optimizer_leave(o);
	return ret;
}
