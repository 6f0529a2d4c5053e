// SPDX-License-Identifier: GPL-2.0
/* vm_flags_set(): from 6.3, and in distributions' kernels before. */
#include <linux/mm.h>

void probe(struct vm_area_struct *vma);
void probe(struct vm_area_struct *vma)
{
	vm_flags_set(vma, VM_DONTDUMP);
}
