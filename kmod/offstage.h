/* SPDX-License-Identifier: GPL-2.0 */
/*
 * offstage.ko: what its files share. One concern a file:
 *
 *	main.c		the device, its life, parameters
 *	ioctl.c		calls: sizes, copying, dispatch
 *	buffer.c	a buffer: a file with its own inode, its pages, mmap and faults
 *	pool.c		huge pages that are held reserved, per node; scrubbing
 *	placement.c	which bytes go to which node: arithmetic
 *	limits.c	accounts of open files, users and the whole
 *	sysfs.c		pools and limits for people; debugfs: the list of buffers
 *	compat.h	what differs between kernels
 *
 * Ownership: an open /dev/offstage is a session. A buffer holds a reference to the session that made it, and through it
 * to its user's account: both live as long as a buffer has to be uncharged from them. A buffer lives as long as its
 * file; mappings hold the file. A page is held by its buffer or by its pool, with one reference; whoever pinned it has
 * more. The module can't be unloaded while a buffer's file exists.
 */
#ifndef OFFSTAGE_KMOD_H
#define OFFSTAGE_KMOD_H

#include <linux/kref.h>
#include <linux/list.h>
#include <linux/mm.h>
#include <linux/sched.h>
#include <linux/nodemask.h>
#include <linux/spinlock.h>
#include <linux/types.h>
#include <linux/uidgid.h>
#include <uapi/linux/offstage.h>

/* Who reads a pool's numbers, and liboffstage, take a huge page for 2 MiB; with base pages of 64 KiB it is 512. */
#if PMD_SHIFT != 21
#error "offstage needs a kernel with base pages of 4 KiB and huge ones of 2 MiB; liboffstage works without the module"
#endif

#define HUGE_ORDER	(PMD_SHIFT - PAGE_SHIFT)
#define HUGE_PAGES	(PMD_SIZE / PAGE_SIZE)	/* base pages in a huge one */

/* ---- placement.c: pure arithmetic ---- */

struct placement {
	u32 kind;		/* enum offstage_ioc_placement, never LOCAL */
	u32 n;
	u32 nodes[OFFSTAGE_IOC_NODES_MAX];
	u32 weights[OFFSTAGE_IOC_NODES_MAX];
};

/* 0, or -EINVAL: counts, weights, a node that is named twice. */
int placement_check(const struct placement *placement);
/* The index into nodes of huge page i, for all kinds but SPILL. */
u32 placement_index(const struct placement *placement, unsigned long i);

/* ---- pool.c ---- */

struct pool_counts {
	u64 reserved, free, in_use, orphaned, scrubbing, failed;	/* bytes */
};

int pools_init(void);
void pools_exit(void);
/* Parses "0:64G,1:64G" or "all:80%" and fills the pools, in parallel. -EINTR, -ENOMEM; bad entries are told only. */
int pools_fill(const char *reserve);
/* -ENODEV, -EOPNOTSUPP, -EXDEV: may a page of this node be asked for by the caller? */
int pool_node_check(int node);
/* Grows or shrinks a pool towards `bytes`; returns what it holds now, or -ENODEV, -EOPNOTSUPP, -ENOMEM, -EINTR. */
s64 pool_resize(int node, u64 bytes);
void pool_counts(int node, struct pool_counts *counts);

/*
 * A cleared huge page of the node: from the pool, else from the system unless pool_only. ERR_PTR: -ENOMEM when there is
 * none (without `hard`, memory isn't compacted for it), -EDQUOT for the node's limit, -EUSERS for that of all.
 */
struct page *pool_take(int node, bool pool_only, bool hard, bool *from_pool);
/* A cleared base page of the node, from the system. The same errors. */
struct page *pool_take_base(int node);
struct session;
/*
 * Gives a page back, to where it came from. false: somebody has pinned it, and it is an orphan now, which stays charged
 * to the session until it has been let go.
 */
bool pool_give(struct page *page, bool from_pool, struct session *session);

/* ---- limits.c ---- */

struct session {
	struct kref ref;
	struct account *user;
	u64 used;		/* bytes; limits.c's lock */
};

#define LIMIT_DEFAULT U64_MAX	/* not set when the module is loaded */
extern u64 limit_file, limit_user, limit_node, limit_all;

struct session *session_create(void);
void session_put(struct session *session);
/* 0, or -EDQUOT and which limit. What was charged is uncharged once, by the same session. */
int limits_charge(struct session *session, u64 bytes, u32 *limit);
void limits_uncharge(struct session *session, u64 bytes);
/* Bytes in buffers now, of the open file, its user, and all. */
void limits_used(struct session *session, u64 *file, u64 *user, u64 *all);

/* ---- buffer.c ---- */

struct buffer_request {
	u64 bytes;
	u32 huge;		/* enum offstage_ioc_huge */
	bool pool_only;
	struct placement placement;
};

/* HUGE_PAGES base pages of a buffer, the last slot maybe fewer: one huge page, or that many base pages. */
struct slot {
	struct page *huge;		/* the head, or NULL */
	struct page **base;		/* else these; NULL: none yet */
	u32 n_base;
	bool from_pool;
};

struct buffer {
	struct list_head link;		/* in the list of all, for debugfs */
	struct session *session;
	u64 requested, backed, huge, from_pool;	/* bytes */
	unsigned long n_slots;
	struct slot *slots;
	struct file *file;		/* for the list; the file owns the buffer, not the reverse */
	pid_t pid;			/* who made it */
	kuid_t uid;
	char comm[TASK_COMM_LEN];
	u64 node_bytes[];		/* [nr_node_ids] */
};

/* Buffers can be made between the two: an open device has its pin. */
int buffers_pin(void);
void buffers_unpin(void);
/* A new buffer as a file with one reference, or an error; limit says which with -EDQUOT. */
struct file *buffer_create(struct session *session, const struct buffer_request *request, u32 *limit);
struct buffer *buffer_of(struct file *file);	/* NULL: the file isn't one */
/* mmap of the device: a buffer for this VMA. */
int buffer_mmap_new(struct session *session, struct vm_area_struct *vma);
/* The nearest node to the caller that can serve it. */
int buffer_local_node(void);
struct seq_file;
int buffers_show(struct seq_file *out);

/* ---- ioctl.c ---- */

long device_ioctl(struct file *file, unsigned int cmd, unsigned long arg);
long buffer_ioctl(struct file *file, unsigned int cmd, unsigned long arg);

/* ---- sysfs.c ---- */

/* "64G", and white space: bytes. 0, or -EINVAL. */
int people_bytes(const char *text, u64 *bytes);
int people_init(struct device *device);
void people_exit(void);

#endif
