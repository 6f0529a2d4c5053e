/* SPDX-License-Identifier: MIT */
/* JSON, written as it comes: commas, indentation and escapes, and nothing kept. Used by info and the benchmarks. */
#include <errno.h>
#include <math.h>
#include <string.h>
#include "command.h"

static void quote(FILE *out, const char *text)
{
	putc('"', out);
	for (const unsigned char *c = (const unsigned char *)text; *c; c++) {
		if (*c == '"' || *c == '\\')
			fprintf(out, "\\%c", *c);
		else if (*c < 0x20)
			fprintf(out, "\\u%04x", *c);
		else
			putc(*c, out);
	}
	putc('"', out);
}

static void begin(struct json *j, const char *key)
{
	if (j->depth) {
		fputs(j->first ? "\n" : ",\n", j->out);
		fprintf(j->out, "%*s", 2 * j->depth, "");
	}
	j->first = false;
	if (key) {
		quote(j->out, key);
		fputs(": ", j->out);
	}
}

static void open_one(struct json *j, const char *key, char bracket)
{
	begin(j, key);
	putc(bracket, j->out);
	j->depth++;
	j->first = true;
}

static void close_one(struct json *j, char bracket)
{
	j->depth--;
	if (!j->first)
		fprintf(j->out, "\n%*s", 2 * j->depth, "");
	putc(bracket, j->out);
	j->first = false;
}

void json_object(struct json *j, const char *key)
{
	open_one(j, key, '{');
}

void json_array(struct json *j, const char *key)
{
	open_one(j, key, '[');
}

void json_end_object(struct json *j)
{
	close_one(j, '}');
}

void json_end_array(struct json *j)
{
	close_one(j, ']');
}

void json_string(struct json *j, const char *key, const char *value)
{
	begin(j, key);
	quote(j->out, value);
}

void json_integer(struct json *j, const char *key, uint64_t value)
{
	begin(j, key);
	fprintf(j->out, "%llu", (unsigned long long)value);
}

void json_number(struct json *j, const char *key, double value)
{
	begin(j, key);
	if (isfinite(value))
		fprintf(j->out, "%.6g", value);
	else
		fputs("null", j->out);
}

void json_bool(struct json *j, const char *key, bool value)
{
	begin(j, key);
	fputs(value ? "true" : "false", j->out);
}

void json_null(struct json *j, const char *key)
{
	begin(j, key);
	fputs("null", j->out);
}

bool json_open(struct json *j, const char *path)
{
	*j = (struct json){ .out = strcmp(path, "-") == 0 ? stdout : fopen(path, "w") };
	if (!j->out) {
		fprintf(stderr, "offstage: cannot write %s: %s\n", path, strerror(errno));
		return false;
	}
	json_object(j, NULL);
	return true;
}

bool json_close(struct json *j, const char *path)
{
	bool ok;

	json_end_object(j);
	putc('\n', j->out);
	ok = fflush(j->out) == 0 && !ferror(j->out);
	if (!ok)
		fprintf(stderr, "offstage: cannot write %s: %s\n", path, strerror(errno));
	if (j->out != stdout)
		fclose(j->out);
	return ok;
}
