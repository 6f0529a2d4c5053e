/* SPDX-License-Identifier: MIT */
/*
 * What the tests in the virtual machine share: /dev/offstage without the library, and what the kernel says of it. They
 * run as root, one program after another, and each test leaves nothing behind.
 */
#ifndef MODULE_H
#define MODULE_H

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>
#include <numaif.h>
#include "../../include/uapi/linux/offstage.h"
#include "../skip.h"

#define MiB ((uint64_t)1 << 20)
#define HUGE (2 * MiB)

static inline int device_open(void)
{
	int fd = open("/dev/offstage", O_RDWR | O_CLOEXEC);

	if (fd < 0)
		fail_msg("/dev/offstage: %s", strerror(errno));
	return fd;
}

static inline struct offstage_ioc_create creation(uint64_t bytes)
{
	return (struct offstage_ioc_create){ .size = sizeof(struct offstage_ioc_create), .bytes = bytes };
}

static inline struct offstage_ioc_create on_node(uint32_t *node, uint64_t bytes)
{
	struct offstage_ioc_create c = creation(bytes);

	c.placement = OFFSTAGE_IOC_BIND;
	c.nodes = (uintptr_t)node;
	c.n_nodes = 1;
	return c;
}

/* A buffer's descriptor, or a negative errno. */
static inline int create(int device, struct offstage_ioc_create *c)
{
	return ioctl(device, OFFSTAGE_IOC_CREATE, c) < 0 ? -errno : c->fd;
}

static inline int make(int device, uint64_t bytes)
{
	struct offstage_ioc_create c = creation(bytes);
	int fd = create(device, &c);

	if (fd < 0)
		fail_msg("a buffer of %llu bytes: %s", (unsigned long long)bytes, strerror(-fd));
	return fd;
}

static inline char *map(int fd, uint64_t bytes, off_t at)
{
	char *data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, at);

	if (data == MAP_FAILED)
		fail_msg("mmap: %s", strerror(errno));
	return data;
}

static inline uint64_t number_in(const char *path)
{
	FILE *file = fopen(path, "r");
	unsigned long long n = 0;

	if (!file || fscanf(file, "%llu", &n) != 1)
		fail_msg("%s can't be read", path);
	fclose(file);
	return n;
}

static inline bool write_text(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY);
	bool ok = fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text);

	if (fd >= 0)
		close(fd);
	return ok;
}

static inline bool write_number(const char *path, uint64_t n)
{
	char text[32];

	snprintf(text, sizeof(text), "%llu", (unsigned long long)n);
	return write_text(path, text);
}

static inline uint64_t node_count(int node, const char *name)
{
	char path[128];

	snprintf(path, sizeof(path), "/sys/class/offstage/offstage/node%d/%s", node, name);
	return number_in(path);
}

static inline uint64_t on_all_nodes(const char *name)
{
	uint64_t sum = 0;
	char path[64];

	for (int node = 0; node < 8; node++) {
		snprintf(path, sizeof(path), "/sys/class/offstage/offstage/node%d", node);
		if (access(path, F_OK) == 0)
			sum += node_count(node, name);
	}
	return sum;
}

/* Freeing runs after the last fput(), and orphans are looked after once a second; a minute is for ever. */
static inline uint64_t waited_for(const char *name, uint64_t bytes)
{
	for (int i = 0; i < 6000 && on_all_nodes(name) != bytes; i++)
		usleep(10000);
	return on_all_nodes(name);
}

static inline void assert_falls_to(const char *name, uint64_t bytes)
{
	assert_int_equal(waited_for(name, bytes), bytes);
}

static inline void assert_all_is_free(void)
{
	assert_falls_to("in_use", 0);
	assert_falls_to("orphaned", 0);
}

/* A field of this mapping in /proc/self/smaps, in bytes. */
static inline uint64_t smaps(const void *start, const char *field)
{
	FILE *file = fopen("/proc/self/smaps", "r");
	unsigned long long from, to, kb, sum = 0;
	bool inside = false;
	char line[512];

	while (fgets(line, sizeof(line), file)) {
		if (sscanf(line, "%llx-%llx ", &from, &to) == 2)
			inside = from == (uintptr_t)start;
		else if (inside && strncmp(line, field, strlen(field)) == 0 && sscanf(line + strlen(field), ": %llu kB", &kb) == 1)
			sum += kb * 1024;
	}
	fclose(file);
	return sum;
}

static inline int node_of_page(void *page)
{
	int status = -1;

	return move_pages(0, 1, &page, NULL, &status, 0) ? -errno : status;
}

static inline bool two_nodes(void)
{
	return access("/sys/class/offstage/offstage/node1", F_OK) == 0;
}

static inline void reserve(int device, uint32_t node, uint64_t bytes)
{
	struct offstage_ioc_reserve r = { .size = sizeof(r), .node = node, .bytes = bytes };

	assert_int_equal(ioctl(device, OFFSTAGE_IOC_RESERVE, &r), 0);
	assert_int_equal(r.bytes, bytes);
}

/* In a child: nobody with this id can do what only root may. Opening the device is left to its mode. */
static inline void as_user(uid_t uid)
{
	if (setgid(uid) || setuid(uid))
		_exit(100);
}

#endif
