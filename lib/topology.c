/* SPDX-License-Identifier: MIT */
/*
 * Readers of /proc and /sys. Each is one pass over lines with a buffer on the stack, so that asking for facts
 * allocates nothing; lines that are longer than the buffer are cut, and what has an unexpected shape is skipped.
 * See topology.h.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>
#include "error.h"
#include "topology.h"

#define PATH_SIZE 4096
#define LINE_SIZE 4096
#define CAP_IPC_LOCK_BIT 14
#define NODES "/sys/devices/system/node"
#define THP "/sys/kernel/mm/transparent_hugepage"
#define HUGETLB "/sys/kernel/mm/hugepages"

const char *topology_root = "";

/* ---- lines and numbers -------------------------------------------------------------------------------------------- */

struct lines {
	int fd;
	bool skip;		/* what comes is the rest of a line whose beginning was handed out */
	size_t from, to;	/* what is left in bytes */
	char bytes[LINE_SIZE];
};

static int lines_open(struct lines *lines, const char *path)
{
	lines->skip = false;
	lines->from = 0;
	lines->to = 0;
	do
		lines->fd = open(path, O_RDONLY | O_CLOEXEC);
	while (lines->fd < 0 && errno == EINTR);
	return lines->fd < 0 ? -errno : 0;
}

/* The same below topology_root; a path that is too long is a file that isn't there. */
static int __attribute__((format(printf, 2, 3))) lines_fact(struct lines *lines, const char *format, ...)
{
	char path[PATH_SIZE];
	va_list args;
	int n = snprintf(path, sizeof(path), "%s", topology_root);

	va_start(args, format);
	if (n >= 0 && (size_t)n < sizeof(path))
		n += vsnprintf(path + n, sizeof(path) - (size_t)n, format, args);
	va_end(args);
	if (n < 0 || (size_t)n >= sizeof(path))
		return -ENAMETOOLONG;
	return lines_open(lines, path);
}

/* Fills the buffer; false at the end of the file. */
static bool lines_fill(struct lines *lines)
{
	ssize_t n;

	if (lines->from) {
		memmove(lines->bytes, lines->bytes + lines->from, lines->to - lines->from);
		lines->to -= lines->from;
		lines->from = 0;
	}
	do
		n = read(lines->fd, lines->bytes + lines->to, sizeof(lines->bytes) - 1 - lines->to);
	while (n < 0 && errno == EINTR);
	if (n <= 0)
		return false;
	lines->to += (size_t)n;
	return true;
}

/* The next line without its newline, NULL at the end. It's valid until the next call. */
static char *lines_next(struct lines *lines)
{
	for (;;) {
		char *line = lines->bytes + lines->from;
		char *end = memchr(line, '\n', lines->to - lines->from);
		bool skip = lines->skip;

		if (!end) {
			bool full = lines->from == 0 && lines->to == sizeof(lines->bytes) - 1;

			if (!full && lines_fill(lines))
				continue;
			if (lines->from == lines->to)
				return NULL;
			/* Too long, or the last with no newline: the beginning has all that is looked for. */
			line = lines->bytes + lines->from;
			end = lines->bytes + lines->to;
			lines->skip = full;
			lines->from = lines->to;
		} else {
			lines->skip = false;
			lines->from = (size_t)(end + 1 - lines->bytes);
		}
		if (skip)
			continue;
		*end = '\0';
		return line;
	}
}

static void lines_close(struct lines *lines)
{
	close(lines->fd);
}

/* The number in a file of one number; `none` when there is no such file, or no number in it ("max"). */
static uint64_t __attribute__((format(printf, 2, 3))) number_in(uint64_t none, const char *format, ...)
{
	char path[PATH_SIZE], *line, *end;
	struct lines lines;
	uint64_t number = none;
	va_list args;
	int n;

	va_start(args, format);
	n = vsnprintf(path, sizeof(path), format, args);
	va_end(args);
	if (n < 0 || (size_t)n >= sizeof(path) || lines_fact(&lines, "%s", path) < 0)
		return none;
	line = lines_next(&lines);
	if (line && line[0] >= '0' && line[0] <= '9') {
		errno = 0;
		number = strtoull(line, &end, 10);
		if (errno || (*end && *end != ' '))
			number = none;
	}
	lines_close(&lines);
	return number;
}

/* Is `line` "key: N kB" or "key N"? Takes N, in bytes if a unit follows. */
static bool keyed(const char *line, const char *key, uint64_t *value)
{
	size_t n = strlen(key);
	char *end;

	if (strncmp(line, key, n) != 0)
		return false;
	line += n;
	if (*line == ':')
		line++;
	if (*line != ' ' && *line != '\t')
		return false;
	line += strspn(line, " \t");
	if (*line < '0' || *line > '9')
		return false;
	*value = strtoull(line, &end, 10);
	if (strcmp(end, " kB") == 0)
		*value = *value > UINT64_MAX >> 10 ? UINT64_MAX : *value << 10;
	return true;
}

/* Calls fn for every number of a list like "0-3,8"; malformed parts end it. */
static void each_in_list(const char *list, void (*fn)(void *arg, unsigned number), void *arg)
{
	while (*list >= '0' && *list <= '9') {
		char *end;
		unsigned long first = strtoul(list, &end, 10), last = first;

		if (*end == '-' && end[1] >= '0' && end[1] <= '9')
			last = strtoul(end + 1, &end, 10);
		for (unsigned long i = first; i <= last && i < 65536; i++)
			fn(arg, (unsigned)i);
		if (*end != ',')
			break;
		list = end + 1;
	}
}

struct member {
	unsigned wanted;
	bool found;
};

static void is_member(void *arg, unsigned number)
{
	struct member *member = arg;

	if (number == member->wanted)
		member->found = true;
}

static bool list_has(const char *list, unsigned number)
{
	struct member member = { .wanted = number };

	each_in_list(list, is_member, &member);
	return member.found;
}

static void count_one(void *arg, unsigned number)
{
	(void)number;
	++*(unsigned *)arg;
}

int topology_check(void)
{
	struct lines lines;
	int ret = lines_fact(&lines, "/proc/self/status");

	if (ret == 0)
		lines_close(&lines);
	if (ret == -EMFILE)
		return fail(ret, "this process has no more file descriptors, and one is needed to read limits: raise RLIMIT_NOFILE "
			    "with `ulimit -n`, or close some");
	if (ret == -ENFILE)
		return fail(ret, "the system has no more file descriptors, and one is needed to read limits: raise "
			    "/proc/sys/fs/file-max");
	return 0;
}

/* ---- nodes --------------------------------------------------------------------------------------------------------- */

struct numbers {
	uint32_t *out;
	unsigned max, n;
};

static void add_node(void *arg, unsigned number)
{
	struct numbers *numbers = arg;

	if (number >= TOPOLOGY_NODES_MAX)
		return;
	if (numbers->n < numbers->max)
		numbers->out[numbers->n] = number;
	numbers->n++;
}

unsigned topology_nodes(uint32_t *nodes, unsigned max)
{
	struct numbers numbers = { .out = nodes, .max = max };
	struct lines lines;
	char *line;

	if (lines_fact(&lines, NODES "/has_memory") == 0) {
		line = lines_next(&lines);
		if (line)
			each_in_list(line, add_node, &numbers);
		lines_close(&lines);
	}
	/* A kernel with no NUMA: all memory is node 0. */
	if (!numbers.n)
		add_node(&numbers, 0);
	return numbers.n;
}

/* Is node in the list that a file holds? `none` when there is no file. */
static bool node_in_file(const char *path, uint32_t node, bool none)
{
	struct lines lines;
	char *line;
	bool found = none;

	if (lines_fact(&lines, "%s", path) == 0) {
		line = lines_next(&lines);
		found = line && list_has(line, node);
		lines_close(&lines);
	}
	return found;
}

static bool node_allowed(uint32_t node)
{
	struct lines lines;
	bool allowed = true;
	char *line;

	if (lines_fact(&lines, "/proc/self/status") < 0)
		return true;
	while ((line = lines_next(&lines)))
		if (strncmp(line, "Mems_allowed_list:", 18) == 0)
			allowed = list_has(line + 18 + strspn(line + 18, " \t"), node);
	lines_close(&lines);
	return allowed;
}

/* Bytes that the kernel keeps free on a node: at its zones' low watermarks reclaim begins. */
static uint64_t node_kept(uint32_t node)
{
	uint64_t kept = 0, pages;
	struct lines lines;
	bool here = false;
	unsigned number;
	char *line;

	if (lines_fact(&lines, "/proc/zoneinfo") < 0)
		return 0;
	while ((line = lines_next(&lines))) {
		if (sscanf(line, "Node %u, zone", &number) == 1)
			here = number == node;
		else if (here && keyed(line + strspn(line, " "), "low", &pages))
			kept += pages * (uint64_t)sysconf(_SC_PAGESIZE);
	}
	lines_close(&lines);
	return kept;
}

/* Bytes in free blocks from which a huge page can be taken at once. */
static uint64_t node_huge_free(uint32_t node)
{
	uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), huge = topology_huge_page_size(), free_bytes = 0;
	struct lines lines;
	char *line, zone[16];
	unsigned number;
	int at;

	if (!huge || lines_fact(&lines, "/proc/buddyinfo") < 0)
		return 0;
	while ((line = lines_next(&lines))) {
		if (sscanf(line, "Node %u, zone %15s%n", &number, zone, &at) != 2 || number != node)
			continue;
		/* The kernel keeps the first 16 MiB for devices that can't reach more. */
		if (strcmp(zone, "DMA") == 0)
			continue;
		line += at;
		for (uint64_t block = page; *line; block <<= 1) {
			char *end;
			uint64_t blocks = strtoull(line, &end, 10);

			if (end == line)
				break;
			line = end;
			if (block >= huge)
				free_bytes += blocks * block;
		}
	}
	lines_close(&lines);
	return free_bytes;
}

static uint64_t node_hugetlb_free(uint32_t node)
{
	uint64_t size = topology_hugetlb_size(), unreserved, on_node;

	if (!size)
		return 0;
	unreserved = topology_hugetlb_free();
	on_node = number_in(UINT64_MAX, NODES "/node%u/hugepages/hugepages-%llukB/free_hugepages", node,
			    (unsigned long long)size >> 10);
	/* Reservations aren't made per node: what is left of all may be on this one. */
	return on_node == UINT64_MAX || on_node * size > unreserved ? unreserved : on_node * size;
}

/* Reads meminfo's lines, of a node ("Node 0 MemFree: …") or of the machine. */
static bool read_memory(uint32_t node, bool machine, uint64_t *total, uint64_t *available)
{
	uint64_t value, free_bytes = 0, file = 0, unclean = 0, slab = 0, whole = 0;
	struct lines lines;
	char *line;
	int ret;

	*total = 0;
	*available = 0;
	ret = machine ? lines_fact(&lines, "/proc/meminfo") : lines_fact(&lines, NODES "/node%u/meminfo", node);
	if (ret < 0)
		return false;
	while ((line = lines_next(&lines))) {
		int at = 0;

		if (!machine && (sscanf(line, "Node %*u %n", &at) == EOF || !at))
			continue;
		line += at;
		if (keyed(line, "MemTotal", &value))
			*total = value;
		else if (keyed(line, "MemAvailable", &value))
			whole = value;
		else if (keyed(line, "MemFree", &value))
			free_bytes = value;
		else if (keyed(line, "Active(file)", &value) || keyed(line, "Inactive(file)", &value))
			file += value;
		else if (keyed(line, "Dirty", &value) || keyed(line, "Writeback", &value))
			unclean += value;
		else if (keyed(line, "SReclaimable", &value))
			slab = value;
	}
	lines_close(&lines);
	if (whole) {
		*available = whole;
		return true;
	}
	/* Like the kernel's MemAvailable, which exists for the whole machine alone. */
	*available = free_bytes + (file > unclean ? file - unclean : 0) + slab / 2;
	value = machine ? 0 : node_kept(node);
	*available = *available > value ? *available - value : 0;
	if (*available > *total)
		*available = *total;
	return true;
}

int topology_node(uint32_t node, struct offstage_node_info *info)
{
	struct lines lines;
	char *line;
	bool numa;

	memset(info, 0, sizeof(*info));
	info->size = sizeof(*info);
	info->node = node;
	if (node >= TOPOLOGY_NODES_MAX)
		return fail(-ENODEV, "there is no node %u: nodes are numbered below %d (see `offstage info`)", node,
			    TOPOLOGY_NODES_MAX);
	numa = read_memory(node, false, &info->total, &info->available);
	if (!numa && lines_fact(&lines, NODES "/online") == 0) {
		lines_close(&lines);
		return fail(-ENODEV, "node %u isn't online on this machine: use one that `offstage info` lists", node);
	}
	if (!numa && (node != 0 || !read_memory(0, true, &info->total, &info->available)))
		return fail(-ENODEV, "there is no node %u: this kernel knows no NUMA nodes, all memory is node 0", node);
	if (!info->total)
		return fail(-ENODEV, "node %u has no memory: use one that `offstage info` lists with memory", node);
	if (lines_fact(&lines, NODES "/node%u/cpulist", node) == 0) {
		line = lines_next(&lines);
		if (line)
			each_in_list(line, count_one, &info->cpus);
		lines_close(&lines);
	} else if (!numa) {
		info->cpus = (uint32_t)sysconf(_SC_NPROCESSORS_ONLN);
	}
	if (node_in_file(NODES "/has_normal_memory", node, true))
		info->flags |= OFFSTAGE_NODE_NORMAL;
	if (node_allowed(node))
		info->flags |= OFFSTAGE_NODE_ALLOWED;
	info->huge_free = node_huge_free(node);
	info->hugetlb_free = node_hugetlb_free(node);
	return 0;
}

static void add_cpu(void *arg, unsigned cpu)
{
	if (cpu < CPU_SETSIZE)
		CPU_SET(cpu, (cpu_set_t *)arg);
}

void topology_node_cpus(uint32_t node, cpu_set_t *cpus)
{
	struct lines lines;
	cpu_set_t mask;
	char *line;

	CPU_ZERO(cpus);
	if (lines_fact(&lines, NODES "/node%u/cpulist", node) == 0) {
		line = lines_next(&lines);
		if (line)
			each_in_list(line, add_cpu, cpus);
		lines_close(&lines);
	} else if (node == 0 && lines_fact(&lines, NODES "/online") < 0) {
		memset(cpus, 0xff, sizeof(*cpus));
	} else if (node == 0) {
		lines_close(&lines);
	}
	if (sched_getaffinity(0, sizeof(mask), &mask) == 0)
		CPU_AND(cpus, cpus, &mask);
}

/* May memory that is to be pinned lie there? */
static bool node_serves(uint32_t node)
{
	return node_allowed(node) && node_in_file(NODES "/has_memory", node, node == 0) &&
	       node_in_file(NODES "/has_normal_memory", node, true);
}

uint32_t topology_local_node(void)
{
	uint32_t nodes[TOPOLOGY_NODES_MAX];
	unsigned local = 0, n, best_distance = UINT32_MAX;
	uint32_t best = UINT32_MAX;
	struct lines lines;
	char *at, *end;

	if (getcpu(NULL, &local) < 0)
		local = 0;
	if (node_serves(local))
		return local;
	/* Distances stand in the order of online nodes. */
	struct numbers online = { .out = nodes, .max = TOPOLOGY_NODES_MAX };

	if (lines_fact(&lines, NODES "/online") == 0) {
		at = lines_next(&lines);
		if (at)
			each_in_list(at, add_node, &online);
		lines_close(&lines);
	}
	n = online.n < TOPOLOGY_NODES_MAX ? online.n : TOPOLOGY_NODES_MAX;
	if (lines_fact(&lines, NODES "/node%u/distance", local) == 0) {
		at = lines_next(&lines);
		for (unsigned i = 0; at && i < n; i++, at = end) {
			unsigned long distance = strtoul(at, &end, 10);

			if (end == at)
				break;
			if (distance < best_distance && node_serves(nodes[i])) {
				best_distance = (unsigned)distance;
				best = nodes[i];
			}
		}
		lines_close(&lines);
	}
	for (unsigned i = 0; best == UINT32_MAX && i < n; i++)
		if (node_serves(nodes[i]))
			best = nodes[i];
	return best == UINT32_MAX ? local : best;
}

/* ---- control groups -------------------------------------------------------------------------------------------------- */

/* Does the comma-separated list have the word? */
static bool has_word(const char *list, const char *word)
{
	size_t n = strlen(word);

	for (; list; list = strchr(list, ',') ? strchr(list, ',') + 1 : NULL)
		if (strncmp(list, word, n) == 0 && (list[n] == ',' || list[n] == '\0'))
			return true;
	return false;
}

/* This process's path in the hierarchy of a controller (NULL: version 2's), as /proc/self/cgroup gives it. */
static bool cgroup_path(const char *controller, char *path, size_t size)
{
	struct lines lines;
	bool found = false;
	char *line;

	if (lines_fact(&lines, "/proc/self/cgroup") < 0)
		return false;
	while (!found && (line = lines_next(&lines))) {
		char *names = strchr(line, ':'), *at = names ? strchr(names + 1, ':') : NULL;

		if (!at)
			continue;
		*at++ = '\0';
		names++;
		if (controller ? !has_word(names, controller) : *names != '\0')
			continue;
		found = (size_t)snprintf(path, size, "%s", at) < size;
	}
	lines_close(&lines);
	return found;
}

/*
 * The directory of this process's group, and the length of the mount point before it, above which isn't looked. A
 * container may see a part of the hierarchy only: then its mount's root isn't "/", or its path leads out ("/..").
 */
static bool cgroup_directory(const char *controller, char *directory, size_t size, size_t *top)
{
	char path[PATH_SIZE], root[PATH_SIZE], point[PATH_SIZE], *line;
	struct lines lines;
	bool found = false;

	if (!cgroup_path(controller, path, sizeof(path)) || lines_fact(&lines, "/proc/self/mountinfo") < 0)
		return false;
	while (!found && (line = lines_next(&lines))) {
		char *type = strstr(line, " - "), *options;
		const char *below = path;
		size_t n;

		if (!type || sscanf(line, "%*s %*s %*s %4095s %4095s", root, point) != 2)
			continue;
		type += 3;
		options = strrchr(type, ' ');
		if (controller ? strncmp(type, "cgroup ", 7) != 0 || !options || !has_word(options + 1, controller) :
				 strncmp(type, "cgroup2 ", 8) != 0)
			continue;
		n = strcmp(root, "/") == 0 ? 0 : strlen(root);
		if (strncmp(path, root, n) == 0 && (path[n] == '/' || path[n] == '\0'))
			below = path + n;
		else if (n)
			below = "";
		if (strncmp(below, "/..", 3) == 0 || strcmp(below, "/") == 0)
			below = "";
		*top = strlen(point);
		found = (size_t)snprintf(directory, size, "%s%s", point, below) < size;
	}
	lines_close(&lines);
	return found;
}

/* To the parent's directory; false at the top. */
static bool cgroup_up(char *directory, size_t top)
{
	char *slash = strrchr(directory, '/');

	if (!slash || (size_t)(slash - directory) < top || strlen(directory) <= top)
		return false;
	*slash = '\0';
	return true;
}

/* File cache of a group that can be dropped at once. Shared memory isn't on the lists of files. */
static uint64_t cgroup_reclaimable(const char *directory, bool v2)
{
	uint64_t value, file = 0, unclean = 0;
	struct lines lines;
	char *line;

	if (lines_fact(&lines, "%s/memory.stat", directory) < 0)
		return 0;
	while ((line = lines_next(&lines))) {
		/* Version 1 has numbers of the group alone and "total_" for the hierarchy; limits hold for the hierarchy. */
		if (!v2) {
			if (strncmp(line, "total_", 6) != 0)
				continue;
			line += 6;
		}
		if (keyed(line, "inactive_file", &value) || keyed(line, "active_file", &value))
			file += value;
		else if (keyed(line, v2 ? "file_dirty" : "dirty", &value) ||
			 keyed(line, v2 ? "file_writeback" : "writeback", &value))
			unclean += value;
	}
	lines_close(&lines);
	return file > unclean ? file - unclean : 0;
}

/* Lowers *room to what a limit leaves, and then writes its name; the end of a long name says more than its beginning. */
static void cgroup_limit(const char *directory, const char *limit_file, const char *usage_file, bool v2, uint64_t *room,
			 char *from, size_t size)
{
	uint64_t limit = number_in(UINT64_MAX, "%s/%s", directory, limit_file), used, left;
	char name[PATH_SIZE + 64];
	size_t n;

	if (limit == UINT64_MAX)
		return;
	used = number_in(0, "%s/%s", directory, usage_file);
	left = (limit > used ? limit - used : 0) + cgroup_reclaimable(directory, v2);
	if (left > limit)
		left = limit;
	if (left >= *room)
		return;
	*room = left;
	n = (size_t)snprintf(name, sizeof(name), "%s/%s", directory, limit_file);
	if (n < size)
		snprintf(from, size, "%s", name);
	else if (size > 4)
		snprintf(from, size, "...%s", name + n - (size - 4));
}

uint64_t topology_memory_available(char *from, size_t size)
{
	char directory[PATH_SIZE];
	uint64_t total, room;
	size_t top;

	if (size)
		snprintf(from, size, "MemAvailable");
	if (!read_memory(0, true, &total, &room))
		room = UINT64_MAX;
	if (cgroup_directory(NULL, directory, sizeof(directory), &top)) {
		do {
			cgroup_limit(directory, "memory.max", "memory.current", true, &room, from, size);
			cgroup_limit(directory, "memory.high", "memory.current", true, &room, from, size);
		} while (cgroup_up(directory, top));
	}
	if (cgroup_directory("memory", directory, sizeof(directory), &top)) {
		do
			cgroup_limit(directory, "memory.limit_in_bytes", "memory.usage_in_bytes", false, &room, from, size);
		while (cgroup_up(directory, top));
	}
	return room;
}

static void quota_limit(uint64_t quota, uint64_t period, unsigned *cpus)
{
	uint64_t n;

	if (!quota || !period || quota == UINT64_MAX)
		return;
	n = (quota + period - 1) / period;
	if (n < UINT32_MAX && (!*cpus || n < *cpus))
		*cpus = (unsigned)n;
}

unsigned topology_cpu_quota(void)
{
	char directory[PATH_SIZE], *line;
	unsigned cpus = 0;
	size_t top;

	if (cgroup_directory(NULL, directory, sizeof(directory), &top)) {
		do {
			unsigned long long quota, period;
			struct lines lines;

			if (lines_fact(&lines, "%s/cpu.max", directory) < 0)
				continue;
			line = lines_next(&lines);
			if (line && sscanf(line, "%llu %llu", &quota, &period) == 2)
				quota_limit(quota, period, &cpus);
			lines_close(&lines);
		} while (cgroup_up(directory, top));
	}
	if (cgroup_directory("cpu", directory, sizeof(directory), &top)) {
		do	/* -1 is no number here, so no quota */
			quota_limit(number_in(0, "%s/cpu.cfs_quota_us", directory),
				    number_in(0, "%s/cpu.cfs_period_us", directory), &cpus);
		while (cgroup_up(directory, top));
	}
	return cpus;
}

/* ---- limits of the process, huge pages --------------------------------------------------------------------------------- */

/* mlock() asks for the capability in the first user namespace: root of a rootless container doesn't have it. */
static bool first_user_namespace(void)
{
	unsigned inside, outside, count;
	struct lines lines;
	bool first = true;
	char *line;

	if (lines_fact(&lines, "/proc/self/uid_map") == 0) {
		line = lines_next(&lines);
		first = line && sscanf(line, "%u %u %u", &inside, &outside, &count) == 3 && inside == 0 && outside == 0 &&
			count == UINT32_MAX;
		lines_close(&lines);
	}
	return first;
}

uint64_t topology_memlock_limit(void)
{
	unsigned long long effective = 0;
	struct rlimit limit;
	struct lines lines;
	char *line;

	if (lines_fact(&lines, "/proc/self/status") == 0) {
		while ((line = lines_next(&lines)))
			if (sscanf(line, "CapEff: %llx", &effective) == 1)
				break;
		lines_close(&lines);
	}
	if (effective >> CAP_IPC_LOCK_BIT & 1 && first_user_namespace())
		return UINT64_MAX;
	if (getrlimit(RLIMIT_MEMLOCK, &limit) < 0 || limit.rlim_cur == RLIM_INFINITY)
		return UINT64_MAX;
	return limit.rlim_cur;
}

uint64_t topology_memlock_used(void)
{
	struct lines lines;
	uint64_t used = 0;
	char *line;

	if (lines_fact(&lines, "/proc/self/status") == 0) {
		while ((line = lines_next(&lines)))
			if (keyed(line, "VmLck", &used))
				break;
		lines_close(&lines);
	}
	return used;
}

uint64_t topology_hugetlb_size(void)
{
	struct lines lines;
	uint64_t size = 0;
	char *line;

	if (lines_fact(&lines, "/proc/meminfo") == 0) {
		while ((line = lines_next(&lines)))
			if (keyed(line, "Hugepagesize", &size))
				break;
		lines_close(&lines);
	}
	return size;
}

uint64_t topology_hugetlb_free(void)
{
	uint64_t size = topology_hugetlb_size(), pages, reserved;
	unsigned long long kib = (unsigned long long)size >> 10;

	if (!size)
		return 0;
	pages = number_in(0, HUGETLB "/hugepages-%llukB/free_hugepages", kib);
	reserved = number_in(0, HUGETLB "/hugepages-%llukB/resv_hugepages", kib);
	return pages > reserved ? (pages - reserved) * size : 0;
}

uint32_t topology_huge_page_size(void)
{
	uint64_t size = number_in(0, THP "/hpage_pmd_size");

	return size <= UINT32_MAX ? (uint32_t)size : 0;
}

/* The word in brackets of a file like "always [madvise] never". */
static void chosen_word(char *word, size_t size, const char *path)
{
	char *line, *begin = NULL, *end = NULL;
	struct lines lines;

	snprintf(word, size, "%s", "");
	if (lines_fact(&lines, "%s", path) < 0)
		return;
	line = lines_next(&lines);
	if (line)
		begin = strchr(line, '[');
	if (begin)
		end = strchr(begin, ']');
	if (end)
		snprintf(word, size, "%.*s", (int)(end - begin - 1), begin + 1);
	lines_close(&lines);
}

void topology_thp(char *word, size_t size, bool shmem)
{
	const char *file = shmem ? "shmem_enabled" : "enabled";
	char path[128];

	/* Newer kernels have a switch per page size, which is mostly set to "inherit". */
	snprintf(path, sizeof(path), THP "/hugepages-%ukB/%s", topology_huge_page_size() >> 10, file);
	chosen_word(word, size, path);
	if (!*word || strcmp(word, "inherit") == 0) {
		snprintf(path, sizeof(path), THP "/%s", file);
		chosen_word(word, size, path);
	}
}

/* ---- mappings ------------------------------------------------------------------------------------------------------------ */

int topology_mappings(uintptr_t start, uintptr_t end,
		      void (*fn)(void *arg, uintptr_t start, uintptr_t end, uint64_t huge, uint64_t mapping), void *arg)
{
	static const char *const keys[] = { "AnonHugePages", "ShmemPmdMapped", "Shared_Hugetlb", "Private_Hugetlb" };
	uint64_t from = 0, to = 0, huge = 0, value;
	struct lines lines;
	char *line;
	int ret = lines_open(&lines, "/proc/self/smaps");

	if (ret < 0)
		return fail(ret, "/proc/self/smaps can't be read (%s): mount /proc", strerror(-ret));
	for (;;) {
		unsigned long long first, last;
		int at = 0;

		line = lines_next(&lines);
		/* "7f00-7f10 rw-s …" opens a mapping; keys have a colon and no such pair. */
		if (!line || (sscanf(line, "%llx-%llx %n", &first, &last, &at) == 2 && at)) {
			if (from < to && from < end && to > start)
				fn(arg, from < start ? start : from, to > end ? end : to, huge, to - from);
			if (!line || first >= end)
				break;
			from = first;
			to = last;
			huge = 0;
			continue;
		}
		for (unsigned i = 0; i < sizeof(keys) / sizeof(*keys); i++)
			if (keyed(line, keys[i], &value))
				huge += value;
	}
	lines_close(&lines);
	return 0;
}
