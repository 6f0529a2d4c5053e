// SPDX-License-Identifier: GPL-2.0
/*
 * A buffer: a file with an inode of its own, on a mount that nobody sees. Its pages are there from the beginning; a
 * fault only maps them. The inode is what makes mappings of 2 MiB possible: finish_fault() takes a huge entry when the
 * folio ends within i_size, and a device node has none.
 *
 * .fault hands out vmf->page with a reference, and the mapping is an ordinary one (no VM_PFNMAP, VM_IO, VM_MIXEDMAP):
 * so get_user_pages() works on it, and with it O_DIRECT, io_uring, RDMA and GPU registration.
 */
#include <linux/file.h>
#include <linux/fs.h>
#include <linux/fs_context.h>
#include <linux/module.h>
#include <linux/mount.h>
#include <linux/mutex.h>
#include <linux/pagemap.h>
#include <linux/pseudo_fs.h>
#include <linux/sched/signal.h>
#include <linux/seq_file.h>
#include <linux/slab.h>
#include <linux/string_helpers.h>
#include <linux/topology.h>
#include "offstage.h"
#include "compat.h"
#include "trace.h"

#define OFFSTAGE_FS_MAGIC 0x6f666673	/* "offs" */

static struct vfsmount *mount;	/* while a device is open */
static int pins;
static LIST_HEAD(buffers);
static DEFINE_MUTEX(buffers_lock);	/* guards the list */

static const struct file_operations buffer_fops;

/* ---- pages ---- */

static struct page *page_at(const struct buffer *buffer, pgoff_t at)
{
	const struct slot *slot;

	if (at >= buffer->backed >> PAGE_SHIFT)
		return NULL;
	slot = &buffer->slots[at >> HUGE_ORDER];
	return slot->huge ? slot->huge + (at & (HUGE_PAGES - 1)) : slot->base[at & (HUGE_PAGES - 1)];
}

/* Returns the bytes of those that are free now; the others are charged until they are. */
static u64 free_pages_of(struct buffer *buffer)
{
	u64 kept = 0;
	unsigned long i;
	u32 k;

	for (i = 0; i < buffer->n_slots; i++) {
		struct slot *slot = &buffer->slots[i];

		if (slot->huge && !pool_give(slot->huge, slot->from_pool, buffer->session))
			kept += PMD_SIZE;
		for (k = 0; slot->base && k < slot->n_base; k++)
			if (slot->base[k] && !pool_give(slot->base[k], false, buffer->session))
				kept += PAGE_SIZE;
		kvfree(slot->base);
		cond_resched();
	}
	kvfree(buffer->slots);
	return buffer->backed - kept;
}

/* How far a buffer has been filled. */
struct filling {
	u32 from;	/* with SPILL: the first node that isn't full yet */
	bool tired;	/* a huge page couldn't be had, by reclaim and compaction, though it was only preferred */
};

/* A page of one node, and with SPILL of the first that has one. */
static struct page *take(const struct buffer_request *request, unsigned long slot, struct filling *filling, bool huge,
			 bool *from_pool)
{
	const struct placement *p = &request->placement;
	bool hard = request->huge == OFFSTAGE_IOC_HUGE_REQUIRE || !filling->tired;
	struct page *page;
	u32 i;

	if (p->kind != OFFSTAGE_IOC_SPILL) {
		int node = p->nodes[placement_index(p, slot)];

		return huge ? pool_take(node, request->pool_only, hard, from_pool) : pool_take_base(node);
	}
	for (i = huge ? filling->from : 0; i < p->n; i++) {
		page = huge ? pool_take(p->nodes[i], request->pool_only, hard, from_pool) : pool_take_base(p->nodes[i]);
		if (!IS_ERR(page))
			break;
	}
	/* A full node stays full for this buffer: the bytes lie in one run per node. */
	if (huge && i < p->n)
		filling->from = i;
	return page;
}

static int fill_slot(struct buffer *buffer, const struct buffer_request *request, unsigned long i,
		     struct filling *filling)
{
	struct slot *slot = &buffer->slots[i];
	unsigned long pages = (buffer->backed >> PAGE_SHIFT) - i * HUGE_PAGES;
	struct page *page;
	u32 k;

	if (pages >= HUGE_PAGES && request->huge != OFFSTAGE_IOC_HUGE_NEVER) {
		page = take(request, i, filling, true, &slot->from_pool);
		if (!IS_ERR(page)) {
			page_folio(page)->index = i * HUGE_PAGES;
			slot->huge = page;
			buffer->node_bytes[page_to_nid(page)] += PMD_SIZE;
			buffer->huge += PMD_SIZE;
			buffer->from_pool += slot->from_pool ? PMD_SIZE : 0;
			return 0;
		}
		if (PTR_ERR(page) != -ENOMEM)
			return PTR_ERR(page);
		if (request->huge == OFFSTAGE_IOC_HUGE_REQUIRE)
			return -ENOSR;
		/* One hard try is worth it; as many as there are huge pages in a terabyte are not. */
		filling->tired = true;
	}
	if (request->pool_only && pages >= HUGE_PAGES)
		return -ENOMEM;
	slot->n_base = min(pages, HUGE_PAGES);
	slot->base = kvcalloc(slot->n_base, sizeof(*slot->base), GFP_KERNEL_ACCOUNT);
	if (!slot->base)
		return -ENOMEM;
	for (k = 0; k < slot->n_base; k++) {
		/* A task that is being killed for want of memory may take the last reserves, and mustn't. */
		if (fatal_signal_pending(current))
			return -EINTR;
		page = take(request, i, filling, false, NULL);
		if (IS_ERR(page))
			return PTR_ERR(page);
		page_folio(page)->index = i * HUGE_PAGES + k;
		slot->base[k] = page;
		buffer->node_bytes[page_to_nid(page)] += PAGE_SIZE;
	}
	return 0;
}

static int fill_buffer(struct buffer *buffer, const struct buffer_request *request)
{
	struct filling filling = { 0 };
	unsigned long i;
	int ret;

	for (i = 0; i < buffer->n_slots; i++) {
		if (fatal_signal_pending(current))
			return -EINTR;
		ret = fill_slot(buffer, request, i, &filling);
		if (ret)
			return ret;
		cond_resched();
	}
	return 0;
}

/* ---- life ---- */

static void buffer_free(struct buffer *buffer)
{
	limits_uncharge(buffer->session, free_pages_of(buffer));
	session_put(buffer->session);
	kfree(buffer);
}

static struct file *make_file(struct buffer *buffer)
{
	struct inode *inode;
	struct file *file;

	/* alloc_file_pseudo() takes no reference to the module, and the last fput() drops one. */
	__module_get(THIS_MODULE);
	inode = alloc_anon_inode(mount->mnt_sb);
	if (IS_ERR(inode)) {
		module_put(THIS_MODULE);
		return ERR_CAST(inode);
	}
	i_size_write(inode, buffer->backed);
	file = alloc_file_pseudo(inode, mount, "offstage", O_RDWR, &buffer_fops);
	if (IS_ERR(file)) {
		iput(inode);
		module_put(THIS_MODULE);
		return file;
	}
	file->private_data = buffer;
	return file;
}

struct file *buffer_create(struct session *session, const struct buffer_request *request, u32 *limit)
{
	struct buffer *buffer;
	struct file *file;
	int ret;

	/* Rounding mustn't overflow. */
	if (request->bytes > (u64)MAX_LFS_FILESIZE - PMD_SIZE)
		return ERR_PTR(-ENOMEM);
	buffer = kzalloc(struct_size(buffer, node_bytes, nr_node_ids), GFP_KERNEL_ACCOUNT);
	if (!buffer)
		return ERR_PTR(-ENOMEM);
	INIT_LIST_HEAD(&buffer->link);
	buffer->requested = request->bytes;
	buffer->backed = round_up(request->bytes, PAGE_SIZE);	/* law 7 */
	buffer->n_slots = DIV_ROUND_UP(buffer->backed, PMD_SIZE);
	buffer->pid = task_tgid_nr(current);
	buffer->uid = current_uid();
	get_task_comm(buffer->comm, current);
	ret = limits_charge(session, buffer->backed, limit);
	if (ret) {
		trace_offstage_refuse(request->bytes, ret, *limit);
		kfree(buffer);
		return ERR_PTR(ret);
	}
	kref_get(&session->ref);
	buffer->session = session;
	/* Not even an array for what no machine like this could hold. */
	if (buffer->backed >> PAGE_SHIFT <= totalram_pages())
		buffer->slots = kvcalloc(buffer->n_slots, sizeof(*buffer->slots), GFP_KERNEL_ACCOUNT);
	if (!buffer->slots) {
		buffer->n_slots = 0;
		ret = -ENOMEM;
	}
	if (!ret)
		ret = fill_buffer(buffer, request);
	if (ret == -EDQUOT)
		*limit = OFFSTAGE_IOC_LIMIT_NODE;
	if (ret == -EUSERS) {
		*limit = OFFSTAGE_IOC_LIMIT_ALL;
		ret = -EDQUOT;
	}
	file = ret ? ERR_PTR(ret) : make_file(buffer);
	if (IS_ERR(file)) {
		trace_offstage_refuse(request->bytes, PTR_ERR(file), *limit);
		buffer_free(buffer);
		return file;
	}
	buffer->file = file;
	mutex_lock(&buffers_lock);
	list_add_tail(&buffer->link, &buffers);
	mutex_unlock(&buffers_lock);
	trace_offstage_create(buffer->backed, buffer->huge, buffer->from_pool);
	return file;
}

static int buffer_release(struct inode *inode, struct file *file)
{
	struct buffer *buffer = file->private_data;

	mutex_lock(&buffers_lock);
	list_del(&buffer->link);
	mutex_unlock(&buffers_lock);
	trace_offstage_destroy(buffer->backed, buffer->huge, buffer->from_pool);
	buffer_free(buffer);
	return 0;
}

struct buffer *buffer_of(struct file *file)
{
	return file->f_op == &buffer_fops ? file->private_data : NULL;
}

/* ---- mapping ---- */

static vm_fault_t buffer_fault(struct vm_fault *vmf)
{
	struct page *page = page_at(vmf->vma->vm_file->private_data, vmf->pgoff);

	trace_offstage_fault(vmf->address, vmf->pgoff);
	if (!page)
		return VM_FAULT_SIGBUS;
	get_page(page);
	vmf->page = page;
	return 0;
}

static const struct vm_operations_struct buffer_vm_ops = {
	.fault = buffer_fault,
#ifdef CONFIG_NUMA
	.get_policy = compat_no_policy,	/* NUMA balancing leaves the mapping alone */
#endif
};

static int buffer_mmap(struct file *file, struct vm_area_struct *vma)
{
	struct buffer *buffer = file->private_data;
	unsigned long pages = buffer->backed >> PAGE_SHIFT;

	if (!(vma->vm_flags & VM_SHARED))
		return -EINVAL;
	if (vma->vm_pgoff > pages || vma_pages(vma) > pages - vma->vm_pgoff)
		return -ENXIO;
	vm_flags_set(vma, VM_DONTEXPAND | VM_DONTDUMP);
	vma->vm_ops = &buffer_vm_ops;
	return 0;
}

int buffer_local_node(void)
{
	int here = numa_node_id(), best = NUMA_NO_NODE, node;

	for_each_node_state(node, N_NORMAL_MEMORY) {
		if (pool_node_check(node))
			continue;
		if (best == NUMA_NO_NODE || node_distance(here, node) < node_distance(here, best))
			best = node;
	}
	return best;
}

int buffer_mmap_new(struct session *session, struct vm_area_struct *vma)
{
	struct buffer_request request = {
		.bytes = (u64)vma_pages(vma) << PAGE_SHIFT,
		.placement = { .kind = OFFSTAGE_IOC_BIND, .n = 1 },
	};
	int node = buffer_local_node(), ret;
	struct file *file;
	u32 limit;

	if (!(vma->vm_flags & VM_SHARED) || vma->vm_pgoff)
		return -EINVAL;
	if (node == NUMA_NO_NODE)
		return -ENOMEM;
	request.placement.nodes[0] = node;
	file = buffer_create(session, &request, &limit);
	if (IS_ERR(file))
		return PTR_ERR(file);
	ret = buffer_mmap(file, vma);
	if (!ret)
		vma_set_file(vma, file);
	fput(file);
	return ret;
}

static const struct file_operations buffer_fops = {
	.owner = THIS_MODULE,
	.release = buffer_release,
	.mmap = buffer_mmap,
	.get_unmapped_area = thp_get_unmapped_area,
	.unlocked_ioctl = buffer_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
	.llseek = noop_llseek,
};

/* ---- the list ---- */

/*
 * A line per buffer, words set apart by one blank. The comm comes last, because it may hold blanks, and with what else
 * could deceive a reader escaped: its owner chose it.
 */
int buffers_show(struct seq_file *out)
{
	struct buffer *buffer;
	const char *separator;
	u32 node;

	seq_puts(out, "bytes huge from_pool references uid pid nodes comm\n");
	mutex_lock(&buffers_lock);
	list_for_each_entry(buffer, &buffers, link) {
		seq_printf(out, "%llu %llu %llu %ld %u %d", buffer->backed, buffer->huge, buffer->from_pool,
			   (long)file_count(buffer->file), from_kuid_munged(&init_user_ns, buffer->uid), buffer->pid);
		separator = " ";
		for (node = 0; node < nr_node_ids; node++) {
			if (!buffer->node_bytes[node])
				continue;
			seq_printf(out, "%s%u:%llu", separator, node, buffer->node_bytes[node]);
			separator = ",";
		}
		seq_putc(out, ' ');
		seq_escape_str(out, buffer->comm, ESCAPE_HEX | ESCAPE_NAP | ESCAPE_APPEND, "\\");
		seq_putc(out, '\n');
	}
	mutex_unlock(&buffers_lock);
	return 0;
}

/* ---- the mount ---- */

/* What /proc shows for a mapping and a descriptor: offstage:[INODE]. */
static char *buffer_name(struct dentry *dentry, char *out, int room)
{
	char name[32];
	int n = snprintf(name, sizeof(name), "offstage:[%lu]", d_inode(dentry)->i_ino) + 1;

	return n > room ? ERR_PTR(-ENAMETOOLONG) : memcpy(out + room - n, name, n);
}

static const struct dentry_operations dentry_ops = { .d_dname = buffer_name };

static int init_fs_context(struct fs_context *fc)
{
	struct pseudo_fs_context *pseudo = init_pseudo(fc, OFFSTAGE_FS_MAGIC);

	if (!pseudo)
		return -ENOMEM;
	pseudo->dops = &dentry_ops;
	fc->s_iflags |= SB_I_NOEXEC | SB_I_NODEV;
	return 0;
}

/*
 * Whoever looks at a buffer's path (an O_PATH descriptor, a reader of /proc) holds the mount and not the file, and
 * calls into this module by it: the superblock has a reference to the module. A mount that were always there would hold
 * it for ever; so there is one while a device is open, and for as long as its buffers' paths are held.
 */
static struct file_system_type file_system = {
	.owner = THIS_MODULE,
	.name = "offstage",
	.init_fs_context = init_fs_context,
	.kill_sb = kill_anon_super,
};

int buffers_pin(void)
{
	return simple_pin_fs(&file_system, &mount, &pins);
}

void buffers_unpin(void)
{
	simple_release_fs(&mount, &pins);
}
