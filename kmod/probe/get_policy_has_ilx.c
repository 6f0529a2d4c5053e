// SPDX-License-Identifier: GPL-2.0
/* vm_operations_struct.get_policy has a third argument: from 6.8. */
#include <linux/mm.h>
#include <linux/mempolicy.h>

struct mempolicy *probe(struct vm_area_struct *vma, unsigned long address, pgoff_t *ilx);
struct mempolicy *probe(struct vm_area_struct *vma, unsigned long address, pgoff_t *ilx)
{
	return NULL;
}

extern const struct vm_operations_struct probe_ops;
const struct vm_operations_struct probe_ops = {
#ifdef CONFIG_NUMA
	.get_policy = probe,
#endif
};
