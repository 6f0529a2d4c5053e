/* SPDX-License-Identifier: MIT */
/*
 * Prints "ISA CASE DIGEST" for every ISA that this CPU runs and every case: a combination of types on inputs that are
 * the same everywhere. So the bits of a CPU that isn't here can be compared through text (scripts/run-neon). Needs the
 * arithmetic alone: no threads, no test library.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "../../lib/adam.h"

#define N 70003u		/* all 65536 16-bit values, and no multiple of a vector */
#define STEPS 3

static uint64_t state;

static uint32_t random32(void)
{
	state = state * 6364136223846793005u + 1442695040888963407u;
	return (uint32_t)(state >> 32);
}

/* Every kind of number: most are of a size that gradients have, some are any bits at all. */
static uint32_t number(void)
{
	uint32_t r = random32();

	if (r % 8 == 0)
		return random32();
	return (r & 0x80000000u) | (100 + random32() % 40) << 23 | (random32() & 0x7fffffu);
}

static uint64_t digest(uint64_t sum, const void *memory, size_t bytes)
{
	for (size_t i = 0; i < bytes; i++)
		sum = (sum ^ ((const unsigned char *)memory)[i]) * 0x100000001b3u;
	return sum;
}

static uint32_t master[N], exp_avg[N], exp_avg_sq[N], grad[N], param[N];

static void fill(uint32_t grad_dtype, bool bf16_moments)
{
	for (uint32_t i = 0; i < N; i++) {
		uint32_t m = number(), v = number() & 0x7fffffffu;

		master[i] = number();
		if (bf16_moments) {
			((uint16_t *)exp_avg)[i] = (uint16_t)(m >> 16);
			((uint16_t *)exp_avg_sq)[i] = (uint16_t)(v >> 16);
		} else {
			exp_avg[i] = m;
			exp_avg_sq[i] = v;
		}
		if (grad_dtype == OFFSTAGE_F32)
			grad[i] = number();
		else
			((uint16_t *)grad)[i] = (uint16_t)(i < 65536 ? i : number() >> 16);
	}
}

static uint64_t update_digest(const struct adam_ops *ops, uint32_t g, uint32_t p, enum adam_moments m, uint32_t flags)
{
	struct offstage_group group = { .size = sizeof(group), .flags = flags, .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999,
					.eps = 1e-8, .weight_decay = 0.01 };
	size_t moment = m == ADAM_MOMENTS_F32 ? 4 : 2;
	uint64_t sum = 0xcbf29ce484222325u;

	state = 42;
	fill(g, m != ADAM_MOMENTS_F32);
	memset(param, 0, sizeof(param));
	for (uint64_t t = 1; t <= STEPS; t++) {
		/* Near the end of the first 2^32 elements, so that a tensor's index crosses it. */
		struct adam_span span = { (float *)master, exp_avg, exp_avg_sq, grad, param, 0xffffff00u, N };
		struct adam_factors factors;

		adam_factors(&factors, &group, 0.5, t, 7, 3);
		ops->update[g][p][m](&span, &factors);
		sum = digest(sum, master, sizeof(master));
		sum = digest(sum, exp_avg, N * moment);
		sum = digest(sum, exp_avg_sq, N * moment);
		sum = digest(sum, param, N * adam_dtype_size(p));
	}
	return sum;
}

static void sums_and_casts(const struct adam_ops *ops, uint32_t d)
{
	static float out[N];
	uint64_t sums = 0xcbf29ce484222325u, added = sums, wide = sums, narrow = sums;

	state = 43;
	for (uint32_t i = 0; i < N; i++) {
		/* Finite: a sum of all would be Inf or NaN and tell nothing. */
		uint32_t x = (number() & 0x80ffffffu) | 0x3b000000u;

		if (d == OFFSTAGE_F32)
			grad[i] = x;
		else
			((uint16_t *)grad)[i] = (uint16_t)(x >> 16);
	}
	for (uint32_t i = 0; i < N; i += ADAM_LEAF) {
		size_t n = N - i < ADAM_LEAF ? N - i : ADAM_LEAF;
		const char *x = (const char *)grad + i * adam_dtype_size(d);
		double s[3] = { ops->sumsq[d](x, n), ops->accumulate[d](out + i, x, n, true),
				ops->accumulate[d](out + i, x, n, false) };

		sums = digest(sums, &s[0], 8);
		added = digest(added, &s[1], 16);
	}
	added = digest(added, out, sizeof(out));
	fill(d, false);
	ops->widen[d](out, grad, N);
	wide = digest(wide, out, sizeof(out));
	memset(param, 0, sizeof(param));
	ops->narrow[d](param, (const float *)master, N);
	narrow = digest(narrow, param, N * adam_dtype_size(d));
	printf("%s sumsq-%u %016llx\n", ops->name, d, (unsigned long long)sums);
	printf("%s accumulate-%u %016llx\n", ops->name, d, (unsigned long long)added);
	printf("%s widen-%u %016llx\n", ops->name, d, (unsigned long long)wide);
	printf("%s narrow-%u %016llx\n", ops->name, d, (unsigned long long)narrow);
}

int main(void)
{
	for (int k = 0; adam_all[k]; k++) {
		const struct adam_ops *ops = adam_all[k];

		if (!ops->usable())
			continue;
		for (uint32_t g = 0; g < ADAM_DTYPES; g++)
			for (uint32_t p = 0; p < ADAM_DTYPES; p++)
				for (uint32_t m = 0; m < ADAM_MOMENTS; m++)
					for (uint32_t flags = 0; flags < 4; flags += 3)
						printf("%s update-%u-%u-%u%s %016llx\n", ops->name, g, p, m, flags ? "-l2-maximize" : "",
						       (unsigned long long)update_digest(ops, g, p, m, flags));
		for (uint32_t d = 0; d < ADAM_DTYPES; d++)
			sums_and_casts(ops, d);
	}
	return 0;
}
