/* SPDX-License-Identifier: MIT */
/*
 * offstage pool: what the module holds reserved on each node, and more or less of it while it runs. The amounts are
 * written as in the module's own parameter, modprobe offstage reserve=0:64G,1:64G.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>
#include "command.h"
#include "facts.h"

#define AMOUNTS_MAX FACTS_POOLS_MAX
#define ALL UINT32_MAX

static void help(void)
{
	puts("usage: offstage pool [show] [--json]\n"
	     "       offstage pool grow | shrink | set NODE:BYTES…\n\n"
	     "  show                what each node's pool holds; --json: the same, in bytes\n"
	     "  grow 0:4G 1:4G      reserves 4 GiB more on each of these nodes\n"
	     "  shrink all:512M     gives 512 MiB of every node back to the system; what is in use is never taken\n"
	     "  set 0:64G           grows or shrinks to 64 GiB\n\n"
	     "BYTES are whole huge pages, with K, M, G or T. Changing needs CAP_SYS_ADMIN.\n"
	     "Exit status 1: a pool doesn't hold what was wanted, and the sentence says why.");
}

enum action { SHOW, GROW, SHRINK, SET };

struct amount {
	uint32_t node;		/* or ALL */
	uint64_t bytes;
};

/* ---- show -------------------------------------------------------------------------------------------------------- */

static void print_pools(const struct facts_pool *pools, size_t n)
{
	printf("%4s%12s%12s%12s%12s%12s%12s\n", "node", "reserved", "free", "in use", "orphaned", "scrubbing",
	       "failed");
	for (size_t i = 0; i < n; i++)
		printf("%4u%12s%12s%12s%12s%12s%12s\n", pools[i].node, SIZE(pools[i].reserved), SIZE(pools[i].free),
		       SIZE(pools[i].in_use), SIZE(pools[i].orphaned), SIZE(pools[i].scrubbing), SIZE(pools[i].failed));
}

static bool json_pools(const struct facts_pool *pools, size_t n)
{
	struct json j;

	if (!json_open(&j, "-"))
		return false;
	json_array(&j, "nodes");
	for (size_t i = 0; i < n; i++) {
		json_object(&j, NULL);
		json_integer(&j, "node", pools[i].node);
		json_integer(&j, "reserved", pools[i].reserved);
		json_integer(&j, "free", pools[i].free);
		json_integer(&j, "in_use", pools[i].in_use);
		json_integer(&j, "orphaned", pools[i].orphaned);
		json_integer(&j, "scrubbing", pools[i].scrubbing);
		json_integer(&j, "failed", pools[i].failed);
		json_end_object(&j);
	}
	json_end_array(&j);
	return json_close(&j, "standard output");
}

static int show(bool json)
{
	static struct facts_pool pools[FACTS_POOLS_MAX];
	size_t n = facts_pools(pools);

	if (!n)
		return failed("there are no pools, since the module isn't loaded: `modprobe offstage`, or let "
			      "`offstage doctor` say what it lacks");
	if (json)
		return json_pools(pools, n) ? 0 : STATUS_FAILED;
	print_pools(pools, n);
	return 0;
}

/* ---- grow, shrink, set ------------------------------------------------------------------------------------------- */

static int open_device(struct offstage_ioc_info *info)
{
	int fd = facts_device(info);

	switch (fd) {
	case -ENOENT:
	case -ENXIO:
	case -ENODEV:
		failed("there is no /dev/offstage, so there are no pools: `modprobe offstage`, or let `offstage "
		       "doctor` say what it lacks");
		break;
	case -EPROTO:
		failed("/dev/offstage speaks ABI %u and this command %u: load the module of this version", info->abi,
		       OFFSTAGE_ABI);
		break;
	default:
		if (fd < 0)
			failed("/dev/offstage can't be opened (%s): pools are changed as root", strerror(-fd));
	}
	return fd;
}

static int refused(uint32_t node, uint64_t wanted, int err)
{
	struct offstage_node_info info;

	switch (err) {
	case EPERM:
		return failed("node %u: its pool can be changed with CAP_SYS_ADMIN only: try sudo", node);
	case ENODEV:
		return failed("there is no node %u with memory: `offstage pool` lists those that have some", node);
	case EOPNOTSUPP:
		return failed("node %u has movable memory only, which can't be pinned, so it has no pool: "
			      FACTS_MAKE_NORMAL, node);
	case ENOMEM:
		if (facts_node(node, &info))
			return failed("node %u: a pool of %s is more than the node has, which is %s: ask for less",
				      node, SIZE(wanted), SIZE(info.total));
		/* fallthrough */
	default:
		return failed("node %u: its pool can't be changed to %s (%s)", node, SIZE(wanted), strerror(err));
	}
}

static int too_little(uint32_t node, uint64_t wanted, uint64_t held)
{
	struct offstage_node_info info = { 0 };

	facts_node(node, &info);
	return failed("node %u: %s were wanted and the pool holds %s; the node has %s available, %s of it in huge "
		      "blocks: free memory there, or compact it with `echo 1 > /proc/sys/vm/compact_memory`, and ask "
		      "again; there is most to be had at boot, by reserve=%u:%lluM in /etc/modprobe.d", node,
		      SIZE(wanted), SIZE(held), SIZE(info.available), SIZE(info.huge_free), node,
		      (unsigned long long)wanted >> 20);
}

static int too_much(int fd, uint32_t node, uint64_t wanted, uint64_t held)
{
	struct offstage_ioc_node now = { .size = sizeof(now), .node = node };

	if (ioctl(fd, OFFSTAGE_IOC_NODE, &now) < 0)
		now.reserved = now.free = 0;
	return failed("node %u: %s were wanted and the pool holds %s; %s of it are in buffers or still pinned, and go "
		      "to the system as they are let go: `offstage buffers` tells whose they are", node, SIZE(wanted),
		      SIZE(held), SIZE(now.reserved - now.free));
}

static uint64_t target(enum action action, uint64_t reserved, uint64_t bytes)
{
	switch (action) {
	case GROW:
		return bytes > UINT64_MAX - reserved ? UINT64_MAX : reserved + bytes;
	case SHRINK:
		return bytes > reserved ? 0 : reserved - bytes;
	default:
		return bytes;
	}
}

static int change(int fd, enum action action, uint32_t node, uint64_t bytes)
{
	struct offstage_ioc_node before = { .size = sizeof(before), .node = node };
	struct offstage_ioc_reserve reserve = { .size = sizeof(reserve), .node = node };
	uint64_t wanted;

	if (ioctl(fd, OFFSTAGE_IOC_NODE, &before) < 0)
		return refused(node, bytes, errno);
	wanted = target(action, before.reserved, bytes);
	reserve.bytes = wanted;
	if (ioctl(fd, OFFSTAGE_IOC_RESERVE, &reserve) < 0)
		return refused(node, wanted, errno);
	printf("node %u: %s reserved, %s before\n", node, SIZE(reserve.bytes), SIZE(before.reserved));
	if (reserve.bytes < wanted)
		return too_little(node, wanted, reserve.bytes);
	if (reserve.bytes > wanted)
		return too_much(fd, node, wanted, reserve.bytes);
	return 0;
}

/* A node keeps its directory when its memory goes. */
static bool is_online(int fd, uint32_t node)
{
	struct offstage_ioc_node there = { .size = sizeof(there), .node = node };

	return ioctl(fd, OFFSTAGE_IOC_NODE, &there) == 0;
}

static int change_all(int fd, enum action action, uint64_t bytes)
{
	static struct facts_pool pools[FACTS_POOLS_MAX];
	size_t n = facts_pools(pools);
	int status = 0;

	for (size_t i = 0; i < n; i++)
		if (is_online(fd, pools[i].node) && change(fd, action, pools[i].node, bytes))
			status = STATUS_FAILED;
	return status;
}

static int change_each(enum action action, const struct amount *amounts, size_t n)
{
	struct offstage_ioc_info info;
	int fd = open_device(&info), status = 0;

	if (fd < 0)
		return STATUS_FAILED;
	for (size_t i = 0; i < n; i++)
		if (amounts[i].bytes % info.huge_size) {
			status = failed("pools are whole huge pages of %s: ask for a multiple", SIZE(info.huge_size));
			goto out;
		}
	for (size_t i = 0; i < n; i++)
		if (amounts[i].node == ALL ? change_all(fd, action, amounts[i].bytes) :
					     change(fd, action, amounts[i].node, amounts[i].bytes))
			status = STATUS_FAILED;
out:
	close(fd);
	return status;
}

/* ---- arguments --------------------------------------------------------------------------------------------------- */

static bool parse_amount(const char *text, struct amount *amount)
{
	char *end = strchr(text, ':');
	unsigned long node;

	if (!end || !parse_bytes(end + 1, &amount->bytes))
		return false;
	if (strncmp(text, "all:", 4) == 0) {
		amount->node = ALL;
		return true;
	}
	if (*text < '0' || *text > '9')
		return false;
	errno = 0;
	node = strtoul(text, &end, 10);
	amount->node = (uint32_t)node;
	return !errno && *end == ':' && node < ALL;
}

static int change_command(enum action action, const char *name, struct arguments *a)
{
	static struct amount amounts[AMOUNTS_MAX];
	size_t n = 0;

	while (arguments_next(a)) {
		char *rest = (char *)a->name, *word;

		/* As one word of the module's parameter, or one word each. */
		while ((word = strsep(&rest, ","))) {
			if (n == AMOUNTS_MAX || !parse_amount(word, &amounts[n++]))
				return usage_error("pool", "'%s' isn't NODE:BYTES or all:BYTES, as 0:64G", word);
		}
	}
	if (!n)
		return usage_error("pool", "%s needs to know where and how much, as 0:64G", name);
	return change_each(action, amounts, n);
}

int command_pool(int argc, char **argv)
{
	static const char *const actions[] = { [SHOW] = "show", [GROW] = "grow", [SHRINK] = "shrink", [SET] = "set" };
	struct arguments a = { .argc = argc, .argv = argv, .at = 1 };
	bool json = false, named = false;

	while (arguments_next(&a)) {
		if (strcmp(a.name, "--help") == 0) {
			help();
			return 0;
		}
		if (strcmp(a.name, "--json") == 0) {
			json = true;
			continue;
		}
		for (enum action action = GROW; action <= SET && !named && !json; action++)
			if (strcmp(a.name, actions[action]) == 0)
				return change_command(action, actions[action], &a);
		if (named || strcmp(a.name, actions[SHOW]) != 0)
			return usage_error("pool", "'%s' isn't show, grow, shrink or set, or an option", a.name);
		named = true;
	}
	return show(json);
}
