// SPDX-License-Identifier: GPL-2.0
/* Compiles on every kernel: if it doesn't, probing itself is broken, and no other answer can be trusted. */
#include <linux/mm.h>
#include <linux/mempolicy.h>
#include <linux/module.h>

int probe(struct vm_area_struct *vma);
int probe(struct vm_area_struct *vma)
{
	return vma->vm_flags & VM_SHARED ? 1 : 0;
}
