/* SPDX-License-Identifier: MIT */
/*
 * Devices: streams of copies and events. A backend is a table of operations in a file of its own (host.c; CUDA's will
 * be cuda.c) and one line in device.c. Called by the step engine and by the public stream functions.
 *
 * Order: what is put on one stream is done in order; an event is done when all that was on its stream when it was
 * recorded is done. The error of a failed copy is handed to the next event recorded on that stream, and is over then.
 * Steady state allocates nothing (law 1): a stream and an event are made once and used again.
 */
#ifndef DEVICE_H
#define DEVICE_H

#include <offstage.h>
#include <stdbool.h>

enum direction { D2H, H2D };

struct event;		/* a backend's own */

/* The parts that every backend's device and stream begin with. The backend sets name and stream.device. */
struct offstage_device {
	const struct device_ops *ops;
	struct offstage *ctx;
	_Atomic unsigned users;		/* streams and optimizers */
	bool closed;			/* by a child of fork, before they were */
	char name[112];
};

struct offstage_stream {
	struct offstage_device *device;
	struct event *waited;		/* by offstage_stream_wait(); NULL on an optimizer's own streams */
};

struct device_ops {
	const char *name;
	int (*open)(struct offstage *ctx, const struct offstage_device_options *options, struct offstage_device **device);
	void (*close)(struct offstage_device *device);

	int (*stream_create)(struct offstage_device *device, struct offstage_stream **stream);
	void (*stream_destroy)(struct offstage_stream *stream);	/* waits for what is on it */
	int (*stream_call)(struct offstage_stream *stream, void (*fn)(void *arg), void *arg);
	/* Work put on the stream from now on waits for the event as it was last recorded. */
	int (*stream_wait)(struct offstage_stream *stream, struct event *event);

	int (*copy)(struct offstage_stream *stream, enum direction direction, void *to, const void *from, size_t bytes);

	int (*event_create)(struct offstage_device *device, struct event **event);
	void (*event_destroy)(struct event *event);	/* streams that still have it in line aren't disturbed */
	int (*event_record)(struct event *event, struct offstage_stream *stream);
	int (*event_wait)(struct event *event);		/* the calling thread blocks; 0 or the stream's error */
	int (*event_done)(struct event *event);		/* 1, 0, or the stream's error */
	/* When the event was done, in now_ns() time. */
	uint64_t (*event_ns)(struct event *event);
};

/* A stream or an optimizer is through with the device. */
void device_put(struct offstage_device *device);

extern const struct device_ops host_ops;

/* For tests: the nth copy from now on, of any host device, fails with -EIO and moves nothing. 0: none does. */
void host_fail_copy(uint64_t n);

#endif
