/* SPDX-License-Identifier: MIT */
/* The offstage command: picks the subcommand. */
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
	{ "doctor", command_doctor, "is the kernel module there and as it should be? One line a check, with the remedy" },
	{ "pool", command_pool, "what the module holds reserved on each node; grow, shrink or set it" },
	{ "buffers", command_buffers, "the module's buffers, and whose they are" },
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

double seconds_now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}
