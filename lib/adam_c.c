/* SPDX-License-Identifier: MIT */
/*
 * The reference: plain C that defines the bits of every result. The other files of the arithmetic must give the same
 * (law 4); they share no code with this one, so that comparing them means something.
 *
 * For each element, in this order, every operation rounded once to fp32 (fma: one rounding for both):
 *
 *	g = grad * grad_scale
 *	g = fma(l2, master, g)			only if l2 is not 0
 *	w = master * decay
 *	m = fma(beta1_rest, g - exp_avg, exp_avg)
 *	v = fma(beta2_rest * g, g, beta2 * exp_avg_sq)
 *	d = fma(sqrt(v), denom_scale, eps)
 *	w = fma(-step, m / d, w)
 *
 * master = w, exp_avg = m, exp_avg_sq = v, param = w: each rounded to its type as it is stored, NaN made canonical.
 * bf16 moments are widened as they are read; this step's own update uses m and v before they are rounded.
 */
#include <math.h>
#include <string.h>
#include "adam.h"

static float from_bits(uint32_t bits)
{
	float x;

	memcpy(&x, &bits, sizeof(x));
	return x;
}

static uint32_t to_bits(float x)
{
	uint32_t bits;

	memcpy(&bits, &x, sizeof(bits));
	return x != x ? 0x7fc00000u : bits;
}

static float from_f16(uint16_t h)
{
	uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exponent = h >> 10 & 31, fraction = h & 0x3ffu;

	if (exponent == 31)
		return from_bits(sign | 0x7f800000u | fraction << 13);
	if (exponent == 0)	/* a multiple of 2^-24, exact in fp32 */
		return from_bits(sign) + (sign ? -1.0f : 1.0f) * (float)fraction * 0x1p-24f;
	return from_bits(sign | (exponent + 112) << 23 | fraction << 13);
}

static uint16_t to_f16(float x)
{
	uint32_t bits = to_bits(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
	uint32_t fraction, shift, result, rest, half;

	if (magnitude > 0x7f800000u)
		return 0x7e00;
	if (magnitude >= 0x47800000u)			/* 65536 and more, Inf too */
		return (uint16_t)(sign | 0x7c00u);
	if (magnitude < 0x33000000u)			/* less than half of the least denormal */
		return (uint16_t)sign;
	if (magnitude >= 0x38800000u) {			/* normal: drop 13 bits */
		shift = 13;
		fraction = magnitude - (112u << 23);
	} else {					/* denormal: a multiple of 2^-24 */
		shift = 126 - (magnitude >> 23);
		fraction = (magnitude & 0x7fffffu) | 0x800000u;
	}
	result = fraction >> shift;
	rest = fraction & ((1u << shift) - 1);
	half = 1u << (shift - 1);
	if (rest > half || (rest == half && (result & 1)))
		result++;				/* may carry into the exponent, up to Inf: as it should */
	return (uint16_t)(sign | result);
}

static uint16_t to_bf16(float x)
{
	uint32_t bits = to_bits(x);

	if ((bits & 0x7f800000u) == 0x7f800000u)
		return (uint16_t)(bits >> 16);		/* Inf, or the canonical NaN */
	return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

/* Up or down with the probability that keeps the mean: 16 random bits are added to the 16 that are dropped. */
static uint16_t to_bf16_stochastic(float x, uint32_t random)
{
	uint32_t bits = to_bits(x);

	if ((bits & 0x7f800000u) == 0x7f800000u)
		return (uint16_t)(bits >> 16);
	return (uint16_t)((bits + (random & 0xffffu)) >> 16);
}

static uint32_t mix(uint32_t x)
{
	x ^= x >> 16;
	x *= 0x7feb352du;
	x ^= x >> 15;
	x *= 0x846ca68bu;
	return x ^ x >> 16;
}

/* 32 bits for the element at index: a counter-based hash, so that any split of the work draws the same. */
static uint32_t random_bits(const uint32_t *key, uint64_t index)
{
	uint32_t high = (uint32_t)(index >> 32);
	uint32_t x = (uint32_t)index ^ key[0] ^ mix(high);

	x ^= x >> 16;
	x *= 0x7feb352du;
	x ^= x >> 15;
	x += key[1] + high * 0x9e3779b9u;
	x *= 0x846ca68bu;
	return x ^ x >> 16;
}

static float load(uint32_t dtype, const void *array, size_t i)
{
	if (dtype == OFFSTAGE_F32)
		return ((const float *)array)[i];
	if (dtype == OFFSTAGE_BF16)
		return from_bits((uint32_t)((const uint16_t *)array)[i] << 16);
	return from_f16(((const uint16_t *)array)[i]);
}

static void store(uint32_t dtype, void *array, size_t i, float x)
{
	if (dtype == OFFSTAGE_F32)
		((float *)array)[i] = from_bits(to_bits(x));
	else if (dtype == OFFSTAGE_BF16)
		((uint16_t *)array)[i] = to_bf16(x);
	else
		((uint16_t *)array)[i] = to_f16(x);
}

static inline void update(const struct adam_span *s, const struct adam_factors *f, uint32_t grad, uint32_t param,
			  enum adam_moments moments)
{
	uint32_t moment = moments == ADAM_MOMENTS_F32 ? OFFSTAGE_F32 : OFFSTAGE_BF16;

	for (size_t i = 0; i < s->n; i++) {
		float g = load(grad, s->grad, i) * f->grad_scale;
		float m = load(moment, s->exp_avg, i);
		float v = load(moment, s->exp_avg_sq, i);
		float w = s->master[i];

		if (f->l2 != 0)
			g = fmaf(f->l2, w, g);
		w = w * f->decay;
		m = fmaf(f->beta1_rest, g - m, m);
		v = fmaf(f->beta2_rest * g, g, f->beta2 * v);
		w = fmaf(-f->step, m / fmaf(sqrtf(v), f->denom_scale, f->eps), w);

		store(OFFSTAGE_F32, s->master, i, w);
		if (moments == ADAM_MOMENTS_BF16_STOCHASTIC) {
			uint32_t random = random_bits(f->key, s->index + i);

			((uint16_t *)s->exp_avg)[i] = to_bf16_stochastic(m, random);
			((uint16_t *)s->exp_avg_sq)[i] = to_bf16_stochastic(v, random >> 16);
		} else {
			store(moment, s->exp_avg, i, m);
			store(moment, s->exp_avg_sq, i, v);
		}
		if (s->param)
			store(param, s->param, i, w);
	}
}

static inline void ceiling(const struct adam_span *s, uint32_t grad, uint32_t param, enum adam_moments moments)
{
	size_t moment = moments == ADAM_MOMENTS_F32 ? 4 : 2;

	for (size_t i = 0; i < s->n; i++) {
		/* volatile: what is written back is what was read, and a compiler would leave both out. */
		volatile uint32_t *w = (volatile uint32_t *)s->master + i;
		uint32_t g = grad == OFFSTAGE_F32 ? ((const volatile uint32_t *)s->grad)[i] :
						    ((const volatile uint16_t *)s->grad)[i];

		*w = *w;
		for (int k = 0; k < 2; k++) {
			void *array = k ? s->exp_avg_sq : s->exp_avg;

			if (moment == 4)
				((volatile uint32_t *)array)[i] = ((volatile uint32_t *)array)[i];
			else
				((volatile uint16_t *)array)[i] = ((volatile uint16_t *)array)[i];
		}
		if (s->param && param == OFFSTAGE_F32)
			((volatile uint32_t *)s->param)[i] = g;
		else if (s->param)
			((volatile uint16_t *)s->param)[i] = (uint16_t)g;
	}
}

/*
 * Sixteen sums in double, the j-th over elements i = j mod 16 in ascending order, combined pairwise at a distance of
 * 8, 4, 2, 1. A square of fp32 is exact in double, so fused and unfused addition agree. NaN is made canonical.
 */
static double combine(double *lane)
{
	for (int half = 8; half; half /= 2)
		for (int j = 0; j < half; j++)
			lane[j] += lane[j + half];
	return isnan(lane[0]) ? (double)NAN : lane[0];
}

static inline double sumsq(uint32_t dtype, const void *x, size_t n)
{
	double lane[16] = { 0 };

	for (size_t i = 0; i < n; i++) {
		double value = load(dtype, x, i);

		lane[i % 16] += value * value;
	}
	return combine(lane);
}

static inline double accumulate(uint32_t dtype, float *sum, const void *x, size_t n, bool first)
{
	double lane[16] = { 0 };

	for (size_t i = 0; i < n; i++) {
		float value = load(dtype, x, i);

		store(OFFSTAGE_F32, sum, i, first ? value : sum[i] + value);
		lane[i % 16] += (double)sum[i] * sum[i];
	}
	return combine(lane);
}

#define DTYPE(d, name) \
static double sumsq_##name(const void *x, size_t n) { return sumsq(d, x, n); } \
static double accumulate_##name(float *sum, const void *x, size_t n, bool first) \
{ \
	return accumulate(d, sum, x, n, first); \
} \
static void widen_##name(float *out, const void *x, size_t n) \
{ \
	for (size_t i = 0; i < n; i++) \
		store(OFFSTAGE_F32, out, i, load(d, x, i)); \
} \
static void narrow_##name(void *out, const float *x, size_t n) \
{ \
	for (size_t i = 0; i < n; i++) \
		store(d, out, i, x[i]); \
}
DTYPE(OFFSTAGE_F32, f32)
DTYPE(OFFSTAGE_BF16, bf16)
DTYPE(OFFSTAGE_F16, f16)

#define COMBINATION(g, p, m) \
static void update_##g##p##m(const struct adam_span *s, const struct adam_factors *f) { update(s, f, g, p, m); } \
static void ceiling_##g##p##m(const struct adam_span *s, const struct adam_factors *f) { (void)f; ceiling(s, g, p, m); }
ADAM_COMBINATIONS(COMBINATION)

static bool usable(void)
{
	return true;
}

const struct adam_ops adam_c = {
	.name = "c",
	.usable = usable,
	.update = ADAM_TABLE(update_),
	.ceiling = ADAM_TABLE(ceiling_),
	.sumsq = { sumsq_f32, sumsq_bf16, sumsq_f16 },
	.accumulate = { accumulate_f32, accumulate_bf16, accumulate_f16 },
	.widen = { widen_f32, widen_bf16, widen_f16 },
	.narrow = { narrow_f32, narrow_bf16, narrow_f16 },
};
