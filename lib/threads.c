/* SPDX-License-Identifier: MIT */
/*
 * The pool: a job is a function and a count; workers and the caller draw indexes from one atomic ticket until none is
 * left. Which thread gets which index is open: nothing that runs here may depend on it (law 4).
 *
 * The share of CPUs: the union of all threads' affinity masks (the calling thread alone may have been pinned by
 * somebody), divided by rank when several local ranks run on one mask, no more than the cgroup's quota.
 */
#include <dirent.h>
#include <errno.h>
#include <fenv.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "error.h"
#include "heap.h"
#include "threads.h"
#include "topology.h"
#include "trace.h"

#define THREADS_MAX 512		/* far beyond what any memory system needs */

struct threads {
	unsigned count;		/* the caller included */
	pthread_t *workers;	/* count - 1 of them */
	cpu_set_t share;	/* CPUs that are this process's to use */

	pthread_mutex_t turn;	/* callers of threads_run, one after another */

	pthread_mutex_t lock;	/* guards what follows */
	pthread_cond_t work, done;
	uint64_t job;		/* number of the job; a new number is new work */
	unsigned busy;		/* workers that aren't through with it */
	bool stop;
	void (*fn)(void *arg, size_t i);
	void *arg;
	size_t n;

	_Atomic size_t next;	/* ticket */
};

int thread_start(pthread_t *thread, const char *name, void *(*body)(void *arg), void *arg)
{
	sigset_t all, before;
	int err;

	sigfillset(&all);
	pthread_sigmask(SIG_BLOCK, &all, &before);
	err = pthread_create(thread, NULL, body, arg);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (!err)
		pthread_setname_np(*thread, name);
	return err;
}

static void draw(struct threads *threads)
{
	size_t i;

	while ((i = atomic_fetch_add_explicit(&threads->next, 1, memory_order_relaxed)) < threads->n)
		threads->fn(threads->arg, i);
}

static void *worker(void *arg)
{
	struct threads *threads = arg;
	uint64_t seen = 0;

	/* The creator's rounding and flush-to-zero modes were inherited; Adam's bits must not depend on them. */
	fesetenv(FE_DFL_ENV);
	pthread_mutex_lock(&threads->lock);
	for (;;) {
		while (!threads->stop && threads->job == seen)
			pthread_cond_wait(&threads->work, &threads->lock);
		if (threads->stop)
			break;
		seen = threads->job;
		pthread_mutex_unlock(&threads->lock);
		draw(threads);
		pthread_mutex_lock(&threads->lock);
		if (--threads->busy == 0)
			pthread_cond_signal(&threads->done);
	}
	pthread_mutex_unlock(&threads->lock);
	return NULL;
}

void threads_run(struct threads *threads, void (*fn)(void *arg, size_t i), void *arg, size_t n)
{
	fenv_t caller;

	fegetenv(&caller);
	fesetenv(FE_DFL_ENV);
	if (n <= 1 || threads->count == 1) {
		for (size_t i = 0; i < n; i++)
			fn(arg, i);
		fesetenv(&caller);
		return;
	}
	pthread_mutex_lock(&threads->turn);
	pthread_mutex_lock(&threads->lock);
	threads->fn = fn;
	threads->arg = arg;
	threads->n = n;
	threads->next = 0;
	threads->busy = threads->count - 1;
	threads->job++;
	pthread_cond_broadcast(&threads->work);
	pthread_mutex_unlock(&threads->lock);

	draw(threads);

	pthread_mutex_lock(&threads->lock);
	while (threads->busy)
		pthread_cond_wait(&threads->done, &threads->lock);
	pthread_mutex_unlock(&threads->lock);
	pthread_mutex_unlock(&threads->turn);
	fesetenv(&caller);
}

unsigned threads_count(const struct threads *threads)
{
	return threads->count;
}

/* The first of the named environment variables that holds a number from min on; -1 if none does. */
static long environment_number(const char *const *names, long min, const char **found)
{
	for (; *names; names++) {
		const char *text = getenv(*names);
		char *end;
		long value;

		if (!text || !*text)
			continue;
		errno = 0;
		value = strtol(text, &end, 10);
		if (errno || (*end && *end != '(') || value < min || value > 1 << 20)
			continue;	/* another launcher's idea of a number; "8(x2)" is SLURM's */
		*found = *names;
		return value;
	}
	return -1;
}

/* CPUs that any thread of this process may run on: one of them may have been pinned, rarely all to the same CPU. */
static void process_mask(cpu_set_t *mask)
{
	DIR *tasks = opendir("/proc/self/task");
	struct dirent *entry;

	if (sched_getaffinity(0, sizeof(*mask), mask) != 0)
		CPU_ZERO(mask);
	while (tasks && (entry = readdir(tasks))) {
		pid_t tid = (pid_t)atoi(entry->d_name);
		cpu_set_t one;

		if (tid > 0 && sched_getaffinity(tid, sizeof(one), &one) == 0)
			CPU_OR(mask, mask, &one);
	}
	if (tasks)
		closedir(tasks);
	if (!CPU_COUNT(mask))
		CPU_SET(0, mask);
}

/* This process's share of the CPUs, and how many threads it is good for; why says how that came about. */
static unsigned share(cpu_set_t *cpus, char *why, size_t size)
{
	static const char *const size_names[] = { "OFFSTAGE_LOCAL_SIZE", "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE",
		"MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", NULL };
	static const char *const rank_names[] = { "OFFSTAGE_LOCAL_RANK", "LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK",
		"MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID", NULL };
	const char *size_from = "", *rank_from = "";
	long ranks = environment_number(size_names, 1, &size_from);
	long rank = environment_number(rank_names, 0, &rank_from);
	long online = sysconf(_SC_NPROCESSORS_ONLN);
	unsigned quota = topology_cpu_quota();
	unsigned first, last, allowed, n;
	cpu_set_t mask;

	process_mask(&mask);
	allowed = (unsigned)CPU_COUNT(&mask);
	first = 0;
	last = n = allowed;
	/* A launcher that bound each rank to CPUs of its own has done the division: then all of the mask is ours. */
	if (ranks > 1 && rank >= 0 && rank < ranks && (long)allowed * ranks > online) {
		first = (unsigned)((unsigned long)allowed * (unsigned long)rank / (unsigned long)ranks);
		last = (unsigned)((unsigned long)allowed * (unsigned long)(rank + 1) / (unsigned long)ranks);
		if (first == last)
			last = first + 1;	/* more ranks than CPUs: they share, one thread each */
		n = last - first;
		snprintf(why, size, "rank %ld of %ld (%s) on a mask of %u CPUs", rank, ranks, size_from, allowed);
	} else if (ranks > 1 && (long)allowed * ranks > online) {
		/* Which CPUs are ours isn't known: the whole mask, with fewer threads. */
		n = allowed / (unsigned)ranks ? allowed / (unsigned)ranks : 1;
		snprintf(why, size, "one of %ld local ranks (%s; no rank given) on a mask of %u CPUs", ranks, size_from, allowed);
	} else {
		snprintf(why, size, "affinity mask of %u CPUs", allowed);
	}
	if (quota && ranks > 1)
		quota = (quota + (unsigned)ranks - 1) / (unsigned)ranks;
	if (quota && n > quota) {
		size_t used = strlen(why);

		n = quota;
		snprintf(why + used, size - used, ", a CPU quota of %u", quota);
	}
	CPU_ZERO(cpus);
	for (unsigned cpu = 0, at = 0; cpu < CPU_SETSIZE; cpu++)
		if (CPU_ISSET(cpu, &mask) && at++ >= first && at <= last)
			CPU_SET(cpu, cpus);
	return n < THREADS_MAX ? n : THREADS_MAX;
}

/*
 * Where thread i of n stays: on the CPUs of one node, nodes taken in proportion. Not on one CPU: a trainer's own
 * threads, or another process, may keep that one busy, and a thread that can't move would hold up all the others.
 */
static void seat(const cpu_set_t *share, unsigned i, unsigned n, cpu_set_t *seat)
{
	unsigned wanted = i * (unsigned)CPU_COUNT(share) / n, cpu = 0, n_nodes;
	uint32_t nodes[TOPOLOGY_NODES_MAX];

	for (unsigned at = 0; cpu < CPU_SETSIZE; cpu++)
		if (CPU_ISSET(cpu, share) && at++ == wanted)
			break;
	n_nodes = topology_nodes(nodes, TOPOLOGY_NODES_MAX);
	for (unsigned k = 0; k < n_nodes && k < TOPOLOGY_NODES_MAX; k++) {
		cpu_set_t near;

		topology_node_cpus(nodes[k], &near);
		if (cpu < CPU_SETSIZE && CPU_ISSET(cpu, &near)) {
			CPU_AND(seat, &near, share);
			return;
		}
	}
	*seat = *share;
}

int threads_create(unsigned wanted, struct trace *trace, struct threads **out, char *why, size_t size)
{
	struct threads *threads;
	unsigned started = 0;
	int err = 0;

	if (wanted > THREADS_MAX)
		return fail(-EINVAL, "%u threads were asked for and at most %d make sense: ask for 0 to use this process's share "
			    "of the CPUs", wanted, THREADS_MAX);
	threads = heap_alloc(1, sizeof(*threads));
	if (!threads)
		return -ENOMEM;
	threads->count = share(&threads->share, why, size);
	if (wanted) {
		snprintf(why, size, "asked for");
		threads->count = wanted;
	}
	threads->workers = heap_alloc(threads->count, sizeof(*threads->workers));
	if (!threads->workers) {
		heap_free(threads);
		return -ENOMEM;
	}
	pthread_mutex_init(&threads->turn, NULL);
	pthread_mutex_init(&threads->lock, NULL);
	pthread_cond_init(&threads->work, NULL);
	pthread_cond_init(&threads->done, NULL);
	while (started + 1 < threads->count) {
		cpu_set_t cpus;

		err = thread_start(&threads->workers[started], "offstage-update", worker, threads);
		if (err)
			break;
		seat(&threads->share, started + 1, threads->count, &cpus);
		pthread_setaffinity_np(threads->workers[started], sizeof(cpus), &cpus);
		started++;
		count(&trace->counters.threads, 1);
	}
	if (err) {
		unsigned needed = threads->count - 1;

		threads->count = started + 1;
		threads_destroy(threads, 0);
		return fail(-err, "%u threads are needed and %u could be started (%s): raise RLIMIT_NPROC or the cgroup's "
			    "pids.max, or ask for fewer", needed, started, strerror(err));
	}
	*out = threads;
	return 0;
}

void threads_destroy(struct threads *threads, int forked)
{
	if (!forked) {
		pthread_mutex_lock(&threads->lock);
		threads->stop = true;
		pthread_cond_broadcast(&threads->work);
		pthread_mutex_unlock(&threads->lock);
		for (unsigned i = 0; i + 1 < threads->count; i++)
			pthread_join(threads->workers[i], NULL);
		pthread_cond_destroy(&threads->done);
		pthread_cond_destroy(&threads->work);
		pthread_mutex_destroy(&threads->lock);
		pthread_mutex_destroy(&threads->turn);
	}
	heap_free(threads->workers);
	heap_free(threads);
}

void threads_seat_self(const struct threads *threads)
{
	cpu_set_t cpus;

	fesetenv(FE_DFL_ENV);
	seat(&threads->share, 0, threads->count, &cpus);
	pthread_setaffinity_np(pthread_self(), sizeof(cpus), &cpus);
}
