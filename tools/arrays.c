/* SPDX-License-Identifier: MIT */
/* Arrays for Adam: see arrays.h. */
#include <string.h>
#include "arrays.h"
#include "command.h"

#define PATTERN 65521u	/* elements; prime, so that no two arrays' patterns keep step with a power of two */

static uint16_t narrow(float x, uint32_t dtype)
{
	uint32_t bits;

	memcpy(&bits, &x, sizeof(bits));
	if (dtype == OFFSTAGE_BF16)
		return (uint16_t)(bits >> 16);
	/* fp16, truncated; the values that are filled in are normal numbers in it. */
	return (uint16_t)((bits >> 16 & 0x8000) | (((bits >> 23 & 0xff) - 112) << 10) | (bits >> 13 & 0x3ff));
}

void fill_elements(void *out, uint64_t n, uint32_t dtype, float scale)
{
	uint64_t size = dtype_size(dtype), first = n < PATTERN ? n : PATTERN, done;
	uint32_t random = 1;

	for (uint64_t i = 0; i < first; i++) {
		float x;

		random = random * 1664525u + 1013904223u;
		x = scale * (float)(1 + (random >> 9 & 0x3fff)) / 0x4000;
		if (random >> 31)
			x = -x;
		if (dtype == OFFSTAGE_F32)
			((float *)out)[i] = x;
		else
			((uint16_t *)out)[i] = narrow(x, dtype);
	}
	for (done = first; done < n; done += first) {
		uint64_t more = n - done < first ? n - done : first;

		memcpy((char *)out + done * size, out, more * size);
	}
}

/*
 * Five streams that are a power of two apart meet in the same few cache sets, and update and ceiling alike then take
 * twice as long. A few pages between arrays keep them apart, as separate allocations would be.
 */
static uint64_t padded(uint64_t bytes)
{
	return (bytes + 4095) / 4096 * 4096 + 5 * 4096;
}

int arrays_create(struct offstage *ctx, struct arrays *a, uint64_t n, uint32_t grad_dtype, uint32_t param_dtype)
{
	struct offstage_buffer_options options = { .size = sizeof(options), .lock = OFFSTAGE_PREFER };
	uint64_t state = padded(n * 4), grad = padded(n * dtype_size(grad_dtype)), param = padded(n * dtype_size(param_dtype));
	char *at;
	int ret;

	*a = (struct arrays){ .n = n, .grad_dtype = grad_dtype, .param_dtype = param_dtype };
	ret = offstage_buffer_create(ctx, 3 * state + grad + param, &options, &a->buffer);
	if (ret)
		return ret;
	at = offstage_buffer_data(a->buffer);
	a->master = (float *)at;
	a->exp_avg = (float *)(at + state);
	a->exp_avg_sq = (float *)(at + 2 * state);
	a->grad = at + 3 * state;
	a->param = at + 3 * state + grad;
	fill_elements(a->master, n, OFFSTAGE_F32, 0.05f);
	fill_elements(a->grad, n, grad_dtype, 0.01f);
	return 0;
}

void arrays_close(struct arrays *a)
{
	offstage_buffer_close(a->buffer);
	a->buffer = NULL;
}

int arrays_adam(struct offstage *ctx, const struct arrays *a, uint64_t n, uint64_t t, uint32_t flags)
{
	struct offstage_group group = { .size = sizeof(group), .lr = 1e-4, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8,
					.weight_decay = 0.01 };
	struct offstage_adam adam = { .size = sizeof(adam), .flags = flags, .n = n, .master = a->master,
				      .exp_avg = a->exp_avg, .exp_avg_sq = a->exp_avg_sq, .grad = a->grad,
				      .param = a->param, .moment_dtype = OFFSTAGE_F32, .grad_dtype = a->grad_dtype,
				      .param_dtype = a->param_dtype, .group = &group, .t = t };

	return offstage_adam(ctx, &adam);
}

uint64_t arrays_traffic(const struct arrays *a)
{
	return 24 + dtype_size(a->grad_dtype) + dtype_size(a->param_dtype);
}
