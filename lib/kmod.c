/* SPDX-License-Identifier: MIT */
/*
 * Provider `kmod`: staging memory from /dev/offstage. See staging.h for what a provider owes, and
 * uapi/linux/offstage.h for the calls.
 *
 * The module's memory is there, cleared, placed and pinned when a buffer is made: nothing is locked here, RLIMIT_MEMLOCK
 * isn't asked, and the limits that hold are the module's own. Empty buffers, and files that another provider made, are
 * the provider `user`'s business.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>
#include "../include/uapi/linux/offstage.h"
#include "context.h"
#include "error.h"
#include "staging.h"
#include "topology.h"

#define DEVICE "/dev/offstage"
#define HUGE_SIZE ((uint64_t)2 << 20)

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

/* One open file for the process, kept for its life: it is what the module's limit per file counts. */
static _Atomic int device = -1;

static int device_fd(void)
{
	struct offstage_ioc_info info = { .size = sizeof(info) };
	int none = -1, fd = device;

	if (fd >= 0)
		return fd;
	fd = open(DEVICE, O_RDWR | O_CLOEXEC);
	if (fd < 0 && errno == ENOENT)
		return fail(-ENOENT, "there is no " DEVICE ": load the module with `modprobe offstage`, or use the provider 'user'");
	if (fd < 0)
		return fail(-errno, DEVICE " can't be opened (%s): its group must be one of yours, or use the provider 'user'",
			    strerror(errno));
	if (ioctl(fd, OFFSTAGE_IOC_INFO, &info) < 0 || info.abi != OFFSTAGE_ABI) {
		close(fd);
		return fail(-EPROTO, DEVICE " speaks ABI %u and this library %u: load the module of this version", info.abi,
			    OFFSTAGE_ABI);
	}
	if (!atomic_compare_exchange_strong(&device, &none, fd)) {
		close(fd);
		fd = none;
	}
	return fd;
}

static int kmod_probe(void)
{
	int fd = device_fd();

	return fd < 0 ? fd : 0;
}

static bool ours(const struct offstage_buffer *buffer)
{
	return strcmp(buffer->info.memory, "kmod") == 0;
}

static int kmod_plan(struct staging_request *request)
{
	uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);

	if (!request->bytes)
		return user_ops.plan(request);
	if (request->huge == OFFSTAGE_REQUIRE && request->bytes < HUGE_SIZE)
		return fail(-ENOSR, "huge pages were required for %s, which is less than one of %s: ask for more, or for huge=prefer",
			    BYTES(request->bytes), BYTES(HUGE_SIZE));
	request->memory = "kmod";
	request->page_size = (uint32_t)page;
	request->backed = request->missing = (request->bytes + page - 1) / page * page;
	request->pooled = true;
	/* Which bytes go where is the module's to decide; the check asks it for bytes per node. */
	request->extents[0] = (struct placement_extent){ request->backed, PLACEMENT_INTERLEAVED };
	request->n_extents = 1;
	return 0;
}

static int refused(const struct staging_request *request, const struct offstage_ioc_create *create, int err)
{
	static const char *const limits[] = {
		[OFFSTAGE_IOC_LIMIT_NONE] = "a limit", [OFFSTAGE_IOC_LIMIT_FILE] = "limit_file",
		[OFFSTAGE_IOC_LIMIT_USER] = "limit_user", [OFFSTAGE_IOC_LIMIT_NODE] = "limit_node",
		[OFFSTAGE_IOC_LIMIT_ALL] = "limit_all",
	};
	struct offstage_ioc_info info = { .size = sizeof(info) };
	uint64_t limit = 0, used = 0;

	switch (err) {
	case EDQUOT:
		ioctl(device, OFFSTAGE_IOC_INFO, &info);
		if (create->limit == OFFSTAGE_IOC_LIMIT_FILE)
			limit = info.limit_file, used = info.used_file;
		else if (create->limit == OFFSTAGE_IOC_LIMIT_USER)
			limit = info.limit_user, used = info.used_user;
		else if (create->limit == OFFSTAGE_IOC_LIMIT_ALL)
			limit = info.limit_all, used = info.used_all;
		if (create->limit == OFFSTAGE_IOC_LIMIT_NODE || create->limit > OFFSTAGE_IOC_LIMIT_ALL)
			return fail(-EDQUOT, "a buffer of %s is more than limit_node allows outside the pools: reserve more on the node, or "
				    "raise /sys/module/offstage/parameters/limit_node", BYTES(request->backed));
		if (create->limit == OFFSTAGE_IOC_LIMIT_ALL && used + request->backed <= limit)
			return fail(-EDQUOT, "a buffer of %s is more than limit_all leaves beside the pools, which count in it: let them "
				    "serve huge pages, shrink one, or raise /sys/module/offstage/parameters/limit_all",
				    BYTES(request->backed));
		return fail(-EDQUOT, "a buffer of %s is more than %s leaves, which is %s with %s in use: close buffers, or raise "
			    "/sys/module/offstage/parameters/%s", BYTES(request->backed), limits[create->limit], BYTES(limit),
			    BYTES(used), limits[create->limit]);
	case ENOMEM:
		return fail(-ENOMEM, "the nodes have no room for a buffer of %s: free memory, reserve it earlier "
			    "(modprobe offstage reserve=…), ask for less, or name more nodes", BYTES(request->backed));
	case ENOSR:
		return fail(-ENOSR, "huge pages were required for %s and the nodes haven't as many free: reserve them when the module is "
			    "loaded, or ask for huge=prefer", BYTES(request->backed));
	default:
		return fail(-err, DEVICE " made no buffer of %s (%s)", BYTES(request->backed), strerror(err));
	}
}

/* Maps the file whole, ready to use: page tables are filled now, so that using it never faults. */
static int map(struct offstage_buffer *buffer, const struct staging_request *request)
{
	int err;

	buffer->data = mmap(NULL, request->backed, PROT_READ | PROT_WRITE, MAP_SHARED, buffer->fd, 0);
	if (buffer->data == MAP_FAILED) {
		buffer->data = NULL;
		return fail(-errno, "a buffer of %s couldn't be mapped (%s): the process may have too many mappings, or RLIMIT_AS is too "
			    "low", BYTES(request->backed), strerror(errno));
	}
	buffer->mapped = request->backed;
	if (request->flags & OFFSTAGE_BUFFER_DONTFORK && madvise(buffer->data, buffer->mapped, MADV_DONTFORK) < 0)
		return fail(-errno, "the kernel refuses MADV_DONTFORK (%s)", strerror(errno));
	while (madvise(buffer->data, buffer->mapped, MADV_POPULATE_WRITE) < 0) {
		err = errno;
		if (err != EINTR && err != EAGAIN)
			return fail(-err, "a buffer of %s couldn't be mapped whole (%s): page tables need memory, too",
				    BYTES(request->backed), strerror(err));
	}
	return 0;
}

static int describe(struct offstage_buffer *buffer)
{
	struct offstage_ioc_buffer info = { .size = sizeof(info) };

	if (ioctl(buffer->fd, OFFSTAGE_IOC_BUFFER, &info) < 0)
		return fail(-errno, "the module doesn't say what the buffer is (%s)", strerror(errno));
	buffer->info.huge = info.huge;
	buffer->info.locked = info.backed;
	if (info.huge > info.backed / 2)
		buffer->info.page_size = HUGE_SIZE;
	buffer->info.why[0] = '\0';
	if (info.huge / HUGE_SIZE < info.backed / HUGE_SIZE)
		snprintf(buffer->info.why, sizeof(buffer->info.why), "%s in base pages: the nodes had no more free huge pages",
			 BYTES(info.backed - info.huge));
	return 0;
}

static int kmod_create(struct offstage_buffer *buffer, const struct staging_request *request)
{
	const struct placement *placement = &request->placement;
	struct offstage_ioc_create create = {
		.size = sizeof(create),
		.flags = OFFSTAGE_IOC_CREATE_CLOEXEC,
		.bytes = request->bytes,
		.placement = placement->kind,		/* the same numbers */
		.huge = request->huge - OFFSTAGE_PREFER,
		.n_nodes = placement->n,
		.nodes = (uintptr_t)placement->nodes,
		.weights = placement->kind == OFFSTAGE_WEIGHTED ? (uintptr_t)placement->weights : 0,
	};
	int fd = device_fd(), ret;

	_Static_assert((int)OFFSTAGE_BIND == OFFSTAGE_IOC_BIND && (int)OFFSTAGE_SPILL == OFFSTAGE_IOC_SPILL, "placements");
	_Static_assert(OFFSTAGE_REQUIRE - OFFSTAGE_PREFER == OFFSTAGE_IOC_HUGE_REQUIRE &&
		       OFFSTAGE_NEVER - OFFSTAGE_PREFER == OFFSTAGE_IOC_HUGE_NEVER, "huge pages");
	if (!request->backed)
		return user_ops.create(buffer, request);
	if (fd < 0)
		return fd;
	if (ioctl(fd, OFFSTAGE_IOC_CREATE, &create) < 0)
		return refused(request, &create, errno);
	buffer->fd = create.fd;
	ret = map(buffer, request);
	if (!ret)
		ret = describe(buffer);
	if (ret)
		user_ops.destroy(buffer);
	return ret;
}

static int kmod_inspect(int fd, struct staging_request *request)
{
	struct offstage_ioc_buffer info = { .size = sizeof(info) };

	if (ioctl(fd, OFFSTAGE_IOC_BUFFER, &info) < 0)
		return user_ops.inspect(fd, request);
	request->bytes = info.requested;
	request->backed = info.backed;
	request->missing = 0;
	request->memory = "kmod";
	request->page_size = (uint32_t)sysconf(_SC_PAGESIZE);
	request->pooled = true;
	return 0;
}

static int kmod_import(struct offstage_buffer *buffer, int fd, const struct staging_request *request)
{
	int ret;

	if (!ours(buffer))
		return user_ops.import(buffer, fd, request);
	buffer->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
	if (buffer->fd < 0)
		return fail(-errno, "a buffer needs a file descriptor and this process has no more (%s): raise RLIMIT_NOFILE with "
			    "`ulimit -n`, or close some", strerror(errno));
	ret = map(buffer, request);
	if (!ret)
		ret = describe(buffer);
	if (ret)
		user_ops.destroy(buffer);
	return ret;
}

static int kmod_nodes(struct offstage_buffer *buffer, const struct placement_extent *extents, int n_extents, uint64_t *bytes,
		      uint32_t n, uint64_t *elsewhere)
{
	uint64_t there[TOPOLOGY_NODES_MAX] = { 0 };
	struct offstage_ioc_buffer info = { .size = sizeof(info), .n_nodes = TOPOLOGY_NODES_MAX, .node_bytes = (uintptr_t)there };

	if (!ours(buffer))
		return user_ops.nodes(buffer, extents, n_extents, bytes, n, elsewhere);
	if (ioctl(buffer->fd, OFFSTAGE_IOC_BUFFER, &info) < 0)
		return fail(-errno, "the module doesn't say where the buffer is (%s)", strerror(errno));
	for (uint32_t i = 0; i < n && i < TOPOLOGY_NODES_MAX; i++)
		bytes[i] += there[i];
	return 0;
}

static void kmod_destroy(struct offstage_buffer *buffer)
{
	user_ops.destroy(buffer);
}

const struct staging_ops kmod_ops = {
	.name = "kmod",
	.probe = kmod_probe,
	.plan = kmod_plan,
	.create = kmod_create,
	.inspect = kmod_inspect,
	.import = kmod_import,
	.nodes = kmod_nodes,
	.destroy = kmod_destroy,
};
