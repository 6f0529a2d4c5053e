/* SPDX-License-Identifier: MIT */
/* Readers of what the module and the kernel show. See facts.h. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>
#include "facts.h"

#define POOLS "/sys/class/offstage/offstage"

const char *facts_root = "";

static bool path_from(char path[FACTS_PATH_MAX], const char *format, va_list args)
{
	int n = snprintf(path, FACTS_PATH_MAX, "%s", facts_root);

	if (n >= 0 && n < FACTS_PATH_MAX)
		n += vsnprintf(path + n, FACTS_PATH_MAX - (size_t)n, format, args);
	return n >= 0 && n < FACTS_PATH_MAX;
}

bool facts_path(char path[FACTS_PATH_MAX], const char *format, ...)
{
	va_list args;
	bool fits;

	va_start(args, format);
	fits = path_from(path, format, args);
	va_end(args);
	return fits;
}

bool facts_exist(const char *format, ...)
{
	char path[FACTS_PATH_MAX];
	va_list args;
	bool there;

	va_start(args, format);
	there = path_from(path, format, args) && access(path, F_OK) == 0;
	va_end(args);
	return there;
}

static bool line_from(char *line, size_t size, const char *format, va_list args)
{
	char path[FACTS_PATH_MAX];
	FILE *file = path_from(path, format, args) ? fopen(path, "re") : NULL;
	bool got;

	if (!file)
		return false;
	got = fgets(line, (int)size, file);
	fclose(file);
	if (got)
		line[strcspn(line, "\n")] = '\0';
	return got;
}

bool facts_line(char *line, size_t size, const char *format, ...)
{
	va_list args;
	bool got;

	va_start(args, format);
	got = line_from(line, size, format, args);
	va_end(args);
	return got;
}

bool facts_number(uint64_t *number, const char *format, ...)
{
	char line[32], *end;
	va_list args;
	bool got;

	va_start(args, format);
	got = line_from(line, sizeof(line), format, args);
	va_end(args);
	if (!got || *line < '0' || *line > '9')
		return false;
	*number = strtoull(line, &end, 10);
	return !*end;
}

/* ---- pools and nodes --------------------------------------------------------------------------------------------- */

static int by_node(const void *a, const void *b)
{
	uint32_t x = ((const struct facts_pool *)a)->node, y = ((const struct facts_pool *)b)->node;

	return (x > y) - (x < y);
}

static void read_pool(struct facts_pool *pool)
{
	const struct {
		const char *name;
		uint64_t *to;
	} counts[] = {
		{ "reserved", &pool->reserved }, { "free", &pool->free }, { "in_use", &pool->in_use },
		{ "orphaned", &pool->orphaned }, { "scrubbing", &pool->scrubbing }, { "failed", &pool->failed },
	};

	for (size_t i = 0; i < sizeof(counts) / sizeof(*counts); i++)
		if (!facts_number(counts[i].to, POOLS "/node%u/%s", pool->node, counts[i].name))
			*counts[i].to = 0;
}

size_t facts_pools(struct facts_pool pools[FACTS_POOLS_MAX])
{
	char path[FACTS_PATH_MAX];
	DIR *directory = facts_path(path, POOLS) ? opendir(path) : NULL;
	struct dirent *entry;
	size_t n = 0;

	while (directory && n < FACTS_POOLS_MAX && (entry = readdir(directory))) {
		int end = 0;

		if (sscanf(entry->d_name, "node%u%n", &pools[n].node, &end) == 1 && !entry->d_name[end])
			read_pool(&pools[n++]);
	}
	if (directory)
		closedir(directory);
	qsort(pools, n, sizeof(*pools), by_node);
	return n;
}

bool facts_node(uint32_t node, struct offstage_node_info *info)
{
	struct offstage_options o = { .size = sizeof(o), .threads = 1 };
	struct offstage *ctx;
	bool found = false;

	if (offstage_open(&o, &ctx))
		return false;
	for (uint32_t i = 0; !found; i++) {
		*info = (struct offstage_node_info){ .size = sizeof(*info) };
		if (offstage_node_info(ctx, i, info))
			break;
		found = info->node == node;
	}
	offstage_close(ctx);
	return found;
}

/* ---- the device -------------------------------------------------------------------------------------------------- */

int facts_device(struct offstage_ioc_info *info)
{
	char path[FACTS_PATH_MAX];
	int fd, ret = 0;

	*info = (struct offstage_ioc_info){ .size = sizeof(*info) };
	if (!facts_path(path, "/dev/offstage"))
		return -ENAMETOOLONG;
	fd = open(path, O_RDWR | O_CLOEXEC);
	if (fd < 0)
		return -errno;
	if (ioctl(fd, OFFSTAGE_IOC_INFO, info) < 0)
		ret = -errno;
	else if (info->abi != OFFSTAGE_ABI)
		ret = -EPROTO;
	if (!ret)
		return fd;
	close(fd);
	return ret;
}
