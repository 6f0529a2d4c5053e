# SPDX-License-Identifier: MIT
"""Checkpoints: both ways with torch.optim's, resumed bit by bit, loaded in place."""

import collections
import copy
import gc
import io
import pickle

import pytest

torch = pytest.importorskip("torch")

import offstage  # noqa: E402
from training import assert_same, loss_of, same_bits, set_gradients, snapshot, train, twins  # noqa: E402

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])


def saved(thing):
    """Through torch.save and torch.load, as a checkpoint goes."""
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file)


def bits(m):
    return [p.detach().clone() for p in m.parameters()]


@DTYPES
@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=["fp32-moments", "bf16-moments"])
def test_a_resumed_run_is_the_same_run(model, dtype, order, moments):
    model = model.to(dtype)
    options = dict(lr=1e-2, moment_dtype=moments, stochastic_rounding=moments != torch.float32, seed=4)
    optimizer = offstage.AdamW(model.parameters(), **options)
    train(model, optimizer, 3)
    checkpoint = saved(dict(model=model.state_dict(), optimizer=optimizer.state_dict()))
    losses = train(model, optimizer, 3, first=3)

    torch.manual_seed(99)
    other = copy.deepcopy(model)
    for p in other.parameters():
        torch.nn.init.normal_(p)
    resumed = offstage.AdamW(other.parameters(), **options)
    train(other, resumed, 2, first=50)
    for part in (("model", "optimizer") if order == "model first" else ("optimizer", "model")):
        (other if part == "model" else resumed).load_state_dict(checkpoint[part])
    assert train(other, resumed, 3, first=3) == losses
    for p, q in zip(model.parameters(), other.parameters()):
        assert same_bits(p, q)
    assert_same(snapshot(optimizer), snapshot(resumed))


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_torch_loads_ours_and_goes_on(model, name):
    ours, theirs = twins(model)
    a = getattr(offstage, name)(ours.parameters(), lr=1e-2)
    train(ours, a, 3)
    theirs.load_state_dict(ours.state_dict())
    b = getattr(torch.optim, name)(theirs.parameters())
    b.load_state_dict(saved(a.state_dict()))
    assert b.param_groups[0]["lr"] == 1e-2
    assert train(ours, a, 5, first=3) == pytest.approx(train(theirs, b, 5, first=3), rel=1e-4)
    for p, q in zip(ours.parameters(), theirs.parameters()):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_ours_loads_torchs_and_goes_on(model, name):
    ours, theirs = twins(model)
    b = getattr(torch.optim, name)(theirs.parameters(), lr=1e-2)
    train(theirs, b, 3)
    ours.load_state_dict(theirs.state_dict())
    a = getattr(offstage, name)(ours.parameters())
    a.load_state_dict(saved(b.state_dict()))
    back = a.state_dict()
    assert back["param_groups"] == b.state_dict()["param_groups"]
    for one, other in zip(back["state"].values(), b.state_dict()["state"].values()):
        assert set(one) == set(other)
        for key in one:
            assert torch.equal(one[key], torch.as_tensor(other[key]))
            assert one[key].dtype == other[key].dtype
    assert train(ours, a, 5, first=3) == pytest.approx(train(theirs, b, 5, first=3), rel=1e-4)


def test_torchs_16_bit_state_loads(model):
    theirs = model.bfloat16()
    b = torch.optim.AdamW(theirs.parameters())
    train(theirs, b, 3)
    ours = copy.deepcopy(theirs)
    a = offstage.AdamW(ours.parameters())
    train(ours, a, 2)
    ours.load_state_dict(theirs.state_dict())
    a.load_state_dict(b.state_dict())
    state = a.state_dict()["state"]
    for k, p in enumerate(theirs.parameters()):
        assert same_bits(state[k]["master"], p.detach().float())  # no low bits of the run before
        assert torch.equal(state[k]["exp_avg"], b.state[p]["exp_avg"].float())


def test_16_bit_masters_are_saved_and_fp32_ones_are_not(model):
    a = offstage.AdamW(model.parameters())
    train(model, a, 1)
    assert all("master" not in e for e in a.state_dict()["state"].values())
    half = copy.deepcopy(model).bfloat16()
    b = offstage.AdamW(half.parameters())
    train(half, b, 1)
    for e in b.state_dict()["state"].values():
        assert e["master"].dtype == e["exp_avg"].dtype == torch.float32


def test_torch_keeps_going_with_our_16_bit_checkpoint(model):
    ours = model.bfloat16()
    a = offstage.AdamW(ours.parameters())
    train(ours, a, 2)
    theirs = copy.deepcopy(ours)
    b = torch.optim.AdamW(theirs.parameters())
    b.load_state_dict(a.state_dict())
    train(theirs, b, 2, first=2)
    ours.load_state_dict(theirs.state_dict())
    a.load_state_dict(b.state_dict())  # with torch's copies of old masters, which the parameters overrule
    a.param_groups[0]["lr"] = 0.0
    train(ours, a, 1)
    for p, q in zip(ours.parameters(), theirs.parameters()):
        assert same_bits(p, q)


def test_loading_takes_no_second_copy(model):
    """In place: the process doesn't grow by another state while it loads."""
    p = torch.nn.Parameter(torch.zeros(4 << 20))
    a = offstage.AdamW([p])
    p.grad = torch.ones_like(p)
    a.step()
    state = a.state_dict()

    def resident():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))

    a.load_state_dict(state)
    with open("/proc/self/clear_refs", "w") as refs:
        try:
            refs.write("5")  # resets the peak
        except OSError:
            pytest.skip("this kernel has no resettable VmHWM")
    before = resident()
    a.load_state_dict(state)
    with open("/proc/self/status") as status:
        peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    assert peak - before < 8 * 1024  # KiB; one array of the state has 16 MiB


def test_what_does_not_fit_changes_nothing(model):
    a = offstage.AdamW(model.parameters())
    train(model, a, 2)
    before = snapshot(a)
    good = a.state_dict()
    cases = []
    bad = copy.deepcopy(good)
    bad["state"][3]["exp_avg"] = torch.zeros(7)
    cases.append((bad, "shape"))
    bad = copy.deepcopy(good)
    del bad["state"][5]["exp_avg_sq"]
    cases.append((bad, "exp_avg_sq"))
    bad = copy.deepcopy(good)
    bad["param_groups"].append(bad["param_groups"][0])
    cases.append((bad, "groups"))
    bad = copy.deepcopy(good)
    bad["param_groups"][0]["params"] = bad["param_groups"][0]["params"][:-1]
    cases.append((bad, "parameters"))
    bad = copy.deepcopy(good)
    bad["param_groups"][0]["amsgrad"] = True
    cases.append((bad, "amsgrad"))
    for bad, sentence in cases:
        with pytest.raises(ValueError, match=sentence):
            a.load_state_dict(bad)
        assert_same(before, snapshot(a))


def test_a_parameter_without_an_entry_starts_anew(model):
    a = offstage.AdamW(model.parameters())
    train(model, a, 2)
    state = a.state_dict()
    del state["state"][2]
    a.load_state_dict(state)
    assert 2 not in a.state_dict()["state"]
    train(model, a, 1)
    assert [float(e["step"]) for _, e in sorted(a.state_dict()["state"].items())] == [3, 3, 1, 3, 3, 3]


def test_per_parameter_steps_round_trip():
    ps = [torch.nn.Parameter(torch.ones(5)) for _ in range(3)]
    a = offstage.AdamW(ps)
    for k in range(4):
        for p in ps:
            p.grad = None
        set_gradients(ps[: 1 + k % 2], k)
        a.step()
    state = a.state_dict()
    assert {k: float(e["step"]) for k, e in state["state"].items()} == {0: 4, 1: 2}
    b = offstage.AdamW([torch.nn.Parameter(torch.ones(5)) for _ in range(3)])
    b.load_state_dict(state)
    assert {k: float(e["step"]) for k, e in b.state_dict()["state"].items()} == {0: 4, 1: 2}


def test_state_of_a_frozen_parameter_is_kept(model):
    a = offstage.AdamW(model.parameters())
    train(model, a, 2)
    state = a.state_dict()
    other = copy.deepcopy(model)
    other[1].requires_grad_(False)
    b = offstage.AdamW(other.parameters())
    b.load_state_dict(state)
    train(other, b, 1)
    after = b.state_dict()["state"]
    assert float(after[1]["step"]) == 2 and float(after[0]["step"]) == 3
    assert same_bits(after[1]["exp_avg"], state["state"][1]["exp_avg"])


@DTYPES
@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
@pytest.mark.parametrize("drain", ["step", "backward"])
def test_copies_go_on_alike_and_apart(model, dtype, how, drain):
    model = model.to(dtype)
    a = offstage.AdamW(model.parameters(), lr=1e-2, drain=drain, max_grad_norm=1.0)
    train(model, a, 3)
    if how == "pickle":
        other, b = pickle.loads(pickle.dumps((model, a)))
    else:
        other, b = copy.deepcopy((model, a))
    assert b.param_groups[0]["params"][0] is next(other.parameters())
    losses = train(model, a, 3, first=3)
    assert train(other, b, 3, first=3) == losses
    assert_same(snapshot(a), snapshot(b))
    train(model, a, 1)
    assert b.last_step.norm == b.last_step.norm
    assert not same_bits(next(model.parameters()), next(other.parameters()))


def test_a_scheduled_optimizer_can_be_copied(model):
    a = offstage.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(a, 1, 0.5)
    train(model, a, 1)
    scheduler.step()
    b = pickle.loads(pickle.dumps(a))
    assert b.param_groups[0]["lr"] == 5e-3


def test_asking_in_the_middle_of_a_step_is_refused(model):
    a = offstage.AdamW(model.parameters(), drain="backward")
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match="between step"):
        a.state_dict()
    a.step()
    a.state_dict()


def test_load_hooks_run_once_where_torch_has_them(model):
    a = offstage.AdamW(model.parameters())
    if not hasattr(a, "register_load_state_dict_pre_hook"):
        pytest.skip("torch 1.13 has no state dict hooks (they came with 2.1)")
    train(model, a, 1)
    calls = []
    a.register_load_state_dict_pre_hook(lambda o, s: calls.append(("before", len(s["state"]))))
    a.register_load_state_dict_post_hook(lambda o: calls.append(("after", None)))
    a.register_state_dict_post_hook(lambda o, s: calls.append(("saved", len(s["state"]))))
    a.load_state_dict(a.state_dict())
    assert calls == [("saved", 6), ("before", 6), ("after", None)]


def test_a_checkpoint_of_many_steps_counts_right():
    p = torch.nn.Parameter(torch.ones(5))
    a = offstage.AdamW([p])
    set_gradients([p], 0)
    a.step()
    state = a.state_dict()
    state["state"][0]["step"] = torch.tensor(1e6)
    a.load_state_dict(state)
    a.step()
    assert float(a.state_dict()["state"][0]["step"]) == 1000001


def test_old_state_with_plain_numbers_as_steps_loads(model):
    a = offstage.AdamW(model.parameters())
    train(model, a, 2)
    state = a.state_dict()
    for e in state["state"].values():
        e["step"] = int(e["step"])
    a.load_state_dict(state)
    assert {float(e["step"]) for e in a.state_dict()["state"].values()} == {2.0}


def test_a_deleted_optimizer_gives_its_memory_back(model, clean):
    before = offstage.stats()["requested_bytes"]
    for drain in ("step", "backward"):
        a = offstage.AdamW(model.parameters(), drain=drain)
        scheduler = torch.optim.lr_scheduler.StepLR(a, 1)
        train(model, a, 2)
        scheduler.step()
        assert offstage.stats()["requested_bytes"] > before
        del a, scheduler
        gc.collect()
        assert offstage.stats()["requested_bytes"] == before


def test_setting_state_anew_forgets_it_as_in_torch(model):
    """optimizer.state = defaultdict(dict) and optimizer.state.clear() are how trainers start an optimizer anew."""
    for forget in (lambda o: setattr(o, "state", collections.defaultdict(dict)), lambda o: o.state.clear()):
        ours, theirs = twins(model)
        a, b = offstage.AdamW(ours.parameters(), lr=1e-2), torch.optim.AdamW(theirs.parameters(), lr=1e-2)
        for m, o in ((ours, a), (theirs, b)):
            train(m, o, 3)
            assert o.state
            forget(o)
            assert not o.state
            train(m, o, 3)
        for p, q in zip(ours.parameters(), theirs.parameters()):
            assert torch.allclose(p, q, rtol=1e-5, atol=1e-6)


def test_state_can_be_read_and_set_by_parameter_but_not_edited_in_place(model):
    optimizer = offstage.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 2)
    weight = model[1].weight
    saved = optimizer.state_dict()["state"]
    assert list(optimizer.state) == list(model.parameters()) and len(optimizer.state) == len(saved)
    entry = optimizer.state[weight]
    assert int(entry["step"]) == 2 and same_bits(entry["exp_avg"], saved[1]["exp_avg"])
    with pytest.raises(RuntimeError, match="[Ii]nplace update to inference tensor"):
        entry["exp_avg"].zero_()  # it's a copy: this would be lost in silence
    optimizer.state[weight] = dict(entry, exp_avg=torch.zeros_like(weight))
    after = optimizer.state_dict()["state"]
    assert not after[1]["exp_avg"].any() and same_bits(after[1]["exp_avg_sq"], saved[1]["exp_avg_sq"])
    assert same_bits(after[0]["exp_avg"], saved[0]["exp_avg"])
    del optimizer.state[weight]
    assert weight not in optimizer.state and optimizer.state.get(weight) is None
    with pytest.raises(ValueError, match="shape"):
        optimizer.state[weight] = dict(entry, exp_avg=torch.zeros(3))
    with pytest.raises(KeyError):
        optimizer.state[torch.nn.Parameter(torch.ones(2))] = dict(entry)


def test_distributed_checkpoints_of_torch_change_nothing(model):
    """Its get_optimizer_state_dict() steps with gradients of zero where it finds no state."""
    parts = pytest.importorskip("torch.distributed.checkpoint.state_dict")
    optimizer = offstage.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 2)
    optimizer.zero_grad()
    before = snapshot(optimizer)
    state = parts.get_optimizer_state_dict(model, optimizer)
    assert_same(before, snapshot(optimizer))
    train(model, optimizer, 2)
    parts.set_optimizer_state_dict(model, optimizer, state)
    after = snapshot(optimizer)
    for key, entry in before[1].items():
        for name, value in entry.items():
            assert same_bits(value.float(), after[1][key][name].float())
