/* SPDX-License-Identifier: MIT */
/*
 * What fails leaves nothing. The kernel's fault injection makes the first allocation or copy of a call fail, then the
 * second, and so on until the call gets through untouched (/proc/thread-self/fail-nth); after each, all that the module
 * counts is as it was. A call may succeed though one of its allocations failed, by a way round; then its result must be
 * true. Memory that is lost is found at the end of the run, by kmemleak.
 */
#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include "module.h"
#include "../entries.h"

#define TRIES_MAX 2000	/* no call here makes as many allocations */

static int nth = -1;	/* /proc/thread-self/fail-nth */
static int device = -1, buffer = -1;
static char *mapping;	/* of the buffer */
#define BUFFER_BYTES (HUGE + 3 * 4096)

/* ---- injection -------------------------------------------------------------------------------------------------------------- */

static void inject(unsigned int n)
{
	char text[16];
	int length = snprintf(text, sizeof(text), "%u", n);

	/* What is left of the last injection may hit this very call. */
	if (pwrite(nth, text, length, 0) != length && pwrite(nth, text, length, 0) != length)
		fail_msg("fail-nth can't be set: %s", strerror(errno));
}

/* Stops it. true: the injection was hit, by the call and not by this one. */
static bool was_injected(void)
{
	char text[16] = "";
	bool hit = pread(nth, text, sizeof(text) - 1, 0) > 0 && strtoul(text, NULL, 10) == 0;

	inject(0);
	return hit;
}

static void set(const char *directory, const char *name, const char *value)
{
	char path[128];

	snprintf(path, sizeof(path), "/sys/kernel/debug/%s/%s", directory, name);
	if (!write_text(path, value))
		fail_msg("%s can't be written", path);
}

/* The next allocation of a huge page that comes after this many fails, whoever makes it; times < 0: all of them. */
static void fail_huge_pages(unsigned int after, int times)
{
	char text[16];

	set("fail_page_alloc", "min-order", "9");
	snprintf(text, sizeof(text), "%u", after * 512 + (after > 0));
	set("fail_page_alloc", "space", text);
	snprintf(text, sizeof(text), "%d", times);
	set("fail_page_alloc", "times", text);
	set("fail_page_alloc", "probability", "100");
}

static void fail_no_more(void)
{
	set("fail_page_alloc", "probability", "0");
	set("fail_page_alloc", "space", "0");
	set("fail_page_alloc", "min-order", "0");
}

/* ---- what may not change ------------------------------------------------------------------------------------------------------ */

struct state {
	uint64_t in_use, orphaned, reserved, used_file, used_user, used_all;
	int next_descriptor, descriptors;
};

static struct state state(void)
{
	struct offstage_ioc_info info = { .size = sizeof(info) };
	int next = dup(0);

	close(next);
	if (ioctl(device, OFFSTAGE_IOC_INFO, &info))
		fail_msg("OFFSTAGE_IOC_INFO: %s", strerror(errno));
	return (struct state){
		.in_use = on_all_nodes("in_use"),
		.orphaned = on_all_nodes("orphaned"),
		.reserved = on_all_nodes("reserved"),
		.used_file = info.used_file,
		.used_user = info.used_user,
		.used_all = info.used_all,
		.next_descriptor = next,
		.descriptors = (int)entries("/proc/self/fd"),
	};
}

static void assert_state(const char *what, unsigned int n, const struct state *before)
{
	struct state after;

	/* An orphan for a moment: somebody else's CPU had looked at the page. A minute is for ever. */
	for (int i = 0; i < 6000; i++) {
		after = state();
		if (memcmp(before, &after, sizeof(after)) == 0)
			return;
		usleep(10000);
	}
	fail_msg("%s, failure %u: in use %llu, was %llu; orphaned %llu, was %llu; reserved %llu, was %llu; "
		 "charged %llu %llu %llu, was %llu %llu %llu; descriptors %d, were %d", what, n,
		 (unsigned long long)after.in_use, (unsigned long long)before->in_use,
		 (unsigned long long)after.orphaned, (unsigned long long)before->orphaned,
		 (unsigned long long)after.reserved, (unsigned long long)before->reserved,
		 (unsigned long long)after.used_file, (unsigned long long)after.used_user,
		 (unsigned long long)after.used_all, (unsigned long long)before->used_file,
		 (unsigned long long)before->used_user, (unsigned long long)before->used_all,
		 after.descriptors, before->descriptors);
}

/*
 * Makes the call with its first, second… allocation failing, until none is left to fail. The call gives what undo
 * takes back, or a negative errno: one of the errors, a list that ends in 0. At least one must be seen.
 */
static void fail_each(const char *what, long (*call)(void), void (*undo)(long), const int *errors)
{
	struct state before = state();
	unsigned int n, failures = 0;
	bool hit = true;

	for (n = 1; hit && n < TRIES_MAX; n++) {
		long result;
		int i;

		inject(n);
		result = call();
		hit = was_injected();
		if (result >= 0) {
			undo(result);
		} else {
			for (i = 0; errors[i] && errors[i] != -result; i++)
				;
			if (!errors[i])
				fail_msg("%s, failure %u: %s", what, n, strerror(-result));
			failures++;
			if (!hit)
				fail_msg("%s: %s with nothing injected", what, strerror(-result));
		}
		assert_state(what, n, &before);
	}
	if (hit)
		fail_msg("%s has no end of allocations", what);
	if (!failures)
		fail_msg("%s: nothing that it needs failed, in %u tries", what, n - 1);
	printf("# %s: %u of %u injections made it fail\n", what, failures, n - 2);
}

#define NO_MEMORY ((const int[]){ ENOMEM, EFAULT, 0 })	/* EFAULT: copies from and to the caller are made to fail, too */

static long result_of(long ret)
{
	return ret < 0 ? -errno : ret;
}

static void nothing(long unused)
{
	(void)unused;
}

static void close_it(long fd)
{
	close(fd);
}

/* ---- the device and its calls --------------------------------------------------------------------------------------------------- */

static long open_device(void)
{
	return result_of(open("/dev/offstage", O_RDWR | O_CLOEXEC));
}

static void test_open_that_fails_leaves_nothing(void **unused)
{
	(void)unused;
	fail_each("open", open_device, close_it, NO_MEMORY);
}

static long call_info(void)
{
	struct offstage_ioc_info info = { .size = sizeof(info) };

	return result_of(ioctl(device, OFFSTAGE_IOC_INFO, &info));
}

static long call_node(void)
{
	struct offstage_ioc_node node = { .size = sizeof(node) };

	return result_of(ioctl(device, OFFSTAGE_IOC_NODE, &node));
}

static void test_questions_that_fail_leave_nothing(void **unused)
{
	(void)unused;
	fail_each("info", call_info, nothing, (const int[]){ EFAULT, 0 });
	fail_each("node", call_node, nothing, (const int[]){ EFAULT, 0 });
}

static long call_buffer(void)
{
	uint64_t bytes[8];
	struct offstage_ioc_buffer info = { .size = sizeof(info), .n_nodes = 8, .node_bytes = (uintptr_t)bytes };

	return result_of(ioctl(buffer, OFFSTAGE_IOC_BUFFER, &info));
}

static void test_question_about_a_buffer_that_fails_leaves_nothing(void **unused)
{
	(void)unused;
	fail_each("buffer", call_buffer, nothing, NO_MEMORY);
}

static struct offstage_ioc_create wanted;

static long call_create(void)
{
	struct offstage_ioc_create c = wanted;

	return create(device, &c);
}

/* What it says of itself is so, by whatever way it was got. */
static void check_and_close(long fd)
{
	uint64_t bytes[8] = { 0 }, sum = 0, backed = (wanted.bytes + 4095) / 4096 * 4096, huge;
	struct offstage_ioc_buffer info = { .size = sizeof(info), .n_nodes = 8, .node_bytes = (uintptr_t)bytes };
	char *data;

	assert_int_equal(ioctl(fd, OFFSTAGE_IOC_BUFFER, &info), 0);
	for (int i = 0; i < 8; i++)
		sum += bytes[i];
	assert_int_equal(info.requested, wanted.bytes);
	assert_int_equal(info.backed, backed);
	assert_int_equal(sum, backed);
	huge = wanted.huge == OFFSTAGE_IOC_HUGE_NEVER ? 0 : backed / HUGE * HUGE;
	if (wanted.huge == OFFSTAGE_IOC_HUGE_REQUIRE)
		assert_int_equal(info.huge, huge);
	else
		assert_true(info.huge <= huge);
	data = map(fd, backed, 0);
	for (uint64_t at = 0; at < backed; at += HUGE)
		data[at] = 1;
	if (info.huge == 0)
		assert_int_equal(smaps(data, "FilePmdMapped"), 0);
	munmap(data, backed);
	close(fd);
}

static void test_creation_that_fails_leaves_nothing(void **unused)
{
	static const int errors[] = { ENOMEM, EFAULT, ENOSR, 0 };
	static uint32_t nodes[] = { 1, 0 }, weights[] = { 2, 1 };

	(void)unused;
	wanted = creation(BUFFER_BYTES);
	fail_each("create, huge pages and a tail", call_create, check_and_close, NO_MEMORY);
	wanted = creation(2 * HUGE);
	wanted.huge = OFFSTAGE_IOC_HUGE_REQUIRE;
	fail_each("create, huge pages only", call_create, check_and_close, errors);
	wanted = creation(10 * 4096);
	wanted.huge = OFFSTAGE_IOC_HUGE_NEVER;
	fail_each("create, base pages", call_create, check_and_close, NO_MEMORY);
	if (!two_nodes())
		return;
	wanted = creation(3 * 4096);
	wanted.placement = OFFSTAGE_IOC_WEIGHTED;
	wanted.n_nodes = 2;
	wanted.nodes = (uintptr_t)nodes;
	wanted.weights = (uintptr_t)weights;
	fail_each("create, weighted", call_create, check_and_close, NO_MEMORY);
	wanted.placement = OFFSTAGE_IOC_SPILL;
	wanted.weights = 0;
	fail_each("create, spilling", call_create, check_and_close, NO_MEMORY);
}

static void test_creation_from_the_pool_that_fails_gives_the_pages_back(void **unused)
{
	static uint32_t node;

	(void)unused;
	reserve(device, 0, 3 * HUGE);
	wanted = on_node(&node, 2 * HUGE + 4096);
	wanted.flags = OFFSTAGE_IOC_CREATE_POOL_ONLY;
	fail_each("create, from the pool", call_create, check_and_close, NO_MEMORY);
	assert_int_equal(node_count(0, "free"), 3 * HUGE);
	reserve(device, 0, 0);
}

/* ---- huge pages that aren't there --------------------------------------------------------------------------------------------- */

static void test_huge_pages_that_are_refused_become_base_pages_or_a_named_error(void **unused)
{
	struct offstage_ioc_buffer info = { .size = sizeof(info) };
	struct state before = state();
	struct offstage_ioc_create c;
	uint64_t failed = on_all_nodes("failed");
	int fd;

	(void)unused;
	fail_huge_pages(0, -1);
	c = creation(2 * HUGE);
	c.huge = OFFSTAGE_IOC_HUGE_REQUIRE;
	fd = create(device, &c);
	assert_int_equal(fd, -ENOSR);
	assert_state("required huge pages", 0, &before);
	assert_true(on_all_nodes("failed") > failed);
	c = creation(2 * HUGE);
	fd = create(device, &c);
	fail_no_more();
	assert_true(fd >= 0);
	assert_int_equal(ioctl(fd, OFFSTAGE_IOC_BUFFER, &info), 0);
	assert_int_equal(info.huge, 0);
	assert_int_equal(info.backed, 2 * HUGE);
	close(fd);
	assert_state("preferred huge pages", 0, &before);
	/* The second of two: one of each. */
	fail_huge_pages(1, 1);
	c = creation(2 * HUGE);
	fd = create(device, &c);
	fail_no_more();
	assert_true(fd >= 0);
	info = (struct offstage_ioc_buffer){ .size = sizeof(info) };
	assert_int_equal(ioctl(fd, OFFSTAGE_IOC_BUFFER, &info), 0);
	assert_int_equal(info.huge, HUGE);
	close(fd);
	assert_state("one of each", 0, &before);
}

/* A page that can't be had ends the growth, whichever it is: the pool says what it got, and keeps it. */
static void test_pool_that_cannot_grow_says_what_it_got(void **unused)
{
	struct state before = state();

	(void)unused;
	for (unsigned int after = 0; after < 6; after++) {
		struct offstage_ioc_reserve r = { .size = sizeof(r), .bytes = 6 * HUGE };

		fail_huge_pages(after, -1);
		assert_int_equal(ioctl(device, OFFSTAGE_IOC_RESERVE, &r), 0);
		assert_int_equal(r.bytes, after * HUGE);
		assert_int_equal(node_count(0, "reserved"), after * HUGE);
		assert_int_equal(node_count(0, "free"), after * HUGE);
		/* Not an error that is silent for people. */
		assert_false(write_text("/sys/class/offstage/offstage/node0/reserved", "12M"));
		assert_int_equal(errno, ENOMEM);
		fail_no_more();
		assert_true(write_text("/sys/class/offstage/offstage/node0/reserved", "12M"));
		reserve(device, 0, 0);
		assert_state("growing", after, &before);
	}
}

static long call_reserve(void)
{
	struct offstage_ioc_reserve r = { .size = sizeof(r), .bytes = 2 * HUGE };
	long ret = result_of(ioctl(device, OFFSTAGE_IOC_RESERVE, &r));

	/* What it did before its answer couldn't be written stays done. */
	if (ret < 0 && node_count(0, "reserved"))
		reserve(device, 0, 0);
	return ret;
}

static long write_reserved(void)
{
	int fd = open("/sys/class/offstage/offstage/node0/reserved", O_WRONLY);
	long ret = result_of(fd);

	if (fd >= 0) {
		ret = result_of(write(fd, "4M", 2));
		close(fd);
	}
	return ret;
}

static void reserve_nothing(long unused)
{
	(void)unused;
	assert_int_equal(node_count(0, "reserved"), 2 * HUGE);
	reserve(device, 0, 0);
}

static void test_growth_that_fails_leaves_the_pool_as_it_was(void **unused)
{
	(void)unused;
	fail_each("reserve", call_reserve, reserve_nothing, NO_MEMORY);
	fail_each("writing reserved", write_reserved, reserve_nothing, NO_MEMORY);
}

/* ---- what people read ------------------------------------------------------------------------------------------------------------ */

static long read_whole(const char *path)
{
	char text[4096];
	int fd = open(path, O_RDONLY);
	long ret = result_of(fd);

	if (fd >= 0) {
		ret = result_of(read(fd, text, sizeof(text)));
		close(fd);
	}
	return ret;
}

static long read_list(void)
{
	return read_whole("/sys/kernel/debug/offstage/buffers");
}

static long read_count(void)
{
	return read_whole("/sys/class/offstage/offstage/node0/free");
}

static long length;

static void check_length(long n)
{
	assert_int_equal(n, length);
}

/* A list that can't be made is an error, and not an empty one. */
static void test_what_cannot_be_read_is_not_told_in_part(void **unused)
{
	(void)unused;
	length = read_list();
	assert_true(length > 0);
	fail_each("the list of buffers", read_list, check_length, NO_MEMORY);
	length = read_count();
	assert_true(length > 0);
	fail_each("a pool's count", read_count, check_length, NO_MEMORY);
}

/* ---- mappings ------------------------------------------------------------------------------------------------------------------ */

static long map_file(int fd, uint64_t bytes, int flags)
{
	void *data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | flags, fd, 0);

	return data == MAP_FAILED ? -errno : (long)data;
}

static long map_device(void)
{
	return map_file(device, BUFFER_BYTES, 0);
}

static long map_device_populated(void)
{
	return map_file(device, BUFFER_BYTES, MAP_POPULATE);
}

static long map_buffer(void)
{
	return map_file(buffer, BUFFER_BYTES, 0);
}

static void touch_and_unmap(long at)
{
	char *data = (char *)at;

	data[0] = data[HUGE - 1] = data[HUGE] = data[BUFFER_BYTES - 1] = 1;
	munmap(data, BUFFER_BYTES);
}

static void test_mapping_that_fails_leaves_nothing(void **unused)
{
	(void)unused;
	fail_each("mmap of the device", map_device, touch_and_unmap, (const int[]){ ENOMEM, 0 });
	fail_each("mmap of the device, populated", map_device_populated, touch_and_unmap, (const int[]){ ENOMEM, 0 });
	fail_each("mmap of a buffer", map_buffer, touch_and_unmap, (const int[]){ ENOMEM, 0 });
}

static long touch(void)
{
	*(volatile char *)mapping = 1;
	*(volatile char *)(mapping + BUFFER_BYTES - 1) = 1;
	return 0;
}

static long populate(void)
{
	return result_of(madvise(mapping, BUFFER_BYTES, MADV_POPULATE_WRITE));
}

static void forget(long unused)
{
	(void)unused;
	assert_int_equal(mapping[7], 42);
	assert_int_equal(madvise(mapping, BUFFER_BYTES, MADV_DONTNEED), 0);
}

/* The kernel tries a fault again; nobody dies of it. */
static void test_faults_that_fail_are_tried_again(void **unused)
{
	struct state before = state();
	bool hit = true;

	(void)unused;
	mapping[7] = 42;
	forget(0);
	for (unsigned int n = 1; hit && n < TRIES_MAX; n++) {
		inject(n);
		touch();
		hit = was_injected();
		forget(0);
		assert_state("touching", n, &before);
	}
	assert_false(hit);
	fail_each("populating", populate, forget, NO_MEMORY);
}

static long split(void)
{
	return result_of(munmap(mapping + 4096, 4096));
}

static void put_back(long unused)
{
	(void)unused;
	assert_ptr_equal(mmap(mapping, BUFFER_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, buffer, 0), mapping);
	assert_int_equal(mapping[7], 42);
}

#define ELSEWHERE ((void *)0x100000000000)	/* no mmap that is free to choose comes here */

static long move(void)
{
	void *data = mremap(mapping, BUFFER_BYTES, BUFFER_BYTES, MREMAP_MAYMOVE | MREMAP_FIXED, ELSEWHERE);

	return data == MAP_FAILED ? -errno : (long)data;
}

static void move_back(long at)
{
	if (mremap((void *)at, BUFFER_BYTES, BUFFER_BYTES, MREMAP_MAYMOVE | MREMAP_FIXED, mapping) != mapping)
		fail_msg("mremap back: %s", strerror(errno));
	assert_int_equal(mapping[7], 42);
}

static void test_changes_of_a_mapping_that_fail_leave_it_whole(void **unused)
{
	(void)unused;
	mapping[7] = 42;
	fail_each("munmap in part", split, put_back, (const int[]){ ENOMEM, 0 });
	fail_each("mremap", move, move_back, (const int[]){ ENOMEM, 0 });
}

static long fork_it(void)
{
	/* Not fork(): the C library's own work in the child isn't what is tried here. */
	long child = syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);

	if (child == 0)
		_exit(mapping[7] != 42);
	return result_of(child);
}

static void wait_for(long child)
{
	int status;

	assert_int_equal(waitpid(child, &status, 0), child);
	assert_true(WIFEXITED(status));
	assert_int_equal(WEXITSTATUS(status), 0);
}

static void test_fork_that_fails_leaves_nothing(void **unused)
{
	(void)unused;
	mapping[7] = 42;
	/* EAGAIN is what fork says of no memory in some places. */
	fail_each("fork with a mapping", fork_it, wait_for, (const int[]){ ENOMEM, EAGAIN, EFAULT, 0 });
}

/* ---- the module itself ----------------------------------------------------------------------------------------------------------- */

static int module = -1;

static long load(const char *parameters)
{
	return result_of(syscall(SYS_finit_module, module, parameters, 0));
}

/* The loader's own allocations aren't ours to try: some of the kernel's tracing warns when it has no memory. */
static unsigned int made_by_the_loader(void)
{
	char left[16] = "";

	inject(1000000);
	/* Refused after the loader has done most of its work, and before the module's own begins. */
	assert_int_equal(load("limit_file=rubbish"), -EINVAL);
	assert_true(pread(nth, left, sizeof(left) - 1, 0) > 0);
	inject(0);
	return 1000000 - strtoul(left, NULL, 10);
}

static void test_module_that_cannot_be_loaded_leaves_nothing(void **unused)
{
	static const char filter[] = "/sys/module/kunit/parameters/filter_glob";
	const char *build = getenv("OFFSTAGE_VM_BUILD"), *kernel = getenv("OFFSTAGE_VM");
	/* Loading takes a second with KASAN: every fifth there, and every one in the debug kernel. */
	unsigned int step = kernel && strcmp(kernel, "kasan") == 0 ? 5 : 1;
	unsigned int first, n, tried = 0, failures = 0;
	char path[256];
	bool hit = true;

	(void)unused;
	snprintf(path, sizeof(path), "%s/kmod/offstage.ko", build ? build : ".");
	module = open(path, O_RDONLY | O_CLOEXEC);
	if (module < 0)
		SKIP("%s isn't there", path);
	/* The suites have had their turn. */
	if (access(filter, F_OK) == 0)
		assert_true(write_text(filter, "none.none"));
	munmap(mapping, BUFFER_BYTES);
	close(buffer);
	close(device);
	assert_int_equal(syscall(SYS_delete_module, "offstage", O_NONBLOCK), 0);
	first = made_by_the_loader() + 1;
	for (n = first; hit && n < first + TRIES_MAX; n += step, tried++) {
		long ret;

		inject(n);
		ret = load("reserve=0:4M");
		hit = was_injected();
		if (ret < 0 && ret != -ENOMEM && ret != -EFAULT)
			fail_msg("loading, failure %u: %s", n, strerror(-ret));
		failures += ret < 0;
		/* Not that it fails in silence: loaded is loaded whole. */
		if (ret == 0 && (access("/dev/offstage", F_OK) || node_count(0, "reserved") > 4 * MiB))
			fail_msg("loading, failure %u: it is loaded, and not all there", n);
		if (hit && ret == 0 && syscall(SYS_delete_module, "offstage", O_NONBLOCK))
			fail_msg("after failure %u, the module can't be unloaded: %s", n, strerror(errno));
	}
	printf("# loading: %u of %u injections made it fail, after %u of the loader's\n", failures, tried - 1, first);
	assert_false(hit);
	assert_true(failures > 0);
	assert_int_equal(node_count(0, "reserved"), 4 * MiB);
	device = device_open();
	reserve(device, 0, 0);
	close(make(device, HUGE));
	close(device);
	close(module);
}

/* ---- what the kernel must have --------------------------------------------------------------------------------------------------- */

static int begin(void **unused)
{
	(void)unused;
	nth = open("/proc/thread-self/fail-nth", O_RDWR | O_CLOEXEC);
	if (nth < 0)
		return -1;
	/* Allocations that can wait are most of them. */
	set("failslab", "ignore-gfp-wait", "N");
	set("failslab", "verbose", "0");
	set("fail_page_alloc", "ignore-gfp-wait", "N");
	set("fail_page_alloc", "ignore-gfp-highmem", "N");
	set("fail_page_alloc", "min-order", "0");
	set("fail_page_alloc", "verbose", "0");
	if (access("/sys/kernel/debug/fail_usercopy", F_OK) == 0)
		set("fail_usercopy", "verbose", "0");
	device = device_open();
	buffer = make(device, BUFFER_BYTES);
	mapping = map(buffer, BUFFER_BYTES, 0);
	/* The first of everything, the C library's streams among it, is done before anything is counted. */
	state();
	return 0;
}

static void test_failures_are_injected(void **unused)
{
	(void)unused;
	SKIP("this kernel injects no failures (CONFIG_FAILSLAB, CONFIG_FAIL_PAGE_ALLOC, debugfs); the debug and kasan kernels do");
}

/*
 * The C library has each thread registered for restartable sequences, which the kernel writes to whenever it moves a
 * thread to another CPU; a failure that is injected there kills. It can be told not to, before it starts.
 */
static void without_rseq(char **argv)
{
	static const char name[] = "GLIBC_TUNABLES", off[] = "glibc.pthread.rseq=0";
	const char *is = getenv(name);

	if (is && strstr(is, off))
		return;
	setenv(name, off, 1);
	execv("/proc/self/exe", argv);
}

int main(int argc, char **argv)
{
	const struct CMUnitTest none[] = { cmocka_unit_test(test_failures_are_injected) };
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_open_that_fails_leaves_nothing),
		cmocka_unit_test(test_questions_that_fail_leave_nothing),
		cmocka_unit_test(test_question_about_a_buffer_that_fails_leaves_nothing),
		cmocka_unit_test(test_creation_that_fails_leaves_nothing),
		cmocka_unit_test(test_creation_from_the_pool_that_fails_gives_the_pages_back),
		cmocka_unit_test(test_huge_pages_that_are_refused_become_base_pages_or_a_named_error),
		cmocka_unit_test(test_pool_that_cannot_grow_says_what_it_got),
		cmocka_unit_test(test_growth_that_fails_leaves_the_pool_as_it_was),
		cmocka_unit_test(test_what_cannot_be_read_is_not_told_in_part),
		cmocka_unit_test(test_mapping_that_fails_leaves_nothing),
		cmocka_unit_test(test_faults_that_fail_are_tried_again),
		cmocka_unit_test(test_changes_of_a_mapping_that_fail_leave_it_whole),
		cmocka_unit_test(test_fork_that_fails_leaves_nothing),
		cmocka_unit_test(test_module_that_cannot_be_loaded_leaves_nothing),
	};

	if (access("/proc/thread-self/fail-nth", F_OK) || access("/sys/kernel/debug/failslab", F_OK) ||
	    access("/sys/kernel/debug/fail_page_alloc", F_OK))
		return cmocka_run_group_tests(none, NULL, NULL);
	(void)argc;
	without_rseq(argv);
	return cmocka_run_group_tests(tests, begin, NULL);
}
