/* SPDX-License-Identifier: MIT */
/* SKIP(reason) ends a cmocka test as skipped and says why, in a line that scripts/run-unit shows. After cmocka.h. */
#ifndef SKIP_H
#define SKIP_H

#include <stdio.h>

#define SKIP(...) do { \
	printf("skipped: " __VA_ARGS__); \
	printf("\n"); \
	fflush(stdout); \
	skip(); \
} while (0)

#endif
