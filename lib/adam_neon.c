/* SPDX-License-Identifier: MIT */
/* Adam for AArch64, whose every CPU has NEON, in adam_loop.h's words. */
#include <arm_neon.h>
#include "adam.h"

#define LANES 4

typedef float32x4_t vf;
typedef uint32x4_t vi;
typedef uint16x4_t vh;
typedef float64x2_t vd;

#define vf_load(p) vld1q_f32(p)
#define vf_store(p, x) vst1q_f32(p, x)
#define vh_load(p) vld1_u16((const uint16_t *)(p))
#define vh_store(p, x) vst1_u16((uint16_t *)(p), x)
#define vf_stream(p, x) vst1q_f32(p, x)	/* the compilers have no word for STNP */
#define vh_stream(p, x) vst1_u16((uint16_t *)(p), x)
#define stream_end() ((void)0)
#define vd_store(p, x) vst1q_f64(p, x)
#define vf_set(x) vdupq_n_f32(x)
#define vf_mul(a, b) vmulq_f32(a, b)
#define vf_add(a, b) vaddq_f32(a, b)
#define vf_sub(a, b) vsubq_f32(a, b)
#define vf_div(a, b) vdivq_f32(a, b)
#define vf_sqrt(a) vsqrtq_f32(a)
#define vf_fma(a, b, c) vfmaq_f32(c, a, b)
#define vi_set(x) vdupq_n_u32(x)
#define vi_xor(a, b) veorq_u32(a, b)
#define vi_add(a, b) vaddq_u32(a, b)
#define vi_mul(a, b) vmulq_u32(a, b)
#define vi_shift(a, n) vshrq_n_u32(a, n)
#define vd_low(x) vcvt_f64_f32(vget_low_f32(x))
#define vd_high(x) vcvt_high_f64_f32(x)
#define vd_add_square(sum, x) vfmaq_f64(sum, x, x)
#define vf_from_bf16(h) vreinterpretq_f32_u32(vshll_n_u16(h, 16))
#define vf_from_f16(h) vcvt_f32_f16(vreinterpret_f16_u16(h))
#define vh_f16(x) vreinterpret_u16_f16(vcvt_f16_f32(x))

static inline vi vi_count(uint32_t first)
{
	static const uint32_t steps[] = { 0, 1, 2, 3 };

	return vaddq_u32(vdupq_n_u32(first), vld1q_u32(steps));
}

static inline vf vf_clean(vf x)
{
	return vbslq_f32(vceqq_f32(x, x), x, vreinterpretq_f32_u32(vdupq_n_u32(0x7fc00000u)));
}

/* Half of the unit in the last place, less one if the result would be even; Inf and the canonical NaN stay. */
static inline vh vh_bf16(vf x)
{
	vi bits = vreinterpretq_u32_f32(x);
	vi odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));

	return vshrn_n_u32(vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
}

static inline vh vh_bf16_random(vf x, vi random)
{
	return vshrn_n_u32(vaddq_u32(vreinterpretq_u32_f32(x), vandq_u32(random, vdupq_n_u32(0xffff))), 16);
}

static inline vf vf_opaque(vf x)
{
	__asm__ volatile("" : "+w"(x));
	return x;
}

static inline vh vh_opaque(vh x)
{
	__asm__ volatile("" : "+w"(x));
	return x;
}

static bool usable(void);
#include "adam_loop.h"

const struct adam_ops adam_neon = ADAM_OPS("neon");

static bool usable(void)
{
	return true;
}
