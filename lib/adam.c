/* SPDX-License-Identifier: MIT */
/*
 * Picks an implementation, turns hyperparameters into a step's numbers, and sums leaves. A new ISA is one file and one
 * line in adam_all. See adam.h.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "adam.h"
#include "error.h"

const struct adam_ops *const adam_all[] = {
#if defined(__x86_64__)
	&adam_avx512bf16,
	&adam_avx512,
	&adam_avx2,
#elif defined(__aarch64__)
	&adam_neon,
#endif
	&adam_c,
	NULL,
};

int adam_pick(const char *name, const struct adam_ops **ops)
{
	const char *from = "";
	char names[96] = "";
	size_t n = 0;

	if (!name || !*name) {
		name = getenv("OFFSTAGE_ISA");
		from = " (from OFFSTAGE_ISA)";
	}
	for (int i = 0; adam_all[i]; i++) {
		if (!name || !*name) {
			if (!adam_all[i]->usable())
				continue;
		} else if (strcmp(adam_all[i]->name, name) != 0) {
			n += (size_t)snprintf(names + n, sizeof(names) - n, "%s%s", n ? ", " : "", adam_all[i]->name);
			continue;
		} else if (!adam_all[i]->usable()) {
			return fail(-EOPNOTSUPP, "ISA '%s'%s was asked for and this CPU, or its operating system, doesn't run it: "
				    "leave it out to take the best that does", name, from);
		}
		*ops = adam_all[i];
		return 0;
	}
	return fail(-ENOENT, "there is no ISA '%s'%s in this build: it has %s", name, from, names);
}

/* Is x a finite number, not negative? */
static bool magnitude(double x)
{
	return x >= 0 && isfinite(x);
}

int adam_check_group(const struct offstage_group *g, const char *what)
{
	if (g->flags & ~(OFFSTAGE_GROUP_L2 | OFFSTAGE_GROUP_MAXIMIZE))
		return fail(-EINVAL, "%s has flags %#x: use OFFSTAGE_GROUP_* of this version", what, g->flags);
	if (!magnitude(g->lr))
		return fail(-EINVAL, "%s has the learning rate %g: it must be finite and not negative", what, g->lr);
	if (!(g->beta1 >= 0 && g->beta1 < 1) || !(g->beta2 >= 0 && g->beta2 < 1))
		return fail(-EINVAL, "%s has betas %g and %g: each must be in [0, 1)", what, g->beta1, g->beta2);
	if (!magnitude(g->eps))
		return fail(-EINVAL, "%s has eps %g: it must be finite and not negative", what, g->eps);
	if (!magnitude(g->weight_decay))
		return fail(-EINVAL, "%s has the weight decay %g: it must be finite and not negative", what, g->weight_decay);
	return 0;
}

/* splitmix64: neighbouring seeds, steps and tensors give unrelated keys. */
static uint64_t scramble(uint64_t x)
{
	x += 0x9e3779b97f4a7c15u;
	x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
	x = (x ^ x >> 27) * 0x94d049bb133111ebu;
	return x ^ x >> 31;
}

void adam_factors(struct adam_factors *f, const struct offstage_group *g, double grad_scale, uint64_t t, uint64_t seed,
		  uint64_t tensor)
{
	bool l2 = g->flags & OFFSTAGE_GROUP_L2;
	uint64_t key = scramble(scramble(scramble(seed) ^ t) ^ tensor);

	*f = (struct adam_factors){
		.grad_scale = (float)(g->flags & OFFSTAGE_GROUP_MAXIMIZE ? -grad_scale : grad_scale),
		.l2 = l2 ? (float)g->weight_decay : 0,
		.decay = l2 ? 1 : (float)(1 - g->lr * g->weight_decay),
		.beta1_rest = (float)(1 - g->beta1),
		.beta2 = (float)g->beta2,
		.beta2_rest = (float)(1 - g->beta2),
		.step = (float)(g->lr / (1 - pow(g->beta1, (double)t))),
		.denom_scale = (float)(1 / sqrt(1 - pow(g->beta2, (double)t))),
		.eps = (float)g->eps,
		.key = { (uint32_t)key, (uint32_t)(key >> 32) },
	};
}

/* Halves at the largest power of two below n, down to one: the same shape for the same n, and no deeper than 64. */
double adam_tree_sum(const double *leaf, size_t n)
{
	size_t half = 1;

	if (n <= 1)
		return n ? leaf[0] : 0;
	while (half * 2 < n)
		half *= 2;
	return adam_tree_sum(leaf, half) + adam_tree_sum(leaf + half, n - half);
}
