/* SPDX-License-Identifier: MIT */
/* The last failure's sentence, per thread (law 9). See error.h. */
#include <offstage.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include "error.h"

static _Thread_local char sentence[512];

const char *offstage_error(void)
{
	return sentence;
}

int fail(int err, const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vsnprintf(sentence, sizeof(sentence), format, args);
	va_end(args);
	return err;
}

int fail_in(int err, const char *format, ...)
{
	char below[sizeof(sentence)];
	va_list args;
	size_t n;

	memcpy(below, sentence, sizeof(below));
	va_start(args, format);
	vsnprintf(sentence, sizeof(sentence), format, args);
	va_end(args);
	n = strlen(sentence);
	snprintf(sentence + n, sizeof(sentence) - n, ": %.*s", (int)(sizeof(sentence) - n - 3), below);
	return err;
}

struct bytes_text bytes_text(unsigned long long bytes)
{
	static const char *const unit[] = { "KiB", "MiB", "GiB", "TiB", "PiB", "EiB" };
	struct bytes_text out;
	double value = (double)bytes;
	int i = -1;

	if (bytes < 10240) {
		snprintf(out.text, sizeof(out.text), "%llu bytes", bytes);
		return out;
	}
	while (value >= 1024) {
		value /= 1024;
		i++;
	}
	snprintf(out.text, sizeof(out.text), value < 10 ? "%.2f %s" : "%.1f %s", value, unit[i]);
	return out;
}
