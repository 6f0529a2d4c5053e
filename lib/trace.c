/* SPDX-License-Identifier: MIT */
/*
 * Spans in a ring of fixed size, saved in the Chrome trace format (an array of complete events, times in µs). A writer
 * claims a place with one atomic add; past the end spans are dropped, so the first ones are kept.
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
	uint32_t at;

	/* Full or off is the common case and costs one load: n stays where it is. */
	if (atomic_load_explicit(&trace->n, memory_order_relaxed) >= trace->capacity)
		return;
	at = atomic_fetch_add(&trace->n, 1);
	if (at < trace->capacity)
		trace->spans[at] = (struct trace_span){ name, track, begin_ns, end_ns, bytes, subgroup };
}

void trace_stop(struct trace *trace)
{
	trace->capacity = 0;
	trace->n = 0;
	heap_free(trace->spans);
	trace->spans = NULL;
}

int trace_start(struct trace *trace, uint32_t capacity)
{
	struct trace_span *spans = NULL;

	if (capacity) {
		spans = heap_alloc(capacity, sizeof(*spans));
		if (!spans)
			return -ENOMEM;
		/* Touched now, so that recording doesn't fault. */
		memset(spans, 1, capacity * sizeof(*spans));
	}
	trace_stop(trace);
	trace->spans = spans;
	trace->capacity = capacity;
	return 0;
}

int trace_save(struct trace *trace, const char *path)
{
	static const char *const tracks[] = { "drain", "norm", "update", "refill" };
	uint32_t n = trace->n < trace->capacity ? trace->n : trace->capacity;
	uint64_t zero = n ? UINT64_MAX : 0;
	FILE *file = fopen(path, "we");
	int err = 0;

	if (!file)
		return fail(-errno, "the trace can't be written to %s: %s", path, strerror(errno));
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
