/* SPDX-License-Identifier: MIT */
/*
 * The public side of devices and streams: picks a backend, keeps the count of users, and refuses what a forked child
 * asks. A new backend is one line in `backends`. See device.h.
 */
#include <string.h>
#include "context.h"
#include "device.h"
#include "error.h"

static const struct device_ops *const backends[] = { &host_ops };

int offstage_device_open(struct offstage *ctx, const struct offstage_device_options *options,
			 struct offstage_device **out)
{
	struct offstage_device_options o;
	struct offstage_device *device;
	int ret = context_check(ctx);

	if (ret)
		return ret;
	if (!out)
		return fail(-EINVAL, "there is no place for the device: pass a pointer to a struct offstage_device *");
	*out = NULL;
	ret = struct_in(&o, sizeof(o), options, "offstage_device_options");
	if (ret)
		return ret;
	for (size_t i = 0; i < sizeof(backends) / sizeof(*backends); i++) {
		if (o.backend && strcmp(o.backend, backends[i]->name) != 0)
			continue;
		ret = backends[i]->open(ctx, &o, &device);
		if (ret)
			return ret;
		device->ops = backends[i];
		device->ctx = context_get(ctx);
		*out = device;
		return 0;
	}
	return fail(-ENOENT, "there is no device backend '%s' in this build: use 'host'", o.backend);
}

static void free_device(struct offstage_device *device)
{
	struct offstage *ctx = device->ctx;

	device->ops->close(device);
	context_put(ctx);
}

void device_put(struct offstage_device *device)
{
	if (--device->users == 0 && device->closed)
		free_device(device);
}

int offstage_device_close(struct offstage_device *device)
{
	if (!device)
		return 0;
	if (device->users && !context_forked(device->ctx))
		return fail(-EBUSY, "the device has %u streams and optimizers in use: close them first", device->users);
	/* A forked child closes what it inherited in any order, and never fails: the last one to go frees. */
	if (device->users)
		device->closed = true;
	else
		free_device(device);
	return 0;
}

const char *offstage_device_name(struct offstage_device *device)
{
	return device ? device->name : "";
}

int offstage_stream_create(struct offstage_device *device, struct offstage_stream **out)
{
	int ret;

	if (!device || !out)
		return fail(-EINVAL, "a stream needs a device and a place to put its handle; one of them is NULL");
	*out = NULL;
	ret = context_check(device->ctx);
	if (!ret)
		ret = device->ops->stream_create(device, out);
	if (ret)
		return ret;
	/* Now, so that waiting allocates nothing (law 1). */
	ret = device->ops->event_create(device, &(*out)->waited);
	if (ret) {
		device->ops->stream_destroy(*out);
		*out = NULL;
		return ret;
	}
	device->users++;
	return 0;
}

void offstage_stream_close(struct offstage_stream *stream)
{
	struct offstage_device *device;

	if (!stream)
		return;
	device = stream->device;
	device->ops->event_destroy(stream->waited);
	device->ops->stream_destroy(stream);
	device_put(device);
}

int offstage_stream_wait(struct offstage_stream *stream)
{
	const struct device_ops *ops;
	int ret;

	if (!stream)
		return fail(-EINVAL, "the stream to wait for is NULL");
	ret = context_check(stream->device->ctx);
	if (ret)
		return ret;
	ops = stream->device->ops;
	ret = ops->event_record(stream->waited, stream);
	return ret ? ret : ops->event_wait(stream->waited);
}

int offstage_stream_call(struct offstage_stream *stream, void (*fn)(void *arg), void *arg)
{
	int ret;

	if (!stream || !fn)
		return fail(-EINVAL, "a call needs a stream and a function; one of them is NULL");
	ret = context_check(stream->device->ctx);
	return ret ? ret : stream->device->ops->stream_call(stream, fn, arg);
}
