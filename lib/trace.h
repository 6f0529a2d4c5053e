/* SPDX-License-Identifier: MIT */
/*
 * Spans and counters: a leaf that every layer may write to. Writing allocates nothing, and takes a lock only while spans
 * are recorded.
 */
#ifndef TRACE_H
#define TRACE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

struct trace_counters {
	_Atomic uint64_t buffers, pins, threads;
	_Atomic uint64_t requested_bytes, backed_bytes, locked_bytes;
	_Atomic uint64_t steps, steps_skipped, drained_bytes, refilled_bytes;
	_Atomic uint64_t drain_ns, norm_ns, update_ns, refill_ns, overlap_ns, step_ns;
};

struct trace_span {
	const char *name;	/* a literal */
	const char *track;	/* a literal: which line of the timeline */
	uint64_t begin_ns, end_ns;
	uint64_t bytes;
	uint32_t subgroup;
};

struct trace {
	struct trace_counters counters;
	_Atomic uint32_t room;		/* spans that still fit; 0 when off. Changed with the lock alone */
	pthread_mutex_t lock;		/* guards what follows */
	struct trace_span *spans;	/* as many as there were asked for */
	uint32_t n;
};

uint64_t now_ns(void);			/* CLOCK_MONOTONIC */

void trace_span(struct trace *trace, const char *track, const char *name, uint32_t subgroup, uint64_t bytes,
		uint64_t begin_ns, uint64_t end_ns);
void trace_init(struct trace *trace);
int trace_start(struct trace *trace, uint32_t capacity);
int trace_save(struct trace *trace, const char *path);
void trace_stop(struct trace *trace);

static inline void count(_Atomic uint64_t *counter, uint64_t more)
{
	atomic_fetch_add_explicit(counter, more, memory_order_relaxed);
}

static inline void count_down(_Atomic uint64_t *counter, uint64_t less)
{
	atomic_fetch_sub_explicit(counter, less, memory_order_relaxed);
}

#endif
