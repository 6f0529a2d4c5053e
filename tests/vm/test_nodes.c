/* SPDX-License-Identifier: MIT */
/*
 * Nodes and groups of processes: what numa_maps says, memory that comes and goes, movable memory, cpusets, memory and
 * CPU limits of a cgroup. The machine's last node has no CPU, and is what a CXL memory expander looks like. See module.h.
 */
#include <dirent.h>
#include <signal.h>
#include "module.h"

#define CGROUPS "/sys/fs/cgroup"
#define CGROUP CGROUPS "/offstage-test"

static int ask_node(int device, uint32_t node, struct offstage_ioc_node *info)
{
	*info = (struct offstage_ioc_node){ .size = sizeof(*info), .node = node };
	return ioctl(device, OFFSTAGE_IOC_NODE, info) < 0 ? -errno : 0;
}

static void test_numa_maps_shows_the_placement(void **unused)
{
	uint32_t nodes[2] = { 1, 0 };
	struct offstage_ioc_create c = creation(8 * HUGE);
	int device = device_open(), fd;
	char line[1024], *data;
	bool found = false;
	FILE *maps;

	(void)unused;
	if (!two_nodes())
		SKIP("this machine has one node with normal memory");
	c.placement = OFFSTAGE_IOC_INTERLEAVE;
	c.nodes = (uintptr_t)nodes;
	c.n_nodes = 2;
	fd = create(device, &c);
	assert_true(fd >= 0);
	data = map(fd, 8 * HUGE, 0);
	for (int i = 0; i < 8; i++)
		data[i * HUGE] = 1;
	maps = fopen("/proc/self/numa_maps", "r");
	if (!maps)
		SKIP("this kernel has no numa_maps");
	while (fgets(line, sizeof(line), maps))
		if (strtoull(line, NULL, 16) == (uintptr_t)data) {
			const char *n0 = strstr(line, " N0="), *n1 = strstr(line, " N1=");

			found = true;
			assert_true(n0 && n1);
			assert_int_equal(atoi(n0 + 4), atoi(n1 + 4));
			assert_true(atoi(n0 + 4) > 0);
		}
	fclose(maps);
	assert_true(found);
	munmap(data, 8 * HUGE);
	close(fd);
	close(device);
	assert_all_is_free();
}

/* ---- memory that comes and goes -------------------------------------------------------------------------------------------- */

/* The node whose memory is all offline, or -1: the machine of scripts/vm has one, with a DIMM. */
static int dormant_node(void)
{
	for (int node = 1; node < 8; node++) {
		char blocks[80], memory[80];

		snprintf(blocks, sizeof(blocks), "/sys/devices/system/node/node%d", node);
		snprintf(memory, sizeof(memory), "/sys/class/offstage/offstage/node%d", node);
		if (access(blocks, F_OK) == 0 && access(memory, F_OK))
			return node;
	}
	return -1;
}

/* Writes to the state of every memory block of the node. false: one of them didn't take it. */
static bool set_blocks(int node, const char *state)
{
	char path[300];
	struct dirent *entry;
	int blocks = 0, taken = 0;
	DIR *directory;

	snprintf(path, sizeof(path), "/sys/devices/system/node/node%d", node);
	directory = opendir(path);
	while (directory && (entry = readdir(directory))) {
		if (strncmp(entry->d_name, "memory", 6) || entry->d_name[6] < '0' || entry->d_name[6] > '9')
			continue;
		snprintf(path, sizeof(path), "/sys/devices/system/memory/%.200s/state", entry->d_name);
		blocks++;
		taken += write_text(path, state);
	}
	if (directory)
		closedir(directory);
	return blocks && taken == blocks;
}

static void test_memory_that_comes_and_goes_is_told_apart(void **unused)
{
	int device = device_open(), node = dormant_node(), fd;
	struct offstage_ioc_create c;
	struct offstage_ioc_node info;
	uint32_t where = (uint32_t)node;

	(void)unused;
	if (node < 0)
		SKIP("this machine has no node whose memory is offline");
	c = on_node(&where, HUGE);

	/* It isn't there. */
	assert_int_equal(create(device, &c), -ENODEV);
	assert_int_equal(ask_node(device, where, &info), -ENODEV);

	/* It comes as movable memory, as daxctl has it by default: named, and refused. */
	assert_true(set_blocks(node, "online_movable"));
	assert_int_equal(create(device, &c), -EOPNOTSUPP);
	assert_int_equal(ask_node(device, where, &info), 0);
	assert_false(info.flags & OFFSTAGE_IOC_NODE_NORMAL);
	{
		struct offstage_ioc_reserve r = { .size = sizeof(r), .node = where, .bytes = HUGE };

		assert_int_equal(ioctl(device, OFFSTAGE_IOC_RESERVE, &r), -1);
		assert_int_equal(errno, EOPNOTSUPP);
	}

	/* The remedy: memory that can be pinned. It has a pool like any other, though the module was there before it. */
	assert_true(set_blocks(node, "offline"));
	assert_true(set_blocks(node, "online_kernel"));
	reserve(device, where, 8 * HUGE);
	assert_int_equal(node_count(node, "free"), 8 * HUGE);
	fd = create(device, &c);
	assert_true(fd >= 0);
	assert_int_equal(node_count(node, "in_use"), HUGE);

	/* What is in a pool can't be taken away: the kernel says so, and nothing is lost. */
	assert_false(set_blocks(node, "offline"));
	assert_int_equal(node_count(node, "reserved"), 8 * HUGE);
	assert_int_equal(node_count(node, "free"), 7 * HUGE);
	close(fd);
	assert_all_is_free();
	set_blocks(node, "online_kernel");
	assert_int_equal(node_count(node, "free"), 8 * HUGE);

	/* Without it, the memory goes, if the kernel itself has put nothing there that can't move. */
	reserve(device, where, 0);
	if (set_blocks(node, "offline"))
		assert_int_equal(create(device, &c), -ENODEV);
	close(device);
}

/* ---- cgroups ---------------------------------------------------------------------------------------------------------------------- */

/* A cgroup with the controller, or a reason to skip. */
static const char *make_cgroup(const char *controller)
{
	static char why[128];

	if (access(CGROUPS "/cgroup.controllers", F_OK))
		return "cgroup 2 isn't mounted";
	if (!write_text(CGROUPS "/cgroup.subtree_control", controller)) {
		snprintf(why, sizeof(why), "this kernel has no cgroup controller %s", controller + 1);
		return why;
	}
	rmdir(CGROUP);
	if (mkdir(CGROUP, 0755))
		return "a cgroup can't be made";
	return NULL;
}

static void drop_cgroup(void)
{
	/* Charges of pages that were freed late keep it busy for a moment. */
	for (int i = 0; i < 1000 && rmdir(CGROUP); i++)
		usleep(10000);
	assert_int_equal(access(CGROUP, F_OK), -1);
}

/* Runs the test in a child in the cgroup; the line that it fails in is its status. */
#define IN_CGROUP(...) do { \
	int status_; \
	if (fork() == 0) { \
		if (!write_text(CGROUP "/cgroup.procs", "0")) \
			_exit(1); \
		__VA_ARGS__ \
		_exit(0); \
	} \
	wait(&status_); \
	assert_true(WIFEXITED(status_)); \
	assert_int_equal(WEXITSTATUS(status_), 0); \
} while (0)
#define CHECK(condition) do { \
	if (!(condition)) { \
		fprintf(stderr, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #condition, strerror(errno)); \
		_exit(2); \
	} \
} while (0)

static void test_memory_of_the_system_is_charged_to_the_cgroup(void **unused)
{
	const char *why = make_cgroup("+memory");
	char events[512] = "";
	int fd;

	(void)unused;
	if (why)
		SKIP("%s", why);
	assert_true(write_text(CGROUP "/memory.max", "64M"));
	for (uint32_t huge = OFFSTAGE_IOC_HUGE_PREFER; huge <= OFFSTAGE_IOC_HUGE_NEVER; huge++)
		IN_CGROUP({
			int device = device_open();
			struct offstage_ioc_create c = creation(24 * MiB);
			uint64_t before = number_in(CGROUP "/memory.current");
			int buffer;

			c.huge = huge;
			buffer = create(device, &c);
			CHECK(buffer >= 0);
			CHECK(number_in(CGROUP "/memory.current") >= before + 24 * MiB);
			/* More than the group may have is refused, and nobody is killed for it. */
			c.bytes = 128 * MiB;
			CHECK(create(device, &c) == (huge == OFFSTAGE_IOC_HUGE_REQUIRE ? -ENOSR : -ENOMEM));
			close(buffer);
			c.bytes = 24 * MiB;
			CHECK(create(device, &c) >= 0);
		});
	assert_all_is_free();
	fd = open(CGROUP "/memory.events", O_RDONLY);
	assert_true(read(fd, events, sizeof(events) - 1) > 0);
	close(fd);
	assert_non_null(strstr(events, "oom_kill 0"));
	drop_cgroup();
}

static void test_memory_of_a_pool_is_the_administrators_and_not_charged(void **unused)
{
	const char *why = make_cgroup("+memory");
	int device = device_open();

	(void)unused;
	if (why)
		SKIP("%s", why);
	assert_true(write_text(CGROUP "/memory.max", "16M"));
	reserve(device, 0, 32 * MiB);
	IN_CGROUP({
		uint32_t node = 0;
		struct offstage_ioc_create c = on_node(&node, 32 * MiB);
		int own = device_open();
		int buffer;
		char *data;

		c.flags = OFFSTAGE_IOC_CREATE_POOL_ONLY;
		buffer = create(own, &c);
		CHECK(buffer >= 0);
		data = map(buffer, 32 * MiB, 0);
		memset(data, 1, 32 * MiB);
		CHECK(number_in(CGROUP "/memory.current") < 16 * MiB);
	});
	assert_all_is_free();
	reserve(device, 0, 0);
	close(device);
	drop_cgroup();
}

static void test_cpuset_holds(void **unused)
{
	const char *why = make_cgroup("+cpuset");

	(void)unused;
	if (why)
		SKIP("%s", why);
	if (!two_nodes()) {
		drop_cgroup();
		SKIP("this machine has one node with normal memory");
	}
	assert_true(write_text(CGROUP "/cpuset.mems", "1"));
	IN_CGROUP({
		uint32_t node = 0;
		struct offstage_ioc_create c = on_node(&node, 4 * HUGE);
		struct offstage_ioc_node info;
		int device = device_open();
		int buffer;
		char *data;

		CHECK(create(device, &c) == -EXDEV);
		CHECK(ask_node(device, 0, &info) == 0 && !(info.flags & OFFSTAGE_IOC_NODE_ALLOWED));
		CHECK(ask_node(device, 1, &info) == 0 && info.flags & OFFSTAGE_IOC_NODE_ALLOWED);
		node = 1;
		CHECK(create(device, &c) >= 0);
		/* With no placement named, it is the nearest that is allowed. */
		c = creation(4 * HUGE);
		buffer = create(device, &c);
		CHECK(buffer >= 0);
		data = map(buffer, 4 * HUGE, 0);
		data[0] = 1;
		CHECK(node_of_page(data) == 1);
	});
	assert_all_is_free();
	drop_cgroup();
}

static void test_little_cpu_time_is_enough(void **unused)
{
	const char *why = make_cgroup("+cpu");

	(void)unused;
	if (why)
		SKIP("%s", why);
	assert_true(write_text(CGROUP "/cpu.max", "10000 100000"));
	IN_CGROUP({
		int device = device_open();

		for (int i = 0; i < 4; i++) {
			int buffer = make(device, 4 * HUGE + 4096);
			char *data = map(buffer, 4 * HUGE + 4096, 0);

			memset(data, 1, 4 * HUGE + 4096);
			munmap(data, 4 * HUGE + 4096);
			close(buffer);
		}
	});
	assert_all_is_free();
	drop_cgroup();
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_numa_maps_shows_the_placement),
		cmocka_unit_test(test_memory_that_comes_and_goes_is_told_apart),
		cmocka_unit_test(test_memory_of_the_system_is_charged_to_the_cgroup),
		cmocka_unit_test(test_memory_of_a_pool_is_the_administrators_and_not_charged),
		cmocka_unit_test(test_cpuset_holds),
		cmocka_unit_test(test_little_cpu_time_is_enough),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
