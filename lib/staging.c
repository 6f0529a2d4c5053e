/* SPDX-License-Identifier: MIT */
/*
 * Buffers: options, limits, accounts and the check of placement; the memory itself is a provider's. See staging.h.
 *
 * Accounts: a buffer's backed bytes are added to the context's counter before anything is made, by compare-and-swap
 * against the budget, so that two threads can't both take the last of it; every failure after that takes them back.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "context.h"
#include "error.h"
#include "heap.h"
#include "staging.h"
#include "topology.h"

#define HUGE_PAGE ((uint64_t)2 << 20)
#define BYTES_MAX ((uint64_t)1 << 56)	/* beyond any address space; sums of such numbers don't overflow */

/* Best first. */
static const struct staging_ops *const providers[] = { &kmod_ops, &user_ops };
#define N_PROVIDERS (sizeof(providers) / sizeof(*providers))

int staging_pick(const char *name, const struct staging_ops **ops)
{
	int ret = -ENOENT;

	if (!name)
		name = getenv("OFFSTAGE_PROVIDER");
	if (name && !*name)
		name = NULL;
	for (size_t i = 0; i < N_PROVIDERS; i++) {
		if (name && strcmp(name, providers[i]->name) != 0)
			continue;
		ret = providers[i]->probe();
		if (!ret) {
			*ops = providers[i];
			return 0;
		}
		if (name)
			return ret;
	}
	if (name)
		return fail(-ENOENT, "this build has no provider '%s': use 'kmod' or 'user', or unset OFFSTAGE_PROVIDER", name);
	return fail_in(ret, "no provider of staging memory can be used");
}

/* ---- what was asked for --------------------------------------------------------------------------------------------- */

static int check_want(uint32_t want, const char *field)
{
	if (want > OFFSTAGE_NEVER)
		return fail(-EINVAL, "offstage_buffer_options.%s is %u: use an enum offstage_want", field, want);
	return 0;
}

static int read_options(struct offstage *ctx, uint64_t bytes, const struct offstage_buffer_options *options,
			struct staging_request *request)
{
	const uint32_t known = OFFSTAGE_BUFFER_SHAREABLE | OFFSTAGE_BUFFER_DONTFORK;
	struct offstage_buffer_options o;
	int ret = struct_in(&o, sizeof(o), options, "offstage_buffer_options");

	if (!ret && o.flags & ~known)
		ret = fail(-EINVAL, "offstage_buffer_options.flags has unknown bits 0x%x: use OFFSTAGE_BUFFER_*", o.flags & ~known);
	if (!ret)
		ret = check_want(o.huge, "huge");
	if (!ret)
		ret = check_want(o.lock, "lock");
	memset(request, 0, sizeof(*request));
	if (!ret)
		ret = placement_check(&request->placement, &o, o.placement == OFFSTAGE_LOCAL ? topology_local_node() : 0);
	if (!ret && !HAVE_LIBNUMA && o.placement != OFFSTAGE_LOCAL)
		ret = fail(-EOPNOTSUPP, "placement on nodes is %s: use OFFSTAGE_LOCAL", LIBNUMA_WHY);
	request->bytes = bytes;
	request->flags = o.flags;
	request->huge = o.huge ? o.huge : OFFSTAGE_PREFER;
	request->lock = o.lock ? o.lock : ctx->lock;
	return ret;
}

/* ---- limits, each named before anything is allocated ------------------------------------------------------------------- */

static int take_budget(struct offstage *ctx, uint64_t backed)
{
	_Atomic uint64_t *counter = &ctx->trace.counters.backed_bytes;
	uint64_t used = *counter;

	do {
		if (ctx->budget && (used > ctx->budget || backed > ctx->budget - used))
			return fail(-EDQUOT, "a buffer of %s is more than the budget of %s leaves, of which %s are in use: close "
				    "buffers, ask for less, or raise offstage_options.budget", BYTES(backed), BYTES(ctx->budget),
				    BYTES(used));
	} while (!atomic_compare_exchange_weak(counter, &used, used + backed));
	return 0;
}

static void give_budget_back(struct offstage *ctx, uint64_t backed)
{
	count_down(&ctx->trace.counters.backed_bytes, backed);
}

static int check_memlock(const struct staging_request *request)
{
	uint64_t limit, used;

	if (request->lock != OFFSTAGE_REQUIRE || request->pooled)
		return 0;
	limit = topology_memlock_limit();
	used = limit == UINT64_MAX ? 0 : topology_memlock_used();
	if (limit == UINT64_MAX || (request->backed <= limit && used <= limit - request->backed))
		return 0;
	return fail(-EPERM, "locking %s needs RLIMIT_MEMLOCK of at least %s, it is %s (%s used): raise it with `ulimit -l` (in "
		    "KiB), LimitMEMLOCK= of systemd, --ulimit memlock= of a container, or /etc/security/limits.conf, or give "
		    "CAP_IPC_LOCK, or ask for lock=prefer", BYTES(request->backed), BYTES(used + request->backed), BYTES(limit),
		    BYTES(used));
}

/* Are the nodes there, allowed, and fit for memory that stays? */
static int check_nodes(const struct staging_request *request, struct offstage_node_info *nodes)
{
	const struct placement *placement = &request->placement;

	for (uint32_t i = 0; i < placement->n; i++) {
		int ret = topology_node(placement->nodes[i], &nodes[i]);

		if (ret)
			return ret;
		if (!(nodes[i].flags & OFFSTAGE_NODE_ALLOWED))
			return fail(-EXDEV, "node %u is outside this process's cpuset: add it to cpuset.mems of its cgroup (or to "
				    "--cpuset-mems of the container), or use an allowed node", placement->nodes[i]);
		if (!(nodes[i].flags & OFFSTAGE_NODE_NORMAL))
			return fail(-EOPNOTSUPP, "node %u has movable memory only, from which pinning moves pages away: bring it online "
				    "with `daxctl reconfigure-device --mode=system-ram --no-movable`, or boot with "
				    "memhp_default_state=online_kernel", placement->nodes[i]);
	}
	return 0;
}

/* Extents over the nodes, and whether each node has the room; -ENOMEM before the kernel's OOM killer gets to choose. */
static int place(struct staging_request *request, const struct offstage_node_info *nodes)
{
	const struct placement *placement = &request->placement;
	uint64_t room[OFFSTAGE_NODES_MAX], share[OFFSTAGE_NODES_MAX], grain = request->page_size;
	int n;

	/* Whole huge pages on one node, where each node gets at least one. */
	if (grain < HUGE_PAGE && request->backed / placement->n >= HUGE_PAGE)
		grain = HUGE_PAGE;
	/* A node filled to the last byte would be in reclaim for as long as the buffer lives: spill a little earlier. */
	for (uint32_t i = 0; i < placement->n; i++)
		room[i] = nodes[i].available - nodes[i].available / 64;
	n = placement_plan(placement, request->backed, grain, room, request->extents, PLACEMENT_EXTENTS);
	if (n < 0)
		return n;
	request->n_extents = n;
	/* On a machine with one node its room is the machine's, which is checked next and known better. */
	if (topology_nodes(NULL, 0) < 2)
		return 0;
	placement_share(placement, request->extents, n, request->backed, share);
	for (uint32_t i = 0; i < placement->n; i++)
		if (share[i] > nodes[i].available)
			return fail(-ENOMEM, "node %u must take %s and has room for %s: free memory there, ask for less, or use "
				    "OFFSTAGE_SPILL or OFFSTAGE_WEIGHTED over more nodes", placement->nodes[i], BYTES(share[i]),
				    BYTES(nodes[i].available));
	return 0;
}

static int check_room(const struct staging_request *request)
{
	/* Page tables come on top: 8 bytes per base page at most. */
	uint64_t need = request->missing + request->missing / 512, room;
	char from[sizeof(((struct offstage_info *)0)->memory_limit)];

	room = topology_memory_available(from, sizeof(from));
	if (need <= room)
		return 0;
	return fail(-ENOMEM, "a buffer of %s needs %s with its page tables and there is room for %s by %s: ask for less, free "
		    "memory, or raise that limit", BYTES(request->missing), BYTES(need), BYTES(room), from);
}

static int check_limits(struct staging_request *request)
{
	struct offstage_node_info nodes[OFFSTAGE_NODES_MAX];
	int ret = check_memlock(request);

	if (!ret)
		ret = check_nodes(request, nodes);
	if (ret || request->pooled)
		return ret;
	ret = place(request, nodes);
	return ret ? ret : check_room(request);
}

/* ---- law 6: where the bytes are ------------------------------------------------------------------------------------------- */

static bool named(const struct placement *placement, uint32_t node)
{
	for (uint32_t i = 0; i < placement->n; i++)
		if (placement->nodes[i] == node)
			return true;
	return false;
}

/* The node that has most of what isn't where it was asked for. */
static uint32_t stray(const struct placement *placement, const uint64_t *bytes)
{
	uint32_t worst = UINT32_MAX;

	for (uint32_t node = 0; node < TOPOLOGY_NODES_MAX; node++)
		if (bytes[node] && !named(placement, node) && (worst == UINT32_MAX || bytes[node] > bytes[worst]))
			worst = node;
	return worst;
}

static int verify(struct offstage_buffer *buffer, const struct staging_request *request)
{
	const struct placement *placement = &request->placement;
	uint64_t bytes[TOPOLOGY_NODES_MAX] = { 0 }, elsewhere = 0, there = 0;
	uint32_t node;
	int ret;

	if (!HAVE_LIBNUMA) {
		buffer->info.nodes = 0;
		return 0;
	}
	ret = buffer->ops->nodes(buffer, request->extents, request->n_extents, bytes, TOPOLOGY_NODES_MAX, &elsewhere);
	if (ret)
		return ret;
	buffer->info.nodes = 0;
	for (node = 0; node < TOPOLOGY_NODES_MAX; node++) {
		there += bytes[node];
		buffer->info.nodes += bytes[node] != 0;
	}
	if (!placement->n)	/* an import: they lie where its maker put them */
		return 0;
	/* Pages that aren't locked may have been swapped out by now. */
	if (there < buffer->mapped && buffer->info.locked)
		return fail(-EREMOTEIO, "%s of a locked buffer of %s weren't there after populating it: another program "
			    "takes them away, or the kernel can't tell their node", BYTES(buffer->mapped - there), BYTES(buffer->mapped));
	node = stray(placement, bytes);
	if (node != UINT32_MAX)
		return fail(-EREMOTEIO, "%s of a buffer of %s were found on node %u, which wasn't asked for: node %u is too full or "
			    "its memory is movable, free memory there or use another node", BYTES(bytes[node]),
			    BYTES(buffer->mapped), node, placement->nodes[0]);
	for (uint32_t i = 0; i < placement->n && placement->kind == OFFSTAGE_INTERLEAVE; i++) {
		/* Huge and base pages take turns apart, and begin anywhere. */
		uint64_t share = buffer->mapped / placement->n, least = share - share / 4;

		if (bytes[placement->nodes[i]] + 2 * HUGE_PAGE < least && buffer->info.locked)
			return fail(-EREMOTEIO, "node %u has %s of a buffer of %s that %u nodes should share: it is too full, free "
				    "memory there or leave it out", placement->nodes[i], BYTES(bytes[placement->nodes[i]]),
				    BYTES(buffer->mapped), placement->n);
	}
	if (elsewhere)
		return fail(-EREMOTEIO, "%s of a buffer of %s were found on another of the nodes named than their own: automatic "
			    "NUMA balancing or another program moved them, see /proc/sys/kernel/numa_balancing",
			    BYTES(elsewhere), BYTES(buffer->mapped));
	return 0;
}

/* ---- making and closing ------------------------------------------------------------------------------------------------------ */

/* Accounts of a buffer that is complete. Backed bytes were counted by take_budget(). */
static void account(struct offstage_buffer *buffer)
{
	struct trace_counters *counters = &buffer->ctx->trace.counters;

	count(&counters->buffers, 1);
	count(&counters->requested_bytes, buffer->info.requested);
	if (buffer->info.locked) {
		count(&counters->pins, 1);
		count(&counters->locked_bytes, buffer->info.locked);
	}
}

static void describe(struct offstage_buffer *buffer, const struct staging_request *request)
{
	struct offstage_buffer_info *info = &buffer->info;

	info->size = sizeof(*info);
	info->flags = request->flags;
	info->requested = request->bytes;
	info->backed = request->backed;
	info->page_size = request->page_size;
	memset(info->memory, 0, sizeof(info->memory));
	memcpy(info->memory, request->memory, strnlen(request->memory, sizeof(info->memory) - 1));
}

/* One attempt under one plan: with fd -1 to create, else to import. */
static int make(struct offstage_buffer *buffer, struct staging_request *request, int fd)
{
	struct offstage *ctx = buffer->ctx;
	int ret = take_budget(ctx, request->backed);

	if (ret)
		return ret;
	if (request->backed && fd < 0) {
		ret = check_limits(request);
	} else if (request->backed) {
		request->extents[0] = (struct placement_extent){ request->backed, PLACEMENT_INTERLEAVED };
		request->n_extents = 1;
		ret = check_memlock(request);
		if (!ret && request->missing)
			ret = check_room(request);
	}
	if (ret)
		goto budget;
	describe(buffer, request);
	ret = fd < 0 ? buffer->ops->create(buffer, request) : buffer->ops->import(buffer, fd, request);
	if (ret)
		goto budget;
	if (request->backed)
		ret = verify(buffer, request);
	if (ret)
		goto memory;
	account(buffer);
	return 0;

memory:
	buffer->ops->destroy(buffer);
budget:
	give_budget_back(ctx, request->backed);
	return ret;
}

static struct offstage_buffer *new_handle(struct offstage *ctx)
{
	struct offstage_buffer *buffer = heap_alloc(1, sizeof(*buffer));

	if (!buffer)
		return NULL;
	buffer->refs = 1;
	buffer->ops = ctx->staging;
	buffer->fd = -1;
	buffer->ctx = context_get(ctx);
	return buffer;
}

static void free_handle(struct offstage_buffer *buffer)
{
	struct offstage *ctx = buffer->ctx;

	heap_free(buffer);
	context_put(ctx);
}

int offstage_buffer_create(struct offstage *ctx, uint64_t bytes, const struct offstage_buffer_options *options,
			   struct offstage_buffer **out)
{
	struct offstage_buffer *buffer;
	struct staging_request request;
	int ret;

	if (!out)
		return fail(-EINVAL, "there is no place for the buffer: pass a pointer to a struct offstage_buffer *");
	*out = NULL;
	ret = context_check(ctx);
	if (!ret)
		ret = topology_check();
	if (!ret)
		ret = read_options(ctx, bytes, options, &request);
	if (ret)
		return ret;
	if (bytes > BYTES_MAX)
		return fail(-ENOMEM, "a buffer of %s is more than any machine has: ask for less", BYTES(bytes));
	buffer = new_handle(ctx);
	if (!buffer)
		return -ENOMEM;
	do {
		ret = buffer->ops->plan(&request);
		if (!ret)
			ret = make(buffer, &request, -1);
		/* Somebody else took the pool's pages in between: once more without them. */
	} while (ret == -EAGAIN && request.pooled && (request.without_pool = true));
	if (ret)
		free_handle(buffer);
	else
		*out = buffer;
	return ret;
}

int offstage_buffer_import(struct offstage *ctx, int fd, struct offstage_buffer **out)
{
	struct staging_request request = { .flags = OFFSTAGE_BUFFER_SHAREABLE, .huge = OFFSTAGE_PREFER };
	struct offstage_buffer *buffer;
	int ret;

	if (!out)
		return fail(-EINVAL, "there is no place for the buffer: pass a pointer to a struct offstage_buffer *");
	*out = NULL;
	ret = context_check(ctx);
	if (!ret)
		ret = topology_check();
	if (ret)
		return ret;
	request.lock = ctx->lock;
	ret = ctx->staging->inspect(fd, &request);
	if (ret)
		return ret;
	buffer = new_handle(ctx);
	if (!buffer)
		return -ENOMEM;
	ret = make(buffer, &request, fd);
	if (ret)
		free_handle(buffer);
	else
		*out = buffer;
	return ret;
}

struct offstage_buffer *buffer_get(struct offstage_buffer *buffer)
{
	buffer->refs++;
	return buffer;
}

void buffer_put(struct offstage_buffer *buffer)
{
	struct trace_counters *counters;

	if (--buffer->refs)
		return;
	counters = &buffer->ctx->trace.counters;
	count_down(&counters->requested_bytes, buffer->info.requested);
	count_down(&counters->locked_bytes, buffer->info.locked);
	buffer->ops->destroy(buffer);
	give_budget_back(buffer->ctx, buffer->info.backed);
	free_handle(buffer);
}

void offstage_buffer_close(struct offstage_buffer *buffer)
{
	if (buffer)
		buffer_put(buffer);
}

/* ---- what was got ---------------------------------------------------------------------------------------------------------------- */

static int check(const struct offstage_buffer *buffer)
{
	if (!buffer)
		return fail(-EINVAL, "the buffer is NULL: make one first and check what offstage_buffer_create() returns");
	return context_check(buffer->ctx);
}

void *offstage_buffer_data(struct offstage_buffer *buffer)
{
	return check(buffer) ? NULL : buffer->data;
}

int offstage_buffer_fd(struct offstage_buffer *buffer)
{
	int ret = check(buffer);

	if (ret)
		return ret;
	if (!(buffer->info.flags & OFFSTAGE_BUFFER_SHAREABLE))
		return fail(-EOPNOTSUPP, "this buffer can't be passed on: make it with OFFSTAGE_BUFFER_SHAREABLE");
	return buffer->fd;
}

int offstage_buffer_info(struct offstage_buffer *buffer, struct offstage_buffer_info *info)
{
	int ret = check(buffer);

	return ret ? ret : struct_out(info, &buffer->info, sizeof(buffer->info), "offstage_buffer_info");
}

int offstage_buffer_nodes(struct offstage_buffer *buffer, uint64_t *bytes, uint32_t n)
{
	struct placement_extent whole = { .node = PLACEMENT_INTERLEAVED };
	uint64_t elsewhere = 0;
	int ret = check(buffer);

	if (ret)
		return ret;
	if (n && !bytes)
		return fail(-EINVAL, "there is no array for the bytes on %u nodes: pass one", n);
	if (!HAVE_LIBNUMA)
		return fail(-EOPNOTSUPP, "the nodes of pages can't be asked for: %s", LIBNUMA_WHY);
	if (n)
		memset(bytes, 0, n * sizeof(*bytes));
	if (!n || !buffer->mapped)
		return 0;
	whole.bytes = buffer->mapped;
	return buffer->ops->nodes(buffer, &whole, 1, bytes, n, &elsewhere);
}

int offstage_node_info(struct offstage *ctx, uint32_t index, struct offstage_node_info *out)
{
	uint32_t nodes[TOPOLOGY_NODES_MAX];
	struct offstage_node_info info;
	unsigned n;
	int ret = context_check(ctx);

	if (!ret)
		ret = topology_check();
	if (ret)
		return ret;
	n = topology_nodes(nodes, TOPOLOGY_NODES_MAX);
	if (index >= n)
		return fail(-ENOENT, "there are %u nodes with memory, numbered from 0", n);
	ret = topology_node(nodes[index], &info);
	return ret ? ret : struct_out(out, &info, sizeof(info), "offstage_node_info");
}
