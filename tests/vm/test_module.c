/* SPDX-License-Identifier: MIT */
/* The module's promises: the ABI, buffers and their life, pools, limits. See module.h. */
#include <sched.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include "module.h"

/* ---- info and the rules of structs --------------------------------------------------------------------------------------- */

static void test_info_says_abi_features_and_limits(void **unused)
{
	struct offstage_ioc_info info = { .size = sizeof(info) };
	int device = device_open();

	(void)unused;
	assert_int_equal(ioctl(device, OFFSTAGE_IOC_INFO, &info), 0);
	assert_int_equal(info.abi, OFFSTAGE_ABI);
	assert_int_equal(info.huge_size, HUGE);
	assert_true(info.features & OFFSTAGE_FEATURE_POOLS);
	assert_true(info.limit_user > 0 && info.limit_all > 0);
	assert_int_equal(info.used_file, 0);
	close(device);
}

static void test_structs_of_other_versions_are_taken(void **unused)
{
	struct { struct offstage_ioc_info info; uint64_t later; } longer = { { .size = sizeof(longer) }, 0 };
	struct offstage_ioc_info shorter;
	int device = device_open();

	(void)unused;
	assert_int_equal(ioctl(device, OFFSTAGE_IOC_INFO, &longer), 0);
	longer.info.size = sizeof(longer);
	longer.later = 1;
	assert_int_equal(ioctl(device, OFFSTAGE_IOC_INFO, &longer), -1);
	assert_int_equal(errno, E2BIG);
	memset(&shorter, 0x55, sizeof(shorter));
	shorter.size = 8;
	shorter.abi = 0;
	assert_int_equal(ioctl(device, OFFSTAGE_IOC_INFO, &shorter), 0);
	assert_int_equal(shorter.abi, OFFSTAGE_ABI);
	assert_int_equal(shorter.features, 0x55555555);	/* beyond the caller's struct */
	shorter.size = 3;
	assert_int_equal(ioctl(device, OFFSTAGE_IOC_INFO, &shorter), -1);
	assert_int_equal(errno, EINVAL);
	shorter.size = 1 << 30;
	assert_int_equal(ioctl(device, OFFSTAGE_IOC_INFO, &shorter), -1);
	close(device);
}

#ifdef __x86_64__
/* ioctl() as a 32-bit process calls it; the pointer has 32 bits, too. */
static int ioctl_32(int fd, unsigned int cmd, void *at)
{
	int ret;

	__asm__ volatile("int $0x80" : "=a"(ret) : "a"(54), "b"(fd), "c"(cmd), "d"((uint32_t)(uintptr_t)at)
			 : "memory", "r8", "r9", "r10", "r11");
	return ret;
}

static void test_process_of_32_bits_makes_the_same_calls(void **unused)
{
	int status;

	(void)unused;
	if (access("/proc/sys/abi/vsyscall32", F_OK))
		SKIP("this kernel runs no 32-bit processes");
	if (fork() == 0) {
		int device = open("/dev/offstage", O_RDWR);
		struct offstage_ioc_create *c = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0);
		struct offstage_ioc_info *info = (void *)(c + 1);

		*c = creation(HUGE + 5);
		*info = (struct offstage_ioc_info){ .size = sizeof(*info) };
		if (ioctl_32(device, OFFSTAGE_IOC_CREATE, c) || ioctl_32(device, OFFSTAGE_IOC_INFO, info))
			_exit(1);
		_exit(info->used_file != HUGE + 4096 || info->abi != OFFSTAGE_ABI);
	}
	wait(&status);
	assert_true(WIFEXITED(status));
	assert_int_equal(WEXITSTATUS(status), 0);
	assert_all_is_free();
}
#endif

static void test_questions_can_be_asked_again_with_the_same_struct(void **unused)
{
	struct offstage_ioc_node node = { .size = sizeof(node) };
	struct offstage_ioc_buffer info = { .size = sizeof(info) };
	int device = device_open(), fd = make(device, HUGE);

	(void)unused;
	for (int i = 0; i < 2; i++) {
		assert_int_equal(ioctl(device, OFFSTAGE_IOC_NODE, &node), 0);
		assert_int_equal(ioctl(fd, OFFSTAGE_IOC_BUFFER, &info), 0);
	}
	close(fd);
	close(device);
}

static void test_bad_calls_are_refused_and_leave_nothing(void **unused)
{
	int device = device_open(), buffer;
	uint32_t nodes[2] = { 0, 0 }, weights[2] = { 1, 0 };
	struct offstage_ioc_create c;

	(void)unused;
#define BAD(err, ...) do { c = creation(HUGE); __VA_ARGS__; assert_int_equal(create(device, &c), -(err)); } while (0)
	BAD(EINVAL, c.bytes = 0);
	BAD(EINVAL, c.flags = 1u << 31);
	BAD(EINVAL, c.placement = 9);
	BAD(EINVAL, c.huge = 3);
	BAD(EINVAL, c.reserved = 1);
	BAD(EINVAL, c.size = 8);
	BAD(E2BIG, c.size = 4096 - 8);
	BAD(ENOMEM, c.bytes = UINT64_MAX);
	BAD(ENOSR, c.bytes = 4096, c.huge = OFFSTAGE_IOC_HUGE_REQUIRE);
	BAD(EINVAL, c.n_nodes = 1);
	BAD(EINVAL, c.placement = OFFSTAGE_IOC_BIND);
	BAD(EINVAL, c.placement = OFFSTAGE_IOC_BIND, c.n_nodes = 2, c.nodes = (uintptr_t)nodes);
	BAD(EINVAL, c.placement = OFFSTAGE_IOC_INTERLEAVE, c.n_nodes = 2, c.nodes = (uintptr_t)nodes);
	BAD(EINVAL, c.placement = OFFSTAGE_IOC_INTERLEAVE, c.n_nodes = 65, c.nodes = (uintptr_t)nodes);
	BAD(EINVAL, c.placement = OFFSTAGE_IOC_WEIGHTED, c.n_nodes = 1, c.nodes = (uintptr_t)nodes);
	BAD(EINVAL, c.placement = OFFSTAGE_IOC_WEIGHTED, c.n_nodes = 1, c.nodes = (uintptr_t)nodes, c.weights = (uintptr_t)(weights + 1));
	BAD(EFAULT, c.placement = OFFSTAGE_IOC_BIND, c.n_nodes = 1, c.nodes = 4096);
	BAD(ENODEV, c.placement = OFFSTAGE_IOC_BIND, c.n_nodes = 1, nodes[0] = 63, c.nodes = (uintptr_t)nodes);
	BAD(ENODEV, c.placement = OFFSTAGE_IOC_BIND, c.n_nodes = 1, nodes[0] = UINT32_MAX, c.nodes = (uintptr_t)nodes);
#undef BAD
	assert_int_equal(ioctl(device, OFFSTAGE_IOC_BUFFER, &c), -1);
	assert_int_equal(errno, ENOTTY);
	assert_int_equal(ioctl(device, _IO(OFFSTAGE_IOC_TYPE, 0x7f), &c), -1);
	assert_int_equal(ioctl(device, OFFSTAGE_IOC_INFO, (void *)8), -1);
	assert_int_equal(errno, EFAULT);
	buffer = make(device, HUGE);
	assert_int_equal(ioctl(buffer, OFFSTAGE_IOC_CREATE, &c), -1);
	assert_int_equal(errno, ENOTTY);
	close(buffer);
	close(device);
	assert_all_is_free();
}

static void test_answer_that_cannot_be_written_leaves_nothing(void **unused)
{
	int device = device_open(), before;
	struct offstage_ioc_create *c;

	(void)unused;
	before = dup(0);
	close(before);
	c = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	*c = creation(HUGE);
	assert_int_equal(mprotect(c, 4096, PROT_READ), 0);
	assert_int_equal(ioctl(device, OFFSTAGE_IOC_CREATE, c), -1);
	assert_int_equal(errno, EFAULT);
	munmap(c, 4096);
	assert_int_equal(dup(0), before);	/* no descriptor was left */
	close(before);
	close(device);
	assert_all_is_free();
}

/* ---- buffers ------------------------------------------------------------------------------------------------------------------ */

static void test_buffer_is_a_file_of_its_size_and_costs_no_more(void **unused)
{
	static const uint64_t sizes[] = { 1, 4096, 4097, HUGE - 1, HUGE, HUGE + 1, 5 * HUGE + 12345 };
	int device = device_open();

	(void)unused;
	for (size_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++) {
		struct offstage_ioc_buffer info = { .size = sizeof(info) };
		uint64_t backed = (sizes[i] + 4095) / 4096 * 4096;
		int fd = make(device, sizes[i]);
		struct stat st;
		char *data;

		assert_int_equal(fstat(fd, &st), 0);
		assert_int_equal(st.st_size, backed);
		assert_int_equal(ioctl(fd, OFFSTAGE_IOC_BUFFER, &info), 0);
		assert_int_equal(info.requested, sizes[i]);
		assert_int_equal(info.backed, backed);
		assert_int_equal(on_all_nodes("in_use"), backed);
		data = map(fd, backed, 0);
		for (uint64_t k = 0; k < backed; k++)
			if (data[k])
				fail_msg("byte %llu isn't zero", (unsigned long long)k);
		memset(data, 0x77, backed);
		assert_int_equal(mmap(NULL, backed + 4096, PROT_READ, MAP_SHARED, fd, 0) == MAP_FAILED, true);
		munmap(data, backed);
		close(fd);
		assert_all_is_free();
	}
	close(device);
}

static void test_mappings_have_huge_entries(void **unused)
{
	int device = device_open(), fd = make(device, 16 * HUGE);
	char *data = map(fd, 16 * HUGE, 0), *part;

	(void)unused;
	assert_int_equal((uintptr_t)data % HUGE, 0);
	for (int i = 0; i < 16; i++)
		data[i * HUGE] = 1;
	assert_int_equal(smaps(data, "FilePmdMapped"), 16 * HUGE);
	/* At any 2 MiB offset, and in part. */
	part = map(fd, 3 * HUGE, 5 * HUGE);
	for (int i = 0; i < 3; i++)
		assert_int_equal(part[i * HUGE], 1);
	assert_int_equal(smaps(part, "FilePmdMapped"), 3 * HUGE);
	munmap(part, 3 * HUGE);
	munmap(data, 16 * HUGE);
	close(fd);
	close(device);
}

static void test_device_itself_can_be_mapped(void **unused)
{
	int device = device_open();
	char *data = map(device, 3 * HUGE, 0), *other = map(device, HUGE, 0);
	struct offstage_ioc_info info = { .size = sizeof(info) };

	(void)unused;
	data[0] = 1;
	other[0] = 2;		/* another buffer */
	assert_int_equal(data[0], 1);
	assert_int_equal(on_all_nodes("in_use"), 4 * HUGE);
	assert_int_equal(ioctl(device, OFFSTAGE_IOC_INFO, &info), 0);
	assert_int_equal(info.used_file, 4 * HUGE);
	close(device);
	data[3 * HUGE - 1] = 3;	/* lives on without its device */
	munmap(data, 3 * HUGE);
	munmap(other, HUGE);
	assert_all_is_free();
}

static void test_maps_and_descriptors_tell_what_they_are(void **unused)
{
	int device = device_open(), fd = make(device, HUGE);
	char *data = map(fd, HUGE, 0), path[64], name[64] = "", wanted[64], line[512];
	bool found = false;
	struct stat st;
	FILE *maps;

	(void)unused;
	assert_int_equal(fstat(fd, &st), 0);
	snprintf(wanted, sizeof(wanted), "offstage:[%llu]", (unsigned long long)st.st_ino);
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	assert_true(readlink(path, name, sizeof(name) - 1) > 0);
	assert_string_equal(name, wanted);
	maps = fopen("/proc/self/maps", "r");
	while (fgets(line, sizeof(line), maps))
		found |= strstr(line, wanted) && strtoull(line, NULL, 16) == (uintptr_t)data;
	fclose(maps);
	assert_true(found);
	munmap(data, HUGE);
	close(fd);
	close(device);
}

static void test_module_stays_while_a_buffer_lives(void **unused)
{
	int device = device_open();
	char *data = map(device, HUGE, 0);

	(void)unused;
	assert_int_equal(syscall(SYS_delete_module, "offstage", O_NONBLOCK), -1);
	assert_true(errno == EWOULDBLOCK || errno == EBUSY);
	close(device);		/* a mapping alone holds it, too */
	assert_int_equal(syscall(SYS_delete_module, "offstage", O_NONBLOCK), -1);
	data[0] = 1;
	munmap(data, HUGE);
	assert_all_is_free();
}

static void test_module_stays_while_a_buffers_path_is_held(void **unused)
{
	int device = device_open(), fd = make(device, HUGE), path;
	char name[64], link[64];

	(void)unused;
	snprintf(name, sizeof(name), "/proc/self/fd/%d", fd);
	path = open(name, O_PATH | O_CLOEXEC);
	assert_true(path >= 0);
	close(fd);
	close(device);
	assert_all_is_free();	/* the buffer is gone; its name isn't, and is told by the module */
	assert_int_equal(syscall(SYS_delete_module, "offstage", O_NONBLOCK), -1);
	snprintf(name, sizeof(name), "/proc/self/fd/%d", path);
	assert_true(readlink(name, link, sizeof(link)) > 0);
	close(path);
}

static void test_descriptor_for_reading_makes_nothing(void **unused)
{
	int device = open("/dev/offstage", O_RDONLY | O_CLOEXEC);
	struct offstage_ioc_create c = creation(HUGE);
	struct offstage_ioc_reserve r = { .size = sizeof(r), .bytes = HUGE };
	struct offstage_ioc_info info = { .size = sizeof(info) };

	(void)unused;
	assert_int_equal(create(device, &c), -EPERM);
	assert_int_equal(ioctl(device, OFFSTAGE_IOC_RESERVE, &r), -1);
	assert_int_equal(errno, EPERM);
	assert_int_equal(ioctl(device, OFFSTAGE_IOC_INFO, &info), 0);
	close(device);
}

static void test_what_a_mapping_may_not_be_is_refused(void **unused)
{
	int device = device_open(), fd = make(device, 2 * HUGE);
	char *data = map(fd, 2 * HUGE, 0);

	(void)unused;
	assert_true(mmap(NULL, HUGE, PROT_READ, MAP_PRIVATE, fd, 0) == MAP_FAILED);
	assert_int_equal(errno, EINVAL);
	assert_true(mmap(NULL, HUGE, PROT_READ, MAP_SHARED, fd, 2 * HUGE) == MAP_FAILED);
	assert_true(mmap(NULL, HUGE, PROT_READ, MAP_PRIVATE, device, 0) == MAP_FAILED);
	assert_true(mmap(NULL, HUGE, PROT_READ, MAP_SHARED, device, HUGE) == MAP_FAILED);
	assert_true(mremap(data, 2 * HUGE, 4 * HUGE, MREMAP_MAYMOVE) == MAP_FAILED);
	assert_true(ftruncate(fd, 4 * HUGE) < 0);
	assert_true(write(fd, "x", 1) < 0);
	munmap(data, 2 * HUGE);
	close(fd);
	close(device);
}

static void test_bytes_lie_where_they_were_asked_for(void **unused)
{
	uint32_t nodes[2] = { 1, 0 }, weights[2] = { 3, 1 };
	int device = device_open(), fd;
	struct offstage_ioc_create c;
	uint64_t bytes[8];
	char *data;

	(void)unused;
	if (!two_nodes())
		SKIP("this machine has one node with normal memory");
	for (uint32_t kind = OFFSTAGE_IOC_BIND; kind <= OFFSTAGE_IOC_SPILL; kind++) {
		struct offstage_ioc_buffer info = { .size = sizeof(info), .n_nodes = 8, .node_bytes = (uintptr_t)bytes };

		c = creation(8 * HUGE + 5000);
		c.placement = kind;
		c.nodes = (uintptr_t)nodes;
		c.n_nodes = kind == OFFSTAGE_IOC_BIND ? 1 : 2;
		c.weights = kind == OFFSTAGE_IOC_WEIGHTED ? (uintptr_t)weights : 0;
		fd = create(device, &c);
		assert_true(fd >= 0);
		assert_int_equal(ioctl(fd, OFFSTAGE_IOC_BUFFER, &info), 0);
		data = map(fd, 8 * HUGE, 0);
		for (int i = 0; i < 8; i++) {
			int wanted = kind == OFFSTAGE_IOC_INTERLEAVE ? !(i % 2) : kind == OFFSTAGE_IOC_WEIGHTED ? i % 4 != 3 : 1;

			data[i * HUGE] = 1;
			assert_int_equal(node_of_page(data + i * HUGE), wanted);
		}
		assert_int_equal(bytes[0] + bytes[1], 8 * HUGE + 8192);
		munmap(data, 8 * HUGE);
		close(fd);
	}
	close(device);
	assert_all_is_free();
}

static void test_descriptor_crosses_a_socket(void **unused)
{
	union { struct cmsghdr header; char room[CMSG_SPACE(sizeof(int))]; } control;
	int device = device_open(), fd = make(device, HUGE), pair[2], status;
	char byte = 0, *data = map(fd, HUGE, 0);
	struct iovec iov = { &byte, 1 };
	struct msghdr message = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control) };

	(void)unused;
	memset(&control, 0, sizeof(control));
	data[7] = 42;
	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
	if (fork() == 0) {
		char *theirs;
		int got = -1;

		munmap(data, HUGE);
		if (recvmsg(pair[1], &message, 0) != 1)
			_exit(1);
		memcpy(&got, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(got));
		theirs = mmap(NULL, HUGE, PROT_READ | PROT_WRITE, MAP_SHARED, got, 0);
		if (theirs == MAP_FAILED || theirs[7] != 42)
			_exit(2);
		theirs[8] = 43;
		_exit(0);
	}
	control.header.cmsg_level = SOL_SOCKET;
	control.header.cmsg_type = SCM_RIGHTS;
	control.header.cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(&control.header), &fd, sizeof(fd));
	assert_int_equal(sendmsg(pair[0], &message, 0), 1);
	wait(&status);
	assert_true(WIFEXITED(status));
	assert_int_equal(WEXITSTATUS(status), 0);
	assert_int_equal(data[8], 43);
	close(pair[0]);
	close(pair[1]);
	munmap(data, HUGE);
	close(fd);
	close(device);
	assert_all_is_free();
}

static void test_every_order_of_close_unmap_and_exit_frees(void **unused)
{
	(void)unused;
	for (int order = 0; order < 8; order++) {
		pid_t child = fork();
		int status;

		if (child == 0) {
			int device = open("/dev/offstage", O_RDWR);
			struct offstage_ioc_create c = creation(3 * HUGE + 100);
			int fd = create(device, &c);
			char *data = mmap(NULL, 3 * HUGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

			if (data == MAP_FAILED)
				_exit(1);
			memset(data, 1, 3 * HUGE);
			if (order & 1)
				close(device);
			if (order & 2)
				close(fd);
			if (order & 4)
				munmap(data, HUGE);	/* in part */
			if (fork() == 0) {		/* a child that outlives its parent */
				data[2 * HUGE] = 2;
				usleep(20000);
				_exit(0);
			}
			if (order == 3)
				kill(getpid(), SIGKILL);
			_exit(0);
		}
		waitpid(child, &status, 0);
		assert_all_is_free();
	}
}

/* ---- pools ---------------------------------------------------------------------------------------------------------------------- */

static void test_pool_grows_shrinks_and_serves_first(void **unused)
{
	int device = device_open(), fd;
	struct offstage_ioc_buffer info = { .size = sizeof(info) };
	uint32_t node = 0;
	struct offstage_ioc_create c = on_node(&node, 6 * HUGE);

	(void)unused;
	reserve(device, 0, 4 * HUGE);
	assert_int_equal(node_count(0, "reserved"), 4 * HUGE);
	assert_int_equal(node_count(0, "free"), 4 * HUGE);
	c.flags = OFFSTAGE_IOC_CREATE_POOL_ONLY;
	assert_int_equal(create(device, &c), -ENOMEM);	/* the pool alone hasn't that much, and nothing was kept */
	assert_int_equal(node_count(0, "free"), 4 * HUGE);
	c.flags = 0;
	fd = create(device, &c);
	assert_true(fd >= 0);
	assert_int_equal(ioctl(fd, OFFSTAGE_IOC_BUFFER, &info), 0);
	assert_int_equal(info.from_pool, 4 * HUGE);
	assert_int_equal(node_count(0, "free"), 0);
	assert_int_equal(node_count(0, "in_use"), 6 * HUGE);
	/* What is in use isn't taken: a partial result, and the rest goes when it comes back. */
	{
		struct offstage_ioc_reserve r = { .size = sizeof(r), .node = 0, .bytes = HUGE };

		assert_int_equal(ioctl(device, OFFSTAGE_IOC_RESERVE, &r), 0);
		assert_int_equal(r.bytes, 4 * HUGE);
	}
	close(fd);
	assert_all_is_free();
	assert_int_equal(node_count(0, "reserved"), HUGE);
	assert_true(write_text("/sys/class/offstage/offstage/node0/reserved", "0\n"));
	assert_int_equal(node_count(0, "reserved"), 0);
	assert_false(write_text("/sys/class/offstage/offstage/node0/reserved", "rubbish\n"));
	assert_false(write_text("/sys/class/offstage/offstage/node0/reserved", "64T\n"));
	close(device);
}

static void test_nobody_sees_another_users_bytes(void **unused)
{
	int device = device_open(), status;

	(void)unused;
	chmod("/dev/offstage", 0666);
	reserve(device, 0, 8 * HUGE);
	for (int round = 0; round < 3; round++) {
		for (uid_t uid = 1000; uid < 1002; uid++) {
			if (fork() == 0) {
				uint32_t node = 0;
				struct offstage_ioc_create c = on_node(&node, 8 * HUGE);
				char *data;
				int own, fd;

				as_user(uid);
				own = open("/dev/offstage", O_RDWR);
				c.flags = OFFSTAGE_IOC_CREATE_POOL_ONLY;
				fd = create(own, &c);
				if (fd < 0)
					_exit(1);
				data = mmap(NULL, 8 * HUGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
				for (uint64_t i = 0; i < 8 * HUGE; i += 8)
					if (*(uint64_t *)(data + i))
						_exit(2);
				memset(data, 0xee, 8 * HUGE);
				_exit(0);	/* by exit, at once: the pages are dirty when the next one asks */
			}
			wait(&status);
			assert_int_equal(WEXITSTATUS(status), 0);
			assert_all_is_free();
		}
	}
	reserve(device, 0, 0);
	close(device);
}

static void test_limits_hold_and_say_which(void **unused)
{
	static const char user[] = "/sys/module/offstage/parameters/limit_user", file[] = "/sys/module/offstage/parameters/limit_file",
			  node[] = "/sys/module/offstage/parameters/limit_node", all[] = "/sys/module/offstage/parameters/limit_all";
	uint64_t user_before = number_in(user), all_before = number_in(all);
	int device = device_open(), other = device_open(), fd, status;
	struct offstage_ioc_create c;

	(void)unused;
	assert_true(write_text(file, "4M"));
	fd = make(device, 2 * MiB);
	c = creation(2 * MiB + 1);
	assert_int_equal(create(device, &c), -EDQUOT);
	assert_int_equal(c.limit, OFFSTAGE_IOC_LIMIT_FILE);
	close(make(other, 4 * MiB));
	assert_true(write_text(file, "0"));

	assert_true(write_text(user, "8M"));
	c = creation(7 * MiB);
	assert_int_equal(create(other, &c), -EDQUOT);	/* 2 MiB of this user's are in use by the other file */
	assert_int_equal(c.limit, OFFSTAGE_IOC_LIMIT_USER);
	if (fork() == 0) {	/* somebody else has a limit of their own */
		chmod("/dev/offstage", 0666);
		as_user(1000);
		c = creation(7 * MiB);
		_exit(create(open("/dev/offstage", O_RDWR), &c) < 0);
	}
	wait(&status);
	assert_int_equal(WEXITSTATUS(status), 0);
	assert_true(write_number(user, user_before));

	assert_true(write_text(all, "8M"));
	c = creation(7 * MiB);
	assert_int_equal(create(other, &c), -EDQUOT);
	assert_int_equal(c.limit, OFFSTAGE_IOC_LIMIT_ALL);
	assert_true(write_number(all, all_before));

	assert_true(write_text(node, "4M"));
	c = creation(8 * MiB);
	assert_int_equal(create(other, &c), -EDQUOT);
	assert_int_equal(c.limit, OFFSTAGE_IOC_LIMIT_NODE);
	assert_true(write_text(node, "0"));
	assert_false(write_text(node, "rubbish"));
	close(fd);
	close(other);
	close(device);
	assert_all_is_free();
}

static void write_map(pid_t child, const char *name, const char *text)
{
	char path[64];

	snprintf(path, sizeof(path), "/proc/%d/%s", child, name);
	if (!write_text(path, text))
		fail_msg("%s: %s", path, strerror(errno));
}

/* Somebody's own user namespace gives them other uids, and with each a limit of its own: not here. */
static void test_uids_of_a_users_namespace_share_the_users_limit(void **unused)
{
	static const char user[] = "/sys/module/offstage/parameters/limit_user";
	uint64_t before = number_in(user);
	int there[2], go[2], status;
	char byte = 0;
	pid_t child;

	(void)unused;
	chmod("/dev/offstage", 0666);
	assert_true(write_text(user, "4M"));
	assert_int_equal(pipe(there), 0);
	assert_int_equal(pipe(go), 0);
	child = fork();
	if (child == 0) {
		struct offstage_ioc_create c = creation(3 * MiB);
		bool allowed;

		as_user(1000);
		allowed = unshare(CLONE_NEWUSER) == 0;
		if (write(there[1], &allowed, 1) != 1 || !allowed || read(go[0], &byte, 1) != 1)
			_exit(77);
		if (setresuid(1, 1, 0) || create(open("/dev/offstage", O_RDWR), &c) < 0)
			_exit(1);
		if (seteuid(0) || setresuid(2, 2, 0))
			_exit(2);
		c = creation(3 * MiB);
		_exit(create(open("/dev/offstage", O_RDWR), &c) == -EDQUOT && c.limit == OFFSTAGE_IOC_LIMIT_USER ? 0 : 3);
	}
	close(there[1]);	/* a child that fails ends the read */
	assert_int_equal(read(there[0], &byte, 1), 1);
	if (byte) {
		write_map(child, "setgroups", "deny");
		write_map(child, "uid_map", "0 1000 1\n1 100000 100");
	}
	assert_int_equal(write(go[1], "x", 1), 1);
	waitpid(child, &status, 0);
	assert_true(write_number(user, before));
	close(there[0]);
	close(go[0]);
	close(go[1]);
	if (WIFEXITED(status) && WEXITSTATUS(status) == 77)
		SKIP("users may make no namespaces here");
	assert_int_equal(WEXITSTATUS(status), 0);
	assert_all_is_free();
}

/* What pools hold is as little there for the rest of the machine as what buffers have. */
static void test_pools_count_for_what_buffers_may_take_beside_them(void **unused)
{
	static const char all[] = "/sys/module/offstage/parameters/limit_all";
	uint64_t before = number_in(all);
	int device = device_open();
	struct offstage_ioc_create c = creation(8 * MiB);

	(void)unused;
	reserve(device, 0, 32 * MiB);
	assert_true(write_text(all, "36M"));
	c.huge = OFFSTAGE_IOC_HUGE_NEVER;	/* nothing of it comes from the pool */
	assert_int_equal(create(device, &c), -EDQUOT);
	assert_int_equal(c.limit, OFFSTAGE_IOC_LIMIT_ALL);
	c = creation(3 * MiB);
	c.huge = OFFSTAGE_IOC_HUGE_NEVER;
	close(create(device, &c));
	write_text(all, "16E");		/* more than 64 bits is refused, or very much, and not "no limit" */
	assert_true(number_in(all) > 0);
	assert_true(write_number(all, before));
	reserve(device, 0, 0);
	close(device);
	assert_all_is_free();
}

static void test_reserving_needs_the_capability(void **unused)
{
	int status;

	(void)unused;
	chmod("/dev/offstage", 0666);
	if (fork() == 0) {
		struct offstage_ioc_reserve r = { .size = sizeof(r), .bytes = HUGE };

		as_user(1000);
		_exit(!(ioctl(open("/dev/offstage", O_RDWR), OFFSTAGE_IOC_RESERVE, &r) < 0 && errno == EPERM));
	}
	wait(&status);
	assert_int_equal(WEXITSTATUS(status), 0);
}

static void test_two_hundred_pools_are_made_and_dropped(void **unused)
{
	int device = device_open();

	(void)unused;
	for (int i = 0; i < 200; i++) {
		reserve(device, 0, (1 + i % 3) * HUGE);
		assert_int_equal(node_count(0, "free"), (1 + i % 3) * HUGE);
		reserve(device, 0, 0);
		assert_int_equal(node_count(0, "reserved"), 0);
	}
	close(device);
}

static void test_two_hundred_buffers_come_and_go(void **unused)
{
	int device = device_open();

	(void)unused;
	for (int i = 0; i < 200; i++) {
		int fd = make(device, HUGE + 4096 * (uint64_t)i);
		char *data = map(fd, HUGE, 0);

		data[0] = 1;
		munmap(data, HUGE);
		close(fd);
	}
	close(device);
	assert_all_is_free();
}

static void test_processes_race_and_nothing_is_lost(void **unused)
{
	(void)unused;
	for (int k = 0; k < 4; k++)
		if (fork() == 0) {
			int device = open("/dev/offstage", O_RDWR);

			srand(k);
			for (int i = 0; i < 60; i++) {
				struct offstage_ioc_create c = creation((uint64_t)(rand() % 5 + 1) * MiB + 777);
				int fd = create(device, &c);
				char *data = fd < 0 ? MAP_FAILED : mmap(NULL, MiB, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

				if (data != MAP_FAILED) {
					data[rand() % MiB] = 1;
					if (rand() % 2)
						close(fd), fd = -1;
					munmap(data, MiB);
				}
				if (fd >= 0)
					close(fd);
			}
			if (k == 3)
				kill(getpid(), SIGKILL);
			_exit(0);
		}
	while (wait(NULL) > 0)
		;
	assert_all_is_free();
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_info_says_abi_features_and_limits),
		cmocka_unit_test(test_structs_of_other_versions_are_taken),
#ifdef __x86_64__
		cmocka_unit_test(test_process_of_32_bits_makes_the_same_calls),
#endif
		cmocka_unit_test(test_questions_can_be_asked_again_with_the_same_struct),
		cmocka_unit_test(test_bad_calls_are_refused_and_leave_nothing),
		cmocka_unit_test(test_answer_that_cannot_be_written_leaves_nothing),
		cmocka_unit_test(test_buffer_is_a_file_of_its_size_and_costs_no_more),
		cmocka_unit_test(test_mappings_have_huge_entries),
		cmocka_unit_test(test_device_itself_can_be_mapped),
		cmocka_unit_test(test_maps_and_descriptors_tell_what_they_are),
		cmocka_unit_test(test_module_stays_while_a_buffer_lives),
		cmocka_unit_test(test_module_stays_while_a_buffers_path_is_held),
		cmocka_unit_test(test_descriptor_for_reading_makes_nothing),
		cmocka_unit_test(test_what_a_mapping_may_not_be_is_refused),
		cmocka_unit_test(test_bytes_lie_where_they_were_asked_for),
		cmocka_unit_test(test_descriptor_crosses_a_socket),
		cmocka_unit_test(test_every_order_of_close_unmap_and_exit_frees),
		cmocka_unit_test(test_pool_grows_shrinks_and_serves_first),
		cmocka_unit_test(test_nobody_sees_another_users_bytes),
		cmocka_unit_test(test_limits_hold_and_say_which),
		cmocka_unit_test(test_uids_of_a_users_namespace_share_the_users_limit),
		cmocka_unit_test(test_pools_count_for_what_buffers_may_take_beside_them),
		cmocka_unit_test(test_reserving_needs_the_capability),
		cmocka_unit_test(test_two_hundred_pools_are_made_and_dropped),
		cmocka_unit_test(test_two_hundred_buffers_come_and_go),
		cmocka_unit_test(test_processes_race_and_nothing_is_lost),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
