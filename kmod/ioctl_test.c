// SPDX-License-Identifier: GPL-2.0
/*
 * Calls: their arguments, and what sizes of other versions mean. Made with memory of a user's, on files that nobody
 * opened: a call looks at a file's private_data alone.
 */
#include <kunit/test.h>
#include <linux/fdtable.h>
#include <linux/file.h>
#include <linux/fs.h>
#include <linux/mman.h>
#include <linux/uaccess.h>
#include "offstage.h"

/* ---- the structs are what they were ---- */

/* At a multiple of its own size, so that every compiler and every word size sees the same. */
#define FIELD32(_type, _field, _n) static_assert(offsetof(struct _type, _field) == 4 * (_n))
#define FIELD64(_type, _field, _n) static_assert(offsetof(struct _type, _field) == 8 * (_n))

FIELD32(offstage_ioc_info, size, 0);
FIELD32(offstage_ioc_info, abi, 1);
FIELD32(offstage_ioc_info, features, 2);
FIELD32(offstage_ioc_info, huge_size, 3);
FIELD64(offstage_ioc_info, limit_file, 2);
FIELD64(offstage_ioc_info, limit_user, 3);
FIELD64(offstage_ioc_info, limit_all, 4);
FIELD64(offstage_ioc_info, used_file, 5);
FIELD64(offstage_ioc_info, used_user, 6);
FIELD64(offstage_ioc_info, used_all, 7);
static_assert(sizeof(struct offstage_ioc_info) == 64);

FIELD32(offstage_ioc_node, size, 0);
FIELD32(offstage_ioc_node, node, 1);
FIELD32(offstage_ioc_node, flags, 2);
FIELD32(offstage_ioc_node, reserved0, 3);
FIELD64(offstage_ioc_node, reserved, 2);
FIELD64(offstage_ioc_node, free, 3);
FIELD64(offstage_ioc_node, in_use, 4);
FIELD64(offstage_ioc_node, orphaned, 5);
FIELD64(offstage_ioc_node, scrubbing, 6);
FIELD64(offstage_ioc_node, failed, 7);
static_assert(sizeof(struct offstage_ioc_node) == 64);

FIELD32(offstage_ioc_create, size, 0);
FIELD32(offstage_ioc_create, flags, 1);
FIELD64(offstage_ioc_create, bytes, 1);
FIELD32(offstage_ioc_create, placement, 4);
FIELD32(offstage_ioc_create, huge, 5);
FIELD32(offstage_ioc_create, n_nodes, 6);
FIELD32(offstage_ioc_create, fd, 7);
FIELD64(offstage_ioc_create, nodes, 4);
FIELD64(offstage_ioc_create, weights, 5);
FIELD32(offstage_ioc_create, limit, 12);
FIELD32(offstage_ioc_create, reserved, 13);
static_assert(sizeof(struct offstage_ioc_create) == 56);

FIELD32(offstage_ioc_buffer, size, 0);
FIELD32(offstage_ioc_buffer, n_nodes, 1);
FIELD64(offstage_ioc_buffer, requested, 1);
FIELD64(offstage_ioc_buffer, backed, 2);
FIELD64(offstage_ioc_buffer, huge, 3);
FIELD64(offstage_ioc_buffer, from_pool, 4);
FIELD64(offstage_ioc_buffer, node_bytes, 5);
static_assert(sizeof(struct offstage_ioc_buffer) == 48);

FIELD32(offstage_ioc_reserve, size, 0);
FIELD32(offstage_ioc_reserve, node, 1);
FIELD64(offstage_ioc_reserve, bytes, 1);
static_assert(sizeof(struct offstage_ioc_reserve) == 16);

/* ---- a caller ---- */

#define ROOM (4 * PAGE_SIZE)	/* of a user's memory; the last page can't be touched */
#define NODES_AT PAGE_SIZE	/* arrays for a call go here */
#define WEIGHTS_AT (PAGE_SIZE + 512)
#define BYTES_AT (PAGE_SIZE + 1024)
#define PATTERN 0x55

struct caller {
	struct file device, *buffer;
	unsigned long memory;
};

static void close_device(void *session)
{
	session_put(session);
	buffers_unpin();
}

static void close_buffer(void *file)
{
	fput(file);
	flush_delayed_fput();
}

static void *of_user(const struct caller *caller, unsigned long at)
{
	return (void *)(caller->memory + at);
}

static void write_user(struct kunit *test, const struct caller *caller, unsigned long at, const void *from, size_t n)
{
	KUNIT_ASSERT_EQ(test, copy_to_user((void __user *)of_user(caller, at), from, n), 0);
}

static void read_user(struct kunit *test, const struct caller *caller, unsigned long at, void *to, size_t n)
{
	KUNIT_ASSERT_EQ(test, copy_from_user(to, (void __user *)of_user(caller, at), n), 0);
}

static struct caller *caller_of(struct kunit *test)
{
	struct caller *caller = kunit_kzalloc(test, sizeof(*caller), GFP_KERNEL);
	struct buffer_request *request = kunit_kzalloc(test, sizeof(*request), GFP_KERNEL);
	u32 limit;

	KUNIT_ASSERT_NOT_NULL(test, caller);
	KUNIT_ASSERT_NOT_NULL(test, request);
	caller->memory = kunit_vm_mmap(test, NULL, 0, ROOM, PROT_READ | PROT_WRITE, MAP_ANONYMOUS | MAP_PRIVATE, 0);
	KUNIT_ASSERT_NE(test, caller->memory, 0);
	KUNIT_ASSERT_EQ(test, vm_munmap(caller->memory + ROOM - PAGE_SIZE, PAGE_SIZE), 0);
	caller->device.f_mode = FMODE_READ | FMODE_WRITE;
	KUNIT_ASSERT_EQ(test, buffers_pin(), 0);
	caller->device.private_data = session_create();
	KUNIT_ASSERT_NOT_NULL(test, caller->device.private_data);
	KUNIT_ASSERT_EQ(test, kunit_add_action_or_reset(test, close_device, caller->device.private_data), 0);
	request->bytes = PAGE_SIZE + 1;
	request->placement = (struct placement){ .kind = OFFSTAGE_IOC_BIND, .n = 1, .nodes = { buffer_local_node() } };
	caller->buffer = buffer_create(caller->device.private_data, request, &limit);
	KUNIT_ASSERT_FALSE(test, IS_ERR(caller->buffer));
	KUNIT_ASSERT_EQ(test, kunit_add_action_or_reset(test, close_buffer, caller->buffer), 0);
	return caller;
}

static long call(struct caller *caller, unsigned int cmd, unsigned long at)
{
	unsigned long argument = (unsigned long)of_user(caller, at);

	return cmd == OFFSTAGE_IOC_BUFFER ? buffer_ioctl(caller->buffer, cmd, argument) :
					    device_ioctl(&caller->device, cmd, argument);
}

/* ---- sizes ---- */

union any {
	u32 size;
	struct offstage_ioc_info info;
	struct offstage_ioc_node node;
	struct offstage_ioc_create create;
	struct offstage_ioc_buffer buffer;
	struct offstage_ioc_reserve reserve;
	u8 bytes[256];
};

struct abi_call {
	const char *name;
	unsigned int cmd;
	u32 size, min_size;	/* as released: numbers, since these may not change with the code */
};

static const struct abi_call abi_calls[] = {
	{ "info", OFFSTAGE_IOC_INFO, 64, 4 },
	{ "node", OFFSTAGE_IOC_NODE, 64, 8 },
	{ "create", OFFSTAGE_IOC_CREATE, 56, 48 },
	{ "reserve", OFFSTAGE_IOC_RESERVE, 16, 16 },
	{ "buffer", OFFSTAGE_IOC_BUFFER, 48, 4 },
};

KUNIT_ARRAY_PARAM_DESC(abi_calls, abi_calls, name);

/* A call that succeeds, of that size, with all behind the struct as the pattern. */
static long call_with_size(struct kunit *test, struct caller *caller, const struct abi_call *abi, u32 size,
			   size_t tail_at)
{
	size_t end = max(size, sizeof(size));
	struct pool_counts counts;
	union any any = {};
	long ret;

	any.size = size;
	if (abi->cmd == OFFSTAGE_IOC_CREATE)
		any.create.bytes = PAGE_SIZE;
	if (abi->cmd == OFFSTAGE_IOC_NODE)
		any.node.node = buffer_local_node();
	if (abi->cmd == OFFSTAGE_IOC_RESERVE) {
		any.reserve.node = buffer_local_node();
		pool_counts(any.reserve.node, &counts);
		any.reserve.bytes = counts.reserved;
	}
	memset(any.bytes + end, PATTERN, sizeof(any) - end);
	if (tail_at)
		any.bytes[tail_at] = 1;
	write_user(test, caller, 0, &any, sizeof(any));
	ret = call(caller, abi->cmd, 0);
	read_user(test, caller, 0, &any, sizeof(any));
	KUNIT_EXPECT_EQ(test, any.size, size);
	KUNIT_EXPECT_NULL(test, memchr_inv(any.bytes + end, PATTERN, sizeof(any) - end));
	if (!ret && abi->cmd == OFFSTAGE_IOC_CREATE) {
		KUNIT_EXPECT_EQ(test, close_fd(any.create.fd), 0);
		flush_delayed_fput();
	}
	return ret;
}

static void test_sizes_of_other_versions_are_taken(struct kunit *test)
{
	const struct abi_call *abi = test->param_value;
	struct caller *caller = caller_of(test);
	u32 size;

	for (size = 0; size < abi->min_size; size++)
		KUNIT_EXPECT_EQ_MSG(test, call_with_size(test, caller, abi, size, 0), -EINVAL, "size %u", size);
	for (; size <= abi->size; size++)
		KUNIT_EXPECT_EQ_MSG(test, call_with_size(test, caller, abi, size, 0), 0, "size %u", size);
	for (size = abi->size + 1; size <= abi->size + 24; size++) {
		KUNIT_EXPECT_EQ_MSG(test, call_with_size(test, caller, abi, size, 0), 0, "size %u", size);
		KUNIT_EXPECT_EQ_MSG(test, call_with_size(test, caller, abi, size, abi->size), -E2BIG, "size %u", size);
		KUNIT_EXPECT_EQ_MSG(test, call_with_size(test, caller, abi, size, size - 1), -E2BIG, "size %u", size);
	}
}

static void test_struct_in_memory_that_is_not_there_is_refused(struct kunit *test)
{
	const struct abi_call *abi = test->param_value;
	struct caller *caller = caller_of(test);
	unsigned long edge = ROOM - PAGE_SIZE;
	u32 size = abi->size;

	KUNIT_EXPECT_EQ(test, call(caller, abi->cmd, edge), -EFAULT);
	if (abi->size > sizeof(size)) {
		write_user(test, caller, edge - 8, &size, sizeof(size));
		KUNIT_EXPECT_EQ(test, call(caller, abi->cmd, edge - 8), -EFAULT);
	}
	/* All of this kernel's struct is there, and a longer one's tail isn't. */
	size = PAGE_SIZE;
	write_user(test, caller, edge - abi->size, &size, sizeof(size));
	KUNIT_EXPECT_EQ(test, call(caller, abi->cmd, edge - abi->size), -EFAULT);
}

/* A kernel address, and one that no address space reaches. */
static void test_struct_outside_the_users_memory_is_refused(struct kunit *test)
{
	const struct abi_call *abi = test->param_value;
	struct caller *caller = caller_of(test);
	union any any = { .size = abi->size };

	KUNIT_EXPECT_EQ(test, call(caller, abi->cmd, (unsigned long)&any - caller->memory), -EFAULT);
	KUNIT_EXPECT_EQ(test, call(caller, abi->cmd, 0 - caller->memory), -EFAULT);
	KUNIT_EXPECT_EQ(test, call(caller, abi->cmd, ULONG_MAX - 2 - caller->memory), -EFAULT);
	KUNIT_EXPECT_EQ(test, any.size, abi->size);
}

static void test_table_has_each_call_once_and_no_other(struct kunit *test)
{
	struct caller *caller = caller_of(test);
	unsigned int nr, cmd;

	for (nr = 0; nr < 256; nr++) {
		bool of_device = false, of_buffer = false;

		cmd = _IO(OFFSTAGE_IOC_TYPE, nr);
		switch (cmd) {	/* two of one number wouldn't compile */
		case OFFSTAGE_IOC_INFO:
		case OFFSTAGE_IOC_NODE:
		case OFFSTAGE_IOC_CREATE:
		case OFFSTAGE_IOC_RESERVE:
			of_device = true;
			break;
		case OFFSTAGE_IOC_BUFFER:
			of_buffer = true;
			break;
		}
		/* A known one gets as far as its argument. */
		KUNIT_EXPECT_EQ(test, device_ioctl(&caller->device, cmd, 0), of_device ? -EFAULT : -ENOTTY);
		KUNIT_EXPECT_EQ(test, buffer_ioctl(caller->buffer, cmd, 0), of_buffer ? -EFAULT : -ENOTTY);
	}
	/* The same numbers of other types, or with a direction and a size in them, are other calls. */
	KUNIT_EXPECT_EQ(test, device_ioctl(&caller->device, _IO(OFFSTAGE_IOC_TYPE + 1, 0), 0), -ENOTTY);
	KUNIT_EXPECT_EQ(test, device_ioctl(&caller->device, _IOWR(OFFSTAGE_IOC_TYPE, 0, u64), 0), -ENOTTY);
	KUNIT_EXPECT_EQ(test, device_ioctl(&caller->device, 0, 0), -ENOTTY);
	KUNIT_EXPECT_EQ(test, device_ioctl(&caller->device, UINT_MAX, 0), -ENOTTY);
}

/* ---- arguments ---- */

static struct offstage_ioc_create creation(u32 placement, u32 n)
{
	return (struct offstage_ioc_create){
		.size = sizeof(struct offstage_ioc_create), .bytes = PAGE_SIZE, .placement = placement, .n_nodes = n };
}

static long create(struct kunit *test, struct caller *caller, struct offstage_ioc_create *c)
{
	struct offstage_ioc_create out;
	long ret;

	write_user(test, caller, 0, c, sizeof(*c));
	ret = call(caller, OFFSTAGE_IOC_CREATE, 0);
	read_user(test, caller, 0, &out, sizeof(out));
	if (!ret) {
		KUNIT_EXPECT_EQ(test, close_fd(out.fd), 0);
		flush_delayed_fput();
	}
	c->limit = out.limit;
	return ret;
}

#define REFUSED(_error, ...) do { \
	c = creation(OFFSTAGE_IOC_LOCAL, 0); \
	__VA_ARGS__; \
	KUNIT_EXPECT_EQ_MSG(test, create(test, caller, &c), -(_error), "%s", #__VA_ARGS__); \
} while (0)

static void test_creations_that_cannot_be_are_refused(struct kunit *test)
{
	struct caller *caller = caller_of(test);
	u32 nodes[] = { 0, 0 }, weights[] = { 1, 0 };
	u64 at = (u64)of_user(caller, NODES_AT), nowhere = (u64)of_user(caller, ROOM - PAGE_SIZE);
	struct offstage_ioc_create c;
	u64 file, user, all;

	write_user(test, caller, NODES_AT, nodes, sizeof(nodes));
	write_user(test, caller, WEIGHTS_AT, weights, sizeof(weights));
	REFUSED(EINVAL, c.bytes = 0);
	REFUSED(EINVAL, c.flags = 1u << 2);
	REFUSED(EINVAL, c.flags = U32_MAX);
	REFUSED(EINVAL, c.placement = OFFSTAGE_IOC_SPILL + 1);
	REFUSED(EINVAL, c.placement = U32_MAX);
	REFUSED(EINVAL, c.huge = OFFSTAGE_IOC_HUGE_NEVER + 1);
	REFUSED(EINVAL, c.huge = U32_MAX);
	REFUSED(EINVAL, c.reserved = 1);
	REFUSED(EINVAL, c.n_nodes = 1);
	REFUSED(EINVAL, c.nodes = at);
	REFUSED(EINVAL, c.weights = at);
	REFUSED(EINVAL, c.n_nodes = OFFSTAGE_IOC_NODES_MAX + 1);
	REFUSED(EINVAL, c.n_nodes = U32_MAX);
	REFUSED(ENOSR, c.huge = OFFSTAGE_IOC_HUGE_REQUIRE);
	REFUSED(ENOMEM, c.bytes = U64_MAX);
	REFUSED(ENOMEM, c.bytes = S64_MAX);
	REFUSED(EINVAL, c.placement = OFFSTAGE_IOC_BIND);
	REFUSED(EINVAL, c.placement = OFFSTAGE_IOC_BIND, c.n_nodes = 2, c.nodes = at);
	REFUSED(EINVAL, c.placement = OFFSTAGE_IOC_INTERLEAVE, c.n_nodes = 2, c.nodes = at);
	REFUSED(EINVAL, c.placement = OFFSTAGE_IOC_BIND, c.n_nodes = 1, c.nodes = at, c.weights = at);
	REFUSED(EINVAL, c.placement = OFFSTAGE_IOC_WEIGHTED, c.n_nodes = 1, c.nodes = at);
	REFUSED(EINVAL, c.placement = OFFSTAGE_IOC_WEIGHTED, c.n_nodes = 1, c.nodes = at,
		c.weights = (u64)of_user(caller, WEIGHTS_AT) + sizeof(u32));
	REFUSED(EFAULT, c.placement = OFFSTAGE_IOC_BIND, c.n_nodes = 1);
	REFUSED(EFAULT, c.placement = OFFSTAGE_IOC_BIND, c.n_nodes = 1, c.nodes = nowhere);
	REFUSED(EFAULT, c.placement = OFFSTAGE_IOC_SPILL, c.n_nodes = 2, c.nodes = nowhere - sizeof(u32));
	REFUSED(EFAULT, c.placement = OFFSTAGE_IOC_BIND, c.n_nodes = 1, c.nodes = (u64)nodes);	/* the kernel's */
	REFUSED(EFAULT, c.placement = OFFSTAGE_IOC_WEIGHTED, c.n_nodes = 1, c.nodes = at, c.weights = nowhere);
	nodes[0] = MAX_NUMNODES;
	write_user(test, caller, NODES_AT, nodes, sizeof(nodes));
	REFUSED(ENODEV, c.placement = OFFSTAGE_IOC_BIND, c.n_nodes = 1, c.nodes = at);
	nodes[0] = MAX_NUMNODES - 1;
	write_user(test, caller, NODES_AT, nodes, sizeof(nodes));
	REFUSED(ENODEV, c.placement = OFFSTAGE_IOC_BIND, c.n_nodes = 1, c.nodes = at);
	nodes[0] = U32_MAX;
	write_user(test, caller, NODES_AT, nodes, sizeof(nodes));
	REFUSED(ENODEV, c.placement = OFFSTAGE_IOC_SPILL, c.n_nodes = 2, c.nodes = at);
	/* And nothing is left of all these. */
	limits_used(caller->device.private_data, &file, &user, &all);
	KUNIT_EXPECT_EQ(test, file, 2 * PAGE_SIZE);
	KUNIT_EXPECT_EQ(test, all, 2 * PAGE_SIZE);
}

static void test_refusal_by_a_limit_says_which(struct kunit *test)
{
	struct caller *caller = caller_of(test);	/* has two pages */
	u64 file = limit_file, node = limit_node;
	struct offstage_ioc_create c;

	limit_file = 2 * PAGE_SIZE;
	REFUSED(EDQUOT, c.limit = 99);
	KUNIT_EXPECT_EQ(test, c.limit, OFFSTAGE_IOC_LIMIT_FILE);
	limit_file = file;
	limit_node = 2 * PAGE_SIZE;
	REFUSED(EDQUOT, c.limit = 99);
	KUNIT_EXPECT_EQ(test, c.limit, OFFSTAGE_IOC_LIMIT_NODE);
	limit_node = node;
	KUNIT_EXPECT_EQ(test, create(test, caller, &c), 0);
	KUNIT_EXPECT_EQ(test, c.limit, OFFSTAGE_IOC_LIMIT_NONE);
}

/* More than this machine has, with no limit in the way: a refusal, and no word in the log. */
static void test_sizes_beyond_all_memory_are_refused(struct kunit *test)
{
	struct caller *caller = caller_of(test);
	u64 user = limit_user, all = limit_all;
	struct offstage_ioc_create c;
	u32 shift;

	limit_user = 0;
	limit_all = 0;
	REFUSED(ENOMEM, c.bytes = ((u64)totalram_pages() << PAGE_SHIFT) + 1);
	for (shift = 44; shift < 64; shift++)
		REFUSED(ENOMEM, c.bytes = 1ull << shift);
	limit_user = user;
	limit_all = all;
}

static void test_node_is_described(struct kunit *test)
{
	struct caller *caller = caller_of(test);
	struct offstage_ioc_node node = { .size = sizeof(node), .node = buffer_local_node() };

	write_user(test, caller, 0, &node, sizeof(node));
	KUNIT_EXPECT_EQ(test, call(caller, OFFSTAGE_IOC_NODE, 0), 0);
	read_user(test, caller, 0, &node, sizeof(node));
	KUNIT_EXPECT_EQ(test, node.flags, OFFSTAGE_IOC_NODE_NORMAL | OFFSTAGE_IOC_NODE_ALLOWED);
	KUNIT_EXPECT_EQ(test, node.in_use, 2 * PAGE_SIZE);
	/* With its answers still in it. */
	KUNIT_EXPECT_EQ(test, call(caller, OFFSTAGE_IOC_NODE, 0), 0);
	node = (struct offstage_ioc_node){ .size = sizeof(node), .reserved0 = 1 };
	write_user(test, caller, 0, &node, sizeof(node));
	KUNIT_EXPECT_EQ(test, call(caller, OFFSTAGE_IOC_NODE, 0), -EINVAL);
	node = (struct offstage_ioc_node){ .size = sizeof(node), .node = U32_MAX };
	write_user(test, caller, 0, &node, sizeof(node));
	KUNIT_EXPECT_EQ(test, call(caller, OFFSTAGE_IOC_NODE, 0), -ENODEV);
}

static void test_bytes_by_node_go_where_there_is_a_place_with_room(struct kunit *test)
{
	struct caller *caller = caller_of(test);
	struct offstage_ioc_buffer info = { .size = sizeof(info), .n_nodes = 1 };
	u32 node = buffer_local_node(), i;
	u64 bytes[16];

	write_user(test, caller, 0, &info, sizeof(info));
	KUNIT_EXPECT_EQ(test, call(caller, OFFSTAGE_IOC_BUFFER, 0), 0);
	info.n_nodes = 0;
	info.node_bytes = (u64)of_user(caller, BYTES_AT);
	write_user(test, caller, 0, &info, sizeof(info));
	KUNIT_EXPECT_EQ(test, call(caller, OFFSTAGE_IOC_BUFFER, 0), 0);
	info.n_nodes = 1;
	info.node_bytes = (u64)of_user(caller, ROOM - PAGE_SIZE);
	write_user(test, caller, 0, &info, sizeof(info));
	KUNIT_EXPECT_EQ(test, call(caller, OFFSTAGE_IOC_BUFFER, 0), -EFAULT);

	memset(bytes, PATTERN, sizeof(bytes));
	write_user(test, caller, BYTES_AT, bytes, sizeof(bytes));
	info.n_nodes = node + 1;
	info.node_bytes = (u64)of_user(caller, BYTES_AT);
	write_user(test, caller, 0, &info, sizeof(info));
	KUNIT_EXPECT_EQ(test, call(caller, OFFSTAGE_IOC_BUFFER, 0), 0);
	read_user(test, caller, 0, &info, sizeof(info));
	read_user(test, caller, BYTES_AT, bytes, sizeof(bytes));
	KUNIT_EXPECT_EQ(test, info.n_nodes, node + 1);
	KUNIT_EXPECT_EQ(test, info.requested, PAGE_SIZE + 1);
	KUNIT_EXPECT_EQ(test, info.backed, 2 * PAGE_SIZE);
	for (i = 0; i < node; i++)
		KUNIT_EXPECT_EQ(test, bytes[i], 0);
	KUNIT_EXPECT_EQ(test, bytes[node], 2 * PAGE_SIZE);
	for (i = node + 1; i < ARRAY_SIZE(bytes); i++)
		KUNIT_EXPECT_EQ(test, bytes[i], 0x5555555555555555);

	info.n_nodes = ARRAY_SIZE(bytes);	/* room for nodes that the machine hasn't: zeros */
	write_user(test, caller, 0, &info, sizeof(info));
	KUNIT_EXPECT_EQ(test, call(caller, OFFSTAGE_IOC_BUFFER, 0), 0);
	read_user(test, caller, BYTES_AT, bytes, sizeof(bytes));
	KUNIT_EXPECT_EQ(test, bytes[node], 2 * PAGE_SIZE);
	for (i = node + 1; i < ARRAY_SIZE(bytes); i++)
		KUNIT_EXPECT_EQ(test, bytes[i], 0);
}

static struct kunit_case cases[] = {
	KUNIT_CASE_PARAM(test_sizes_of_other_versions_are_taken, abi_calls_gen_params),
	KUNIT_CASE_PARAM(test_struct_in_memory_that_is_not_there_is_refused, abi_calls_gen_params),
	KUNIT_CASE_PARAM(test_struct_outside_the_users_memory_is_refused, abi_calls_gen_params),
	KUNIT_CASE(test_table_has_each_call_once_and_no_other),
	KUNIT_CASE(test_creations_that_cannot_be_are_refused),
	KUNIT_CASE(test_refusal_by_a_limit_says_which),
	KUNIT_CASE(test_sizes_beyond_all_memory_are_refused),
	KUNIT_CASE(test_node_is_described),
	KUNIT_CASE(test_bytes_by_node_go_where_there_is_a_place_with_room),
	{}
};

static struct kunit_suite suite = { .name = "offstage_ioctl", .test_cases = cases };
kunit_test_suite(suite);
