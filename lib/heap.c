/* SPDX-License-Identifier: MIT */
/* The library's heap: counted, and made to fail by tests. See heap.h. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include "error.h"
#include "heap.h"

static _Atomic uint64_t allocations;
static _Atomic uint64_t fail_nth;

void heap_fail_nth(uint64_t n)
{
	fail_nth = n;
}

uint64_t heap_allocations(void)
{
	return allocations;
}

/* Is this the allocation that a test wants to fail? Counts down to 0 and stays there. */
static int must_fail(void)
{
	uint64_t n = fail_nth;

	while (n)
		if (atomic_compare_exchange_weak(&fail_nth, &n, n - 1))
			return n == 1;
	return 0;
}

void *heap_alloc(size_t count, size_t size)
{
	void *memory = must_fail() ? NULL : calloc(count ? count : 1, size ? size : 1);

	if (!memory) {
		fail(-ENOMEM, "no memory on the heap for %zu times %zu bytes: free some, or raise RLIMIT_AS or the "
		     "cgroup's limit", count, size);
		return NULL;
	}
	allocations++;
	return memory;
}

char *heap_string(const char *text)
{
	size_t size = strlen(text) + 1;
	char *copy = heap_alloc(1, size);

	return copy ? memcpy(copy, text, size) : NULL;
}

void heap_free(void *memory)
{
	free(memory);
}
