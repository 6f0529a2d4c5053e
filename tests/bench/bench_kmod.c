/* SPDX-License-Identifier: MIT */
/*
 * The module's memory against what a program has without it: a buffer from a clean reserve against mmap with
 * MAP_POPULATE and mlock, and against a hugetlb memfd, each made, mapped and touched on every page; pinning it for
 * io_uring against pinning base pages; and small buffers. Talks to /dev/offstage itself, as root: it reserves memory on
 * the node it runs on beside what is reserved there, and gives it back.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>
#include "../../include/uapi/linux/offstage.h"
#include "../../tools/command.h"
#include "bench.h"

#ifndef MFD_HUGETLB
#define MFD_HUGETLB 4u
#endif
#define HUGE ((uint64_t)2 << 20)
#define SMALL ((uint64_t)64 << 10)
#define NR_HUGEPAGES "/proc/sys/vm/nr_hugepages"

struct bench {
	uint64_t bytes, page;
	uint64_t reserved, hugetlb_pages;	/* as they were before, and will be again */
	uint32_t repeat, node;
	int device, ring;
	struct samples ours, populate, hugetlb, pin, pin_4k, small, small_memfd;
	struct samples faults, faults_populate, faults_hugetlb;	/* per GiB */
};

static int call_failed(const char *what)
{
	return failed("%s: %s", what, strerror(errno));
}

static uint64_t faults_so_far(void)
{
	struct rusage usage;

	getrusage(RUSAGE_SELF, &usage);
	return (uint64_t)usage.ru_minflt;
}

/* ---- contestants: each makes and maps memory; NULL and errno if it can't ---------------------------------------------------- */

static void *from_reserve(const struct bench *b, uint64_t bytes)
{
	struct offstage_ioc_create create = {
		.size = sizeof(create), .flags = OFFSTAGE_IOC_CREATE_CLOEXEC, .bytes = bytes,
		.placement = OFFSTAGE_IOC_BIND, .n_nodes = 1, .nodes = (uintptr_t)&b->node,
	};
	void *at;

	if (bytes >= HUGE)
		create.flags |= OFFSTAGE_IOC_CREATE_POOL_ONLY;
	if (ioctl(b->device, OFFSTAGE_IOC_CREATE, &create) < 0)
		return NULL;
	at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, create.fd, 0);
	close(create.fd);
	return at == MAP_FAILED ? NULL : at;
}

static void *by_populate(const struct bench *b, uint64_t bytes)
{
	void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);

	(void)b;
	return at == MAP_FAILED || mlock(at, bytes) ? NULL : at;
}

static void *by_memfd(const struct bench *b, uint64_t bytes, unsigned int flags)
{
	int fd = memfd_create("bench", flags | MFD_CLOEXEC);
	void *at;

	(void)b;
	if (fd < 0 || ftruncate(fd, (off_t)bytes))
		return NULL;
	at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	return at == MAP_FAILED ? NULL : at;
}

static void *by_hugetlb(const struct bench *b, uint64_t bytes)
{
	return by_memfd(b, bytes, MFD_HUGETLB);
}

static void *by_small_memfd(const struct bench *b, uint64_t bytes)
{
	void *at = by_memfd(b, bytes, 0);

	return !at || mlock(at, bytes) ? NULL : at;
}

/* Made, mapped, and every page touched. */
static int made_and_touched(const struct bench *b, void *(*make)(const struct bench *, uint64_t), uint64_t bytes,
			    struct samples *seconds, struct samples *faults)
{
	uint64_t before = faults_so_far();
	double begin = seconds_now();
	volatile char *at = make(b, bytes);

	if (!at)
		return call_failed("memory to compare");
	for (uint64_t i = 0; i < bytes; i += b->page)
		at[i] = 1;
	sample_add(seconds, seconds_now() - begin);
	if (faults)
		sample_add(faults, (double)(faults_so_far() - before) * (double)(1u << 30) / (double)bytes);
	munmap((void *)at, bytes);
	return 0;
}

/* ---- the reserve ----------------------------------------------------------------------------------------------------------------- */

static int reserve(const struct bench *b, uint64_t bytes)
{
	struct offstage_ioc_reserve r = { .size = sizeof(r), .node = b->node, .bytes = bytes };

	if (ioctl(b->device, OFFSTAGE_IOC_RESERVE, &r) < 0)
		return call_failed(errno == ENOMEM ? "a reserve larger than the node (--size)" : "a reserve (it needs root)");
	if (r.bytes < bytes) {
		uint64_t got = r.bytes;

		r.bytes = b->reserved;
		ioctl(b->device, OFFSTAGE_IOC_RESERVE, &r);
		return failed("node %u has huge pages for %llu MiB, and not for %llu: ask for less with --size", b->node,
			      (unsigned long long)got >> 20, (unsigned long long)bytes >> 20);
	}
	return 0;
}

static int read_pool(struct bench *b)
{
	struct offstage_ioc_node node = { .size = sizeof(node), .node = b->node };

	if (ioctl(b->device, OFFSTAGE_IOC_NODE, &node) < 0)
		return call_failed("the node's pool");
	b->reserved = node.reserved;
	return 0;
}

/* What the last repetition left dirty is scrubbed in the background. */
static int wait_until_clean(const struct bench *b, uint64_t bytes)
{
	for (int tries = 0; tries < 6000; tries++) {
		struct offstage_ioc_node node = { .size = sizeof(node), .node = b->node };

		if (ioctl(b->device, OFFSTAGE_IOC_NODE, &node) < 0)
			return call_failed("the node's pool");
		if (node.free >= bytes && !node.scrubbing)
			return 0;
		usleep(10000);
	}
	return failed("the reserve wasn't clean after a minute: does somebody else use it?");
}

/* ---- pinning -------------------------------------------------------------------------------------------------------------------- */

/* 1: this kernel's io_uring doesn't take such memory. */
static int pinned(const struct bench *b, void *at, struct samples *seconds)
{
	struct iovec iov = { at, b->bytes };
	double begin = seconds_now();

	if (syscall(SYS_io_uring_register, b->ring, IORING_REGISTER_BUFFERS, &iov, 1) < 0)
		return errno == EOPNOTSUPP ? 1 : -errno;
	sample_add(seconds, seconds_now() - begin);
	syscall(SYS_io_uring_register, b->ring, IORING_UNREGISTER_BUFFERS, NULL, 0);
	return 0;
}

static int pin_both(struct bench *b)
{
	void *ours = from_reserve(b, b->bytes), *base = mmap(NULL, b->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	int ret;

	if (!ours || base == MAP_FAILED)
		return call_failed("memory to pin");
	madvise(base, b->bytes, MADV_NOHUGEPAGE);
	for (uint64_t i = 0; i < b->bytes; i += b->page)
		((volatile char *)ours)[i] = ((volatile char *)base)[i] = 1;
	ret = pinned(b, ours, &b->pin);
	if (!ret)
		ret = pinned(b, base, &b->pin_4k);
	munmap(ours, b->bytes);
	munmap(base, b->bytes);
	if (ret < 0) {
		errno = -ret;
		return call_failed("pinning by io_uring");
	}
	return 0;
}

/* ---- all of it ------------------------------------------------------------------------------------------------------------------- */

static int read_hugetlb(uint64_t *pages)
{
	FILE *file = fopen(NR_HUGEPAGES, "r");
	unsigned long long n;
	int bad = !file || fscanf(file, "%llu", &n) != 1;

	if (file)
		fclose(file);
	*pages = bad ? 0 : n;
	return bad ? call_failed(NR_HUGEPAGES) : 0;
}

static int write_hugetlb(uint64_t pages)
{
	FILE *file = fopen(NR_HUGEPAGES, "w");
	int bad = !file || fprintf(file, "%llu\n", (unsigned long long)pages) < 0;

	bad |= file && fclose(file);
	return bad ? call_failed(NR_HUGEPAGES) : 0;
}

static int repetition(struct bench *b)
{
	int status = wait_until_clean(b, b->bytes);

	status = status ?: made_and_touched(b, from_reserve, b->bytes, &b->ours, &b->faults);
	status = status ?: made_and_touched(b, by_populate, b->bytes, &b->populate, &b->faults_populate);
	status = status ?: write_hugetlb(b->hugetlb_pages + b->bytes / HUGE);
	status = status ?: made_and_touched(b, by_hugetlb, b->bytes, &b->hugetlb, &b->faults_hugetlb);
	write_hugetlb(b->hugetlb_pages);
	status = status ?: wait_until_clean(b, b->bytes);
	if (b->ring >= 0)
		status = status ?: pin_both(b);
	for (int i = 0; i < 20; i++) {
		status = status ?: made_and_touched(b, from_reserve, SMALL, &b->small, NULL);
		status = status ?: made_and_touched(b, by_small_memfd, SMALL, &b->small_memfd, NULL);
	}
	return status;
}

static void print(const struct bench *b)
{
	const char *vm = getenv("OFFSTAGE_VM");

	if (vm)
		printf("In the virtual machine of scripts/vm, kernel %s: its CPU and memory are EMULATED; look at ratios alone.\n", vm);
	printf("%.2f GiB, made, mapped and touched on every page, medians of %u repetitions in turn\n",
	       (double)b->bytes / (1u << 30), b->repeat);
	printf("offstage, clean reserve     %9.1f ms   %8.0f faults per GiB\n", sample_median(&b->ours) * 1e3, sample_median(&b->faults));
	printf("mmap MAP_POPULATE, mlock    %9.1f ms   %8.0f faults per GiB   offstage is %.1f times as fast\n",
	       sample_median(&b->populate) * 1e3, sample_median(&b->faults_populate), sample_ratio(&b->populate, &b->ours));
	printf("hugetlb memfd               %9.1f ms   %8.0f faults per GiB   offstage is %.1f times as fast\n",
	       sample_median(&b->hugetlb) * 1e3, sample_median(&b->faults_hugetlb), sample_ratio(&b->hugetlb, &b->ours));
	if (b->pin.n)
		printf("pinned by io_uring          %9.2f ms, base pages %.2f ms: %.1f times as fast\n", sample_median(&b->pin) * 1e3,
		       sample_median(&b->pin_4k) * 1e3, sample_ratio(&b->pin_4k, &b->pin));
	else
		puts("pinned by io_uring          not measured: this kernel's takes no file's memory");
	printf("buffers of 64 KiB           %9.0f per second, memfd and mlock %.0f\n", 1 / sample_median(&b->small),
	       1 / sample_median(&b->small_memfd));
}

static int write_json(const struct bench *b, const char *path)
{
	struct json j;

	if (!json_open(&j, path))
		return STATUS_FAILED;
	json_bool(&j, "emulated", getenv("OFFSTAGE_VM") != NULL);
	json_integer(&j, "bytes", b->bytes);
	json_integer(&j, "repetitions", b->repeat);
	/* Times as fast as the other. */
	json_number(&j, "over_populate_mlock", sample_ratio(&b->populate, &b->ours));
	json_number(&j, "over_hugetlb", sample_ratio(&b->hugetlb, &b->ours));
	json_number(&j, "faults_per_gib", sample_median(&b->faults));
	json_number(&j, "populate_faults_per_gib", sample_median(&b->faults_populate));
	json_number(&j, "hugetlb_faults_per_gib", sample_median(&b->faults_hugetlb));
	if (b->pin.n)
		json_number(&j, "pin_over_4k", sample_ratio(&b->pin_4k, &b->pin));
	else
		json_null(&j, "pin_over_4k");
	json_number(&j, "small_buffers_per_second", 1 / sample_median(&b->small));
	json_number(&j, "small_over_memfd_mlock", sample_ratio(&b->small_memfd, &b->small));
	return json_close(&j, path) ? 0 : STATUS_FAILED;
}

int bench_kmod(const struct bench_options *options)
{
	struct bench b = {
		.bytes = (options->size ? options->size : (uint64_t)512 << 20) / HUGE * HUGE,
		.repeat = options->repeat ? options->repeat : 5,
		.page = (uint64_t)sysconf(_SC_PAGESIZE),
	};
	struct io_uring_params params = { 0 };
	unsigned int cpu, node = 0;
	int status;

	if (!b.bytes)
		return usage_error("bench", "--size of kmod is %llu or more", (unsigned long long)HUGE);
	b.device = open("/dev/offstage", O_RDWR | O_CLOEXEC);
	if (b.device < 0)
		return call_failed("/dev/offstage (modprobe offstage, or scripts/vm build/offstage bench kmod)");
	syscall(SYS_getcpu, &cpu, &node, NULL);
	b.node = node;
	b.ring = (int)syscall(SYS_io_uring_setup, 1, &params);
	status = read_pool(&b);
	status = status ?: read_hugetlb(&b.hugetlb_pages);
	status = status ?: reserve(&b, b.reserved + b.bytes);
	if (!status) {
		for (uint32_t i = 0; i < b.repeat && !status; i++)
			status = repetition(&b);
		reserve(&b, b.reserved);
	}
	if (!status)
		print(&b);
	if (!status && options->json)
		status = write_json(&b, options->json);
	if (b.ring >= 0)
		close(b.ring);
	close(b.device);
	return status;
}
