/* SPDX-License-Identifier: MIT */
/*
 * Buffers: exact cost, files that can be passed on, memory that goes back to the system, limits that are named before
 * anything is allocated, and failures that leave nothing. Tests that need another machine than this one lay a tree of
 * facts under topology_root; those that would change this machine's settings run only with OFFSTAGE_TEST_SYSTEM=1.
 */
#include <fcntl.h>
#include <ftw.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#if HAVE_LIBNUMA
#include <numaif.h>
#endif
#include "unit.h"
#include "../entries.h"
#include "../../lib/context.h"
#include "../../lib/heap.h"
#include "../../lib/staging.h"
#include "../../lib/topology.h"

#define MiB ((uint64_t)1 << 20)
#define GiB ((uint64_t)1 << 30)
#define HUGE (2 * MiB)

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#else
#define SANITIZED 0
#endif

/* Under valgrind, faults and mappings are also its own. */
static bool under_tool(void)
{
	const char *preloaded = getenv("LD_PRELOAD");

	return SANITIZED || (preloaded && strstr(preloaded, "vgpreload"));
}

static struct offstage *ctx;
static uint64_t page;
static char tree[64];

/* ---- what a test finds and leaves ------------------------------------------------------------------------------------- */

static unsigned open_descriptors(void)
{
	return entries("/proc/self/fd");
}

/* Mappings of buffers' files in this process. */
static unsigned buffer_mappings(void)
{
	FILE *maps = fopen("/proc/self/maps", "r");
	char line[512];
	unsigned n = 0;

	assert_non_null(maps);
	while (fgets(line, sizeof(line), maps))
		n += strstr(line, "memfd:offstage") != NULL;
	fclose(maps);
	return n;
}

/* A number of /proc/self/status or /proc/meminfo, in bytes. */
static uint64_t proc_bytes(const char *path, const char *key)
{
	FILE *file = fopen(path, "r");
	unsigned long long kib = 0;
	char line[256];

	assert_non_null(file);
	while (fgets(line, sizeof(line), file))
		if (strncmp(line, key, strlen(key)) == 0)
			sscanf(line + strlen(key), ": %llu", &kib);
	fclose(file);
	return kib << 10;
}

/* Of the whole process, from smaps: bytes of a key in mappings of buffers' files. */
static uint64_t buffers_smaps(const char *key)
{
	FILE *file = fopen("/proc/self/smaps", "r");
	unsigned long long kib, sum = 0, first, last;
	char line[512];
	bool ours = false;

	assert_non_null(file);
	while (fgets(line, sizeof(line), file)) {
		if (sscanf(line, "%llx-%llx ", &first, &last) == 2)
			ours = strstr(line, "memfd:offstage") != NULL;
		else if (ours && strncmp(line, key, strlen(key)) == 0 && sscanf(line + strlen(key), ": %llu", &kib) == 1)
			sum += kib;
	}
	fclose(file);
	return sum << 10;
}

static unsigned descriptors_before;
static unsigned mappings_before;
static uint64_t locked_before;

static int open_context(void **unused)
{
	struct offstage_options options = { .size = sizeof(options), .threads = 1, .lock = OFFSTAGE_PREFER };

	(void)unused;
	page = (uint64_t)sysconf(_SC_PAGESIZE);
	descriptors_before = open_descriptors();
	mappings_before = buffer_mappings();
	locked_before = proc_bytes("/proc/self/status", "VmLck");
	return offstage_open(&options, &ctx);
}

/* Whatever a test did: no descriptor, no mapping, no locked byte, no account of it is left. */
static int close_context(void **unused)
{
	struct trace_counters *c = &ctx->trace.counters;

	(void)unused;
	topology_root = "";
	heap_fail_nth(0);
	assert_int_equal(c->requested_bytes, 0);
	assert_int_equal(c->backed_bytes, 0);
	assert_int_equal(c->locked_bytes, 0);
	assert_int_equal(ctx->refs, 1);
	offstage_close(ctx);
	assert_int_equal(open_descriptors(), descriptors_before);
	assert_int_equal(buffer_mappings(), mappings_before);
	assert_int_equal(proc_bytes("/proc/self/status", "VmLck"), locked_before);
	return 0;
}

static void put(const char *path, const char *text)
{
	char full[512];
	FILE *file;

	snprintf(full, sizeof(full), "%s/%s", tree, path);
	for (char *slash = full + strlen(tree) + 1; (slash = strchr(slash, '/')); slash++) {
		*slash = '\0';
		mkdir(full, 0755);
		*slash = '/';
	}
	file = fopen(full, "w");
	assert_non_null(file);
	fputs(text, file);
	fclose(file);
}

/* A tree of facts: one node as this kernel's, plenty of everything, nothing limited. Tests then change a file. */
static int open_context_on_tree(void **state)
{
	strcpy(tree, "/tmp/offstage-tree-XXXXXX");
	if (open_context(state) || !mkdtemp(tree))
		return -1;
	topology_root = tree;
	put("sys/devices/system/node/online", "0\n");
	put("sys/devices/system/node/has_memory", "0\n");
	put("sys/devices/system/node/has_normal_memory", "0\n");
	put("sys/devices/system/node/node0/cpulist", "0-1023\n");
	put("sys/devices/system/node/node0/meminfo", "Node 0 MemTotal: 99999999 kB\nNode 0 MemFree: 99999999 kB\n");
	put("sys/kernel/mm/transparent_hugepage/hpage_pmd_size", "2097152\n");
	put("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n");
	put("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size advise [never] deny force\n");
	put("proc/meminfo", "MemTotal: 99999999 kB\nMemAvailable: 99999999 kB\nHugepagesize: 2048 kB\n");
	put("proc/buddyinfo", "Node 0, zone Normal 0 0 0 0 0 0 0 0 0 9999 0\n");
	put("proc/self/status", "VmLck: 0 kB\nCapEff:\t0000000000004000\nMems_allowed_list:\t0\n");
	return 0;
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *at)
{
	(void)st;
	(void)type;
	(void)at;
	return remove(path);
}

static int close_context_and_tree(void **state)
{
	int ret = close_context(state);

	return nftw(tree, remove_one, 16, FTW_DEPTH | FTW_PHYS) ? -1 : ret;
}

static struct offstage_buffer *make(uint64_t bytes, uint32_t flags)
{
	struct offstage_buffer_options options = { .size = sizeof(options), .flags = flags };
	struct offstage_buffer *buffer;

	OK(offstage_buffer_create(ctx, bytes, &options, &buffer));
	return buffer;
}

static struct offstage_buffer_info info_of(struct offstage_buffer *buffer)
{
	struct offstage_buffer_info info = { .size = sizeof(info) };

	OK(offstage_buffer_info(buffer, &info));
	return info;
}

/* Runs fn in a child that opens what it needs; the child's value is 0, or the line that failed. */
static void in_child(int (*fn)(void))
{
	pid_t child = fork();
	int status;

	if (!child) {
		alarm(60);
		_exit(fn());
	}
	assert_int_equal(waitpid(child, &status, 0), child);
	if (status)
		fail_msg("the child ended with status 0x%x (line %d modulo 256)", status, WEXITSTATUS(status));
}
/* In a child: leaves it with the line's number. */
#define EXPECT(condition) do { if (!(condition)) { \
	fprintf(stderr, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #condition, offstage_error()); \
	return __LINE__ % 256 ? __LINE__ % 256 : 1; } } while (0)

/* Is there room enough, on whichever node this thread may be when it asks for it? */
static bool room_for(uint64_t bytes)
{
	const uint64_t need = bytes + bytes / 2;
	char from[96];
	uint32_t nodes[TOPOLOGY_NODES_MAX];
	unsigned n = topology_nodes(nodes, TOPOLOGY_NODES_MAX);
	struct offstage_node_info node;

	for (unsigned i = 0; i < n; i++)
		if (topology_node(nodes[i], &node) == 0 && node.available < need)
			return false;
	return topology_memory_available(from, sizeof(from)) >= need;
}

static uint64_t huge_free(void)
{
	struct offstage_node_info node;

	return topology_node(topology_local_node(), &node) == 0 ? node.huge_free : 0;
}

/* ---- cost and contents ------------------------------------------------------------------------------------------------------ */

static void test_zero_bytes_are_a_buffer_with_no_memory(void **unused)
{
	struct offstage_buffer *buffer;
	uint64_t nodes[2] = { 7, 7 };

	(void)unused;
	buffer = make(0, 0);
	assert_null(offstage_buffer_data(buffer));
	assert_string_equal(info_of(buffer).memory, "none");
	assert_int_equal(info_of(buffer).backed, 0);
	assert_int_equal(info_of(buffer).locked, 0);
	if (HAVE_LIBNUMA) {
		OK(offstage_buffer_nodes(buffer, nodes, 2));
		assert_int_equal(nodes[0] + nodes[1], 0);
	}
	offstage_buffer_close(buffer);
	/* A shareable one is a file all the same, of no length; and can be imported. */
	buffer = make(0, OFFSTAGE_BUFFER_SHAREABLE);
	assert_true(offstage_buffer_fd(buffer) >= 0);
	{
		struct offstage_buffer *again;

		OK(offstage_buffer_import(ctx, offstage_buffer_fd(buffer), &again));
		assert_null(offstage_buffer_data(again));
		offstage_buffer_close(again);
	}
	offstage_buffer_close(buffer);
	offstage_buffer_close(NULL);
}

static void test_a_buffer_costs_its_size_rounded_up_to_a_page(void **unused)
{
	const uint64_t sizes[] = { 1, page - 1, page, page + 1, HUGE - 1, HUGE, HUGE + 1, 3 * HUGE + 12345, 33 * MiB + 7 };

	(void)unused;
	if (topology_hugetlb_free())
		SKIP("hugetlb pages are reserved on this machine, which round otherwise");
	for (size_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++) {
		uint64_t exact = (sizes[i] + page - 1) / page * page;
		struct offstage_buffer *buffer = make(sizes[i], OFFSTAGE_BUFFER_SHAREABLE);
		struct offstage_buffer_info info = info_of(buffer);
		struct stat st;

		assert_int_equal(info.requested, sizes[i]);
		assert_int_equal(info.backed, exact);
		assert_int_equal(ctx->trace.counters.backed_bytes, exact);
		assert_int_equal(ctx->trace.counters.requested_bytes, sizes[i]);
		/* What the kernel says that it costs. */
		assert_int_equal(fstat(offstage_buffer_fd(buffer), &st), 0);
		assert_int_equal((uint64_t)st.st_blocks * 512, exact);
		assert_int_equal(st.st_size, sizes[i]);
		if (info.locked) {
			assert_int_equal(info.locked, exact);
			assert_int_equal(buffers_smaps("Locked"), exact);
		}
		assert_int_equal(buffers_smaps("Rss"), exact);
		assert_int_equal((uintptr_t)offstage_buffer_data(buffer) % (sizes[i] >= HUGE ? HUGE : page), 0);
		offstage_buffer_close(buffer);
	}
}

static bool all_zero(const unsigned char *data, uint64_t bytes)
{
	return !bytes || (!data[0] && !memcmp(data, data + 1, bytes - 1));
}

static void test_memory_is_zeroed_also_where_another_buffer_was(void **unused)
{
	(void)unused;
	for (int round = 0; round < 4; round++) {
		struct offstage_buffer *buffer = make(24 * MiB + 5000, 0);

		assert_true(all_zero(offstage_buffer_data(buffer), 24 * MiB + 5000));
		memset(offstage_buffer_data(buffer), 0xa5, 24 * MiB + 5000);
		offstage_buffer_close(buffer);
	}
}

static void test_using_a_new_buffer_never_faults(void **unused)
{
	struct offstage_buffer *buffer;
	struct rusage before, after;
	volatile char *data;

	(void)unused;
	if (under_tool())
		SKIP("memory of a sanitizer or of valgrind faults too");
	buffer = make(80 * MiB + 4096, 0);
	data = offstage_buffer_data(buffer);
	getrusage(RUSAGE_SELF, &before);
	for (uint64_t at = 0; at < 80 * MiB + 4096; at += 4096)
		data[at] = 1;
	getrusage(RUSAGE_SELF, &after);
	assert_int_equal(after.ru_minflt - before.ru_minflt, 0);
	offstage_buffer_close(buffer);
}

static void test_huge_pages_are_got_as_far_as_blocks_are_free(void **unused)
{
	struct offstage_buffer *buffer;
	struct offstage_buffer_info info;
	char word[16];

	(void)unused;
	topology_thp(word, sizeof(word), false);
	if (topology_huge_page_size() != HUGE || strcmp(word, "never") == 0 || !*word)
		SKIP("transparent huge pages of 2 MiB are off on this machine (enabled is '%s')", word);
	if (huge_free() < GiB || topology_hugetlb_free())
		SKIP("fewer than 1 GiB is in free huge blocks, or hugetlb pages are reserved");
	buffer = make(64 * MiB + 4096, 0);
	info = info_of(buffer);
	assert_int_equal(info.huge, 64 * MiB);
	assert_int_equal(info.page_size, HUGE);
	if (info.locked)
		assert_string_equal(info.why, "");
	offstage_buffer_close(buffer);
}

static void test_more_than_4_gib_is_one_buffer(void **unused)
{
	const uint64_t bytes = 4 * GiB + 512 * MiB + 1;
	struct offstage_buffer *buffer;
	struct offstage_buffer_info info;
	unsigned char *data;

	(void)unused;
	if (under_tool())
		SKIP("under a sanitizer or valgrind this size takes minutes");
	if (!room_for(bytes))
		SKIP("less than 6.75 GiB of memory is available");
	buffer = make(bytes, 0);
	info = info_of(buffer);
	assert_int_equal(info.requested, bytes);
	assert_int_equal(info.backed, 4 * GiB + 512 * MiB + page);
	data = offstage_buffer_data(buffer);
	data[0] = 1;
	data[4 * GiB] = 2;
	data[bytes - 1] = 3;
	assert_int_equal(data[0] + data[4 * GiB] + data[bytes - 1], 6);
	if (HAVE_LIBNUMA) {
		uint64_t nodes[TOPOLOGY_NODES_MAX], sum = 0;

		OK(offstage_buffer_nodes(buffer, nodes, TOPOLOGY_NODES_MAX));
		for (int i = 0; i < TOPOLOGY_NODES_MAX; i++)
			sum += nodes[i];
		assert_int_equal(sum, info.backed);
	}
	offstage_buffer_close(buffer);
}

/* ---- a buffer is a file -------------------------------------------------------------------------------------------------------- */

static void send_descriptor(int socket, int fd)
{
	char byte = 0, control[CMSG_SPACE(sizeof(int))] = { 0 };
	struct iovec part = { &byte, 1 };
	struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control) };
	struct cmsghdr *header = CMSG_FIRSTHDR(&message);

	header->cmsg_level = SOL_SOCKET;
	header->cmsg_type = SCM_RIGHTS;
	header->cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(header), &fd, sizeof(int));
	assert_int_equal(sendmsg(socket, &message, 0), 1);
}

static int receive_descriptor(int socket)
{
	char byte, control[CMSG_SPACE(sizeof(int))] = { 0 };
	struct iovec part = { &byte, 1 };
	struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control) };
	int fd = -1;

	if (recvmsg(socket, &message, 0) == 1 && CMSG_FIRSTHDR(&message))
		memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(int));
	return fd;
}

static int pair[2];

/* The other process: knows a socket and nothing else. */
static int import_and_answer(void)
{
	struct offstage *own;
	struct offstage_buffer *buffer;
	struct offstage_buffer_info info = { .size = sizeof(info) };
	unsigned char *data;
	int fd = receive_descriptor(pair[1]);

	EXPECT(fd >= 0);
	EXPECT(offstage_open(NULL, &own) == 0);
	EXPECT(offstage_buffer_import(own, fd, &buffer) == 0);
	close(fd);
	EXPECT(offstage_buffer_info(buffer, &info) == 0);
	EXPECT(info.requested == 6 * MiB + 100 && info.backed == 6 * MiB + page && strcmp(info.memory, "shmem") == 0);
	data = offstage_buffer_data(buffer);
	EXPECT((uintptr_t)data % HUGE == 0);
	EXPECT(data[0] == 42 && data[6 * MiB + 99] == 43);
	data[1] = 44;
	EXPECT(write(pair[1], "", 1) == 1);
	EXPECT(offstage_buffer_fd(buffer) >= 0);
	offstage_buffer_close(buffer);
	offstage_close(own);
	return 0;
}

static void test_descriptor_passed_to_another_process_maps_the_same_bytes(void **unused)
{
	struct offstage_buffer *buffer;
	unsigned char *data;
	int status;
	pid_t child;

	(void)unused;
	if (topology_hugetlb_free())
		SKIP("hugetlb pages are reserved on this machine, which round otherwise");
	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
	/* The child is there before the buffer is: it inherits nothing of it. */
	child = fork();
	if (!child) {
		alarm(60);
		close(pair[0]);
		_exit(import_and_answer());
	}
	close(pair[1]);
	buffer = make(6 * MiB + 100, OFFSTAGE_BUFFER_SHAREABLE);
	data = offstage_buffer_data(buffer);
	data[0] = 42;
	data[6 * MiB + 99] = 43;
	send_descriptor(pair[0], offstage_buffer_fd(buffer));
	assert_int_equal(read(pair[0], &status, 1), 1);
	assert_int_equal(data[1], 44);
	assert_int_equal(waitpid(child, &status, 0), child);
	assert_int_equal(status, 0);
	close(pair[0]);
	offstage_buffer_close(buffer);
}

static void test_buffer_lives_as_long_as_somebody_has_it(void **unused)
{
	struct offstage_buffer *buffer, *again;
	struct stat st;
	int fd;

	(void)unused;
	buffer = make(4 * MiB, OFFSTAGE_BUFFER_SHAREABLE);
	*(char *)offstage_buffer_data(buffer) = 9;
	fd = dup(offstage_buffer_fd(buffer));
	offstage_buffer_close(buffer);
	assert_int_equal(fstat(fd, &st), 0);
	assert_true((uint64_t)st.st_blocks * 512 >= 4 * MiB);
	OK(offstage_buffer_import(ctx, fd, &again));
	close(fd);
	assert_int_equal(*(char *)offstage_buffer_data(again), 9);
	offstage_buffer_close(again);
}

static void test_nobody_who_has_the_file_can_cut_it_short(void **unused)
{
	struct offstage_buffer *buffer;

	(void)unused;
	buffer = make(4 * MiB, OFFSTAGE_BUFFER_SHAREABLE);
	assert_int_equal(ftruncate(offstage_buffer_fd(buffer), 4096), -1);
	assert_int_equal(errno, EPERM);
	assert_int_equal(ftruncate(offstage_buffer_fd(buffer), 8 * (off_t)MiB), -1);
	offstage_buffer_close(buffer);
}

static void test_unshareable_buffers_use_up_no_descriptors(void **unused)
{
	struct offstage_buffer *buffers[40];
	unsigned before = open_descriptors();

	(void)unused;
	for (int i = 0; i < 40; i++)
		buffers[i] = make(page, 0);
	assert_int_equal(open_descriptors(), before);
	REFUSED(offstage_buffer_fd(buffers[0]), -EOPNOTSUPP, "OFFSTAGE_BUFFER_SHAREABLE");
	for (int i = 0; i < 40; i++)
		offstage_buffer_close(buffers[i]);
}

static void test_what_is_no_buffer_is_not_imported(void **unused)
{
	struct offstage_buffer *buffer;
	char path[64];
	int pipes[2], fd;

	(void)unused;
	REFUSED(offstage_buffer_import(ctx, -1, &buffer), -EBADF, "isn't an open file descriptor");
	assert_null(buffer);
	REFUSED(offstage_buffer_import(ctx, 9999, &buffer), -EBADF, "isn't an open file descriptor");
	assert_int_equal(pipe(pipes), 0);
	REFUSED(offstage_buffer_import(ctx, pipes[0], &buffer), -EINVAL, "isn't memory");
	close(pipes[0]);
	close(pipes[1]);
	fd = open("/proc/self/status", O_RDONLY);
	REFUSED(offstage_buffer_import(ctx, fd, &buffer), -EINVAL, "isn't memory");
	close(fd);
	fd = memfd_create("foreign", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	assert_int_equal(ftruncate(fd, 8192), 0);
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	{
		int reading = open(path, O_RDONLY);

		REFUSED(offstage_buffer_import(ctx, reading, &buffer), -EINVAL, "reading and writing");
		close(reading);
	}
	assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), 0);
	REFUSED(offstage_buffer_import(ctx, fd, &buffer), -EINVAL, "sealed");
	close(fd);
	REFUSED(offstage_buffer_import(ctx, 0, NULL), -EINVAL, "no place");
}

static void test_foreign_memory_with_holes_is_filled_and_kept(void **unused)
{
	struct offstage_buffer *buffer;
	struct stat st;
	char *data;
	int fd;

	(void)unused;
	fd = memfd_create("foreign", MFD_CLOEXEC);
	assert_int_equal(ftruncate(fd, 3 * (off_t)MiB), 0);
	assert_int_equal(pwrite(fd, "x", 1, 100), 1);
	OK(offstage_buffer_import(ctx, fd, &buffer));
	data = offstage_buffer_data(buffer);
	assert_int_equal(data[100], 'x');
	assert_true(all_zero((unsigned char *)data + 101, 3 * MiB - 101));
	assert_int_equal(fstat(fd, &st), 0);
	assert_int_equal((uint64_t)st.st_blocks * 512, 3 * MiB);
	assert_int_equal(ctx->trace.counters.backed_bytes, 3 * MiB);
	offstage_buffer_close(buffer);
	close(fd);
}

/* ---- back to the system ---------------------------------------------------------------------------------------------------------- */

/*
 * When the last descriptor and the last mapping of a file without a name are gone, the kernel says that it was deleted,
 * and frees its pages. Unlike counters of free memory, that can't be other programs' doing.
 */
static int watch(int fd)
{
	int watcher = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
	char path[64];

	assert_true(watcher >= 0);
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	assert_true(inotify_add_watch(watcher, path, IN_DELETE_SELF) >= 0);
	return watcher;
}

static bool is_gone(int watcher, int timeout_ms)
{
	struct pollfd poll_for = { .fd = watcher, .events = POLLIN };
	struct inotify_event event;

	return poll(&poll_for, 1, timeout_ms) == 1 && read(watcher, &event, sizeof(event)) == sizeof(event) &&
	       event.mask & IN_DELETE_SELF;
}

static void test_last_close_frees_to_the_system(void **unused)
{
	struct offstage_buffer *buffer, *again;
	int watcher, fd;

	(void)unused;
	buffer = make(8 * MiB, OFFSTAGE_BUFFER_SHAREABLE);
	fd = dup(offstage_buffer_fd(buffer));
	watcher = watch(fd);
	offstage_buffer_close(buffer);
	assert_false(is_gone(watcher, 0));
	OK(offstage_buffer_import(ctx, fd, &again));
	close(fd);
	assert_false(is_gone(watcher, 0));
	offstage_buffer_close(again);
	assert_true(is_gone(watcher, 10000));
	close(watcher);
}

static int make_pass_and_sleep(void)
{
	struct offstage_buffer_options options = {
		.size = sizeof(options), .flags = OFFSTAGE_BUFFER_SHAREABLE, .lock = OFFSTAGE_PREFER,
	};
	struct offstage_buffer *buffer;
	struct offstage *own;

	EXPECT(offstage_open(NULL, &own) == 0);
	EXPECT(offstage_buffer_create(own, 64 * MiB, &options, &buffer) == 0);
	send_descriptor(pair[1], offstage_buffer_fd(buffer));
	pause();
	return 1;
}

static void test_killed_owner_frees_memory(void **unused)
{
	int status, fd, watcher;
	pid_t child;

	(void)unused;
	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
	child = fork();
	if (!child) {
		alarm(60);
		_exit(make_pass_and_sleep());
	}
	close(pair[1]);
	fd = receive_descriptor(pair[0]);
	close(pair[0]);
	assert_true(fd >= 0);
	watcher = watch(fd);
	close(fd);
	assert_false(is_gone(watcher, 100));
	kill(child, SIGKILL);
	assert_int_equal(waitpid(child, &status, 0), child);
	assert_true(WIFSIGNALED(status));
	assert_true(is_gone(watcher, 10000));
	close(watcher);
}

/* ---- options and limits ------------------------------------------------------------------------------------------------------------ */

static int create(uint64_t bytes, struct offstage_buffer_options options)
{
	struct offstage_buffer *buffer = (void *)1;
	int ret;

	options.size = sizeof(options);
	ret = offstage_buffer_create(ctx, bytes, &options, &buffer);
	if (ret)
		assert_null(buffer);
	else
		offstage_buffer_close(buffer);
	return ret;
}
#define CREATE(bytes, ...) create(bytes, (struct offstage_buffer_options){ __VA_ARGS__ })

static void test_every_wrong_option_is_refused(void **unused)
{
	struct { struct offstage_buffer_options o; uint32_t later; } newer = { { .size = sizeof(newer) }, 1 };
	struct offstage_buffer_options no_size = { 0 };
	struct offstage_buffer *buffer;
	const uint32_t node = 0, weight = 0;

	(void)unused;
	REFUSED(CREATE(1, .flags = 4), -EINVAL, "unknown bits 0x4");
	REFUSED(CREATE(1, .huge = 4), -EINVAL, "huge is 4");
	REFUSED(CREATE(1, .lock = 9), -EINVAL, "lock is 9");
	REFUSED(CREATE(1, .placement = 5), -EINVAL, "placement is 5");
	REFUSED(CREATE(1, .n_nodes = 1), -EINVAL, "names no nodes");
	REFUSED(CREATE(1, .placement = OFFSTAGE_WEIGHTED, .nodes = &node, .n_nodes = 1, .weights = &weight), -EINVAL, "weight");
	REFUSED(CREATE(UINT64_MAX), -ENOMEM, "more than any machine");
	REFUSED(offstage_buffer_create(ctx, 1, &no_size, &buffer), -EINVAL, "size");
	REFUSED(offstage_buffer_create(ctx, 1, &newer.o, &buffer), -E2BIG, "newer library");
	REFUSED(offstage_buffer_create(ctx, 1, NULL, NULL), -EINVAL, "no place");
	REFUSED(offstage_buffer_create(NULL, 1, NULL, &buffer), -EINVAL, "NULL");
	REFUSED(offstage_buffer_info(NULL, NULL), -EINVAL, "NULL");
	assert_null(offstage_buffer_data(NULL));
	assert_int_equal(ctx->trace.counters.buffers, 0);
}

static void test_nodes_that_will_not_do_are_named(void **unused)
{
	const uint32_t zero = 0, seven = 7;

	(void)unused;
	if (!HAVE_LIBNUMA) {
		REFUSED(CREATE(1, .placement = OFFSTAGE_BIND, .nodes = &zero, .n_nodes = 1), -EOPNOTSUPP, "OFFSTAGE_LOCAL");
		return;
	}
	REFUSED(CREATE(1, .placement = OFFSTAGE_BIND, .nodes = &seven, .n_nodes = 1), -ENODEV, "node 7 isn't online");
	put("proc/self/status", "CapEff:\t0000000000004000\nMems_allowed_list:\t1-3\n");
	REFUSED(CREATE(1, .placement = OFFSTAGE_BIND, .nodes = &zero, .n_nodes = 1), -EXDEV, "node 0 is outside");
	put("proc/self/status", "CapEff:\t0000000000004000\nMems_allowed_list:\t0\n");
	put("sys/devices/system/node/has_normal_memory", "1\n");
	REFUSED(CREATE(1, .placement = OFFSTAGE_BIND, .nodes = &zero, .n_nodes = 1), -EOPNOTSUPP, "daxctl");
	/* Two nodes, the first of them full. */
	put("sys/devices/system/node/has_normal_memory", "0-1\n");
	put("sys/devices/system/node/has_memory", "0-1\n");
	put("sys/devices/system/node/node0/meminfo", "Node 0 MemTotal: 99999999 kB\nNode 0 MemFree: 1024 kB\n");
	put("sys/devices/system/node/node1/meminfo", "Node 1 MemTotal: 99999999 kB\nNode 1 MemFree: 2048 kB\n");
	put("proc/self/status", "CapEff:\t0000000000004000\nMems_allowed_list:\t0-1\n");
	REFUSED(CREATE(4 * MiB, .placement = OFFSTAGE_BIND, .nodes = &zero, .n_nodes = 1), -ENOMEM, "must take 4.00 MiB");
	{
		const uint32_t both[] = { 1, 0 };

		REFUSED(CREATE(4 * MiB, .placement = OFFSTAGE_SPILL, .nodes = both, .n_nodes = 2), -ENOMEM, "in all");
	}
	assert_int_equal(ctx->trace.counters.buffers, 0);
	assert_int_equal(ctx->trace.counters.threads, 0);
}

static void test_memory_limits_are_named_before_anything_is_allocated(void **unused)
{
	(void)unused;
	put("proc/self/cgroup", "0::/job\n");
	put("proc/self/mountinfo", "29 25 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
	put("sys/fs/cgroup/job/memory.max", "1073741824\n");
	put("sys/fs/cgroup/job/memory.current", "805306368\n");
	REFUSED(CREATE(256 * MiB), -ENOMEM, "256.0 MiB by /sys/fs/cgroup/job/memory.max");
	put("sys/fs/cgroup/job/memory.max", "max\n");
	put("proc/meminfo", "MemTotal: 1048576 kB\nMemAvailable: 1024 kB\n");
	REFUSED(CREATE(256 * MiB), -ENOMEM, "1.00 MiB by MemAvailable");
	assert_int_equal(ctx->trace.counters.buffers, 0);
}

static void test_memlock_limit_counts_what_is_used(void **unused)
{
	(void)unused;
	put("proc/self/status", "VmLck:\t40960 kB\nCapEff:\t0000000000000000\nMems_allowed_list:\t0\n");
	if (topology_memlock_limit() == UINT64_MAX)
		SKIP("RLIMIT_MEMLOCK is unlimited here");
	REFUSED(CREATE(64 * GiB, .lock = OFFSTAGE_REQUIRE), -EPERM, "locking 64.0 GiB needs RLIMIT_MEMLOCK of at least 64.0 GiB");
	assert_non_null(strstr(offstage_error(), "(40.0 MiB used)"));
	assert_non_null(strstr(offstage_error(), "ulimit -l"));
}

/* As a user who can lock 64 KiB and no more. */
static int make_as_nobody(void)
{
	const struct rlimit small = { 65536, 65536 };
	struct offstage_buffer_options options = { .size = sizeof(options) };
	struct offstage_buffer_info info = { .size = sizeof(info) };
	struct offstage_buffer *buffer;
	struct offstage *own;

	EXPECT(setrlimit(RLIMIT_MEMLOCK, &small) == 0);
	EXPECT(getuid() != 0 || (setgid(65534) == 0 && setuid(65534) == 0));
	EXPECT(offstage_open(NULL, &own) == 0);
	EXPECT(offstage_buffer_create(own, GiB, &options, &buffer) == -EPERM);
	EXPECT(strstr(offstage_error(), "locking 1.00 GiB needs RLIMIT_MEMLOCK of at least 1.00 GiB, it is 64.0 KiB (0 bytes used)"));
	EXPECT(strstr(offstage_error(), "ulimit -l") && strstr(offstage_error(), "lock=prefer"));
	/* What fits is locked; what doesn't is told. */
	EXPECT(offstage_buffer_create(own, 65536, &options, &buffer) == 0);
	EXPECT(offstage_buffer_info(buffer, &info) == 0);
	EXPECT(info.locked == 65536);
	offstage_buffer_close(buffer);
	options.lock = OFFSTAGE_PREFER;
	EXPECT(offstage_buffer_create(own, 4 * MiB, &options, &buffer) == 0);
	EXPECT(offstage_buffer_info(buffer, &info) == 0);
	EXPECT(info.locked == 0 && strstr(info.why, "not locked") && strstr(info.why, "64.0 KiB"));
	offstage_buffer_close(buffer);
	offstage_close(own);
	return 0;
}

static void test_user_without_memlock_is_told_need_have_and_remedy(void **unused)
{
	(void)unused;
	if (topology_hugetlb_free())
		SKIP("hugetlb pages are reserved on this machine, which need no locking");
	in_child(make_as_nobody);
}

static int make_without_descriptors(void)
{
	struct rlimit none = { 3, 3 };
	struct offstage_buffer_options options = { .size = sizeof(options), .flags = OFFSTAGE_BUFFER_SHAREABLE };
	struct offstage_buffer *buffer;
	struct offstage *own;

	options.lock = OFFSTAGE_PREFER;
	EXPECT(offstage_open(NULL, &own) == 0);
	for (int i = 3; i < 256; i++)
		close(i);
	EXPECT(setrlimit(RLIMIT_NOFILE, &none) == 0);
	EXPECT(offstage_buffer_create(own, MiB, &options, &buffer) == -EMFILE);
	EXPECT(strstr(offstage_error(), "RLIMIT_NOFILE"));
	EXPECT(offstage_buffer_import(own, 0, &buffer) == -EMFILE);
	offstage_close(own);
	return 0;
}

static void test_no_descriptor_left_is_said_so(void **unused)
{
	(void)unused;
	if (under_tool())
		SKIP("valgrind keeps descriptors of its own");
	in_child(make_without_descriptors);
}

static int make_without_address_space(void)
{
	unsigned before = buffer_mappings();
	struct rlimit limit;
	struct offstage_buffer_options options = { .size = sizeof(options), .lock = OFFSTAGE_PREFER };
	struct offstage_buffer *buffer;
	struct offstage *own;

	EXPECT(offstage_open(NULL, &own) == 0);
	limit.rlim_cur = limit.rlim_max = proc_bytes("/proc/self/status", "VmSize") + 32 * MiB;
	EXPECT(setrlimit(RLIMIT_AS, &limit) == 0);
	EXPECT(offstage_buffer_create(own, 64 * MiB, &options, &buffer) == -ENOMEM);
	EXPECT(strstr(offstage_error(), "RLIMIT_AS"));
	EXPECT(own->trace.counters.backed_bytes == 0);
	EXPECT(buffer_mappings() == before);
	EXPECT(offstage_buffer_create(own, 8 * MiB, &options, &buffer) == 0);
	offstage_buffer_close(buffer);
	offstage_close(own);
	return 0;
}

static void test_no_address_space_left_is_said_so(void **unused)
{
	(void)unused;
	if (under_tool())
		SKIP("a sanitizer, or valgrind, needs the address space for itself");
	if (!room_for(64 * MiB))
		SKIP("a node has less than 96 MiB of free memory");
	in_child(make_without_address_space);
}

static int make_longer_than_files_may_be(void)
{
	const struct rlimit limit = { MiB, MiB };
	struct offstage_buffer *buffer;
	struct offstage *own;

	EXPECT(setrlimit(RLIMIT_FSIZE, &limit) == 0);
	EXPECT(offstage_open(NULL, &own) == 0);
	own->lock = OFFSTAGE_PREFER;
	EXPECT(offstage_buffer_create(own, 2 * MiB + 1, NULL, &buffer) == -EFBIG);
	EXPECT(strstr(offstage_error(), "RLIMIT_FSIZE"));
	EXPECT(offstage_buffer_create(own, MiB, NULL, &buffer) == 0);
	offstage_buffer_close(buffer);
	offstage_close(own);
	return 0;
}

static void test_file_size_limit_is_an_error_and_no_signal(void **unused)
{
	(void)unused;
	in_child(make_longer_than_files_may_be);
}

static void test_budget_is_a_hard_ceiling(void **unused)
{
	struct offstage_buffer *buffer;

	(void)unused;
	ctx->budget = 2 * page;
	REFUSED(CREATE(2 * page + 1), -EDQUOT, "budget");
	buffer = make(page + 1, 0);
	REFUSED(CREATE(1), -EDQUOT, "budget of 8192 bytes leaves, of which 8192 bytes are in use");
	offstage_buffer_close(buffer);
	OK(CREATE(1));
	ctx->budget = 1;
	REFUSED(CREATE(1), -EDQUOT, "budget");
	OK(CREATE(0));
}

#define RACERS 8

static pthread_barrier_t all_made;

static void *race(void *arg)
{
	struct offstage_buffer *buffer = NULL;
	int ret;

	(void)arg;
	pthread_barrier_wait(&all_made);
	ret = offstage_buffer_create(ctx, MiB, NULL, &buffer);
	pthread_barrier_wait(&all_made);
	offstage_buffer_close(buffer);
	return (void *)(intptr_t)ret;
}

static void test_threads_cannot_pass_the_budget_together(void **unused)
{
	pthread_t threads[RACERS];

	(void)unused;
	ctx->budget = 3 * MiB;
	assert_int_equal(pthread_barrier_init(&all_made, NULL, RACERS), 0);
	for (int round = 0; round < 5; round++) {
		int made = 0;

		for (int i = 0; i < RACERS; i++)
			assert_int_equal(pthread_create(&threads[i], NULL, race, NULL), 0);
		for (int i = 0; i < RACERS; i++) {
			void *ret;

			pthread_join(threads[i], &ret);
			assert_true((intptr_t)ret == 0 || (intptr_t)ret == -EDQUOT);
			made += (intptr_t)ret == 0;
		}
		assert_int_equal(made, 3);
		assert_int_equal(ctx->trace.counters.backed_bytes, 0);
	}
	pthread_barrier_destroy(&all_made);
}

static void test_each_failing_allocation_leaves_nothing(void **unused)
{
	struct offstage_buffer *buffer;
	unsigned before = open_descriptors();
	int failed = 0, fd = memfd_create("foreign", MFD_CLOEXEC);

	(void)unused;
	assert_int_equal(ftruncate(fd, (off_t)page), 0);
	for (uint64_t nth = 1; nth <= 6; nth++) {
		for (int import = 0; import < 2; import++) {
			int ret;

			heap_fail_nth(nth);
			ret = import ? offstage_buffer_import(ctx, fd, &buffer) :
				       offstage_buffer_create(ctx, 96 * MiB, NULL, &buffer);
			heap_fail_nth(0);
			if (!ret) {
				offstage_buffer_close(buffer);
				continue;
			}
			failed++;
			assert_int_equal(ret, -ENOMEM);
			assert_null(buffer);
			assert_non_null(strstr(offstage_error(), "heap"));
			assert_int_equal(open_descriptors(), before + 1);
			assert_int_equal(buffer_mappings(), mappings_before);
			assert_int_equal(ctx->trace.counters.backed_bytes, 0);
			assert_int_equal(ctx->refs, 1);
		}
	}
	close(fd);
	assert_true(failed >= 2);
}

/* ---- which memory ---------------------------------------------------------------------------------------------------------------------- */

static void test_private_memory_is_taken_where_shared_has_no_huge_pages(void **unused)
{
	struct offstage_buffer *buffer;
	struct offstage_buffer_info info;
	uint64_t blocks;

	(void)unused;
	topology_root = "";
	blocks = huge_free();
	topology_root = tree;
	if (blocks < 256 * MiB)
		SKIP("fewer than 256 MiB is in free huge blocks on this machine");
	put("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size advise never [deny] force\n");
	buffer = make(8 * MiB, 0);
	info = info_of(buffer);
	assert_string_equal(info.memory, "private");
	assert_int_equal(info.huge, 8 * MiB);
	if (info.locked)
		assert_string_equal(info.why, "");
	assert_true(all_zero(offstage_buffer_data(buffer), 8 * MiB));
	offstage_buffer_close(buffer);
	/* What has to be shareable is a file with base pages, and says why. */
	buffer = make(8 * MiB, OFFSTAGE_BUFFER_SHAREABLE);
	info = info_of(buffer);
	assert_string_equal(info.memory, "shmem");
	assert_int_equal(info.huge, 0);
	assert_int_equal(info.page_size, page);
	assert_non_null(strstr(info.why, "shmem_enabled"));
	offstage_buffer_close(buffer);
	REFUSED(CREATE(8 * MiB, .huge = OFFSTAGE_REQUIRE, .flags = OFFSTAGE_BUFFER_SHAREABLE), -ENOSR, "shmem_enabled");
	OK(CREATE(8 * MiB, .huge = OFFSTAGE_REQUIRE));
	/* Small ones gain nothing from it. */
	buffer = make(HUGE - page, 0);
	assert_string_equal(info_of(buffer).memory, "shmem");
	assert_non_null(strstr(info_of(buffer).why, "smaller than a huge page"));
	offstage_buffer_close(buffer);
	/* Where the administrator wants no huge pages there are none. */
	put("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n");
	buffer = make(8 * MiB, 0);
	info = info_of(buffer);
	assert_string_equal(info.memory, "shmem");
	assert_int_equal(info.huge, 0);
	assert_non_null(strstr(info.why, "transparent huge pages are off"));
	offstage_buffer_close(buffer);
	REFUSED(CREATE(8 * MiB, .huge = OFFSTAGE_REQUIRE), -ENOSR, "vm.nr_hugepages");
}

static void test_huge_pages_are_asked_for_no_further_than_free_blocks_go(void **unused)
{
	struct offstage_buffer *buffer;
	struct offstage_buffer_info info;
	uint64_t blocks;

	(void)unused;
	topology_root = "";
	blocks = huge_free();
	topology_root = tree;
	if (blocks < 256 * MiB || page != 4096)
		SKIP("fewer than 256 MiB is in free huge blocks on this machine, or its pages aren't 4 KiB");
	put("proc/buddyinfo", "Node 0, zone Normal 0 0 0 0 0 0 0 0 9 5 0\n");
	buffer = make(32 * MiB + 4096, 0);
	info = info_of(buffer);
	if (strcmp(info.memory, "shmem") == 0 && !info.huge) {
		offstage_buffer_close(buffer);
		SKIP("this kernel collapses no shared memory");
	}
	assert_int_equal(info.huge, 10 * MiB);
	assert_int_equal(info.backed, 32 * MiB + 4096);
	assert_int_equal(info.page_size, 4096);
	assert_non_null(strstr(info.why, "22.0 MiB in base pages: free huge blocks were for 10.0 MiB"));
	offstage_buffer_close(buffer);
	REFUSED(CREATE(32 * MiB, .huge = OFFSTAGE_REQUIRE), -ENOSR, "required for 32.0 MiB and got for 10.0 MiB");
	REFUSED(CREATE(MiB, .huge = OFFSTAGE_REQUIRE), -ENOSR, "less than one of 2.00 MiB");
	buffer = make(10 * MiB, 0);
	assert_int_equal(info_of(buffer).huge, 10 * MiB);
	offstage_buffer_close(buffer);
}

static void test_base_pages_are_had_when_asked_for(void **unused)
{
	struct offstage_buffer_options options = { .size = sizeof(options), .huge = OFFSTAGE_NEVER, .lock = OFFSTAGE_NEVER };
	struct offstage_buffer *buffer;
	struct offstage_buffer_info info;

	(void)unused;
	OK(offstage_buffer_create(ctx, 8 * MiB, &options, &buffer));
	info = info_of(buffer);
	assert_int_equal(info.huge, 0);
	assert_int_equal(info.locked, 0);
	assert_int_equal(info.page_size, page);
	assert_string_equal(info.why, "base pages were asked for");
	assert_int_equal(proc_bytes("/proc/self/status", "VmLck"), locked_before);
	offstage_buffer_close(buffer);
}

/* What runs only where it may change the machine: writes a setting, and gives what it was. */
static bool set_system(const char *path, const char *value, char *before, size_t size)
{
	FILE *file = fopen(path, "r+");
	bool ok;

	if (!file)
		return false;
	if (before && !fgets(before, (int)size, file))
		*before = '\0';
	rewind(file);
	ok = fputs(value, file) >= 0;
	return fclose(file) == 0 && ok;
}

static void test_reserved_hugetlb_pages_come_first(void **unused)
{
	static const char pool[] = "/proc/sys/vm/nr_hugepages";
	struct offstage_buffer *buffer, *twin;
	struct offstage_buffer_info info;
	char before[32], wanted[32];
	unsigned pages = 24 * topology_nodes(NULL, 0);	/* the kernel spreads them */

	(void)unused;
	snprintf(wanted, sizeof(wanted), "%u", pages);
	if (!getenv("OFFSTAGE_TEST_SYSTEM"))
		SKIP("it would reserve hugetlb pages on this machine: set OFFSTAGE_TEST_SYSTEM=1 to allow it");
	if (!set_system(pool, wanted, before, sizeof(before)) || topology_hugetlb_free() < pages * HUGE) {
		set_system(pool, before, NULL, 0);
		SKIP("hugetlb pages couldn't be reserved");
	}
	buffer = make(32 * MiB - 1, OFFSTAGE_BUFFER_SHAREABLE);
	info = info_of(buffer);
	assert_string_equal(info.memory, "hugetlb");
	assert_int_equal(info.backed, 32 * MiB);
	assert_int_equal(info.huge, 32 * MiB);
	assert_int_equal(info.locked, 32 * MiB);
	assert_string_equal(info.why, "");
	assert_true(all_zero(offstage_buffer_data(buffer), 32 * MiB));
	OK(offstage_buffer_import(ctx, offstage_buffer_fd(buffer), &twin));
	assert_string_equal(info_of(twin).memory, "hugetlb");
	*(char *)offstage_buffer_data(buffer) = 5;
	assert_int_equal(*(char *)offstage_buffer_data(twin), 5);
	offstage_buffer_close(twin);
	/* More than the pool has left comes from elsewhere, and so does what would be rounded up by much. */
	twin = make(20 * MiB, 0);
	assert_string_not_equal(info_of(twin).memory, "hugetlb");
	offstage_buffer_close(twin);
	twin = make(3 * MiB, 0);
	assert_string_not_equal(info_of(twin).memory, "hugetlb");
	assert_int_equal(info_of(twin).backed, 3 * MiB);
	offstage_buffer_close(twin);
	offstage_buffer_close(buffer);
	set_system(pool, before, NULL, 0);
}

static void test_shared_memory_that_may_be_huge_costs_no_more(void **unused)
{
	static const char word[] = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
	static const char *const words[] = { "always", "within_size", "advise" };
	char before[96], *end, *begin;

	(void)unused;
	if (!getenv("OFFSTAGE_TEST_SYSTEM"))
		SKIP("it would change shmem_enabled on this machine: set OFFSTAGE_TEST_SYSTEM=1 to allow it");
	for (int i = 0; i < 3; i++) {
		struct offstage_buffer *buffer;
		struct stat st;

		if (!set_system(word, words[i], before, sizeof(before)))
			SKIP("shmem_enabled can't be written");
		buffer = make(8 * MiB + 1, OFFSTAGE_BUFFER_SHAREABLE);
		begin = strchr(before, '[');
		end = strchr(before, ']');
		assert_true(begin && end);
		*end = '\0';
		set_system(word, begin + 1, NULL, 0);
		assert_int_equal(info_of(buffer).huge, 8 * MiB);
		assert_int_equal(fstat(offstage_buffer_fd(buffer), &st), 0);
		assert_int_equal((uint64_t)st.st_blocks * 512, 8 * MiB + page);
		offstage_buffer_close(buffer);
	}
}

/* ---- placement ------------------------------------------------------------------------------------------------------------------------------ */

static void test_bytes_are_on_the_node_that_was_named(void **unused)
{
	const uint32_t node = topology_local_node(), weight = 3;
	uint64_t nodes[TOPOLOGY_NODES_MAX];

	(void)unused;
	if (!HAVE_LIBNUMA)
		SKIP("this build can't place: %s", LIBNUMA_WHY);
	for (uint32_t kind = OFFSTAGE_LOCAL; kind <= OFFSTAGE_SPILL; kind++) {
		struct offstage_buffer_options options = { .size = sizeof(options), .placement = kind };
		struct offstage_buffer *buffer;

		if (kind) {
			options.nodes = &node;
			options.n_nodes = 1;
		}
		if (kind == OFFSTAGE_WEIGHTED)
			options.weights = &weight;
		OK(offstage_buffer_create(ctx, 6 * MiB + 1, &options, &buffer));
		assert_int_equal(info_of(buffer).nodes, 1);
		OK(offstage_buffer_nodes(buffer, nodes, TOPOLOGY_NODES_MAX));
		assert_int_equal(nodes[node], info_of(buffer).backed);
		REFUSED(offstage_buffer_nodes(buffer, NULL, 1), -EINVAL, "no array");
		OK(offstage_buffer_nodes(buffer, NULL, 0));
		offstage_buffer_close(buffer);
	}
}

static void test_bytes_are_shared_between_nodes_as_asked(void **unused)
{
	uint32_t all[TOPOLOGY_NODES_MAX], two[2], n = topology_nodes(all, TOPOLOGY_NODES_MAX), found = 0;
	const uint32_t weights[2] = { 3, 1 };
	uint64_t nodes[TOPOLOGY_NODES_MAX];
	struct offstage_buffer *buffer;

	(void)unused;
	for (uint32_t i = 0; i < n && found < 2; i++) {
		struct offstage_node_info node;

		if (topology_node(all[i], &node) == 0 && node.flags == (OFFSTAGE_NODE_NORMAL | OFFSTAGE_NODE_ALLOWED) &&
		    node.available > 256 * MiB)
			two[found++] = all[i];
	}
	if (!HAVE_LIBNUMA || found < 2)
		SKIP("this machine has fewer than two usable nodes with memory, or this build can't place");
	{
		struct offstage_buffer_options options = { .size = sizeof(options), .nodes = two, .n_nodes = 2 };

		options.placement = OFFSTAGE_WEIGHTED;
		options.weights = weights;
		OK(offstage_buffer_create(ctx, 64 * MiB, &options, &buffer));
		OK(offstage_buffer_nodes(buffer, nodes, TOPOLOGY_NODES_MAX));
		assert_int_equal(nodes[two[0]], 48 * MiB);
		assert_int_equal(nodes[two[1]], 16 * MiB);
		assert_int_equal(info_of(buffer).nodes, 2);
		offstage_buffer_close(buffer);
		options.placement = OFFSTAGE_INTERLEAVE;
		options.weights = NULL;
		OK(offstage_buffer_create(ctx, 64 * MiB, &options, &buffer));
		OK(offstage_buffer_nodes(buffer, nodes, TOPOLOGY_NODES_MAX));
		assert_int_equal(nodes[two[0]], 32 * MiB);
		assert_int_equal(nodes[two[1]], 32 * MiB);
		offstage_buffer_close(buffer);
	}
}

static void test_policy_of_the_process_is_never_changed(void **unused)
{
#if HAVE_LIBNUMA
	unsigned long before[16] = { 0 }, after[16] = { 0 };
	uint32_t node = topology_local_node();
	struct offstage_buffer_options options = {
		.size = sizeof(options), .placement = OFFSTAGE_BIND, .nodes = &node, .n_nodes = 1,
	};
	struct offstage_buffer *buffer;
	int policy, policy_after;

	(void)unused;
	assert_int_equal(get_mempolicy(&policy, before, sizeof(before) * 8, NULL, 0), 0);
	OK(offstage_buffer_create(ctx, 96 * MiB, &options, &buffer));
	assert_int_equal(get_mempolicy(&policy_after, after, sizeof(after) * 8, NULL, 0), 0);
	assert_int_equal(policy, policy_after);
	assert_memory_equal(before, after, sizeof(before));
	/* The buffer's own is what was asked for. */
	assert_int_equal(get_mempolicy(&policy, after, sizeof(after) * 8, offstage_buffer_data(buffer), MPOL_F_ADDR), 0);
	assert_int_equal(policy, MPOL_BIND);
	assert_int_equal(after[node / 64] >> node % 64 & 1, 1);
	offstage_buffer_close(buffer);
#else
	(void)unused;
	SKIP("this build has no libnuma: %s", LIBNUMA_WHY);
#endif
}

static void test_facts_of_nodes_are_handed_out(void **unused)
{
	struct offstage_node_info node = { .size = sizeof(node) };
	uint32_t n = topology_nodes(NULL, 0);

	(void)unused;
	for (uint32_t i = 0; i < n; i++) {
		OK(offstage_node_info(ctx, i, &node));
		assert_true(node.total > 0 && node.available <= node.total);
		assert_int_equal(node.size, sizeof(node));
	}
	REFUSED(offstage_node_info(ctx, n, &node), -ENOENT, "nodes with memory");
	node.size = 0;
	REFUSED(offstage_node_info(ctx, 0, &node), -EINVAL, "size");
}

/* ---- fork ------------------------------------------------------------------------------------------------------------------------------------ */

static struct offstage_buffer *inherited;

static int use_what_was_inherited(void)
{
	struct offstage_buffer_info info = { .size = sizeof(info) };
	struct offstage_buffer *buffer;
	char *data = inherited->data;
	bool kept_away = inherited->info.flags & OFFSTAGE_BUFFER_DONTFORK;
	unsigned char resident;
	uint64_t nodes[4];

	EXPECT(offstage_buffer_create(ctx, 1, NULL, &buffer) == -ECHILD && !buffer);
	EXPECT(offstage_buffer_import(ctx, 0, &buffer) == -ECHILD);
	EXPECT(offstage_buffer_info(inherited, &info) == -ECHILD);
	EXPECT(offstage_buffer_nodes(inherited, nodes, 4) == -ECHILD);
	EXPECT(offstage_buffer_fd(inherited) == -ECHILD);
	EXPECT(offstage_buffer_data(inherited) == NULL);
	EXPECT(strstr(offstage_error(), "fork"));
	/* The mapping isn't there with DONTFORK; what the child has at its place since then stays. */
	EXPECT((mincore(data, page, &resident) < 0 && errno == ENOMEM) == kept_away);
	if (kept_away)
		EXPECT(mmap(data, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == data);
	offstage_buffer_close(inherited);
	offstage_close(ctx);
	if (kept_away)
		*data = 1;
	else
		EXPECT(mincore(data, page, &resident) < 0 && errno == ENOMEM);
	return 0;
}

static void test_child_of_fork_can_only_close(void **unused)
{
	(void)unused;
	for (uint32_t flags = 0; flags < 4; flags++) {
		inherited = make(4 * MiB, flags);
		*(char *)offstage_buffer_data(inherited) = 77;
		in_child(use_what_was_inherited);
		assert_int_equal(*(char *)offstage_buffer_data(inherited), 77);
		offstage_buffer_close(inherited);
	}
}

#define T(test) cmocka_unit_test_setup_teardown(test, open_context, close_context)
#define ON_TREE(test) cmocka_unit_test_setup_teardown(test, open_context_on_tree, close_context_and_tree)

int main(void)
{
	const struct CMUnitTest tests[] = {
		T(test_zero_bytes_are_a_buffer_with_no_memory),
		T(test_a_buffer_costs_its_size_rounded_up_to_a_page),
		T(test_memory_is_zeroed_also_where_another_buffer_was),
		T(test_using_a_new_buffer_never_faults),
		T(test_huge_pages_are_got_as_far_as_blocks_are_free),
		T(test_more_than_4_gib_is_one_buffer),
		T(test_descriptor_passed_to_another_process_maps_the_same_bytes),
		T(test_buffer_lives_as_long_as_somebody_has_it),
		T(test_nobody_who_has_the_file_can_cut_it_short),
		T(test_unshareable_buffers_use_up_no_descriptors),
		T(test_what_is_no_buffer_is_not_imported),
		T(test_foreign_memory_with_holes_is_filled_and_kept),
		T(test_last_close_frees_to_the_system),
		T(test_killed_owner_frees_memory),
		T(test_every_wrong_option_is_refused),
		ON_TREE(test_nodes_that_will_not_do_are_named),
		ON_TREE(test_memory_limits_are_named_before_anything_is_allocated),
		ON_TREE(test_memlock_limit_counts_what_is_used),
		T(test_user_without_memlock_is_told_need_have_and_remedy),
		T(test_no_descriptor_left_is_said_so),
		T(test_no_address_space_left_is_said_so),
		T(test_file_size_limit_is_an_error_and_no_signal),
		T(test_budget_is_a_hard_ceiling),
		T(test_threads_cannot_pass_the_budget_together),
		T(test_each_failing_allocation_leaves_nothing),
		ON_TREE(test_private_memory_is_taken_where_shared_has_no_huge_pages),
		ON_TREE(test_huge_pages_are_asked_for_no_further_than_free_blocks_go),
		T(test_base_pages_are_had_when_asked_for),
		T(test_reserved_hugetlb_pages_come_first),
		T(test_shared_memory_that_may_be_huge_costs_no_more),
		T(test_bytes_are_on_the_node_that_was_named),
		T(test_bytes_are_shared_between_nodes_as_asked),
		T(test_policy_of_the_process_is_never_changed),
		T(test_facts_of_nodes_are_handed_out),
		T(test_child_of_fork_can_only_close),
	};

	/* This is about the provider that needs no module, also where there is one. */
	setenv("OFFSTAGE_PROVIDER", "user", 1);
	return cmocka_run_group_tests(tests, NULL, NULL);
}
