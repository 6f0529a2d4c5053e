/* SPDX-License-Identifier: MIT */
/*
 * Facts about this machine: nodes, their CPUs and memory, and the limits that hold for this process. Read from /proc
 * and /sys at the call, never cached, never changed. Tests point topology_root at a tree of their own.
 */
#ifndef TOPOLOGY_H
#define TOPOLOGY_H

#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <offstage.h>

/* Put before /proc and /sys paths; "" but in tests. */
extern const char *topology_root;

/* Node numbers with memory, ascending, at most max of them; returns how many there are. */
unsigned topology_nodes(uint32_t *nodes, unsigned max);
/* -ENODEV with a sentence: not online, or no memory. */
int topology_node(uint32_t node, struct offstage_node_info *info);
/* The node's CPUs that this process may run on; empty for a memory-only node. */
void topology_node_cpus(uint32_t node, cpu_set_t *cpus);
uint32_t topology_local_node(void);	/* of the CPU that this thread runs on */

/* Room for memory: the least of MemAvailable and of every cgroup on the path; which is named in `from` (of size). */
uint64_t topology_memory_available(char *from, size_t size);
uint64_t topology_memlock_limit(void);	/* UINT64_MAX: none, or CAP_IPC_LOCK */
uint64_t topology_memlock_used(void);	/* VmLck of this process */
uint64_t topology_hugetlb_free(void);	/* bytes of the default size, less what is reserved */
uint32_t topology_huge_page_size(void);	/* of transparent huge pages, 0: none */
void topology_thp(char *word, size_t size, bool shmem);	/* the chosen word of enabled / shmem_enabled */

/* CPUs' worth of time that the cgroup allows, rounded up; 0: no quota. */
unsigned topology_cpu_quota(void);

#endif
