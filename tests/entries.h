/* SPDX-License-Identifier: MIT */
/*
 * How many entries a directory has, without "." and "..": of /proc/self/fd, the descriptors, with the one that looks; of
 * /proc/self/task, the threads. After cmocka.h.
 */
#ifndef ENTRIES_H
#define ENTRIES_H

#include <dirent.h>

static inline unsigned entries(const char *path)
{
	DIR *directory = opendir(path);
	unsigned n = 0;

	assert_non_null(directory);
	for (struct dirent *entry; (entry = readdir(directory));)
		n += entry->d_name[0] != '.';
	closedir(directory);
	return n;
}

#endif
