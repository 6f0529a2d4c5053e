/* SPDX-License-Identifier: GPL-2.0 */
/* Tracepoints: what a person who looks into a running node wants to see. /sys/kernel/tracing/events/offstage */
#undef TRACE_SYSTEM
#define TRACE_SYSTEM offstage

#if !defined(OFFSTAGE_TRACE_H) || defined(TRACE_HEADER_MULTI_READ)
#define OFFSTAGE_TRACE_H

#include <linux/tracepoint.h>

DECLARE_EVENT_CLASS(offstage_buffer,
	TP_PROTO(u64 bytes, u64 huge, u64 from_pool),
	TP_ARGS(bytes, huge, from_pool),
	TP_STRUCT__entry(
		__field(u64, bytes)
		__field(u64, huge)
		__field(u64, from_pool)
	),
	TP_fast_assign(
		__entry->bytes = bytes;
		__entry->huge = huge;
		__entry->from_pool = from_pool;
	),
	TP_printk("bytes=%llu huge=%llu from_pool=%llu", __entry->bytes, __entry->huge, __entry->from_pool)
);

DEFINE_EVENT(offstage_buffer, offstage_create,
	TP_PROTO(u64 bytes, u64 huge, u64 from_pool),
	TP_ARGS(bytes, huge, from_pool));

DEFINE_EVENT(offstage_buffer, offstage_destroy,
	TP_PROTO(u64 bytes, u64 huge, u64 from_pool),
	TP_ARGS(bytes, huge, from_pool));

TRACE_EVENT(offstage_fault,
	TP_PROTO(unsigned long address, unsigned long at),
	TP_ARGS(address, at),
	TP_STRUCT__entry(
		__field(unsigned long, address)
		__field(unsigned long, at)
	),
	TP_fast_assign(
		__entry->address = address;
		__entry->at = at;
	),
	TP_printk("address=%#lx page=%lu", __entry->address, __entry->at)
);

TRACE_EVENT(offstage_reserve,
	TP_PROTO(int node, u64 wanted, u64 held),
	TP_ARGS(node, wanted, held),
	TP_STRUCT__entry(
		__field(int, node)
		__field(u64, wanted)
		__field(u64, held)
	),
	TP_fast_assign(
		__entry->node = node;
		__entry->wanted = wanted;
		__entry->held = held;
	),
	TP_printk("node=%d wanted=%llu held=%llu", __entry->node, __entry->wanted, __entry->held)
);

TRACE_EVENT(offstage_scrub,
	TP_PROTO(int node, unsigned long pages),
	TP_ARGS(node, pages),
	TP_STRUCT__entry(
		__field(int, node)
		__field(unsigned long, pages)
	),
	TP_fast_assign(
		__entry->node = node;
		__entry->pages = pages;
	),
	TP_printk("node=%d huge_pages=%lu", __entry->node, __entry->pages)
);

TRACE_EVENT(offstage_refuse,
	TP_PROTO(u64 bytes, long error, u32 limit),
	TP_ARGS(bytes, error, limit),
	TP_STRUCT__entry(
		__field(u64, bytes)
		__field(long, error)
		__field(u32, limit)
	),
	TP_fast_assign(
		__entry->bytes = bytes;
		__entry->error = error;
		__entry->limit = limit;
	),
	TP_printk("bytes=%llu error=%ld limit=%u", __entry->bytes, __entry->error, __entry->limit)
);

#endif

#undef TRACE_INCLUDE_PATH
#define TRACE_INCLUDE_PATH .
#undef TRACE_INCLUDE_FILE
#define TRACE_INCLUDE_FILE trace
#include <trace/define_trace.h>
