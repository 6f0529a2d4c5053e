/* SPDX-License-Identifier: MIT */
/*
 * What every unit test needs: cmocka, and three words. OK(call) fails with the library's sentence; REFUSED(call, err,
 * word) unless it fails with this one; SKIP(reason) is skip.h's.
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
#include "../skip.h"

#define OK(call) do { \
	int ok_ret_ = (call); \
	if (ok_ret_ < 0) \
		fail_msg("%s: %d, %s", #call, ok_ret_, offstage_error()); \
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
