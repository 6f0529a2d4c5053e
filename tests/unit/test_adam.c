/* SPDX-License-Identifier: MIT */
/*
 * The arithmetic's promises: every ISA gives the reference's bits on any input, in any cut, in place, at any address;
 * the reference is Adam; bad calls are refused.
 */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif
#include "unit.h"
#include "../../lib/adam.h"
#include "../../lib/context.h"

static uint64_t state;

static uint32_t random32(void)
{
	state = state * 6364136223846793005u + 1442695040888963407u;
	return (uint32_t)(state >> 32);
}

static float uniform(void)
{
	return (float)random32() / 2147483648.0f - 1;
}

/* ---- arrays between guards, at addresses of any alignment ------------------------------------------------------------ */

#define GUARD 128
#define MOST 300100

struct array {
	unsigned char memory[GUARD + MOST * 4 + GUARD + 128];
	unsigned char *at;
	size_t bytes;
};

static void array_make(struct array *a, size_t bytes, size_t shift)
{
	a->at = (unsigned char *)(((uintptr_t)a->memory + GUARD + 63) / 64 * 64) + shift;
	a->bytes = bytes;
	memset(a->at - GUARD, 0xa5, GUARD + bytes + GUARD);
}

static void array_check_guards(const struct array *a)
{
	unsigned char untouched[GUARD];

	memset(untouched, 0xa5, GUARD);
	assert_memory_equal(a->at - GUARD, untouched, GUARD);
	assert_memory_equal(a->at + a->bytes, untouched, GUARD);
}

struct inputs {
	struct array master, exp_avg, exp_avg_sq, grad, param;
	struct adam_span span;
};

enum kind { ORDINARY, ANY_BITS, EVERY_HALF, TINY, HUGE_VALUES, SPECIAL, KINDS };

/* SPECIAL: every operand meets every one of these beside every other's. NaN of both signs, quiet and signalling. */
#define SPECIALS 16
static const uint32_t special[SPECIALS] = {
	0, 0x80000000u, 1, 0x80000001u, 0x7fffff, 0x807fffffu, 0x800000, 0x3f800000, 0xbf800000u, 0x7f7fffff, 0xff7fffffu,
	0x7f800000, 0xff800000u, 0x7fc00000, 0xffc12345u, 0x7fa55555,
};
static const uint16_t special_f16[SPECIALS] = {
	0, 0x8000, 1, 0x8001, 0x3ff, 0x83ff, 0x400, 0x3c00, 0xbc00, 0x7bff, 0xfbff, 0x7c00, 0xfc00, 0x7e00, 0xfe01, 0x7d55,
};

static size_t elements_of(enum kind kind)
{
	return kind == EVERY_HALF || kind == SPECIAL ? 65536 : 5003;	/* all 16-bit values; SPECIALS^4 */
}

static uint32_t bits_of(enum kind kind, bool positive)
{
	uint32_t bits;

	switch (kind) {
	case ANY_BITS:
		bits = random32();
		break;
	case TINY:	/* denormals, zeros, the least normal numbers */
		bits = (random32() & 0x80ffffffu) >> (random32() % 20) << (random32() % 8);
		bits &= 0x80ffffffu;
		break;
	case HUGE_VALUES:
		bits = (random32() & 0x80ffffffu) | 0x7e000000u;
		break;
	default: {
		float x = uniform() * (random32() % 4 ? 1e-3f : 1);

		memcpy(&bits, &x, 4);
	}
	}
	return positive ? bits & 0x7fffffffu : bits;
}

/*
 * How many elements the arrays lie behind a cache line: all alike, as a slice of larger arrays, for a shift below 16;
 * from there on each in its own way, four bits a piece.
 */
static void fill(struct inputs *in, size_t n, uint32_t grad, uint32_t param, enum adam_moments moments, enum kind kind,
		 size_t shift)
{
	size_t moment = moments == ADAM_MOMENTS_F32 ? 4 : 2, each = shift < 16 ? shift * 0x11111 : shift;

	array_make(&in->master, n * 4, (each & 15) * 4);
	array_make(&in->exp_avg, n * moment, (each >> 4 & 15) * moment);
	array_make(&in->exp_avg_sq, n * moment, (each >> 8 & 15) * moment);
	array_make(&in->grad, n * adam_dtype_size(grad), (each >> 12 & 15) * adam_dtype_size(grad));
	array_make(&in->param, n * adam_dtype_size(param), (each >> 16 & 15) * adam_dtype_size(param));
	for (size_t i = 0; i < n; i++) {
		uint32_t w = bits_of(kind, false), m = bits_of(kind, false), v = bits_of(kind, true), g = bits_of(kind, false);

		if (kind == SPECIAL) {
			w = special[i / 4096 % SPECIALS];
			m = special[i / 256 % SPECIALS];
			v = special[i / 16 % SPECIALS];
			g = grad == OFFSTAGE_F16 ? special_f16[i % SPECIALS] : special[i % SPECIALS];
		}
		((uint32_t *)in->master.at)[i] = w;
		if (moment == 4) {
			((uint32_t *)in->exp_avg.at)[i] = m;
			((uint32_t *)in->exp_avg_sq.at)[i] = v;
		} else {
			((uint16_t *)in->exp_avg.at)[i] = (uint16_t)(m >> 16);
			((uint16_t *)in->exp_avg_sq.at)[i] = (uint16_t)(v >> 16);
		}
		if (grad == OFFSTAGE_F32)
			((uint32_t *)in->grad.at)[i] = g;
		else
			((uint16_t *)in->grad.at)[i] = (uint16_t)(kind == EVERY_HALF ? i : grad == OFFSTAGE_BF16 ? g >> 16 :
								  kind == ANY_BITS || kind == SPECIAL ? g : 0x1000 + g % 0x2000);
	}
	in->span = (struct adam_span){ (float *)in->master.at, in->exp_avg.at, in->exp_avg_sq.at, in->grad.at, in->param.at,
				       1000, n };
}

static void assert_same(const struct inputs *a, const struct inputs *b)
{
	assert_memory_equal(a->master.at, b->master.at, a->master.bytes);
	assert_memory_equal(a->exp_avg.at, b->exp_avg.at, a->exp_avg.bytes);
	assert_memory_equal(a->exp_avg_sq.at, b->exp_avg_sq.at, a->exp_avg_sq.bytes);
	assert_memory_equal(a->grad.at, b->grad.at, a->grad.bytes);
	assert_memory_equal(a->param.at, b->param.at, a->param.bytes);
	array_check_guards(&b->master);
	array_check_guards(&b->exp_avg);
	array_check_guards(&b->exp_avg_sq);
	array_check_guards(&b->grad);
	array_check_guards(&b->param);
}

static struct inputs one, two;

static struct adam_factors factors_of(uint32_t flags, double scale, uint64_t t)
{
	struct offstage_group group = { .size = sizeof(group), .flags = flags, .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999,
					.eps = 1e-8, .weight_decay = 0.01 };
	struct adam_factors f;

	adam_factors(&f, &group, scale, t, 99, 5);
	return f;
}

/* Runs a combination on the reference and on ops, on equal inputs of the given kind. */
static void compare(const struct adam_ops *ops, size_t n, uint32_t g, uint32_t p, enum adam_moments m, enum kind kind,
		    size_t shift, const struct adam_factors *f, uint64_t index)
{
	uint64_t seed = state;

	fill(&one, n, g, p, m, kind, 0);
	state = seed;
	fill(&two, n, g, p, m, kind, shift);
	one.span.index = two.span.index = index;
	adam_c.update[g][p][m](&one.span, f);
	ops->update[g][p][m](&two.span, f);
	assert_same(&one, &two);
}

#define FOR_EACH_COMBINATION(g, p, m) \
	for (uint32_t g = 0; g < ADAM_DTYPES; g++) \
		for (uint32_t p = 0; p < ADAM_DTYPES; p++) \
			for (enum adam_moments m = 0; m < ADAM_MOMENTS; m++)

/* The ISA that main() hands to a test that runs once on each. One that this CPU lacks ends the test as skipped. */
static const struct adam_ops *isa_of(void **isa)
{
	const struct adam_ops *ops = *isa;

	if (!ops->usable())
		SKIP("ISA %s isn't run by this CPU", ops->name);
	return ops;
}

static void test_every_isa_gives_the_references_bits(void **isa)
{
	const struct adam_ops *ops = isa_of(isa);
	struct adam_factors plain = factors_of(0, 1, 3), odd = factors_of(OFFSTAGE_GROUP_L2 | OFFSTAGE_GROUP_MAXIMIZE, 0.37, 1);

	state = 1;
	FOR_EACH_COMBINATION(g, p, m)
		for (enum kind kind = ORDINARY; kind < KINDS; kind++) {
			compare(ops, elements_of(kind), g, p, m, kind, 0, &plain, 0);
			compare(ops, elements_of(kind), g, p, m, kind, 1, &odd, 0xfffff000u);
		}
}

/* What no group should ask for and every ISA must answer alike: nothing in the denominator, factors at the ends. */
static void test_extreme_factors_give_the_same_bits(void **isa)
{
	const struct adam_ops *ops = isa_of(isa);
	struct adam_factors f[] = {
		{ .grad_scale = 1, .decay = 1, .beta1_rest = 1, .beta2_rest = 1, .step = 1, .denom_scale = 1, .eps = 0 },
		{ .grad_scale = 0x1p-149f, .decay = 0, .beta1_rest = 0x1p-126f, .beta2 = 1, .beta2_rest = 0x1p-149f, .step = FLT_MIN,
		  .denom_scale = FLT_MAX, .eps = 0x1p-149f },
		{ .grad_scale = -FLT_MAX, .l2 = FLT_MAX, .decay = -INFINITY, .beta1_rest = 1, .beta2 = 1, .beta2_rest = 1,
		  .step = INFINITY, .denom_scale = FLT_MAX, .eps = FLT_MAX },
		{ .grad_scale = NAN, .l2 = -1, .decay = 1, .beta1_rest = 1, .beta2 = 1, .beta2_rest = 1, .step = 1, .denom_scale = 1,
		  .eps = 1 },
	};

	state = 13;
	FOR_EACH_COMBINATION(g, p, m)
		for (size_t i = 0; i < sizeof(f) / sizeof(*f); i++) {
			compare(ops, 5003, g, p, m, ANY_BITS, 0, &f[i], 0);
			compare(ops, elements_of(SPECIAL), g, p, m, SPECIAL, 0, &f[i], 0);
		}
}

static void test_any_length_and_address_touches_nothing_else(void **isa)
{
	const struct adam_ops *ops = isa_of(isa);
	struct adam_factors f = factors_of(0, 1, 3);

	state = 2;
	FOR_EACH_COMBINATION(g, p, m) {
		for (size_t n = 0; n <= 130; n++) {
			compare(ops, n, g, p, m, ORDINARY, n % 16, &f, n);
			compare(ops, n, g, p, m, ORDINARY, 0, &f, n);
			compare(ops, n, g, p, m, ORDINARY, 16 + random32() % 0xfffef, &f, n);
		}
		for (size_t shift = 0; shift < 16; shift++)
			compare(ops, 1000, g, p, m, ORDINARY, shift, &f, shift);
	}
}

static void test_parameter_may_take_the_gradients_place(void **isa)
{
	const struct adam_ops *ops = isa_of(isa);
	struct adam_factors f = factors_of(0, 1, 3);

	FOR_EACH_COMBINATION(g, p, m) {
		if (adam_dtype_size(g) != adam_dtype_size(p))
			continue;
		state = 3;
		fill(&one, 4999, g, p, m, ORDINARY, 0);
		state = 3;
		fill(&two, 4999, g, p, m, ORDINARY, 0);
		two.span.param = two.grad.at;
		adam_c.update[g][p][m](&one.span, &f);
		ops->update[g][p][m](&two.span, &f);
		assert_memory_equal(one.param.at, two.grad.at, one.param.bytes);
		assert_memory_equal(one.master.at, two.master.at, one.master.bytes);
		array_check_guards(&two.grad);
	}
}

static void test_parameter_may_be_left_out(void **isa)
{
	const struct adam_ops *ops = isa_of(isa);
	struct adam_factors f = factors_of(0, 1, 3);

	FOR_EACH_COMBINATION(g, p, m) {
		state = 4;
		fill(&one, 1001, g, p, m, ORDINARY, 0);
		state = 4;
		fill(&two, 1001, g, p, m, ORDINARY, 0);
		two.span.param = NULL;
		adam_c.update[g][p][m](&one.span, &f);
		ops->update[g][p][m](&two.span, &f);
		assert_memory_equal(one.master.at, two.master.at, one.master.bytes);
		assert_memory_equal(one.exp_avg_sq.at, two.exp_avg_sq.at, one.exp_avg_sq.bytes);
	}
}

static void test_any_cut_gives_the_same_bits(void **isa)
{
	const struct adam_ops *ops = isa_of(isa);
	struct adam_factors f = factors_of(0, 1, 3);

	FOR_EACH_COMBINATION(g, p, m) {
		size_t moment = m == ADAM_MOMENTS_F32 ? 4 : 2;
		struct adam_span s;

		state = 5;
		fill(&one, 3000, g, p, m, ORDINARY, 0);
		state = 5;
		fill(&two, 3000, g, p, m, ORDINARY, 0);
		one.span.index = two.span.index = 0xfffffc00u;	/* 2^32 lies inside */
		ops->update[g][p][m](&one.span, &f);
		s = two.span;
		for (size_t left = 3000; left; left -= s.n) {
			s.n = random32() % 97 + 1;
			if (s.n > left)
				s.n = left;
			ops->update[g][p][m](&s, &f);
			s.index += s.n;
			s.master += s.n;
			s.exp_avg = (char *)s.exp_avg + s.n * moment;
			s.exp_avg_sq = (char *)s.exp_avg_sq + s.n * moment;
			s.grad = (const char *)s.grad + s.n * adam_dtype_size(g);
			s.param = (char *)s.param + s.n * adam_dtype_size(p);
		}
		assert_same(&one, &two);
	}
}

static void test_long_runs_stay_together(void **isa)
{
	const struct adam_ops *ops = isa_of(isa);

	for (enum adam_moments m = 0; m < ADAM_MOMENTS; m++) {
		uint32_t g = OFFSTAGE_BF16;

		state = 6;
		fill(&one, 515, g, g, m, TINY, 0);
		state = 6;
		fill(&two, 515, g, g, m, TINY, 0);
		for (uint64_t t = 1; t <= 1000; t++) {
			struct adam_factors f = factors_of(0, 1, t);

			for (size_t i = 0; i < 515; i++)
				((uint16_t *)one.grad.at)[i] = ((uint16_t *)two.grad.at)[i] =
					(uint16_t)(bits_of(t % 50 ? ORDINARY : TINY, false) >> 16);
			adam_c.update[g][g][m](&one.span, &f);
			ops->update[g][g][m](&two.span, &f);
		}
		assert_same(&one, &two);
	}
}

/* ---- the reference is Adam ---------------------------------------------------------------------------------------------- */

/* The formula of the header in double, over steps; what is stored in fp32 may be off by a few roundings per step. */
static void against_double(uint32_t flags)
{
	struct offstage_group group = { .size = sizeof(group), .flags = flags, .lr = 3e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-6,
					.weight_decay = 0.1 };
	enum { N = 2000, STEPS = 50 };
	static float w[N], m[N], v[N], g[N], p[N];
	static double dw[N], dm[N], dv[N];

	state = 7;
	for (int i = 0; i < N; i++) {
		dw[i] = w[i] = uniform();
		m[i] = v[i] = 0;
		dm[i] = dv[i] = 0;
	}
	for (uint64_t t = 1; t <= STEPS; t++) {
		struct adam_span span = { w, m, v, g, p, 0, N };
		struct adam_factors f;

		for (int i = 0; i < N; i++)
			g[i] = uniform() * 0.1f;
		adam_factors(&f, &group, 0.5, t, 0, 0);
		adam_c.update[0][0][0](&span, &f);
		for (int i = 0; i < N; i++) {
			double x = (flags & OFFSTAGE_GROUP_MAXIMIZE ? -0.5 : 0.5) * (double)g[i];

			if (flags & OFFSTAGE_GROUP_L2)
				x += group.weight_decay * dw[i];
			else
				dw[i] *= 1 - group.lr * group.weight_decay;
			dm[i] += (1 - group.beta1) * (x - dm[i]);
			dv[i] = group.beta2 * dv[i] + (1 - group.beta2) * x * x;
			dw[i] -= group.lr / (1 - pow(group.beta1, (double)t)) * dm[i] /
				 (sqrt(dv[i]) / sqrt(1 - pow(group.beta2, (double)t)) + group.eps);
			assert_true(fabs(w[i] - dw[i]) <= (double)t * 4 * FLT_EPSILON * (fabs(dw[i]) + group.lr));
			assert_true(p[i] == w[i]);
		}
	}
}

static void test_reference_is_adamw(void **unused)
{
	(void)unused;
	against_double(0);
}

static void test_reference_is_adam_with_l2(void **unused)
{
	(void)unused;
	against_double(OFFSTAGE_GROUP_L2);
}

static void test_reference_maximizes(void **unused)
{
	(void)unused;
	against_double(OFFSTAGE_GROUP_MAXIMIZE);
	against_double(OFFSTAGE_GROUP_MAXIMIZE | OFFSTAGE_GROUP_L2);
}

static void test_zero_gradient_with_zero_state_only_decays(void **unused)
{
	float w = 2, m = 0, v = 0, g = 0, p;
	struct adam_span span = { &w, &m, &v, &g, &p, 0, 1 };
	struct adam_factors f = factors_of(0, 1, 1);

	(void)unused;
	adam_c.update[0][0][0](&span, &f);
	assert_true(w == 2 * (float)(1 - 1e-3 * 0.01));
	assert_true(m == 0 && v == 0);
}

static void test_nonfinite_values_go_where_torch_lets_them(void **unused)
{
	float bad[] = { INFINITY, -INFINITY, NAN };

	(void)unused;
	for (int i = 0; i < 3; i++) {
		float w = 1, m = 0, v = 0, g = bad[i], p;
		struct adam_span span = { &w, &m, &v, &g, &p, 0, 1 };
		struct adam_factors f = factors_of(0, 1, 1);

		adam_c.update[0][0][0](&span, &f);
		assert_true(isnan(w) && isnan(p));	/* Inf / Inf */
		assert_true(i == 2 ? isnan(m) && isnan(v) : isinf(m) && isinf(v));
	}
	/* An infinite master isn't touched by an L2 decay of zero. */
	{
		struct offstage_group group = { .size = sizeof(group), .flags = OFFSTAGE_GROUP_L2, .lr = 1, .eps = 1 };
		float w = INFINITY, m = 0, v = 0, g = 1, p;
		struct adam_span span = { &w, &m, &v, &g, &p, 0, 1 };
		struct adam_factors f;

		adam_factors(&f, &group, 1, 1, 0, 0);
		adam_c.update[0][0][0](&span, &f);
		assert_true(isfinite(m) && isinf(w));
	}
}

static void test_bias_correction_holds_at_any_step(void **unused)
{
	struct adam_factors first = factors_of(0, 1, 1), late = factors_of(0, 1, UINT64_MAX);

	(void)unused;
	assert_true(fabs(first.step - 1e-2) < 1e-8);
	assert_true(fabs(first.denom_scale - sqrt(1000)) < 1e-3);
	assert_true(late.step == 1e-3f);
	assert_true(late.denom_scale == 1);
}

/* ---- rounding -------------------------------------------------------------------------------------------------------------- */

static void test_casts_are_exact_and_to_nearest_even(void **isa)
{
	const struct adam_ops *ops = isa_of(isa);
	static const struct { float x; uint16_t bf16, f16; } known[] = {
		{ 0.0f, 0, 0 }, { -0.0f, 0x8000, 0x8000 }, { 1.0f, 0x3f80, 0x3c00 }, { 65504.0f, 0x4780, 0x7bff },
		{ 65519.996f, 0x4780, 0x7bff }, { 65520.0f, 0x4780, 0x7c00 }, { INFINITY, 0x7f80, 0x7c00 }, { -INFINITY, 0xff80, 0xfc00 },
		{ NAN, 0x7fc0, 0x7e00 }, { FLT_MAX, 0x7f80, 0x7c00 }, { 0x1p-24f, 0x3380, 1 }, { 0x1p-25f, 0x3300, 0 },
		{ 0x1.000002p-25f, 0x3300, 1 }, { 0x1.8p-24f, 0x33c0, 2 }, { 0x1p-14f, 0x3880, 0x400 }, { 0x1.ff8p-15f, 0x3880, 0x3ff }, { 0x1.ffcp-15f, 0x3880, 0x400 },
		{ 0x1.ffep-15f, 0x3880, 0x400 }, { 1.00390625f, 0x3f80, 0x3c04 }, { 1.01171875f, 0x3f82, 0x3c0c }, { 0x1p-133f, 1, 0 },
		{ 0x1p-134f, 0, 0 }, { 0x1.8p-133f, 2, 0 }, { -0x1p-134f, 0x8000, 0x8000 },
	};

	for (size_t i = 0; i < sizeof(known) / sizeof(*known); i++) {
		float x[20];
		uint16_t out[20];

		for (int k = 0; k < 20; k++)
			x[k] = known[i].x;
		ops->narrow[OFFSTAGE_BF16](out, x, 20);
		for (int k = 0; k < 20; k++)
			assert_int_equal(out[k], known[i].bf16);
		ops->narrow[OFFSTAGE_F16](out, x, 20);
		for (int k = 0; k < 20; k++)
			assert_int_equal(out[k], known[i].f16);
	}
	/* There and back is the identity, for every half that isn't NaN. */
	for (uint32_t d = OFFSTAGE_BF16; d <= OFFSTAGE_F16; d++) {
		static uint16_t all[65536], back[65536];
		static float wide[65536];

		for (int i = 0; i < 65536; i++)
			all[i] = (uint16_t)i;
		ops->widen[d](wide, all, 65536);
		ops->narrow[d](back, wide, 65536);
		for (int i = 0; i < 65536; i++)
			assert_true(isnan(wide[i]) || back[i] == all[i]);
	}
}

static void test_casts_of_any_bits_are_the_same_bits(void **isa)
{
	const struct adam_ops *ops = isa_of(isa);

	state = 14;
	for (uint32_t d = 0; d < ADAM_DTYPES; d++)
		for (size_t n = 0; n <= 65536; n = n < 130 ? n + 1 : n < 65536 ? 65536 : n + 1) {
			size_t size = adam_dtype_size(d), shift = n % 16;

			/* grad: narrow, master: wide. All 16-bit values there are, and for fp32 the special ones first. */
			array_make(&one.grad, n * size, shift * size);
			array_make(&one.master, n * 4, shift * 4);
			array_make(&two.master, n * 4, (shift * 7 & 15) * 4);
			for (size_t i = 0; i < n; i++) {
				if (d == OFFSTAGE_F32)
					((uint32_t *)one.grad.at)[i] = i < SPECIALS ? special[i] : random32();
				else
					((uint16_t *)one.grad.at)[i] = (uint16_t)i;
			}
			adam_c.widen[d]((float *)one.master.at, one.grad.at, n);
			ops->widen[d]((float *)two.master.at, one.grad.at, n);
			assert_memory_equal(one.master.at, two.master.at, n * 4);
			array_check_guards(&two.master);
			for (size_t i = 0; i < n; i++)
				if (isnan(((float *)two.master.at)[i]))
					assert_int_equal(((uint32_t *)two.master.at)[i], 0x7fc00000);

			array_make(&one.param, n * size, shift * size);
			array_make(&two.param, n * size, (shift * 7 & 15) * size);
			for (size_t i = 0; i < n; i++)
				((uint32_t *)one.master.at)[i] = i < SPECIALS ? special[i] : bits_of(random32() % 4 ? ANY_BITS : TINY, false);
			adam_c.narrow[d](one.param.at, (const float *)one.master.at, n);
			ops->narrow[d](two.param.at, (const float *)one.master.at, n);
			assert_memory_equal(one.param.at, two.param.at, n * size);
			array_check_guards(&two.param);
		}
}

static void test_stochastic_rounding_keeps_the_mean_and_repeats(void **unused)
{
	enum { N = 65536 };
	static uint16_t m[N], v[N], again[N], g[N];
	static float w[N];
	struct offstage_group group = { .size = sizeof(group), .lr = 0, .beta1 = 0, .beta2 = 0 };
	struct adam_span span = { w, m, v, g, NULL, 0, N };
	struct adam_factors f;
	double sum = 0, sum_sq = 0, low = 1.0, high = 1.0078125, x = 1.0 + 1.0 / 512;	/* a quarter of the way from 1 to the next bf16 */
	size_t equal = 0, both = 0;

	(void)unused;

	/* exp_avg becomes grad * grad_scale = x, which bf16 doesn't have. */
	for (int i = 0; i < N; i++)
		g[i] = 0x3f80;
	adam_factors(&f, &group, x, 1, 11, 2);
	adam_c.update[1][1][ADAM_MOMENTS_BF16_STOCHASTIC](&span, &f);
	for (int i = 0; i < N; i++) {
		assert_true(m[i] == 0x3f80 || m[i] == 0x3f81);
		sum += m[i] == 0x3f80 ? low : high;
	}
	/* Six standard deviations of the mean of N such choices. */
	assert_true(fabs(sum / N - x) < 6 * (high - low) * sqrt(0.25 * 0.75 / N));
	/* exp_avg_sq becomes x * x, by bits of its own: never below zero, the mean kept, and no echo of exp_avg's choice. */
	for (int i = 0; i < N; i++) {
		assert_true(v[i] == 0x3f80 || v[i] == 0x3f81);
		sum_sq += v[i] == 0x3f80 ? low : high;
		both += m[i] == 0x3f81 && v[i] == 0x3f81;
	}
	assert_true(fabs(sum_sq / N - x * x) < 6 * (high - low) * 0.5 / sqrt(N));
	assert_true(fabs((double)both / N - 0.25 * (x * x - low) / (high - low)) < 6 * 0.5 / sqrt(N));
	memcpy(again, m, sizeof(m));
	adam_c.update[1][1][ADAM_MOMENTS_BF16_STOCHASTIC](&span, &f);
	assert_memory_equal(again, m, sizeof(m));
	for (int what = 0; what < 4; what++) {
		span.index = what == 3 ? (uint64_t)1 << 32 : 0;
		adam_factors(&f, &group, x, what == 0 ? 2 : 1, what == 1 ? 12 : 11, what == 2 ? 3 : 2);
		adam_c.update[1][1][ADAM_MOMENTS_BF16_STOCHASTIC](&span, &f);
		for (int i = 0, same = 0; i < N; i++, equal += same)
			same = m[i] == again[i];
		/* Independent draws agree in 1/16 + 9/16 of the cases. */
		assert_true(fabs((double)equal / N - 0.625) < 0.02);
		equal = 0;
	}
}

/* ---- sums ------------------------------------------------------------------------------------------------------------------- */

static void test_sums_of_squares_are_the_same_bits_and_right(void **isa)
{
	const struct adam_ops *ops = isa_of(isa);
	static float x[ADAM_LEAF];
	static uint16_t h[ADAM_LEAF];

	state = 8;
	for (size_t i = 0; i < ADAM_LEAF; i++) {
		x[i] = uniform() * (float)(1 << random32() % 20);
		h[i] = (uint16_t)(random32() & 0xbbff);
	}
	for (size_t n = 0; n <= ADAM_LEAF; n += n < 100 ? 1 : 999) {
		long double exact = 0;

		for (uint32_t d = 0; d < ADAM_DTYPES; d++) {
			const void *in = d == OFFSTAGE_F32 ? (void *)x : (void *)h;
			double a = adam_c.sumsq[d](in, n), b = ops->sumsq[d](in, n);

			assert_memory_equal(&a, &b, sizeof(a));
		}
		for (size_t i = 0; i < n; i++)
			exact += (long double)x[i] * x[i];
		assert_true(fabsl(ops->sumsq[0](x, n) - exact) <= exact * 1e-14L);
	}
}

static void test_one_bad_gradient_shows_in_the_sum(void **isa)
{
	const struct adam_ops *ops = isa_of(isa);
	static float x[ADAM_LEAF];

	for (size_t at = 0; at < ADAM_LEAF; at += 61) {
		memset(x, 0, sizeof(x));
		x[at] = INFINITY;
		assert_true(isinf(ops->sumsq[0](x, ADAM_LEAF)));
		x[at] = NAN;
		assert_true(isnan(ops->sumsq[0](x, ADAM_LEAF)));
		x[at] = FLT_MAX;	/* large isn't bad */
		assert_true(isfinite(ops->sumsq[0](x, ADAM_LEAF)));
	}
}

static void test_sums_of_any_bits_are_the_same_bits(void **isa)
{
	static uint32_t x[ADAM_LEAF], a[ADAM_LEAF], b[ADAM_LEAF];
	const struct adam_ops *ops = isa_of(isa);

	state = 15;
	for (int round = 0; round < 300; round++)
		for (uint32_t d = 0; d < ADAM_DTYPES; d++) {
			enum kind kind = round % 3 == 0 ? ANY_BITS : round % 3 == 1 ? TINY : HUGE_VALUES;
			size_t n = 1 + random32() % (round % 2 ? 64 : ADAM_LEAF);
			double sums[2][2];

			for (size_t i = 0; i < n; i++) {
				x[i] = round < 30 ? special[random32() % SPECIALS] : bits_of(kind, false);
				a[i] = b[i] = bits_of(kind, false);
			}
			sums[0][0] = adam_c.sumsq[d](x, n);
			sums[1][0] = ops->sumsq[d](x, n);
			sums[0][1] = adam_c.accumulate[d]((float *)a, x, n, round % 5 == 0);
			sums[1][1] = ops->accumulate[d]((float *)b, x, n, round % 5 == 0);
			assert_memory_equal(sums[0], sums[1], sizeof(sums[0]));
			assert_memory_equal(a, b, n * 4);
		}
}

static void test_accumulation_is_the_same_bits(void **isa)
{
	const struct adam_ops *ops = isa_of(isa);
	static float a[ADAM_LEAF], b[ADAM_LEAF];
	static uint32_t x[ADAM_LEAF];

	state = 9;
	for (uint32_t d = 0; d < ADAM_DTYPES; d++)
		for (size_t n = 0; n <= ADAM_LEAF; n += n < 70 ? 1 : 1341) {
			for (size_t i = 0; i < ADAM_LEAF; i++)
				x[i] = d == OFFSTAGE_F32 ? bits_of(ORDINARY, false) : random32() & 0x3bff3bffu;
			for (int round = 0; round < 3; round++) {
				double s = adam_c.accumulate[d](a, x, n, round == 0);
				double t = ops->accumulate[d](b, x, n, round == 0);

				assert_memory_equal(&s, &t, sizeof(s));
				assert_memory_equal(a, b, n * 4);
				assert_true(s == adam_c.sumsq[0](a, n));
			}
		}
}

static void test_tree_depends_on_the_number_of_leaves_alone(void **unused)
{
	double leaf[1000];

	(void)unused;
	for (int i = 0; i < 1000; i++)
		leaf[i] = i + 1;
	assert_true(adam_tree_sum(leaf, 0) == 0);
	assert_true(adam_tree_sum(leaf, 1) == 1);
	assert_true(adam_tree_sum(leaf, 1000) == 500500);
	leaf[0] = 1, leaf[1] = 0x1p-53, leaf[2] = 0x1p-53;
	assert_true(adam_tree_sum(leaf, 3) == 1);	/* (1 + 2^-53) + 2^-53, each lost */
	leaf[3] = 0;
	assert_true(adam_tree_sum(leaf, 4) == 1);	/* (1 + 2^-53) + (2^-53 + 0) */
}

/* ---- the call ---------------------------------------------------------------------------------------------------------------- */

static const struct offstage_group adamw = { .size = sizeof(adamw), .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8,
					     .weight_decay = 0.01 };

static void test_threads_divide_the_work_without_a_trace(void **isa)
{
	const struct adam_ops *ops = isa_of(isa);

	for (uint32_t threads = 1; threads <= 5; threads += 2) {
		struct offstage_options options = { .size = sizeof(options), .threads = threads, .isa = ops->name };
		struct offstage_adam adam = { .size = sizeof(adam), .flags = OFFSTAGE_ADAM_STOCHASTIC, .n = 300001,
			.moment_dtype = OFFSTAGE_BF16, .grad_dtype = OFFSTAGE_BF16, .param_dtype = OFFSTAGE_F16, .group = &adamw,
			.grad_scale = 0.25, .t = 4, .seed = 1, .index = 77 };
		struct adam_factors f;
		struct offstage *ctx;

		state = 10;
		fill(&one, 300001, 1, 2, ADAM_MOMENTS_BF16_STOCHASTIC, ORDINARY, 0);
		state = 10;
		fill(&two, 300001, 1, 2, ADAM_MOMENTS_BF16_STOCHASTIC, ORDINARY, 0);
		one.span.index = 77;
		adam_factors(&f, &adamw, 0.25, 4, 1, 0);
		adam_c.update[1][2][ADAM_MOMENTS_BF16_STOCHASTIC](&one.span, &f);
		adam.master = two.span.master;
		adam.exp_avg = two.span.exp_avg;
		adam.exp_avg_sq = two.span.exp_avg_sq;
		adam.grad = two.span.grad;
		adam.param = two.span.param;
		OK(offstage_open(&options, &ctx));
		OK(offstage_adam(ctx, &adam));
		offstage_close(ctx);
		assert_same(&one, &two);
	}
}

static void test_denormals_survive_a_caller_that_flushes_them(void **unused)
{
#if defined(__x86_64__)
	unsigned saved = _mm_getcsr();
	struct offstage *ctx;

	(void)unused;
	if (getenv("OFFSTAGE_UNDER_VALGRIND"))
		SKIP("valgrind has no flushing of denormals, and forgets that it was asked");
	_mm_setcsr(saved | 0x8040);	/* flush to zero, denormals are zero: torch.set_flush_denormal(True) */
	OK(offstage_open(NULL, &ctx));
	_mm_setcsr(saved);
	state = 11;
	fill(&one, 70000, 0, 0, 0, TINY, 0);
	state = 11;
	fill(&two, 70000, 0, 0, 0, TINY, 0);
	{
		struct adam_factors f = factors_of(0, 1, 1);
		struct offstage_adam adam = { .size = sizeof(adam), .n = 70000, .master = two.span.master, .exp_avg = two.span.exp_avg,
			.exp_avg_sq = two.span.exp_avg_sq, .grad = two.span.grad, .param = two.span.param, .group = &adamw, .t = 1 };

		adam_factors(&f, &adamw, 1, 1, 0, 0);
		adam_c.update[0][0][0](&one.span, &f);
		_mm_setcsr(saved | 0x8040);
		OK(offstage_adam(ctx, &adam));
		assert_int_equal(_mm_getcsr() & 0x8040, 0x8040);	/* the caller's setting is as it was */
		_mm_setcsr(saved);
	}
	assert_same(&one, &two);
	offstage_close(ctx);
#else
	(void)unused;
	SKIP("flushing denormals is set up for x86-64 here");
#endif
}

static void test_ceiling_changes_nothing_but_the_parameter(void **isa)
{
	const struct adam_ops *ops = isa_of(isa);
	struct adam_factors f = factors_of(0, 1, 3);

	FOR_EACH_COMBINATION(g, p, m) {
		state = 12;
		fill(&one, 777, g, p, m, ANY_BITS, 0);
		state = 12;
		fill(&two, 777, g, p, m, ANY_BITS, 0);
		ops->ceiling[g][p][m](&two.span, &f);
		memcpy(two.param.at, one.param.at, one.param.bytes);
		assert_same(&one, &two);
	}
}

static void test_isa_can_be_forced_and_wrong_names_are_refused(void **unused)
{
	const struct adam_ops *ops;

	(void)unused;
	unsetenv("OFFSTAGE_ISA");
	OK(adam_pick(NULL, &ops));
	assert_true(ops->usable());
	setenv("OFFSTAGE_ISA", "c", 1);
	OK(adam_pick(NULL, &ops));
	assert_string_equal(ops->name, "c");
	setenv("OFFSTAGE_ISA", "mmx", 1);
	REFUSED(adam_pick(NULL, &ops), -ENOENT, "from OFFSTAGE_ISA");
	unsetenv("OFFSTAGE_ISA");
	REFUSED(adam_pick("mmx", &ops), -ENOENT, "it has");
	for (int i = 0; adam_all[i]; i++)
		if (!adam_all[i]->usable())
			REFUSED(adam_pick(adam_all[i]->name, &ops), -EOPNOTSUPP, "this CPU");
}

static void test_bad_calls_are_refused_with_a_sentence(void **unused)
{
	float w[64], m[64], v[64], g[64], p[64];
	const struct offstage_adam good = { .size = sizeof(good), .n = 64, .master = w, .exp_avg = m, .exp_avg_sq = v, .grad = g,
					    .param = p, .group = &adamw, .t = 1 };
	struct offstage_group group;
	struct offstage_adam a;
	struct offstage *ctx;

	(void)unused;
	memset(w, 0, sizeof(w)), memset(m, 0, sizeof(m)), memset(v, 0, sizeof(v)), memset(g, 0, sizeof(g));
	OK(offstage_open(NULL, &ctx));
	OK(offstage_adam(ctx, &good));
#define BAD(err, word, ...) do { a = good; __VA_ARGS__; REFUSED(offstage_adam(ctx, &a), err, word); } while (0)
	BAD(-EINVAL, "flags", a.flags = 1u << 20);
	BAD(-EINVAL, "dtype", a.grad_dtype = 3);
	BAD(-EINVAL, "dtype", a.param_dtype = 99);
	BAD(-EINVAL, "moments", a.moment_dtype = OFFSTAGE_F16);
	BAD(-EINVAL, "stochastic", a.flags = OFFSTAGE_ADAM_STOCHASTIC);
	BAD(-EINVAL, "master is NULL", a.master = NULL);
	BAD(-EINVAL, "grad is NULL", a.grad = NULL);
	BAD(-EINVAL, "exp_avg is NULL", a.exp_avg = NULL);
	BAD(-EINVAL, "isn't aligned", a.grad = (char *)g + 1, a.n = 10);
	BAD(-EINVAL, "overlap", a.exp_avg = v);
	BAD(-EINVAL, "overlap", a.param = g + 1, a.n = 32);
	BAD(-EINVAL, "overlap", a.param = g, a.param_dtype = OFFSTAGE_BF16);
	BAD(-EINVAL, "address space", a.n = UINT64_MAX);
	BAD(-EINVAL, "numbered from 1", a.t = 0);
	BAD(-EINVAL, "hyperparameters", a.group = NULL);
	BAD(-EINVAL, "grad_scale", a.grad_scale = NAN);
	BAD(-EINVAL, "grad_scale", a.grad_scale = -INFINITY);
	BAD(-EINVAL, "grad_scale", a.grad_scale = 1e300);
	BAD(-EINVAL, "learning rate", group = adamw, group.lr = -1, a.group = &group);
	BAD(-EINVAL, "learning rate", group = adamw, group.lr = NAN, a.group = &group);
	BAD(-EINVAL, "betas", group = adamw, group.beta1 = 1, a.group = &group);
	BAD(-EINVAL, "betas", group = adamw, group.beta2 = -0.1, a.group = &group);
	BAD(-EINVAL, "eps", group = adamw, group.eps = INFINITY, a.group = &group);
	BAD(-EINVAL, "weight decay", group = adamw, group.weight_decay = -1, a.group = &group);
	BAD(-EINVAL, "flags", group = adamw, group.flags = 1u << 9, a.group = &group);
#undef BAD
	a = good;
	a.n = 0;
	a.master = NULL, a.exp_avg = a.exp_avg_sq = a.param = NULL, a.grad = NULL;
	OK(offstage_adam(ctx, &a));	/* nothing to do, nothing needed */
	offstage_close(ctx);
}

static const struct CMUnitTest alone[] = {
	cmocka_unit_test(test_reference_is_adamw),
	cmocka_unit_test(test_reference_is_adam_with_l2),
	cmocka_unit_test(test_reference_maximizes),
	cmocka_unit_test(test_zero_gradient_with_zero_state_only_decays),
	cmocka_unit_test(test_nonfinite_values_go_where_torch_lets_them),
	cmocka_unit_test(test_bias_correction_holds_at_any_step),
	cmocka_unit_test(test_stochastic_rounding_keeps_the_mean_and_repeats),
	cmocka_unit_test(test_tree_depends_on_the_number_of_leaves_alone),
	cmocka_unit_test(test_denormals_survive_a_caller_that_flushes_them),
	cmocka_unit_test(test_isa_can_be_forced_and_wrong_names_are_refused),
	cmocka_unit_test(test_bad_calls_are_refused_with_a_sentence),
};

static const struct CMUnitTest on_each_isa[] = {
	cmocka_unit_test(test_every_isa_gives_the_references_bits),
	cmocka_unit_test(test_extreme_factors_give_the_same_bits),
	cmocka_unit_test(test_any_length_and_address_touches_nothing_else),
	cmocka_unit_test(test_parameter_may_take_the_gradients_place),
	cmocka_unit_test(test_parameter_may_be_left_out),
	cmocka_unit_test(test_any_cut_gives_the_same_bits),
	cmocka_unit_test(test_long_runs_stay_together),
	cmocka_unit_test(test_casts_are_exact_and_to_nearest_even),
	cmocka_unit_test(test_casts_of_any_bits_are_the_same_bits),
	cmocka_unit_test(test_sums_of_squares_are_the_same_bits_and_right),
	cmocka_unit_test(test_sums_of_any_bits_are_the_same_bits),
	cmocka_unit_test(test_one_bad_gradient_shows_in_the_sum),
	cmocka_unit_test(test_accumulation_is_the_same_bits),
	cmocka_unit_test(test_threads_divide_the_work_without_a_trace),
	cmocka_unit_test(test_ceiling_changes_nothing_but_the_parameter),
};

#define LENGTH(array) (sizeof(array) / sizeof(*(array)))
#define ISAS_MOST 8

int main(void)
{
	static struct CMUnitTest tests[LENGTH(alone) + ISAS_MOST * LENGTH(on_each_isa)];
	static char names[ISAS_MOST * LENGTH(on_each_isa)][96];
	size_t n = LENGTH(alone), named = 0;

	memcpy(tests, alone, sizeof(alone));
	for (int k = 0; k < ISAS_MOST && adam_all[k]; k++)
		for (size_t i = 0; i < LENGTH(on_each_isa); i++) {
			tests[n] = on_each_isa[i];
			tests[n].initial_state = (void *)adam_all[k];
			snprintf(names[named], sizeof(names[named]), "%s [%s]", on_each_isa[i].name, adam_all[k]->name);
			tests[n++].name = names[named++];
		}
	return _cmocka_run_group_tests("adam", tests, n, NULL, NULL);
}
