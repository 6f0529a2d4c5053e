/* SPDX-License-Identifier: MIT */
/* The pool: how many threads, where, and that every index is done exactly once whoever calls. */
#include <fenv.h>
#include <float.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "unit.h"
#include "../entries.h"
#include "../../lib/threads.h"
#include "../../lib/trace.h"

static struct trace trace;
static char why[160];

static unsigned pool_of(unsigned wanted)
{
	struct threads *threads;
	unsigned n;

	OK(threads_create(wanted, &trace, &threads, why, sizeof(why)));
	n = threads_count(threads);
	threads_destroy(threads, 0);
	return n;
}

static unsigned mask_size(void)
{
	cpu_set_t mask;

	assert_int_equal(sched_getaffinity(0, sizeof(mask), &mask), 0);
	return (unsigned)CPU_COUNT(&mask);
}

static int clean_environment(void **unused)
{
	static const char *const names[] = { "OFFSTAGE_LOCAL_SIZE", "OFFSTAGE_LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK",
		"OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID",
		"MV2_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE",
		"SLURM_LOCALID", "OMP_NUM_THREADS", NULL };

	(void)unused;
	for (int i = 0; names[i]; i++)
		unsetenv(names[i]);
	return 0;
}

static _Atomic unsigned hits[100000];

static void hit(void *arg, size_t i)
{
	(void)arg;
	hits[i]++;
}

static void test_every_index_runs_once(void **unused)
{
	static const size_t sizes[] = { 0, 1, 2, 3, 1000, 100000 };

	(void)unused;
	for (unsigned n = 1; n <= 9; n += 4) {
		struct threads *threads;

		OK(threads_create(n, &trace, &threads, why, sizeof(why)));
		assert_int_equal(threads_count(threads), n);
		for (size_t s = 0; s < sizeof(sizes) / sizeof(*sizes); s++) {
			memset((void *)hits, 0, sizeof(hits));
			threads_run(threads, hit, NULL, sizes[s]);
			for (size_t i = 0; i < 100000; i++)
				assert_int_equal(hits[i], i < sizes[s]);
		}
		threads_destroy(threads, 0);
	}
}

static void *run_many(void *threads)
{
	for (int i = 0; i < 200; i++)
		threads_run(threads, hit, NULL, 50);
	return NULL;
}

static void test_callers_take_turns(void **unused)
{
	struct threads *threads;
	pthread_t callers[4];

	(void)unused;
	memset((void *)hits, 0, sizeof(hits));
	OK(threads_create(3, &trace, &threads, why, sizeof(why)));
	for (int i = 0; i < 4; i++)
		assert_int_equal(pthread_create(&callers[i], NULL, run_many, threads), 0);
	for (int i = 0; i < 4; i++)
		pthread_join(callers[i], NULL);
	for (int i = 0; i < 50; i++)
		assert_int_equal(hits[i], 800);
	threads_destroy(threads, 0);
}

static _Atomic unsigned wrong_mode;

static void look_at_mode(void *arg, size_t i)
{
	(void)arg, (void)i;
	if (fegetround() != FE_TONEAREST)
		wrong_mode++;
}

static void test_rounding_mode_of_the_caller_has_no_effect_and_is_kept(void **unused)
{
	struct threads *threads;

	(void)unused;
	wrong_mode = 0;
	fesetround(FE_UPWARD);		/* inherited by the workers, too */
	OK(threads_create(4, &trace, &threads, why, sizeof(why)));
	threads_run(threads, look_at_mode, NULL, 1000);
	threads_run(threads, look_at_mode, NULL, 1);
	assert_int_equal(wrong_mode, 0);
	assert_int_equal(fegetround(), FE_UPWARD);
	fesetround(FE_TONEAREST);
	threads_destroy(threads, 0);
}

static void test_number_is_that_of_the_mask(void **unused)
{
	(void)unused;
	setenv("OMP_NUM_THREADS", "1", 1);	/* launchers do */
	assert_in_range(pool_of(0), 1, mask_size());	/* a CPU quota may make it fewer */
	assert_non_null(strstr(why, "affinity mask"));
	assert_int_equal(pool_of(3), 3);
	assert_string_equal(why, "asked for");
}

static void test_local_ranks_share_one_mask(void **unused)
{
	static const struct { const char *size, *rank; } launchers[] = {
		{ "OFFSTAGE_LOCAL_SIZE", "OFFSTAGE_LOCAL_RANK" },
		{ "LOCAL_WORLD_SIZE", "LOCAL_RANK" },
		{ "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK" },
		{ "MPI_LOCALNRANKS", "MPI_LOCALRANKID" },
		{ "MV2_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_RANK" },
		{ "SLURM_TASKS_PER_NODE", "SLURM_LOCALID" },
	};
	unsigned whole = pool_of(0);

	(void)unused;
	if ((long)mask_size() * 2 <= sysconf(_SC_NPROCESSORS_ONLN))
		SKIP("this process has %u of %ld CPUs: its mask counts as one of its own", mask_size(),
		     sysconf(_SC_NPROCESSORS_ONLN));
	for (size_t i = 0; i < sizeof(launchers) / sizeof(*launchers); i++) {
		clean_environment(NULL);
		setenv(launchers[i].size, i == 5 ? "2(x3)" : "2", 1);
		setenv(launchers[i].rank, "1", 1);
		assert_in_range(pool_of(0), 1, whole > 1 ? (whole + 1) / 2 : 1);
		assert_non_null(strstr(why, launchers[i].size));
		setenv(launchers[i].size, "1000", 1);	/* more ranks than CPUs: one thread each */
		assert_int_equal(pool_of(0), 1);
		setenv(launchers[i].size, "rubbish", 1);
		assert_int_equal(pool_of(0), whole);
	}
}

static void *pinned_and_counting(void *result)
{
	cpu_set_t one;
	int cpu = sched_getcpu();

	CPU_ZERO(&one);
	CPU_SET(cpu < 0 ? 0 : cpu, &one);
	pthread_setaffinity_np(pthread_self(), sizeof(one), &one);
	*(unsigned *)result = pool_of(0);
	return NULL;
}

static void test_a_pinned_caller_does_not_shrink_the_pool(void **unused)
{
	unsigned whole = pool_of(0), pinned = 0;
	pthread_t thread;

	(void)unused;
	assert_int_equal(pthread_create(&thread, NULL, pinned_and_counting, &pinned), 0);
	pthread_join(thread, NULL);
	assert_int_equal(pinned, whole);
}

static void *blocked_signals(void *arg)
{
	pthread_sigmask(SIG_BLOCK, NULL, arg);
	return NULL;
}

static void test_signals_stay_with_the_programs_own_threads(void **unused)
{
	static const int signals[] = { SIGINT, SIGTERM, SIGCHLD, SIGALRM, SIGUSR1, SIGPROF };
	sigset_t before, after, inside;
	pthread_t thread;

	(void)unused;
	pthread_sigmask(SIG_BLOCK, NULL, &before);
	assert_int_equal(thread_start(&thread, "offstage-test", blocked_signals, &inside), 0);
	pthread_join(thread, NULL);
	pthread_sigmask(SIG_BLOCK, NULL, &after);
	for (size_t i = 0; i < sizeof(signals) / sizeof(*signals); i++) {
		assert_true(sigismember(&inside, signals[i]));
		assert_int_equal(sigismember(&after, signals[i]), sigismember(&before, signals[i]));
	}
}

static struct { pthread_mutex_t lock; cpu_set_t all; } seen = { .lock = PTHREAD_MUTEX_INITIALIZER };

static void look_at_affinity(void *arg, size_t i)
{
	cpu_set_t own;

	(void)arg, (void)i;
	usleep(1000);	/* so that each thread gets a turn */
	sched_getaffinity(0, sizeof(own), &own);
	pthread_mutex_lock(&seen.lock);
	CPU_OR(&seen.all, &seen.all, &own);
	pthread_mutex_unlock(&seen.lock);
}

static void test_threads_stay_within_the_mask(void **unused)
{
	struct threads *threads;
	cpu_set_t before, one, all;

	(void)unused;
	sched_getaffinity(0, sizeof(before), &before);
	CPU_ZERO(&one);
	for (int cpu = 0; cpu < CPU_SETSIZE && !CPU_COUNT(&one); cpu++)
		if (CPU_ISSET(cpu, &before))
			CPU_SET(cpu, &one);
	CPU_ZERO(&seen.all);
	OK(threads_create(5, &trace, &threads, why, sizeof(why)));
	threads_run(threads, look_at_affinity, NULL, 50);
	threads_destroy(threads, 0);
	CPU_OR(&all, &seen.all, &before);
	assert_true(CPU_EQUAL(&all, &before));	/* none outside */
#ifndef __SANITIZE_THREAD__	/* it has a thread of its own, which keeps the whole mask */
	/* As under taskset: the one thread that there is has a mask of one CPU. Those joined may be ending still. */
	for (int i = 0; i < 10000 && entries("/proc/self/task") > 1; i++)
		usleep(1000);
	assert_int_equal(entries("/proc/self/task"), 1);
	assert_int_equal(sched_setaffinity(0, sizeof(one), &one), 0);
	CPU_ZERO(&seen.all);
	OK(threads_create(5, &trace, &threads, why, sizeof(why)));
	threads_run(threads, look_at_affinity, NULL, 50);
	threads_destroy(threads, 0);
	sched_setaffinity(0, sizeof(before), &before);
	assert_true(CPU_EQUAL(&seen.all, &one));
#endif
}

static void test_too_many_threads_are_refused(void **unused)
{
	struct threads *threads;

	(void)unused;
	REFUSED(threads_create(100000, &trace, &threads, why, sizeof(why)), -EINVAL, "at most 512");
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup(test_every_index_runs_once, clean_environment),
		cmocka_unit_test_setup(test_callers_take_turns, clean_environment),
		cmocka_unit_test_setup(test_rounding_mode_of_the_caller_has_no_effect_and_is_kept, clean_environment),
		cmocka_unit_test_setup(test_number_is_that_of_the_mask, clean_environment),
		cmocka_unit_test_setup(test_local_ranks_share_one_mask, clean_environment),
		cmocka_unit_test_setup(test_a_pinned_caller_does_not_shrink_the_pool, clean_environment),
		cmocka_unit_test_setup(test_signals_stay_with_the_programs_own_threads, clean_environment),
		cmocka_unit_test_setup(test_threads_stay_within_the_mask, clean_environment),
		cmocka_unit_test_setup(test_too_many_threads_are_refused, clean_environment),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
