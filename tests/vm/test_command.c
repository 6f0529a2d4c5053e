/* SPDX-License-Identifier: MIT */
/*
 * `offstage doctor`, `pool` and `buffers` against the real module: what they say is so, and what they are told happens.
 * tests/unit/test_tools.c has the states that this machine can't be put into. See module.h.
 */
#include <sys/prctl.h>
#include "module.h"

#define NOBODY 65534

#define COPY "/tmp/of-test_command"

static char said[16384];

/* The command and its library, from BUILD of this program, where anybody may run it: BUILD may be in root's home. */
static int copy_command(void **unused)
{
	(void)unused;
	return system("cd \"$(dirname \"$(readlink /proc/$PPID/exe)\")/..\" && mkdir -p -m 755 " COPY " && "
		      "cp offstage liboffstage.so.0 " COPY " && chmod 755 " COPY "/*");
}

static int remove_command(void **unused)
{
	(void)unused;
	return system("rm -r " COPY);
}

/* Runs it, as this user; its status, and in `said` what it printed. */
static int run(uid_t uid, const char *arguments)
{
	char line[8192];
	int out[2], status;
	size_t have = 0;
	ssize_t n;
	pid_t child;

	snprintf(line, sizeof(line), "exec " COPY "/offstage %s 2>&1", arguments);
	assert_int_equal(pipe(out), 0);
	child = fork();
	assert_true(child >= 0);
	if (!child) {
		dup2(out[1], STDOUT_FILENO);
		close(out[0]);
		close(out[1]);
		if (uid)
			as_user(uid);
		execl("/bin/sh", "sh", "-c", line, NULL);
		_exit(101);
	}
	close(out[1]);
	while (have < sizeof(said) - 1 && (n = read(out[0], said + have, sizeof(said) - 1 - have)) > 0)
		have += (size_t)n;
	said[have] = '\0';
	close(out[0]);
	assert_int_equal(waitpid(child, &status, 0), child);
	return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* … and these. */
#define ALSO(words) do { \
	if (!strstr(said, words)) \
		fail_msg("no '%s' in:\n%s", words, said); \
} while (0)

/* run(…) ended with this status, and what it printed has these words. */
#define GIVES(status, uid, arguments, words) do { \
	int status_ = run(uid, arguments); \
	if (status_ != (status) || !strstr(said, words)) \
		fail_msg("offstage %s: status %d and not %d, or no '%s' in:\n%s", arguments, status_, status, words, \
			 said); \
} while (0)

static int buffer_from_pool(int device, uint64_t bytes)
{
	uint32_t node = 0;
	struct offstage_ioc_create c = on_node(&node, bytes);
	int fd;

	c.flags = OFFSTAGE_IOC_CREATE_POOL_ONLY | OFFSTAGE_IOC_CREATE_CLOEXEC;	/* its child holds none */
	fd = create(device, &c);
	assert_true(fd >= 0);
	return fd;
}

/* ---- pool -------------------------------------------------------------------------------------------------------- */

static void test_pool_grows_shrinks_and_shows_it(void **unused)
{
	(void)unused;
	GIVES(0, 0, "pool set 0:8M", "node 0: 8 MiB reserved");
	GIVES(0, 0, "pool grow 0:4M", "node 0: 12 MiB reserved, 8 MiB before");
	assert_int_equal(node_count(0, "reserved"), 12 * MiB);
	GIVES(0, NOBODY, "pool", "\n   0      12 MiB      12 MiB         0 B");
	GIVES(0, NOBODY, "pool show --json", "\"reserved\": 12582912");
	GIVES(0, 0, "pool shrink 0:10M", "node 0: 2 MiB reserved, 12 MiB before");
	GIVES(0, 0, "pool set all:4M", "node 0: 4 MiB reserved, 2 MiB before");
	if (two_nodes())
		assert_int_equal(node_count(1, "reserved"), 4 * MiB);
	GIVES(0, 0, "pool set all:0", "node 0: 0 B reserved, 4 MiB before");
	assert_int_equal(on_all_nodes("reserved"), 0);
}

static void test_pool_that_gets_less_says_so(void **unused)
{
	uint32_t node = 2;
	struct offstage_ioc_create c = on_node(&node, 4 * MiB);
	unsigned long long total = 0;
	char line[256], words[64];
	int device = device_open(), fd;
	FILE *file = fopen("/sys/devices/system/node/node2/meminfo", "r");

	(void)unused;
	if (!file)
		SKIP("this machine has no third node, which nothing but the test needs");
	while (fgets(line, sizeof(line), file))
		sscanf(line, "Node 2 MemTotal: %llu kB", &total);
	fclose(file);
	/* With this much of it in use, all of it can't be had. */
	fd = create(device, &c);
	assert_true(fd >= 0);
	snprintf(line, sizeof(line), "pool set 2:%lluM", total / 2048 * 2);
	GIVES(1, 0, line, "were wanted and the pool holds");
	ALSO("compact_memory");
	assert_in_range(node_count(2, "reserved"), HUGE, total << 10);
	/* What it has got stays. */
	snprintf(words, sizeof(words), "\"reserved\": %llu", (unsigned long long)node_count(2, "reserved"));
	GIVES(0, 0, "pool --json", words);
	GIVES(0, 0, "pool set 2:0", "node 2: 0 B reserved");
	close(fd);
	close(device);
	assert_all_is_free();
}

static void test_pool_in_use_shrinks_as_buffers_close(void **unused)
{
	int device = device_open(), fd;

	(void)unused;
	GIVES(0, 0, "pool set 0:8M", "node 0: 8 MiB reserved");
	fd = buffer_from_pool(device, 4 * MiB);
	GIVES(1, 0, "pool set 0:0", "node 0: 4 MiB reserved, 8 MiB before");
	ALSO("4 MiB of it are in buffers or still pinned");
	close(fd);
	close(device);
	assert_all_is_free();
	assert_falls_to("reserved", 0);
}

static void test_pool_is_changed_by_root_alone(void **unused)
{
	struct stat st;

	(void)unused;
	assert_int_equal(stat("/dev/offstage", &st), 0);
	assert_int_equal(chmod("/dev/offstage", 0600), 0);
	GIVES(1, NOBODY, "pool grow 0:2M", "pools are changed as root");
	assert_int_equal(chmod("/dev/offstage", 0666), 0);
	GIVES(1, NOBODY, "pool grow 0:2M", "CAP_SYS_ADMIN");
	assert_int_equal(chmod("/dev/offstage", st.st_mode & 07777), 0);
	assert_int_equal(on_all_nodes("reserved"), 0);
}

static void test_pool_that_cannot_be_is_a_sentence(void **unused)
{
	(void)unused;
	GIVES(1, 0, "pool grow 63:2M", "there is no node 63 with memory");
	GIVES(1, 0, "pool grow 0:1M", "whole huge pages of 2 MiB");
	GIVES(1, 0, "pool grow 0:100T", "more than the node has");
	GIVES(2, 0, "pool grow 0:2M 1", "isn't NODE:BYTES");
	assert_int_equal(on_all_nodes("reserved"), 0);
}

/* ---- buffers ----------------------------------------------------------------------------------------------------- */

static void test_buffers_names_owner_and_nodes_whatever_the_owner_calls_itself(void **unused)
{
	int device = device_open(), fd;
	char words[128], before[16];

	(void)unused;
	if (access("/sys/kernel/debug/offstage", F_OK))
		SKIP("debugfs isn't mounted");
	GIVES(0, 0, "buffers", "no buffers");
	GIVES(0, 0, "pool set 0:4M", "node 0: 4 MiB reserved");
	assert_int_equal(prctl(PR_GET_NAME, before), 0);
	assert_int_equal(prctl(PR_SET_NAME, "7 \033[31m\n9 0:1\\"), 0);
	fd = buffer_from_pool(device, 4 * MiB);
	assert_int_equal(prctl(PR_SET_NAME, before), 0);
	snprintf(words, sizeof(words), "%8d  7 \\x1b[31m\\x0a9 0:1\\x5c 0: 4 MiB\n", getpid());
	GIVES(0, 0, "buffers", words);
	ALSO("       4 MiB       4 MiB       4 MiB     1       0");
	GIVES(0, 0, "buffers --json", "\"comm\": \"7 \\\\x1b[31m\\\\x0a9 0:1\\\\x5c\"");
	GIVES(1, NOBODY, "buffers", "root's alone to read");
	close(fd);
	close(device);
	assert_all_is_free();
	GIVES(0, 0, "pool set 0:0", "node 0: 0 B reserved");
}

/* ---- doctor ------------------------------------------------------------------------------------------------------ */

static void test_doctor_finds_the_module_at_work(void **unused)
{
	(void)unused;
	GIVES(0, 0, "doctor", "\nOK    loaded ");
	ALSO("\nOK    access ");
	ALSO("\nOK    provider          kmod\n");
	ALSO("\nWARN  pools ");
	ALSO("\nOK    limit_user ");
	GIVES(0, 0, "pool set 0:4M", "node 0: 4 MiB reserved");
	/* The KUnit suites ask for what can't be had, in kernels that have them. */
	GIVES(0, 0, "doctor", node_count(0, "failed") ? "\nWARN  pool0 " : "\nOK    pool0             4 MiB reserved");
	assert_null(strstr(said, "\nWARN  pools "));
	GIVES(0, 0, "pool set 0:0", "node 0: 0 B reserved");
}

static void test_doctor_tells_a_user_why_the_device_is_closed_to_him(void **unused)
{
	struct stat st;

	(void)unused;
	assert_int_equal(stat("/dev/offstage", &st), 0);
	assert_int_equal(chmod("/dev/offstage", 0600), 0);
	GIVES(1, NOBODY, "doctor", "\nFAIL  access ");
	ALSO("mode 0600");
	ALSO("\nOK    provider          user");
	assert_int_equal(chmod("/dev/offstage", 0666), 0);
	GIVES(0, NOBODY, "doctor", "\nOK    access ");
	ALSO("\nWARN  device ");
	ALSO("\nOK    provider          kmod\n");
	assert_int_equal(chmod("/dev/offstage", st.st_mode & 07777), 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_pool_grows_shrinks_and_shows_it),
		cmocka_unit_test(test_pool_that_gets_less_says_so),
		cmocka_unit_test(test_pool_in_use_shrinks_as_buffers_close),
		cmocka_unit_test(test_pool_is_changed_by_root_alone),
		cmocka_unit_test(test_pool_that_cannot_be_is_a_sentence),
		cmocka_unit_test(test_buffers_names_owner_and_nodes_whatever_the_owner_calls_itself),
		cmocka_unit_test(test_doctor_finds_the_module_at_work),
		cmocka_unit_test(test_doctor_tells_a_user_why_the_device_is_closed_to_him),
	};

	return cmocka_run_group_tests(tests, copy_command, remove_command);
}
