/* SPDX-License-Identifier: MIT */
/*
 * What every unit test needs: cmocka, and two words. OK(call) fails with the library's sentence; SKIP(reason) ends the
 * test as skipped and says why, in a line that scripts/run-unit shows.
 */
#ifndef UNIT_H
#define UNIT_H

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include "../../lib/error.h"	/* before cmocka makes a macro of fail(); a test calls (fail)(…) */
#include <cmocka.h>
#include <offstage.h>

#define OK(call) do { \
	int ok_ret_ = (call); \
	if (ok_ret_ < 0) \
		fail_msg("%s: %d, %s", #call, ok_ret_, offstage_error()); \
} while (0)

#define SKIP(...) do { \
	printf("skipped: " __VA_ARGS__); \
	printf("\n"); \
	fflush(stdout); \
	skip(); \
} while (0)

/* The call failed with err, and its sentence contains the word. */
#define REFUSED(call, err, word) do { \
	int ret_ = (call); \
	if (ret_ != (err)) \
		fail_msg("%s: %d and not %d (%s)", #call, ret_, (err), offstage_error()); \
	if (!strstr(offstage_error(), (word))) \
		fail_msg("%s: the sentence lacks '%s': %s", #call, (word), offstage_error()); \
} while (0)

#endif
