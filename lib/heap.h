/* SPDX-License-Identifier: MIT */
/*
 * The library's heap: every allocation goes through here, so that it can be counted (law 1) and made to fail in turn
 * (the tests' proof that each failure unwinds).
 */
#ifndef HEAP_H
#define HEAP_H

#include <stddef.h>
#include <stdint.h>

/* Zeroed. NULL with the sentence set when there is no memory; the caller returns -ENOMEM. */
void *heap_alloc(size_t count, size_t size);
char *heap_string(const char *text);
void heap_free(void *memory);

/* Allocations so far in this process. */
uint64_t heap_allocations(void);

/* For tests: the nth allocation from now on fails, once. 0: none does. */
void heap_fail_nth(uint64_t n);

#endif
