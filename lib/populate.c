/* SPDX-License-Identifier: MIT */
/*
 * One ticket per extent: a thread draws pieces of the extents of its own node first, and then helps with the others,
 * so that the last node to finish has everybody's help. See populate.h.
 */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include "heap.h"
#include "populate.h"
#include "threads.h"
#include "topology.h"

#define PIECE ((uint64_t)32 << 20)	/* about 2 ms of zeroing: long beside a ticket, short beside a buffer */
#define THREADS_PER_NODE 16		/* clearing pages saturates a node's memory with fewer */
#define THREADS_MAX 128

struct populate_job {
	char *start;
	const struct placement_extent *extents;
	int n;
	_Atomic uint64_t next[PLACEMENT_EXTENTS];	/* bytes of each extent that were drawn */
	_Atomic int err;
	int (*fn)(void *arg, char *piece, uint64_t bytes);
	void *arg;
};

struct populate_thread {
	struct populate_job *job;
	uint32_t node;
	cpu_set_t cpus;
	pthread_t thread;
};

static void work_on(struct populate_job *job, int k, char *extent)
{
	uint64_t bytes = job->extents[k].bytes, at;

	while (!job->err && (at = atomic_fetch_add(&job->next[k], PIECE)) < bytes) {
		int none = 0, err = job->fn(job->arg, extent + at, bytes - at < PIECE ? bytes - at : PIECE);

		if (err)
			atomic_compare_exchange_strong(&job->err, &none, err);
	}
}

static void work(struct populate_job *job, uint32_t node)
{
	for (int others = 0; others < 2; others++) {
		char *extent = job->start;

		for (int k = 0; k < job->n; extent += job->extents[k++].bytes)
			if ((job->extents[k].node == node) != others)
				work_on(job, k, extent);
	}
}

static void *populate_thread(void *arg)
{
	struct populate_thread *self = arg;

	if (CPU_COUNT(&self->cpus))
		pthread_setaffinity_np(pthread_self(), sizeof(self->cpus), &self->cpus);
	work(self->job, self->node);
	return NULL;
}

/* CPUs near a node: its own, or all of the mask for one that has none, and for pages in turn. */
static unsigned near(uint32_t node, cpu_set_t *cpus)
{
	CPU_ZERO(cpus);
	if (node != PLACEMENT_INTERLEAVED)
		topology_node_cpus(node, cpus);
	if (!CPU_COUNT(cpus) && sched_getaffinity(0, sizeof(*cpus), cpus) < 0)
		return 1;
	return (unsigned)CPU_COUNT(cpus);
}

/* Starts threads for one node; returns how many threads there are now. */
static unsigned start_threads(struct populate_job *job, struct populate_thread *threads, unsigned n, uint32_t node,
			      uint64_t bytes, unsigned most)
{
	cpu_set_t cpus;
	unsigned wanted = near(node, &cpus);

	if (wanted > THREADS_PER_NODE)
		wanted = THREADS_PER_NODE;
	if (most && wanted > most)
		wanted = most;
	if (wanted > (bytes + PIECE - 1) / PIECE)
		wanted = (unsigned)((bytes + PIECE - 1) / PIECE);
	for (; wanted && n < THREADS_MAX; wanted--, n++) {
		threads[n] = (struct populate_thread){ .job = job, .node = node, .cpus = cpus };
		if (thread_start(&threads[n].thread, "offstage-fill", populate_thread, &threads[n]))
			break;
	}
	return n;
}

int populate_run(char *start, const struct placement_extent *extents, int n, struct trace_counters *counters,
		 int (*fn)(void *arg, char *piece, uint64_t bytes), void *arg)
{
	struct populate_job job = { .start = start, .extents = extents, .n = n, .fn = fn, .arg = arg };
	struct populate_thread *threads = NULL;
	unsigned n_threads = 0, quota;
	uint64_t total = 0;

	for (int k = 0; k < n; k++)
		total += extents[k].bytes;
	if (total >= 2 * PIECE)
		threads = heap_alloc(THREADS_MAX, sizeof(*threads));
	if (threads) {
		quota = topology_cpu_quota();
		for (int k = 0; k < n; k++) {
			uint64_t bytes = 0;
			bool seen = false;

			for (int i = 0; i < n; i++) {
				if (extents[i].node != extents[k].node)
					continue;
				seen |= i < k;
				bytes += extents[i].bytes;
			}
			if (!seen)
				n_threads = start_threads(&job, threads, n_threads, extents[k].node, bytes, quota);
		}
		count(&counters->threads, n_threads);
	}
	/*
	 * With threads on the right CPUs the caller only waits, unless none could be started. Where it runs matters for
	 * speed alone: policies of the mapping place the pages.
	 */
	if (!n_threads)
		work(&job, extents[0].node);
	for (unsigned i = 0; i < n_threads; i++)
		pthread_join(threads[i].thread, NULL);
	heap_free(threads);
	return job.err;
}
