// SPDX-License-Identifier: GPL-2.0
/*
 * offstage.ko: /dev/offstage, the staging ground for training with an offloaded optimizer. Large, exact, huge-page,
 * NUMA-placed memory that every engine on the node can reach by DMA. See offstage.h for the parts.
 */
#include <linux/cdev.h>
#include <linux/device.h>
#include <linux/fs.h>
#include <linux/module.h>
#include <linux/moduleparam.h>
#include <linux/string.h>
#include "offstage.h"

#define VERSION "0.1.0"

static char *reserve = "";
module_param(reserve, charp, 0444);
MODULE_PARM_DESC(reserve, "huge pages to hold from the start: 0:64G,1:64G or all:80%");

/* Bytes with a suffix: 64G. */
static int set_bytes(const char *text, const struct kernel_param *param)
{
	u64 bytes;
	int ret = people_bytes(text, &bytes);

	if (ret)
		return ret;
	WRITE_ONCE(*(u64 *)param->arg, bytes);
	return 0;
}

static int get_bytes(char *out, const struct kernel_param *param)
{
	return sysfs_emit(out, "%llu\n", READ_ONCE(*(u64 *)param->arg));
}

static const struct kernel_param_ops bytes_ops = { .set = set_bytes, .get = get_bytes };

module_param_cb(limit_file, &bytes_ops, &limit_file, 0644);
MODULE_PARM_DESC(limit_file, "bytes of buffers of one open file; 0: no limit");
module_param_cb(limit_user, &bytes_ops, &limit_user, 0644);
MODULE_PARM_DESC(limit_user, "bytes of buffers of one user; 0: no limit; default: half of the memory");
module_param_cb(limit_node, &bytes_ops, &limit_node, 0644);
MODULE_PARM_DESC(limit_node, "bytes of buffers on one node that don't come from its pool; 0: no limit");
module_param_cb(limit_all, &bytes_ops, &limit_all, 0644);
MODULE_PARM_DESC(limit_all, "bytes of all buffers; 0: no limit; default: seven eighths of the memory");

static int device_open(struct inode *inode, struct file *file)
{
	int ret = buffers_pin();

	if (ret)
		return ret;
	file->private_data = session_create();
	if (file->private_data)
		return 0;
	buffers_unpin();
	return -ENOMEM;
}

static int device_release(struct inode *inode, struct file *file)
{
	session_put(file->private_data);
	buffers_unpin();
	return 0;
}

static int device_mmap(struct file *file, struct vm_area_struct *vma)
{
	return buffer_mmap_new(file->private_data, vma);
}

static const struct file_operations device_fops = {
	.owner = THIS_MODULE,
	.open = device_open,
	.release = device_release,
	.mmap = device_mmap,
	.get_unmapped_area = thp_get_unmapped_area,
	.unlocked_ioctl = device_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
	.llseek = noop_llseek,
};

static struct class offstage_class = { .name = "offstage" };
static struct cdev cdev;
static dev_t number;
static struct device *device;

/* One user mustn't starve the node, unless an administrator says so. */
static void default_limits(void)
{
	u64 all = (u64)totalram_pages() << PAGE_SHIFT;

	if (limit_user == LIMIT_DEFAULT)
		limit_user = all / 2;
	if (limit_all == LIMIT_DEFAULT)
		limit_all = all / 8 * 7;
}

static int __init offstage_init(void)
{
	int ret;

	default_limits();
	ret = pools_init();
	if (ret)
		return ret;
	ret = alloc_chrdev_region(&number, 0, 1, "offstage");
	if (ret)
		goto no_number;
	ret = class_register(&offstage_class);
	if (ret)
		goto no_class;
	ret = pools_fill(reserve);
	if (ret)
		goto no_device;
	device = device_create(&offstage_class, NULL, number, NULL, "offstage");
	if (IS_ERR(device)) {
		ret = PTR_ERR(device);
		goto no_device;
	}
	ret = people_init(device);
	if (ret)
		goto no_sysfs;
	/* Last: who can open it finds everything there, and a failure after that would leave him with nothing. */
	cdev_init(&cdev, &device_fops);
	cdev.owner = THIS_MODULE;
	ret = cdev_add(&cdev, number, 1);
	if (ret)
		goto no_cdev;
	pr_info("offstage: " VERSION ", ABI %d\n", OFFSTAGE_ABI);
	return 0;
no_cdev:
	people_exit();
no_sysfs:
	device_destroy(&offstage_class, number);
no_device:
	class_unregister(&offstage_class);
no_class:
	unregister_chrdev_region(number, 1);
no_number:
	pools_exit();
	return ret;
}

static void __exit offstage_exit(void)
{
	cdev_del(&cdev);
	people_exit();
	device_destroy(&offstage_class, number);
	class_unregister(&offstage_class);
	unregister_chrdev_region(number, 1);
	pools_exit();
	pr_info("offstage: unloaded\n");
}

module_init(offstage_init);
module_exit(offstage_exit);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("Pinned, huge-page, NUMA-placed staging memory for offloaded optimizers");
MODULE_VERSION(VERSION);
