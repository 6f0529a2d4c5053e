/* SPDX-License-Identifier: MIT */
/*
 * Spans in an array of fixed size, saved in the Chrome trace format (an array of complete events, times in µs). Past the
 * end spans are dropped, so the first ones are kept.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include "error.h"
#include "heap.h"
#include "trace.h"

uint64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

void trace_span(struct trace *trace, const char *track, const char *name, uint32_t subgroup, uint64_t bytes,
		uint64_t begin_ns, uint64_t end_ns)
{
	/* Full or off is the common case and costs one load. */
	if (!atomic_load_explicit(&trace->room, memory_order_relaxed))
		return;
	pthread_mutex_lock(&trace->lock);
	if (trace->room) {
		trace->spans[trace->n++] = (struct trace_span){ name, track, begin_ns, end_ns, bytes, subgroup };
		trace->room--;
	}
	pthread_mutex_unlock(&trace->lock);
}

void trace_init(struct trace *trace)
{
	pthread_mutex_init(&trace->lock, NULL);
}

void trace_stop(struct trace *trace)
{
	heap_free(trace->spans);
	trace->spans = NULL;
}

int trace_start(struct trace *trace, uint32_t capacity)
{
	struct trace_span *spans = NULL, *before;

	if (capacity) {
		spans = heap_alloc(capacity, sizeof(*spans));
		if (!spans)
			return -ENOMEM;
		/* Touched now, so that recording doesn't fault. */
		memset(spans, 1, capacity * sizeof(*spans));
	}
	/* Other threads may be recording. */
	pthread_mutex_lock(&trace->lock);
	before = trace->spans;
	trace->spans = spans;
	trace->room = capacity;
	trace->n = 0;
	pthread_mutex_unlock(&trace->lock);
	heap_free(before);
	return 0;
}

int trace_save(struct trace *trace, const char *path)
{
	static const char *const tracks[] = { "drain", "norm", "update", "refill" };
	FILE *file = fopen(path, "we");
	uint64_t zero;
	uint32_t n;
	int err = 0;

	if (!file)
		return fail(-errno, "the trace can't be written to %s: %s", path, strerror(errno));
	pthread_mutex_lock(&trace->lock);
	n = trace->n;
	zero = n ? UINT64_MAX : 0;
	for (uint32_t i = 0; i < n; i++)
		if (trace->spans[i].begin_ns < zero)
			zero = trace->spans[i].begin_ns;
	fputs("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n", file);
	for (unsigned k = 0; k < sizeof(tracks) / sizeof(*tracks); k++)
		fprintf(file, "{\"ph\":\"M\",\"pid\":1,\"tid\":%u,\"name\":\"thread_name\",\"args\":{\"name\":\"%s\"}}%s\n",
			k, tracks[k], k + 1 < sizeof(tracks) / sizeof(*tracks) || n ? "," : "");
	for (uint32_t i = 0; i < n; i++) {
		const struct trace_span *span = &trace->spans[i];
		unsigned k = 0;

		while (k + 1 < sizeof(tracks) / sizeof(*tracks) && strcmp(tracks[k], span->track) != 0)
			k++;
		fprintf(file, "{\"ph\":\"X\",\"pid\":1,\"tid\":%u,\"name\":\"%s\",\"ts\":%.3f,\"dur\":%.3f,"
			"\"args\":{\"subgroup\":%" PRIu32 ",\"bytes\":%" PRIu64 "}}%s\n", k, span->name,
			(double)(span->begin_ns - zero) / 1e3, (double)(span->end_ns - span->begin_ns) / 1e3,
			span->subgroup, span->bytes, i + 1 < n ? "," : "");
	}
	pthread_mutex_unlock(&trace->lock);
	fputs("]}\n", file);
	if (ferror(file))
		err = EIO;
	if (fclose(file) != 0 && !err)
		err = errno;
	if (err) {
		remove(path);
		return fail(-err, "the trace couldn't be written whole to %s (%s), and was removed", path, strerror(err));
	}
	return 0;
}
