/* SPDX-License-Identifier: MIT */
/*
 * The arithmetic over vectors, written once: an ISA's file defines the words below for its registers and includes this
 * file, which makes every entry of its table. The order of operations is adam_c.c's, which defines the bits.
 *
 *	LANES				elements in a vector: 4, 8 or 16
 *	vf, vi, vh, vd			LANES floats, LANES 32-bit integers, LANES 16-bit values, LANES / 2 doubles
 *	vf_load, vf_store		unaligned; vh_load, vh_store, vd_store likewise
 *	vf_stream, vh_stream		store past the caches, to an aligned address; stream_end() orders them
 *	vf_set, vf_mul, vf_add, vf_sub, vf_div, vf_sqrt
 *	vf_fma(a, b, c)			a * b + c, rounded once
 *	vf_clean(x)			NaN made canonical
 *	vf_from_bf16, vf_from_f16		vh to vf, exactly
 *	vh_bf16, vh_f16		clean vf to vh, to nearest even
 *	vh_bf16_random(x, r)		clean vf to bf16, the low 16 bits of r added before the cut; Inf and NaN, whose low
 *					bits are 0, stay what they are
 *	vi_count(x)			x, x + 1, x + 2, …
 *	vi_set, vi_xor, vi_add, vi_mul, vi_shift(x, n)	logical, to the right
 *	vd_low, vd_high(vf)		halves, as doubles; vd_add_square(sum, x)
 *	vf_opaque, vh_opaque(x)		x, of which the compiler forgets where it comes from
 *
 * What is left over at the end goes through arrays of LANES elements, so that no byte beyond the arrays is touched.
 */
#include <math.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

struct constants {
	vf grad_scale, l2, decay, beta1_rest, beta2, beta2_rest, step, denom_scale, eps;
	bool has_l2;
	uint32_t key[2];
};

INLINE vf load(uint32_t dtype, const void *array, size_t i)
{
	if (dtype == OFFSTAGE_F32)
		return vf_load((const float *)array + i);
	return dtype == OFFSTAGE_BF16 ? vf_from_bf16(vh_load((const uint16_t *)array + i)) :
					vf_from_f16(vh_load((const uint16_t *)array + i));
}

/* x is clean. */
INLINE void store(uint32_t dtype, void *array, size_t i, vf x)
{
	if (dtype == OFFSTAGE_F32)
		vf_store((float *)array + i, x);
	else if (dtype == OFFSTAGE_BF16)
		vh_store((uint16_t *)array + i, vh_bf16(x));
	else
		vh_store((uint16_t *)array + i, vh_f16(x));
}

/* How the parameter is written. Streamed: it has lines of its own, which nobody reads before they are sent. */
enum writing { NOT, CACHED, STREAMED };

#define STREAM_ALIGN 64

INLINE enum writing writing_of(const struct adam_span *s)
{
	if (!s->param)
		return NOT;
	/* In place of the gradient, the line is in the cache already. */
	return s->param == s->grad || (uintptr_t)s->param % STREAM_ALIGN ? CACHED : STREAMED;
}

/*
 * Where to cut the next n elements of a span: in a slice of larger arrays, where the parameter comes to a new line the
 * master does, too, and all goes at full speed from there. If it doesn't, there is no cut: streaming the parameter would
 * gain less than is lost by state that lies across lines.
 */
INLINE size_t cut(const struct adam_span *s, size_t n, size_t param)
{
	size_t before = -(uintptr_t)s->param % STREAM_ALIGN / param;

	if (!s->param || s->param == s->grad || before >= n || (uintptr_t)(s->master + before) % STREAM_ALIGN)
		return n;
	return before ? before : n;
}

/* The span behind s's n elements. */
INLINE void advance(struct adam_span *s, size_t grad, size_t param, size_t moment)
{
	s->index += s->n;
	s->master += s->n;
	s->exp_avg = (char *)s->exp_avg + s->n * moment;
	s->exp_avg_sq = (char *)s->exp_avg_sq + s->n * moment;
	s->grad = (const char *)s->grad + s->n * grad;
	if (s->param)
		s->param = (char *)s->param + s->n * param;
}

INLINE void write_wide(enum writing writing, void *array, size_t i, vf x)
{
	if (writing == STREAMED)
		vf_stream((float *)array + i, x);
	else if (writing == CACHED)
		vf_store((float *)array + i, x);
}

INLINE void write_half(enum writing writing, void *array, size_t i, vh x)
{
	if (writing == STREAMED)
		vh_stream((uint16_t *)array + i, x);
	else if (writing == CACHED)
		vh_store((uint16_t *)array + i, x);
}

INLINE vi random_bits(const struct constants *c, uint32_t index)
{
	vi x = vi_xor(vi_count(index), vi_set(c->key[0]));

	x = vi_xor(x, vi_shift(x, 16));
	x = vi_mul(x, vi_set(0x7feb352du));
	x = vi_xor(x, vi_shift(x, 15));
	x = vi_add(x, vi_set(c->key[1]));
	x = vi_mul(x, vi_set(0x846ca68bu));
	return vi_xor(x, vi_shift(x, 16));
}

INLINE void update_vector(const struct adam_span *s, const struct constants *c, size_t i, uint32_t index, uint32_t grad,
			  uint32_t param, enum adam_moments moments, enum writing writing)
{
	uint32_t moment = moments == ADAM_MOMENTS_F32 ? OFFSTAGE_F32 : OFFSTAGE_BF16;
	vf g = vf_mul(load(grad, s->grad, i), c->grad_scale);
	vf m = load(moment, s->exp_avg, i);
	vf v = load(moment, s->exp_avg_sq, i);
	vf w = vf_load(s->master + i);

	if (c->has_l2)
		g = vf_fma(c->l2, w, g);
	w = vf_mul(w, c->decay);
	m = vf_fma(c->beta1_rest, vf_sub(g, m), m);
	v = vf_fma(vf_mul(c->beta2_rest, g), g, vf_mul(c->beta2, v));
	w = vf_fma(c->step, vf_div(m, vf_fma(vf_sqrt(v), c->denom_scale, c->eps)), w);

	w = vf_clean(w);
	m = vf_clean(m);
	v = vf_clean(v);
	vf_store(s->master + i, w);
	if (moments == ADAM_MOMENTS_BF16_STOCHASTIC) {
		vi random = random_bits(c, index);

		vh_store((uint16_t *)s->exp_avg + i, vh_bf16_random(m, random));
		vh_store((uint16_t *)s->exp_avg_sq + i, vh_bf16_random(v, vi_shift(random, 16)));
	} else {
		store(moment, s->exp_avg, i, m);
		store(moment, s->exp_avg_sq, i, v);
	}
	if (param == OFFSTAGE_F32)
		write_wide(writing, s->param, i, w);
	else
		write_half(writing, s->param, i, param == OFFSTAGE_BF16 ? vh_bf16(w) : vh_f16(w));
}

/* The loads and stores of update_vector(), and nothing else. */
INLINE void ceiling_vector(const struct adam_span *s, size_t i, uint32_t grad, uint32_t param, enum adam_moments moments,
			   enum writing writing)
{
	bool wide = moments == ADAM_MOMENTS_F32;
	vf w = vf_opaque(vf_load(s->master + i));
	vf g = w;
	vh h = { 0 };

	if (grad == OFFSTAGE_F32)
		g = vf_opaque(vf_load((const float *)s->grad + i));
	else
		h = vh_opaque(vh_load((const uint16_t *)s->grad + i));
	vf_store(s->master + i, w);
	if (wide) {
		vf_store((float *)s->exp_avg + i, vf_opaque(vf_load((float *)s->exp_avg + i)));
		vf_store((float *)s->exp_avg_sq + i, vf_opaque(vf_load((float *)s->exp_avg_sq + i)));
	} else {
		vh_store((uint16_t *)s->exp_avg + i, vh_opaque(vh_load((uint16_t *)s->exp_avg + i)));
		vh_store((uint16_t *)s->exp_avg_sq + i, vh_opaque(vh_load((uint16_t *)s->exp_avg_sq + i)));
	}
	if (param == OFFSTAGE_F32)
		write_wide(writing, s->param, i, g);
	else
		write_half(writing, s->param, i, h);
}

/* The last n < LANES elements of a span, copied out, worked on, and copied back. */
struct rest {
	float master[LANES];
	uint32_t exp_avg[LANES], exp_avg_sq[LANES], grad[LANES], param[LANES];	/* of any type */
};

INLINE void rest_load(struct rest *r, struct adam_span *out, const struct adam_span *s, size_t i, size_t grad, size_t moment)
{
	size_t n = s->n - i;

	memset(r, 0, sizeof(*r));
	memcpy(r->master, s->master + i, n * 4);
	memcpy(r->exp_avg, (const char *)s->exp_avg + i * moment, n * moment);
	memcpy(r->exp_avg_sq, (const char *)s->exp_avg_sq + i * moment, n * moment);
	memcpy(r->grad, (const char *)s->grad + i * grad, n * grad);
	*out = (struct adam_span){ .master = r->master, .exp_avg = r->exp_avg, .exp_avg_sq = r->exp_avg_sq, .grad = r->grad,
				   .param = r->param, .n = LANES };
}

INLINE void rest_store(const struct rest *r, const struct adam_span *s, size_t i, size_t param, size_t moment)
{
	size_t n = s->n - i;

	memcpy(s->master + i, r->master, n * 4);
	memcpy((char *)s->exp_avg + i * moment, r->exp_avg, n * moment);
	memcpy((char *)s->exp_avg_sq + i * moment, r->exp_avg_sq, n * moment);
	if (s->param)
		memcpy((char *)s->param + i * param, r->param, n * param);
}

INLINE void update_run(const struct adam_span *s, const struct constants *c, uint32_t grad, uint32_t param,
		       enum adam_moments moments, enum writing writing)
{
	uint32_t index = (uint32_t)s->index;
	struct adam_span last;
	struct rest r;
	size_t i = 0;

	for (; s->n - i >= LANES; i += LANES)
		update_vector(s, c, i, index + (uint32_t)i, grad, param, moments, writing);
	if (writing == STREAMED)
		stream_end();
	if (i == s->n)
		return;
	rest_load(&r, &last, s, i, adam_dtype_size(grad), moments == ADAM_MOMENTS_F32 ? 4 : 2);
	update_vector(&last, c, 0, index + (uint32_t)i, grad, param, moments, CACHED);
	rest_store(&r, s, i, adam_dtype_size(param), moments == ADAM_MOMENTS_F32 ? 4 : 2);
}

static uint32_t mix(uint32_t x)
{
	x ^= x >> 16;
	x *= 0x7feb352du;
	x ^= x >> 15;
	x *= 0x846ca68bu;
	return x ^ x >> 16;
}

INLINE void update(const struct adam_span *whole, const struct adam_factors *f, uint32_t grad, uint32_t param,
		   enum adam_moments moments)
{
	struct constants c = {
		vf_set(f->grad_scale), vf_set(f->l2), vf_set(f->decay), vf_set(f->beta1_rest), vf_set(f->beta2),
		vf_set(f->beta2_rest), vf_set(-f->step), vf_set(f->denom_scale), vf_set(f->eps), f->l2 != 0, { 0, 0 },
	};
	struct adam_span s = *whole;

	/* Runs within which the upper half of the index stays: for all but the largest tensors there is one. */
	for (size_t left = whole->n; left; left -= s.n) {
		uint64_t run = ((uint64_t)1 << 32) - (uint32_t)s.index;
		uint32_t high = (uint32_t)(s.index >> 32);

		c.key[0] = f->key[0] ^ mix(high);
		c.key[1] = f->key[1] + high * 0x9e3779b9u;
		s.n = cut(&s, left < run ? left : (size_t)run, adam_dtype_size(param));
		switch (writing_of(&s)) {
		case NOT:
			update_run(&s, &c, grad, param, moments, NOT);
			break;
		case CACHED:
			update_run(&s, &c, grad, param, moments, CACHED);
			break;
		case STREAMED:
			update_run(&s, &c, grad, param, moments, STREAMED);
			break;
		}
		advance(&s, adam_dtype_size(grad), adam_dtype_size(param), moments == ADAM_MOMENTS_F32 ? 4 : 2);
	}
}

INLINE void ceiling_run(const struct adam_span *s, uint32_t grad, uint32_t param, enum adam_moments moments,
			enum writing writing)
{
	size_t i = 0, moment = moments == ADAM_MOMENTS_F32 ? 4 : 2;
	struct adam_span last;
	struct rest r;

	for (; s->n - i >= LANES; i += LANES)
		ceiling_vector(s, i, grad, param, moments, writing);
	if (writing == STREAMED)
		stream_end();
	if (i == s->n)
		return;
	rest_load(&r, &last, s, i, adam_dtype_size(grad), moment);
	ceiling_vector(&last, 0, grad, param, moments, CACHED);
	rest_store(&r, s, i, adam_dtype_size(param), moment);
}

INLINE void ceiling(const struct adam_span *whole, uint32_t grad, uint32_t param, enum adam_moments moments)
{
	struct adam_span s = *whole;

	for (size_t left = whole->n; left; left -= s.n) {
		s.n = cut(&s, left, adam_dtype_size(param));
		switch (writing_of(&s)) {
		case NOT:
			ceiling_run(&s, grad, param, moments, NOT);
			break;
		case CACHED:
			ceiling_run(&s, grad, param, moments, CACHED);
			break;
		case STREAMED:
			ceiling_run(&s, grad, param, moments, STREAMED);
			break;
		}
		advance(&s, adam_dtype_size(grad), adam_dtype_size(param), moments == ADAM_MOMENTS_F32 ? 4 : 2);
	}
}

/* ---- sums of squares: sixteen lanes, whatever LANES is ---------------------------------------------------------- */

#define SUMS (32 / LANES)	/* vectors of LANES / 2 doubles */

INLINE void add_squares(vd *sum, vf x, size_t at)
{
	sum[at / (LANES / 2)] = vd_add_square(sum[at / (LANES / 2)], vd_low(x));
	sum[at / (LANES / 2) + 1] = vd_add_square(sum[at / (LANES / 2) + 1], vd_high(x));
}

INLINE double combine(const vd *sum)
{
	double lane[16];

	for (int k = 0; k < SUMS; k++)
		vd_store(lane + k * (LANES / 2), sum[k]);
	for (int half = 8; half; half /= 2)
		for (int j = 0; j < half; j++)
			lane[j] += lane[j + half];
	return isnan(lane[0]) ? (double)NAN : lane[0];
}

INLINE double sumsq(uint32_t dtype, const void *x, size_t n)
{
	vd sum[SUMS] = { 0 };
	uint32_t rest[16] = { 0 };	/* zeros add nothing */
	size_t i = 0;

	for (; n - i >= 16; i += 16)
		for (size_t at = 0; at < 16; at += LANES)
			add_squares(sum, load(dtype, x, i + at), at);
	if (i < n) {
		memcpy(rest, (const char *)x + i * adam_dtype_size(dtype), (n - i) * adam_dtype_size(dtype));
		for (size_t at = 0; at < 16; at += LANES)
			add_squares(sum, load(dtype, rest, at), at);
	}
	return combine(sum);
}

INLINE void add_vector(uint32_t dtype, vd *squares, float *sum, const void *x, size_t i, size_t at, bool first)
{
	vf value = load(dtype, x, i);

	if (!first)
		value = vf_add(vf_load(sum + i), value);
	value = vf_clean(value);
	vf_store(sum + i, value);
	add_squares(squares, value, at);
}

INLINE double accumulate(uint32_t dtype, float *sum, const void *x, size_t n, bool first)
{
	vd squares[SUMS] = { 0 };
	uint32_t rest[16] = { 0 };
	float sums[16] = { 0 };
	size_t i = 0;

	for (; n - i >= 16; i += 16)
		for (size_t at = 0; at < 16; at += LANES)
			add_vector(dtype, squares, sum, x, i + at, at, first);
	if (i < n) {
		memcpy(rest, (const char *)x + i * adam_dtype_size(dtype), (n - i) * adam_dtype_size(dtype));
		memcpy(sums, sum + i, (n - i) * 4);
		for (size_t at = 0; at < 16; at += LANES)
			add_vector(dtype, squares, sums, rest, at, at, first);
		memcpy(sum + i, sums, (n - i) * 4);
	}
	return combine(squares);
}

/* ---- casts ------------------------------------------------------------------------------------------------------- */

INLINE void widen(uint32_t dtype, float *out, const void *x, size_t n)
{
	uint32_t rest[LANES] = { 0 };
	float wide[LANES];
	size_t i = 0;

	for (; n - i >= LANES; i += LANES)
		vf_store(out + i, vf_clean(load(dtype, x, i)));
	if (i == n)
		return;
	memcpy(rest, (const char *)x + i * adam_dtype_size(dtype), (n - i) * adam_dtype_size(dtype));
	vf_store(wide, vf_clean(load(dtype, rest, 0)));
	memcpy(out + i, wide, (n - i) * 4);
}

INLINE void narrow(uint32_t dtype, void *out, const float *x, size_t n)
{
	float rest[LANES] = { 0 };
	uint32_t narrow[LANES];
	size_t i = 0;

	for (; n - i >= LANES; i += LANES)
		store(dtype, out, i, vf_clean(vf_load(x + i)));
	if (i == n)
		return;
	memcpy(rest, x + i, (n - i) * 4);
	store(dtype, narrow, 0, vf_clean(vf_load(rest)));
	memcpy((char *)out + i * adam_dtype_size(dtype), narrow, (n - i) * adam_dtype_size(dtype));
}

/* ---- the table --------------------------------------------------------------------------------------------------- */

#define DTYPE(d, name) \
static double sumsq_##name(const void *x, size_t n) { return sumsq(d, x, n); } \
static double accumulate_##name(float *sum, const void *x, size_t n, bool first) \
{ \
	return first ? accumulate(d, sum, x, n, true) : accumulate(d, sum, x, n, false); \
} \
static void widen_##name(float *out, const void *x, size_t n) { widen(d, out, x, n); } \
static void narrow_##name(void *out, const float *x, size_t n) { narrow(d, out, x, n); }
DTYPE(OFFSTAGE_F32, f32)
DTYPE(OFFSTAGE_BF16, bf16)
DTYPE(OFFSTAGE_F16, f16)

#define COMBINATION(g, p, m) \
static void update_##g##p##m(const struct adam_span *s, const struct adam_factors *f) { update(s, f, g, p, m); } \
static void ceiling_##g##p##m(const struct adam_span *s, const struct adam_factors *f) { (void)f; ceiling(s, g, p, m); }
ADAM_COMBINATIONS(COMBINATION)

#define ADAM_OPS(isa) { \
	.name = isa, \
	.usable = usable, \
	.update = ADAM_TABLE(update_), \
	.ceiling = ADAM_TABLE(ceiling_), \
	.sumsq = { sumsq_f32, sumsq_bf16, sumsq_f16 }, \
	.accumulate = { accumulate_f32, accumulate_bf16, accumulate_f16 }, \
	.widen = { widen_f32, widen_bf16, widen_f16 }, \
	.narrow = { narrow_f32, narrow_bf16, narrow_f16 }, \
}
