// SPDX-License-Identifier: GPL-2.0
/* Placement: which huge page of a buffer goes to which node. Pure arithmetic; the rules are those of liboffstage. */
#include <linux/errno.h>
#include <linux/math64.h>
#include "offstage.h"

#define WEIGHT_MAX 1000

int placement_check(const struct placement *placement)
{
	u32 i, k;

	if (placement->n == 0 || placement->n > OFFSTAGE_IOC_NODES_MAX)
		return -EINVAL;
	if (placement->kind == OFFSTAGE_IOC_BIND && placement->n != 1)
		return -EINVAL;
	for (i = 0; i < placement->n; i++) {
		if (placement->nodes[i] >= MAX_NUMNODES)
			return -ENODEV;
		if (placement->kind == OFFSTAGE_IOC_WEIGHTED &&
		    (placement->weights[i] == 0 || placement->weights[i] > WEIGHT_MAX))
			return -EINVAL;
		for (k = 0; k < i; k++)
			if (placement->nodes[k] == placement->nodes[i])
				return -EINVAL;
	}
	return 0;
}

u32 placement_index(const struct placement *placement, unsigned long page)
{
	u32 i, total = 0;
	u64 turn;

	switch (placement->kind) {
	case OFFSTAGE_IOC_INTERLEAVE:
		div64_u64_rem(page, placement->n, &turn);
		return turn;
	case OFFSTAGE_IOC_WEIGHTED:
		/* In every run of sum(weights) pages, each node has as many as its weight says. */
		for (i = 0; i < placement->n; i++)
			total += placement->weights[i];
		div64_u64_rem(page, total, &turn);
		for (i = 0; turn >= placement->weights[i]; i++)
			turn -= placement->weights[i];
		return i;
	default:
		return 0;
	}
}
