# SPDX-License-Identifier: MIT
"""shard=True: two ranks with half of the state each train as one process with all of it. Over gloo, on this machine."""

import json
import os
import pickle
import select
import subprocess
import sys
import textwrap

import pytest

torch = pytest.importorskip("torch")

import offstage  # noqa: E402
from training import loss_of  # noqa: E402

if not (torch.distributed.is_available() and getattr(torch.distributed, "is_gloo_available", lambda: True)()):
    pytest.skip("this torch has no gloo", allow_module_level=True)

# What each rank runs: it joins the others, and then executes the scripts that it is sent, one per line.
RANK = """
import json, pickle, sys, traceback, warnings
import torch, torch.distributed as dist
import offstage
from offstage import shard
from training import batch, loss_of, network, same_bits, set_gradients
torch.set_num_threads(1)
rank, world, where = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method="file://" + where + "/meet", rank=rank, world_size=world)

def halves(model, seed):
    x, y = batch(seed)
    part = slice(rank * 8 // world, (rank + 1) * 8 // world)
    return torch.nn.functional.cross_entropy(model(x[part]).flatten(0, 1), y[part].flatten())

def train(model, optimizer, steps, first=0):
    losses = []
    for seed in range(first, first + steps):
        optimizer.zero_grad()
        loss = halves(model, seed)
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / world)
    return losses

def done(result):
    with open(f"{where}/{rank}", "wb") as file:
        pickle.dump(result, file)
    dist.barrier()

for line in sys.stdin:
    try:
        exec(json.loads(line), dict(globals()))
        answer = ""
    except BaseException:
        answer = traceback.format_exc()
    print(json.dumps(answer), flush=True)
dist.destroy_process_group()
"""


class Ranks:
    """A group of processes, started once: importing torch takes longer than a test."""

    def __init__(self, world, where):
        self.where = where
        environment = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", OFFSTAGE_LOCAL_SIZE=str(world),
                           PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
        self.processes = [subprocess.Popen([sys.executable, "-c", RANK, str(rank), str(world), str(where)], env=environment,
                                           stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                          for rank in range(world)]

    def run(self, script):
        """Gives what each rank passed to done(), or fails with the first rank's traceback."""
        for process in self.processes:
            process.stdin.write(json.dumps(textwrap.dedent(script)) + "\n")
            process.stdin.flush()
        # One that failed leaves the others waiting for it in a collective: whoever answers first is heard first.
        waiting = {process.stdout: process for process in self.processes}
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], 120)
            assert ready, "the ranks hang"
            for stream in ready:
                line = stream.readline()
                assert line, f"a rank ended with status {waiting[stream].wait()}"
                answer = json.loads(line)
                assert not answer, answer
                del waiting[stream]
        return [pickle.loads((self.where / str(rank)).read_bytes()) for rank in range(len(self.processes))]

    def close(self, broken):
        for process in self.processes:
            if broken:
                process.kill()
            process.stdin.close()
            process.wait(60)
            process.stdout.close()


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    started = {}
    yield started, tmp_path_factory
    for group in started.values():
        group.close(broken=False)


@pytest.fixture
def ranks(groups):
    """Runs a script on every rank of a group; gives what each passed to done()."""
    started, directories = groups

    def run(script, world=2):
        if world not in started:
            started[world] = Ranks(world, directories.mktemp("ranks"))
        try:
            return started[world].run(script)
        except BaseException:
            started.pop(world).close(broken=True)
            raise

    return run


def alone(model, steps, dtype=torch.float32, **options):
    model = model.to(dtype)
    optimizer = offstage.AdamW(model.parameters(), lr=1e-2, **options)
    losses = []
    for seed in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, seed)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach().clone() for p in model.parameters()], optimizer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_two_ranks_train_as_one_process(ranks, model, dtype):
    script = f"""
        model = network(torch.{dtype})
        optimizer = offstage.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5, shard=True)
        losses = train(model, optimizer, 10)
        info = optimizer.info()
        done(dict(losses=losses, norm=optimizer.last_step.norm, elements=info["elements"],
                  parameters=[p.detach() for p in model.parameters()]))
    """
    got = ranks(script)
    losses, parameters, optimizer = alone(model, 10, getattr(torch, dtype), max_grad_norm=0.5)
    loose = dtype != "float32"
    assert got[0]["losses"] == pytest.approx(losses, rel=3e-2 if loose else 1e-5)
    assert got[0]["norm"] == got[1]["norm"] == pytest.approx(optimizer.last_step.norm, rel=5e-2 if loose else 1e-5)
    for p, q, r in zip(got[0]["parameters"], got[1]["parameters"], parameters):
        assert torch.equal(p, q)
        assert torch.allclose(p.float(), r.float(), rtol=2e-2 if loose else 1e-5, atol=1.2e-2 if loose else 1e-6)
    assert sum(g["elements"] for g in got) == optimizer.info()["elements"]
    assert abs(got[0]["elements"] - got[1]["elements"]) <= 1


def test_each_rank_has_half_of_the_bytes(ranks):
    got = ranks("""
        p = torch.nn.Parameter(torch.zeros(3 << 20))
        whole = offstage.AdamW([p])
        sharded = offstage.AdamW([p], shard=True)
        done((whole.info()["state_bytes"], sharded.info()["state_bytes"]))
    """)
    for whole, half in got:
        assert half <= 0.51 * whole


def test_windows_and_odd_worlds_change_nothing(ranks):
    got = ranks("""
        shard._WINDOW = 100
        model = network()
        optimizer = offstage.AdamW(model.parameters(), lr=1e-2, shard=True, subgroup=4096)
        small = train(model, optimizer, 4), [p.detach() for p in model.parameters()]
        assert len(optimizer._sharding.windows) > 10
        shard._WINDOW = 4 << 20
        model = network()
        optimizer = offstage.AdamW(model.parameters(), lr=1e-2, shard=True)
        large = train(model, optimizer, 4), [p.detach() for p in model.parameters()]
        # With three ranks the sum of a gradient may be taken in another order.
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(small[1], large[1]))
        done((small, large))
    """, world=3)
    for k in range(2):
        for p, q, r in zip(*(g[k][1] for g in got)):
            assert torch.equal(p, q) and torch.equal(q, r)


def test_missing_gradients_frozen_empty_and_late_parameters(ranks):
    """A parameter with a gradient on one rank only is updated with half of it; one with none anywhere is untouched."""
    got = ranks("""
        def parameters():
            return [torch.nn.Parameter(torch.full((n,), 1.0)) for n in (5, 0, 300, 7, 11)]
        ours, theirs = parameters(), parameters()
        ours[3].requires_grad_(False)
        a = offstage.AdamW(ours[:4], lr=0.1, shard=True)
        b = torch.optim.AdamW(theirs[:4], lr=0.1)
        for k in range(6):
            if k == 3:
                for o, ps in ((a, ours), (b, theirs)):
                    o.add_param_group(dict(params=ps[4:], lr=0.2))
                ours[3].requires_grad_(True)
            for i, (p, q) in enumerate(zip(ours, theirs)):
                p.grad = q.grad = None
                if i == 3 and k < 4 or i == 4 and k < 3 or i == 2 and k % 2:
                    continue
                only = i == 2 and rank == 1
                q.grad = torch.full_like(q, 0.5 * (k + 1)) if i == 2 else torch.full_like(q, float(k + 1))
                p.grad = None if only else torch.full_like(p, float(k + 1))
            a.step(), b.step()
        steps = {k: float(e["step"]) for k, e in a.state_dict()["state"].items()}
        wanted = {k: float(e["step"]) for k, e in b.state_dict()["state"].items()}
        assert steps == wanted, (steps, wanted)
        for p, q in zip(ours, theirs):
            assert torch.allclose(p, q, rtol=1e-5, atol=1e-6), (p, q)
        done(None)
    """)
    assert got == [None, None]


def test_all_ranks_skip_alike(ranks):
    got = ranks("""
        model = network()
        optimizer = offstage.AdamW(model.parameters(), shard=True, max_grad_norm=1.0)
        train(model, optimizer, 2)
        before = [p.detach().clone() for p in model.parameters()]
        halves(model, 3).backward()
        if rank == 1:
            list(model.parameters())[4].grad.view(-1)[0] = float("inf")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        told = optimizer.last_step
        assert all(same_bits(a, b) for a, b in zip(before, model.parameters()))
        scaler = offstage.LossScaler(4.0)
        optimizer.zero_grad()
        scaler.scale(halves(model, 4)).backward()
        if rank == 0:
            list(model.parameters())[0].grad.view(-1)[0] = float("nan")
        scaler.step(optimizer), scaler.update()
        train(model, optimizer, 1)
        done((told.skipped, told.nonfinite, len(caught), scaler.get_scale(), optimizer.last_step.skipped))
    """)
    assert got == [("nonfinite", "param.4", 1, 2.0, None)] * 2


def test_checkpoints_are_whole_and_move_between_worlds(ranks, model, tmp_path):
    losses, parameters, optimizer = alone(model, 4)
    torch.save(dict(model=model.state_dict(), optimizer=optimizer.state_dict()), tmp_path / "one")
    got = ranks(f"""
        checkpoint = torch.load({str(tmp_path / "one")!r})
        model = network()
        optimizer = offstage.AdamW(model.parameters(), shard=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        back = optimizer.state_dict()
        for k, entry in checkpoint["optimizer"]["state"].items():
            for name, value in entry.items():
                assert torch.equal(back["state"][k][name], value), (k, name)
        assert back["param_groups"] == checkpoint["optimizer"]["param_groups"]
        losses = train(model, optimizer, 4, first=4)
        import copy
        other_model, other = copy.deepcopy((model, optimizer))
        assert train(other_model, other, 2, first=8) == train(model, optimizer, 2, first=8)
        done(losses)
    """)
    more = []
    for seed in range(4, 8):
        optimizer.zero_grad()
        loss = loss_of(model, seed)
        loss.backward()
        optimizer.step()
        more.append(loss.item())
    assert got[0] == pytest.approx(more, rel=1e-5)


def test_a_run_starts_as_rank_0_has_it_and_ranks_must_agree(ranks):
    got = ranks("""
        p = torch.nn.Parameter(torch.full((10,), float(rank)))
        q = torch.nn.Parameter(torch.full((4, 6), float(rank))[:, ::2])
        optimizer = offstage.AdamW([p, q], lr=0.0, shard=True)
        assert not p.any() and not q.any()
        p.grad, q.grad = torch.ones_like(p), torch.ones(4, 3)
        optimizer.step()
        assert not p.any() and not q.any()
        try:
            offstage.AdamW([torch.nn.Parameter(torch.zeros(3 + rank))], shard=True)
        except RuntimeError as error:
            done(str(error))
    """)
    assert all("different parameters" in sentence for sentence in got)


def test_sharded_steps_allocate_nothing(ranks):
    got = ranks("""
        model = network()
        optimizer = offstage.AdamW(model.parameters(), shard=True)
        train(model, optimizer, 2)
        before = offstage.stats()
        train(model, optimizer, 20)
        after = offstage.stats()
        done({key: after[key] - before[key] for key in ("allocations", "buffers", "pins", "threads")})
    """)
    assert got == [dict(allocations=0, buffers=0, pins=0, threads=0)] * 2


def test_grad_scaler_is_refused(ranks):
    if not hasattr(torch, "amp") or not hasattr(torch.amp, "GradScaler"):
        pytest.skip("this torch has no GradScaler for the CPU (it came with 2.3)")
    got = ranks("""
        model = network()
        optimizer = offstage.AdamW(model.parameters(), shard=True)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(halves(model, 0)).backward()
        try:
            scaler.step(optimizer)
        except RuntimeError as error:
            done("LossScaler" in str(error))
    """)
    assert got == [True, True]
