/* SPDX-License-Identifier: MIT */
/*
 * Adam's arithmetic: pure functions over arrays, with no memory of their own and no system calls. One file per ISA
 * (adam_c.c defines the result; the others give the same bits, law 4), one table in adam.c that picks.
 *
 * Called by the step engine, one call per run of elements and thread. Elementwise functions may be split anywhere.
 * Sums of squares are per leaf: ADAM_LEAF elements from a multiple of ADAM_LEAF within the tensor (the tensor's last
 * leaf may be shorter), so a tensor's norm is the same however the tensor was cut and by however many threads.
 *
 * Every function expects the default floating-point environment (round to nearest, denormals kept): threads_run()
 * sees to that. NaN results are always the canonical 0x7fc00000 (bf16 0x7fc0, fp16 0x7e00), because ISAs differ in
 * which payload they carry on, and whether a conversion quiets a signalling one.
 */
#ifndef ADAM_H
#define ADAM_H

#include <offstage.h>
#include <stdbool.h>

#define ADAM_LEAF 4096u		/* elements */
#define ADAM_DTYPES 3		/* enum offstage_dtype */

/* How moments are kept. */
enum adam_moments { ADAM_MOMENTS_F32, ADAM_MOMENTS_BF16, ADAM_MOMENTS_BF16_STOCHASTIC, ADAM_MOMENTS };

/* A step's numbers for one tensor: computed once in double, rounded once. */
struct adam_factors {
	float grad_scale;	/* clip factor over loss scale; negative to maximize */
	float l2;		/* weight decay added to the gradient; 0: none, and then master isn't touched by it */
	float decay;		/* 1 - lr * weight_decay; 1 for L2 */
	float beta1_rest;	/* 1 - beta1 */
	float beta2;
	float beta2_rest;	/* 1 - beta2 */
	float step;		/* lr / (1 - beta1^t) */
	float denom_scale;	/* 1 / sqrt(1 - beta2^t) */
	float eps;
	uint32_t key[2];	/* of stochastic rounding, from seed, t and tensor */
};

/* A run of n elements. param may be NULL, or grad where both have the same element size; nothing else overlaps. */
struct adam_span {
	float *master;
	void *exp_avg;
	void *exp_avg_sq;
	const void *grad;
	void *param;
	uint64_t index;		/* of element 0 within its tensor, for stochastic rounding */
	size_t n;
};

typedef void adam_update_fn(const struct adam_span *span, const struct adam_factors *factors);

struct adam_ops {
	const char *name;
	bool (*usable)(void);	/* does this CPU (and its operating system) run it? */

	/* The update, and the same loads and stores without arithmetic (factors unused). */
	adam_update_fn *update[ADAM_DTYPES][ADAM_DTYPES][ADAM_MOMENTS];	/* [grad][param][moments] */
	adam_update_fn *ceiling[ADAM_DTYPES][ADAM_DTYPES][ADAM_MOMENTS];

	/* Sum of squares of one leaf (n <= ADAM_LEAF). Inf or NaN in x makes it Inf or the canonical NaN. */
	double (*sumsq[ADAM_DTYPES])(const void *x, size_t n);

	/* sum = x (first) or sum + x, in fp32; returns the sum of squares of the new sum. One leaf. */
	double (*accumulate[ADAM_DTYPES])(float *sum, const void *x, size_t n, bool first);

	/* out = x, exactly (NaN made canonical, as everywhere); and out = x, rounded to nearest even. */
	void (*widen[ADAM_DTYPES])(float *out, const void *x, size_t n);
	void (*narrow[ADAM_DTYPES])(void *out, const float *x, size_t n);
};

/* One instance per combination of dtypes: X(grad, param, moments), and the table of what X made. */
#define ADAM_COMBINATIONS(X) \
	ADAM_COMBINATIONS_(X, 0, 0) ADAM_COMBINATIONS_(X, 0, 1) ADAM_COMBINATIONS_(X, 0, 2) \
	ADAM_COMBINATIONS_(X, 1, 0) ADAM_COMBINATIONS_(X, 1, 1) ADAM_COMBINATIONS_(X, 1, 2) \
	ADAM_COMBINATIONS_(X, 2, 0) ADAM_COMBINATIONS_(X, 2, 1) ADAM_COMBINATIONS_(X, 2, 2)
#define ADAM_COMBINATIONS_(X, g, p) X(g, p, 0) X(g, p, 1) X(g, p, 2)
#define ADAM_TABLE(name) { ADAM_TABLE_(name, 0), ADAM_TABLE_(name, 1), ADAM_TABLE_(name, 2) }
#define ADAM_TABLE_(name, g) { \
	{ name##g##00, name##g##01, name##g##02 }, { name##g##10, name##g##11, name##g##12 }, \
	{ name##g##20, name##g##21, name##g##22 } }

extern const struct adam_ops adam_c, adam_avx2, adam_avx512, adam_avx512bf16, adam_neon;

/* Every implementation of this build, best first; NULL ends the list. */
extern const struct adam_ops *const adam_all[];

/* The one named (NULL: OFFSTAGE_ISA, else the best usable). -ENOENT, -EOPNOTSUPP with a sentence. */
int adam_pick(const char *name, const struct adam_ops **ops);

/* -EINVAL with a sentence if a hyperparameter can't be. `what` names the group in the sentence. */
int adam_check_group(const struct offstage_group *group, const char *what);

/* The numbers of step t (from 1). tensor: which stream of random bits. */
void adam_factors(struct adam_factors *factors, const struct offstage_group *group, double grad_scale, uint64_t t,
		  uint64_t seed, uint64_t tensor);

/* Combines leaf sums pairwise, in a tree whose shape depends on n alone. 0 for n = 0. */
double adam_tree_sum(const double *leaf, size_t n);

static inline size_t adam_dtype_size(uint32_t dtype)
{
	return dtype == OFFSTAGE_F32 ? 4 : 2;
}

#endif
