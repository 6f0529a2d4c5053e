// SPDX-License-Identifier: GPL-2.0
/*
 * For people: /sys/class/offstage/offstage/node<N>/ has each pool's numbers in bytes, of which `reserved` can be
 * written; /sys/kernel/debug/offstage/buffers lists the buffers. Limits are the module's parameters.
 */
#include <linux/capability.h>
#include <linux/debugfs.h>
#include <linux/device.h>
#include <linux/kobject.h>
#include <linux/memory.h>
#include <linux/mutex.h>
#include <linux/seq_file.h>
#include <linux/slab.h>
#include <linux/string.h>
#include <linux/sysfs.h>
#include "offstage.h"

static struct kobject *directories[MAX_NUMNODES];
static DEFINE_MUTEX(directories_lock);	/* memory comes online at any time */
static struct device *parent;
static struct dentry *debug;

int people_bytes(const char *text, u64 *bytes)
{
	char *end;

	*bytes = memparse(text, &end);
	if (end == text || *skip_spaces(end))
		return -EINVAL;
	/* memparse() doesn't tell overflow; the one that would lift a limit begins with another digit. */
	return *bytes || *text == '0' ? 0 : -EINVAL;
}

static int node_of(struct kobject *kobj)
{
	int node;

	for (node = 0; node < MAX_NUMNODES && directories[node] != kobj; node++)
		;
	return node;
}

#define COUNT(name) \
static ssize_t name##_show(struct kobject *kobj, struct kobj_attribute *attr, char *out) \
{ \
	struct pool_counts counts; \
\
	pool_counts(node_of(kobj), &counts); \
	return sysfs_emit(out, "%llu\n", counts.name); \
}

COUNT(reserved)
COUNT(free)
COUNT(in_use)
COUNT(orphaned)
COUNT(scrubbing)
COUNT(failed)

static ssize_t reserved_store(struct kobject *kobj, struct kobj_attribute *attr, const char *in, size_t count)
{
	u64 bytes;
	s64 held;

	/* As for the call: root of a container may have /sys. */
	if (!capable(CAP_SYS_ADMIN))
		return -EPERM;
	if (people_bytes(in, &bytes))
		return -EINVAL;
	held = pool_resize(node_of(kobj), bytes);
	if (held < 0)
		return held;
	/* A partial result is an error here, and what was got stays and can be read: a shell sees nothing else. */
	return held == round_down(bytes, PMD_SIZE) ? count : (u64)held < bytes ? -ENOMEM : -EBUSY;
}

static struct kobj_attribute reserved_attribute = __ATTR_RW(reserved);
static struct kobj_attribute free_attribute = __ATTR_RO(free);
static struct kobj_attribute in_use_attribute = __ATTR_RO(in_use);
static struct kobj_attribute orphaned_attribute = __ATTR_RO(orphaned);
static struct kobj_attribute scrubbing_attribute = __ATTR_RO(scrubbing);
static struct kobj_attribute failed_attribute = __ATTR_RO(failed);

static struct attribute *attributes[] = {
	&reserved_attribute.attr,
	&free_attribute.attr,
	&in_use_attribute.attr,
	&orphaned_attribute.attr,
	&scrubbing_attribute.attr,
	&failed_attribute.attr,
	NULL,
};

static const struct attribute_group group = { .attrs = attributes };

static int buffers_seq_show(struct seq_file *out, void *unused)
{
	return buffers_show(out);
}
DEFINE_SHOW_ATTRIBUTE(buffers_seq);

/* A directory for every node that has normal memory now and none yet. */
static int add_directories(void)
{
	char name[16];
	int node, ret = 0;

	mutex_lock(&directories_lock);
	for_each_node_state(node, N_NORMAL_MEMORY) {
		if (directories[node])
			continue;
		snprintf(name, sizeof(name), "node%d", node);
		directories[node] = kobject_create_and_add(name, &parent->kobj);
		ret = directories[node] ? sysfs_create_group(directories[node], &group) : -ENOMEM;
		if (ret) {
			kobject_put(directories[node]);
			directories[node] = NULL;
			break;
		}
	}
	mutex_unlock(&directories_lock);
	return ret;
}

/* A node whose memory goes keeps its directory, which says that nothing is there. */
static int memory_changed(struct notifier_block *block, unsigned long what, void *unused)
{
	if (what == MEM_ONLINE)
		add_directories();
	return NOTIFY_OK;
}

static struct notifier_block memory_notifier = { .notifier_call = memory_changed };

int people_init(struct device *device)
{
	int ret;

	parent = device;
	ret = register_memory_notifier(&memory_notifier);
	if (ret)
		return ret;
	ret = add_directories();
	if (ret) {
		people_exit();
		return ret;
	}
	debug = debugfs_create_dir("offstage", NULL);
	debugfs_create_file("buffers", 0400, debug, NULL, &buffers_seq_fops);
	return 0;
}

void people_exit(void)
{
	int node;

	unregister_memory_notifier(&memory_notifier);
	debugfs_remove_recursive(debug);
	debug = NULL;
	for (node = 0; node < MAX_NUMNODES; node++) {
		/* Its files are ours and go now; somebody may have the directory itself a moment longer. */
		kobject_del(directories[node]);
		kobject_put(directories[node]);
		directories[node] = NULL;
	}
}
