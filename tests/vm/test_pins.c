/* SPDX-License-Identifier: MIT */
/*
 * Memory of buffers that others hold: O_DIRECT, pipes, io_uring's fixed buffers, and a device that pins for long, as an
 * RDMA NIC or a GPU does (tests/kmod/offstage_pin.c stands for it). What is pinned outlives its buffer, and nobody else
 * gets it before. See module.h.
 */
#include <liburing.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include "module.h"

#define PIN "/dev/offstage_pin"

/* What a write to the pinning device says. */
struct pin { uint64_t address, bytes; };

static int load_pin(void **unused)
{
	const char *build = getenv("OFFSTAGE_VM_BUILD");
	char path[512];
	int fd, ret;

	(void)unused;
	snprintf(path, sizeof(path), "%s/tests/kmod/offstage_pin.ko", build ? build : "build");
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0) {
		printf("skipped: %s: %s\n", path, strerror(errno));
		return 0;
	}
	ret = syscall(SYS_finit_module, fd, "", 0);
	close(fd);
	if (ret && errno != EEXIST)
		printf("skipped: %s can't be loaded: %s\n", path, strerror(errno));
	fflush(stdout);
	return 0;
}

static int unload_pin(void **unused)
{
	(void)unused;
	return access(PIN, F_OK) == 0 ? syscall(SYS_delete_module, "offstage_pin", O_NONBLOCK) : 0;
}

#define NEEDS_PIN() do { (void)unused; if (access(PIN, F_OK)) skip(); } while (0)

static int pin(const void *address, uint64_t bytes)
{
	struct pin range = { (uintptr_t)address, bytes };
	int fd = open(PIN, O_RDWR | O_CLOEXEC);

	if (fd < 0 || write(fd, &range, sizeof(range)) != sizeof(range))
		fail_msg("%s: %s", PIN, strerror(errno));
	return fd;
}

static uint64_t used_by_user(void)
{
	struct offstage_ioc_info info = { .size = sizeof(info) };
	int device = device_open();

	assert_int_equal(ioctl(device, OFFSTAGE_IOC_INFO, &info), 0);
	close(device);
	return info.used_user;
}

static void test_direct_io_reaches_the_memory(void **unused)
{
	int device = device_open(), fd = make(device, 2 * HUGE), disk = open("/dev/nvme0n1", O_RDWR | O_DIRECT | O_CLOEXEC);
	char *data = map(fd, 2 * HUGE, 0);

	(void)unused;
	if (disk < 0)
		SKIP("there is no /dev/nvme0n1 to write to");
	memset(data, 0x5b, HUGE);
	assert_int_equal(pwrite(disk, data, HUGE, 0), HUGE);
	assert_int_equal(pread(disk, data + HUGE, HUGE, 0), HUGE);
	assert_memory_equal(data, data + HUGE, HUGE);
	close(disk);
	munmap(data, 2 * HUGE);
	close(fd);
	close(device);
	assert_all_is_free();
}

static void test_pinned_pages_outlive_their_buffer_and_stay_charged(void **unused)
{
	int device = device_open(), fd = make(device, HUGE + 8192), pipe_ends[2];
	char *data = map(fd, HUGE + 8192, 0), got[4096];
	struct iovec iov[2] = { { data, 4096 }, { data + HUGE, 4096 } };

	(void)unused;
	memset(data, 0x3c, HUGE + 8192);
	assert_int_equal(pipe(pipe_ends), 0);
	/* vmsplice pins a page for as long as it is in the pipe: here the huge one, and one of two base pages. */
	assert_int_equal(vmsplice(pipe_ends[1], iov, 2, 0), 8192);
	munmap(data, HUGE + 8192);
	close(fd);
	close(device);
	assert_falls_to("in_use", 0);
	assert_int_equal(on_all_nodes("orphaned"), HUGE + 4096);
	assert_int_equal(used_by_user(), HUGE + 4096);
	sleep(2);	/* whoever looks after orphans has looked, and left them */
	for (int half = 0; half < 2; half++) {
		assert_int_equal(read(pipe_ends[0], got, 4096), 4096);
		for (int i = 0; i < 4096; i++)
			assert_int_equal(got[i], 0x3c);
	}
	close(pipe_ends[0]);
	close(pipe_ends[1]);
	assert_all_is_free();
	assert_int_equal(used_by_user(), 0);
}

static void test_pool_gets_its_pinned_pages_back_clean(void **unused)
{
	uint32_t node = 0;
	struct offstage_ioc_create c = on_node(&node, 2 * HUGE);
	int device = device_open(), fd, pipe_ends[2];
	struct iovec iov;
	char *data;

	(void)unused;
	reserve(device, 0, 2 * HUGE);
	c.flags = OFFSTAGE_IOC_CREATE_POOL_ONLY;
	fd = create(device, &c);
	assert_true(fd >= 0);
	data = map(fd, 2 * HUGE, 0);
	memset(data, 0x3c, 2 * HUGE);
	assert_int_equal(pipe(pipe_ends), 0);
	iov = (struct iovec){ data + HUGE, 4096 };
	assert_int_equal(vmsplice(pipe_ends[1], &iov, 1, 0), 4096);
	munmap(data, 2 * HUGE);
	close(fd);
	assert_falls_to("in_use", 0);
	assert_int_equal(node_count(0, "reserved"), 2 * HUGE);
	assert_int_equal(node_count(0, "free"), HUGE);
	assert_int_equal(create(device, &c), -ENOMEM);	/* not while it is pinned */
	close(pipe_ends[0]);
	close(pipe_ends[1]);
	assert_all_is_free();
	assert_int_equal(node_count(0, "free"), 2 * HUGE);
	fd = create(device, &c);
	assert_true(fd >= 0);
	data = map(fd, 2 * HUGE, 0);
	for (uint64_t i = 0; i < 2 * HUGE; i++)
		if (data[i])
			fail_msg("byte %llu isn't zero", (unsigned long long)i);
	munmap(data, 2 * HUGE);
	close(fd);
	reserve(device, 0, 0);
	close(device);
	assert_all_is_free();
}

static void test_pinning_is_no_way_around_a_limit(void **unused)
{
	static const char limit[] = "/sys/module/offstage/parameters/limit_user";
	uint64_t before = number_in(limit);
	struct offstage_ioc_create c;
	int pipes[8][2], n, fd;

	(void)unused;
	assert_true(write_text(limit, "8M"));
	for (n = 0; n < 8; n++) {
		int device = device_open();
		struct iovec iov = { NULL, 4096 };

		c = creation(HUGE);
		fd = create(device, &c);
		if (fd < 0)
			break;
		iov.iov_base = map(fd, HUGE, 0);
		assert_int_equal(pipe(pipes[n]), 0);
		assert_int_equal(vmsplice(pipes[n][1], &iov, 1, 0), 4096);
		munmap(iov.iov_base, HUGE);
		close(fd);
		close(device);
	}
	assert_int_equal(n, 4);
	assert_int_equal(fd, -EDQUOT);
	assert_int_equal(c.limit, OFFSTAGE_IOC_LIMIT_USER);
	while (n-- > 0) {
		close(pipes[n][0]);
		close(pipes[n][1]);
	}
	assert_all_is_free();
	assert_true(write_number(limit, before));
}

static void test_device_pins_for_long_at_2_mib_and_at_4k(void **unused)
{
	int device = device_open(), fd = make(device, 4 * HUGE + 12288), pinned, second;
	char *data = map(fd, 4 * HUGE + 12288, 0), *odd = map(fd, HUGE, 4096);
	char got[64];

	NEEDS_PIN();
	memset(data, 0x11, 4 * HUGE + 12288);
	pinned = pin(data, 4 * HUGE + 12288);
	second = pin(odd, HUGE);		/* where no huge entry fits */
	data[4096 + 5] = 0x22;
	assert_int_equal(pread(second, got, sizeof(got), 0), sizeof(got));
	assert_int_equal(got[5], 0x22);
	close(second);
	munmap(odd, HUGE);
	assert_int_equal(pread(pinned, got, sizeof(got), 4 * HUGE), sizeof(got));
	assert_int_equal(got[0], 0x11);
	munmap(data, 4 * HUGE + 12288);
	close(fd);
	close(pinned);
	close(device);
	assert_all_is_free();
}

static void test_killed_process_leaves_what_is_pinned_to_the_device(void **unused)
{
	int device = device_open(), pinned, status, go[2];
	char got[4096], byte;
	pid_t child;

	NEEDS_PIN();
	pinned = open(PIN, O_RDWR | O_CLOEXEC);
	assert_true(pinned >= 0);
	assert_int_equal(pipe(go), 0);
	child = fork();
	if (child == 0) {
		int fd = make(device, 3 * HUGE);
		char *data = map(fd, 3 * HUGE, 0);
		struct pin range = { (uintptr_t)data + HUGE, HUGE };

		memset(data, 0x44, 3 * HUGE);
		if (write(pinned, &range, sizeof(range)) != sizeof(range) || write(go[1], "x", 1) != 1)
			_exit(1);
		pause();
	}
	close(go[1]);	/* a child that fails ends the read */
	assert_int_equal(read(go[0], &byte, 1), 1);
	kill(child, SIGKILL);
	waitpid(child, &status, 0);
	assert_true(WIFSIGNALED(status));
	assert_falls_to("in_use", 0);
	assert_int_equal(on_all_nodes("orphaned"), HUGE);
	/* Whoever comes now gets other memory. */
	for (int i = 0; i < 4; i++) {
		int fd = make(device, 8 * HUGE);
		char *data = map(fd, 8 * HUGE, 0);

		memset(data, 0x55, 8 * HUGE);
		munmap(data, 8 * HUGE);
		close(fd);
	}
	assert_int_equal(pread(pinned, got, sizeof(got), HUGE - sizeof(got)), sizeof(got));
	for (size_t i = 0; i < sizeof(got); i++)
		assert_int_equal(got[i], 0x44);
	close(pinned);
	close(go[0]);
	close(device);
	assert_all_is_free();
}

static void test_io_uring_reads_and_writes_by_fixed_buffers(void **unused)
{
	int device = device_open(), fd = make(device, 2 * HUGE), disk = open("/dev/nvme0n1", O_RDWR | O_DIRECT | O_CLOEXEC), ret;
	char *data = map(fd, 2 * HUGE, 0);
	struct iovec iov = { data, 2 * HUGE };
	struct io_uring_cqe *cqe;
	struct io_uring_sqe *sqe;
	struct io_uring ring;

	(void)unused;
	if (disk < 0)
		SKIP("there is no /dev/nvme0n1 to write to");
	ret = io_uring_queue_init(4, &ring, 0);
	if (ret < 0)
		SKIP("io_uring can't be used here: %s", strerror(-ret));
	memset(data, 0x6d, HUGE);
	ret = io_uring_register_buffers(&ring, &iov, 1);
	if (ret == -EOPNOTSUPP) {	/* before 6.5 it takes no file's memory but shmem and hugetlb */
		io_uring_queue_exit(&ring);
		close(disk);
		munmap(data, 2 * HUGE);
		close(fd);
		close(device);
		SKIP("this kernel's io_uring has no fixed buffers of a file's memory");
	}
	assert_int_equal(ret, 0);
	for (int reading = 0; reading < 2; reading++) {
		sqe = io_uring_get_sqe(&ring);
		if (reading)
			io_uring_prep_read_fixed(sqe, disk, data + HUGE, HUGE / 4, 0, 0);
		else
			io_uring_prep_write_fixed(sqe, disk, data, HUGE / 4, 0, 0);
		assert_int_equal(io_uring_submit(&ring), 1);
		assert_int_equal(io_uring_wait_cqe(&ring, &cqe), 0);
		assert_int_equal(cqe->res, HUGE / 4);
		io_uring_cqe_seen(&ring, cqe);
	}
	assert_memory_equal(data, data + HUGE, HUGE / 4);
	/* The ring holds them, whatever becomes of the buffer; it lets go after its last close, in its own time. */
	munmap(data, 2 * HUGE);
	close(fd);
	close(device);
	assert_falls_to("in_use", 0);
	assert_int_equal(on_all_nodes("orphaned"), 2 * HUGE);
	io_uring_queue_exit(&ring);
	close(disk);
	assert_all_is_free();
}

static void test_forked_child_shares_what_is_pinned(void **unused)
{
	int device = device_open(), fd = make(device, HUGE), pinned, status;
	char *data = map(fd, HUGE, 0), got;

	NEEDS_PIN();
	pinned = pin(data, HUGE);
	if (fork() == 0) {
		data[100] = 0x66;	/* no copy on write: the device sees it */
		_exit(0);
	}
	wait(&status);
	assert_int_equal(data[100], 0x66);
	data[101] = 0x67;
	assert_int_equal(pread(pinned, &got, 1, 100), 1);
	assert_int_equal(got, 0x66);
	assert_int_equal(pread(pinned, &got, 1, 101), 1);
	assert_int_equal(got, 0x67);
	close(pinned);
	munmap(data, HUGE);
	close(fd);
	close(device);
	assert_all_is_free();
}

static void test_memory_that_failed_is_never_used_again(void **unused)
{
	uint32_t node = 0;
	struct offstage_ioc_create c = on_node(&node, 2 * HUGE);
	int device = device_open(), status, fd;

	(void)unused;
	reserve(device, 0, 2 * HUGE);
	c.flags = OFFSTAGE_IOC_CREATE_POOL_ONLY;
	if (fork() == 0) {
		char *data;

		fd = create(device, &c);
		if (fd < 0)
			_exit(1);
		data = mmap(NULL, 2 * HUGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
		data[0] = data[HUGE] = 1;
		/* What the kernel does when the memory controller reports an error there. */
		_exit(madvise(data + HUGE + 4096, 4096, MADV_HWPOISON) && errno == EINVAL ? 77 : 0);
	}
	wait(&status);
	assert_all_is_free();
	if (WIFEXITED(status) && WEXITSTATUS(status) == 77) {
		reserve(device, 0, 0);
		SKIP("this kernel can't be told that memory has failed");
	}
	assert_int_equal(node_count(0, "reserved"), HUGE);
	assert_int_equal(node_count(0, "free"), HUGE);
	assert_int_equal(create(device, &c), -ENOMEM);
	c.bytes = HUGE;
	close(create(device, &c));
	reserve(device, 0, 0);
	close(device);
	assert_all_is_free();
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_direct_io_reaches_the_memory),
		cmocka_unit_test(test_pinned_pages_outlive_their_buffer_and_stay_charged),
		cmocka_unit_test(test_pool_gets_its_pinned_pages_back_clean),
		cmocka_unit_test(test_pinning_is_no_way_around_a_limit),
		cmocka_unit_test(test_device_pins_for_long_at_2_mib_and_at_4k),
		cmocka_unit_test(test_killed_process_leaves_what_is_pinned_to_the_device),
		cmocka_unit_test(test_io_uring_reads_and_writes_by_fixed_buffers),
		cmocka_unit_test(test_forked_child_shares_what_is_pinned),
		cmocka_unit_test(test_memory_that_failed_is_never_used_again),
	};

	return cmocka_run_group_tests(tests, load_pin, unload_pin);
}
