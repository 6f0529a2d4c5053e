/* SPDX-License-Identifier: MIT */
/* The host backend: streams and events in order, the emulated link's name, failures. */
#include <semaphore.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "unit.h"
#include "../../lib/context.h"
#include "../../lib/device.h"
#include "../../lib/heap.h"

static struct offstage *ctx;
static struct offstage_device *device;

static int set_up(void **unused)
{
	struct offstage_device_options link = { .size = sizeof(link), .backend = "host" };

	(void)unused;
	OK(offstage_open(NULL, &ctx));
	OK(offstage_device_open(ctx, &link, &device));
	return 0;
}

static int tear_down(void **unused)
{
	(void)unused;
	OK(offstage_device_close(device));
	offstage_close(ctx);
	return 0;
}

static int order[3000];
static int order_n;

static void note(void *number)
{
	order[order_n++] = (int)(intptr_t)number;
}

static void test_stream_works_in_order(void **unused)
{
	struct offstage_stream *stream;

	(void)unused;
	order_n = 0;
	OK(offstage_stream_create(device, &stream));
	for (int i = 0; i < 3000; i++)		/* more than the queue holds */
		OK(offstage_stream_call(stream, note, (void *)(intptr_t)i));
	OK(offstage_stream_wait(stream));
	assert_int_equal(order_n, 3000);
	for (int i = 0; i < 3000; i++)
		assert_int_equal(order[i], i);
	offstage_stream_close(stream);
}

static void test_closing_a_stream_finishes_its_work(void **unused)
{
	struct offstage_stream *stream;

	(void)unused;
	order_n = 0;
	OK(offstage_stream_create(device, &stream));
	for (int i = 0; i < 100; i++)
		OK(offstage_stream_call(stream, note, (void *)(intptr_t)i));
	offstage_stream_close(stream);
	assert_int_equal(order_n, 100);
}

static sem_t gate;

static void wait_at_gate(void *unused)
{
	(void)unused;
	sem_wait(&gate);
}

static void test_stream_waits_for_another_ones_event(void **unused)
{
	const struct device_ops *ops = device->ops;
	struct offstage_stream *first, *second;
	struct event *event;

	(void)unused;
	sem_init(&gate, 0, 0);
	order_n = 0;
	OK(offstage_stream_create(device, &first));
	OK(offstage_stream_create(device, &second));
	OK(ops->event_create(device, &event));
	OK(ops->stream_wait(second, event));	/* never recorded: nothing to wait for */
	OK(offstage_stream_wait(second));
	OK(offstage_stream_call(first, wait_at_gate, NULL));
	OK(offstage_stream_call(first, note, (void *)1));
	OK(ops->event_record(event, first));
	OK(ops->stream_wait(second, event));
	OK(offstage_stream_call(second, note, (void *)2));
	assert_int_equal(ops->event_done(event), 0);
	sem_post(&gate);
	OK(offstage_stream_wait(second));
	assert_int_equal(ops->event_done(event), 1);
	assert_int_equal(order_n, 2);
	assert_int_equal(order[0], 1);
	assert_int_equal(order[1], 2);
	ops->event_destroy(event);
	offstage_stream_close(first);
	offstage_stream_close(second);
}

static void test_copies_arrive_whole_through_any_link(void **unused)
{
	static const uint64_t speeds[] = { 0, 50000000, 3000000000 };
	static const size_t sizes[] = { 0, 1, 262143, 262144, 262145, 1000003 };
	char *from = malloc(1000003), *to = malloc(1000004);

	(void)unused;
	for (size_t i = 0; i < 1000003; i++)
		from[i] = (char)(i * 7 + i / 1000);
	for (int k = 0; k < 3; k++) {
		struct offstage_device_options link = { .size = sizeof(link), .d2h_bytes_per_s = speeds[k],
							.h2d_bytes_per_s = speeds[k], .latency_ns = 1000 };
		struct offstage_stream *stream;
		struct offstage_device *d;

		OK(offstage_device_open(ctx, &link, &d));
		OK(offstage_stream_create(d, &stream));
		for (size_t s = 0; s < sizeof(sizes) / sizeof(*sizes); s++) {
			memset(to, 0x55, 1000004);
			OK(d->ops->copy(stream, s % 2 ? D2H : H2D, to, from, sizes[s]));
			OK(offstage_stream_wait(stream));
			assert_true(memcmp(to, from, sizes[s]) == 0);
			assert_int_equal(to[sizes[s]], 0x55);
		}
		offstage_stream_close(stream);
		OK(offstage_device_close(d));
	}
	free(from), free(to);
}

/* Not how long it took, but that a slow link's own clock ran: events are apart by at least what the bytes take. */
static void test_link_is_as_slow_as_it_was_told(void **unused)
{
	struct offstage_device_options link = { .size = sizeof(link), .h2d_bytes_per_s = 100000000, .latency_ns = 3000000 };
	struct offstage_stream *stream;
	struct offstage_device *d;
	struct event *begin, *end;
	char *from = calloc(1, 4000000), *to = malloc(4000000);

	(void)unused;
	OK(offstage_device_open(ctx, &link, &d));
	OK(offstage_stream_create(d, &stream));
	OK(d->ops->event_create(d, &begin));
	OK(d->ops->event_create(d, &end));
	OK(d->ops->event_record(begin, stream));
	OK(d->ops->copy(stream, H2D, to, from, 4000000));
	OK(d->ops->event_record(end, stream));
	OK(d->ops->event_wait(end));
	/* 40 ms, and 3 ms of latency, less the bucket's depth (1 ms and the latency). */
	assert_true(d->ops->event_ns(end) - d->ops->event_ns(begin) >= 39000000);
	d->ops->event_destroy(begin);
	d->ops->event_destroy(end);
	offstage_stream_close(stream);
	OK(offstage_device_close(d));
	free(from), free(to);
}

static void test_failed_copy_is_the_next_events_error_alone(void **unused)
{
	struct offstage_stream *stream;
	int x = 1, y = 0;

	(void)unused;
	OK(offstage_stream_create(device, &stream));
	host_fail_copy(1);
	OK(device->ops->copy(stream, D2H, &y, &x, sizeof(x)));
	REFUSED(offstage_stream_wait(stream), -EIO, "emulated link failed");
	assert_int_equal(y, 0);
	OK(device->ops->copy(stream, D2H, &y, &x, sizeof(x)));
	OK(offstage_stream_wait(stream));
	assert_int_equal(y, 1);
	offstage_stream_close(stream);
}

static void test_waiting_for_a_stream_allocates_nothing(void **unused)
{
	struct offstage_stream *stream;
	uint64_t before;

	(void)unused;
	OK(offstage_stream_create(device, &stream));
	before = heap_allocations();
	for (int i = 0; i < 100; i++)
		OK(offstage_stream_wait(stream));
	assert_int_equal(heap_allocations(), before);
	offstage_stream_close(stream);
}

static void test_name_says_that_the_link_is_emulated(void **unused)
{
	struct offstage_device_options link = { .size = sizeof(link), .d2h_bytes_per_s = 4000000000, .latency_ns = 10000 };
	struct offstage_device *d;

	(void)unused;
	OK(offstage_device_open(ctx, &link, &d));
	assert_string_equal(offstage_device_name(d), "host (emulated link: D2H 4 GB/s, H2D unlimited, 10 us)");
	OK(offstage_device_close(d));
}

static void test_device_in_use_is_not_closed(void **unused)
{
	struct offstage_device *d;
	struct offstage_stream *stream;

	(void)unused;
	OK(offstage_device_open(ctx, NULL, &d));
	OK(offstage_stream_create(d, &stream));
	REFUSED(offstage_device_close(d), -EBUSY, "close them first");
	offstage_stream_close(stream);
	OK(offstage_device_close(d));
	OK(offstage_device_close(NULL));
	offstage_stream_close(NULL);
}

static void test_child_of_fork_closes_in_any_order(void **unused)
{
	struct offstage_optimizer_options options = { .size = sizeof(options) };
	struct offstage_optimizer *o;
	struct offstage_device *d;
	struct offstage_stream *stream;
	int status;
	pid_t child;

	(void)unused;
	OK(offstage_device_open(ctx, NULL, &d));
	OK(offstage_stream_create(d, &stream));
	options.device = d;
	OK(offstage_optimizer_create(ctx, &options, &o));
	child = fork();
	if (child == 0) {
		alarm(30);
		if (offstage_device_close(d) != 0)
			_exit(1);
		offstage_stream_close(stream);
		offstage_optimizer_close(o);
		_exit(0);
	}
	assert_int_equal(waitpid(child, &status, 0), child);
	assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
	offstage_optimizer_close(o);
	offstage_stream_close(stream);
	OK(offstage_device_close(d));
}

static void test_bad_requests_are_refused(void **unused)
{
	struct offstage_device_options unknown = { .size = sizeof(unknown), .backend = "tpu" };
	struct offstage_device *d;
	struct offstage_stream *stream;

	(void)unused;
	REFUSED(offstage_device_open(ctx, &unknown, &d), -ENOENT, "'tpu'");
	assert_null(d);
	REFUSED(offstage_device_open(NULL, NULL, &d), -EINVAL, "NULL");
	REFUSED(offstage_device_open(ctx, NULL, NULL), -EINVAL, "no place");
	REFUSED(offstage_stream_create(NULL, &stream), -EINVAL, "NULL");
	REFUSED(offstage_stream_call(NULL, note, NULL), -EINVAL, "NULL");
	REFUSED(offstage_stream_wait(NULL), -EINVAL, "NULL");
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_stream_works_in_order),
		cmocka_unit_test(test_closing_a_stream_finishes_its_work),
		cmocka_unit_test(test_stream_waits_for_another_ones_event),
		cmocka_unit_test(test_copies_arrive_whole_through_any_link),
		cmocka_unit_test(test_link_is_as_slow_as_it_was_told),
		cmocka_unit_test(test_failed_copy_is_the_next_events_error_alone),
		cmocka_unit_test(test_waiting_for_a_stream_allocates_nothing),
		cmocka_unit_test(test_name_says_that_the_link_is_emulated),
		cmocka_unit_test(test_device_in_use_is_not_closed),
		cmocka_unit_test(test_child_of_fork_closes_in_any_order),
		cmocka_unit_test(test_bad_requests_are_refused),
	};

	return cmocka_run_group_tests(tests, set_up, tear_down);
}
