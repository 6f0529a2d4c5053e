/* SPDX-License-Identifier: MIT */
/*
 * What the module and the kernel show of themselves under /sys, /proc, /lib/modules and /dev, for doctor, pool and
 * buffers. What the library says already (nodes, memory, limits of the process) isn't read again here.
 */
#ifndef FACTS_H
#define FACTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <offstage.h>
#include "../include/uapi/linux/offstage.h"

#define FACTS_PATH_MAX 4096
#define FACTS_POOLS_MAX 1024	/* the kernel's own bound on node numbers */

/* Put before every path; "" but in tests, as the library's topology_root. */
extern const char *facts_root;

/* Writes the path below facts_root; false when it is too long. */
bool facts_path(char path[FACTS_PATH_MAX], const char *format, ...) __attribute__((format(printf, 2, 3)));
bool facts_exist(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* The first line of a file, without its newline, or the number on it; false when it can't be read or is none. */
bool facts_line(char *line, size_t size, const char *format, ...) __attribute__((format(printf, 3, 4)));
bool facts_number(uint64_t *number, const char *format, ...) __attribute__((format(printf, 2, 3)));

struct facts_pool {
	uint32_t node;
	uint64_t reserved, free, in_use, orphaned, scrubbing, failed;	/* bytes */
};
/* By node, ascending; how many there are. 0: the module isn't loaded. */
size_t facts_pools(struct facts_pool pools[FACTS_POOLS_MAX]);

/* A node as the library sees it; false when it doesn't. */
bool facts_node(uint32_t node, struct offstage_node_info *info);

/*
 * Opens /dev/offstage and asks it what it is. A descriptor, or: -ENOENT, -EACCES and others of open(); -ENOTTY: it
 * isn't the module's; -EPROTO: it speaks another ABI, info->abi.
 */
int facts_device(struct offstage_ioc_info *info);

/* How movable memory becomes memory that can be pinned. */
#define FACTS_MAKE_NORMAL "give it normal memory with `daxctl reconfigure-device --mode=system-ram --no-movable " \
	"DEVICE`, or boot with memhp_default_state=online_kernel"

#endif
