/* SPDX-License-Identifier: MIT */
/*
 * The threads that update: a pool of our own, started once, each pinned within the process's share of the CPUs, to those
 * of one node. OpenMP's settings have no effect on it, nor have other threads that pin themselves.
 */
#ifndef THREADS_H
#define THREADS_H

#include <pthread.h>
#include <sched.h>
#include <stddef.h>

struct threads;
struct trace;

/*
 * Starts one thread, as every thread of the library is: under its name, and with all signals blocked, because signals
 * of the program belong to its own threads. Returns 0 or a positive error number.
 */
int thread_start(pthread_t *thread, const char *name, void *(*body)(void *arg), void *arg);

/*
 * Starts the pool. wanted 0: the CPUs of the affinity mask (this rank's share, if local ranks share one mask), no more
 * than the cgroup's CPU quota allows. why (of size bytes) gets one line on how the number came about.
 */
int threads_create(unsigned wanted, struct trace *trace, struct threads **threads, char *why, size_t size);

/* Stops and joins the threads. After a fork, the child passes forked: nothing is joined, only freed. */
void threads_destroy(struct threads *threads, int forked);

unsigned threads_count(const struct threads *threads);	/* the caller of threads_run() included */

/*
 * Calls fn(arg, i) for every i < n, on the pool and on the caller, in the default floating-point environment, and
 * returns when all are done. Callers take turns. fn must not call threads_run(). Allocates nothing.
 */
void threads_run(struct threads *threads, void (*fn)(void *arg, size_t i), void *arg, size_t n);

/*
 * For a thread of the library that calls threads_run() often: keeps it within the share, on the CPUs of its first
 * node, and gives it the default floating-point environment.
 */
void threads_seat_self(const struct threads *threads);

#endif
