// SPDX-License-Identifier: GPL-2.0
/*
 * Calls. One table says each struct's size and how much of it must be there; copying, and what sizes of other versions
 * mean, is done here once. A call sees a complete struct of this kernel's, and no user memory but what it points to.
 */
#include <linux/cpuset.h>
#include <linux/file.h>
#include <linux/fs.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include "offstage.h"
#include "compat.h"
#include "trace.h"

struct call {
	union {
		struct offstage_ioc_info info;
		struct offstage_ioc_node node;
		struct offstage_ioc_create create;
		struct offstage_ioc_reserve reserve;
		struct offstage_ioc_buffer buffer;
	};
	/* Goes to create.fd when the caller has been told; a fault there must leave nothing behind. */
	struct file *made;
};

struct op {
	unsigned int cmd;
	size_t size, min_size;
	long (*run)(struct file *file, struct call *call);
};

static long run_info(struct file *file, struct call *call)
{
	struct offstage_ioc_info *info = &call->info;

	info->abi = OFFSTAGE_ABI;
	info->features = OFFSTAGE_FEATURE_POOLS | OFFSTAGE_FEATURE_MMAP_DEVICE;
	info->huge_size = PMD_SIZE;
	info->limit_file = READ_ONCE(limit_file);
	info->limit_user = READ_ONCE(limit_user);
	info->limit_all = READ_ONCE(limit_all);
	limits_used(file->private_data, &info->used_file, &info->used_user, &info->used_all);
	return 0;
}

static long run_node(struct file *file, struct call *call)
{
	struct offstage_ioc_node *node = &call->node;
	struct pool_counts counts;
	int check;

	if (node->reserved0)
		return -EINVAL;
	if (node->node >= MAX_NUMNODES)
		return -ENODEV;
	check = pool_node_check(node->node);
	if (check == -ENODEV)
		return check;
	node->flags = (check != -EOPNOTSUPP ? OFFSTAGE_IOC_NODE_NORMAL : 0) |
		      (node_isset(node->node, cpuset_current_mems_allowed) ? OFFSTAGE_IOC_NODE_ALLOWED : 0);
	pool_counts(node->node, &counts);
	node->reserved = counts.reserved;
	node->free = counts.free;
	node->in_use = counts.in_use;
	node->orphaned = counts.orphaned;
	node->scrubbing = counts.scrubbing;
	node->failed = counts.failed;
	return 0;
}

/* The placement as the caller gave it, checked, with every node one that the caller may use. */
static int placement_from(struct placement *out, const struct offstage_ioc_create *create)
{
	bool weighted = create->placement == OFFSTAGE_IOC_WEIGHTED;
	u32 i;
	int ret;

	if (create->placement > OFFSTAGE_IOC_SPILL || create->n_nodes > OFFSTAGE_IOC_NODES_MAX)
		return -EINVAL;
	if (!!create->weights != weighted)
		return -EINVAL;
	memset(out, 0, sizeof(*out));
	if (create->placement == OFFSTAGE_IOC_LOCAL) {
		ret = buffer_local_node();
		if (create->n_nodes || create->nodes)
			return -EINVAL;
		if (ret == NUMA_NO_NODE)
			return -ENOMEM;
		out->kind = OFFSTAGE_IOC_BIND;
		out->n = 1;
		out->nodes[0] = ret;
		return 0;
	}
	out->kind = create->placement;
	out->n = create->n_nodes;
	if (copy_from_user(out->nodes, u64_to_user_ptr(create->nodes), out->n * sizeof(u32)) ||
	    (create->weights && copy_from_user(out->weights, u64_to_user_ptr(create->weights), out->n * sizeof(u32))))
		return -EFAULT;
	ret = placement_check(out);
	for (i = 0; !ret && i < out->n; i++)
		ret = pool_node_check(out->nodes[i]);
	return ret;
}

static long run_create(struct file *file, struct call *call)
{
	struct offstage_ioc_create *create = &call->create;
	struct buffer_request *request;
	struct file *buffer;
	int fd, ret;

	if (!(file->f_mode & FMODE_WRITE))
		return -EPERM;
	if (create->flags & ~(OFFSTAGE_IOC_CREATE_CLOEXEC | OFFSTAGE_IOC_CREATE_POOL_ONLY))
		return -EINVAL;
	if (!create->bytes || create->huge > OFFSTAGE_IOC_HUGE_NEVER || create->reserved)
		return -EINVAL;
	if (create->huge == OFFSTAGE_IOC_HUGE_REQUIRE && create->bytes < PMD_SIZE)
		return -ENOSR;
	request = kzalloc(sizeof(*request), GFP_KERNEL_ACCOUNT);	/* too large for the stack */
	if (!request)
		return -ENOMEM;
	request->bytes = create->bytes;
	request->huge = create->huge;
	request->pool_only = create->flags & OFFSTAGE_IOC_CREATE_POOL_ONLY;
	ret = placement_from(&request->placement, create);
	if (ret)
		goto out;
	create->limit = OFFSTAGE_IOC_LIMIT_NONE;
	create->fd = -1;
	fd = get_unused_fd_flags(create->flags & OFFSTAGE_IOC_CREATE_CLOEXEC ? O_CLOEXEC : 0);
	if (fd < 0) {
		ret = fd;
		goto out;
	}
	buffer = buffer_create(file->private_data, request, &create->limit);
	if (IS_ERR(buffer)) {
		put_unused_fd(fd);
		ret = PTR_ERR(buffer);
		goto out;
	}
	create->fd = fd;
	call->made = buffer;
out:
	kfree(request);
	return ret;
}

static long run_reserve(struct file *file, struct call *call)
{
	s64 held;

	if (!capable(CAP_SYS_ADMIN) || !(file->f_mode & FMODE_WRITE))
		return -EPERM;
	if (call->reserve.node >= MAX_NUMNODES)
		return -ENODEV;
	held = pool_resize(call->reserve.node, call->reserve.bytes);
	if (held < 0)
		return held;
	call->reserve.bytes = held;
	return 0;
}

static long run_buffer(struct file *file, struct call *call)
{
	struct offstage_ioc_buffer *info = &call->buffer;
	const struct buffer *buffer = file->private_data;
	u32 room = info->node_bytes ? min_t(u32, info->n_nodes, MAX_NUMNODES) : 0;
	u32 known = min_t(u32, room, nr_node_ids), node;
	u64 __user *out = u64_to_user_ptr(info->node_bytes);

	info->requested = buffer->requested;
	info->backed = buffer->backed;
	info->huge = buffer->huge;
	info->from_pool = buffer->from_pool;
	for (node = 0, info->n_nodes = 0; node < nr_node_ids; node++)
		if (buffer->node_bytes[node])
			info->n_nodes = node + 1;
	if (copy_to_user(out, buffer->node_bytes, known * sizeof(*out)) ||
	    clear_user(out + known, (room - known) * sizeof(*out)))
		return -EFAULT;
	return 0;
}

#define OP(_cmd, _type, _last, _run) { \
	.cmd = _cmd, .size = sizeof(struct _type), .min_size = offsetofend(struct _type, _last), .run = _run }

static const struct op device_ops[] = {
	OP(OFFSTAGE_IOC_INFO, offstage_ioc_info, size, run_info),
	OP(OFFSTAGE_IOC_NODE, offstage_ioc_node, node, run_node),
	OP(OFFSTAGE_IOC_CREATE, offstage_ioc_create, weights, run_create),
	OP(OFFSTAGE_IOC_RESERVE, offstage_ioc_reserve, bytes, run_reserve),
};

static const struct op buffer_ops[] = {
	OP(OFFSTAGE_IOC_BUFFER, offstage_ioc_buffer, size, run_buffer),
};

static long dispatch(struct file *file, const struct op *ops, size_t n, unsigned int cmd, void __user *arg)
{
	const struct op *op;
	struct call call;
	u32 size;
	long ret;

	for (op = ops; op < ops + n && op->cmd != cmd; op++)
		;
	if (op == ops + n)
		return -ENOTTY;
	if (get_user(size, (u32 __user *)arg))
		return -EFAULT;
	if (size < op->min_size)
		return -EINVAL;
	/* No struct will ever be as large, and looking whether the rest is zero takes time. */
	if (size > PAGE_SIZE)
		return -E2BIG;
	memset(&call, 0, sizeof(call));
	ret = copy_struct_from_user(&call, op->size, arg, size);
	if (ret)
		return ret;
	ret = op->run(file, &call);
	if (ret && ret != -EDQUOT)
		return ret;
	if (copy_to_user(arg, &call, min_t(size_t, size, op->size)))
		ret = ret ?: -EFAULT;
	if (call.made && ret) {
		put_unused_fd(call.create.fd);
		fput(call.made);
	} else if (call.made) {
		fd_install(call.create.fd, call.made);
	}
	return ret;
}

long device_ioctl(struct file *file, unsigned int cmd, unsigned long arg)
{
	return dispatch(file, device_ops, ARRAY_SIZE(device_ops), cmd, (void __user *)arg);
}

long buffer_ioctl(struct file *file, unsigned int cmd, unsigned long arg)
{
	return dispatch(file, buffer_ops, ARRAY_SIZE(buffer_ops), cmd, (void __user *)arg);
}
