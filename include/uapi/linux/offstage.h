/* SPDX-License-Identifier: GPL-2.0 WITH Linux-syscall-note */
/*
 * /dev/offstage: pinned staging memory. The kernel's side of liboffstage; other programs may use it, too.
 *
 * A buffer is a file: OFFSTAGE_IOC_CREATE gives a descriptor that can be mmapped (MAP_SHARED, at any page offset),
 * passed over a UNIX socket, duplicated and closed. Its memory is freed when the last descriptor and the last mapping
 * are gone. mmap of /dev/offstage itself makes a buffer of that length under the default placement.
 *
 * Every struct begins with its size, which the caller sets. A shorter struct than the kernel's is taken as if the rest
 * were zero; a longer one is taken if the rest is zero. Results are written up to the caller's size. Unknown flags and
 * values are refused.
 *
 * What an errno means, in every call:
 *	EINVAL		a field has a value that it can't have
 *	E2BIG		the struct is longer than this kernel knows, and the rest isn't zero; or longer than a page
 *	ENOTTY		no such call, on this kind of file
 *	EFAULT		memory of the caller can't be read or written
 *	ENODEV		a node that is named isn't online, or has no memory
 *	EOPNOTSUPP	a node that is named has movable memory only: its pages can't be pinned
 *	EXDEV		a node that is named isn't allowed to the caller (cpuset)
 *	ENOMEM		the nodes haven't enough memory
 *	ENOSR		they haven't enough in huge pages, and these were required
 *	EDQUOT		a limit: of the open file, the user, the node, or all; result.limit says which
 *	EPERM		only for CAP_SYS_ADMIN; or the descriptor isn't open for writing
 *	EMFILE, ENFILE	the process, or the system, can have no more open files
 *	ENXIO		mmap of more than the buffer has
 *	EINTR		a fatal signal came while memory was being allocated
 */
#ifndef _UAPI_LINUX_OFFSTAGE_H
#define _UAPI_LINUX_OFFSTAGE_H

#include <linux/ioctl.h>
#include <linux/types.h>

#define OFFSTAGE_ABI 1
#define OFFSTAGE_IOC_NODES_MAX 64

/* What this module has, in offstage_ioc_info.features. */
#define OFFSTAGE_FEATURE_POOLS		(1u << 0)	/* memory that is reserved per node */
#define OFFSTAGE_FEATURE_MMAP_DEVICE	(1u << 1)	/* mmap of /dev/offstage makes a buffer */

struct offstage_ioc_info {
	__u32 size;
	__u32 abi;		/* OFFSTAGE_ABI */
	__u32 features;		/* OFFSTAGE_FEATURE_* */
	__u32 huge_size;	/* bytes of a huge page */
	__aligned_u64 limit_file;	/* bytes; of this open file, of this user, and of all */
	__aligned_u64 limit_user;
	__aligned_u64 limit_all;
	__aligned_u64 used_file;
	__aligned_u64 used_user;
	__aligned_u64 used_all;
};

struct offstage_ioc_node {
	__u32 size;
	__u32 node;		/* in */
	__u32 flags;		/* out: OFFSTAGE_IOC_NODE_* */
	__u32 reserved0;
	__aligned_u64 reserved;	/* bytes that the pool holds: free, in use, or orphaned */
	__aligned_u64 free;	/* of these, free */
	__aligned_u64 in_use;	/* bytes of buffers on the node, from the pool and from the system */
	__aligned_u64 orphaned;	/* of buffers that are gone, and still pinned by somebody; charged to who made them */
	__aligned_u64 scrubbing;	/* free, and not cleared yet */
	__aligned_u64 failed;	/* huge pages that were asked for and not got, ever, in bytes */
};

#define OFFSTAGE_IOC_NODE_NORMAL	(1u << 0)	/* has memory that can be pinned */
#define OFFSTAGE_IOC_NODE_ALLOWED	(1u << 1)	/* by the caller's cpuset */

enum offstage_ioc_placement {
	OFFSTAGE_IOC_LOCAL = 0,		/* the caller's node, or the nearest that serves */
	OFFSTAGE_IOC_BIND = 1,		/* one node */
	OFFSTAGE_IOC_INTERLEAVE = 2,	/* huge page by huge page */
	OFFSTAGE_IOC_WEIGHTED = 3,	/* in proportion to weights, 1 to 1000 each */
	OFFSTAGE_IOC_SPILL = 4,		/* the first node as far as it goes, then the next */
};

enum offstage_ioc_huge {
	OFFSTAGE_IOC_HUGE_PREFER = 0,	/* base pages where no huge page is free */
	OFFSTAGE_IOC_HUGE_REQUIRE = 1,
	OFFSTAGE_IOC_HUGE_NEVER = 2,
};

/* Makes a buffer: zeroed, populated. The tail of less than a huge page has base pages. */
struct offstage_ioc_create {
	__u32 size;
	__u32 flags;		/* OFFSTAGE_IOC_CREATE_* */
	__aligned_u64 bytes;	/* not 0 */
	__u32 placement;	/* enum offstage_ioc_placement */
	__u32 huge;		/* enum offstage_ioc_huge */
	__u32 n_nodes;
	__s32 fd;		/* out: of the buffer */
	__aligned_u64 nodes;	/* user pointer to n_nodes __u32 */
	__aligned_u64 weights;	/* user pointer to n_nodes __u32, for WEIGHTED */
	__u32 limit;		/* out, with EDQUOT: enum offstage_ioc_limit */
	__u32 reserved;
};

#define OFFSTAGE_IOC_CREATE_CLOEXEC	(1u << 0)
#define OFFSTAGE_IOC_CREATE_POOL_ONLY	(1u << 1)	/* from the reserve, not from the system */

enum offstage_ioc_limit {
	OFFSTAGE_IOC_LIMIT_NONE = 0,
	OFFSTAGE_IOC_LIMIT_FILE = 1,
	OFFSTAGE_IOC_LIMIT_USER = 2,
	OFFSTAGE_IOC_LIMIT_NODE = 3,
	OFFSTAGE_IOC_LIMIT_ALL = 4,
};

/* On a buffer's descriptor. */
struct offstage_ioc_buffer {
	__u32 size;
	__u32 n_nodes;		/* in: room in node_bytes; out: highest node with bytes, plus one */
	__aligned_u64 requested;
	__aligned_u64 backed;
	__aligned_u64 huge;	/* bytes in huge pages */
	__aligned_u64 from_pool;	/* bytes that came from the reserve */
	__aligned_u64 node_bytes;	/* user pointer to n_nodes __u64, or 0: the number of nodes alone */
};

/* Grows or shrinks a pool: CAP_SYS_ADMIN. What is in use is never taken. */
struct offstage_ioc_reserve {
	__u32 size;
	__u32 node;
	__aligned_u64 bytes;	/* in: wanted; out: what the pool holds now */
};

#define OFFSTAGE_IOC_TYPE 0xe5
#define OFFSTAGE_IOC_INFO	_IO(OFFSTAGE_IOC_TYPE, 0x00)
#define OFFSTAGE_IOC_NODE	_IO(OFFSTAGE_IOC_TYPE, 0x01)
#define OFFSTAGE_IOC_CREATE	_IO(OFFSTAGE_IOC_TYPE, 0x02)
#define OFFSTAGE_IOC_RESERVE	_IO(OFFSTAGE_IOC_TYPE, 0x03)
#define OFFSTAGE_IOC_BUFFER	_IO(OFFSTAGE_IOC_TYPE, 0x10)

#endif
