/* SPDX-License-Identifier: MIT */
/*
 * The context: opening and closing, info and statistics, and the rules that hold for every public struct. See
 * context.h.
 */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>
#include "adam.h"
#include "context.h"
#include "error.h"
#include "heap.h"
#include "staging.h"
#include "threads.h"
#include "topology.h"

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
#define VERSION TEXT(OFFSTAGE_VERSION_MAJOR) "." TEXT(OFFSTAGE_VERSION_MINOR) "." TEXT(OFFSTAGE_VERSION_PATCH)

/* How many forks lie between the process that loaded the library and this one. */
static _Atomic unsigned forks;

static void forked(void)
{
	forks++;
}

static void watch_forks(void)
{
	pthread_atfork(NULL, NULL, forked);
}

const char *offstage_version(void)
{
	return VERSION;
}

int struct_in(void *out, size_t size, const void *in, const char *what)
{
	const unsigned char *bytes = in;
	uint32_t given;

	memset(out, 0, size);
	if (!in)
		return 0;
	memcpy(&given, in, sizeof(given));
	if (given < sizeof(given))
		return fail(-EINVAL, "struct %s has size %u: set its field size to sizeof(struct %s)", what, given, what);
	for (size_t i = size; i < given; i++)
		if (bytes[i])
			return fail(-E2BIG, "struct %s of %u bytes uses fields that version " VERSION " of the library (%zu "
				    "bytes) doesn't know: use a newer library", what, given, size);
	memcpy(out, in, given < size ? given : size);
	return 0;
}

int struct_out(void *out, const void *in, size_t size, const char *what)
{
	uint32_t given;

	if (!out)
		return fail(-EINVAL, "there is no struct %s to fill: pass one", what);
	memcpy(&given, out, sizeof(given));
	if (given < sizeof(given))
		return fail(-EINVAL, "struct %s has size %u: set its field size to sizeof(struct %s)", what, given, what);
	if (given > size)
		given = (uint32_t)size;
	memcpy(out, in, given);
	memcpy(out, &given, sizeof(given));
	return 0;
}

struct offstage *context_get(struct offstage *ctx)
{
	ctx->refs++;
	return ctx;
}

void context_put(struct offstage *ctx)
{
	if (--ctx->refs)
		return;
	threads_destroy(ctx->threads, context_forked(ctx));
	trace_stop(&ctx->trace);
	heap_free(ctx);
}

bool context_forked(const struct offstage *ctx)
{
	return ctx->forks != forks;
}

int context_check(const struct offstage *ctx)
{
	if (!ctx)
		return fail(-EINVAL, "the handle is NULL: open a context first and check what it returns");
	if (context_forked(ctx))
		return fail(-ECHILD, "this handle was made before fork() and its threads are in the parent: the child can "
			    "only close it, and opens a context of its own");
	return 0;
}

int offstage_open(const struct offstage_options *options, struct offstage **out)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;
	struct offstage_options o;
	struct offstage *ctx;
	int ret;

	if (!out)
		return fail(-EINVAL, "there is no place for the context: pass a pointer to a struct offstage *");
	*out = NULL;
	ret = struct_in(&o, sizeof(o), options, "offstage_options");
	if (ret)
		return ret;
	if (o.lock > OFFSTAGE_NEVER || o.reserved)
		return fail(-EINVAL, "offstage_options.lock is %u and reserved is %u: lock is an enum offstage_want, reserved "
			    "is 0", o.lock, o.reserved);
	pthread_once(&once, watch_forks);

	ctx = heap_alloc(1, sizeof(*ctx));
	if (!ctx)
		return -ENOMEM;
	ctx->refs = 1;
	trace_init(&ctx->trace);
	ctx->forks = forks;
	ctx->budget = o.budget;
	ctx->lock = o.lock ? o.lock : OFFSTAGE_REQUIRE;
	ret = staging_pick(o.provider, &ctx->staging);
	if (!ret)
		ret = adam_pick(o.isa, &ctx->adam);
	if (!ret)
		ret = threads_create(o.threads, &ctx->trace, &ctx->threads, ctx->threads_why, sizeof(ctx->threads_why));
	if (ret) {
		heap_free(ctx);
		return ret;
	}
	*out = ctx;
	return 0;
}

void offstage_close(struct offstage *ctx)
{
	if (ctx)
		context_put(ctx);
}

int offstage_info(struct offstage *ctx, struct offstage_info *out)
{
	struct offstage_info info = { 0 };
	size_t n = 0;
	int ret = context_check(ctx);

	if (ret)
		return ret;
	info.threads = threads_count(ctx->threads);
	snprintf(info.version, sizeof(info.version), "%s", VERSION);
	snprintf(info.provider, sizeof(info.provider), "%s", ctx->staging->name);
	snprintf(info.isa, sizeof(info.isa), "%s", ctx->adam->name);
	for (unsigned i = 0; adam_all[i]; i++)
		if (adam_all[i]->usable() && n < sizeof(info.isas))
			n += (size_t)snprintf(info.isas + n, sizeof(info.isas) - n, "%s%s", n ? " " : "", adam_all[i]->name);
	memcpy(info.threads_why, ctx->threads_why, sizeof(info.threads_why));
	info.budget = ctx->budget;
	info.page_size = (uint32_t)sysconf(_SC_PAGESIZE);
	info.huge_page_size = topology_huge_page_size();
	info.hugetlb_free = topology_hugetlb_free();
	info.memlock_limit = topology_memlock_limit();
	info.memory_available = topology_memory_available(info.memory_limit, sizeof(info.memory_limit));
	topology_thp(info.thp, sizeof(info.thp), false);
	topology_thp(info.thp_shmem, sizeof(info.thp_shmem), true);
	return struct_out(out, &info, sizeof(info), "offstage_info");
}

int offstage_stats(struct offstage *ctx, struct offstage_stats *out)
{
	struct trace_counters *c;
	struct offstage_stats stats;
	struct rusage usage;
	int ret = context_check(ctx);

	if (ret)
		return ret;
	c = &ctx->trace.counters;
	getrusage(RUSAGE_SELF, &usage);
	stats = (struct offstage_stats){
		.allocations = heap_allocations(),
		.buffers = c->buffers,
		.pins = c->pins,
		.threads = c->threads,
		.minor_faults = (uint64_t)usage.ru_minflt,
		.major_faults = (uint64_t)usage.ru_majflt,
		.requested_bytes = c->requested_bytes,
		.backed_bytes = c->backed_bytes,
		.locked_bytes = c->locked_bytes,
		.steps = c->steps,
		.steps_skipped = c->steps_skipped,
		.drained_bytes = c->drained_bytes,
		.refilled_bytes = c->refilled_bytes,
		.drain_ns = c->drain_ns,
		.norm_ns = c->norm_ns,
		.update_ns = c->update_ns,
		.refill_ns = c->refill_ns,
		.overlap_ns = c->overlap_ns,
		.step_ns = c->step_ns,
	};
	return struct_out(out, &stats, sizeof(stats), "offstage_stats");
}

int offstage_trace_start(struct offstage *ctx, uint32_t capacity)
{
	int ret = context_check(ctx);

	return ret ? ret : trace_start(&ctx->trace, capacity);
}

int offstage_trace_save(struct offstage *ctx, const char *path)
{
	int ret = context_check(ctx);

	if (!ret && !path)
		ret = fail(-EINVAL, "the trace needs a path to be written to");
	return ret ? ret : trace_save(&ctx->trace, path);
}

int offstage_feature(uint32_t index, struct offstage_feature *out)
{
	static const struct { const char *name; int on; const char *why; } features[] = {
		{ "numa-placement", HAVE_LIBNUMA, LIBNUMA_WHY },
		{ "module", 1, "" },	/* of the machine, asked below */
		{ "cuda", 0, "this version has no backend for CUDA devices" },
		{ "nvme-tier", 0, "this version has no tier on files" },
	};
	struct offstage_feature feature = { 0 };

	if (index >= sizeof(features) / sizeof(*features))
		return fail(-ENOENT, "there are %zu features, numbered from 0", sizeof(features) / sizeof(*features));
	feature.on = (uint32_t)features[index].on;
	snprintf(feature.name, sizeof(feature.name), "%s", features[index].name);
	snprintf(feature.why, sizeof(feature.why), "%s", features[index].why);
	if (strcmp(feature.name, "module") == 0 && kmod_ops.probe() != 0) {
		feature.on = 0;
		snprintf(feature.why, sizeof(feature.why), "%s", offstage_error());
	}
	return struct_out(out, &feature, sizeof(feature), "offstage_feature");
}
