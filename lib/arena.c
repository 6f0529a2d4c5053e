/* SPDX-License-Identifier: MIT */
/*
 * Arenas: many small pieces of one buffer, so that thousands of tensors aren't thousands of mappings.
 *
 * All that is known about pieces stands outside the buffer, in one array of runs sorted by offset, live and free, which
 * cover the buffer with no gap; two neighbours are never both free. A piece is looked up by bisection, and room for it
 * by the best fit. Both move part of the array: for the tens of thousands of pieces that a model has this costs
 * microseconds, and happens at start.
 */
#include <pthread.h>
#include <stdbool.h>
#include <string.h>
#include "context.h"
#include "error.h"
#include "heap.h"
#include "staging.h"

#define ALIGN 64u

struct run {
	uint64_t offset;
	uint64_t bytes;		/* a multiple of ALIGN but in the last run */
	bool live;
};

struct offstage_arena {
	struct offstage_buffer *buffer;	/* a reference */
	char *data;
	pthread_mutex_t lock;	/* guards what follows */
	struct run *runs;
	size_t n, room;
	uint64_t used;
};

static int check(const struct offstage_arena *arena)
{
	if (!arena)
		return fail(-EINVAL, "the arena is NULL: make one first and check what offstage_arena_create() returns");
	return context_check(arena->buffer->ctx);
}

int offstage_arena_create(struct offstage_buffer *buffer, struct offstage_arena **out)
{
	struct offstage_arena *arena;
	int ret;

	if (!out)
		return fail(-EINVAL, "there is no place for the arena: pass a pointer to a struct offstage_arena *");
	*out = NULL;
	if (!buffer)
		return fail(-EINVAL, "an arena needs a buffer to cut: make one with offstage_buffer_create()");
	ret = context_check(buffer->ctx);
	if (ret)
		return ret;
	arena = heap_alloc(1, sizeof(*arena));
	if (!arena)
		return -ENOMEM;
	arena->room = 64;
	arena->runs = heap_alloc(arena->room, sizeof(*arena->runs));
	if (!arena->runs) {
		heap_free(arena);
		return -ENOMEM;
	}
	pthread_mutex_init(&arena->lock, NULL);
	arena->buffer = buffer_get(buffer);
	arena->data = buffer->data;
	if (buffer->info.requested)
		arena->runs[arena->n++] = (struct run){ .bytes = buffer->info.requested };
	*out = arena;
	return 0;
}

void offstage_arena_close(struct offstage_arena *arena)
{
	if (!arena)
		return;
	/* In a child of fork the lock may be held by a thread that isn't here: it's left as it is. */
	if (!context_forked(arena->buffer->ctx))
		pthread_mutex_destroy(&arena->lock);
	buffer_put(arena->buffer);
	heap_free(arena->runs);
	heap_free(arena);
}

/* Room for one more run, so that nothing can fail once the runs are being changed. */
static int grow(struct offstage_arena *arena)
{
	struct run *runs;

	if (arena->n < arena->room)
		return 0;
	runs = heap_alloc(arena->room * 2, sizeof(*runs));
	if (!runs)
		return -ENOMEM;
	memcpy(runs, arena->runs, arena->n * sizeof(*runs));
	heap_free(arena->runs);
	arena->runs = runs;
	arena->room *= 2;
	return 0;
}

static uint64_t longest_free(const struct offstage_arena *arena)
{
	uint64_t longest = 0;

	for (size_t i = 0; i < arena->n; i++)
		if (!arena->runs[i].live && arena->runs[i].bytes > longest)
			longest = arena->runs[i].bytes;
	return longest;
}

/* Makes run i two: its first bytes, and the rest behind. */
static void split(struct offstage_arena *arena, size_t i, uint64_t bytes)
{
	struct run *runs = arena->runs;

	memmove(&runs[i + 2], &runs[i + 1], (arena->n - i - 1) * sizeof(*runs));
	runs[i + 1] = (struct run){ .offset = runs[i].offset + bytes, .bytes = runs[i].bytes - bytes };
	runs[i].bytes = bytes;
	arena->n++;
}

/* Makes run i and the one behind it one. */
static void join(struct offstage_arena *arena, size_t i)
{
	struct run *runs = arena->runs;

	runs[i].bytes += runs[i + 1].bytes;
	memmove(&runs[i + 1], &runs[i + 2], (arena->n - i - 2) * sizeof(*runs));
	arena->n--;
}

static int take(struct offstage_arena *arena, uint64_t bytes, void **piece)
{
	uint64_t aligned = bytes + (-bytes & (ALIGN - 1)), need;
	size_t best = arena->n;
	int ret;

	for (size_t i = 0; i < arena->n; i++) {
		const struct run *run = &arena->runs[i];

		/* The buffer's end needn't be aligned: its last bytes can be handed out as they are. */
		need = i + 1 == arena->n ? bytes : aligned;
		if (!run->live && run->bytes >= need && (best == arena->n || run->bytes < arena->runs[best].bytes))
			best = i;
	}
	if (best == arena->n)
		return fail(-ENOSPC, "a piece of %s needs a free run as long, and the longest of this arena's is %s: make its "
			    "buffer larger, or free pieces", BYTES(bytes), BYTES(longest_free(arena)));
	ret = grow(arena);
	if (ret)
		return ret;
	if (arena->runs[best].bytes > aligned)
		split(arena, best, aligned);
	arena->runs[best].live = true;
	arena->used += arena->runs[best].bytes;
	*piece = arena->data + arena->runs[best].offset;
	return 0;
}

int offstage_arena_alloc(struct offstage_arena *arena, uint64_t bytes, void **piece)
{
	int ret;

	if (!piece)
		return fail(-EINVAL, "there is no place for the piece: pass a pointer to a void *");
	*piece = NULL;
	ret = check(arena);
	/* Nothing needs no place: NULL, as the data of an empty buffer. */
	if (ret || !bytes)
		return ret;
	if (bytes > arena->buffer->info.requested)
		return fail(-ENOSPC, "a piece of %s doesn't fit into a buffer of %s: make the buffer larger", BYTES(bytes),
			    BYTES(arena->buffer->info.requested));
	pthread_mutex_lock(&arena->lock);
	ret = take(arena, bytes, piece);
	pthread_mutex_unlock(&arena->lock);
	return ret;
}

/* The last run that begins at or before offset. */
static size_t find(const struct offstage_arena *arena, uint64_t offset)
{
	size_t low = 0, high = arena->n;

	while (high - low > 1) {
		size_t middle = low + (high - low) / 2;

		if (arena->runs[middle].offset <= offset)
			low = middle;
		else
			high = middle;
	}
	return low;
}

static int give(struct offstage_arena *arena, void *piece)
{
	uint64_t offset = (uint64_t)((uintptr_t)piece - (uintptr_t)arena->data);
	size_t i;

	if ((uintptr_t)piece < (uintptr_t)arena->data || offset >= arena->buffer->info.requested)
		return fail(-EINVAL, "%p isn't in this arena, whose buffer is at %p: free each piece in the arena that it came from",
			    piece, (void *)arena->data);
	i = find(arena, offset);
	if (!arena->runs[i].live)
		return fail(-EINVAL, "%p isn't a live piece: it was freed before, or never handed out", piece);
	if (arena->runs[i].offset != offset)
		return fail(-EINVAL, "%p is inside the piece at %p: pass the pointer that offstage_arena_alloc() gave", piece,
			    (void *)(arena->data + arena->runs[i].offset));
	arena->runs[i].live = false;
	arena->used -= arena->runs[i].bytes;
	if (i + 1 < arena->n && !arena->runs[i + 1].live)
		join(arena, i);
	if (i && !arena->runs[i - 1].live)
		join(arena, i - 1);
	return 0;
}

int offstage_arena_free(struct offstage_arena *arena, void *piece)
{
	int ret = check(arena);

	if (ret || !piece)
		return ret;
	pthread_mutex_lock(&arena->lock);
	ret = give(arena, piece);
	pthread_mutex_unlock(&arena->lock);
	return ret;
}

void offstage_arena_usage(struct offstage_arena *arena, uint64_t *used, uint64_t *longest)
{
	bool dead = check(arena) != 0;

	if (!dead)
		pthread_mutex_lock(&arena->lock);
	if (used)
		*used = dead ? 0 : arena->used;
	if (longest)
		*longest = dead ? 0 : longest_free(arena);
	if (!dead)
		pthread_mutex_unlock(&arena->lock);
}
