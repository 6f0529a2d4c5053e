# SPDX-License-Identifier: MIT
"""
Training with offstage is training with torch.optim.

Tolerance for fp32: the library fuses multiply and add and torch doesn't, so each step may differ in the last bits:
parameters agree within 1e-6 + 1e-5 relative after 20 steps. 16-bit parameters are compared with what torch.optim does
to an fp32 master copy of them, rounded: equal but for elements on the border between two 16-bit values.
"""

import copy

import pytest

torch = pytest.importorskip("torch")

import offstage  # noqa: E402
from training import loss_of, same_bits, set_gradients, train, twins  # noqa: E402

CLASSES = [("AdamW", {}), ("Adam", {})]


def close(a, b):
    return torch.allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
@pytest.mark.parametrize("options", [{}, dict(weight_decay=0.1), dict(weight_decay=0.0, eps=1e-5, betas=(0.8, 0.95)),
                                     dict(maximize=True), dict(lr=0.0), dict(lr=torch.tensor(1e-3))],
                         ids=["defaults", "decay", "betas", "maximize", "lr0", "tensor-lr"])
def test_fp32_training_is_torchs(model, name, options):
    ours, theirs = twins(model)
    a = getattr(offstage, name)(ours.parameters(), **options)
    b = getattr(torch.optim, name)(theirs.parameters(), **options)
    losses = train(ours, a, 20), train(theirs, b, 20)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4, abs=1e-5)
    for p, q in zip(ours.parameters(), theirs.parameters()):
        assert close(p, q)
    for one, other in zip(a.state_dict()["state"].values(), b.state_dict()["state"].values()):
        assert one["step"] == other["step"] == 20
        assert close(one["exp_avg"], other["exp_avg"]) and close(one["exp_avg_sq"], other["exp_avg_sq"])


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_betas_of_zero_are_torchs(name):
    """Every update is then of length lr, so a model's own rounding would be blown up: here gradients are given."""
    start = torch.linspace(-1, 1, 501)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    a, b = (getattr(m, name)([p], betas=(0.0, 0.0)) for m, p in ((offstage, ours), (torch.optim, theirs)))
    for seed in range(10):
        set_gradients([ours], seed)
        set_gradients([theirs], seed)
        a.step()
        b.step()
    assert close(ours, theirs)


def test_defaults_are_torchs(model):
    for name in ("AdamW", "Adam"):
        ours = getattr(offstage, name)(model.parameters()).param_groups[0]
        theirs = getattr(torch.optim, name)(model.parameters()).param_groups[0]
        assert {k: v for k, v in ours.items() if k != "params"} == {k: v for k, v in theirs.items() if k != "params"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_16_bit_parameters_follow_an_fp32_master(dtype, name):
    torch.manual_seed(3)
    start = [torch.randn(40, 50), torch.randn(77)]
    ours = [torch.nn.Parameter(p.to(dtype)) for p in start]
    master = [torch.nn.Parameter(p.to(dtype).float()) for p in start]
    a = getattr(offstage, name)(ours, lr=1e-3, weight_decay=0.1)
    b = getattr(torch.optim, name)(master, lr=1e-3, weight_decay=0.1)
    for seed in range(20):
        set_gradients(ours, seed)
        for p, q in zip(ours, master):
            q.grad = p.grad.float()
        a.step()
        b.step()
    kept = a.state_dict()["state"]
    for k, (p, q) in enumerate(zip(ours, master)):
        assert close(kept[k]["master"], q.detach())
        assert same_bits(p.detach(), kept[k]["master"].to(dtype))  # rounded to nearest even, as torch rounds
        ulp = {torch.bfloat16: 2 ** -8, torch.float16: 2 ** -11}[dtype]
        assert ((p.float() - q).abs() <= ulp * q.abs() * 1.01 + 1e-7).all()


def test_small_updates_are_not_lost_in_16_bits():
    """What a master is for: 100 updates of 1e-4 on a weight of 1 are far below a bf16 step of 2^-8 each."""
    ours = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    plain = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    a = offstage.AdamW([ours], lr=1e-4, weight_decay=0)
    b = torch.optim.AdamW([plain], lr=1e-4, weight_decay=0)
    for _ in range(100):
        for p in (ours, plain):
            p.grad = torch.ones_like(p)
        a.step()
        b.step()
    assert (plain == 1).all()  # torch keeps bf16 parameters only
    assert ours.float().mean().item() == pytest.approx(0.99, abs=2 ** -9)


def test_mixed_types_and_groups_in_one_model():
    torch.manual_seed(1)
    start = [torch.randn(100), torch.randn(30, 3), torch.randn(17), torch.randn(5)]
    types = [torch.float32, torch.bfloat16, torch.float16, torch.float32]
    ours = [torch.nn.Parameter(p.to(t)) for p, t in zip(start, types)]
    master = [torch.nn.Parameter(p.to(t).float()) for p, t in zip(start, types)]

    def groups(ps):
        return [dict(params=ps[:2], lr=1e-2), dict(params=ps[2:], weight_decay=0.3, betas=(0.7, 0.8))]

    a, b = offstage.AdamW(groups(ours)), torch.optim.AdamW(groups(master))
    for seed in range(10):
        set_gradients(ours, seed)
        for p, q in zip(ours, master):
            q.grad = p.grad.float()
        a.step()
        b.step()
    for p, q, t in zip(ours, master, types):
        assert torch.allclose(p.float(), q, rtol=1e-5 if t == torch.float32 else 2 ** -8, atol=1e-5)


@pytest.mark.parametrize("subgroup", [4096, 8192, 0])
@pytest.mark.parametrize("threads", [1, 2])
def test_subgroups_and_threads_change_no_bit(subgroup, threads):
    torch.manual_seed(0)
    start = torch.randn(50000).bfloat16()
    results = []
    for options in (dict(), dict(subgroup=subgroup, context=offstage.Context(threads=threads))):
        p = torch.nn.Parameter(start.clone())
        optimizer = offstage.AdamW([p], max_grad_norm=1.0, **options)
        for seed in range(3):
            set_gradients([p], seed)
            optimizer.step()
        results.append((p, optimizer.last_step.norm, optimizer.state_dict()["state"][0]["exp_avg_sq"]))
    assert same_bits(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
    assert same_bits(results[0][2], results[1][2])


def test_an_emulated_link_changes_no_bit(model):
    ours, other = twins(model)
    a = offstage.AdamW(ours.parameters())
    b = offstage.AdamW(other.parameters(), link=dict(d2h=50e6, h2d=50e6, latency=20e-6))
    assert "emulated link" in b.info()["device"]
    assert train(ours, a, 3) == train(other, b, 3)
    for p, q in zip(ours.parameters(), other.parameters()):
        assert same_bits(p, q)


def test_norm_and_clipping_are_torchs(model):
    ours, theirs = twins(model)
    a = offstage.AdamW(ours.parameters(), max_grad_norm=0.05)
    b = torch.optim.AdamW(theirs.parameters())
    for seed in range(10):
        for m in (ours, theirs):
            m.zero_grad()
            (loss_of(m, seed) * 10).backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.05)
        a.step()
        b.step()
        assert a.last_step.norm == pytest.approx(norm.item(), rel=1e-5)
        assert a.last_step.clip == pytest.approx(0.05 / (norm.item() + 1e-6), rel=1e-5)
    for p, q in zip(ours.parameters(), theirs.parameters()):
        assert close(p, q)


def test_a_norm_below_the_limit_clips_nothing(model):
    optimizer = offstage.AdamW(model.parameters(), max_grad_norm=1e6)
    train(model, optimizer, 1)
    assert optimizer.last_step.clip == 1.0


@pytest.mark.parametrize("stochastic", [False, True])
def test_bf16_moments_are_kept_as_asked(stochastic):
    torch.manual_seed(0)
    start = torch.randn(3000)
    runs = []
    for options in (dict(seed=1), dict(seed=1), dict(seed=2)):
        p = torch.nn.Parameter(start.clone())
        optimizer = offstage.AdamW([p], moment_dtype=torch.bfloat16, stochastic_rounding=stochastic, **options)
        for seed in range(5):
            set_gradients([p], seed)
            optimizer.step()
        runs.append((p, optimizer.state_dict()["state"][0]["exp_avg"]))
        wide = offstage.AdamW([torch.nn.Parameter(start.clone())])
        assert optimizer.info()["state_bytes"] < 0.75 * wide.info()["state_bytes"]
    reference = torch.nn.Parameter(start.clone())
    b = torch.optim.AdamW([reference])
    for seed in range(5):
        set_gradients([reference], seed)
        b.step()
    assert runs[0][1].dtype == torch.bfloat16
    assert same_bits(runs[0][0], runs[1][0]) and same_bits(runs[0][1], runs[1][1])
    assert same_bits(runs[0][1], runs[2][1]) != stochastic  # another seed shows only where it is used
    assert torch.allclose(runs[0][0], reference, atol=1e-4, rtol=1e-3)


def test_moments_are_fp32_unless_asked_otherwise():
    p = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = offstage.AdamW([p])
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e-42, -0.0, 3e38])
def test_extreme_gradients_applied_are_torchs(value):
    start = torch.linspace(-1, 1, 11)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    a, b = offstage.AdamW([ours], nonfinite="apply"), torch.optim.AdamW([theirs])
    for _ in range(2):
        for p in (ours, theirs):
            p.grad = torch.full_like(p, 0.5)
            p.grad[3] = value
        a.step()
        b.step()
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_adam_can_decouple_as_newer_torch_does():
    start = torch.randn(20)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    a = offstage.Adam([ours], weight_decay=0.1, decoupled_weight_decay=True)
    b = offstage.AdamW([theirs], weight_decay=0.1)
    for p in (ours, theirs):
        p.grad = torch.ones_like(p)
    a.step()
    b.step()
    assert same_bits(ours, theirs)


def test_a_deep_copied_pair_goes_on_alike(model):
    optimizer = offstage.AdamW(model.parameters())
    train(model, optimizer, 3)
    other_model, other = copy.deepcopy((model, optimizer))
    assert train(model, optimizer, 3, first=3) == train(other_model, other, 3, first=3)
