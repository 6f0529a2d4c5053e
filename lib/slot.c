/* SPDX-License-Identifier: MIT */
/*
 * Slots: who may touch a subgroup's staging memory.
 *
 *	free ──▶ filling ──▶ full ──▶ in use ──▶ draining ──▶ free
 *
 *	free		nobody
 *	filling		copies from the device, and the lander behind them
 *	full		nobody; a skipped or abandoned step goes back to free from here
 *	in use		the updater (from free, when parameters are only cast from their masters)
 *	draining	copies to the device
 *
 * A move from any other state than these is a fault: the optimizer stops for good rather than train on wrong bytes.
 * With OFFSTAGE_DEBUG=1 a free slot is full of 0xff (NaN in every type), which must be intact when it starts to fill;
 * gradients are checksummed as they land and verified before they are used; parameters are checksummed after the update
 * and verified when they have left.
 */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include "error.h"
#include "optimizer.h"

#define POISON 0xff

static const char *const state_names[] = { "free", "filling", "full", "in use", "draining" };

void optimizer_set_fault(struct offstage_optimizer *o, int err, const char *format, ...)
{
	va_list args;

	if (o->fault)
		return;		/* the first one is the cause */
	o->fault = err;
	va_start(args, format);
	vsnprintf(o->fault_text, sizeof(o->fault_text), format, args);
	va_end(args);
	pthread_cond_broadcast(&o->progress);
}

static bool poison_intact(const char *memory, uint64_t bytes)
{
	/* Each byte equal to the next, and the first as it should be. */
	return !bytes || ((unsigned char)memory[0] == POISON && memcmp(memory, memory + 1, bytes - 1) == 0);
}

void slot_move(struct offstage_optimizer *o, uint32_t subgroup, enum slot_state from, enum slot_state to)
{
	struct subgroup *g = &o->subgroups[subgroup];

	if (g->slot != from) {
		optimizer_set_fault(o, -EPROTO, "slot %u was to go from %s to %s and is %s: this is a fault of offstage; "
				    "the optimizer is stopped", subgroup, state_names[from], state_names[to],
				    state_names[g->slot]);
		return;
	}
	if (o->debug && to == SLOT_FREE)
		memset(g->memory, POISON, g->bytes);
	if (o->debug && from == SLOT_FREE && !poison_intact(g->memory, g->bytes))
		optimizer_set_fault(o, -EBADMSG, "slot %u was written to while it was free: somebody holds on to memory that "
				    "isn't theirs; the optimizer is stopped", subgroup);
	g->slot = to;
}

/* FNV-1a over 64-bit words: one wrong bit changes it. */
static uint64_t checksum(const char *memory, uint64_t bytes)
{
	uint64_t sum = 0xcbf29ce484222325u, word;

	for (; bytes >= sizeof(word); bytes -= sizeof(word), memory += sizeof(word)) {
		memcpy(&word, memory, sizeof(word));
		sum = (sum ^ word) * 0x100000001b3u;
	}
	word = 0;
	memcpy(&word, memory, bytes);
	return (sum ^ word) * 0x100000001b3u;
}

unsigned slot_pieces(uint64_t count)
{
	return (unsigned)((count + PIECE - 1) / PIECE);
}

static uint64_t gradient_checksum(struct offstage_optimizer *o, const struct segment *s, uint64_t start, uint64_t n)
{
	size_t size = adam_dtype_size(grad_dtype_in_slot(o, &o->tensors[s->tensor]));

	return checksum(slot_grad(o, s) + (start - s->start) * size, n * size);
}

void slot_seal_gradient(struct offstage_optimizer *o, const struct segment *s, uint64_t start, uint64_t n)
{
	s->checks[(start - s->start) / PIECE] = gradient_checksum(o, s, start, n);
}

bool slot_gradient_intact(struct offstage_optimizer *o, const struct segment *s)
{
	for (uint64_t at = 0; at < s->count; at += PIECE) {
		uint64_t n = s->count - at < PIECE ? s->count - at : PIECE;

		if (s->checks[at / PIECE] != gradient_checksum(o, s, s->start + at, n))
			return false;
	}
	return true;
}

static uint64_t parameter_checksum(struct offstage_optimizer *o, const struct segment *s)
{
	return checksum(slot_param(o, s), s->count * adam_dtype_size(o->tensors[s->tensor].param_dtype));
}

void slot_seal_parameter(struct offstage_optimizer *o, const struct segment *s)
{
	s->checks[slot_pieces(s->count)] = parameter_checksum(o, s);
}

bool slot_parameter_intact(struct offstage_optimizer *o, const struct segment *s)
{
	return s->checks[slot_pieces(s->count)] == parameter_checksum(o, s);
}
