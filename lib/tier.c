/* SPDX-License-Identifier: MIT */
/* The table of tiers: a new one is a line here. See tier.h. */
#include <string.h>
#include "error.h"
#include "tier.h"

static const struct tier_ops *const tiers[] = { &dram_ops };

int tier_pick(const char *name, const struct tier_ops **ops)
{
	for (size_t i = 0; i < sizeof(tiers) / sizeof(*tiers); i++) {
		if (!name || strcmp(name, tiers[i]->name) == 0) {
			*ops = tiers[i];
			return 0;
		}
	}
	return fail(-ENOENT, "there is no tier '%s' in this build: use 'dram'", name);
}
