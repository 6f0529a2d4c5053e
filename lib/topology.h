/* SPDX-License-Identifier: MIT */
/*
 * Facts about this machine: nodes, their CPUs and memory, and the limits that hold for this process. Read from /proc
 * and /sys at the call, never cached, never changed, with no heap allocation. A file that is missing or unreadable
 * makes its fact unknown, which means "no limit" for limits and 0 or "" for the rest. Tests point topology_root at a
 * tree of their own.
 */
#ifndef TOPOLOGY_H
#define TOPOLOGY_H

#include <sched.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <offstage.h>

#define TOPOLOGY_NODES_MAX 1024		/* the kernel's own bound on node numbers */

/* Put before /proc and /sys paths; "" but in tests. */
extern const char *topology_root;

/* Can facts be read at all? -EMFILE, -ENFILE with a sentence: with no descriptor left, every limit would be unknown. */
int topology_check(void);

/* Node numbers with memory, ascending, at most max of them; returns how many there are. */
unsigned topology_nodes(uint32_t *nodes, unsigned max);
/* -ENODEV with a sentence: not online, or no memory. */
int topology_node(uint32_t node, struct offstage_node_info *info);
/* The node's CPUs that this process may run on; empty for a memory-only node. */
void topology_node_cpus(uint32_t node, cpu_set_t *cpus);
/*
 * The node of the CPU that this thread runs on; when that one has no normal memory, or the cpuset forbids it, the
 * nearest that does.
 */
uint32_t topology_local_node(void);

/* Room for memory: the least of MemAvailable and of every cgroup on the path; which is named in `from` (of size). */
uint64_t topology_memory_available(char *from, size_t size);
uint64_t topology_memlock_limit(void);	/* UINT64_MAX: none, or CAP_IPC_LOCK */
uint64_t topology_memlock_used(void);	/* VmLck of this process */
uint64_t topology_hugetlb_free(void);	/* bytes of the default size, less what is reserved */
uint64_t topology_hugetlb_size(void);	/* the default size of hugetlb pages, 0: none */
uint32_t topology_huge_page_size(void);	/* of transparent huge pages, 0: none */
/* The chosen word of enabled / shmem_enabled, as it holds for pages of topology_huge_page_size(). */
void topology_thp(char *word, size_t size, bool shmem);

/* CPUs' worth of time that the cgroup allows, rounded up; 0: no quota. */
unsigned topology_cpu_quota(void);

/*
 * Calls fn for every part of this process's mappings between start and end, in order: its bounds (cut to start and
 * end) and, of the whole mapping, how many bytes are mapped by huge pages. -errno: /proc/self/smaps can't be read.
 */
int topology_mappings(uintptr_t start, uintptr_t end,
		      void (*fn)(void *arg, uintptr_t start, uintptr_t end, uint64_t huge, uint64_t mapping), void *arg);

#endif
