// SPDX-License-Identifier: MIT
/*
 * A device that isn't one: pins memory of its user for as long as it is open, as an RDMA NIC or a GPU does, and reads
 * it whether its owner lives or not. For tests/vm/test_pins.c.
 *
 *	open	/dev/offstage_pin, root alone
 *	write	{ u64 address, u64 bytes }, both of whole pages: pins them for long; once per open file
 *	pread	reads what lies there now
 *	close	lets go
 */
#include <linux/fs.h>
#include <linux/highmem.h>
#include <linux/miscdevice.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#define PAGES_MAX (1ul << 18)

struct pins {
	struct mutex lock;
	unsigned long n;
	struct page **pages;
};

static int pin_open(struct inode *inode, struct file *file)
{
	struct pins *pins = kzalloc(sizeof(*pins), GFP_KERNEL);

	if (!pins)
		return -ENOMEM;
	mutex_init(&pins->lock);
	file->private_data = pins;
	return 0;
}

static int pin_release(struct inode *inode, struct file *file)
{
	struct pins *pins = file->private_data;

	unpin_user_pages_dirty_lock(pins->pages, pins->n, true);
	kvfree(pins->pages);
	kfree(pins);
	return 0;
}

static ssize_t pin_range(struct pins *pins, u64 address, u64 bytes)
{
	unsigned long n = bytes >> PAGE_SHIFT;
	int got;

	if (!n || n > PAGES_MAX || (address | bytes) & ~PAGE_MASK || pins->n)
		return -EINVAL;
	pins->pages = kvcalloc(n, sizeof(*pins->pages), GFP_KERNEL);
	if (!pins->pages)
		return -ENOMEM;
	while (pins->n < n) {
		got = pin_user_pages_fast(address + (pins->n << PAGE_SHIFT), n - pins->n, FOLL_WRITE | FOLL_LONGTERM,
					  pins->pages + pins->n);
		if (got <= 0)
			return got ?: -EFAULT;
		pins->n += got;
	}
	return 0;
}

static ssize_t pin_write(struct file *file, const char __user *from, size_t bytes, loff_t *at)
{
	struct pins *pins = file->private_data;
	u64 range[2];
	ssize_t ret;

	if (bytes != sizeof(range))
		return -EINVAL;
	if (copy_from_user(range, from, sizeof(range)))
		return -EFAULT;
	mutex_lock(&pins->lock);
	ret = pin_range(pins, range[0], range[1]);
	mutex_unlock(&pins->lock);
	return ret ?: bytes;
}

static ssize_t pin_read(struct file *file, char __user *to, size_t bytes, loff_t *at)
{
	struct pins *pins = file->private_data;
	unsigned long index = *at >> PAGE_SHIFT, offset = offset_in_page(*at);
	unsigned long left;
	void *page;

	if (*at < 0 || index >= READ_ONCE(pins->n))
		return 0;
	bytes = min_t(size_t, bytes, PAGE_SIZE - offset);
	page = kmap_local_page(pins->pages[index]);
	left = copy_to_user(to, page + offset, bytes);
	kunmap_local(page);
	if (left)
		return -EFAULT;
	*at += bytes;
	return bytes;
}

static const struct file_operations pin_fops = {
	.owner = THIS_MODULE,
	.open = pin_open,
	.release = pin_release,
	.write = pin_write,
	.read = pin_read,
	.llseek = default_llseek,
};

static struct miscdevice pin_device = { .minor = MISC_DYNAMIC_MINOR, .name = "offstage_pin", .fops = &pin_fops, .mode = 0600 };

module_misc_device(pin_device);
MODULE_LICENSE("Dual MIT/GPL");
MODULE_DESCRIPTION("Pins user memory for tests of offstage");
