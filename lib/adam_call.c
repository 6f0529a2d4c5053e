/* SPDX-License-Identifier: MIT */
/* offstage_adam(): one update of the caller's own arrays, checked, and divided among the context's threads. */
#include <math.h>
#include "adam.h"
#include "context.h"
#include "error.h"
#include "threads.h"

#define CHUNK (16u * ADAM_LEAF)		/* elements that one thread updates at a time */

struct call {
	adam_update_fn *fn;
	struct adam_span span;
	struct adam_factors factors;
	size_t grad, param, moment;	/* bytes of an element */
};

static void chunk(void *arg, size_t i)
{
	const struct call *c = arg;
	struct adam_span s = c->span;
	size_t at = i * CHUNK;

	s.n = s.n - at < CHUNK ? s.n - at : CHUNK;
	s.index += at;
	s.master += at;
	s.exp_avg = (char *)s.exp_avg + at * c->moment;
	s.exp_avg_sq = (char *)s.exp_avg_sq + at * c->moment;
	s.grad = (const char *)s.grad + at * c->grad;
	if (s.param)
		s.param = (char *)s.param + at * c->param;
	c->fn(&s, &c->factors);
}

/* Do a and b share a byte? */
static bool overlap(const void *a, size_t a_size, const void *b, size_t b_size)
{
	return (uintptr_t)a < (uintptr_t)b + b_size && (uintptr_t)b < (uintptr_t)a + a_size;
}

static int check_arrays(const struct offstage_adam *a, const struct call *c)
{
	const struct { const char *name; const void *at; size_t element, alignment; } arrays[] = {
		{ "master", a->master, 4, 4 },
		{ "exp_avg", a->exp_avg, c->moment, c->moment },
		{ "exp_avg_sq", a->exp_avg_sq, c->moment, c->moment },
		{ "grad", a->grad, c->grad, c->grad },
		{ "param", a->param, c->param, c->param },
	};
	const int n = 5, grad = 3, param = 4;

	if (a->n > SIZE_MAX / 8)
		return fail(-EINVAL, "%llu elements don't fit an address space", (unsigned long long)a->n);
	for (int i = 0; i < n; i++) {
		if (!arrays[i].at && a->n && i != param)
			return fail(-EINVAL, "%s is NULL: only param may be", arrays[i].name);
		if ((uintptr_t)arrays[i].at % arrays[i].alignment)
			return fail(-EINVAL, "%s at %p isn't aligned to its elements of %zu bytes", arrays[i].name, arrays[i].at,
				    arrays[i].alignment);
		for (int k = 0; k < i && arrays[i].at; k++) {
			if (i == param && k == grad && a->param == a->grad && c->param == c->grad)
				continue;
			if (overlap(arrays[i].at, a->n * arrays[i].element, arrays[k].at, a->n * arrays[k].element))
				return fail(-EINVAL, "%s and %s overlap: only param may lie where grad does, at the same address and with "
					    "elements of the same size", arrays[k].name, arrays[i].name);
		}
	}
	return 0;
}

int offstage_adam(struct offstage *ctx, const struct offstage_adam *adam)
{
	struct offstage_adam a;
	struct offstage_group group;
	enum adam_moments moments;
	struct call c;
	int ret = context_check(ctx);

	if (!ret)
		ret = struct_in(&a, sizeof(a), adam, "offstage_adam");
	if (ret)
		return ret;
	if ((a.flags & ~(OFFSTAGE_ADAM_STOCHASTIC | OFFSTAGE_ADAM_CEILING)) || a.reserved)
		return fail(-EINVAL, "offstage_adam.flags is %#x and reserved is %u: use OFFSTAGE_ADAM_* of this version, and 0",
			    a.flags, a.reserved);
	if (a.grad_dtype >= ADAM_DTYPES || a.param_dtype >= ADAM_DTYPES)
		return fail(-EINVAL, "gradients of dtype %u and parameters of dtype %u: use an enum offstage_dtype", a.grad_dtype,
			    a.param_dtype);
	if (a.moment_dtype != OFFSTAGE_F32 && a.moment_dtype != OFFSTAGE_BF16)
		return fail(-EINVAL, "moments can't be kept in dtype %u: use OFFSTAGE_F32 or OFFSTAGE_BF16", a.moment_dtype);
	if ((a.flags & OFFSTAGE_ADAM_STOCHASTIC) && a.moment_dtype == OFFSTAGE_F32)
		return fail(-EINVAL, "stochastic rounding is for moments in bf16, and these are fp32: set moment_dtype too");
	moments = a.moment_dtype == OFFSTAGE_F32 ? ADAM_MOMENTS_F32 :
		  a.flags & OFFSTAGE_ADAM_STOCHASTIC ? ADAM_MOMENTS_BF16_STOCHASTIC : ADAM_MOMENTS_BF16;
	c = (struct call){
		.fn = (a.flags & OFFSTAGE_ADAM_CEILING ? ctx->adam->ceiling : ctx->adam->update)
			[a.grad_dtype][a.param_dtype][moments],
		.span = { a.master, a.exp_avg, a.exp_avg_sq, a.grad, a.param, a.index, (size_t)a.n },
		.grad = adam_dtype_size(a.grad_dtype),
		.param = adam_dtype_size(a.param_dtype),
		.moment = adam_dtype_size(a.moment_dtype),
	};
	ret = check_arrays(&a, &c);
	if (ret)
		return ret;
	if (!(a.flags & OFFSTAGE_ADAM_CEILING)) {
		if (!a.group)
			return fail(-EINVAL, "the hyperparameters are NULL: set group");
		if (!a.t)
			return fail(-EINVAL, "the step's number t is 0: steps are numbered from 1");
		if (!isfinite((float)a.grad_scale))
			return fail(-EINVAL, "grad_scale is %g: it must be finite in fp32, or every parameter becomes NaN", a.grad_scale);
		ret = struct_in(&group, sizeof(group), a.group, "offstage_group");
		if (!ret)
			ret = adam_check_group(&group, "the group");
		if (ret)
			return ret;
		adam_factors(&c.factors, &group, a.grad_scale ? a.grad_scale : 1, a.t, a.seed, 0);
	}
	threads_run(ctx->threads, chunk, &c, (c.span.n + CHUNK - 1) / CHUNK);
	return 0;
}
