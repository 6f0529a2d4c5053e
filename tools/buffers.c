/* SPDX-License-Identifier: MIT */
/*
 * offstage buffers: every buffer of the module's, and whose it is, from debugfs. A line there is six numbers, the nodes
 * as NODE:BYTES,… and the rest is the name of the program that made it, in which the module has escaped (\xNN) whatever
 * isn't printable ASCII: it is the user's own choice, and goes out as it came in.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "command.h"
#include "facts.h"

#define LIST "/sys/kernel/debug/offstage/buffers"
#define COLUMNS "bytes huge from_pool references uid pid nodes comm"

static void help(void)
{
	puts("usage: offstage buffers [--json]\n\n"
	     "  --json   one object a buffer; sizes in bytes\n\n"
	     "Needs root and debugfs, mounted at /sys/kernel/debug.");
}

struct buffer_line {
	uint64_t bytes, huge, from_pool;
	uint64_t references;	/* descriptors and mappings */
	uint32_t uid, pid;
	char *nodes, *comm;
};

static bool parse_line(char *line, struct buffer_line *b)
{
	unsigned long long bytes, huge, from_pool, references;
	int at = 0;

	if (sscanf(line, "%llu %llu %llu %llu %u %u %n", &bytes, &huge, &from_pool, &references, &b->uid, &b->pid,
		   &at) != 6)
		return false;
	b->nodes = line + at;
	b->comm = strchr(b->nodes, ' ');
	if (!at || !b->comm)
		return false;
	*b->comm++ = '\0';
	b->bytes = bytes;
	b->huge = huge;
	b->from_pool = from_pool;
	b->references = references;
	return true;
}

/* The next "NODE:BYTES" of a list. */
static bool next_node(char **nodes, uint32_t *node, uint64_t *bytes)
{
	char *end;

	*node = (uint32_t)strtoul(*nodes, &end, 10);
	if (*end != ':')
		return false;
	*bytes = strtoull(end + 1, &end, 10);
	*nodes = end + (*end == ',');
	return true;
}

static void print_buffer(struct buffer_line *b)
{
	const char *separator = "";
	uint64_t bytes;
	uint32_t node;

	printf("%12s%12s%12s%6llu%8u%8u  %-16s ", SIZE(b->bytes), SIZE(b->huge), SIZE(b->from_pool),
	       (unsigned long long)b->references, b->uid, b->pid, b->comm);
	while (next_node(&b->nodes, &node, &bytes)) {
		printf("%s%u: %s", separator, node, SIZE(bytes));
		separator = ", ";
	}
	putchar('\n');
}

static void json_buffer(struct json *j, struct buffer_line *b)
{
	uint64_t bytes;
	uint32_t node;

	json_object(j, NULL);
	json_integer(j, "bytes", b->bytes);
	json_integer(j, "huge", b->huge);
	json_integer(j, "from_pool", b->from_pool);
	json_integer(j, "references", b->references);
	json_integer(j, "uid", b->uid);
	json_integer(j, "pid", b->pid);
	json_string(j, "comm", b->comm);
	json_array(j, "nodes");
	while (next_node(&b->nodes, &node, &bytes)) {
		json_object(j, NULL);
		json_integer(j, "node", node);
		json_integer(j, "bytes", bytes);
		json_end_object(j);
	}
	json_end_array(j);
	json_end_object(j);
}

/* j is NULL when people read it. The heading comes with the first line, so that an empty list can say that it is. */
static int list(FILE *file, struct json *j)
{
	char *line = NULL;
	size_t size = 0;
	ssize_t n;
	int status = 0;
	uint64_t lines = 0;

	while ((n = getline(&line, &size, file)) > 0) {
		struct buffer_line b;

		line[strcspn(line, "\n")] = '\0';
		if (lines++ ? !parse_line(line, &b) : strcmp(line, COLUMNS) != 0) {
			status = failed(LIST " isn't as this command knows it, which is " COLUMNS ": use the command "
					"and the module of one version");
			break;
		}
		if (lines == 1)
			continue;
		if (j)
			json_buffer(j, &b);
		if (!j && lines == 2)
			printf("%12s%12s%12s%6s%8s%8s  %-16s %s\n", "bytes", "huge", "from pool", "refs", "uid", "pid",
			       "command", "nodes");
		if (!j)
			print_buffer(&b);
	}
	if (!status && !lines)
		status = failed(LIST " is empty: the module had no memory for the list; try again");
	if (!status && lines == 1 && !j)
		puts("no buffers");
	free(line);
	return status;
}

static int cannot_open(int err)
{
	if (err == EACCES || err == EPERM)
		return failed("the list of buffers is root's alone to read: try sudo");
	if (!facts_exist("/sys/module/offstage"))
		return failed("there are no buffers of the module's, since it isn't loaded: `modprobe offstage`, or "
			      "let `offstage doctor` say what it lacks");
	if (err == ENOENT)
		return failed("there is no " LIST ": `mount -t debugfs debugfs /sys/kernel/debug` first; a kernel "
			      "without debugfs has no list");
	return failed(LIST " can't be read (%s)", strerror(err));
}

static int show(bool json)
{
	char path[FACTS_PATH_MAX];
	FILE *file = facts_path(path, LIST) ? fopen(path, "re") : NULL;
	struct json j;
	int status;

	if (!file)
		return cannot_open(errno);
	if (json && !json_open(&j, "-")) {
		fclose(file);
		return STATUS_FAILED;
	}
	if (json)
		json_array(&j, "buffers");
	status = list(file, json ? &j : NULL);
	fclose(file);
	if (!json)
		return status;
	json_end_array(&j);
	return json_close(&j, "standard output") ? status : STATUS_FAILED;
}

int command_buffers(int argc, char **argv)
{
	bool json;
	int status = arguments_only(argc, argv, "--json", help, &json);

	return status >= 0 ? status : show(json);
}
