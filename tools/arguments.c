/* SPDX-License-Identifier: MIT */
/* Arguments, the values in them, and the sentence when they can't be used: for every subcommand. See command.h. */
#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include "command.h"

int library_failed(void)
{
	fflush(stdout);
	fprintf(stderr, "offstage: %s\n", offstage_error());
	return STATUS_FAILED;
}

int failed(const char *format, ...)
{
	va_list args;

	fflush(stdout);
	fputs("offstage: ", stderr);
	va_start(args, format);
	vfprintf(stderr, format, args);
	va_end(args);
	putc('\n', stderr);
	return STATUS_FAILED;
}

int usage_error(const char *command, const char *format, ...)
{
	va_list args;

	fprintf(stderr, "offstage %s: ", command);
	va_start(args, format);
	vfprintf(stderr, format, args);
	va_end(args);
	fprintf(stderr, "; see offstage %s --help\n", command);
	return STATUS_USAGE;
}

/* ---- values ---------------------------------------------------------------------------------------------------------- */

bool parse_count(const char *text, uint64_t *count)
{
	char *end;
	double value;

	if (!text || text[0] < '0' || text[0] > '9')
		return false;
	value = strtod(text, &end);
	if (*end || !(value < 1e15) || value != (double)(uint64_t)value)
		return false;
	*count = (uint64_t)value;
	return true;
}

bool parse_bytes(const char *text, uint64_t *bytes)
{
	static const char units[] = "KMGT";
	const char *unit;
	char *end;
	unsigned long long value;

	if (!text || text[0] < '0' || text[0] > '9')
		return false;
	errno = 0;
	value = strtoull(text, &end, 10);
	if (errno)
		return false;
	if (*end) {
		int shift;

		unit = strchr(units, *end);
		if (!unit || (end[1] && strcmp(end + 1, "iB") != 0))
			return false;
		shift = 10 * (int)(unit - units + 1);
		if (value > UINT64_MAX >> shift)
			return false;
		value <<= shift;
	}
	*bytes = value;
	return true;
}

struct size_text size_text(uint64_t bytes)
{
	static const char *const units[] = { "B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB" };
	uint64_t unit = 1;
	struct size_text out;
	size_t i = 0;

	while (bytes / unit >= 1024) {
		unit *= 1024;
		i++;
	}
	if (bytes % unit)
		snprintf(out.text, sizeof(out.text), "%.1f %s", (double)bytes / (double)unit, units[i]);
	else
		snprintf(out.text, sizeof(out.text), "%llu %s", (unsigned long long)(bytes / unit), units[i]);
	return out;
}

static const char *const dtype_names[] = { [OFFSTAGE_F32] = "f32", [OFFSTAGE_BF16] = "bf16", [OFFSTAGE_F16] = "f16" };

bool parse_dtype(const char *text, uint32_t *dtype)
{
	for (uint32_t i = 0; text && i < sizeof(dtype_names) / sizeof(*dtype_names); i++)
		if (strcmp(text, dtype_names[i]) == 0) {
			*dtype = i;
			return true;
		}
	return false;
}

const char *dtype_name(uint32_t dtype)
{
	return dtype_names[dtype];
}

uint64_t dtype_size(uint32_t dtype)
{
	return dtype == OFFSTAGE_F32 ? 4 : 2;
}

/* ---- arguments ------------------------------------------------------------------------------------------------------- */

bool arguments_next(struct arguments *a)
{
	if (a->at >= a->argc)
		return false;
	a->name = a->argv[a->at++];
	a->value = strchr(a->name, '=');
	if (a->value)
		a->value++;
	return true;
}

bool arguments_is(const struct arguments *a, const char *name)
{
	size_t n = strlen(name);

	return strncmp(a->name, name, n) == 0 && (a->name[n] == 0 || a->name[n] == '=');
}

const char *arguments_value(struct arguments *a)
{
	if (a->value)
		return a->value;
	if (a->at < a->argc)
		return a->argv[a->at++];
	a->missing = true;
	return NULL;
}

int arguments_only(int argc, char **argv, const char *option, void (*help)(void), bool *there)
{
	struct arguments a = { .argc = argc, .argv = argv, .at = 1 };

	*there = false;
	while (arguments_next(&a)) {
		if (strcmp(a.name, "--help") == 0) {
			help();
			return 0;
		}
		if (strcmp(a.name, option) != 0)
			return usage_error(argv[0], "'%s' isn't an option", a.name);
		*there = true;
	}
	return -1;
}
