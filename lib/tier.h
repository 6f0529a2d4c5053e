/* SPDX-License-Identifier: MIT */
/*
 * Tiers: where optimizer state rests between steps, one place per subgroup. A tier is a table of operations in a file
 * of its own (dram.c; files on NVMe will be file.c) and one line in tier.c. Called by the step engine, from one thread
 * at a time.
 */
#ifndef TIER_H
#define TIER_H

#include <offstage.h>
#include <stdbool.h>

struct tier_info {
	uint64_t bytes;		/* at rest */
	uint64_t huge;		/* in staging memory: bytes in huge pages, and locked */
	uint64_t locked;
};

/* The part that every tier begins with. */
struct tier {
	const struct tier_ops *ops;
	struct offstage *ctx;
};

struct tier_ops {
	const char *name;
	/*
	 * Makes places of bytes[i] bytes for n subgroups, all zero; placed as options say. Each starts on a base page,
	 * so that a tier may move it by direct I/O.
	 */
	int (*create)(struct offstage *ctx, const uint64_t *bytes, uint32_t n,
		      const struct offstage_buffer_options *options, struct tier **tier);
	void (*destroy)(struct tier *tier);
	/* A hint that a subgroup is wanted soon. NULL: the tier has nothing to fetch. */
	void (*prefetch)(struct tier *tier, uint32_t subgroup);
	/* The subgroup's bytes, in staging memory, until release. Waits for a fetch. */
	int (*acquire)(struct tier *tier, uint32_t subgroup, void **state);
	/* dirty: they were changed. A tier may write them back in the background; a failure shows at flush. */
	int (*release)(struct tier *tier, uint32_t subgroup, bool dirty);
	/* All that was released dirty is at rest. NULL: it always is. */
	int (*flush)(struct tier *tier);
	void (*info)(struct tier *tier, struct tier_info *info);
};

/* The tier named; NULL: "dram". -ENOENT with a sentence. */
int tier_pick(const char *name, const struct tier_ops **ops);

extern const struct tier_ops dram_ops;

#endif
