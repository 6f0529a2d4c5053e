/* SPDX-License-Identifier: MIT */
/* Adam for CPUs with AVX-512 F, BW, VL and DQ. Compiled with these instructions: nothing here runs before usable(). */
#include "adam_avx512.h"

#define vh_bf16(x) vh_bf16_by_integers(x)

static bool usable(void);
#include "adam_loop.h"

const struct adam_ops adam_avx512 = ADAM_OPS("avx512");

static bool usable(void)
{
	return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
	       __builtin_cpu_supports("avx512dq");
}
