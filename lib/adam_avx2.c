/* SPDX-License-Identifier: MIT */
/* Adam for CPUs with AVX2, FMA and F16C, in adam_loop.h's words. */
#include <cpuid.h>
#include <immintrin.h>
#include "adam.h"

#define LANES 8

typedef __m256 vf;
typedef __m256i vi;
typedef __m128i vh;
typedef __m256d vd;

#define vf_load(p) _mm256_loadu_ps(p)
#define vf_store(p, x) _mm256_storeu_ps(p, x)
#define vh_load(p) _mm_loadu_si128((const __m128i *)(p))
#define vh_store(p, x) _mm_storeu_si128((__m128i *)(p), x)
#define vf_stream(p, x) _mm256_stream_ps(p, x)
#define vh_stream(p, x) _mm_stream_si128((__m128i *)(p), x)
#define stream_end() _mm_sfence()
#define vd_store(p, x) _mm256_storeu_pd(p, x)
#define vf_set(x) _mm256_set1_ps(x)
#define vf_mul(a, b) _mm256_mul_ps(a, b)
#define vf_add(a, b) _mm256_add_ps(a, b)
#define vf_sub(a, b) _mm256_sub_ps(a, b)
#define vf_div(a, b) _mm256_div_ps(a, b)
#define vf_sqrt(a) _mm256_sqrt_ps(a)
#define vf_fma(a, b, c) _mm256_fmadd_ps(a, b, c)
#define vi_set(x) _mm256_set1_epi32((int)(x))
#define vi_xor(a, b) _mm256_xor_si256(a, b)
#define vi_add(a, b) _mm256_add_epi32(a, b)
#define vi_mul(a, b) _mm256_mullo_epi32(a, b)
#define vi_shift(a, n) _mm256_srli_epi32(a, n)
#define vd_low(x) _mm256_cvtps_pd(_mm256_castps256_ps128(x))
#define vd_high(x) _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1))
#define vd_add_square(sum, x) _mm256_fmadd_pd(x, x, sum)
#define vf_from_f16(h) _mm256_cvtph_ps(h)
#define vh_f16(x) _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)

static inline vi vi_count(uint32_t first)
{
	return _mm256_add_epi32(_mm256_set1_epi32((int)first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

static inline vf vf_clean(vf x)
{
	return _mm256_blendv_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)), _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

static inline vf vf_from_bf16(vh h)
{
	return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

static inline vh upper_halves(vi bits)
{
	bits = _mm256_srli_epi32(bits, 16);
	return _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
}

/* Half of the unit in the last place, less one if the result would be even; Inf and the canonical NaN stay. */
static inline vh vh_bf16(vf x)
{
	vi bits = _mm256_castps_si256(x);
	vi odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));

	return upper_halves(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))));
}

static inline vh vh_bf16_random(vf x, vi random)
{
	return upper_halves(_mm256_add_epi32(_mm256_castps_si256(x), _mm256_and_si256(random, _mm256_set1_epi32(0xffff))));
}

static inline vf vf_opaque(vf x)
{
	__asm__ volatile("" : "+x"(x));
	return x;
}

static inline vh vh_opaque(vh x)
{
	__asm__ volatile("" : "+x"(x));
	return x;
}

static bool usable(void);
#include "adam_loop.h"

const struct adam_ops adam_avx2 = ADAM_OPS("avx2");

static bool usable(void)
{
	unsigned a, b, c, d;

	/* Not every compiler knows F16C by name. Its registers are AVX's, which the operating system keeps if it keeps AVX2's. */
	return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d) &&
	       (c & bit_F16C);
}
