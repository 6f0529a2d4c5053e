/* SPDX-License-Identifier: MIT */
/*
 * Device backend "host": device memory is ordinary memory, and the link is emulated. For tests, and for machines with
 * no accelerator. Whatever it prints says "emulated link".
 *
 * A stream is a thread with a queue of fixed length; putting work on a full queue waits. A copy is memcpy in pieces,
 * paced by its direction's token bucket: the link has a time up to which it is taken; a piece takes it for
 * bytes / bandwidth more, starting now, or a little before if the link was idle (the bucket's depth, which makes up
 * for a thread that was woken late). The latency is added at the end of a copy and doesn't take the link.
 *
 * Events: recording gives a ticket; the event is done when its stream has reached the last ticket.
 */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include "context.h"
#include "device.h"
#include "error.h"
#include "heap.h"
#include "threads.h"
#include "trace.h"

#define QUEUE 512			/* operations on one stream */
#define PIECE (256u << 10)		/* bytes copied between two looks at the bucket */
#define DEPTH_NS 1000000u		/* of the token bucket */
#define NAP_NS 100000u			/* being ahead of the link by less than this isn't worth a sleep */

struct link {
	pthread_mutex_t lock;
	uint64_t bytes_per_s;		/* 0: unlimited */
	uint64_t taken_until;		/* now_ns() time */
};

struct host {
	struct offstage_device base;
	uint32_t latency_ns;
	struct link links[2];		/* by enum direction */
};

/*
 * Guarded by its own lock, so that threads of several streams and waiters can meet on it. Each operation in a queue holds
 * a reference: a trainer's stream may come to it long after its owner has let go.
 */
struct event {
	_Atomic unsigned refs;
	pthread_mutex_t lock;
	pthread_cond_t reached;
	uint64_t recorded, done;	/* tickets */
	uint64_t done_ns;
	int error;
};

struct operation {
	enum { COPY, RECORD, WAIT, CALL } kind;
	enum direction direction;
	union {
		struct { void *to; const void *from; size_t bytes; };
		struct { struct event *event; uint64_t ticket; };
		struct { void (*fn)(void *arg); void *arg; };
	};
};

struct stream {
	struct offstage_stream base;
	pthread_t thread;
	pthread_mutex_t lock;		/* guards what follows */
	pthread_cond_t more, room;
	struct operation queue[QUEUE];
	uint64_t head, tail;		/* done and put, ever */
	bool stop;
	int error;			/* the thread's own: for the next event */
};

static _Atomic uint64_t fail_copy;

void host_fail_copy(uint64_t n)
{
	fail_copy = n;
}

static bool must_fail(void)
{
	uint64_t n = fail_copy;

	while (n)
		if (atomic_compare_exchange_weak(&fail_copy, &n, n - 1))
			return n == 1;
	return false;
}

static void sleep_until(uint64_t ns)
{
	struct timespec t = { .tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u) };

	while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR)
		;
}

/* Takes the link for so many bytes; returns when they will be through. */
static uint64_t link_take(struct link *link, size_t bytes, uint64_t depth_ns)
{
	uint64_t now = now_ns(), through;

	if (!link->bytes_per_s)
		return now;
	pthread_mutex_lock(&link->lock);
	if (link->taken_until + depth_ns < now)
		link->taken_until = now - depth_ns;
	link->taken_until += (uint64_t)((double)bytes * 1e9 / (double)link->bytes_per_s);
	through = link->taken_until;
	pthread_mutex_unlock(&link->lock);
	return through;
}

static int copy_now(struct host *host, const struct operation *op)
{
	struct link *link = &host->links[op->direction];
	uint64_t through = now_ns();

	if (must_fail())
		return -EIO;
	for (size_t at = 0; at < op->bytes; at += PIECE) {
		size_t n = op->bytes - at < PIECE ? op->bytes - at : PIECE;

		memcpy((char *)op->to + at, (const char *)op->from + at, n);
		through = link_take(link, n, DEPTH_NS + host->latency_ns);
		if (through > now_ns() + NAP_NS)
			sleep_until(through);
	}
	through += host->latency_ns;
	if (through > now_ns())
		sleep_until(through);
	return 0;
}

static void event_put(struct event *event)
{
	if (--event->refs == 0)
		heap_free(event);
}

/* Lets go of what an operation holds while it is in line. */
static void operation_put(const struct operation *op)
{
	if (op->kind == RECORD || op->kind == WAIT)
		event_put(op->event);
}

static void event_reach(struct event *event, uint64_t ticket, int error)
{
	pthread_mutex_lock(&event->lock);
	/* Two threads that record at once may put their tickets on the stream in the other order. */
	if (ticket > event->done)
		event->done = ticket;
	event->done_ns = now_ns();
	event->error = error;
	pthread_cond_broadcast(&event->reached);
	pthread_mutex_unlock(&event->lock);
}

static int event_await(struct event *event, uint64_t ticket)
{
	int error;

	pthread_mutex_lock(&event->lock);
	while (event->done < ticket)
		pthread_cond_wait(&event->reached, &event->lock);
	error = event->error;
	pthread_mutex_unlock(&event->lock);
	return error;
}

static void *stream_thread(void *arg)
{
	struct stream *stream = arg;
	struct host *host = (struct host *)stream->base.device;
	int error = 0;

	/* The default slack of 50 µs is more than a piece takes on a fast link. */
	prctl(PR_SET_TIMERSLACK, 1000ul, 0, 0, 0);
	pthread_mutex_lock(&stream->lock);
	for (;;) {
		struct operation op;

		while (stream->head == stream->tail && !stream->stop)
			pthread_cond_wait(&stream->more, &stream->lock);
		if (stream->head == stream->tail)
			break;
		op = stream->queue[stream->head % QUEUE];
		pthread_mutex_unlock(&stream->lock);

		switch (op.kind) {
		case COPY: {
			int ret = copy_now(host, &op);

			if (ret)
				error = ret;
			break;
		}
		case RECORD:
			event_reach(op.event, op.ticket, error);
			error = 0;
			break;
		case WAIT:
			event_await(op.event, op.ticket);
			break;
		case CALL:
			op.fn(op.arg);
			break;
		}

		/* In this order: a child of fork that finds an operation in the queue lets go of its event. */
		pthread_mutex_lock(&stream->lock);
		stream->head++;
		operation_put(&op);
		pthread_cond_broadcast(&stream->room);
	}
	pthread_mutex_unlock(&stream->lock);
	return NULL;
}

static int stream_put(struct offstage_stream *base, const struct operation *op)
{
	struct stream *stream = (struct stream *)base;

	pthread_mutex_lock(&stream->lock);
	while (stream->tail - stream->head == QUEUE)
		pthread_cond_wait(&stream->room, &stream->lock);
	stream->queue[stream->tail++ % QUEUE] = *op;
	pthread_cond_signal(&stream->more);
	pthread_mutex_unlock(&stream->lock);
	return 0;
}

static int host_stream_create(struct offstage_device *device, struct offstage_stream **out)
{
	struct stream *stream = heap_alloc(1, sizeof(*stream));
	int err;

	if (!stream)
		return -ENOMEM;
	stream->base.device = device;
	pthread_mutex_init(&stream->lock, NULL);
	pthread_cond_init(&stream->more, NULL);
	pthread_cond_init(&stream->room, NULL);
	err = thread_start(&stream->thread, "offstage-copy", stream_thread, stream);
	if (err) {
		heap_free(stream);
		return fail(-err, "a stream needs a copy thread, which couldn't be started (%s): raise RLIMIT_NPROC or the "
			    "cgroup's pids.max", strerror(err));
	}
	count(&device->ctx->trace.counters.threads, 1);
	*out = &stream->base;
	return 0;
}

static void host_stream_destroy(struct offstage_stream *base)
{
	struct stream *stream = (struct stream *)base;

	if (!context_forked(base->device->ctx)) {
		pthread_mutex_lock(&stream->lock);
		stream->stop = true;
		pthread_cond_signal(&stream->more);
		pthread_mutex_unlock(&stream->lock);
		pthread_join(stream->thread, NULL);
	}
	/* Nothing is left in line, but in a child of fork, which has no thread that would have done it. */
	for (; stream->head != stream->tail; stream->head++)
		operation_put(&stream->queue[stream->head % QUEUE]);
	heap_free(stream);
}

static int host_copy(struct offstage_stream *stream, enum direction direction, void *to, const void *from, size_t bytes)
{
	return stream_put(stream, &(struct operation){ .kind = COPY, .direction = direction, .to = to, .from = from,
						       .bytes = bytes });
}

static int host_stream_call(struct offstage_stream *stream, void (*fn)(void *arg), void *arg)
{
	return stream_put(stream, &(struct operation){ .kind = CALL, .fn = fn, .arg = arg });
}

static int host_stream_wait(struct offstage_stream *stream, struct event *event)
{
	uint64_t ticket;

	pthread_mutex_lock(&event->lock);
	ticket = event->recorded;
	pthread_mutex_unlock(&event->lock);
	event->refs++;
	return stream_put(stream, &(struct operation){ .kind = WAIT, .event = event, .ticket = ticket });
}

static int host_event_create(struct offstage_device *device, struct event **out)
{
	struct event *event = heap_alloc(1, sizeof(*event));

	(void)device;
	if (!event)
		return -ENOMEM;
	event->refs = 1;
	pthread_mutex_init(&event->lock, NULL);
	pthread_cond_init(&event->reached, NULL);
	*out = event;
	return 0;
}

static void host_event_destroy(struct event *event)
{
	event_put(event);
}

static int host_event_record(struct event *event, struct offstage_stream *stream)
{
	uint64_t ticket;

	pthread_mutex_lock(&event->lock);
	ticket = ++event->recorded;
	pthread_mutex_unlock(&event->lock);
	event->refs++;
	return stream_put(stream, &(struct operation){ .kind = RECORD, .event = event, .ticket = ticket });
}

static int host_event_wait(struct event *event)
{
	uint64_t ticket;
	int ret;

	pthread_mutex_lock(&event->lock);
	ticket = event->recorded;
	pthread_mutex_unlock(&event->lock);
	ret = event_await(event, ticket);
	return ret ? fail(ret, "a copy over the emulated link failed (%s): the bytes didn't arrive; send them again",
			  strerror(-ret)) : 0;
}

static int host_event_done(struct event *event)
{
	int done;

	pthread_mutex_lock(&event->lock);
	done = event->done < event->recorded ? 0 : event->error ? event->error : 1;
	pthread_mutex_unlock(&event->lock);
	return done;
}

static uint64_t host_event_ns(struct event *event)
{
	uint64_t ns;

	pthread_mutex_lock(&event->lock);
	ns = event->done_ns;
	pthread_mutex_unlock(&event->lock);
	return ns;
}

static void describe(char *text, size_t size, uint64_t bytes_per_s)
{
	if (bytes_per_s)
		snprintf(text, size, "%.3g GB/s", (double)bytes_per_s / 1e9);
	else
		snprintf(text, size, "unlimited");
}

static int host_open(struct offstage *ctx, const struct offstage_device_options *options, struct offstage_device **out)
{
	struct host *host = heap_alloc(1, sizeof(*host));
	char d2h[24], h2d[24];

	(void)ctx;
	if (!host)
		return -ENOMEM;
	host->latency_ns = options->latency_ns;
	host->links[D2H].bytes_per_s = options->d2h_bytes_per_s;
	host->links[H2D].bytes_per_s = options->h2d_bytes_per_s;
	pthread_mutex_init(&host->links[D2H].lock, NULL);
	pthread_mutex_init(&host->links[H2D].lock, NULL);
	describe(d2h, sizeof(d2h), options->d2h_bytes_per_s);
	describe(h2d, sizeof(h2d), options->h2d_bytes_per_s);
	snprintf(host->base.name, sizeof(host->base.name), "host (emulated link: D2H %s, H2D %s, %g us)", d2h, h2d,
		 options->latency_ns / 1e3);
	*out = &host->base;
	return 0;
}

static void host_close(struct offstage_device *device)
{
	heap_free(device);
}

const struct device_ops host_ops = {
	.name = "host",
	.open = host_open,
	.close = host_close,
	.stream_create = host_stream_create,
	.stream_destroy = host_stream_destroy,
	.stream_call = host_stream_call,
	.stream_wait = host_stream_wait,
	.copy = host_copy,
	.event_create = host_event_create,
	.event_destroy = host_event_destroy,
	.event_record = host_event_record,
	.event_wait = host_event_wait,
	.event_done = host_event_done,
	.event_ns = host_event_ns,
};
