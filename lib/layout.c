/* SPDX-License-Identifier: MIT */
/*
 * Layout: cuts tensors into segments and subgroups, and allocates what they need, all or nothing: everything new is
 * made beside what is there, and put in its place when nothing can fail any more. See optimizer.h.
 */
#include <stdlib.h>
#include <string.h>
#include "error.h"
#include "heap.h"
#include "optimizer.h"

#define SLOT_ALIGN 4096u
#define ELEMENTS_MAX ((uint64_t)1 << 48)

static uint64_t round_up(uint64_t n, uint64_t to)
{
	return (n + to - 1) / to * to;
}

/* What add() builds. */
struct plan {
	struct tensor *tensors;
	struct segment *segments;
	struct subgroup *subgroups;
	uint32_t n_tensors, n_segments, n_subgroups, room_segments, room_subgroups;
	uint32_t *by_name, *queue, *send;
	double *sums;
	uint64_t *update_begin_ns, *update_end_ns;
	struct extent *extent;
	uint64_t *state_bytes;		/* of each new subgroup */
	uint64_t slot_bytes, longest;	/* of all new slots; elements of the longest new segment */
};

static void *grown(const void *old, uint32_t n_old, uint32_t n, size_t size)
{
	void *array = heap_alloc(n, size);

	if (array && n_old)
		memcpy(array, old, n_old * size);
	return array;
}

static int check_tensor(const struct offstage_tensor *t, uint32_t i)
{
	if (!t->name || !*t->name)
		return fail(-EINVAL, "tensor %u has no name: give each a name of its own", i);
	if (t->param_dtype >= ADAM_DTYPES || t->grad_dtype >= ADAM_DTYPES)
		return fail(-EINVAL, "tensor '%s' has dtypes %u (parameter) and %u (gradient): use an enum offstage_dtype",
			    t->name, t->param_dtype, t->grad_dtype);
	if (t->count > ELEMENTS_MAX)
		return fail(-EINVAL, "tensor '%s' has %llu elements: at most 2^48 fit", t->name, (unsigned long long)t->count);
	if (t->group == NONE)
		return fail(-EINVAL, "tensor '%s' is in group %u: groups are numbered from 0", t->name, t->group);
	return 0;
}

/* Upper bounds of what the cuts can come to, within which no size and no number overflows. */
static int bound(struct offstage_optimizer *o, const struct tensor *tensors, uint32_t n, struct plan *p)
{
	uint64_t segments = o->n_segments, subgroups = (uint64_t)o->n_subgroups + 1, elements = o->elements;

	for (uint32_t i = 0; i < n; i++) {
		/* A cut inside a tensor leaves at least one leaf, and all but the first and last fill a subgroup. */
		segments += tensors[i].count / o->options.subgroup + 2;
		subgroups += tensors[i].count / o->options.subgroup + 2;
		elements += tensors[i].count;
		if (elements > ELEMENTS_MAX)
			return fail(-EINVAL, "with tensor '%s' there are %llu elements: at most 2^48 fit an optimizer", tensors[i].name,
				    (unsigned long long)elements);
		if (segments >= NONE || subgroups >= NONE)
			return fail(-EINVAL, "with tensor '%s' there are more than 2^32 - 2 subgroups of %llu elements: make "
				    "offstage_optimizer_options.subgroup larger", tensors[i].name,
				    (unsigned long long)o->options.subgroup);
	}
	p->room_segments = (uint32_t)segments;
	p->room_subgroups = (uint32_t)subgroups;
	return 0;
}

/* Cuts the new tensors; every subgroup takes what fits. */
static void cut(struct offstage_optimizer *o, struct plan *p)
{
	struct subgroup *g = NULL;

	for (uint32_t i = o->n_tensors; i < p->n_tensors; i++) {
		struct tensor *t = &p->tensors[i];

		t->first_segment = p->n_segments;
		for (uint64_t start = 0; start < t->count;) {
			uint64_t left = t->count - start;
			uint64_t room = g && g->elements < o->options.subgroup ? o->options.subgroup - g->elements : 0;
			struct segment *s;

			if (left > room) {
				left = room / ADAM_LEAF * ADAM_LEAF;
				if (!left) {
					g = &p->subgroups[p->n_subgroups++];
					g->first_segment = p->n_segments;
					continue;
				}
			}
			s = &p->segments[p->n_segments++];
			*s = (struct segment){ .tensor = i, .subgroup = p->n_subgroups - 1, .start = start, .count = left,
					       .at = g->elements };
			g->segments++;
			g->elements = round_up(g->elements + left, SEGMENT_ALIGN);
			if (left > p->longest)
				p->longest = left;
			start += left;
		}
		t->segments = p->n_segments - t->first_segment;
	}
}

/* Where everything of a new subgroup lies: in its state, and in its slot. */
static void place(struct offstage_optimizer *o, struct plan *p)
{
	uint64_t moment = o->moments == ADAM_MOMENTS_F32 ? 4 : 2;

	for (uint32_t k = o->n_subgroups; k < p->n_subgroups; k++) {
		struct subgroup *g = &p->subgroups[k];
		uint64_t at = 0;

		g->exp_avg_at = g->elements * 4;
		g->exp_avg_sq_at = g->exp_avg_at + g->elements * moment;
		p->state_bytes[k - o->n_subgroups] = g->exp_avg_sq_at + g->elements * moment;
		for (uint32_t i = g->first_segment; i < g->first_segment + g->segments; i++) {
			struct segment *s = &p->segments[i];
			struct tensor *t = &p->tensors[s->tensor];
			size_t grad = adam_dtype_size(grad_dtype_in_slot(o, t)), param = adam_dtype_size(t->param_dtype);

			s->grad_at = at;
			at += round_up(s->count, SEGMENT_ALIGN) * grad;
			s->param_at = s->grad_at;
			if (param != grad) {
				s->param_at = at;
				at += round_up(s->count, SEGMENT_ALIGN) * param;
			}
		}
		g->bytes = at;
		p->slot_bytes += round_up(at, SLOT_ALIGN);
	}
}

static int allocate_extent(struct offstage_optimizer *o, struct plan *p)
{
	struct extent *e = p->extent;
	uint64_t leaves = 0, checks = 0, at = 0;
	int ret;

	for (uint32_t i = o->n_tensors; i < p->n_tensors; i++)
		leaves += (p->tensors[i].count + ADAM_LEAF - 1) / ADAM_LEAF;
	for (uint32_t i = o->n_segments; i < p->n_segments; i++)
		checks += slot_pieces(p->segments[i].count) + 1;
	/* The large things first: it is their failure that names a limit. */
	ret = o->tier->create(o->ctx, p->state_bytes, p->n_subgroups - o->n_subgroups, &o->state_options, &e->tier);
	if (ret)
		return ret;
	ret = offstage_buffer_create(o->ctx, p->slot_bytes, &o->staging_options, &e->slots);
	if (ret)
		return fail_in(ret, "slots of %u subgroups", p->n_subgroups - o->n_subgroups);
	e->leaves = heap_alloc(leaves, sizeof(*e->leaves));
	if (!e->leaves)
		return -ENOMEM;
	if (o->debug) {
		e->checks = heap_alloc(checks, sizeof(*e->checks));
		if (!e->checks)
			return -ENOMEM;
	}

	leaves = 0;
	for (uint32_t i = o->n_tensors; i < p->n_tensors; i++) {
		p->tensors[i].leaf = e->leaves + leaves;
		leaves += (p->tensors[i].count + ADAM_LEAF - 1) / ADAM_LEAF;
	}
	checks = 0;
	for (uint32_t i = o->n_segments; i < p->n_segments && o->debug; i++) {
		p->segments[i].checks = e->checks + checks;
		checks += slot_pieces(p->segments[i].count) + 1;
	}
	for (uint32_t k = o->n_subgroups; k < p->n_subgroups; k++) {
		struct subgroup *g = &p->subgroups[k];

		g->tier = e->tier;
		g->place = k - o->n_subgroups;
		g->memory = (char *)offstage_buffer_data(e->slots) + at;
		at += round_up(g->bytes, SLOT_ALIGN);
		if (o->debug)
			memset(g->memory, 0xff, g->bytes);
	}
	return 0;
}

/* Micro-batches land beside the slots: as many pieces as may be in flight, of the longest there can be. */
static int allocate_landing(struct offstage_optimizer *o, uint64_t longest, struct offstage_buffer **landing, uint64_t *bytes)
{
	uint64_t need = round_up(longest < PIECE ? longest : PIECE, SEGMENT_ALIGN) * 4;
	int ret;

	*landing = NULL;
	*bytes = o->landing_bytes;
	if (!o->accumulate || need <= o->landing_bytes)
		return 0;
	ret = offstage_buffer_create(o->ctx, need * LANDINGS, &o->staging_options, landing);
	if (ret)
		return fail_in(ret, "landing memory for micro-batches");
	*bytes = need;
	return 0;
}

static int compare_names(const void *a, const void *b, void *tensors)
{
	const struct tensor *t = tensors;

	return strcmp(t[*(const uint32_t *)a].name, t[*(const uint32_t *)b].name);
}

static int sort_names(struct plan *p)
{
	for (uint32_t i = 0; i < p->n_tensors; i++)
		p->by_name[i] = i;
	qsort_r(p->by_name, p->n_tensors, sizeof(*p->by_name), compare_names, p->tensors);
	for (uint32_t i = 1; i < p->n_tensors; i++)
		if (strcmp(p->tensors[p->by_name[i - 1]].name, p->tensors[p->by_name[i]].name) == 0)
			return fail(-EEXIST, "two tensors have the name '%s': give each a name of its own",
				    p->tensors[p->by_name[i]].name);
	return 0;
}

static void free_extent(struct extent *e)
{
	if (!e)
		return;
	if (e->tier)
		e->tier->ops->destroy(e->tier);
	offstage_buffer_close(e->slots);
	heap_free(e->leaves);
	heap_free(e->checks);
	heap_free(e);
}

static void free_arrays(struct offstage_optimizer *o)
{
	heap_free(o->tensors);
	heap_free(o->segments);
	heap_free(o->subgroups);
	heap_free(o->by_name);
	heap_free(o->sums);
	heap_free(o->queue);
	heap_free(o->send);
	heap_free(o->update_begin_ns);
	heap_free(o->update_end_ns);
}

int layout_add(struct offstage_optimizer *o, const struct offstage_tensor *given, uint32_t n)
{
	struct plan p = { .n_tensors = o->n_tensors + n, .n_segments = o->n_segments, .n_subgroups = o->n_subgroups };
	struct offstage_buffer *landing = NULL;
	uint64_t landing_bytes = 0, elements = 0;
	int ret = -ENOMEM;

	if (n >= NONE - o->n_tensors)
		return fail(-EINVAL, "%u tensors and %u more are too many: at most 2^32 - 2 fit", o->n_tensors, n);
	p.tensors = grown(o->tensors, o->n_tensors, p.n_tensors, sizeof(*p.tensors));
	p.by_name = heap_alloc(p.n_tensors, sizeof(*p.by_name));
	p.sums = heap_alloc(p.n_tensors, sizeof(*p.sums));
	p.extent = heap_alloc(1, sizeof(*p.extent));
	if (!p.tensors || !p.by_name || !p.sums || !p.extent)
		goto undo;
	for (uint32_t i = 0; i < n; i++) {
		const void *at = (const char *)given + (size_t)given->size * i;
		struct tensor *t = &p.tensors[o->n_tensors + i];
		struct offstage_tensor one;

		ret = struct_in(&one, sizeof(one), at, "offstage_tensor");
		if (!ret)
			ret = check_tensor(&one, o->n_tensors + i);
		if (ret)
			goto undo;
		*t = (struct tensor){ .name = heap_string(one.name), .group = one.group, .param_dtype = one.param_dtype,
				      .grad_dtype = one.grad_dtype, .count = one.count, .param = one.param,
				      .issued = one.count, .landed = one.count, .next_pending = NONE };
		ret = -ENOMEM;
		if (!t->name)
			goto undo;
		elements += one.count;
	}
	ret = sort_names(&p);
	if (ret)
		goto undo;

	ret = bound(o, p.tensors + o->n_tensors, n, &p);
	if (ret)
		goto undo;
	ret = -ENOMEM;
	p.segments = grown(o->segments, o->n_segments, p.room_segments, sizeof(*p.segments));
	p.subgroups = grown(o->subgroups, o->n_subgroups, p.room_subgroups, sizeof(*p.subgroups));
	if (!p.segments || !p.subgroups)
		goto undo;
	cut(o, &p);
	p.state_bytes = heap_alloc(p.n_subgroups - o->n_subgroups, sizeof(*p.state_bytes));
	p.queue = heap_alloc(p.n_subgroups, sizeof(*p.queue));
	p.update_begin_ns = heap_alloc(p.n_subgroups, sizeof(*p.update_begin_ns));
	p.update_end_ns = heap_alloc(p.n_subgroups, sizeof(*p.update_end_ns));
	p.send = heap_alloc(p.n_segments, sizeof(*p.send));
	if (!p.state_bytes || !p.queue || !p.update_begin_ns || !p.update_end_ns || !p.send)
		goto undo;
	place(o, &p);
	ret = allocate_extent(o, &p);
	if (ret)
		goto undo;
	ret = allocate_landing(o, p.longest, &landing, &landing_bytes);
	if (ret)
		goto undo;

	/* Nothing fails from here on. */
	free_arrays(o);
	heap_free(p.state_bytes);
	o->tensors = p.tensors;
	o->segments = p.segments;
	o->subgroups = p.subgroups;
	o->by_name = p.by_name;
	o->sums = p.sums;
	o->queue = p.queue;
	o->send = p.send;
	o->update_begin_ns = p.update_begin_ns;
	o->update_end_ns = p.update_end_ns;
	o->queue_head = o->queue_tail = o->send_head = o->send_tail = o->overlap_at = 0;
	o->n_tensors = p.n_tensors;
	o->n_segments = p.n_segments;
	o->n_subgroups = p.n_subgroups;
	o->elements += elements;
	p.extent->next = o->extents;
	o->extents = p.extent;
	if (landing) {
		offstage_buffer_close(o->landing);
		o->landing = landing;
		o->landing_bytes = landing_bytes;
		for (uint32_t i = 0; i < LANDINGS; i++)
			o->drains.copy[i].landed = (char *)offstage_buffer_data(landing) + landing_bytes * i;
	}
	return 0;
undo:
	free_extent(p.extent);
	heap_free(p.send);
	heap_free(p.update_end_ns);
	heap_free(p.update_begin_ns);
	heap_free(p.queue);
	heap_free(p.state_bytes);
	heap_free(p.subgroups);
	heap_free(p.segments);
	for (uint32_t i = o->n_tensors; p.tensors && i < p.n_tensors; i++)
		heap_free(p.tensors[i].name);
	heap_free(p.tensors);
	heap_free(p.sums);
	heap_free(p.by_name);
	return ret;
}

void layout_take_back(struct offstage_optimizer *o, uint32_t n)
{
	struct extent *e = o->extents;
	uint32_t kept = 0;

	for (uint32_t i = 0; i < o->n_tensors; i++)
		if (o->by_name[i] < n)
			o->by_name[kept++] = o->by_name[i];
	for (uint32_t i = n; i < o->n_tensors; i++) {
		o->elements -= o->tensors[i].count;
		heap_free(o->tensors[i].name);
	}
	while (o->n_subgroups && o->subgroups[o->n_subgroups - 1].tier == e->tier)
		o->n_segments -= o->subgroups[--o->n_subgroups].segments;
	o->n_tensors = n;
	o->extents = e->next;
	free_extent(e);
}

void layout_free(struct offstage_optimizer *o)
{
	while (o->extents) {
		struct extent *next = o->extents->next;

		free_extent(o->extents);
		o->extents = next;
	}
	offstage_buffer_close(o->landing);
	for (uint32_t i = 0; i < o->n_tensors; i++) {
		if (o->tensors[i].ready)
			o->device->ops->event_destroy(o->tensors[i].ready);
		heap_free(o->tensors[i].name);
	}
	free_arrays(o);
}
