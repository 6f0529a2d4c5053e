/* SPDX-License-Identifier: MIT */
/*
 * Facts are read rightly from trees that stand for other machines: several nodes, memory-only ones, movable ones,
 * containers with limits, and files that are missing, cut or full of nonsense.
 */
#include <ftw.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include "unit.h"
#include "../../lib/topology.h"

#define NODE "sys/devices/system/node/"
#define MiB ((uint64_t)1 << 20)
#define GiB ((uint64_t)1 << 30)

static char tree[64];

/* Writes a file of the tree, with the directories that it needs. */
static void put(const char *path, const char *text)
{
	char full[512];
	FILE *file;

	snprintf(full, sizeof(full), "%s/%s", tree, path);
	for (char *slash = full + strlen(tree) + 1; (slash = strchr(slash, '/')); slash++) {
		*slash = '\0';
		mkdir(full, 0755);
		*slash = '/';
	}
	file = fopen(full, "w");
	assert_non_null(file);
	fputs(text, file);
	fclose(file);
}

static int new_tree(void **unused)
{
	(void)unused;
	strcpy(tree, "/tmp/offstage-tree-XXXXXX");
	if (!mkdtemp(tree))
		return -1;
	topology_root = tree;
	return 0;
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *at)
{
	(void)st;
	(void)type;
	(void)at;
	return remove(path);
}

static int remove_tree(void **unused)
{
	(void)unused;
	topology_root = "";
	return nftw(tree, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

/* Two sockets, a CXL node without CPUs, and one more whose memory came online as movable. */
static void put_four_nodes(void)
{
	put(NODE "online", "0-3\n");
	put(NODE "has_memory", "0-3\n");
	put(NODE "has_normal_memory", "0-2\n");
	put(NODE "node0/cpulist", "0-3,8\n");
	put(NODE "node1/cpulist", "4-7\n");
	put(NODE "node2/cpulist", "\n");
	put(NODE "node3/cpulist", "\n");
	put(NODE "node0/distance", "10 21 14 24\n");
	put(NODE "node0/meminfo",
	    "Node 0 MemTotal:       8388608 kB\nNode 0 MemFree:        1048576 kB\nNode 0 MemUsed: 1 kB\n"
	    "Node 0 Active(file):    524288 kB\nNode 0 Inactive(file):  524288 kB\nNode 0 Dirty:          262144 kB\n"
	    "Node 0 Writeback:            0 kB\nNode 0 SReclaimable:    131072 kB\n");
	put(NODE "node1/meminfo", "Node 1 MemTotal: 8388608 kB\nNode 1 MemFree: 4194304 kB\n");
	put(NODE "node2/meminfo", "Node 2 MemTotal: 16777216 kB\nNode 2 MemFree: 16000000 kB\n");
	put(NODE "node3/meminfo", "Node 3 MemTotal: 16777216 kB\nNode 3 MemFree: 16000000 kB\n");
	put("proc/zoneinfo", "Node 0, zone      DMA\n  pages free     3840\n        min      8\n        low      256\n"
	    "Node 0, zone   Normal\n  per-node stats\n      nr_inactive_anon 5\n        low      768\n        high     900\n"
	    "Node 1, zone   Normal\n        low      100000\n");
	put("proc/buddyinfo",
	    "Node 0, zone      DMA      0      0      0      0      0      0      0      0      1      1      3 \n"
	    "Node 0, zone   Normal    485   3293   1052      1      3     81     54     33     12      2      5 \n"
	    "Node 1, zone   Normal      0      0      0      0      0      0      0      0      0      7      0 \n");
	put("sys/kernel/mm/transparent_hugepage/hpage_pmd_size", "2097152\n");
	put("proc/self/status", "Name:\tx\nVmLck:\t     128 kB\nCapEff:\t0000000000000000\nMems_allowed:\t0b\nMems_allowed_list:\t0-1,3\n");
}

static void test_nodes_have_their_memory_cpus_and_flags(void **unused)
{
	struct offstage_node_info info;
	uint32_t nodes[8];

	(void)unused;
	put_four_nodes();
	assert_int_equal(topology_nodes(nodes, 8), 4);
	assert_int_equal(nodes[3], 3);
	assert_int_equal(topology_nodes(nodes, 1), 4);
	OK(topology_node(0, &info));
	assert_int_equal(info.cpus, 5);
	assert_int_equal(info.total, 8 * GiB);
	/* Free, and clean file cache, and half of the slab, less what the kernel keeps (1024 pages). */
	assert_int_equal(info.available, GiB + GiB - 256 * MiB + 64 * MiB - 1024 * (uint64_t)sysconf(_SC_PAGESIZE));
	assert_int_equal(info.flags, OFFSTAGE_NODE_NORMAL | OFFSTAGE_NODE_ALLOWED);
	OK(topology_node(2, &info));
	assert_int_equal(info.cpus, 0);
	assert_int_equal(info.flags, OFFSTAGE_NODE_NORMAL);
	OK(topology_node(3, &info));
	assert_int_equal(info.flags, OFFSTAGE_NODE_ALLOWED);
}

static void test_free_huge_blocks_are_counted_without_the_dma_zone(void **unused)
{
	struct offstage_node_info info;

	(void)unused;
	if (sysconf(_SC_PAGESIZE) != 4096)
		SKIP("the tree is of a machine with 4 KiB pages, this one has others");
	put_four_nodes();
	OK(topology_node(0, &info));
	assert_int_equal(info.huge_free, 2 * 2 * MiB + 5 * 4 * MiB);
	OK(topology_node(1, &info));
	assert_int_equal(info.huge_free, 14 * MiB);
	OK(topology_node(2, &info));
	assert_int_equal(info.huge_free, 0);
}

static void test_absent_nodes_are_refused_by_name(void **unused)
{
	struct offstage_node_info info;

	(void)unused;
	put_four_nodes();
	put(NODE "node4/meminfo", "Node 4 MemTotal: 0 kB\n");
	REFUSED(topology_node(7, &info), -ENODEV, "node 7 isn't online");
	REFUSED(topology_node(4, &info), -ENODEV, "node 4 has no memory");
	REFUSED(topology_node(UINT32_MAX, &info), -ENODEV, "no node 4294967295");
}

static void test_kernel_without_nodes_is_one_node(void **unused)
{
	struct offstage_node_info info;
	uint32_t node = 9;

	(void)unused;
	put("proc/meminfo", "MemTotal: 1048576 kB\nMemFree: 1 kB\nMemAvailable: 524288 kB\n");
	assert_int_equal(topology_nodes(&node, 1), 1);
	assert_int_equal(node, 0);
	OK(topology_node(0, &info));
	assert_int_equal(info.total, GiB);
	assert_int_equal(info.available, GiB / 2);
	assert_int_equal(info.flags, OFFSTAGE_NODE_NORMAL | OFFSTAGE_NODE_ALLOWED);
	REFUSED(topology_node(1, &info), -ENODEV, "knows no NUMA nodes");
}

static void test_local_node_is_the_nearest_that_serves(void **unused)
{
	(void)unused;
	put_four_nodes();
	if (topology_local_node() != 0)
		SKIP("this thread's CPU isn't on node 0, to which the tree's distances belong");
	/* Node 0 leaves the cpuset: node 2 is nearest, but not allowed either; node 3 is movable. */
	put("proc/self/status", "Mems_allowed_list:\t1,3\n");
	assert_int_equal(topology_local_node(), 1);
	put("proc/self/status", "Mems_allowed_list:\t1-3\n");
	assert_int_equal(topology_local_node(), 2);
}

static void put_meminfo(void)
{
	put("proc/meminfo", "MemTotal: 16777216 kB\nMemFree: 1 kB\nMemAvailable: 8388608 kB\nHugepagesize: 2048 kB\n");
}

static void test_least_limit_on_the_cgroup_path_is_named(void **unused)
{
	char from[96];

	(void)unused;
	put_meminfo();
	assert_int_equal(topology_memory_available(from, sizeof(from)), 8 * GiB);
	assert_string_equal(from, "MemAvailable");

	put("proc/self/cgroup", "0::/a.slice/b.scope\n");
	put("proc/self/mountinfo", "25 1 0:22 / /sys rw - sysfs sysfs rw\n"
	    "29 25 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n");
	put("sys/fs/cgroup/a.slice/b.scope/memory.max", "max\n");
	put("sys/fs/cgroup/a.slice/b.scope/memory.current", "1073741824\n");
	assert_int_equal(topology_memory_available(from, sizeof(from)), 8 * GiB);

	/* The parent's limit holds too; file cache that is clean counts as room, shared memory isn't on its lists. */
	put("sys/fs/cgroup/a.slice/memory.max", "4294967296\n");
	put("sys/fs/cgroup/a.slice/memory.current", "3221225472\n");
	put("sys/fs/cgroup/a.slice/memory.stat", "anon 100\nfile 3000000000\nfile_dirty 268435456\nfile_writeback 0\n"
	    "shmem 2000000000\ninactive_file 536870912\nactive_file 268435456\nworkingset_refault_file 7\n");
	assert_int_equal(topology_memory_available(from, sizeof(from)), GiB + 512 * MiB);
	assert_string_equal(from, "/sys/fs/cgroup/a.slice/memory.max");

	/* Above memory.high a process is throttled to a halt: no room either. */
	put("sys/fs/cgroup/a.slice/b.scope/memory.high", "1610612736\n");
	assert_int_equal(topology_memory_available(from, sizeof(from)), 512 * MiB);
	assert_string_equal(from, "/sys/fs/cgroup/a.slice/b.scope/memory.high");
	assert_int_equal(topology_memory_available(NULL, 0), 512 * MiB);

	/* More in use than allowed is no room, not a huge number. */
	put("sys/fs/cgroup/a.slice/b.scope/memory.high", "1000\n");
	assert_int_equal(topology_memory_available(from, sizeof(from)), 0);
}

static void test_limit_of_a_container_with_its_own_mount_is_found(void **unused)
{
	char from[96];

	(void)unused;
	put_meminfo();
	/* The host's path and a bind mount of just that group. */
	put("proc/self/cgroup", "0::/system.slice/docker-1.scope\n");
	put("proc/self/mountinfo", "29 25 0:26 /system.slice/docker-1.scope /sys/fs/cgroup ro - cgroup2 cgroup rw\n");
	put("sys/fs/cgroup/memory.max", "2147483648\n");
	put("sys/fs/cgroup/memory.current", "1073741824\n");
	assert_int_equal(topology_memory_available(from, sizeof(from)), GiB);
	assert_string_equal(from, "/sys/fs/cgroup/memory.max");
	/* A namespace of its own, entered from outside. */
	put("proc/self/cgroup", "0::/../other\n");
	put("proc/self/mountinfo", "29 25 0:26 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n");
	assert_int_equal(topology_memory_available(from, sizeof(from)), GiB);
}

static void test_hybrid_hierarchies_are_both_read(void **unused)
{
	char from[96];

	(void)unused;
	put_meminfo();
	put("proc/self/cgroup", "4:memory:/batch/job\n3:cpuset:/\n2:cpu,cpuacct:/batch\n0::/\n");
	put("proc/self/mountinfo", "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
	    "33 31 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
	    "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n");
	put("sys/fs/cgroup/memory/batch/job/memory.limit_in_bytes", "9223372036854771712\n");
	put("sys/fs/cgroup/memory/batch/memory.limit_in_bytes", "2147483648\n");
	put("sys/fs/cgroup/memory/batch/memory.usage_in_bytes", "1610612736\n");
	put("sys/fs/cgroup/memory/batch/memory.stat", "inactive_file 1\nactive_file 1\ndirty 1\n"
	    "total_inactive_file 268435456\ntotal_active_file 0\ntotal_dirty 134217728\n");
	assert_int_equal(topology_memory_available(from, sizeof(from)), 640 * MiB);
	assert_string_equal(from, "/sys/fs/cgroup/memory/batch/memory.limit_in_bytes");
	assert_int_equal(topology_cpu_quota(), 0);
	put("sys/fs/cgroup/cpu/batch/cpu.cfs_quota_us", "-1\n");
	put("sys/fs/cgroup/cpu/batch/cpu.cfs_period_us", "100000\n");
	assert_int_equal(topology_cpu_quota(), 0);
	put("sys/fs/cgroup/cpu/batch/cpu.cfs_quota_us", "350000\n");
	assert_int_equal(topology_cpu_quota(), 4);
}

static void test_least_cpu_quota_on_the_path_holds(void **unused)
{
	(void)unused;
	put("proc/self/cgroup", "0::/a/b\n");
	put("proc/self/mountinfo", "29 25 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
	assert_int_equal(topology_cpu_quota(), 0);
	put("sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
	assert_int_equal(topology_cpu_quota(), 0);
	put("sys/fs/cgroup/a/cpu.max", "150000 100000\n");
	assert_int_equal(topology_cpu_quota(), 2);
	put("sys/fs/cgroup/a/b/cpu.max", "1000 100000\n");
	assert_int_equal(topology_cpu_quota(), 1);
}

static void test_long_limit_name_keeps_its_end(void **unused)
{
	char from[96], group[300], path[512];

	(void)unused;
	put_meminfo();
	memset(group, 'g', 200);
	strcpy(group + 200, "/inner");
	snprintf(path, sizeof(path), "0::/%s\n", group);
	put("proc/self/cgroup", path);
	put("proc/self/mountinfo", "29 25 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
	snprintf(path, sizeof(path), "sys/fs/cgroup/%s/memory.max", group);
	put(path, "4096\n");
	assert_int_equal(topology_memory_available(from, sizeof(from)), 4096);
	assert_int_equal(strlen(from), sizeof(from) - 1);
	assert_memory_equal(from, "...ggg", 6);
	assert_non_null(strstr(from, "g/inner/memory.max"));
}

static void test_hugetlb_pool_is_free_less_reserved(void **unused)
{
	struct offstage_node_info info;

	(void)unused;
	put_four_nodes();
	put_meminfo();
	put("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "10\n");
	put("sys/kernel/mm/hugepages/hugepages-2048kB/resv_hugepages", "4\n");
	put(NODE "node0/hugepages/hugepages-2048kB/free_hugepages", "2\n");
	put(NODE "node1/hugepages/hugepages-2048kB/free_hugepages", "8\n");
	assert_int_equal(topology_hugetlb_size(), 2 * MiB);
	assert_int_equal(topology_hugetlb_free(), 12 * MiB);
	OK(topology_node(0, &info));
	assert_int_equal(info.hugetlb_free, 4 * MiB);
	OK(topology_node(1, &info));
	assert_int_equal(info.hugetlb_free, 12 * MiB);
}

static void test_chosen_words_of_huge_pages(void **unused)
{
	char word[16];

	(void)unused;
	topology_thp(word, sizeof(word), false);
	assert_string_equal(word, "");
	put("sys/kernel/mm/transparent_hugepage/hpage_pmd_size", "2097152\n");
	put("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n");
	put("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size advise [never] deny force\n");
	topology_thp(word, sizeof(word), false);
	assert_string_equal(word, "madvise");
	topology_thp(word, sizeof(word), true);
	assert_string_equal(word, "never");
	/* The switch of the size itself comes first, unless it inherits. */
	put("sys/kernel/mm/transparent_hugepage/hugepages-2048kB/shmem_enabled", "always [inherit] within_size advise never\n");
	topology_thp(word, sizeof(word), true);
	assert_string_equal(word, "never");
	put("sys/kernel/mm/transparent_hugepage/hugepages-2048kB/shmem_enabled", "always inherit within_size [advise] never\n");
	topology_thp(word, sizeof(word), true);
	assert_string_equal(word, "advise");
}

static void test_capability_lifts_memlock_in_the_first_namespace_alone(void **unused)
{
	struct rlimit before, small = { 65536, 65536 };
	pid_t child;
	int status;

	(void)unused;
	getrlimit(RLIMIT_MEMLOCK, &before);
	small.rlim_max = before.rlim_max;
	child = fork();
	if (!child) {
		if (setrlimit(RLIMIT_MEMLOCK, &small))
			_exit(1);
		put("proc/self/status", "VmLck:\t 12 kB\nCapEff:\t0000000000000000\n");
		if (topology_memlock_limit() != 65536 || topology_memlock_used() != 12288)
			_exit(2);
		put("proc/self/status", "CapEff:\t0000000000004000\n");
		put("proc/self/uid_map", "         0          0 4294967295\n");
		if (topology_memlock_limit() != UINT64_MAX)
			_exit(3);
		put("proc/self/uid_map", "         0       1000          1\n");
		_exit(topology_memlock_limit() == 65536 ? 0 : 4);
	}
	assert_int_equal(waitpid(child, &status, 0), child);
	assert_int_equal(status, 0);
}

/* Everything is asked of a tree; nothing may crash or hang, and what comes is of its range. */
static void ask_everything(void)
{
	struct offstage_node_info info;
	uint32_t nodes[4];
	char text[96];
	cpu_set_t cpus;

	topology_nodes(nodes, 4);
	for (uint32_t node = 0; node < 4; node++) {
		if (topology_node(node, &info) == 0)
			assert_true(info.available <= info.total);
		topology_node_cpus(node, &cpus);
	}
	assert_true(topology_local_node() < TOPOLOGY_NODES_MAX);
	topology_memory_available(text, sizeof(text));
	topology_memlock_limit();
	topology_memlock_used();
	topology_hugetlb_free();
	topology_thp(text, 16, true);
	topology_thp(text, 16, false);
	topology_cpu_quota();
}

static const char *const files[] = {
	NODE "online", NODE "has_memory", NODE "has_normal_memory", NODE "node0/cpulist", NODE "node0/meminfo",
	NODE "node0/distance", NODE "node1/meminfo", "proc/zoneinfo", "proc/buddyinfo", "proc/meminfo", "proc/self/status",
	"proc/self/cgroup", "proc/self/mountinfo", "proc/self/uid_map", "sys/fs/cgroup/memory.max",
	"sys/fs/cgroup/memory.current", "sys/fs/cgroup/memory.stat", "sys/fs/cgroup/cpu.max",
	"sys/kernel/mm/transparent_hugepage/hpage_pmd_size", "sys/kernel/mm/transparent_hugepage/enabled",
	"sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages",
};
#define N_FILES (sizeof(files) / sizeof(*files))

static void test_missing_files_are_no_limit_and_no_crash(void **unused)
{
	char from[96];

	(void)unused;
	ask_everything();
	assert_int_equal(topology_memory_available(from, sizeof(from)), UINT64_MAX);
	assert_int_equal(topology_huge_page_size(), 0);
	assert_int_equal(topology_hugetlb_free(), 0);
}

/* Random texts made of what such files are made of, with a fixed seed. */
static void test_nonsense_in_files_is_survived(void **unused)
{
	static const char *const words[] = {
		"Node 0, zone   Normal", "Node 0 MemTotal:", "MemTotal:", "MemFree: ", "0-", "0-3,", "4294967295", "-1", "max",
		"18446744073709551616", " kB", "\n", "\n", " ", "[", "]", "never", "0::/", "../..", "4:memory:", " - cgroup2 x rw",
		" - cgroup x rw,memory", "29 25 0:26 / /sys/fs/cgroup rw", "low", "\t", "CapEff: ", "ffffffffffffffff", "VmLck:",
		"Mems_allowed_list:", "99999999999999999999-5", ":", "::", "/", "active_file 5", "total_", "%s%n", "\xff\xfe",
	};
	unsigned seed = 7;
	static char text[20000];

	(void)unused;
	for (int round = 0; round < 150; round++) {
		for (size_t i = 0; i < N_FILES; i++) {
			size_t n = 0, most = rand_r(&seed) % 8 ? 300 : sizeof(text) - 200;

			if (rand_r(&seed) % 6 == 0)
				continue;
			while (n < most)
				n += (size_t)sprintf(text + n, "%s", words[(unsigned)rand_r(&seed) % (sizeof(words) / sizeof(*words))]);
			put(files[i], text);
		}
		ask_everything();
	}
}

static void test_lines_longer_than_the_buffer_hide_nothing(void **unused)
{
	static char text[40000];
	char from[96];

	(void)unused;
	put_meminfo();
	put("proc/self/cgroup", "0::/a\n");
	/* An overlay's mount options can fill pages. */
	strcpy(text, "28 1 0:25 / / rw - overlay overlay rw,lowerdir=");
	memset(text + strlen(text), 'l', 30000);
	strcat(text, "\n29 25 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
	put("proc/self/mountinfo", text);
	put("sys/fs/cgroup/a/memory.max", "4096");
	assert_int_equal(topology_memory_available(from, sizeof(from)), 4096);
}

static void count_parts(void *arg, uintptr_t start, uintptr_t end, uint64_t huge, uint64_t mapping)
{
	assert_true(start < end && end - start <= mapping && huge <= mapping);
	*(uint64_t *)arg += end - start;
}

static void test_mappings_are_cut_to_what_was_asked(void **unused)
{
	uint64_t found = 0, page = (uint64_t)sysconf(_SC_PAGESIZE);
	uintptr_t here = (uintptr_t)&files & ~(page - 1);

	(void)unused;
	OK(topology_mappings(here, here + page, count_parts, &found));
	assert_int_equal(found, page);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(test_nodes_have_their_memory_cpus_and_flags, new_tree, remove_tree),
		cmocka_unit_test_setup_teardown(test_free_huge_blocks_are_counted_without_the_dma_zone, new_tree, remove_tree),
		cmocka_unit_test_setup_teardown(test_absent_nodes_are_refused_by_name, new_tree, remove_tree),
		cmocka_unit_test_setup_teardown(test_kernel_without_nodes_is_one_node, new_tree, remove_tree),
		cmocka_unit_test_setup_teardown(test_local_node_is_the_nearest_that_serves, new_tree, remove_tree),
		cmocka_unit_test_setup_teardown(test_least_limit_on_the_cgroup_path_is_named, new_tree, remove_tree),
		cmocka_unit_test_setup_teardown(test_limit_of_a_container_with_its_own_mount_is_found, new_tree, remove_tree),
		cmocka_unit_test_setup_teardown(test_hybrid_hierarchies_are_both_read, new_tree, remove_tree),
		cmocka_unit_test_setup_teardown(test_least_cpu_quota_on_the_path_holds, new_tree, remove_tree),
		cmocka_unit_test_setup_teardown(test_long_limit_name_keeps_its_end, new_tree, remove_tree),
		cmocka_unit_test_setup_teardown(test_hugetlb_pool_is_free_less_reserved, new_tree, remove_tree),
		cmocka_unit_test_setup_teardown(test_chosen_words_of_huge_pages, new_tree, remove_tree),
		cmocka_unit_test_setup_teardown(test_capability_lifts_memlock_in_the_first_namespace_alone, new_tree, remove_tree),
		cmocka_unit_test_setup_teardown(test_missing_files_are_no_limit_and_no_crash, new_tree, remove_tree),
		cmocka_unit_test_setup_teardown(test_nonsense_in_files_is_survived, new_tree, remove_tree),
		cmocka_unit_test_setup_teardown(test_lines_longer_than_the_buffer_hide_nothing, new_tree, remove_tree),
		cmocka_unit_test(test_mappings_are_cut_to_what_was_asked),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
