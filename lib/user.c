/* SPDX-License-Identifier: MIT */
/*
 * Provider `user`: staging memory with no module. See staging.h for what a provider owes.
 *
 * Kinds of memory, best first:
 *
 *	hugetlb	pages that an administrator set aside, when the nodes have enough of them free
 *	shmem	a memfd with transparent huge pages
 *	private	anonymous memory with transparent huge pages, where a memfd can't have them and needn't be passed on
 *	shmem	a memfd with base pages
 *
 * A memfd gets huge pages in two ways. Where shmem_enabled allows it, faults give them. Where that is "never", as it
 * is by default, one byte of each 2 MiB block is touched and the block is collapsed (MADV_COLLAPSE, Linux 6.1), which
 * takes a huge page, clears what was a hole and copies one base page: as fast as a huge fault, and the page comes from
 * the node of the touched one. "deny", and transparent_hugepage/enabled "never", are obeyed: somebody chose them.
 *
 * Huge pages are asked for as far as free huge blocks go on the target nodes, and forbidden for the rest: with the
 * blocks used up, the kernel would compact memory at every fault, for minutes per GiB on a fragmented host. The tail
 * of less than a huge page has base pages, so that a buffer costs no more than it says (law 7).
 *
 * Order: address space, file, policy (mbind), hints, lock, populate. Locking comes before populating, with
 * MLOCK_ONFAULT, so that a refusal costs nothing and pages go to the unevictable list once, by many threads.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>
#if HAVE_LIBNUMA
#include <numaif.h>
#endif
#include "context.h"
#include "error.h"
#include "heap.h"
#include "populate.h"
#include "staging.h"
#include "topology.h"

/* Newer than the oldest C library that this is built with. */
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 8U
#endif

#define ALIGN ((uint64_t)2 << 20)
#define LOOK_BATCH 512
#define COLLAPSE_ATTEMPTS 4

static uint64_t base_page(void)
{
	return (uint64_t)sysconf(_SC_PAGESIZE);
}

static uint64_t round_up(uint64_t n, uint64_t to)
{
	return (n + to - 1) / to * to;
}

static uint64_t least(uint64_t a, uint64_t b)
{
	return a < b ? a : b;
}

/* Adds a reason to `why`. */
static void __attribute__((format(printf, 2, 3))) reason(struct offstage_buffer *buffer, const char *format, ...)
{
	size_t n = strlen(buffer->info.why), size = sizeof(buffer->info.why);
	va_list args;

	va_start(args, format);
	if (n + 3 < size) {
		if (n)
			n += (size_t)snprintf(buffer->info.why + n, size - n, "; ");
		vsnprintf(buffer->info.why + n, size - n, format, args);
	}
	va_end(args);
}

/* ---- the file -------------------------------------------------------------------------------------------------------- */

/* A memfd that can be neither executed nor made longer or shorter: nobody who has it can make us fault past its end. */
static int make_file(uint64_t bytes, uint64_t hugetlb_size)
{
	unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
	int fd, err;

	if (hugetlb_size)
		flags |= MFD_HUGETLB | (unsigned)__builtin_ctzll(hugetlb_size) << MAP_HUGE_SHIFT;
	fd = memfd_create("offstage", flags | MFD_NOEXEC_SEAL);
	if (fd < 0 && errno == EINVAL)	/* before Linux 6.3 */
		fd = memfd_create("offstage", flags);
	if (fd < 0) {
		err = -errno;
		if (err == -EMFILE)
			return fail(err, "a buffer needs a file descriptor and this process has no more: raise RLIMIT_NOFILE with "
				    "`ulimit -n`, or close some");
		return fail(err, "the kernel makes no memfd (%s): the system's file table may be full, see /proc/sys/fs/file-max",
			    strerror(-err));
	}
	if (ftruncate(fd, (off_t)bytes) < 0) {
		err = -errno;
		close(fd);
		return fail(err, "the kernel makes no memfd of %s (%s): ask for less", BYTES(bytes), strerror(-err));
	}
	/* Not sealing is a weaker promise, no failure. */
	fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
	return fd;
}

/* A signal that kills is how the kernel says that a file is longer than RLIMIT_FSIZE: ask before. */
static int check_file_size(uint64_t bytes)
{
	struct rlimit limit;

	if (getrlimit(RLIMIT_FSIZE, &limit) < 0 || limit.rlim_cur == RLIM_INFINITY || bytes <= limit.rlim_cur)
		return 0;
	return fail(-EFBIG, "a buffer of %s is a file and RLIMIT_FSIZE is %s: raise it with `ulimit -f`", BYTES(bytes),
		    BYTES(limit.rlim_cur));
}

/* ---- address space ------------------------------------------------------------------------------------------------------ */

static int no_address(uint64_t bytes, int err)
{
	struct rlimit limit;

	if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
		return fail(-ENOMEM, "%s of address space can't be had and RLIMIT_AS is %s: raise it with `ulimit -v`", BYTES(bytes),
			    BYTES(limit.rlim_cur));
	return fail(-ENOMEM, "%s of address space can't be had (%s): the process may have too many mappings "
		    "(/proc/sys/vm/max_map_count), or the system commits no more (vm.overcommit_memory)", BYTES(bytes),
		    strerror(err));
}

/* Maps `mapped` bytes of the file, or private memory for fd -1, aligned so that huge pages fit. */
static int map(struct offstage_buffer *buffer, int fd, uint64_t mapped, uint64_t align)
{
	uint64_t slack = mapped >= align ? align : 0, skip;
	int err, how = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
	char *all, *data;

	all = mmap(NULL, mapped + slack, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (all == MAP_FAILED)
		return no_address(mapped + slack, errno);
	skip = slack ? -(uint64_t)(uintptr_t)all & (align - 1) : 0;
	data = all + skip;
	if (mmap(data, mapped, PROT_READ | PROT_WRITE, how | MAP_FIXED, fd, 0) == MAP_FAILED) {
		err = errno;
		munmap(all, mapped + slack);
		/* Pooled pages are reserved by mmap: there aren't enough any more. */
		if (err == ENOMEM && strcmp(buffer->info.memory, "hugetlb") == 0)
			return fail(-EAGAIN, "%s of hugetlb pages are free no longer", BYTES(mapped));
		if (err == EPERM || err == EACCES)
			return fail(-EINVAL, "the file can't be mapped for writing (%s): it is sealed or not open for writing",
				    strerror(err));
		return no_address(mapped, err);
	}
	if (skip)
		munmap(all, skip);
	if (slack > skip)
		munmap(data + mapped, slack - skip);
	buffer->data = data;
	buffer->mapped = mapped;
	return 0;
}

static void user_destroy(struct offstage_buffer *buffer)
{
	/*
	 * A child of fork has the mapping too, and gives back its share; but one made with DONTFORK isn't there, and its
	 * addresses may be somebody else's by now.
	 */
	bool absent = context_forked(buffer->ctx) && buffer->info.flags & OFFSTAGE_BUFFER_DONTFORK;

	if (buffer->mapped && !absent)
		munmap(buffer->data, buffer->mapped);
	if (buffer->fd >= 0)
		close(buffer->fd);
	buffer->data = NULL;
	buffer->mapped = 0;
	buffer->fd = -1;
}

/* ---- which kind of memory ------------------------------------------------------------------------------------------------- */

static bool collapse_known;

/* Tries it on two pages: whether a memfd's block can be collapsed depends on kernel, sandbox and prctl(). */
static void try_collapse(void)
{
	uint64_t huge = topology_huge_page_size();
	struct offstage_buffer trial = { .fd = -1 };
	volatile char *data;
	int fd;

	if (!huge || check_file_size(huge))
		return;
	fd = make_file(huge, 0);
	if (fd < 0)
		return;
	if (map(&trial, fd, huge, huge) == 0) {
		data = trial.data;
		*data = 0;
		/* Anything but EINVAL is a matter of the moment, like a block that isn't free. */
		collapse_known = madvise(trial.data, huge, MADV_COLLAPSE) == 0 || errno != EINVAL;
		munmap(trial.data, trial.mapped);
	}
	close(fd);
}

static bool collapse_works(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	pthread_once(&once, try_collapse);
	return collapse_known;
}

/* How a memfd gets huge pages here. */
enum huge_way { HUGE_NOT, HUGE_FAULT, HUGE_COLLAPSE };

static enum huge_way shmem_way(void)
{
	char word[16];

	topology_thp(word, sizeof(word), true);
	if (strcmp(word, "always") == 0 || strcmp(word, "advise") == 0 || strcmp(word, "within_size") == 0 ||
	    strcmp(word, "force") == 0)
		return HUGE_FAULT;
	if (!*word || strcmp(word, "deny") == 0)
		return HUGE_NOT;
	return collapse_works() ? HUGE_COLLAPSE : HUGE_NOT;
}

static bool private_way(void)
{
	char word[16];

	topology_thp(word, sizeof(word), false);
	return strcmp(word, "always") == 0 || strcmp(word, "madvise") == 0;
}

/* Are transparent huge pages switched off as such? */
static bool thp_off(void)
{
	return !topology_huge_page_size() || !private_way();
}

/* Are there enough free hugetlb pages on the nodes? Then the plan's extents are set. */
static bool plan_hugetlb(struct staging_request *request)
{
	const struct placement *placement = &request->placement;
	uint64_t room[OFFSTAGE_NODES_MAX], share[OFFSTAGE_NODES_MAX], size = topology_hugetlb_size(), backed;
	int n;

	if (!size || request->without_pool || request->bytes < size)
		return false;
	/* Rounding up to its pages may cost an eighth, no more: transparent pages cost nothing there (law 7). */
	backed = round_up(request->bytes, size);
	if (backed - request->bytes > request->bytes / 8 || topology_hugetlb_free() < backed)
		return false;
	for (uint32_t i = 0; i < placement->n; i++) {
		struct offstage_node_info node;

		/* A node that isn't there is reported by the check of limits. */
		if (topology_node(placement->nodes[i], &node))
			return false;
		room[i] = node.hugetlb_free;
	}
	n = placement_plan(placement, backed, size, room, request->extents, PLACEMENT_EXTENTS);
	if (n < 0)
		return false;
	placement_share(placement, request->extents, n, backed, share);
	for (uint32_t i = 0; i < placement->n; i++)
		if (round_up(share[i], size) > room[i])
			return false;
	request->n_extents = n;
	request->memory = "hugetlb";
	request->page_size = (uint32_t)size;
	request->backed = request->missing = backed;
	request->pooled = true;
	return true;
}

static int user_plan(struct staging_request *request)
{
	bool shareable = request->flags & OFFSTAGE_BUFFER_SHAREABLE;
	uint64_t huge = topology_huge_page_size();

	request->n_extents = 0;
	request->pooled = false;
	if (request->bytes && request->huge != OFFSTAGE_NEVER && plan_hugetlb(request))
		return 0;
	request->memory = request->bytes ? "shmem" : "none";
	request->page_size = (uint32_t)base_page();
	request->backed = request->missing = round_up(request->bytes, request->page_size);
	if (!request->bytes || request->huge == OFFSTAGE_NEVER)
		return 0;
	if (huge && request->backed >= huge && !thp_off() && !shareable && shmem_way() == HUGE_NOT)
		request->memory = "private";
	if (request->huge != OFFSTAGE_REQUIRE)
		return 0;
	if (thp_off())
		return fail(-ENOSR, "huge pages were required and transparent ones are off: write madvise to "
			    "/sys/kernel/mm/transparent_hugepage/enabled, or reserve hugetlb pages by vm.nr_hugepages");
	if (request->backed < huge)
		return fail(-ENOSR, "huge pages were required for %s, which is less than one of %s: ask for more, or for "
			    "huge=prefer", BYTES(request->bytes), BYTES(huge));
	if (shareable && shmem_way() == HUGE_NOT)
		return fail(-ENOSR, "huge pages were required for a shareable buffer and shared memory has none here: write advise "
			    "to /sys/kernel/mm/transparent_hugepage/shmem_enabled, or reserve hugetlb pages by vm.nr_hugepages");
	return 0;
}

/* ---- placing ------------------------------------------------------------------------------------------------------------ */

/* Sets the policy of the mapping, never the thread's: what is populated from now on, by whomever, obeys it. */
static int place(struct offstage_buffer *buffer, const struct staging_request *request)
{
#if HAVE_LIBNUMA
	enum { WORD = 8 * sizeof(unsigned long) };
	char *start = buffer->data;

	for (int k = 0; k < request->n_extents; start += request->extents[k++].bytes) {
		unsigned long mask[TOPOLOGY_NODES_MAX / WORD + 1] = { 0 };
		uint32_t node = request->extents[k].node;
		int policy = node == PLACEMENT_INTERLEAVED ? MPOL_INTERLEAVE : MPOL_BIND;

		for (uint32_t i = 0; i < request->placement.n; i++) {
			uint32_t one = policy == MPOL_BIND ? node : request->placement.nodes[i];

			mask[one / WORD] |= 1ul << one % WORD;
		}
		/* One bit more than there are, because the call takes the number of bits less one. */
		if (mbind(start, request->extents[k].bytes, policy, mask, TOPOLOGY_NODES_MAX + 1, 0) == 0)
			continue;
		/* A kernel or a sandbox that knows no nodes has one; everything is on it, and that is checked too. */
		if ((errno == ENOSYS || errno == EPERM) && topology_nodes(NULL, 0) == 1)
			continue;
		return fail(errno == EPERM ? -EPERM : -ENOMEM, "the kernel refuses to place memory on node %u (%s): a sandbox may "
			    "forbid mbind (CAP_SYS_NICE in containers), or the cpuset changed", request->placement.nodes[0],
			    strerror(errno));
	}
#else
	(void)buffer;
	(void)request;
#endif
	return 0;
}

/* ---- huge pages ------------------------------------------------------------------------------------------------------------ */

/* From the beginning of each extent, bytes that are to have huge pages; and how a memfd gets them. */
struct huge_plan {
	enum huge_way way;
	uint64_t bytes[PLACEMENT_EXTENTS];
	uint64_t all, wanted;
};

/* Hands out the free huge blocks of each node to its extents, whole huge pages each. */
static void plan_huge(struct huge_plan *plan, const struct offstage_buffer *buffer, const struct staging_request *request)
{
	const struct placement *placement = &request->placement;
	uint64_t left[OFFSTAGE_NODES_MAX], huge = topology_huge_page_size(), fewest = UINT64_MAX;
	uintptr_t at = (uintptr_t)buffer->data;

	memset(plan, 0, sizeof(*plan));
	if (!huge || request->pooled || request->huge == OFFSTAGE_NEVER || thp_off())
		return;
	plan->way = strcmp(request->memory, "private") == 0 ? HUGE_FAULT : shmem_way();
	if (plan->way == HUGE_NOT)
		return;
	for (uint32_t i = 0; i < placement->n; i++) {
		struct offstage_node_info node;

		left[i] = topology_node(placement->nodes[i], &node) == 0 ? node.huge_free : 0;
		fewest = least(fewest, left[i]);
	}
	for (int k = 0; k < request->n_extents; at += request->extents[k++].bytes) {
		uint64_t bytes = request->extents[k].bytes / huge * huge;

		/* Extents that begin within a huge page can't have them; they are too small to want them. */
		if (at % huge)
			continue;
		plan->wanted += bytes;
		if (request->extents[k].node == PLACEMENT_INTERLEAVED)
			bytes = least(bytes, fewest > UINT64_MAX / placement->n ? UINT64_MAX : fewest * placement->n);
		for (uint32_t i = 0; i < placement->n; i++)
			if (request->extents[k].node == placement->nodes[i]) {
				bytes = least(bytes, left[i]);
				left[i] -= bytes / huge * huge;
			}
		plan->bytes[k] = bytes / huge * huge;
		plan->all += plan->bytes[k];
	}
}

static void hint(const struct offstage_buffer *buffer, const struct staging_request *request, const struct huge_plan *plan)
{
	char *start = buffer->data;

	/* Pooled pages are what they are. A kernel with no huge pages refuses the hint, and does what it says. */
	for (int k = 0; k < request->n_extents && !request->pooled; start += request->extents[k++].bytes) {
		uint64_t huge = plan->bytes[k], bytes = request->extents[k].bytes;

		if (huge)
			madvise(start, huge, MADV_HUGEPAGE);
		if (bytes > huge)
			madvise(start + huge, bytes - huge, MADV_NOHUGEPAGE);
	}
}

/* ---- populating -------------------------------------------------------------------------------------------------------------- */

struct populate {
	char *start;
	const struct staging_request *request;
	const struct huge_plan *plan;
	uint64_t huge;		/* size of a huge page */
};

/*
 * Writes what is there, while others may write. Adding nothing won't do: clang turns that into a load, or leaves it out;
 * a compare-and-swap it keeps.
 */
static int touch(volatile char *piece, uint64_t bytes, uint64_t step)
{
	for (uint64_t at = 0; at < bytes; at += step) {
		char there = __atomic_load_n(piece + at, __ATOMIC_RELAXED);

		__atomic_compare_exchange_n(piece + at, &there, there, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
	}
	return 0;
}

static int populate_range(char *piece, uint64_t bytes)
{
	while (madvise(piece, bytes, MADV_POPULATE_WRITE) < 0) {
		if (errno == EINTR || errno == EAGAIN)
			continue;
		return errno == EINVAL || errno == ENOSYS ? touch(piece, bytes, base_page()) : -errno;
	}
	return 0;
}

/* The part of a piece (which lies in one extent) that is to be collapsed. */
static uint64_t to_collapse(const struct populate *populate, const char *piece, uint64_t bytes)
{
	char *extent = populate->start, *end = extent;
	int k = 0;

	for (; k < populate->request->n_extents; k++, extent = end) {
		end = extent + populate->request->extents[k].bytes;
		if (piece < end)
			break;
	}
	end = extent + populate->plan->bytes[k];
	return piece < end ? least(bytes, (uint64_t)(end - piece)) : 0;
}

/*
 * The page of a block that decides on which node the collapsed block lies. Taking turns, the kernel takes node number
 * `page % n` of n for a base page, where a huge one would have `block % n`: all first pages of blocks are on one node
 * when n is even. So the page whose turn it is for the block.
 */
static uint64_t deciding_page(const struct populate *populate, uint64_t block)
{
	const struct placement *placement = &populate->request->placement;
	uint64_t pages = populate->huge / base_page(), n = placement->n;

	if (placement->kind != OFFSTAGE_INTERLEAVE)
		return 0;
	return (block % n + n - block * pages % n) % n;
}

static void collapse(const struct populate *populate, char *piece, uint64_t bytes)
{
	uint64_t block = (uint64_t)(piece - populate->start) / populate->huge;

	for (uint64_t at = 0; at < bytes; at += populate->huge, block++)
		touch(piece + at + deciding_page(populate, block) * base_page(), 1, 1);
	/* Blocks that weren't had become base pages after this; the info says how many were had. */
	if (bytes)
		madvise(piece, bytes, MADV_COLLAPSE);
}

static int populate_piece(void *arg, char *piece, uint64_t bytes)
{
	const struct populate *populate = arg;

	if (populate->plan->way == HUGE_COLLAPSE)
		collapse(populate, piece, to_collapse(populate, piece, bytes));
	return populate_range(piece, bytes);
}

static int populate(struct offstage_buffer *buffer, const struct staging_request *request, const struct huge_plan *plan)
{
	struct populate populate = { buffer->data, request, plan, topology_huge_page_size() };
	int err = populate_run(buffer->data, request->extents, request->n_extents, &buffer->ctx->trace.counters,
			       populate_piece, &populate);

	switch (err) {
	case 0:
		return 0;
	case -ENOMEM:
		return fail(-ENOMEM, "memory ran out while a buffer of %s was populated: another program took it, free some or ask "
			    "for less", BYTES(buffer->mapped));
	case -EFAULT:
		/* What would be SIGBUS: pooled pages that the node doesn't have, or a limit of hugetlb's own cgroup. */
		if (request->pooled)
			return fail(-EAGAIN, "hugetlb pages ran out on the node, or by the limit hugetlb.*.max of a cgroup");
		return fail(-ENOMEM, "memory couldn't be populated (%s): the file may have been cut short, or a cgroup's limit was "
			    "reached", strerror(-err));
	case -EHWPOISON:
		return fail(-EHWPOISON, "a page of the buffer is on broken memory: see the kernel log, and try again");
	default:
		return fail(err, "memory of %s couldn't be populated (%s)", BYTES(buffer->mapped), strerror(-err));
	}
}

/* ---- locking ------------------------------------------------------------------------------------------------------------------ */

static int not_locked(struct offstage_buffer *buffer, uint32_t lock, int err)
{
	uint64_t limit = topology_memlock_limit();

	if (lock == OFFSTAGE_PREFER) {
		reason(buffer, "not locked: %s, RLIMIT_MEMLOCK is %s", strerror(err),
		       limit == UINT64_MAX ? "unlimited" : BYTES(limit));
		return 0;
	}
	return fail(err == ENOMEM || err == EPERM ? -EPERM : -err, "%s couldn't be locked (%s) and RLIMIT_MEMLOCK is %s: another "
		    "thread may have used it up, raise it with `ulimit -l` or give CAP_IPC_LOCK, or ask for lock=prefer",
		    BYTES(buffer->mapped), strerror(err), limit == UINT64_MAX ? "unlimited" : BYTES(limit));
}

/*
 * Before populating: pages are locked as they come, by all threads that bring them. 1: the kernel, or what emulates
 * it, can't do that, and lock_late() has to be called after it.
 */
static int lock(struct offstage_buffer *buffer, const struct staging_request *request)
{
	if (request->lock == OFFSTAGE_NEVER)
		return 0;
	/* Pooled pages are never swapped; mlock would only check a limit that they don't count against. */
	if (!request->pooled && mlock2(buffer->data, buffer->mapped, MLOCK_ONFAULT) < 0)
		return errno == ENOSYS || errno == EINVAL ? 1 : not_locked(buffer, request->lock, errno);
	buffer->info.locked = buffer->mapped;
	return 0;
}

static int lock_late(struct offstage_buffer *buffer, const struct staging_request *request)
{
	if (mlock(buffer->data, buffer->mapped) < 0)
		return not_locked(buffer, request->lock, errno);
	buffer->info.locked = buffer->mapped;
	return 0;
}

/* Both, around populating. */
static int fill(struct offstage_buffer *buffer, const struct staging_request *request, const struct huge_plan *plan)
{
	int late = lock(buffer, request), ret = late < 0 ? late : populate(buffer, request, plan);

	if (!ret && late)
		ret = lock_late(buffer, request);
	return ret;
}

/* ---- what was got --------------------------------------------------------------------------------------------------------------- */

static void add_huge(void *arg, uintptr_t start, uintptr_t end, uint64_t huge, uint64_t mapping)
{
	(void)mapping;
	/* A mapping is wholly the buffer's but where the kernel merged one that is alike. */
	*(uint64_t *)arg += least(huge, end - start);
}

static int measure(struct offstage_buffer *buffer)
{
	uintptr_t start = (uintptr_t)buffer->data;
	uint64_t huge = 0;
	int ret = topology_mappings(start, start + buffer->mapped, add_huge, &huge);

	if (ret)
		return ret;
	buffer->info.huge = huge;
	if (buffer->info.page_size < topology_huge_page_size() && huge > buffer->mapped / 2)
		buffer->info.page_size = topology_huge_page_size();
	return 0;
}

static int judge_huge(struct offstage_buffer *buffer, const struct staging_request *request, const struct huge_plan *plan)
{
	uint64_t size = topology_huge_page_size(), full = size ? buffer->mapped / size * size : 0, got = buffer->info.huge;

	if (request->huge == OFFSTAGE_NEVER)
		reason(buffer, "base pages were asked for");
	else if (request->pooled || (full && got >= full))
		;
	else if (thp_off())
		reason(buffer, "base pages: transparent huge pages are off (transparent_hugepage/enabled)");
	else if (!full)
		reason(buffer, "base pages: smaller than a huge page");
	else if (plan->way == HUGE_NOT)
		reason(buffer, "base pages: shared memory has no huge pages here (transparent_hugepage/shmem_enabled)");
	else
		reason(buffer, "%s in base pages: free huge blocks were for %s", BYTES(buffer->mapped - got), BYTES(plan->all));
	if (request->huge == OFFSTAGE_REQUIRE && !request->pooled && got < full)
		return fail(-ENOSR, "huge pages were required for %s and got for %s, the nodes had free blocks for %s: free memory, "
			    "compact it (echo 1 > /proc/sys/vm/compact_memory), or ask for huge=prefer", BYTES(full), BYTES(got),
			    BYTES(plan->all));
	return 0;
}

static int user_create(struct offstage_buffer *buffer, const struct staging_request *request)
{
	bool shareable = request->flags & OFFSTAGE_BUFFER_SHAREABLE;
	uint64_t huge = topology_huge_page_size(), align = ALIGN;
	struct huge_plan plan;
	int ret = 0;

	memset(buffer->info.why, 0, sizeof(buffer->info.why));
	if (strcmp(request->memory, "private") != 0 && (request->backed || shareable)) {
		ret = check_file_size(request->backed);
		if (ret)
			return ret;
		ret = make_file(request->pooled ? request->backed : request->bytes, request->pooled ? request->page_size : 0);
		if (ret < 0)
			return ret;
		buffer->fd = ret;
		ret = 0;
	}
	if (!request->backed)
		return 0;
	if (request->page_size > align)
		align = request->page_size;
	if (huge > align && request->backed >= huge)
		align = huge;
	ret = map(buffer, buffer->fd, request->backed, align);
	if (ret)
		goto out;
	/* The mapping keeps the file; a descriptor is for passing on, and a process has few. */
	if (!shareable && buffer->fd >= 0) {
		close(buffer->fd);
		buffer->fd = -1;
	}
	if (request->flags & OFFSTAGE_BUFFER_DONTFORK && madvise(buffer->data, buffer->mapped, MADV_DONTFORK) < 0) {
		ret = fail(-errno, "the kernel refuses MADV_DONTFORK (%s): leave out OFFSTAGE_BUFFER_DONTFORK", strerror(errno));
		goto out;
	}
	ret = place(buffer, request);
	if (ret)
		goto out;
	plan_huge(&plan, buffer, request);
	hint(buffer, request, &plan);
	ret = fill(buffer, request, &plan);
	if (ret)
		goto out;
	ret = measure(buffer);
	if (!ret)
		ret = judge_huge(buffer, request, &plan);
out:
	if (ret) {
		user_destroy(buffer);
		buffer->info.locked = 0;
	}
	return ret;
}

/* ---- files that others made -------------------------------------------------------------------------------------------------------- */

static int user_inspect(int fd, struct staging_request *request)
{
	struct statfs system;
	struct stat file;
	int flags = fcntl(fd, F_GETFL);

	if (flags < 0 || fstat(fd, &file) < 0)
		return fail(-EBADF, "%d isn't an open file descriptor: pass the one that came with SCM_RIGHTS", fd);
	if (!S_ISREG(file.st_mode) || fstatfs(fd, &system) < 0 ||
	    (system.f_type != TMPFS_MAGIC && system.f_type != HUGETLBFS_MAGIC))
		return fail(-EINVAL, "descriptor %d isn't memory (a memfd, or a file on tmpfs or hugetlbfs): pass one from "
			    "offstage_buffer_fd()", fd);
	if ((flags & O_ACCMODE) != O_RDWR)
		return fail(-EINVAL, "descriptor %d isn't open for reading and writing: open or pass it so", fd);
	request->bytes = (uint64_t)file.st_size;
	request->pooled = system.f_type == HUGETLBFS_MAGIC;
	request->memory = !request->bytes ? "none" : request->pooled ? "hugetlb" : "shmem";
	request->page_size = request->pooled ? (uint32_t)system.f_bsize : (uint32_t)base_page();
	request->backed = round_up(request->bytes, request->page_size);
	request->missing = (uint64_t)file.st_blocks * 512;
	request->missing = request->missing < request->backed && !request->pooled ? request->backed - request->missing : 0;
	return 0;
}

static int user_import(struct offstage_buffer *buffer, int fd, const struct staging_request *request)
{
	uint64_t huge = topology_huge_page_size(), align = huge > request->page_size ? huge : request->page_size;
	struct huge_plan plan = { .way = HUGE_NOT };
	int ret = 0;

	buffer->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
	if (buffer->fd < 0)
		return fail(-errno, "a buffer needs a file descriptor and this process has no more (%s): raise RLIMIT_NOFILE with "
			    "`ulimit -n`, or close some", strerror(errno));
	if (!request->backed)
		return 0;
	ret = map(buffer, buffer->fd, request->backed, align > ALIGN && request->backed < align ? ALIGN : align);
	if (ret == -EAGAIN)
		ret = fail_in(-ENOMEM, "the file can't be mapped");
	if (ret)
		goto out;
	/* Mapped now, so that using it never faults; huge pages are mapped as such where the maker got them. */
	ret = fill(buffer, request, &plan);
	if (ret == -EAGAIN)
		ret = -ENOMEM;
	if (!ret)
		ret = measure(buffer);
out:
	if (ret) {
		user_destroy(buffer);
		buffer->info.locked = 0;
	}
	return ret;
}

/* ---- where pages are ------------------------------------------------------------------------------------------------------------------ */

#if HAVE_LIBNUMA
struct look {
	struct offstage_buffer *buffer;
	const struct placement_extent *extents;
	int n_extents;
	uint64_t step;			/* the size of pages in the mapping that is looked at */
	_Atomic uint64_t bytes[TOPOLOGY_NODES_MAX], elsewhere;
	_Atomic int err;
};

static uint32_t node_wanted(const struct look *look, const char *page)
{
	uint64_t at = (uint64_t)(page - (const char *)look->buffer->data), end = 0;

	for (int k = 0; k < look->n_extents; k++) {
		end += look->extents[k].bytes;
		if (at < end)
			return look->extents[k].node;
	}
	return PLACEMENT_INTERLEAVED;
}

/* Asks for the node of every page. A page that is just being moved has none for a moment: asked again. */
static int look_at(void *arg, char *piece, uint64_t bytes)
{
	struct look *look = arg;
	void *pages[LOOK_BATCH];
	int nodes[LOOK_BATCH];

	for (uint64_t at = 0; at < bytes;) {
		unsigned long n = 0;
		bool again = true;

		for (; n < LOOK_BATCH && at + n * look->step < bytes; n++)
			pages[n] = piece + at + n * look->step;
		for (int attempt = 0; again && attempt < 3; attempt++) {
			if (move_pages(0, n, pages, NULL, nodes, 0) < 0)
				return -errno;
			again = false;
			for (unsigned long i = 0; i < n; i++)
				again |= nodes[i] < 0;
		}
		for (unsigned long i = 0; i < n; i++) {
			uint64_t size = least(look->step, bytes - at - i * look->step);
			uint32_t wanted = node_wanted(look, pages[i]);

			if (nodes[i] < 0 || nodes[i] >= TOPOLOGY_NODES_MAX)
				continue;
			count(&look->bytes[nodes[i]], size);
			if (wanted != PLACEMENT_INTERLEAVED && wanted != (uint32_t)nodes[i])
				count(&look->elsewhere, size);
		}
		at += n * look->step;
	}
	return 0;
}

static void look_at_mapping(void *arg, uintptr_t start, uintptr_t end, uint64_t huge, uint64_t mapping)
{
	struct placement_extent part = { end - start, PLACEMENT_INTERLEAVED };
	struct look *look = arg;
	int err;

	look->step = base_page();
	if (strcmp(look->buffer->info.memory, "hugetlb") == 0)
		look->step = look->buffer->info.page_size;
	else if (huge == mapping && topology_huge_page_size())
		look->step = topology_huge_page_size();
	if (look->step == base_page())
		err = populate_run((char *)start, &part, 1, &look->buffer->ctx->trace.counters, look_at, look);
	else
		err = look_at(look, (char *)start, part.bytes);
	if (err)
		look->err = err;
}

static int user_nodes(struct offstage_buffer *buffer, const struct placement_extent *extents, int n_extents,
		      uint64_t *bytes, uint32_t n, uint64_t *elsewhere)
{
	struct look look = { .buffer = buffer, .extents = extents, .n_extents = n_extents };
	uintptr_t start = (uintptr_t)buffer->data;
	int ret = topology_mappings(start, start + buffer->mapped, look_at_mapping, &look);

	if (ret)
		return ret;
	/* A kernel or a sandbox that knows no nodes has one. */
	if ((look.err == -ENOSYS || look.err == -EPERM) && topology_nodes(NULL, 0) == 1) {
		look.bytes[0] = buffer->mapped;
		look.elsewhere = 0;
	} else if (look.err) {
		return fail(look.err, "the kernel doesn't tell the nodes of pages (move_pages: %s): a sandbox may forbid it",
			    strerror(-look.err));
	}
	for (uint32_t node = 0; node < n && node < TOPOLOGY_NODES_MAX; node++)
		bytes[node] += look.bytes[node];
	*elsewhere += look.elsewhere;
	return 0;
}
#else
static int user_nodes(struct offstage_buffer *buffer, const struct placement_extent *extents, int n_extents,
		      uint64_t *bytes, uint32_t n, uint64_t *elsewhere)
{
	(void)buffer;
	(void)extents;
	(void)n_extents;
	(void)bytes;
	(void)n;
	(void)elsewhere;
	return fail(-EOPNOTSUPP, "the nodes of pages can't be asked for: %s", LIBNUMA_WHY);
}
#endif

static int user_probe(void)
{
	return 0;
}

const struct staging_ops user_ops = {
	.name = "user",
	.probe = user_probe,
	.plan = user_plan,
	.create = user_create,
	.inspect = user_inspect,
	.import = user_import,
	.nodes = user_nodes,
	.destroy = user_destroy,
};
