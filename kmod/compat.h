/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What differs between kernels 6.1 and 7.x, and nowhere else in kmod/. Each difference is probed by compiling
 * (kmod/probe/), not by version: distributions backport. COMPAT_* come from the probes.
 */
#ifndef OFFSTAGE_COMPAT_H
#define OFFSTAGE_COMPAT_H

#include <linux/mm.h>
#include <linux/mempolicy.h>

/* vm_flags_set() is there from 6.3, and in many distributions' 6.1. */
#ifndef COMPAT_HAVE_VM_FLAGS_SET
static inline void vm_flags_set(struct vm_area_struct *vma, vm_flags_t flags)
{
	vma->vm_flags |= flags;
}
#endif

/* get_policy got a third argument in 6.8. */
#ifdef CONFIG_NUMA
#ifdef COMPAT_GET_POLICY_HAS_ILX
static inline struct mempolicy *compat_no_policy(struct vm_area_struct *vma, unsigned long address, pgoff_t *ilx)
#else
static inline struct mempolicy *compat_no_policy(struct vm_area_struct *vma, unsigned long address)
#endif
{
	return NULL;
}
#endif

#endif
