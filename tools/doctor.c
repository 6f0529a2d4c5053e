/* SPDX-License-Identifier: MIT */
/*
 * offstage doctor: is the kernel module there and as it should be? One line a check, from the file on the disk to the
 * limits, in the order in which one depends on another:
 *
 *	OK    it is as it should be
 *	WARN  it works, with less than there could be, or won't after the next boot; the line says what to do
 *	FAIL  the module was meant to serve and doesn't; the line says what to do, and the exit status is 1
 *
 * The library works without the module, so no trace of it at all is a WARN; one that is installed and isn't loaded, or
 * can't be opened, is a FAIL.
 */
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <grp.h>
#include <pwd.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include "command.h"
#include "facts.h"

#define DKMS "/var/lib/dkms/offstage"
#define LOADED "/sys/module/offstage"
#define AT_BOOT "/etc/modules-load.d/offstage.conf"
/* Where dkms, `make modules_install` and people put modules that aren't the distribution's. */
#define INSTALLED "{updates/dkms,updates,extra}/offstage.ko{,.xz,.zst,.gz}"
#define SIGNED "~Module signature appended~\n"

static void help(void)
{
	puts("usage: offstage doctor [--json]\n\n"
	     "  --json   the same as one JSON object: checks, each with its name, verdict and sentence\n\n"
	     "Exit status 1 if a check fails: the module is installed or loaded, and doesn't serve. Without\n"
	     "any module, the library uses its provider 'user', and that is no failure.");
}

/* The module as a file. */
struct module_file {
	char path[FACTS_PATH_MAX];	/* "": there is none for this kernel */
	bool listed;			/* modprobe finds it */
	bool readable;			/* not compressed, so that what follows is known */
	bool is_signed;
	char built_for[128], version[32];
};

struct doctor {
	struct json *json;		/* NULL: for people */
	uint32_t failed;
	char release[128];		/* of the running kernel */
	struct module_file file;
	bool wanted;			/* somebody has installed it, for this kernel or another */
	bool loaded;
	bool usable;			/* this process can open the device and speaks its ABI */
	struct offstage_ioc_info device;
	struct offstage *ctx;
	struct offstage_info info;
	uint64_t memory;		/* of all nodes */
	uint64_t reserved;		/* in all pools */
};

enum verdict { OK, WARN, FAIL };

static void say(struct doctor *d, enum verdict verdict, const char *check, const char *format, ...)
	__attribute__((format(printf, 4, 5)));
static void say(struct doctor *d, enum verdict verdict, const char *check, const char *format, ...)
{
	static const char *const words[] = { [OK] = "OK", [WARN] = "WARN", [FAIL] = "FAIL" };
	char text[FACTS_PATH_MAX];
	va_list args;

	va_start(args, format);
	vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	d->failed += verdict == FAIL;
	if (!d->json) {
		printf("%-4s  %-16s  %s\n", words[verdict], check, text);
		return;
	}
	json_object(d->json, NULL);
	json_string(d->json, "check", check);
	json_string(d->json, "verdict", words[verdict]);
	json_string(d->json, "says", text);
	json_end_object(d->json);
}

/* What keeps the module from being loaded bites at the next boot, if it is loaded now. */
static enum verdict unloadable(const struct doctor *d)
{
	return d->loaded ? WARN : FAIL;
}

/* ---- the file ---------------------------------------------------------------------------------------------------- */

/* The path from a line of modules.dep, "updates/dkms/offstage.ko.xz: …", if it is the module's. */
static bool is_module(char *line)
{
	char *colon = strchr(line, ':'), *name;

	if (!colon)
		return false;
	*colon = '\0';
	name = strrchr(line, '/');
	name = name ? name + 1 : line;
	return strncmp(name, "offstage.ko", 11) == 0 && (!name[11] || name[11] == '.');
}

static bool find_listed(const char *release, char found[FACTS_PATH_MAX])
{
	char path[FACTS_PATH_MAX], *line = NULL;
	FILE *file = facts_path(path, "/lib/modules/%s/modules.dep", release) ? fopen(path, "re") : NULL;
	bool listed = false;
	size_t size = 0;

	while (file && !listed && getline(&line, &size, file) > 0)
		listed = is_module(line) && facts_path(found, "/lib/modules/%s/%s", release, line) &&
			 access(found, R_OK) == 0;
	free(line);
	if (file)
		fclose(file);
	return listed;
}

/* The first file where one is installed by hand; the pattern's kernel may be "*". */
static bool find_placed(const char *release, char found[FACTS_PATH_MAX])
{
	char pattern[FACTS_PATH_MAX];
	glob_t files = { 0 };
	bool placed;

	if (!facts_path(pattern, "/lib/modules/%s/" INSTALLED, release))
		return false;
	placed = glob(pattern, GLOB_BRACE, NULL, &files) == 0 && files.gl_pathc;
	if (placed)
		snprintf(found, FACTS_PATH_MAX, "%s", files.gl_pathv[0]);
	globfree(&files);
	return placed;
}

/* A value of the section .modinfo, "key=value", up to its end or a blank. */
static void module_value(const char *image, size_t size, const char *key, char *value, size_t room)
{
	const char *at = image, *end = image + size;
	size_t n = strlen(key), length = 0;

	/* A string of that section follows a zero, which tells version= from srcversion=. */
	while ((at = memmem(at, (size_t)(end - at), key, n)) && (at == image || at[-1]))
		at += n;
	*value = '\0';
	if (!at)
		return;
	at += n;
	while (at + length < end && at[length] && at[length] != ' ' && length + 1 < room)
		length++;
	memcpy(value, at, length);
	value[length] = '\0';
}

static void read_module(struct module_file *file)
{
	const size_t mark = sizeof(SIGNED) - 1;
	int fd = open(file->path, O_RDONLY | O_CLOEXEC);
	char *image = MAP_FAILED;
	struct stat st;
	size_t size;

	if (fd < 0)
		return;
	if (fstat(fd, &st) == 0 && st.st_size > 0)
		image = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
	close(fd);
	if (image == MAP_FAILED)
		return;
	size = (size_t)st.st_size;
	if (size > mark && memcmp(image, "\177ELF", 4) == 0) {
		file->readable = true;
		file->is_signed = memcmp(image + size - mark, SIGNED, mark) == 0;
		module_value(image, size, "vermagic=", file->built_for, sizeof(file->built_for));
		module_value(image, size, "version=", file->version, sizeof(file->version));
	}
	munmap(image, size);
}

static bool asked_at_boot(void)
{
	char path[FACTS_PATH_MAX], *line = NULL;
	FILE *file = facts_path(path, AT_BOOT) ? fopen(path, "re") : NULL;
	bool asked = false;
	size_t size = 0;

	/* The example that comes with the module has it commented out. */
	while (file && !asked && getline(&line, &size, file) > 0)
		asked = strcmp(line, "offstage\n") == 0 || strcmp(line, "offstage") == 0;
	free(line);
	if (file)
		fclose(file);
	return asked;
}

/* The newest version that dkms was given, by name. */
static bool dkms_version(char *version, size_t room)
{
	char pattern[FACTS_PATH_MAX];
	glob_t versions = { 0 };
	bool found;

	if (!facts_path(pattern, DKMS "/[0-9]*"))
		return false;
	found = glob(pattern, 0, NULL, &versions) == 0 && versions.gl_pathc;
	if (found)
		snprintf(version, room, "%s", strrchr(versions.gl_pathv[versions.gl_pathc - 1], '/') + 1);
	globfree(&versions);
	return found;
}

static void find_module(struct doctor *d)
{
	struct module_file *file = &d->file;

	file->listed = find_listed(d->release, file->path);
	if (!file->listed && !find_placed(d->release, file->path))
		file->path[0] = '\0';
	else
		read_module(file);
}

static void check_missing(struct doctor *d)
{
	char version[64], elsewhere[FACTS_PATH_MAX];
	bool dkms = dkms_version(version, sizeof(version)), other = find_placed("*", elsewhere);
	char headers[192] = "";

	d->wanted = dkms || other || asked_at_boot();
	if (!facts_exist("/lib/modules/%s/build", d->release))
		snprintf(headers, sizeof(headers), "`apt install linux-headers-%s`, and then ", d->release);
	if (dkms)
		say(d, unloadable(d), "installed", "dkms has version %s, but no build of it for this kernel, %s: "
		    "%s`dkms install offstage/%s -k %s`; " DKMS "/%s/build/make.log has the messages of a build that "
		    "failed", version, d->release, headers, version, d->release, version);
	else if (other)
		say(d, unloadable(d), "installed", "%s is for another kernel, and there is none for this one, %s: "
		    "%sbuild it with dkms, which follows the kernel, or with `make modules`",
		    elsewhere + strlen(facts_root), d->release, headers);
	else if (d->loaded)
		say(d, WARN, "installed", "no, it was loaded from elsewhere and won't be there after the next boot: "
		    "install it with dkms, or with `make install-module`");
	else if (d->wanted)
		say(d, FAIL, "installed", "no, though " AT_BOOT " asks for it: %sbuild it with dkms, or remove that "
		    "file", headers);
	else
		say(d, WARN, "installed", "no, for no kernel; the library does without, with less: %s`dkms install "
		    "offstage/%s`, after `make install` has brought its sources", headers, offstage_version());
}

static void check_installed(struct doctor *d)
{
	const struct module_file *file = &d->file;
	const char *path = file->path + strlen(facts_root);

	if (!*file->path) {
		check_missing(d);
		return;
	}
	d->wanted = true;
	if (*file->built_for && strcmp(file->built_for, d->release) != 0)
		say(d, unloadable(d), "installed", "%s was built for kernel %s, and this is %s: build it again", path,
		    file->built_for,
		    d->release);
	else if (!file->listed)
		say(d, unloadable(d), "installed", "%s is there, but modprobe doesn't know it: `depmod -a`", path);
	else if (*file->version && strcmp(file->version, offstage_version()) != 0)
		say(d, WARN, "installed", "%s is version %s, and the library %s: install both from one release", path,
		    file->version,
		    offstage_version());
	else
		say(d, OK, "installed", "%s", path);
}

/* ---- who may load it --------------------------------------------------------------------------------------------- */

/* The word in brackets, of "none [integrity] confidentiality". */
static bool lockdown_word(char *word, size_t size)
{
	char line[128], *begin, *end;

	if (!facts_line(line, sizeof(line), "/sys/kernel/security/lockdown"))
		return false;
	begin = strchr(line, '[');
	end = begin ? strchr(begin, ']') : NULL;
	if (!end)
		return false;
	*end = '\0';
	snprintf(word, size, "%s", begin + 1);
	return true;
}

/* Four bytes of attributes, then 0 or 1. */
static const char *secure_boot(void)
{
	char path[FACTS_PATH_MAX];
	unsigned char variable[5];
	FILE *file = NULL;
	size_t n;

	if (!facts_exist("/sys/firmware/efi"))
		return "not there (no UEFI)";
	if (facts_path(path, "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"))
		file = fopen(path, "re");
	if (!file)
		return "unknown (efivarfs can't be read)";
	n = fread(variable, 1, sizeof(variable), file);
	fclose(file);
	return n != sizeof(variable) ? "unknown" : variable[4] ? "on" : "off";
}

static void check_lockdown(struct doctor *d, bool *enforced)
{
	char word[64] = "unknown (no securityfs, or a kernel without it)", enforce[8] = "";

	*enforced = facts_line(enforce, sizeof(enforce), "/sys/module/module/parameters/sig_enforce") &&
		    *enforce == 'Y';
	if (lockdown_word(word, sizeof(word)) && strcmp(word, "none") != 0)
		*enforced = true;
	say(d, OK, "lockdown", "%s; Secure Boot: %s; %s", word, secure_boot(),
	    *enforced ? "the kernel takes modules with a signature that it knows, and no others" :
			"the kernel takes unsigned modules, too");
}

#define SIGN "sign it with a key that the kernel knows: dkms has one of its own, which `mokutil --import " \
	"/var/lib/dkms/mok.pub` and a reboot enroll"

static void check_signed(struct doctor *d, bool enforced)
{
	const struct module_file *file = &d->file;
	char taint[32] = "";
	bool unknown = d->loaded && facts_line(taint, sizeof(taint), LOADED "/taint") && strchr(taint, 'E');

	if (!*file->path && !d->loaded)
		return;
	if (file->readable && file->is_signed)
		say(d, OK, "signed", unknown ? "yes, with a key that this kernel doesn't know, and takes all the "
		    "same" : "yes");
	else if ((file->readable || unknown) && enforced)
		say(d, unloadable(d), "signed", "no, and this kernel takes signed modules only: " SIGN);
	else if (file->readable || unknown)
		say(d, OK, "signed", "no, which this kernel allows");
	else if (d->loaded)
		say(d, OK, "signed", "the kernel took it");
	else if (enforced)
		say(d, WARN, "signed", "unknown, since the file is compressed, and this kernel takes signed modules "
		    "only: if `modinfo -F signer offstage` says nothing, " SIGN);
	else
		say(d, OK, "signed", "unknown, since the file is compressed; this kernel takes it either way");
}

static void check_loaded(struct doctor *d)
{
	char version[32] = "";

	if (!d->loaded && d->wanted)
		say(d, FAIL, "loaded", "no: `modprobe offstage`, and for every boot `echo offstage > " AT_BOOT "`; "
		    "`dmesg` says why a module was refused");
	if (!d->loaded)
		return;
	facts_line(version, sizeof(version), LOADED "/version");
	if (strcmp(version, offstage_version()) == 0)
		say(d, OK, "loaded", "version %s", version);
	else
		say(d, WARN, "loaded", "version %s, and the library is %s: when no buffer is open, `rmmod offstage && "
		    "modprobe offstage` takes the one that is installed", *version ? version : "unknown",
		    offstage_version());
}

/* ---- the device -------------------------------------------------------------------------------------------------- */

static const char *group_name(gid_t gid, char name[64])
{
	const struct group *group = getgrgid(gid);

	if (group)
		snprintf(name, 64, "%s", group->gr_name);
	else
		snprintf(name, 64, "%u", (unsigned int)gid);
	return name;
}

#define GIVE_TO_GROUP "the udev rule that `make install` brings gives it to the group offstage, after " \
	"`systemd-sysusers && udevadm control --reload && udevadm trigger /dev/offstage`"

static void check_device(struct doctor *d, const struct stat *st)
{
	unsigned int mode = st->st_mode & 07777;
	char group[64];

	group_name(st->st_gid, group);
	if (mode & 07)
		say(d, WARN, "device", "/dev/offstage has mode %04o, so every user may take memory up to limit_user: "
		    "`chmod 0660`, or the udev rule that `make install` brings", mode);
	else if (!st->st_gid || (mode & 060) != 060)
		say(d, WARN, "device", "/dev/offstage has mode %04o and group %s, so root alone may open it: "
		    GIVE_TO_GROUP, mode, group);
	else
		say(d, OK, "device", "/dev/offstage, mode %04o, group %s", mode, group);
}

/* Has the group's entry this user, though the session's groups don't? Those are set when it begins. */
static bool in_database(gid_t gid, const char **user)
{
	const struct passwd *passwd = getpwuid(getuid());
	const struct group *group = getgrgid(gid);

	*user = passwd ? passwd->pw_name : "USER";
	if (!passwd || !group)
		return false;
	if (passwd->pw_gid == gid)
		return true;
	for (char **member = group->gr_mem; *member; member++)
		if (strcmp(*member, passwd->pw_name) == 0)
			return true;
	return false;
}

static void denied(struct doctor *d, const struct stat *st)
{
	const char *user;
	char group[64];

	group_name(st->st_gid, group);
	if (group_member(st->st_gid) || !st->st_gid || !(st->st_mode & 060))
		say(d, FAIL, "access", "this user may not open /dev/offstage, which has mode %04o and group %s: "
		    GIVE_TO_GROUP, st->st_mode & 07777, group);
	else if (in_database(st->st_gid, &user))
		say(d, FAIL, "access", "%s is in the group %s, but this session began before that: log out and in "
		    "again, or `newgrp %s`", user,
		    group, group);
	else
		say(d, FAIL, "access", "%s isn't in the group %s: `usermod -aG %s %s`, and log in again", user, group,
		    group, user);
}

static void check_access(struct doctor *d, const struct stat *st)
{
	int fd = facts_device(&d->device);

	if (fd >= 0)
		close(fd);
	d->usable = fd >= 0;
	switch (fd) {
	case -EACCES:
		denied(d, st);
		break;
	case -EPERM:
		say(d, FAIL, "access", "/dev/offstage may not be opened in this container or service: give it --device "
		    "/dev/offstage, or DeviceAllow=/dev/offstage");
		break;
	case -EPROTO:
		say(d, FAIL, "access", "the module speaks ABI %u, and the library %u: load the module of this version",
		    d->device.abi,
		    OFFSTAGE_ABI);
		break;
	case -ENOTTY:
	case -ENXIO:
	case -ENODEV:
		say(d, FAIL, "access", "/dev/offstage is there, but isn't the loaded module's: `rm /dev/offstage && "
		    "udevadm trigger`");
		break;
	default:
		if (fd < 0)
			say(d, FAIL, "access", "/dev/offstage can't be opened: %s", strerror(-fd));
		else
			say(d, OK, "access", "this user may open it, and both speak ABI %u", d->device.abi);
	}
}

static void check_device_file(struct doctor *d)
{
	char path[FACTS_PATH_MAX];
	struct stat st;

	if (!d->loaded)
		return;
	if (!facts_path(path, "/dev/offstage") || stat(path, &st) < 0) {
		say(d, FAIL, "device", "there is no /dev/offstage, though the module is loaded: `udevadm trigger`, or "
		    "--device /dev/offstage for a container");
		return;
	}
	check_device(d, &st);
	check_access(d, &st);
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

static void check_provider(struct doctor *d)
{
	const struct offstage_info *i = &d->info;
	bool thp = i->huge_page_size && strcmp(i->thp, "never") != 0;

	if (strcmp(i->provider, "kmod") == 0)
		say(d, OK, "provider", "kmod");
	else if (d->usable)
		say(d, WARN, "provider", "%s, though the module could be used: %s", i->provider,
		    getenv("OFFSTAGE_PROVIDER") ? "unset OFFSTAGE_PROVIDER" : "is this library built without it?");
	else if (!thp)
		say(d, WARN, "provider", "%s, with base pages only: `echo madvise > "
		    "/sys/kernel/mm/transparent_hugepage/enabled`", i->provider);
	else
		say(d, OK, "provider", "%s, with transparent huge pages (%s)", i->provider, i->thp);
}

static void check_nodes(struct doctor *d)
{
	uint32_t movable = 0, n = 0;

	for (;; n++) {
		struct offstage_node_info node = { .size = sizeof(node) };
		char name[32];

		if (offstage_node_info(d->ctx, n, &node))
			break;
		d->memory += node.total;
		snprintf(name, sizeof(name), "node%u", node.node);
		if (!(node.flags & OFFSTAGE_NODE_NORMAL)) {
			movable++;
			say(d, WARN, name, "%s of movable memory only, which can't be pinned: " FACTS_MAKE_NORMAL,
			    SIZE(node.total));
		} else if (!(node.flags & OFFSTAGE_NODE_ALLOWED)) {
			say(d, WARN, name, "outside this process's cpuset: buffers can't lie there; cpuset.mems, or "
			    "AllowedMemoryNodes= in a service, says where they may");
		}
	}
	if (!movable)
		say(d, OK, "movable", "no node has movable memory only");
}

static void check_pool(struct doctor *d, const struct facts_pool *pool)
{
	char name[32];

	snprintf(name, sizeof(name), "pool%u", pool->node);
	if (pool->orphaned)
		say(d, WARN, name, "%s of buffers that are closed are still pinned, and charged to who made them: end "
		    "the process that has registered them with RDMA, io_uring or a GPU; they come back by themselves",
		    SIZE(pool->orphaned));
	if (pool->failed)
		say(d, WARN, name, "huge pages for %s were asked for and not to be had, since the module was loaded: "
		    "reserve them at boot, by reserve=%u:BYTES in /etc/modprobe.d/offstage.conf", SIZE(pool->failed),
		    pool->node);
	if (pool->orphaned || pool->failed)
		return;
	if (pool->reserved)
		say(d, OK, name, "%s reserved, %s of it free, of which %s are to be cleared", SIZE(pool->reserved),
		    SIZE(pool->free),
		    SIZE(pool->scrubbing));
	else
		say(d, OK, name, "nothing reserved");
}

static void check_pools(struct doctor *d)
{
	static struct facts_pool pools[FACTS_POOLS_MAX];
	size_t n = facts_pools(pools);

	for (size_t i = 0; i < n; i++) {
		d->reserved += pools[i].reserved;
		check_pool(d, &pools[i]);
	}
	if (n && !d->reserved)
		say(d, WARN, "pools", "nothing is reserved, so huge pages are found as far as memory isn't fragmented: "
		    "`offstage pool grow 0:BYTES`, or at boot reserve=all:50%% in /etc/modprobe.d/offstage.conf");
}

static bool limit(const char *name, uint64_t *bytes)
{
	return facts_number(bytes, LOADED "/parameters/%s", name);
}

/* A limit is too high when it lets the machine run out of memory, and too low when it is less than what is reserved. */
static void check_limit(struct doctor *d, const char *name, const char *whose, uint64_t used)
{
	uint64_t bytes;

	if (!limit(name, &bytes))
		return;
	if (!bytes || (d->memory && bytes > d->memory))
		say(d, WARN, name, "%s: %s can take all memory, and the machine runs out of it: `echo BYTES > "
		    "" LOADED "/parameters/%s`",
		    bytes ? SIZE(bytes) : "none", whose, name);
	else if (bytes < d->reserved)
		say(d, WARN, name, "%s, and the pools hold %s, of which %s can't have more: `echo %llu > "
		    "" LOADED "/parameters/%s`, or more",
		    SIZE(bytes), SIZE(d->reserved), whose, (unsigned long long)d->reserved, name);
	else if (d->usable)
		say(d, OK, name, "%s, of which %s are in use", SIZE(bytes), SIZE(used));
	else
		say(d, OK, name, "%s", SIZE(bytes));
}

static void check_small_limit(struct doctor *d, const char *name, const char *of)
{
	uint64_t bytes;

	if (limit(name, &bytes) && bytes)
		say(d, OK, name, "%s %s", SIZE(bytes), of);
}

static void check_process(struct doctor *d)
{
	const struct offstage_info *i = &d->info;
	bool kmod = strcmp(i->provider, "kmod") == 0;

	if (i->memlock_limit == UINT64_MAX)
		say(d, OK, "locked-memory", "unlimited");
	else
		say(d, WARN, "locked-memory", "at most %s, %s: `ulimit -l unlimited`, LimitMEMLOCK=infinity in a "
		    "service, or docker run --ulimit memlock=-1", SIZE(i->memlock_limit),
		    kmod ? "which buffers don't count against, but their registration with io_uring or RDMA does" :
			   "which buffers count against");
	if (i->memory_available < (uint64_t)1 << 30)
		say(d, WARN, "memory", "%s available (%s): free memory, or raise the limit%s",
		    SIZE(i->memory_available), i->memory_limit,
		    kmod ? "; what comes from the pools doesn't count" : "");
	else
		say(d, OK, "memory", "%s available (%s)", SIZE(i->memory_available), i->memory_limit);
}

/* ---- all of it --------------------------------------------------------------------------------------------------- */

static void check_module(struct doctor *d)
{
	bool enforced;

	if (!facts_line(d->release, sizeof(d->release), "/proc/sys/kernel/osrelease"))
		snprintf(d->release, sizeof(d->release), "unknown");
	d->loaded = facts_exist(LOADED);
	find_module(d);
	check_installed(d);
	check_lockdown(d, &enforced);
	check_signed(d, enforced);
	check_loaded(d);
	check_device_file(d);
}

static void check_memory(struct doctor *d)
{
	struct offstage_options o = { .size = sizeof(o), .threads = 1, .lock = OFFSTAGE_PREFER };

	d->info = (struct offstage_info){ .size = sizeof(d->info) };
	if (offstage_open(&o, &d->ctx) || offstage_info(d->ctx, &d->info)) {
		say(d, FAIL, "provider", "%s", offstage_error());
		return;
	}
	check_provider(d);
	check_nodes(d);
	if (d->loaded) {
		check_pools(d);
		check_limit(d, "limit_user", "one user", d->device.used_user);
		check_limit(d, "limit_all", "all users together", d->device.used_all);
		check_small_limit(d, "limit_file", "for one open file");
		check_small_limit(d, "limit_node", "on one node, of what doesn't come from its pool");
	}
	check_process(d);
}

int command_doctor(int argc, char **argv)
{
	struct doctor d = { .failed = 0 };
	struct json json;
	bool as_json;
	int status = arguments_only(argc, argv, "--json", help, &as_json);

	if (status >= 0)
		return status;
	if (as_json)
		d.json = &json;
	if (d.json && !json_open(&json, "-"))
		return STATUS_FAILED;
	if (d.json)
		json_array(&json, "checks");
	check_module(&d);
	check_memory(&d);
	offstage_close(d.ctx);
	if (d.json) {
		json_end_array(&json);
		json_integer(&json, "failed", d.failed);
		if (!json_close(&json, "standard output"))
			return STATUS_FAILED;
	}
	return d.failed ? STATUS_FAILED : 0;
}
