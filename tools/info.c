/* SPDX-License-Identifier: MIT */
/* offstage info: everything that the library says about this machine and this build, for people and for scripts. */
#include <errno.h>
#include <string.h>
#include "command.h"

static void help(void)
{
	puts("usage: offstage info [--json]\n\n"
	     "  --json   the same facts as one JSON object; sizes in bytes, null where there is no limit");
}

static void print_bytes(const char *name, uint64_t bytes)
{
	if (bytes >= (uint64_t)1 << 30)
		printf("%-24s%.1f GiB", name, (double)bytes / (1u << 30));
	else if (bytes >= 1u << 20)
		printf("%-24s%.1f MiB", name, (double)bytes / (1u << 20));
	else
		printf("%-24s%llu KiB", name, (unsigned long long)bytes >> 10);
}

static void print_info(const struct offstage_info *i)
{
	printf("%-24s%s\n", "version", i->version);
	printf("%-24s%s\n", "provider", i->provider);
	printf("%-24s%s (can run: %s)\n", "isa", i->isa, i->isas);
	printf("%-24s%u (%s)\n", "threads", i->threads, i->threads_why);
	print_bytes("memory available", i->memory_available);
	printf(" (%s)\n", i->memory_limit);
	if (i->budget) {
		print_bytes("budget", i->budget);
		putchar('\n');
	}
	if (i->memlock_limit == UINT64_MAX) {
		printf("%-24sunlimited\n", "locked memory");
	} else {
		print_bytes("locked memory", i->memlock_limit);
		puts(" (ulimit -l)");
	}
	print_bytes("base page", i->page_size);
	putchar('\n');
	if (i->huge_page_size)
		print_bytes("huge page", i->huge_page_size);
	else
		printf("%-24s%s", "huge page", "none");
	printf(" (transparent: %s, of files: %s)\n", i->thp, i->thp_shmem);
	print_bytes("hugetlb free", i->hugetlb_free);
	putchar('\n');
}

static void print_node(const struct offstage_node_info *n)
{
	char name[32];

	snprintf(name, sizeof(name), "node %u", n->node);
	print_bytes(name, n->total);
	printf(", %.1f GiB available, %.1f GiB of it in huge blocks, %u CPUs%s%s\n", (double)n->available / (1u << 30),
	       (double)n->huge_free / (1u << 30), n->cpus, n->flags & OFFSTAGE_NODE_NORMAL ? "" : ", movable memory only",
	       n->flags & OFFSTAGE_NODE_ALLOWED ? "" : ", outside this process's cpuset");
}

static void json_info(struct json *j, const struct offstage_info *i)
{
	json_string(j, "version", i->version);
	json_string(j, "provider", i->provider);
	json_string(j, "isa", i->isa);
	json_string(j, "isas", i->isas);
	json_integer(j, "threads", i->threads);
	json_string(j, "threads_why", i->threads_why);
	json_integer(j, "memory_available", i->memory_available);
	json_string(j, "memory_limit", i->memory_limit);
	if (i->budget)
		json_integer(j, "budget", i->budget);
	else
		json_null(j, "budget");
	if (i->memlock_limit == UINT64_MAX)
		json_null(j, "memlock_limit");
	else
		json_integer(j, "memlock_limit", i->memlock_limit);
	json_integer(j, "page_size", i->page_size);
	json_integer(j, "huge_page_size", i->huge_page_size);
	json_integer(j, "hugetlb_free", i->hugetlb_free);
	json_string(j, "thp", i->thp);
	json_string(j, "thp_shmem", i->thp_shmem);
}

static void json_node(struct json *j, const struct offstage_node_info *n)
{
	json_object(j, NULL);
	json_integer(j, "node", n->node);
	json_integer(j, "cpus", n->cpus);
	json_integer(j, "total", n->total);
	json_integer(j, "available", n->available);
	json_integer(j, "huge_free", n->huge_free);
	json_integer(j, "hugetlb_free", n->hugetlb_free);
	json_bool(j, "normal", n->flags & OFFSTAGE_NODE_NORMAL);
	json_bool(j, "allowed", n->flags & OFFSTAGE_NODE_ALLOWED);
	json_end_object(j);
}

/* Walks the nodes, and the features; j is NULL when people read it. */
static int nodes(struct offstage *ctx, struct json *j)
{
	struct offstage_node_info node;
	int ret;

	for (uint32_t i = 0;; i++) {
		node = (struct offstage_node_info){ .size = sizeof(node) };
		ret = offstage_node_info(ctx, i, &node);
		if (ret)
			return ret == -ENOENT ? 0 : ret;
		if (j)
			json_node(j, &node);
		else
			print_node(&node);
	}
}

static int features(struct json *j)
{
	struct offstage_feature f;
	char name[48];
	int ret;

	for (uint32_t i = 0;; i++) {
		f = (struct offstage_feature){ .size = sizeof(f) };
		ret = offstage_feature(i, &f);
		if (ret)
			return ret == -ENOENT ? 0 : ret;
		if (j) {
			json_object(j, NULL);
			json_string(j, "name", f.name);
			json_bool(j, "on", f.on);
			json_string(j, "why", f.why);
			json_end_object(j);
			continue;
		}
		snprintf(name, sizeof(name), "feature %s", f.name);
		printf("%-24s%s%s%s\n", name, f.on ? "on" : "off", *f.why ? ": " : "", f.why);
	}
}

/* Which backends there are to drain from: the default one says itself what it is. */
static int device_name(struct offstage *ctx, struct json *j)
{
	struct offstage_device *device;
	int ret = offstage_device_open(ctx, NULL, &device);

	if (ret)
		return ret;
	if (j)
		json_string(j, "device", offstage_device_name(device));
	else
		printf("%-24s%s\n", "device", offstage_device_name(device));
	return offstage_device_close(device);
}

static int print_all(struct offstage *ctx)
{
	struct offstage_info info = { .size = sizeof(info) };

	if (offstage_info(ctx, &info))
		return library_failed();
	print_info(&info);
	if (device_name(ctx, NULL) || nodes(ctx, NULL) || features(NULL))
		return library_failed();
	return 0;
}

static int json_all(struct offstage *ctx)
{
	struct offstage_info info = { .size = sizeof(info) };
	struct json j;

	if (offstage_info(ctx, &info))
		return library_failed();
	if (!json_open(&j, "-"))
		return STATUS_FAILED;
	json_info(&j, &info);
	if (device_name(ctx, &j))
		return library_failed();
	json_array(&j, "nodes");
	if (nodes(ctx, &j))
		return library_failed();
	json_end_array(&j);
	json_array(&j, "features");
	if (features(&j))
		return library_failed();
	json_end_array(&j);
	return json_close(&j, "standard output") ? 0 : STATUS_FAILED;
}

int command_info(int argc, char **argv)
{
	struct offstage *ctx;
	bool json;
	int status = arguments_only(argc, argv, "--json", help, &json);

	if (status >= 0)
		return status;
	if (offstage_open(NULL, &ctx))
		return library_failed();
	status = json ? json_all(ctx) : print_all(ctx);
	offstage_close(ctx);
	return status;
}
