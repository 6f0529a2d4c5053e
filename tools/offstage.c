/* SPDX-License-Identifier: MIT */
/* The offstage command: picks the subcommand, and reads arguments for all of them. */
#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "command.h"

static const struct {
	const char *name;
	int (*run)(int argc, char **argv);
	const char *what;
} commands[] = {
	{ "info", command_info, "what this machine and this build give: provider, ISA, threads, memory, limits, features" },
	{ "selftest", command_selftest, "does it work here, and as fast as the memory allows? One line a check, OK, WARN or FAIL" },
	{ "plan", command_plan, "how much host memory a model needs" },
	{ "bench", command_bench, "adam, step, pool or scale: measures, and prints ratios" },
};
#define N_COMMANDS (sizeof(commands) / sizeof(*commands))

static void usage(FILE *out)
{
	fputs("usage: offstage COMMAND [OPTIONS]\n\n", out);
	for (size_t i = 0; i < N_COMMANDS; i++)
		fprintf(out, "  %-10s %s\n", commands[i].name, commands[i].what);
	fputs("\n  offstage COMMAND --help tells its options; offstage --version the version\n"
	      "\nEnvironment: OFFSTAGE_ISA, OFFSTAGE_PROVIDER, OFFSTAGE_LOCAL_SIZE (see offstage(1))\n", out);
}

int main(int argc, char **argv)
{
	if (argc < 2) {
		usage(stderr);
		return STATUS_USAGE;
	}
	if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "help") == 0) {
		usage(stdout);
		return 0;
	}
	if (strcmp(argv[1], "--version") == 0) {
		printf("offstage %s\n", offstage_version());
		return 0;
	}
	for (size_t i = 0; i < N_COMMANDS; i++)
		if (strcmp(argv[1], commands[i].name) == 0) {
			int status = commands[i].run(argc - 1, argv + 1);

			/* A full disk or a closed pipe shows only here. */
			if (fflush(stdout) && status == 0) {
				perror("offstage: standard output");
				status = STATUS_FAILED;
			}
			return status;
		}
	fprintf(stderr, "offstage: there is no command '%s'\n", argv[1]);
	usage(stderr);
	return STATUS_USAGE;
}

int library_failed(void)
{
	fflush(stdout);
	fprintf(stderr, "offstage: %s\n", offstage_error());
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

double seconds_now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}
