/* SPDX-License-Identifier: MIT */
/*
 * The offstage command: what its subcommands share. Each is a function that gets the arguments from its own name on
 * and returns the exit status: 0, STATUS_FAILED or STATUS_USAGE. It uses offstage.h as any program does.
 */
#ifndef COMMAND_H
#define COMMAND_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <offstage.h>

enum { STATUS_FAILED = 1, STATUS_USAGE = 2 };

int command_info(int argc, char **argv);
int command_selftest(int argc, char **argv);
int command_plan(int argc, char **argv);
int command_bench(int argc, char **argv);
int command_doctor(int argc, char **argv);
int command_pool(int argc, char **argv);
int command_buffers(int argc, char **argv);

/* Prints the library's sentence for a call that failed, and gives STATUS_FAILED. */
int library_failed(void);
/* The same with a sentence of the command's own. */
int failed(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Prints why the arguments can't be used and where help is, and gives STATUS_USAGE. */
int usage_error(const char *command, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* 1000, 7e9, 1.5e6: a count of elements. 64K, 1G, 512M, 4096: bytes, in powers of 1024. false: it isn't one. */
bool parse_count(const char *text, uint64_t *count);
bool parse_bytes(const char *text, uint64_t *bytes);
bool parse_dtype(const char *text, uint32_t *dtype);
/* Bytes for a sentence or a table: "64 GiB", "1.5 GiB". */
struct size_text { char text[24]; };
struct size_text size_text(uint64_t bytes);
#define SIZE(bytes) (size_text(bytes).text)
const char *dtype_name(uint32_t dtype);
uint64_t dtype_size(uint32_t dtype);

/*
 * A cursor over "--name value" and "--name=value" arguments:
 *
 *	while (arguments_next(&a))
 *		if (arguments_is(&a, "--size")) ok = parse_bytes(arguments_value(&a), &size);
 */
struct arguments {
	int argc, at;
	char **argv;
	const char *name, *value;	/* value: what stood after '=' */
	bool missing;			/* a value was asked for and there was none */
};
bool arguments_next(struct arguments *a);
bool arguments_is(const struct arguments *a, const char *name);
const char *arguments_value(struct arguments *a);
/* For a subcommand whose only option, beside --help, takes no value. -1: go on; else the status to end with. */
int arguments_only(int argc, char **argv, const char *option, void (*help)(void), bool *there);

/* ---- JSON, written as it comes --------------------------------------------------------------------------------------- */

struct json {
	FILE *out;
	int depth;
	bool first;
};
/* key is NULL for the outermost object and inside arrays. */
void json_object(struct json *j, const char *key);
void json_array(struct json *j, const char *key);
void json_end_object(struct json *j);
void json_end_array(struct json *j);
void json_string(struct json *j, const char *key, const char *value);
void json_integer(struct json *j, const char *key, uint64_t value);
void json_number(struct json *j, const char *key, double value);	/* null when it isn't finite */
void json_bool(struct json *j, const char *key, bool value);
void json_null(struct json *j, const char *key);

/* Opens the file ("-": stdout) and the outermost object; a sentence and false on failure. */
bool json_open(struct json *j, const char *path);
/* Ends the outermost object and checks that all of it was written. */
bool json_close(struct json *j, const char *path);

/* Seconds of a clock that only goes forward. */
double seconds_now(void);

#endif
