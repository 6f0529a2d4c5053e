/* SPDX-License-Identifier: MIT */
/*
 * The five arrays that one Adam update reads and writes, in one staging buffer, filled with numbers of the sizes that
 * training has. Used by selftest and the benchmarks.
 */
#ifndef ARRAYS_H
#define ARRAYS_H

#include <offstage.h>

struct arrays {
	struct offstage_buffer *buffer;
	uint64_t n;
	uint32_t grad_dtype, param_dtype;
	float *master, *exp_avg, *exp_avg_sq;
	void *grad, *param;
};

/* Locked if that can be had. A negative errno of the library on failure. */
int arrays_create(struct offstage *ctx, struct arrays *a, uint64_t n, uint32_t grad_dtype, uint32_t param_dtype);
void arrays_close(struct arrays *a);

/* Step t over the first n elements, with OFFSTAGE_ADAM_* flags. */
int arrays_adam(struct offstage *ctx, const struct arrays *a, uint64_t n, uint64_t t, uint32_t flags);

/* Bytes that it reads and writes for each element: 28 for bf16 gradients and parameters. */
uint64_t arrays_traffic(const struct arrays *a);

/* n elements of a dtype: gradients or parameters that differ from one another, none of them 0. */
void fill_elements(void *out, uint64_t n, uint32_t dtype, float scale);

#endif
