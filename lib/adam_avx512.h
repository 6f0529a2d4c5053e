/* SPDX-License-Identifier: MIT */
/*
 * AVX-512 (F, BW, VL, DQ) in adam_loop.h's words. adam_avx512.c and adam_avx512bf16.c include it; the second defines
 * vh_bf16 with the instruction for it.
 */
#include <immintrin.h>
#include "adam.h"

#define LANES 16

typedef __m512 vf;
typedef __m512i vi;
typedef __m256i vh;
typedef __m512d vd;

#define vf_load(p) _mm512_loadu_ps(p)
#define vf_store(p, x) _mm512_storeu_ps(p, x)
#define vh_load(p) _mm256_loadu_si256((const __m256i *)(p))
#define vh_store(p, x) _mm256_storeu_si256((__m256i *)(p), x)
#define vf_stream(p, x) _mm512_stream_ps(p, x)
#define vh_stream(p, x) _mm256_stream_si256((__m256i *)(p), x)
#define stream_end() _mm_sfence()
#define vd_store(p, x) _mm512_storeu_pd(p, x)
#define vf_set(x) _mm512_set1_ps(x)
#define vf_mul(a, b) _mm512_mul_ps(a, b)
#define vf_add(a, b) _mm512_add_ps(a, b)
#define vf_sub(a, b) _mm512_sub_ps(a, b)
#define vf_div(a, b) _mm512_div_ps(a, b)
#define vf_sqrt(a) _mm512_sqrt_ps(a)
#define vf_fma(a, b, c) _mm512_fmadd_ps(a, b, c)
#define vi_set(x) _mm512_set1_epi32((int)(x))
#define vi_xor(a, b) _mm512_xor_si512(a, b)
#define vi_add(a, b) _mm512_add_epi32(a, b)
#define vi_mul(a, b) _mm512_mullo_epi32(a, b)
#define vi_shift(a, n) _mm512_srli_epi32(a, n)
#define vd_low(x) _mm512_cvtps_pd(_mm512_castps512_ps256(x))
#define vd_high(x) _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1))
#define vd_add_square(sum, x) _mm512_fmadd_pd(x, x, sum)
#define vf_from_f16(h) _mm512_cvtph_ps(h)
#define vh_f16(x) _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)

static inline vi vi_count(uint32_t first)
{
	return _mm512_add_epi32(_mm512_set1_epi32((int)first),
				_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
}

static inline vf vf_clean(vf x)
{
	return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x,
				    _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)));
}

static inline vf vf_from_bf16(vh h)
{
	return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}

/* Half of the unit in the last place, less one if the result would be even; Inf and the canonical NaN stay. */
static inline vh vh_bf16_by_integers(vf x)
{
	vi bits = _mm512_castps_si512(x);
	vi odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));

	bits = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
	return _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16));
}

static inline vh vh_bf16_random(vf x, vi random)
{
	vi bits = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_and_si512(random, _mm512_set1_epi32(0xffff)));

	return _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16));
}

static inline vf vf_opaque(vf x)
{
	__asm__ volatile("" : "+v"(x));
	return x;
}

static inline vh vh_opaque(vh x)
{
	__asm__ volatile("" : "+v"(x));
	return x;
}
