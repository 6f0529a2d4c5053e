/* SPDX-License-Identifier: MIT */
/*
 * Tier "dram": the state rests in one staging buffer, which is where it is updated: nothing is ever moved. Also the
 * tier for CXL memory that is a node of its own: the buffer's placement names it.
 */
#include "context.h"
#include "error.h"
#include "heap.h"
#include "tier.h"

#define PLACE_ALIGN 4096u

struct dram {
	struct tier base;
	struct offstage_buffer *buffer;
	uint64_t *offset;		/* of each subgroup in the buffer */
};

static void dram_destroy(struct tier *tier)
{
	struct dram *dram = (struct dram *)tier;

	offstage_buffer_close(dram->buffer);
	heap_free(dram->offset);
	heap_free(dram);
}

static int dram_create(struct offstage *ctx, const uint64_t *bytes, uint32_t n,
		       const struct offstage_buffer_options *options, struct tier **out)
{
	struct dram *dram = heap_alloc(1, sizeof(*dram));
	uint64_t total = 0;
	int ret;

	if (!dram)
		return -ENOMEM;
	dram->base.ops = &dram_ops;
	dram->base.ctx = ctx;
	dram->offset = heap_alloc(n, sizeof(*dram->offset));
	if (!dram->offset) {
		heap_free(dram);
		return -ENOMEM;
	}
	for (uint32_t i = 0; i < n; i++) {
		dram->offset[i] = total;
		total += (bytes[i] + PLACE_ALIGN - 1) / PLACE_ALIGN * PLACE_ALIGN;
	}
	ret = offstage_buffer_create(ctx, total, options, &dram->buffer);
	if (ret) {
		dram_destroy(&dram->base);
		return fail_in(ret, "optimizer state of %u subgroups", n);
	}
	*out = &dram->base;
	return 0;
}

static int dram_acquire(struct tier *tier, uint32_t subgroup, void **state)
{
	struct dram *dram = (struct dram *)tier;

	*state = (char *)offstage_buffer_data(dram->buffer) + dram->offset[subgroup];
	return 0;
}

static int dram_release(struct tier *tier, uint32_t subgroup, bool dirty)
{
	(void)tier, (void)subgroup, (void)dirty;
	return 0;	/* it rests where it is */
}

static void dram_info(struct tier *tier, struct tier_info *out)
{
	struct offstage_buffer_info info = { .size = sizeof(info) };

	offstage_buffer_info(((struct dram *)tier)->buffer, &info);
	*out = (struct tier_info){ .bytes = info.backed, .huge = info.huge, .locked = info.locked };
}

const struct tier_ops dram_ops = {
	.name = "dram",
	.create = dram_create,
	.destroy = dram_destroy,
	.acquire = dram_acquire,
	.release = dram_release,
	.info = dram_info,
};
