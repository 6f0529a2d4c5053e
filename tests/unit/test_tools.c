/* SPDX-License-Identifier: MIT */
/*
 * What `offstage doctor`, `pool` and `buffers` say in states that this machine can't be put into: below facts_root and
 * topology_root stands a tree of the test's own, in which /dev/offstage is an ordinary file, and ioctl(), getgrgid()
 * and getpwuid() are the test's, too. Each run is a process of its own.
 */
#include "unit.h"
#include <fcntl.h>
#include <ftw.h>
#include <grp.h>
#include <pwd.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include "../../lib/topology.h"
#include "../../tools/command.h"
#include "../../tools/facts.h"

#define MiB ((uint64_t)1 << 20)
#define RELEASE "6.12.0-test"
#define MODULES "/lib/modules/" RELEASE
#define NODE0 "/sys/devices/system/node/node0"
#define POOL "/sys/class/offstage/offstage/node"
#define LOADED "/sys/module/offstage"
#define LIST "/sys/kernel/debug/offstage/buffers"
#define GROUP 4242		/* "offstage" */
#define SOMEBODY 65534

/* ---- the module, as the test wants it ---------------------------------------------------------------------------- */

static struct {
	int info, reserve;	/* errno of the call, 0: it works */
	uint32_t abi;
	uint64_t reserved, most, least;	/* of the pool of node 0: now; what can be had; what is in buffers */
	const char *member;	/* of the group */
} fake;

int ioctl(int fd, unsigned long request, ...)
{
	struct offstage_ioc_reserve *reserve;
	struct offstage_ioc_node *node;
	struct offstage_ioc_info *info;
	va_list args;
	void *arg;

	(void)fd;
	va_start(args, request);
	arg = va_arg(args, void *);
	va_end(args);
	switch (request) {
	case OFFSTAGE_IOC_INFO:
		info = arg;
		info->abi = fake.abi;
		info->huge_size = 2 * MiB;
		info->used_user = 6 * MiB;
		errno = fake.info;
		return fake.info ? -1 : 0;
	case OFFSTAGE_IOC_NODE:
		node = arg;
		node->reserved = fake.reserved;
		node->free = fake.reserved - fake.least;
		errno = ENODEV;
		return node->node > 2 ? -1 : 0;
	case OFFSTAGE_IOC_RESERVE:
		reserve = arg;
		errno = reserve->node == 2 ? EOPNOTSUPP : fake.reserve;
		if (errno)
			return -1;
		if (reserve->bytes > fake.most)
			reserve->bytes = fake.most;
		if (reserve->bytes < fake.least)
			reserve->bytes = fake.least;
		fake.reserved = reserve->bytes;
		return 0;
	default:
		errno = ENOTTY;
		return -1;
	}
}

struct group *getgrgid(gid_t gid)
{
	static char name[] = "offstage", *members[2];
	static struct group group = { .gr_name = name, .gr_gid = GROUP, .gr_mem = members };

	members[0] = (char *)fake.member;
	return gid == GROUP ? &group : NULL;
}

struct passwd *getpwuid(uid_t uid)
{
	static char name[] = "ada";
	static struct passwd passwd = { .pw_name = name, .pw_gid = SOMEBODY };

	passwd.pw_uid = uid;
	return &passwd;
}

/* ---- the tree ---------------------------------------------------------------------------------------------------- */

static char tree[64];

static const char *below(const char *path)
{
	static char full[512];

	snprintf(full, sizeof(full), "%s%s", tree, path);
	return full;
}

static void put_bytes(const char *path, const void *bytes, size_t n)
{
	char full[512];
	FILE *file;

	snprintf(full, sizeof(full), "%s", below(path));
	for (char *slash = full + strlen(tree); (slash = strchr(slash + 1, '/'));) {
		*slash = '\0';
		mkdir(full, 0755);
		*slash = '/';
	}
	file = fopen(full, "w");
	assert_non_null(file);
	assert_int_equal(fwrite(bytes, 1, n, file), n);
	assert_int_equal(fclose(file), 0);
}

static void put(const char *path, const char *text)
{
	put_bytes(path, text, strlen(text));
}

/* The module's file, as far as doctor looks into it. */
static void put_module(const char *path, const char *built_for, const char *version, bool is_signed)
{
	char image[512];
	int n = snprintf(image, sizeof(image), "\177ELF%cversion=%s%csrcversion=9.9.9%cvermagic=%s SMP preempt %c%s", 0,
			 version, 0, 0, built_for, 0,
			 is_signed ? "PKCS7~Module signature appended~\n" : "and nothing after it");

	put_bytes(path, image, (size_t)n);
}

static void put_installed(void)
{
	put_module(MODULES "/updates/dkms/offstage.ko", RELEASE, offstage_version(), true);
	put(MODULES "/modules.dep", "kernel/fs/fat.ko.xz:\nupdates/dkms/offstage.ko: kernel/fs/fat.ko.xz\n");
}

static void put_pool(uint32_t node, uint64_t reserved, uint64_t orphaned, uint64_t never_got)
{
	const struct {
		const char *name;
		uint64_t bytes;
	} counts[] = {
		{ "reserved", reserved }, { "free", reserved }, { "in_use", 0 },
		{ "scrubbing", 0 }, { "orphaned", orphaned }, { "failed", never_got },
	};
	char path[128], text[32];

	for (size_t i = 0; i < sizeof(counts) / sizeof(*counts); i++) {
		snprintf(path, sizeof(path), POOL "%u/%s", node, counts[i].name);
		snprintf(text, sizeof(text), "%llu\n", (unsigned long long)counts[i].bytes);
		put(path, text);
	}
}

static void put_device(mode_t mode, gid_t group)
{
	put("/dev/offstage", "");
	/* Only root can give a file away. */
	assert_int_equal(chown(below("/dev/offstage"), (uid_t)-1, geteuid() ? getegid() : group), 0);
	assert_int_equal(chmod(below("/dev/offstage"), mode), 0);
}

static void put_loaded(void)
{
	put(LOADED "/version", offstage_version());
	put(LOADED "/taint", "O\n");
	put(LOADED "/parameters/limit_user", "536870912\n");
	put(LOADED "/parameters/limit_all", "805306368\n");
	put(LOADED "/parameters/limit_file", "0\n");
	put(LOADED "/parameters/limit_node", "0\n");
	put_pool(0, 64 * MiB, 0, 0);
	put_device(0660, GROUP);
}

static int remove_one(const char *path, const struct stat *st, int kind, struct FTW *ftw)
{
	(void)st, (void)kind, (void)ftw;
	return remove(path);
}

/* A machine of one node with 1 GiB, no module, and nothing amiss. */
static int set_up(void **state)
{
	(void)state;
	snprintf(tree, sizeof(tree), "/tmp/offstage-command-XXXXXX");
	assert_non_null(mkdtemp(tree));
	assert_int_equal(chmod(tree, 0755), 0);
	facts_root = topology_root = tree;
	memset(&fake, 0, sizeof(fake));
	fake.abi = OFFSTAGE_ABI;
	fake.most = UINT64_MAX;
	setenv("OFFSTAGE_PROVIDER", "user", 1);	/* /dev/offstage of this machine isn't asked */
	put("/proc/sys/kernel/osrelease", RELEASE "\n");
	put("/proc/meminfo", "MemTotal: 1048576 kB\nMemAvailable: 1048576 kB\n");
	put("/proc/self/status", "CapEff:\t0000000000004000\nMems_allowed_list:\t0-7\n");
	put("/sys/devices/system/node/online", "0\n");
	put("/sys/devices/system/node/has_memory", "0\n");
	put("/sys/devices/system/node/has_normal_memory", "0\n");
	put(NODE0 "/meminfo", "Node 0 MemTotal: 1048576 kB\nNode 0 MemFree: 1048576 kB\n");
	put("/sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n");
	put("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size", "2097152\n");
	put("/sys/kernel/security/lockdown", "[none] integrity confidentiality\n");
	put("/sys/module/module/parameters/sig_enforce", "N\n");
	put(MODULES "/build/Makefile", "");
	return 0;
}

static int tear_down(void **state)
{
	(void)state;
	facts_root = topology_root = "";
	return nftw(tree, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

/* ---- running and reading ----------------------------------------------------------------------------------------- */

static char said[16384];
static bool as_somebody;

#define RUN(command, ...) run(command, (char *[]){ #command, __VA_ARGS__ __VA_OPT__(,) NULL })
static int run(int (*command)(int argc, char **argv), char **argv)
{
	FILE *file = tmpfile();
	int argc = 0, status;
	pid_t child;
	size_t n;

	assert_non_null(file);
	while (argv[argc])
		argc++;
	fflush(stdout);
	child = fork();
	assert_true(child >= 0);
	if (!child) {
		dup2(fileno(file), STDOUT_FILENO);
		dup2(fileno(file), STDERR_FILENO);
		if (as_somebody && (setgroups(0, NULL) || setresgid(SOMEBODY, SOMEBODY, SOMEBODY) ||
				    setresuid(SOMEBODY, SOMEBODY, SOMEBODY)))
			_exit(99);
		/* A command may write into its arguments, as it may into main()'s. */
		for (int i = 0; i < argc; i++)
			argv[i] = strdup(argv[i]);
		status = command(argc, argv);
		fflush(stdout);
		_exit(status);
	}
	assert_int_equal(waitpid(child, &status, 0), child);
	rewind(file);
	n = fread(said, 1, sizeof(said) - 1, file);
	said[n] = '\0';
	fclose(file);
	if (!WIFEXITED(status))
		fail_msg("it died of signal %d:\n%s", WTERMSIG(status), said);
	return WEXITSTATUS(status);
}

#define doctor command_doctor
#define pool command_pool
#define buffers command_buffers

static bool line_says(const char *begin, const char *words)
{
	size_t n = strlen(begin);

	for (const char *line = said; line && *line; line = strchr(line, '\n'), line += !!line) {
		const char *end = strchrnul(line, '\n'), *at;

		if (strncmp(line, begin, n) != 0)
			continue;
		at = strstr(line, words);
		if (at && at < end)
			return true;
	}
	return false;
}

/* A line that begins so has these words. */
#define SAYS(begin, words) do { \
	if (!line_says(begin, words)) \
		fail_msg("no line '%s…' with '%s' in:\n%s", begin, words, said); \
} while (0)
#define SAYS_NOTHING_OF(words) do { \
	if (strstr(said, words)) \
		fail_msg("'%s' in:\n%s", words, said); \
} while (0)

/* ---- doctor: the file -------------------------------------------------------------------------------------------- */

static void test_no_module_at_all_is_no_failure(void **state)
{
	(void)state;
	assert_int_equal(RUN(doctor), 0);
	SAYS("WARN  installed ", "for no kernel");
	SAYS("OK    provider ", "user, with transparent huge pages");
	SAYS_NOTHING_OF("FAIL");
	SAYS_NOTHING_OF("limit_user");
}

static void test_module_as_it_should_be_is_ok(void **state)
{
	(void)state;
	put_installed();
	put_loaded();
	assert_int_equal(RUN(doctor), 0);
	SAYS("OK    installed ", MODULES "/updates/dkms/offstage.ko");
	SAYS("OK    signed ", "yes");
	SAYS("OK    loaded ", offstage_version());
	SAYS("OK    device ", "mode 0660");
	SAYS("OK    access ", "ABI 1");
	SAYS("OK    pool0 ", "64 MiB reserved");
	SAYS("OK    limit_user ", "512 MiB, of which 6 MiB are in use");
	SAYS("OK    limit_all ", "768 MiB");
	SAYS("OK    movable ", "no node");
	/* The test has said so; nothing else is amiss. */
	SAYS("WARN  provider ", "unset OFFSTAGE_PROVIDER");
	assert_null(strstr(strstr(said, "WARN") + 1, "WARN"));
	SAYS_NOTHING_OF(tree);
}

static void test_module_that_is_not_loaded_fails(void **state)
{
	(void)state;
	put_installed();
	assert_int_equal(RUN(doctor), STATUS_FAILED);
	SAYS("OK    installed ", "offstage.ko");
	SAYS("FAIL  loaded ", "modprobe offstage");
}

static void test_module_of_another_kernel_fails_and_names_the_headers(void **state)
{
	(void)state;
	put_module("/lib/modules/6.1.0/extra/offstage.ko", "6.1.0", offstage_version(), false);
	assert_int_equal(nftw(below(MODULES), remove_one, 8, FTW_DEPTH | FTW_PHYS), 0);
	assert_int_equal(RUN(doctor), STATUS_FAILED);
	SAYS("FAIL  installed ", "/lib/modules/6.1.0/extra/offstage.ko is for another kernel");
	SAYS("FAIL  installed ", "apt install linux-headers-" RELEASE);
}

static void test_module_built_for_another_kernel_fails(void **state)
{
	(void)state;
	put_installed();
	put_module(MODULES "/updates/dkms/offstage.ko", "6.1.0", offstage_version(), false);
	assert_int_equal(RUN(doctor), STATUS_FAILED);
	SAYS("FAIL  installed ", "was built for kernel 6.1.0, and this is " RELEASE);
	/* A loaded one works until the next boot. */
	put_loaded();
	assert_int_equal(RUN(doctor), 0);
	SAYS("WARN  installed ", "was built for kernel 6.1.0");
}

static void test_dkms_without_a_build_fails(void **state)
{
	(void)state;
	put("/var/lib/dkms/offstage/0.1.0/source/dkms.conf", "");
	assert_int_equal(RUN(doctor), STATUS_FAILED);
	SAYS("FAIL  installed ", "dkms install offstage/0.1.0 -k " RELEASE);
	SAYS("FAIL  installed ", "/var/lib/dkms/offstage/0.1.0/build/make.log");
	SAYS_NOTHING_OF("linux-headers");
}

static void test_module_that_modprobe_does_not_know_fails(void **state)
{
	(void)state;
	put_installed();
	put(MODULES "/modules.dep", "kernel/fs/notoffstage.ko:\nkernel/fs/fat.ko: updates/dkms/offstage.ko\n");
	assert_int_equal(RUN(doctor), STATUS_FAILED);
	SAYS("FAIL  installed ", "depmod -a");
}

static void test_module_that_is_wanted_at_boot_and_not_there_fails(void **state)
{
	(void)state;
	put("/etc/modules-load.d/offstage.conf", "# an example\n#offstage\n");
	assert_int_equal(RUN(doctor), 0);
	put("/etc/modules-load.d/offstage.conf", "# an example\noffstage\n");
	assert_int_equal(RUN(doctor), STATUS_FAILED);
	SAYS("FAIL  installed ", "/etc/modules-load.d/offstage.conf asks for it");
}

static void test_module_loaded_from_elsewhere_is_a_warning(void **state)
{
	(void)state;
	put_loaded();
	assert_int_equal(RUN(doctor), 0);
	SAYS("WARN  installed ", "won't be there after the next boot");
	SAYS("OK    signed ", "the kernel took it");
}

static void test_versions_that_differ_are_a_warning(void **state)
{
	(void)state;
	put_installed();
	put_module(MODULES "/updates/dkms/offstage.ko", RELEASE, "0.0.9", true);
	put_loaded();
	put(LOADED "/version", "0.0.8\n");
	assert_int_equal(RUN(doctor), 0);
	SAYS("WARN  installed ", "is version 0.0.9");
	SAYS("WARN  loaded ", "version 0.0.8");
	SAYS("WARN  loaded ", "rmmod offstage && modprobe offstage");
}

/* ---- doctor: who may load it ------------------------------------------------------------------------------------- */

static void test_unsigned_module_fails_where_signatures_are_enforced(void **state)
{
	(void)state;
	put_installed();
	put_module(MODULES "/updates/dkms/offstage.ko", RELEASE, offstage_version(), false);
	RUN(doctor);
	SAYS("OK    signed ", "which this kernel allows");
	put("/sys/module/module/parameters/sig_enforce", "Y\n");
	RUN(doctor);
	SAYS("FAIL  signed ", "mokutil --import");
	put("/sys/module/module/parameters/sig_enforce", "N\n");
	put("/sys/kernel/security/lockdown", "none [integrity] confidentiality\n");
	RUN(doctor);
	SAYS("FAIL  signed ", "mokutil --import");
	SAYS("OK    lockdown ", "integrity;");
}

static void test_compressed_module_is_not_called_unsigned(void **state)
{
	(void)state;
	put(MODULES "/updates/dkms/offstage.ko.xz", "\375" "7zXZ and what follows");
	put(MODULES "/modules.dep", "updates/dkms/offstage.ko.xz:\n");
	RUN(doctor);
	SAYS("OK    signed ", "unknown, since the file is compressed");
	put("/sys/module/module/parameters/sig_enforce", "Y\n");
	RUN(doctor);
	SAYS("WARN  signed ", "modinfo -F signer offstage");
}

static void test_key_that_the_kernel_does_not_know_is_told(void **state)
{
	(void)state;
	put_installed();
	put_loaded();
	put(LOADED "/taint", "OE\n");
	RUN(doctor);
	SAYS("OK    signed ", "with a key that this kernel doesn't know");
	/* Lockdown came later, and is there before the next boot's modules are. */
	assert_int_equal(unlink(below(MODULES "/updates/dkms/offstage.ko")), 0);
	put("/sys/kernel/security/lockdown", "none integrity [confidentiality]\n");
	RUN(doctor);
	SAYS("WARN  signed ", "mokutil --import");
}

static void test_secure_boot_is_told(void **state)
{
	static const char variable[] = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c";

	(void)state;
	RUN(doctor);
	SAYS("OK    lockdown ", "Secure Boot: not there");
	put_bytes(variable, "\6\0\0\0\1", 5);
	RUN(doctor);
	SAYS("OK    lockdown ", "Secure Boot: on");
	put_bytes(variable, "\6\0\0\0\0", 5);
	RUN(doctor);
	SAYS("OK    lockdown ", "Secure Boot: off");
	assert_int_equal(unlink(below(variable)), 0);
	RUN(doctor);
	SAYS("OK    lockdown ", "Secure Boot: unknown");
}

/* ---- doctor: the device ------------------------------------------------------------------------------------------ */

static void test_missing_device_fails(void **state)
{
	(void)state;
	put_loaded();
	assert_int_equal(unlink(below("/dev/offstage")), 0);
	assert_int_equal(RUN(doctor), STATUS_FAILED);
	SAYS("FAIL  device ", "there is no /dev/offstage");
}

static void test_mode_for_root_alone_or_for_everybody_is_a_warning(void **state)
{
	(void)state;
	put_loaded();
	put_device(0600, GROUP);
	RUN(doctor);
	SAYS("WARN  device ", "root alone may open it");
	put_device(0666, GROUP);
	RUN(doctor);
	SAYS("WARN  device ", "every user may take memory");
}

static void test_user_who_may_not_open_it_is_told_why(void **state)
{
	(void)state;
	if (geteuid())
		SKIP("only root can make a file of another group, and become somebody who isn't in it");
	put_loaded();
	as_somebody = true;
	assert_int_equal(RUN(doctor), STATUS_FAILED);
	SAYS("FAIL  access ", "ada isn't in the group offstage: `usermod -aG offstage ada`");
	fake.member = "ada";
	assert_int_equal(RUN(doctor), STATUS_FAILED);
	SAYS("FAIL  access ", "this session began before that");
	put_device(0600, 0);
	assert_int_equal(RUN(doctor), STATUS_FAILED);
	SAYS("FAIL  access ", "mode 0600");
	as_somebody = false;
}

static void test_other_abi_fails(void **state)
{
	(void)state;
	put_loaded();
	fake.abi = 7;
	assert_int_equal(RUN(doctor), STATUS_FAILED);
	SAYS("FAIL  access ", "the module speaks ABI 7");
}

static void test_file_that_is_not_the_modules_fails(void **state)
{
	(void)state;
	put_loaded();
	fake.info = ENOTTY;
	assert_int_equal(RUN(doctor), STATUS_FAILED);
	SAYS("FAIL  access ", "isn't the loaded module's");
}

/* ---- doctor: memory ---------------------------------------------------------------------------------------------- */

static void test_movable_node_is_a_warning_with_the_remedy(void **state)
{
	(void)state;
	put("/sys/devices/system/node/has_memory", "0,2\n");
	put("/sys/devices/system/node/node2/meminfo", "Node 2 MemTotal: 524288 kB\n");
	assert_int_equal(RUN(doctor), 0);
	SAYS("WARN  node2 ", "512 MiB of movable memory only");
	SAYS("WARN  node2 ", "daxctl reconfigure-device --mode=system-ram --no-movable");
	SAYS_NOTHING_OF("no node has movable");
}

static void test_node_outside_the_cpuset_is_a_warning(void **state)
{
	(void)state;
	put("/proc/self/status", "CapEff:\t0000000000004000\nMems_allowed_list:\t1\n");
	RUN(doctor);
	SAYS("WARN  node0 ", "outside this process's cpuset");
}

static void test_pools_with_nothing_reserved_are_a_warning(void **state)
{
	(void)state;
	put_loaded();
	put_pool(0, 0, 0, 0);
	RUN(doctor);
	SAYS("OK    pool0 ", "nothing reserved");
	SAYS("WARN  pools ", "offstage pool grow");
	/* One node that has something is somebody's choice. */
	put_pool(2, 2 * MiB, 0, 0);
	RUN(doctor);
	SAYS_NOTHING_OF("WARN  pools");
}

static void test_orphaned_and_failed_memory_is_a_warning(void **state)
{
	(void)state;
	put_loaded();
	put_pool(0, 64 * MiB, 4 * MiB, 0);
	put_pool(1, 64 * MiB, 0, 6 * MiB);
	RUN(doctor);
	SAYS("WARN  pool0 ", "4 MiB of buffers that are closed are still pinned");
	SAYS("WARN  pool1 ", "huge pages for 6 MiB");
}

static void test_limits_that_are_none_or_too_low_are_a_warning(void **state)
{
	(void)state;
	put_loaded();
	put(LOADED "/parameters/limit_user", "33554432\n");
	put(LOADED "/parameters/limit_all", "0\n");
	put(LOADED "/parameters/limit_file", "2097152\n");
	RUN(doctor);
	SAYS("WARN  limit_user ", "32 MiB, and the pools hold 64 MiB");
	SAYS("WARN  limit_user ", "echo 67108864 > /sys/module/offstage/parameters/limit_user");
	SAYS("WARN  limit_all ", "none: all users together can take all memory");
	SAYS("OK    limit_file ", "2 MiB for one open file");
	put(LOADED "/parameters/limit_all", "1099511627776\n");
	RUN(doctor);
	SAYS("WARN  limit_all ", "1 TiB: all users together can take all memory");
}

static void test_cgroup_that_limits_memory_is_named(void **state)
{
	(void)state;
	put("/proc/self/cgroup", "0::/job\n");
	put("/proc/self/mountinfo", "1 0 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup rw\n");
	put("/sys/fs/cgroup/job/memory.max", "134217728\n");
	put("/sys/fs/cgroup/job/memory.current", "0\n");
	RUN(doctor);
	SAYS("WARN  memory ", "128 MiB available (/sys/fs/cgroup/job/memory.max)");
}

static void test_small_locked_memory_limit_is_a_warning(void **state)
{
	struct rlimit before, small;

	(void)state;
	put("/proc/self/status", "CapEff:\t0000000000000000\nMems_allowed_list:\t0-7\n");
	assert_int_equal(getrlimit(RLIMIT_MEMLOCK, &before), 0);
	small = (struct rlimit){ .rlim_cur = 65536, .rlim_max = before.rlim_max };
	assert_int_equal(setrlimit(RLIMIT_MEMLOCK, &small), 0);
	RUN(doctor);
	assert_int_equal(setrlimit(RLIMIT_MEMLOCK, &before), 0);
	SAYS("WARN  locked-memory ", "at most 64 KiB");
	SAYS("WARN  locked-memory ", "ulimit -l unlimited");
}

static void test_no_huge_pages_for_the_provider_user_are_a_warning(void **state)
{
	(void)state;
	put("/sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n");
	RUN(doctor);
	SAYS("WARN  provider ", "echo madvise >");
}

static void test_doctor_json_has_the_same_verdicts(void **state)
{
	(void)state;
	put_installed();
	assert_int_equal(RUN(doctor, "--json"), STATUS_FAILED);
	assert_non_null(strstr(said, "\"check\": \"loaded\",\n      \"verdict\": \"FAIL\""));
	assert_non_null(strstr(said, "\"failed\": 1"));
}

/* ---- pool -------------------------------------------------------------------------------------------------------- */

static void test_pools_are_shown_by_node(void **state)
{
	const char *two, *ten;

	(void)state;
	put_pool(10, 1024 * MiB, 0, 0);
	put_pool(2, 3 * MiB / 2, 0, 0);
	assert_int_equal(RUN(pool), 0);
	SAYS("node ", "reserved");
	two = strstr(said, "\n   2     1.5 MiB     1.5 MiB");
	ten = strstr(said, "\n  10       1 GiB       1 GiB");
	if (!two || !ten || two > ten)
		fail_msg("not node 2 and then node 10:\n%s", said);
	assert_int_equal(RUN(pool, "show", "--json"), 0);
	assert_non_null(strstr(said, "\"reserved\": 1073741824"));
}

static void test_pools_without_the_module_are_a_sentence(void **state)
{
	(void)state;
	assert_int_equal(RUN(pool), STATUS_FAILED);
	SAYS("offstage: ", "modprobe offstage");
	assert_int_equal(RUN(pool, "grow", "0:2M"), STATUS_FAILED);
	SAYS("offstage: ", "there is no /dev/offstage");
}

static void test_pool_grows_shrinks_and_is_set(void **state)
{
	(void)state;
	put_loaded();
	fake.reserved = 64 * MiB;
	assert_int_equal(RUN(pool, "grow", "0:2M"), 0);
	SAYS("node 0: ", "66 MiB reserved, 64 MiB before");
	assert_int_equal(RUN(pool, "shrink", "0:2M"), 0);
	SAYS("node 0: ", "62 MiB reserved, 64 MiB before");
	/* Each run begins anew. */
	assert_int_equal(RUN(pool, "shrink", "0:1T"), 0);
	SAYS("node 0: ", "0 B reserved, 64 MiB before");
	assert_int_equal(RUN(pool, "set", "0:1G"), 0);
	SAYS("node 0: ", "1 GiB reserved, 64 MiB before");
	/* A list as the module's parameter has it, and every node that has a pool; node 5 has lost its memory. */
	put_pool(5, 0, 0, 0);
	assert_int_equal(RUN(pool, "grow", "0:2M,0:2M", "all:2M"), 0);
	SAYS("node 0: ", "70 MiB reserved, 68 MiB before");
}

static void test_pool_that_got_less_says_what_it_holds_and_what_to_do(void **state)
{
	(void)state;
	put_loaded();
	fake.most = 10 * MiB;
	assert_int_equal(RUN(pool, "grow", "0:64M"), STATUS_FAILED);
	SAYS("node 0: ", "10 MiB reserved, 0 B before");
	SAYS("offstage: node 0: ", "64 MiB were wanted and the pool holds 10 MiB; the node has 1 GiB available");
	SAYS("offstage: node 0: ", "compact_memory");
	SAYS("offstage: node 0: ", "reserve=0:64M");
}

static void test_pool_in_use_says_what_is_kept_and_until_when(void **state)
{
	(void)state;
	put_loaded();
	fake.reserved = 64 * MiB;
	fake.least = 8 * MiB;
	assert_int_equal(RUN(pool, "set", "0:0"), STATUS_FAILED);
	SAYS("node 0: ", "8 MiB reserved, 64 MiB before");
	SAYS("offstage: node 0: ", "8 MiB of it are in buffers or still pinned, and go to the system");
}

static void test_pool_that_cannot_be_changed_is_a_sentence(void **state)
{
	(void)state;
	put_loaded();
	assert_int_equal(RUN(pool, "grow", "7:2M"), STATUS_FAILED);
	SAYS("offstage: ", "there is no node 7 with memory");
	assert_int_equal(RUN(pool, "grow", "2:2M"), STATUS_FAILED);
	SAYS("offstage: node 2", "daxctl");
	fake.reserve = EPERM;
	assert_int_equal(RUN(pool, "grow", "0:2M"), STATUS_FAILED);
	SAYS("offstage: node 0", "CAP_SYS_ADMIN");
	fake.reserve = ENOMEM;
	assert_int_equal(RUN(pool, "grow", "0:1T"), STATUS_FAILED);
	SAYS("offstage: node 0", "more than the node has, which is 1 GiB");
	assert_int_equal(RUN(pool, "grow", "0:1M"), STATUS_FAILED);
	SAYS("offstage: ", "whole huge pages of 2 MiB");
	fake.abi = 7;
	assert_int_equal(RUN(pool, "grow", "0:2M"), STATUS_FAILED);
	SAYS("offstage: ", "speaks ABI 7");
}

static void test_amounts_that_are_none_are_refused_before_anything_is_changed(void **state)
{
	static char *const wrong[] = { "0", "0:", ":2M", "x:2M", "0:2X", "0:80%", "-1:2M", "4294967295:2M", "0:2M,",
				       "0:2M,1", "all" };

	(void)state;
	put_loaded();
	for (size_t i = 0; i < sizeof(wrong) / sizeof(*wrong); i++) {
		if (RUN(pool, "grow", "0:2M", wrong[i]) != STATUS_USAGE)
			fail_msg("'%s' was taken:\n%s", wrong[i], said);
		SAYS("offstage pool: ", "isn't NODE:BYTES");
		SAYS_NOTHING_OF("reserved");
	}
	assert_int_equal(RUN(pool, "grow"), STATUS_USAGE);
}

/* ---- buffers ----------------------------------------------------------------------------------------------------- */

#define HEADING "bytes huge from_pool references uid pid nodes comm\n"

static void test_buffers_are_listed_with_their_owners(void **state)
{
	(void)state;
	put(LIST, HEADING "6291456 4194304 2097152 3 1000 42 0:4194304,12:2097152 python3 train\\x0a\\x5c\n"
		  "4096 0 0 1 0 7 1:4096 \n");
	assert_int_equal(RUN(buffers), 0);
	SAYS("       bytes", "command");
	SAYS("       6 MiB       4 MiB       2 MiB     3    1000      42  python3 train\\x0a\\x5c ",
	     "0: 4 MiB, 12: 2 MiB");
	SAYS("       4 KiB         0 B         0 B     1       0       7  ", "1: 4 KiB");
	assert_int_equal(RUN(buffers, "--json"), 0);
	assert_non_null(strstr(said, "\"comm\": \"python3 train\\\\x0a\\\\x5c\""));
	assert_non_null(strstr(said, "\"node\": 12,\n          \"bytes\": 2097152"));
	assert_non_null(strstr(said, "\"comm\": \"\""));
}

static void test_no_buffers_are_said_to_be_none(void **state)
{
	(void)state;
	put(LIST, HEADING);
	assert_int_equal(RUN(buffers), 0);
	assert_string_equal(said, "no buffers\n");
}

static void test_list_of_another_form_is_refused(void **state)
{
	(void)state;
	put(LIST, "bytes huge\n4096 0\n");
	assert_int_equal(RUN(buffers), STATUS_FAILED);
	SAYS("offstage: ", "of one version");
	put(LIST, HEADING "4096 0 0 1\n");
	assert_int_equal(RUN(buffers), STATUS_FAILED);
	SAYS("offstage: ", "of one version");
}

static void test_list_that_cannot_be_read_is_a_sentence(void **state)
{
	(void)state;
	assert_int_equal(RUN(buffers), STATUS_FAILED);
	SAYS("offstage: ", "modprobe offstage");
	put_loaded();
	assert_int_equal(RUN(buffers), STATUS_FAILED);
	SAYS("offstage: ", "mount -t debugfs");
	put(LIST, HEADING);
	assert_int_equal(chmod(below("/sys/kernel/debug"), 0), 0);
	as_somebody = geteuid() == 0;
	assert_int_equal(RUN(buffers), STATUS_FAILED);
	as_somebody = false;
	assert_int_equal(chmod(below("/sys/kernel/debug"), 0755), 0);
	SAYS("offstage: ", "try sudo");
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(test_no_module_at_all_is_no_failure),
		TEST(test_module_as_it_should_be_is_ok),
		TEST(test_module_that_is_not_loaded_fails),
		TEST(test_module_of_another_kernel_fails_and_names_the_headers),
		TEST(test_module_built_for_another_kernel_fails),
		TEST(test_dkms_without_a_build_fails),
		TEST(test_module_that_modprobe_does_not_know_fails),
		TEST(test_module_that_is_wanted_at_boot_and_not_there_fails),
		TEST(test_module_loaded_from_elsewhere_is_a_warning),
		TEST(test_versions_that_differ_are_a_warning),
		TEST(test_unsigned_module_fails_where_signatures_are_enforced),
		TEST(test_compressed_module_is_not_called_unsigned),
		TEST(test_key_that_the_kernel_does_not_know_is_told),
		TEST(test_secure_boot_is_told),
		TEST(test_missing_device_fails),
		TEST(test_mode_for_root_alone_or_for_everybody_is_a_warning),
		TEST(test_user_who_may_not_open_it_is_told_why),
		TEST(test_other_abi_fails),
		TEST(test_file_that_is_not_the_modules_fails),
		TEST(test_movable_node_is_a_warning_with_the_remedy),
		TEST(test_node_outside_the_cpuset_is_a_warning),
		TEST(test_pools_with_nothing_reserved_are_a_warning),
		TEST(test_orphaned_and_failed_memory_is_a_warning),
		TEST(test_limits_that_are_none_or_too_low_are_a_warning),
		TEST(test_cgroup_that_limits_memory_is_named),
		TEST(test_small_locked_memory_limit_is_a_warning),
		TEST(test_no_huge_pages_for_the_provider_user_are_a_warning),
		TEST(test_doctor_json_has_the_same_verdicts),
		TEST(test_pools_are_shown_by_node),
		TEST(test_pools_without_the_module_are_a_sentence),
		TEST(test_pool_grows_shrinks_and_is_set),
		TEST(test_pool_that_got_less_says_what_it_holds_and_what_to_do),
		TEST(test_pool_in_use_says_what_is_kept_and_until_when),
		TEST(test_pool_that_cannot_be_changed_is_a_sentence),
		TEST(test_amounts_that_are_none_are_refused_before_anything_is_changed),
		TEST(test_buffers_are_listed_with_their_owners),
		TEST(test_no_buffers_are_said_to_be_none),
		TEST(test_list_of_another_form_is_refused),
		TEST(test_list_that_cannot_be_read_is_a_sentence),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
