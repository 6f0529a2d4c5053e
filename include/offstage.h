/* SPDX-License-Identifier: MIT */
/*
 * offstage: the staging ground for training with an offloaded optimizer.
 *
 * The optimizer's state lives in host memory. A step has three stages, which overlap:
 *
 *	drain	gradients cross the link into staging slots, each byte once, in its own type
 *	update	Adam runs on the host, one pass over gradient and state
 *	refill	parameters cross the link back, in the order that was asked for
 *
 * Rules that hold for the whole interface:
 *
 * - A function that returns int gives 0 (or what its comment says), or a negative errno. On failure nothing is half
 *   done, and offstage_error() has one sentence: what was needed, what there was, what to do.
 * - Handles (struct offstage, offstage_buffer, …) are opaque. Structs that the caller fills start with `size`, which
 *   the caller sets to sizeof the struct; all other fields may be 0, which means the default. In an array of such
 *   structs, all have the same size. Unknown flags and unknown enum values are refused (-EINVAL). A struct that is
 *   longer than the library knows is taken if the rest is zero (-E2BIG if not).
 * - Structs that the library fills start with `size` too; it writes no more than that many bytes.
 * - Sizes are in bytes, counts in elements, times in nanoseconds unless the name says otherwise.
 * - Strings passed in are copied. Strings handed out belong to the library and live as long as their handle.
 * - Threads: functions on different handles may run at the same time; functions on one handle too, unless the comment
 *   says "one thread at a time".
 * - fork(): a child inherits handles only to close them. Closing releases the child's share and blocks on nothing;
 *   everything else answers -ECHILD there.
 */
#ifndef OFFSTAGE_H
#define OFFSTAGE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#ifdef __GNUC__
#pragma GCC visibility push(default)	/* exported, though the library is built with all else hidden */
#endif

#define OFFSTAGE_VERSION_MAJOR 0
#define OFFSTAGE_VERSION_MINOR 1
#define OFFSTAGE_VERSION_PATCH 0

#define OFFSTAGE_NODES_MAX 64	/* NUMA nodes that one placement may name */

struct offstage;		/* a context: limits, threads, provider */
struct offstage_buffer;		/* one allocation of staging memory */
struct offstage_arena;		/* many small pieces of one buffer */
struct offstage_device;		/* whose gradients are drained */
struct offstage_stream;		/* work of a device, done in order */
struct offstage_optimizer;	/* state, slots and the step over a list of tensors */

/* The version of the library that is loaded, as "0.1.0". */
const char *offstage_version(void);

/*
 * The sentence of the last failure in the calling thread ("" if there was none). It is valid until the next failing
 * call in this thread; success doesn't clear it.
 */
const char *offstage_error(void);

/* ---- values ---------------------------------------------------------------------------------------------------- */

enum offstage_dtype {
	OFFSTAGE_F32 = 0,	/* IEEE 754 binary32 */
	OFFSTAGE_BF16 = 1,	/* upper half of a binary32 */
	OFFSTAGE_F16 = 2,	/* IEEE 754 binary16 */
};

/* How much the caller wants something. DEFAULT means prefer for huge pages and require for locking. */
enum offstage_want {
	OFFSTAGE_DEFAULT = 0,
	OFFSTAGE_PREFER = 1,	/* take it if it can be had; the info says what was got */
	OFFSTAGE_REQUIRE = 2,	/* or fail */
	OFFSTAGE_NEVER = 3,
};

/* On which NUMA nodes a buffer's bytes lie. */
enum offstage_placement {
	OFFSTAGE_LOCAL = 0,	/* the node of the calling thread's CPU; no nodes are named */
	OFFSTAGE_BIND = 1,	/* one node: nodes[0] */
	OFFSTAGE_INTERLEAVE = 2,	/* page by page over nodes[] */
	OFFSTAGE_WEIGHTED = 3,	/* block by block over nodes[], in proportion to weights[] */
	OFFSTAGE_SPILL = 4,	/* nodes[0] as far as it has room, then nodes[1], and so on */
};

/* ---- context --------------------------------------------------------------------------------------------------- */

struct offstage_options {
	uint32_t size;
	uint32_t threads;	/* of the update; 0: see offstage_info.threads_why */
	const char *provider;	/* "kmod" (/dev/offstage), "user"; NULL: OFFSTAGE_PROVIDER, else the best there is */
	const char *isa;	/* "c", "avx2", "avx512", "avx512bf16", "neon"; NULL: OFFSTAGE_ISA, else the best there is */
	uint64_t budget;	/* hard ceiling of all buffers' backed bytes; 0: none */
	uint32_t lock;		/* enum offstage_want, for buffers that say DEFAULT */
	uint32_t reserved;
};

/*
 * Opens a context. options may be NULL. Threads are started here and nowhere later.
 * -ENOENT: no such provider or ISA in this build; -EOPNOTSUPP: the CPU lacks the ISA.
 */
int offstage_open(const struct offstage_options *options, struct offstage **ctx);

/*
 * Drops the caller's reference. Buffers, devices and optimizers made from the context keep it alive until they are
 * closed. NULL is fine.
 */
void offstage_close(struct offstage *ctx);

/* What was got: facts for people, scripts and bug reports. */
struct offstage_info {
	uint32_t size;
	uint32_t threads;	/* of the update, the calling thread included */
	char version[16];
	char provider[16];	/* "kmod" or "user" */
	char isa[16];		/* in use */
	char isas[96];		/* every ISA that this build has and this CPU runs, best first, separated by blanks */
	char threads_why[160];	/* how the number of threads came about */
	uint64_t budget;
	uint32_t page_size;	/* base page */
	uint32_t huge_page_size;	/* of transparent huge pages; 0: none */
	uint64_t hugetlb_free;	/* bytes in the default hugetlb pool that are free */
	uint64_t memlock_limit;	/* RLIMIT_MEMLOCK in bytes; UINT64_MAX: unlimited or CAP_IPC_LOCK */
	uint64_t memory_available;	/* least of MemAvailable and the cgroups' room */
	char thp[16];		/* /sys/kernel/mm/transparent_hugepage/enabled, the chosen word */
	char thp_shmem[16];	/* …/shmem_enabled, the chosen word */
	char memory_limit[96];	/* what memory_available comes from: "MemAvailable" or the cgroup's path */
};
int offstage_info(struct offstage *ctx, struct offstage_info *info);

struct offstage_node_info {
	uint32_t size;
	uint32_t node;		/* number, as in /sys/devices/system/node/nodeN */
	uint32_t cpus;		/* online CPUs; 0: memory only, for example CXL */
	uint32_t flags;		/* OFFSTAGE_NODE_* */
	uint64_t total;
	uint64_t available;	/* free now, with clean file cache */
	uint64_t huge_free;	/* bytes in free 2 MiB or larger blocks: what a huge page can be had from without compaction */
	uint64_t hugetlb_free;
};
#define OFFSTAGE_NODE_NORMAL	1u	/* has normal memory: long-term pins stay on it */
#define OFFSTAGE_NODE_ALLOWED	2u	/* in this process's cpuset mems */
/* Facts of the index-th online node with memory. -ENOENT: there are fewer. */
int offstage_node_info(struct offstage *ctx, uint32_t index, struct offstage_node_info *info);

/* A feature that a dependency adds, or an environment takes away. why says what is missing, or "" when it is on. */
struct offstage_feature {
	uint32_t size;
	uint32_t on;
	char name[24];
	char why[136];
};
/* The index-th feature of this build. -ENOENT: there are fewer. */
int offstage_feature(uint32_t index, struct offstage_feature *feature);

/*
 * Counters since the context was opened. Law 1 is checked with them: between two steps after the first, the first
 * block doesn't move.
 */
struct offstage_stats {
	uint32_t size;
	uint32_t reserved;

	uint64_t allocations;	/* heap allocations of the library in this process */
	uint64_t buffers;	/* buffers ever made */
	uint64_t pins;		/* ranges ever locked */
	uint64_t threads;	/* threads ever created */
	uint64_t minor_faults;	/* of the whole process, as getrusage counts them */
	uint64_t major_faults;

	uint64_t requested_bytes;	/* of live buffers */
	uint64_t backed_bytes;
	uint64_t locked_bytes;

	uint64_t steps;		/* that updated something */
	uint64_t steps_skipped;
	uint64_t drained_bytes;
	uint64_t refilled_bytes;
	uint64_t drain_ns;	/* time in which a drain copy was under way */
	uint64_t norm_ns;	/* reading gradients for norm and finite check, and accumulating */
	uint64_t update_ns;	/* time in which Adam ran */
	uint64_t refill_ns;	/* time in which a refill copy was under way */
	uint64_t overlap_ns;	/* time in which an update and a refill were under way together */
	uint64_t step_ns;	/* from offstage_step() to the last byte refilled */
};
int offstage_stats(struct offstage *ctx, struct offstage_stats *stats);

/*
 * Spans of drain, norm, update and refill, as a Chrome trace that Perfetto opens. trace_start keeps the first
 * `capacity` spans (0 stops and drops them); trace_save writes them to a file. Recording never allocates.
 */
int offstage_trace_start(struct offstage *ctx, uint32_t capacity);
int offstage_trace_save(struct offstage *ctx, const char *path);

/* ---- buffers --------------------------------------------------------------------------------------------------- */

struct offstage_buffer_options {
	uint32_t size;
	uint32_t flags;		/* OFFSTAGE_BUFFER_* */
	uint32_t huge;		/* enum offstage_want; DEFAULT is PREFER */
	uint32_t lock;		/* enum offstage_want; DEFAULT is the context's, which is REQUIRE by default */
	uint32_t placement;	/* enum offstage_placement */
	uint32_t n_nodes;
	const uint32_t *nodes;	/* n_nodes node numbers */
	const uint32_t *weights;	/* n_nodes weights of 1 to 1000 each, for WEIGHTED only */
};
/*
 * The buffer is a file that other processes can map (offstage_buffer_fd). Without this flag it may be private memory
 * where that gets huge pages and a file doesn't.
 */
#define OFFSTAGE_BUFFER_SHAREABLE	1u
/* A forked child doesn't inherit the mapping (MADV_DONTFORK): no page-table copies, no copy-on-write in the parent. */
#define OFFSTAGE_BUFFER_DONTFORK	2u

/*
 * Makes a zeroed buffer of `bytes` bytes: placed, populated by threads on the target nodes, locked, and checked page
 * by page. Costs `bytes` rounded up to its page size and no more. 0 bytes is a buffer with no memory. Never waits for
 * memory compaction: huge pages are used as far as free huge blocks go.
 *
 * Before anything is allocated, the limits are read and the first that is too small is named:
 * -EDQUOT: the context's budget; -EPERM: RLIMIT_MEMLOCK; -ENOMEM: memory, cgroup, node, or hugetlb pages;
 * -EXDEV: a node is outside the process's cpuset; -ENODEV: no such node, or it has no memory;
 * -EOPNOTSUPP: node has movable memory only, or this build can't place; -EINVAL: options;
 * -EREMOTEIO: pages were found on another node after locking; -ENOSR: huge pages were required and not got;
 * -EMFILE, -ENFILE: descriptors; -EFBIG: RLIMIT_FSIZE.
 */
int offstage_buffer_create(struct offstage *ctx, uint64_t bytes, const struct offstage_buffer_options *options,
			   struct offstage_buffer **buffer);

/*
 * Maps a buffer that another process made and passed as a file descriptor (which stays the caller's). Locked under
 * the context's rule. -EBADF, -EINVAL: not such a descriptor.
 */
int offstage_buffer_import(struct offstage *ctx, int fd, struct offstage_buffer **buffer);

/* Unmaps and closes. The memory returns to the system when no other process or descriptor has it. NULL is fine. */
void offstage_buffer_close(struct offstage_buffer *buffer);

/* The first byte, aligned to 2 MiB for buffers of 2 MiB and more and to the base page else; NULL for 0 bytes. */
void *offstage_buffer_data(struct offstage_buffer *buffer);

/* The descriptor, owned by the buffer: dup it or pass it on. -EOPNOTSUPP: it wasn't asked to be shareable. */
int offstage_buffer_fd(struct offstage_buffer *buffer);

struct offstage_buffer_info {
	uint32_t size;
	uint32_t flags;		/* as asked for */
	uint64_t requested;	/* bytes */
	uint64_t backed;	/* bytes it costs */
	uint64_t huge;		/* bytes in pages of 2 MiB or more */
	uint64_t locked;	/* bytes; 0 or backed */
	uint32_t page_size;	/* of the pages that hold most of it */
	uint32_t nodes;		/* on how many nodes bytes were found */
	char memory[16];	/* "kmod", "hugetlb", "shmem", "private" or "none" */
	char why[160];		/* why the pages are no larger, or it isn't locked; "" when all was got */
};
int offstage_buffer_info(struct offstage_buffer *buffer, struct offstage_buffer_info *info);

/* Bytes of the buffer on each node: bytes[node] for node < n. Read from the kernel at the call. */
int offstage_buffer_nodes(struct offstage_buffer *buffer, uint64_t *bytes, uint32_t n);

/*
 * An arena cuts one buffer into many pieces. It holds the buffer alive. Pieces are aligned to 64 bytes; a freed piece
 * joins its free neighbours. -ENOSPC: no free run is long enough (the sentence says which is the longest).
 */
int offstage_arena_create(struct offstage_buffer *buffer, struct offstage_arena **arena);
int offstage_arena_alloc(struct offstage_arena *arena, uint64_t bytes, void **piece);
/* -EINVAL: not the start of a live piece. */
int offstage_arena_free(struct offstage_arena *arena, void *piece);
/* Bytes in live pieces, and the longest free run. Either may be NULL. */
void offstage_arena_usage(struct offstage_arena *arena, uint64_t *used, uint64_t *longest_free);
/* Live pieces become invalid; the buffer is closed if nobody else has it. NULL is fine. */
void offstage_arena_close(struct offstage_arena *arena);

/* ---- devices --------------------------------------------------------------------------------------------------- */

/*
 * Backend "host": device memory is ordinary memory, and copies go through an emulated link with a bandwidth for each
 * direction and a latency per copy. For tests, and for machines with no accelerator.
 */
struct offstage_device_options {
	uint32_t size;
	uint32_t latency_ns;	/* emulated, per copy */
	const char *backend;	/* NULL: "host" */
	uint64_t d2h_bytes_per_s;	/* emulated; 0: as fast as memory copies go */
	uint64_t h2d_bytes_per_s;
};
/* -ENOENT: this build has no such backend. */
int offstage_device_open(struct offstage *ctx, const struct offstage_device_options *options,
			 struct offstage_device **device);
/* -EBUSY: a stream or an optimizer still uses it. NULL is fine. */
int offstage_device_close(struct offstage_device *device);
/* One line that says what it is: "host (emulated link: D2H 4.0 GB/s, H2D unlimited, 10 us)". */
const char *offstage_device_name(struct offstage_device *device);

int offstage_stream_create(struct offstage_device *device, struct offstage_stream **stream);
/* Waits for what was put on it. NULL is fine. */
void offstage_stream_close(struct offstage_stream *stream);
/* Waits for all that was put on the stream so far. Returns the first error of it. */
int offstage_stream_wait(struct offstage_stream *stream);
/*
 * Runs fn(arg) on the stream, in order with its copies: on the host backend this is how a kernel is emulated. fn must
 * not call functions of this library on the same stream.
 */
int offstage_stream_call(struct offstage_stream *stream, void (*fn)(void *arg), void *arg);

/* ---- Adam on the caller's memory --------------------------------------------------------------------------------- */

/*
 * Hyperparameters under PyTorch's names, all of them explicit: zero in a field means zero.
 * betas in [0, 1); lr, eps, weight_decay finite and not negative. -EINVAL else.
 */
struct offstage_group {
	uint32_t size;
	uint32_t flags;		/* OFFSTAGE_GROUP_* */
	double lr;
	double beta1;
	double beta2;
	double eps;
	double weight_decay;
};
#define OFFSTAGE_GROUP_L2	1u	/* weight decay as in torch.optim.Adam (added to the gradient), not AdamW */
#define OFFSTAGE_GROUP_MAXIMIZE	2u

/*
 * One update of n elements by the context's threads, as torch.optim.AdamW defines it (Loshchilov & Hutter, Decoupled
 * Weight Decay Regularization, algorithm 2), with fused multiply-add, and square root and division correctly rounded:
 *
 *	g = grad * grad_scale			(negated if MAXIMIZE; plus weight_decay * master if L2)
 *	master = master * (1 - lr * weight_decay)	(not if L2)
 *	exp_avg = exp_avg + (1 - beta1) * (g - exp_avg)
 *	exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g
 *	master = master - lr / (1 - beta1^t) * exp_avg / (sqrt(exp_avg_sq) / sqrt(1 - beta2^t) + eps)
 *	param = master, rounded to nearest even
 *
 * All arrays have n elements, need no alignment beyond their element's, and don't overlap, except that param may be
 * grad when both have elements of the same size.
 */
struct offstage_adam {
	uint32_t size;
	uint32_t flags;		/* OFFSTAGE_ADAM_* */
	uint64_t n;
	float *master;
	void *exp_avg;		/* of moment_dtype */
	void *exp_avg_sq;
	const void *grad;
	void *param;		/* may be NULL: no parameter is written */
	uint32_t moment_dtype;	/* F32 or BF16 */
	uint32_t grad_dtype;
	uint32_t param_dtype;
	uint32_t reserved;
	const struct offstage_group *group;
	double grad_scale;	/* clip factor over loss scale; 0 means 1 */
	uint64_t t;		/* this step's number, from 1 */
	uint64_t seed;		/* of stochastic rounding: the same seed, t and index give the same bits */
	uint64_t index;		/* of element 0 within its tensor, for stochastic rounding */
};
#define OFFSTAGE_ADAM_STOCHASTIC	1u	/* round bf16 moments stochastically */
#define OFFSTAGE_ADAM_CEILING	2u	/* the same loads and stores, no arithmetic: measures what memory allows. Writes back what it read; param is written with unspecified values */
int offstage_adam(struct offstage *ctx, const struct offstage_adam *adam);

/* ---- the optimizer --------------------------------------------------------------------------------------------- */

struct offstage_tensor {
	uint32_t size;
	uint32_t group;		/* index into offstage_step_options.groups */
	const char *name;	/* unique within the optimizer */
	uint64_t count;		/* elements; 0 is fine */
	uint32_t param_dtype;	/* enum offstage_dtype */
	uint32_t grad_dtype;
	void *param;		/* device address of the parameter: read once for the master, then refilled */
};

struct offstage_optimizer_options {
	uint32_t size;
	uint32_t flags;		/* OFFSTAGE_OPTIMIZER_* */
	struct offstage_device *device;	/* NULL: a host device with no limits, of the optimizer's own */
	uint64_t subgroup;	/* elements updated as one unit; 0: 16 Mi. Rounded up to a multiple of 4096 */
	uint32_t moment_dtype;	/* F32 or BF16 */
	uint32_t reserved;
	uint64_t seed;		/* of stochastic rounding */
	const char *tier;	/* where state rests: NULL or "dram" */
	const struct offstage_buffer_options *state;	/* placement of the state; NULL: defaults */
	const struct offstage_buffer_options *staging;	/* placement of the slots; NULL: defaults */
};
/* Gradients of micro-batches are summed on the host in fp32: a tensor may be drained many times before a step. */
#define OFFSTAGE_OPTIMIZER_ACCUMULATE	1u
#define OFFSTAGE_OPTIMIZER_STOCHASTIC	2u	/* stochastic rounding of bf16 moments */

/*
 * Makes an optimizer with no tensors. Functions that take an optimizer are for one thread at a time, except
 * offstage_drain() (so that hooks of a backward pass may run on several threads) and the two waits.
 */
int offstage_optimizer_create(struct offstage *ctx, const struct offstage_optimizer_options *options,
			      struct offstage_optimizer **optimizer);

/*
 * Adds n tensors, laid out in subgroups of their own: state and slots are allocated here and nowhere later, masters
 * are read from the device parameters (zero where param is NULL), moments and step counters are zero. Tensors are
 * numbered on from those added before. Between steps only: -EBUSY when gradients have been drained.
 */
int offstage_optimizer_add(struct offstage_optimizer *optimizer, const struct offstage_tensor *tensors, uint32_t n);

/* Waits for what is under way, then frees state and slots. NULL is fine. */
void offstage_optimizer_close(struct offstage_optimizer *optimizer);

struct offstage_optimizer_info {
	uint32_t size;
	uint32_t tensors;
	uint64_t elements;
	uint32_t subgroups;	/* each has a slot of its own */
	uint32_t reserved;
	uint64_t state_bytes;	/* of the tier */
	uint64_t slot_bytes;	/* gradients in, parameters out */
	uint64_t landing_bytes;	/* where micro-batches land before they are added; 0 if not ACCUMULATE */
	uint64_t huge;		/* of all of these, bytes in huge pages */
	uint64_t locked;
	char tier[16];
	char device[112];
};
int offstage_optimizer_info(struct offstage_optimizer *optimizer, struct offstage_optimizer_info *info);

#define OFFSTAGE_ALL UINT32_MAX	/* every tensor */

/* Tells where a parameter lies now (NULL: nowhere, it isn't refilled). Between steps only. */
int offstage_rebind(struct offstage_optimizer *optimizer, uint32_t tensor, void *param);

/* Reads the master of a tensor (or OFFSTAGE_ALL) anew from the device parameter: somebody else changed it. Blocks. */
int offstage_reload(struct offstage_optimizer *optimizer, uint32_t tensor);

/*
 * Drains a tensor's gradient: a copy is put in line behind what the stream holds at this moment (stream NULL: the
 * gradient is there already), and the call returns. The gradient must stay untouched until offstage_drain_wait().
 * As it lands, its sum of squares is taken in a fixed tree in double, and, with ACCUMULATE, it is added to the sum of
 * this step's earlier ones in fp32. A copy into a slot whose last refill is still under way starts after it.
 * -EALREADY: drained already and not ACCUMULATE.
 */
int offstage_drain(struct offstage_optimizer *optimizer, uint32_t tensor, const void *grad,
		   struct offstage_stream *stream);

/*
 * Waits until the gradient (of one tensor or OFFSTAGE_ALL) has left the device: its memory may be written again.
 * With a stream, the stream waits and the call returns.
 */
int offstage_drain_wait(struct offstage_optimizer *optimizer, uint32_t tensor, struct offstage_stream *stream);

/*
 * Ends the draining of this step: waits until all has landed. Tensors that were not drained have no gradient in this
 * step: their state, step counter and parameter stay as they are, as in PyTorch. sumsq (may be NULL) gets the sum of
 * squares of the gradients as drained (scaled), for a norm over several processes.
 */
int offstage_drain_finish(struct offstage_optimizer *optimizer, double *sumsq);

struct offstage_step_options {
	uint32_t size;
	uint32_t flags;		/* OFFSTAGE_STEP_* */
	const struct offstage_group *groups;
	uint32_t n_groups;
	uint32_t n_order;
	const uint32_t *order;	/* tensors in the order in which they are wanted back; the rest follow. NULL: by number */
	double loss_scale;	/* that the loss was multiplied with; 0 means 1 */
	double max_norm;	/* clip so that the norm of all gradients is at most this; 0: don't clip */
	double sumsq;		/* with SUMSQ_GIVEN: of all processes' gradients */
};
/* Gradients with Inf or NaN are applied as torch.optim does. Without this flag they skip the whole step. */
#define OFFSTAGE_STEP_APPLY_NONFINITE	1u
#define OFFSTAGE_STEP_SUMSQ_GIVEN	2u

enum offstage_skip {
	OFFSTAGE_NOT_SKIPPED = 0,
	OFFSTAGE_SKIP_NONFINITE = 1,	/* a gradient has Inf or NaN */
	OFFSTAGE_SKIP_EMPTY = 2,	/* no tensor was drained */
};

struct offstage_step_result {
	uint32_t size;
	uint32_t skipped;	/* enum offstage_skip; skipped: state and parameters are as they were, bit for bit */
	double norm;		/* of all gradients, unscaled, before clipping */
	double clip;		/* factor, 1 if not clipped: min(1, max_norm / (norm + 1e-6)), as in PyTorch */
	uint32_t updated;	/* tensors with a gradient */
	uint32_t nonfinite;	/* first tensor with Inf or NaN; OFFSTAGE_ALL: none */
};

/*
 * Decides and starts a step. offstage_drain_finish() is implied. When it returns, norm and skip are known and the
 * update is under way: subgroups are updated and refilled in the order asked, overlapped. Drained gradients are used
 * up, also when skipped. result may be NULL.
 */
int offstage_step(struct offstage_optimizer *optimizer, const struct offstage_step_options *options,
		  struct offstage_step_result *result);

/*
 * Announces this step's options before its last gradients are drained: each subgroup is then updated and refilled as
 * soon as the gradients of all its tensors have been drained once more, and offstage_step(optimizer, NULL, …) ends it.
 * With ACCUMULATE, call it before the last micro-batch (tensors that only earlier ones had a gradient of are updated at
 * the end); without, before the first gradient (-EBUSY else). For steps with no clipping (max_norm 0) whose gradients are
 * applied as they are (APPLY_NONFINITE): -EINVAL else, because neither can be known before the last gradient. Law 5 ends
 * here: what was updated can't be taken back.
 */
int offstage_step_early(struct offstage_optimizer *optimizer, const struct offstage_step_options *options);

/*
 * Waits until a parameter (or OFFSTAGE_ALL) has arrived on the device. With a stream, the stream waits and the call
 * returns once the copy is on its way. Returns the error of a copy that failed; masters are right all the same, and
 * offstage_refill() sends them again.
 */
int offstage_wait(struct offstage_optimizer *optimizer, uint32_t tensor, struct offstage_stream *stream);

/*
 * Sends parameters again, cast from the masters: after offstage_state_write(), or after a failed copy. order as in
 * a step; n tensors only (NULL: all). Asynchronous; ends with offstage_wait(). Between steps only: -EBUSY when
 * gradients have been drained.
 */
int offstage_refill(struct offstage_optimizer *optimizer, const uint32_t *order, uint32_t n);

/*
 * Drops what was drained since the last step. -EALREADY: offstage_step_early() has updated some of it; end the step.
 */
int offstage_abandon(struct offstage_optimizer *optimizer);

/* The number of a tensor by name. -ENOENT. */
int offstage_tensor_find(struct offstage_optimizer *optimizer, const char *name, uint32_t *tensor);

enum offstage_state {
	OFFSTAGE_MASTER = 0,
	OFFSTAGE_EXP_AVG = 1,
	OFFSTAGE_EXP_AVG_SQ = 2,
};
/*
 * Copies count elements of a tensor's state, from element `offset` on, out to or in from fp32 memory of the caller's:
 * a checkpoint goes through a buffer of any size. bf16 moments are widened exactly, and rounded to nearest even on
 * the way in. Waits for a step that is under way. -ERANGE: past the end; -EBUSY: gradients have been drained.
 */
int offstage_state_read(struct offstage_optimizer *optimizer, uint32_t tensor, enum offstage_state which,
			uint64_t offset, uint64_t count, float *out);
int offstage_state_write(struct offstage_optimizer *optimizer, uint32_t tensor, enum offstage_state which,
			 uint64_t offset, uint64_t count, const float *in);
/* The number of updates a tensor has had, from which its bias correction follows. */
int offstage_steps_get(struct offstage_optimizer *optimizer, uint32_t tensor, uint64_t *steps);
int offstage_steps_set(struct offstage_optimizer *optimizer, uint32_t tensor, uint64_t steps);

/* ---- dynamic loss scale ------------------------------------------------------------------------------------------ */

/* The rules and defaults of torch.amp.GradScaler. Plain data: save and restore it as it is. */
struct offstage_scaler {
	double scale;		/* 65536 */
	double growth_factor;	/* 2 */
	double backoff_factor;	/* 0.5 */
	uint32_t growth_interval;	/* 2000 */
	uint32_t good_steps;	/* in a row */
};
void offstage_scaler_init(struct offstage_scaler *scaler);
/* After each step: nonfinite backs off, growth_interval good steps in a row grow. */
void offstage_scaler_update(struct offstage_scaler *scaler, int nonfinite);

#ifdef __GNUC__
#pragma GCC visibility pop
#endif
#ifdef __cplusplus
}
#endif
#endif
