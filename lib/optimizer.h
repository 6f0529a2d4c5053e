/* SPDX-License-Identifier: MIT */
/*
 * The step engine: a list of tensors, laid out in subgroups, and the three stages that a step has, each with a thread
 * of its own:
 *
 *	drain.c		copies gradients into slots; the lander takes their norm as they land
 *	step.c		decides; the updater runs Adam, subgroup by subgroup
 *	refill.c	copies parameters out of slots; the returner frees the slots as they arrive
 *
 * layout.c cuts tensors into subgroups and allocates, slot.c guards the slots, optimizer.c is the life around it.
 *
 * Layout: tensors are laid one after another; a subgroup is a run of them of at most options.subgroup elements. Where
 * a tensor crosses from one subgroup into the next it is cut, at a multiple of ADAM_LEAF elements from its start: so
 * the norm's tree doesn't depend on the cuts (law 4). What a subgroup holds of a tensor is a segment; segments are in
 * one array, in the order of tensors and of subgroups at once. Each subgroup has a place in the tier (master, exp_avg,
 * exp_avg_sq, one after another) and a slot in staging memory (gradients in, parameters out; in place where both have
 * elements of one size).
 *
 * Ownership: the optimizer holds its context, its device (one of its own if none was given), and through extents all
 * memory. An extent is what one offstage_optimizer_add() allocated.
 *
 * Locking: `lock` guards everything that changes after add(), except
 *	- slot and tier memory: whoever the slot's state says (slot.c),
 *	- leaf sums of a tensor: the lander while copies of it are in flight, afterwards the step's decision,
 *	- factors and action: set by the step's decision or drain() before a subgroup is queued, then read by the updater.
 * It is never held while waiting for a copy or while computing.
 */
#ifndef OPTIMIZER_H
#define OPTIMIZER_H

#include <pthread.h>
#include <stdbool.h>
#include "adam.h"
#include "context.h"
#include "device.h"
#include "tier.h"

#define SUBGROUP_DEFAULT (16u << 20)	/* elements */
#define SEGMENT_ALIGN 32u		/* elements: 64 bytes of the narrowest type */
#define PIECE (1u << 20)		/* elements of one copy at most; a multiple of ADAM_LEAF */
#define BLOCK (1u << 16)		/* elements that one thread reads, or updates, at a time; a multiple of ADAM_LEAF */
#define IN_FLIGHT 64u			/* copies each way */
#define LANDINGS 8u			/* of them when they land beside the slots (ACCUMULATE) */
#define NONE UINT32_MAX

enum slot_state { SLOT_FREE, SLOT_FILLING, SLOT_FULL, SLOT_IN_USE, SLOT_DRAINING };

enum action { KEEP, UPDATE, CAST };	/* what the updater does with a tensor: nothing, Adam, parameter from master */

struct tensor {
	char *name;
	uint32_t group, param_dtype, grad_dtype;
	uint64_t count;
	void *param;			/* on the device */
	uint32_t first_segment, segments;
	uint64_t steps;			/* updates it has had */
	double *leaf;			/* sums of squares of this step's gradient */

	/* draining */
	struct event *ready;		/* on the trainer's stream; made when first needed */
	const void *grad;
	uint32_t next_pending;		/* in the queue of tensors that wait for their copies */
	uint64_t issued, landed;	/* elements of the drain under way; both are count when it is through */
	uint32_t drain_entry;		/* of the last copy issued */
	bool drained;			/* at least once in this step */
	bool more;			/* not for the first time: add to what is there */
	bool fenced;			/* its first copy waits for ready */

	/* updating and refilling */
	enum action action;
	struct adam_factors factors;
	uint32_t sent, returning;	/* segments on their way, and those that haven't arrived on the device */
	uint32_t refill_entry;		/* of the last one sent */
	int refill_error;
};

struct segment {
	uint32_t tensor, subgroup;
	uint64_t start, count;		/* elements, within the tensor */
	uint64_t at;			/* its first element within each of the subgroup's arrays of state */
	uint64_t grad_at, param_at;	/* bytes, within the slot */
	uint64_t landed;		/* elements, when updating early */
	uint64_t *checks;		/* debug: a checksum per piece of the gradient, then one of the parameter */
};

struct subgroup {
	struct tier *tier;
	uint32_t place;			/* its number in the tier */
	uint64_t elements;		/* of each array of state, gaps for alignment included */
	uint64_t exp_avg_at, exp_avg_sq_at;	/* bytes from the start of its state */
	uint32_t first_segment, segments;

	enum slot_state slot;
	char *memory;			/* of the slot */
	uint64_t bytes;

	uint32_t waiting;		/* updating early: segments whose gradients aren't complete */
	bool queued, updated;		/* in this step */
	uint32_t returning;		/* segments that haven't arrived */
};

struct extent {
	struct extent *next;
	struct tier *tier;
	struct offstage_buffer *slots;
	double *leaves;
	uint64_t *checks;		/* debug */
};

struct copy {
	struct event *begin, *end;
	uint32_t segment;
	uint64_t start, count;		/* elements, within the tensor */
	char *landed;			/* where a gradient lands */
};

/* Copies in flight on one stream, a ring in order. */
struct flight {
	struct offstage_stream *stream;
	struct copy copy[IN_FLIGHT];
	uint64_t head, tail;
	uint32_t limit;
};

struct offstage_optimizer {
	struct offstage *ctx;
	struct offstage_device *device;
	bool own_device;
	struct offstage_optimizer_options options;	/* pointers in it aren't kept */
	struct offstage_buffer_options state_options, staging_options;
	uint32_t nodes[2][OFFSTAGE_NODES_MAX], weights[2][OFFSTAGE_NODES_MAX];
	const struct tier_ops *tier;
	enum adam_moments moments;
	bool accumulate;
	bool debug;			/* OFFSTAGE_DEBUG: slots are poisoned and checked */

	struct extent *extents;
	struct tensor *tensors;
	struct segment *segments;
	struct subgroup *subgroups;
	uint32_t n_tensors, n_segments, n_subgroups;
	uint32_t *by_name;		/* tensors, sorted */
	double *sums;			/* one per tensor: leaves' sums on their way to the norm */
	uint64_t elements;

	pthread_mutex_t lock;
	pthread_cond_t drain_work, update_work, refill_work;	/* for the three threads */
	pthread_cond_t progress;	/* for whoever waits for one of them */
	pthread_t threads[3];
	unsigned started;
	bool stop;
	int fault;			/* a slot was misused: nothing works from here on */
	char fault_text[256];

	/* drain */
	struct flight drains;
	struct offstage_buffer *landing;	/* ACCUMULATE: memory where copies land */
	uint64_t landing_bytes;		/* of one of them */
	uint32_t pending_first, pending_last;
	uint32_t drained;		/* tensors with a gradient in this step */
	bool finished;			/* no more gradients are taken in this step */
	int drain_error;
	char drain_error_text[256];

	/* update: subgroups in the order in which they are worked on */
	uint32_t *queue;
	uint32_t queue_head, queue_tail;
	bool updating;			/* the one at queue_head */
	bool early;			/* offstage_step_early() was called for this step */
	double early_loss_scale;
	uint64_t step_begin_ns;		/* 0: none is under way */
	uint64_t *update_begin_ns, *update_end_ns;	/* by place in the queue, for the overlap */

	/* refill: segments in the order in which they are sent */
	struct flight refills;
	uint32_t *send;
	uint32_t send_head, send_tail;
	uint32_t overlap_at;		/* place in the queue up to which overlap has been counted */
};

/* ---- optimizer.c ---- */
/* Checks the handle; the lock is taken on success. */
int optimizer_enter(struct offstage_optimizer *o);
/* The same for a call that waits for one tensor or all of them, [first, last), on the host or on a stream. */
int optimizer_enter_wait(struct offstage_optimizer *o, uint32_t tensor, const struct offstage_stream *stream,
			 uint32_t *first, uint32_t *last);
void optimizer_leave(struct offstage_optimizer *o);
/* With the lock held: waits until no update and no refill is under way. */
void optimizer_wait_idle(struct offstage_optimizer *o);
bool optimizer_idle(const struct offstage_optimizer *o);
/* With the lock held: idle, and nothing drained; -EBUSY with a sentence else. */
int optimizer_between_steps(struct offstage_optimizer *o, const char *what);
/* The fault, if there is one, as this call's failure. */
int optimizer_fault(struct offstage_optimizer *o);
int optimizer_check_tensor(struct offstage_optimizer *o, uint32_t tensor, bool all);
int optimizer_check_stream(struct offstage_optimizer *o, const struct offstage_stream *stream);	/* NULL is fine */

/* ---- layout.c ---- */
int layout_add(struct offstage_optimizer *o, const struct offstage_tensor *tensors, uint32_t n);
/* Removes what the last layout_add() added, after which there are n tensors again. */
void layout_take_back(struct offstage_optimizer *o, uint32_t n);
void layout_free(struct offstage_optimizer *o);

/* ---- slot.c: all with the lock held ---- */
/* Moves a slot on; a move from another state than `from` is a fault. Poisons what becomes free, in debug mode. */
void slot_move(struct offstage_optimizer *o, uint32_t subgroup, enum slot_state from, enum slot_state to);
void optimizer_set_fault(struct offstage_optimizer *o, int err, const char *format, ...)
	__attribute__((format(printf, 3, 4)));
/* Debug mode: takes or verifies checksums. No lock needed; the caller owns the slot. */
void slot_seal_gradient(struct offstage_optimizer *o, const struct segment *s, uint64_t start, uint64_t n);
bool slot_gradient_intact(struct offstage_optimizer *o, const struct segment *s);
void slot_seal_parameter(struct offstage_optimizer *o, const struct segment *s);
bool slot_parameter_intact(struct offstage_optimizer *o, const struct segment *s);
unsigned slot_pieces(uint64_t count);

/* ---- drain.c ---- */
void *drain_thread(void *optimizer);
void drain_issue(struct offstage_optimizer *o);		/* lock held: starts what can be started */
void drain_wait_landed(struct offstage_optimizer *o);	/* lock held: nothing is in line or in flight, or there is a fault */
int drain_settle(struct offstage_optimizer *o, double *sumsq);	/* lock held: all that was asked has landed */
void drain_forget(struct offstage_optimizer *o);	/* lock held: drops this step's gradients */

/* ---- step.c ---- */
void *update_thread(void *optimizer);
void update_queue(struct offstage_optimizer *o, uint32_t subgroup);	/* lock held */
/* Lock held, between steps: tensors' parameters are cast from their masters and sent. order NULL: all of them. */
void step_cast(struct offstage_optimizer *o, const uint32_t *order, uint32_t n);
void step_end_if_idle(struct offstage_optimizer *o);	/* lock held */

/* ---- refill.c ---- */
void *refill_thread(void *optimizer);
void refill_issue(struct offstage_optimizer *o);	/* lock held */

/* ---- what several of them need ---- */

static inline uint32_t grad_dtype_in_slot(const struct offstage_optimizer *o, const struct tensor *t)
{
	return o->accumulate ? OFFSTAGE_F32 : t->grad_dtype;
}

static inline char *slot_grad(const struct offstage_optimizer *o, const struct segment *s)
{
	return o->subgroups[s->subgroup].memory + s->grad_at;
}

static inline char *slot_param(const struct offstage_optimizer *o, const struct segment *s)
{
	return o->subgroups[s->subgroup].memory + s->param_at;
}

static inline bool flight_full(const struct flight *f)
{
	return f->tail - f->head >= f->limit;
}

static inline struct copy *flight_next(struct flight *f)
{
	return &f->copy[f->tail % f->limit];
}

#endif
