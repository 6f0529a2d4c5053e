/* SPDX-License-Identifier: MIT */
/* Adam for CPUs with AVX-512 and its bf16 conversion. */
#include "adam_avx512.h"

/* The instruction takes denormals for zero: a vector that has one goes the long way, so that the bits are the same. */
static inline vh vh_bf16(vf x)
{
	if (__builtin_expect(_mm512_fpclass_ps_mask(x, 0x20), 0))
		return vh_bf16_by_integers(x);
	return (vh)_mm512_cvtneps_pbh(x);
}

static bool usable(void);
#include "adam_loop.h"

const struct adam_ops adam_avx512bf16 = ADAM_OPS("avx512bf16");

static bool usable(void)
{
	return adam_avx512.usable() && __builtin_cpu_supports("avx512bf16");
}
