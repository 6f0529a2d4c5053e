/* SPDX-License-Identifier: MIT */
/*
 * Law 9: every failure gives a negative errno and one sentence. The sentence is kept per thread until the next
 * failure in that thread; offstage_error() hands it out.
 */
#ifndef ERROR_H
#define ERROR_H

#include <errno.h>

/* Keeps the sentence and returns err, so that a failure is one line: return fail(-EINVAL, "…", …); */
int fail(int err, const char *format, ...) __attribute__((format(printf, 2, 3), cold));

/* Puts "prefix: " before the sentence that a lower layer left, and returns err. */
int fail_in(int err, const char *format, ...) __attribute__((format(printf, 2, 3), cold));

/* Bytes for a sentence: "1.5 GiB", exact when it is below 10 KiB. Returns text. */
struct bytes_text { char text[24]; };
struct bytes_text bytes_text(unsigned long long bytes);
#define BYTES(n) (bytes_text(n).text)

#endif
