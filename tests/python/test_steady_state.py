# SPDX-License-Identifier: MIT
"""Law 1, leaks, and forks: after the first step nothing is allocated, pinned, faulted or started."""

import gc
import os
import threading
import time
from ctypes import byref

import pytest

torch = pytest.importorskip("torch")

import offstage  # noqa: E402
from offstage import _lib  # noqa: E402
from training import set_gradients, train  # noqa: E402


def moved(before, after):
    return {key: after[key] - before[key] for key in ("allocations", "buffers", "pins", "threads")
            if after[key] != before[key]}


@pytest.mark.parametrize("options", [{}, dict(max_grad_norm=1.0), dict(drain="backward"),
                                     dict(drain="backward", early=True, nonfinite="apply"),
                                     dict(moment_dtype=torch.bfloat16), dict(subgroup=4096)],
                         ids=["plain", "clip", "backward", "early", "bf16-moments", "subgroups"])
def test_a_hundred_steps_allocate_pin_and_start_nothing(model, options, clean):
    optimizer = offstage.AdamW(model.parameters(), **options)
    train(model, optimizer, 2)
    before = offstage.stats()
    train(model, optimizer, 100)
    after = offstage.stats()
    assert moved(before, after) == {}
    assert after["steps"] - before["steps"] == 100
    count = sum(p.numel() for p in model.parameters())
    assert after["drained_bytes"] - before["drained_bytes"] == 100 * 4 * count  # law 2
    assert after["refilled_bytes"] - before["refilled_bytes"] == 100 * 4 * count


def test_16_bit_bytes_cross_once_in_their_own_type(clean):
    p = torch.nn.Parameter(torch.zeros(10000, dtype=torch.bfloat16))
    optimizer = offstage.AdamW([p])
    set_gradients([p], 0)
    before = offstage.stats()
    optimizer.step()
    after = offstage.stats()
    assert after["drained_bytes"] - before["drained_bytes"] == after["refilled_bytes"] - before["refilled_bytes"] == 20000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_hundred_steps_of_the_library_fault_nothing(dtype, clean):
    """Across the library's own calls, so that Python's and torch's memory isn't counted."""
    ps = [torch.nn.Parameter(torch.zeros(200000, dtype=dtype)) for _ in range(4)]
    optimizer = offstage.AdamW(ps, max_grad_norm=1.0)
    set_gradients(ps, 0)
    optimizer.step()
    lib, handle = _lib.lib, optimizer._handle
    calls = [(r.pieces[0][0], r.tensor.grad.data_ptr()) for r in optimizer._parameters]
    options = optimizer._step_options(optimizer._groups(), 1.0)
    result = _lib.StepResult()
    before, after = _lib.Stats(), _lib.Stats()

    def steps(n):
        for _ in range(n):
            for number, address in calls:
                lib.offstage_drain(handle, number, address, None)
            lib.offstage_step(handle, byref(options), byref(result))
            lib.offstage_wait(handle, _lib.ALL, None)

    context = optimizer.context.handle
    lib.offstage_stats(context, byref(after))
    steps(3)
    gc.disable()
    try:
        lib.offstage_stats(context, byref(before))
        steps(100)
        lib.offstage_stats(context, byref(after))
    finally:
        gc.enable()
    assert after.minor_faults - before.minor_faults == 0
    assert after.major_faults - before.major_faults == 0
    assert moved(before.as_dict(), after.as_dict()) == {}


def test_last_step_counts_faults(model):
    optimizer = offstage.AdamW(model.parameters())
    train(model, optimizer, 5)
    faults = []
    for seed in range(100):
        train(model, optimizer, 1, first=seed)
        faults.append(optimizer.last_step.minor_faults)
    assert sorted(faults)[50] == 0 and sum(faults) <= 10  # Python's own heap may grow by a page while it counts


def threads():
    return len(os.listdir("/proc/self/task"))


def threads_fall_to(n):
    """One that has been joined is there until it has ended."""
    for _ in range(10000):
        if threads() <= n:
            return True
        time.sleep(0.001)
    return False


def test_many_optimizers_leave_nothing_behind(model, clean):
    context = offstage.Context(threads=1)
    first = None
    for _ in range(20):
        optimizer = offstage.AdamW(model.parameters(), context=context, link=dict(latency=1e-6))
        train(model, optimizer, 1)
        optimizer.close()
        del optimizer
        gc.collect()
        stats = context.stats()
        here = stats["requested_bytes"], stats["backed_bytes"], stats["locked_bytes"], len(os.listdir("/proc/self/fd"))
        if not first:
            first, few = here, threads()
        assert here == first
        assert threads_fall_to(few)
    assert stats["requested_bytes"] == 0


def test_a_failed_constructor_leaves_nothing_behind(clean):
    before, few = offstage.stats()["requested_bytes"], threads()
    good = torch.nn.Parameter(torch.zeros(10))
    bad = torch.nn.Parameter(torch.zeros(10, dtype=torch.float64))
    for params in ([good, bad], [dict(params=[good]), dict(params=[good])]):
        with pytest.raises(ValueError):
            offstage.AdamW(params)
    gc.collect()
    assert offstage.stats()["requested_bytes"] == before
    assert threads_fall_to(few)


@pytest.mark.parametrize("drain", ["step", "backward"])
def test_data_loader_workers_that_fork_work_beside_it(model, drain):
    optimizer = offstage.AdamW(model.parameters(), drain=drain)
    data = [(torch.tensor([k % 13]), torch.tensor(k % 13)) for k in range(16)]
    for _ in range(2):
        loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="fork", timeout=60)
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y).backward()
            optimizer.step()
    assert optimizer.last_step.skipped is None


def test_a_forked_child_cannot_step_and_can_leave(model):
    optimizer = offstage.AdamW(model.parameters())
    train(model, optimizer, 1)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            set_gradients(model.parameters(), 0)
            try:
                optimizer.step()
            except offstage.Error as error:
                assert error.errno == 10, error  # ECHILD
                optimizer.close()
                fresh = offstage.AdamW(model.parameters())
                set_gradients(model.parameters(), 1)
                fresh.step()
                status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    train(model, optimizer, 1)


def test_an_interpreter_that_exits_with_live_optimizers_exits(run):
    text = run("""
        import torch, offstage
        model = torch.nn.Linear(100, 100)
        optimizer = offstage.AdamW(model.parameters(), drain="backward", link=dict(d2h=1e6))
        tensor = offstage.Buffer(100).torch()
        model(torch.ones(1, 100)).sum().backward()
        print("left")
    """)
    assert "left" in text and "Error" not in text and "Exception" not in text


def test_backward_on_several_threads_at_once(model):
    """Hooks run on the thread of their backward pass: here two models train at the same time on two threads."""
    import copy
    pairs = [(m, offstage.AdamW(m.parameters(), drain="backward")) for m in (model, copy.deepcopy(model))]
    losses = [None, None]

    def work(k):
        losses[k] = train(*pairs[k], 20)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert losses[0] == losses[1] and losses[0][-1] < losses[0][0] + 1


def test_the_trace_opens_as_json(model, tmp_path):
    import json
    context = offstage.Context(threads=1)
    optimizer = offstage.AdamW(model.parameters(), context=context)
    context.trace_start(1000)
    train(model, optimizer, 2)
    context.trace_save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())
    events = events["traceEvents"] if isinstance(events, dict) else events
    assert {"drain", "update", "refill"} <= {str(e.get("cat", e.get("name"))) for e in events} | {e["name"] for e in events}
