/* SPDX-License-Identifier: MIT */
/*
 * Calls to /dev/offstage and its buffers, valid and mutated, from several processes at once: some of them another
 * user's, each with a thread that closes what the other is using, killed at any point and begun again, while root changes
 * limits and the pool. At the end everything must have been freed, the module must work, and nobody may have died of
 * anything but the kills. What the kernel finds is in its log, which scripts/vm looks at.
 *
 *	fuzz [--seed S] [--rounds N] [--processes N]
 *
 * The seed is printed; each process makes the same calls for the same seed, though they meet in another order. By hand:
 *
 *	scripts/vm --kernel kasan --timeout 7200 build/vm-tests/fuzz --seed $RANDOM --rounds 100000
 */
#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include "module.h"

#define FILES 24
#define MAPPINGS 16
#define PROCESSES_MAX 16
#define CHUNK 200		/* calls of a process before it exits and another takes its place */

/* ---- chance ------------------------------------------------------------------------------------------------------------------ */

static uint64_t chance;

static uint64_t next(void)
{
	chance = chance * 6364136223846793005u + 1442695040888963407u;
	return chance >> 33;
}

static uint64_t below(uint64_t n)
{
	return next() % n;
}

static bool one_in(uint64_t n)
{
	return below(n) == 0;
}

static uint64_t strange(void)
{
	static const uint64_t values[] = { 0, 1, 2, 3, 7, 63, 64, 65, 4095, 4096, 4097, HUGE - 1, HUGE, HUGE + 1, 1u << 31, UINT32_MAX,
		(uint64_t)1 << 32, (uint64_t)1 << 40, INT64_MAX, (uint64_t)INT64_MAX + 1, UINT64_MAX, UINT64_MAX - 4095,
		0xffff888000000000u, 0x7ffffffff000u };

	return one_in(4) ? next() << 31 ^ next() : values[below(sizeof(values) / sizeof(*values))];
}

static uint64_t length(void)
{
	switch (below(8)) {
	case 0: return strange();
	case 1: return 1 + below(3 * HUGE);
	case 2: return 4096 * (1 + below(64));
	default: return HUGE * (1 + below(3));
	}
}

/* ---- what a process has --------------------------------------------------------------------------------------------------------- */

static volatile int files[FILES];
static struct { char *at; size_t bytes; } mappings[MAPPINGS];
static char *half_page, *read_only, *scratch;	/* the last has room for a page */
static int drive = -1;
static sigjmp_buf fault;

static int some_file(void)
{
	return files[below(FILES)];
}

static void keep_file(int fd)
{
	uint64_t i = below(FILES);

	if (fd < 0)
		return;
	if (files[i] >= 0)
		close(files[i]);
	files[i] = fd;
}

static void keep_mapping(void *at, size_t bytes)
{
	uint64_t i = below(MAPPINGS);

	if (at == MAP_FAILED)
		return;
	if (mappings[i].at)
		munmap(mappings[i].at, mappings[i].bytes);
	mappings[i].at = at;
	mappings[i].bytes = bytes;
}

/* A place for a struct: fine, or where it can't be read, or written, or only in part, or in memory of the module's. */
static char *place(void)
{
	uint64_t i = below(MAPPINGS);

	switch (below(12)) {
	case 0: return half_page + 4096 - below(80);
	case 1: return read_only + below(4000);
	case 2: return (char *)strange();
	case 3: return mappings[i].at ? mappings[i].at + below(mappings[i].bytes) : NULL;
	default: return scratch;
	}
}

static void on_fault(int signal)
{
	(void)signal;
	siglongjmp(fault, 1);
}

/* ---- calls ------------------------------------------------------------------------------------------------------------------------- */

static void open_one(void)
{
	keep_file(open("/dev/offstage", one_in(4) ? O_RDONLY : O_RDWR));
}

static void mutate(void *data, size_t bytes)
{
	for (uint64_t n = 1 + below(3); n; n--) {
		uint64_t value = strange(), width = one_in(2) ? 4 : 8, at = below(bytes / width) * width;

		memcpy((char *)data + at, &value, width);
	}
}

/* The call with the struct somewhere, of some size. */
static void call(int fd, unsigned long cmd, void *data, size_t bytes)
{
	char *at = place();

	if (one_in(3))
		mutate(data, bytes);
	if (one_in(8))
		*(uint32_t *)data = (uint32_t)below(2 * bytes);
	if (one_in(40))
		*(uint32_t *)data = (uint32_t)strange();
	if (sigsetjmp(fault, 1) == 0)
		memcpy(at, data, bytes);
	if (cmd == OFFSTAGE_IOC_CREATE && at == scratch) {
		struct offstage_ioc_create *c = (void *)scratch;

		if (ioctl(fd, cmd, c) == 0)
			keep_file(c->fd);
	} else if (cmd != OFFSTAGE_IOC_CREATE) {
		ioctl(fd, cmd, at);
	} else {
		/* Where its answer can't be read, the descriptor is found by its number. */
		int before = dup(0), after;

		close(before);
		if (ioctl(fd, cmd, at) == 0) {
			after = dup(0);
			close(after);
			if (after != before)
				close(before);
		}
	}
}

static void create_one(void)
{
	static uint32_t nodes[4], weights[4];
	struct offstage_ioc_create c = creation(length());

	for (int i = 0; i < 4; i++) {
		nodes[i] = one_in(16) ? (uint32_t)strange() : (uint32_t)(i + below(2)) % 3;
		weights[i] = (uint32_t)below(5);
	}
	c.placement = (uint32_t)below(5);
	c.huge = (uint32_t)below(3);
	c.flags = (uint32_t)below(4);
	c.n_nodes = c.placement == OFFSTAGE_IOC_LOCAL ? 0 : c.placement == OFFSTAGE_IOC_BIND ? 1 : (uint32_t)(1 + below(4));
	c.nodes = c.n_nodes ? (uintptr_t)nodes : 0;
	c.weights = c.placement == OFFSTAGE_IOC_WEIGHTED ? (uintptr_t)weights : 0;
	call(some_file(), OFFSTAGE_IOC_CREATE, &c, sizeof(c));
}

static void ask_one(void)
{
	static uint64_t bytes[64];
	struct offstage_ioc_info info = { .size = sizeof(info) };
	struct offstage_ioc_node node = { .size = sizeof(node), .node = (uint32_t)below(4) };
	struct offstage_ioc_buffer buffer = { .size = sizeof(buffer), .n_nodes = (uint32_t)below(65), .node_bytes = (uintptr_t)bytes };
	struct offstage_ioc_reserve r = { .size = sizeof(r), .node = (uint32_t)below(4), .bytes = below(16) * HUGE };

	switch (below(5)) {
	case 0: call(some_file(), OFFSTAGE_IOC_INFO, &info, sizeof(info)); break;
	case 1: call(some_file(), OFFSTAGE_IOC_NODE, &node, sizeof(node)); break;
	case 2: call(some_file(), OFFSTAGE_IOC_BUFFER, &buffer, sizeof(buffer)); break;
	case 3:
		/* Root may have it: not of so much that nothing is left for the others. */
		if (getuid())
			call(some_file(), OFFSTAGE_IOC_RESERVE, &r, sizeof(r));
		else
			ioctl(some_file(), OFFSTAGE_IOC_RESERVE, &r);
		break;
	default: ioctl(some_file(), one_in(2) ? _IO(OFFSTAGE_IOC_TYPE, below(256)) : strange(), place()); break;
	}
}

static void map_one(void)
{
	static const int kinds[] = { MAP_SHARED, MAP_SHARED, MAP_SHARED, MAP_SHARED_VALIDATE, MAP_PRIVATE, 0 };
	static const int flags[] = { 0, 0, 0, MAP_POPULATE, MAP_LOCKED, MAP_NORESERVE, MAP_HUGETLB, MAP_SYNC, MAP_GROWSDOWN };
	size_t bytes = length();
	off_t at = one_in(3) ? (off_t)(4096 * below(1024)) : one_in(16) ? (off_t)strange() : 0;

	keep_mapping(mmap(NULL, bytes, (int)below(8), kinds[below(6)] | flags[below(9)], some_file(), at), bytes);
}

static void change_mapping(void)
{
	static const int advices[] = { MADV_NORMAL, MADV_RANDOM, MADV_WILLNEED, MADV_DONTNEED, MADV_FREE, MADV_REMOVE, MADV_DONTFORK,
		MADV_DOFORK, MADV_MERGEABLE, MADV_HUGEPAGE, MADV_NOHUGEPAGE, MADV_DONTDUMP, MADV_DODUMP, MADV_WIPEONFORK,
		MADV_COLD, MADV_PAGEOUT, 22 /* POPULATE_READ */, 23 /* POPULATE_WRITE */, 25 /* COLLAPSE */ };
	uint64_t i = below(MAPPINGS), from, bytes;
	char *at = mappings[i].at;
	void *moved;

	if (!at)
		return;
	from = below(mappings[i].bytes / 4096 + 1) * 4096;
	bytes = below((mappings[i].bytes - (from < mappings[i].bytes ? from : 0)) / 4096 + 1) * 4096;
	switch (below(10)) {
	case 0:
		munmap(at + from, bytes);
		break;
	case 1:
		moved = mremap(at, mappings[i].bytes, one_in(2) ? bytes : 2 * mappings[i].bytes, MREMAP_MAYMOVE);
		if (moved != MAP_FAILED) {
			mappings[i].at = NULL;
			keep_mapping(moved, bytes ? bytes : 4096);
		}
		break;
	case 2:
		mprotect(at + from, bytes, (int)below(8));
		break;
	case 3:
		mlock(at + from, bytes);
		break;
	case 4:
		munlock(at + from, bytes);
		break;
	case 5:
		msync(at + from, bytes, (int)below(8));
		break;
	case 6: {
		unsigned long mask = 1 + below(7);

		mbind(at + from, bytes, (int)below(5), &mask, 8, (unsigned int)below(8));
		break;
	}
	default:
		madvise(at + from, bytes, advices[below(sizeof(advices) / sizeof(*advices))]);
	}
}

static void touch_one(void)
{
	uint64_t i = below(MAPPINGS);

	if (!mappings[i].at || sigsetjmp(fault, 1))
		return;
	for (uint64_t n = 1 + below(8); n; n--) {
		volatile char *at = mappings[i].at + below(mappings[i].bytes);

		if (one_in(2))
			*at = 1;
		else
			(void)*at;
	}
}

/* What others do with its memory: pipes, drives, other processes' eyes. */
static void use_one(void)
{
	uint64_t i = below(MAPPINGS), from;
	struct iovec iov, here = { scratch, 4096 };
	int ends[2], node;
	void *page;

	if (!mappings[i].at)
		return;
	from = below(mappings[i].bytes);
	iov = (struct iovec){ mappings[i].at + from, 1 + below(3 * 4096) };
	switch (below(5)) {
	case 0:
		if (pipe2(ends, O_NONBLOCK))
			return;
		vmsplice(ends[1], &iov, 1, SPLICE_F_NONBLOCK);
		close(ends[1]);
		/* The pages may be held while their mapping goes. */
		keep_file(ends[0]);
		break;
	case 1:
		iov.iov_base = mappings[i].at + from / 4096 * 4096;
		if (drive >= 0 && one_in(2))
			pwrite(drive, iov.iov_base, 4096, (off_t)(4096 * below(64)));
		else if (drive >= 0)
			pread(drive, iov.iov_base, 4096, (off_t)(4096 * below(64)));
		break;
	case 2:
		process_vm_readv(getpid(), &here, 1, &iov, 1, 0);
		break;
	case 3:
		process_vm_writev(getpid(), &here, 1, &iov, 1, 0);
		break;
	default:
		page = iov.iov_base;
		node = (int)below(3);
		move_pages(0, 1, &page, &node, &node, 2 /* MPOL_MF_MOVE */);
	}
}

static void treat_as_file(void)
{
	int fd = some_file(), other = some_file();
	struct stat st;

	switch (below(13)) {
	case 0: keep_file(dup(fd)); break;
	case 1: ftruncate(fd, (off_t)strange()); break;
	case 2: fallocate(fd, (int)below(64), (off_t)strange(), (off_t)strange()); break;
	case 3: lseek(fd, (off_t)strange(), (int)below(6)); break;
	case 4: pread(fd, scratch, 4096, 0); break;
	case 5: pwrite(fd, scratch, 4096, 0); break;
	case 6: fstat(fd, &st); break;
	case 7: fsync(fd); break;
	case 8: splice(fd, NULL, other, NULL, 4096, SPLICE_F_NONBLOCK); break;
	case 9: fcntl(fd, one_in(2) ? F_SETFL : F_ADD_SEALS, (int)below(1 << 16)); break;
	case 10: copy_file_range(fd, NULL, other, NULL, 4096, 0); break;
	case 11: fchmod(fd, (mode_t)below(01000)); break;
	default: {
		uint64_t i = below(FILES);

		if (files[i] >= 0)
			close(files[i]);
		files[i] = -1;
	}
	}
}

/* Into a socket, and out of it, or left there until the socket goes. */
static void pass_one(void)
{
	union { struct cmsghdr header; char room[CMSG_SPACE(sizeof(int))]; } control = { .room = { 0 } };
	char byte = 0;
	struct iovec iov = { &byte, 1 };
	struct msghdr message = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control) };
	int pair[2], fd = some_file();

	if (fd < 0 || socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair))
		return;
	control.header.cmsg_level = SOL_SOCKET;
	control.header.cmsg_type = SCM_RIGHTS;
	control.header.cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(&control.header), &fd, sizeof(fd));
	if (sendmsg(pair[0], &message, MSG_NOSIGNAL) == 1 && one_in(2) && recvmsg(pair[1], &message, 0) == 1 &&
	    CMSG_FIRSTHDR(&message)) {
		memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(fd));
		keep_file(fd);
	}
	close(pair[0]);
	close(pair[1]);
}

static void fork_one(void)
{
	pid_t child = fork();

	if (child == 0) {
		touch_one();
		change_mapping();
		_exit(0);
	}
	if (child > 0)
		waitpid(child, NULL, 0);
}

static void *close_behind_its_back(void *unused)
{
	uint64_t mine = chance;

	(void)unused;
	for (;;) {
		mine = mine * 6364136223846793005u + 1442695040888963407u;
		usleep(1000 + (mine >> 33) % 5000);
		if ((mine >> 40) % 2) {
			int fd = files[(mine >> 33) % FILES];

			if (fd >= 0)
				close(fd);	/* its number stays where it is, and may be another file's soon */
		}
	}
	return NULL;
}

static void work(uint64_t seed, uid_t uid)
{
	static void (*const calls[])(void) = { open_one, create_one, create_one, create_one, ask_one, ask_one, map_one, map_one, map_one,
		change_mapping, change_mapping, touch_one, touch_one, touch_one, use_one, use_one, treat_as_file, treat_as_file, pass_one,
		fork_one };
	struct sigaction action = { .sa_handler = on_fault };
	struct rlimit files_limit = { 256, 256 };
	pthread_t thread;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	chance = seed;
	drive = open("/dev/nvme0n1", O_RDWR | O_DIRECT | O_CLOEXEC);
	setrlimit(RLIMIT_NOFILE, &files_limit);
	if (uid)
		as_user(uid);
	sigaction(SIGSEGV, &action, NULL);
	sigaction(SIGBUS, &action, NULL);
	signal(SIGPIPE, SIG_IGN);
	for (int i = 0; i < FILES; i++)
		files[i] = -1;
	scratch = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	read_only = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	half_page = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	munmap(half_page + 4096, 4096);
	pthread_create(&thread, NULL, close_behind_its_back, NULL);
	for (int i = 0; i < CHUNK; i++) {
		if (i % 20 == 0)
			open_one();
		calls[below(sizeof(calls) / sizeof(*calls))]();
	}
	_exit(0);
}

/* ---- root, meanwhile --------------------------------------------------------------------------------------------------------------- */

static void swallow(const char *path)
{
	char text[4096];
	int fd = open(path, O_RDONLY | O_CLOEXEC);

	while (fd >= 0 && read(fd, text, sizeof(text)) > 0)
		;
	if (fd >= 0)
		close(fd);
}

#define PARAMETERS "/sys/module/offstage/parameters/"
static const char *const limits[] = { PARAMETERS "limit_user", PARAMETERS "limit_file", PARAMETERS "limit_node",
	PARAMETERS "limit_all" };

static void govern(uint64_t seed)
{
	const char *limit;
	char path[96];

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	chance = seed;
	for (;;) {
		usleep((useconds_t)(2000 + below(20000)));
		switch (below(4)) {
		case 0:
			/* Never so much that the machine has nothing left. */
			limit = limits[below(4)];
			write_number(limit, (16 + below(64)) * MiB);
			break;
		case 1:
			snprintf(path, sizeof(path), "/sys/class/offstage/offstage/node%d/reserved", (int)below(3));
			write_number(path, below(48) * MiB);
			break;
		case 2:
			swallow("/sys/kernel/debug/offstage/buffers");
			break;
		default:
			on_all_nodes("scrubbing");
		}
	}
}

/* ---- the whole ---------------------------------------------------------------------------------------------------------------------- */

static pid_t start(uint64_t seed, uid_t uid)
{
	pid_t child;

	fflush(stdout);
	child = fork();
	if (child == 0)
		work(seed, uid);
	return child;
}

static int tests, failures;

static void verdict(bool good, const char *name, const char *why, unsigned long long n)
{
	tests++;
	failures += !good;
	if (good)
		printf("ok %d - %s\n", tests, name);
	else
		printf("not ok %d - %s: %s %llu\n", tests, name, why, n);
}

static bool works(void)
{
	int device = device_open(), fd = make(device, 2 * HUGE + 5);
	char *data = map(fd, 2 * HUGE, 0);
	bool zero = true;

	for (uint64_t i = 0; i < 2 * HUGE; i++)
		zero &= !data[i];
	munmap(data, 2 * HUGE);
	close(fd);
	close(device);
	return zero;
}

int main(int argc, char **argv)
{
	uint64_t seed = 1, rounds = 300, processes = 4, before[4], done = 0, killed = 0, died = 0;
	pid_t worker[PROCESSES_MAX], governor;
	struct stat node;
	char path[96];

	for (int i = 1; i + 1 < argc; i += 2) {
		uint64_t value = strtoull(argv[i + 1], NULL, 0);

		if (strcmp(argv[i], "--seed") == 0)
			seed = value;
		else if (strcmp(argv[i], "--rounds") == 0)
			rounds = value;
		else if (strcmp(argv[i], "--processes") == 0 && value && value <= PROCESSES_MAX)
			processes = value;
		else
			return fprintf(stderr, "fuzz: %s %s isn't an option; see the top of fuzz.c\n", argv[i], argv[i + 1]), 2;
	}
	printf("# fuzz --seed %llu --rounds %llu --processes %llu\n", (unsigned long long)seed, (unsigned long long)rounds,
	       (unsigned long long)processes);
	if (stat("/dev/offstage", &node))
		return fprintf(stderr, "fuzz: /dev/offstage: %s\n", strerror(errno)), 1;
	chmod("/dev/offstage", 0666);
	for (int i = 0; i < 4; i++) {
		before[i] = number_in(limits[i]);
		write_text(limits[i], "64M");
	}
	fflush(stdout);
	governor = fork();
	if (governor == 0)
		govern(seed);
	chance = seed;
	for (uint64_t i = 0; i < processes; i++)
		worker[i] = start(seed + 1000 * (i + 1), i % 2 ? 1000 : 0);
	/* Every so often somebody is killed; whoever has ended is begun again, with the next seed. */
	while (done < rounds) {
		int status;
		pid_t who;

		usleep((useconds_t)below(30000));
		if (one_in(8))
			kill(worker[below(processes)], SIGKILL);
		while (done < rounds && (who = waitpid(-1, &status, WNOHANG)) > 0) {
			if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) {
				killed++;
			} else if (status) {
				printf("# a process ended with status %#x\n", status);
				died++;
			}
			for (uint64_t i = 0; i < processes; i++)
				if (worker[i] == who)
					worker[i] = start(seed + 1000 * (i + 1) + ++done, i % 2 ? 1000 : 0);
		}
	}
	for (uint64_t i = 0; i < processes; i++)
		kill(worker[i], SIGKILL);
	kill(governor, SIGKILL);
	while (wait(NULL) > 0)
		;
	for (int i = 0; i < 4; i++)
		write_number(limits[i], before[i]);
	chmod("/dev/offstage", node.st_mode & 07777);
	printf("# %llu processes ended, %llu of them killed\n", (unsigned long long)done, (unsigned long long)killed);
	verdict(died == 0, "test_nobody_dies_but_by_the_kills", "these did:", died);
	verdict(waited_for("in_use", 0) == 0, "test_all_buffers_are_freed", "bytes in use:", on_all_nodes("in_use"));
	verdict(waited_for("orphaned", 0) == 0, "test_all_pins_are_gone", "bytes orphaned:", on_all_nodes("orphaned"));
	for (int node = 0; node < 8; node++) {
		snprintf(path, sizeof(path), "/sys/class/offstage/offstage/node%d/reserved", node);
		write_text(path, "0");
	}
	verdict(on_all_nodes("reserved") == 0, "test_pools_can_be_emptied", "bytes reserved:", on_all_nodes("reserved"));
	verdict(works(), "test_module_works_as_before", "bytes of a new buffer aren't zero", 0);
	return failures ? 1 : 0;
}
