# SPDX-License-Identifier: MIT
"""Gradients: none is lost, none is used twice, and what is wrong with one stops the step whole."""

import gc
import warnings

import pytest

torch = pytest.importorskip("torch")

import offstage  # noqa: E402
from training import assert_same, loss_of, same_bits, set_gradients, snapshot, train, twins  # noqa: E402


def exact_gradients(parameters, seed):
    """Gradients that are multiples of 1/8 below 4: sums of a few of them are exact in every type."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randint(-31, 32, p.shape, generator=generator) / 8).to(p.dtype) for p in parameters]


def backward(parameters, gradients):
    """A backward pass that gives these gradients, so that hooks run."""
    sum((p * g).sum() for p, g in zip(parameters, gradients)).backward()


def parameters(dtype, seed=0):
    torch.manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((70, 11), (5000,), (1,))]


# ---- draining during backward ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, dict(accumulate=False), dict(accumulate=False, early=True, nonfinite="apply")],
                         ids=["accumulate", "single", "early"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_draining_during_backward_gives_the_same_bits(dtype, options):
    ours, other = parameters(dtype), parameters(dtype)
    a = offstage.AdamW(ours, drain="backward", subgroup=4096, **options)
    b = offstage.AdamW(other, nonfinite=options.get("nonfinite", "skip"))
    for seed in range(4):
        for ps, o in ((ours, a), (other, b)):
            o.zero_grad()
            backward(ps, exact_gradients(ps, seed))
            if o is a:
                assert all(p.grad is None for p in ps)
            o.step()
        assert a.last_step.norm == b.last_step.norm
    for p, q in zip(ours, other):
        assert same_bits(p, q)
    assert_same(snapshot(a), snapshot(b))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("micro", [2, 4])
def test_micro_batches_summed_either_way_are_one_batch(dtype, micro):
    """The sums are exact here, so all three must agree in every bit: on the host, in p.grad, and as one gradient."""
    sets = [parameters(dtype) for _ in range(3)]
    optimizers = [offstage.AdamW(sets[0], drain="backward"), offstage.AdamW(sets[1]), offstage.AdamW(sets[2])]
    for step in range(3):
        gradients = [exact_gradients(sets[0], 10 * step + k) for k in range(micro)]
        for o in optimizers:
            o.zero_grad()
        for g in gradients:
            backward(sets[0], g)
            backward(sets[1], g)
        for p, *parts in zip(sets[2], *gradients):
            p.grad = sum(part.float() for part in parts).to(dtype)
        for o in optimizers:
            o.step()
        assert optimizers[0].last_step.norm == optimizers[1].last_step.norm == optimizers[2].last_step.norm
    for p, q, r in zip(*sets):
        assert same_bits(p, r) and same_bits(q, r)


def test_micro_batches_of_16_bits_are_summed_in_fp32():
    """bf16 would lose 255 of the 256 ones that are added to 256."""
    p = torch.nn.Parameter(torch.zeros(10, dtype=torch.bfloat16))
    optimizer = offstage.AdamW([p], drain="backward", betas=(0.0, 0.0))
    backward([p], [torch.full_like(p, 256)])
    for _ in range(255):
        backward([p], [torch.ones_like(p)])
    optimizer.step()
    assert (optimizer.state_dict()["state"][0]["exp_avg"] == 511).all()


def test_accumulation_is_torchs(model):
    ours, also, theirs = *twins(model), twins(model)[1]
    pairs = [(ours, offstage.AdamW(ours.parameters(), drain="backward")), (also, offstage.AdamW(also.parameters())),
             (theirs, torch.optim.AdamW(theirs.parameters()))]
    for step in range(5):
        for m, o in pairs:
            o.zero_grad()
            for k in range(3):
                (loss_of(m, 3 * step + k) / 3).backward()
            o.step()
    for p, q, r in zip(*(m.parameters() for m, _ in pairs)):
        assert torch.allclose(p, r, rtol=1e-5, atol=2e-6) and torch.allclose(q, r, rtol=1e-5, atol=2e-6)


def test_zero_grad_drops_what_was_drained(model):
    ours, other = twins(model)
    a, b = offstage.AdamW(ours.parameters(), drain="backward"), offstage.AdamW(other.parameters(), drain="backward")
    loss_of(ours, 99).backward()
    a.zero_grad()
    assert train(ours, a, 2) == train(other, b, 2)
    for p, q in zip(ours.parameters(), other.parameters()):
        assert same_bits(p, q)


def test_a_second_gradient_without_accumulation_is_refused(model):
    optimizer = offstage.AdamW(model.parameters(), drain="backward", accumulate=False)
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match="accumulate=True"):
        loss_of(model, 1).backward()
    optimizer.zero_grad()
    train(model, optimizer, 1)


def test_a_gradient_set_by_hand_is_drained_at_the_step(model):
    ours, other = twins(model)
    a, b = offstage.AdamW(ours.parameters(), drain="backward"), offstage.AdamW(other.parameters())
    set_gradients(ours.parameters(), 5)
    set_gradients(other.parameters(), 5)
    a.step()
    b.step()
    assert all(p.grad is None for p in ours.parameters())
    for p, q in zip(ours.parameters(), other.parameters()):
        assert same_bits(p, q)


def test_gradients_that_wait_are_bounded(model, monkeypatch):
    from offstage import optimizer as module
    monkeypatch.setattr(module, "_BYTES_UNDER_WAY", 100)
    ours, other = twins(model)
    a = offstage.AdamW(ours.parameters(), drain="backward", link=dict(d2h=20e6, latency=1e-4))
    b = offstage.AdamW(other.parameters())
    assert train(ours, a, 2) == train(other, b, 2)
    loss_of(ours, 9).backward()
    assert a._bytes_under_way <= 100
    a.abandon()


def test_a_gradient_taken_by_another_optimizer_is_named(model):
    first = offstage.AdamW(model.parameters(), drain="backward")
    second = offstage.AdamW(model.parameters(), drain="backward")
    with pytest.raises(RuntimeError, match="another optimizer"):
        loss_of(model, 0).backward()
    first.abandon(), second.abandon()


def test_an_early_step_refuses_what_comes_too_late(model):
    optimizer = offstage.AdamW(model.parameters(), drain="backward", accumulate=False, early=True, nonfinite="apply")
    loss_of(model, 0).backward()
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(RuntimeError, match="before backward"):
        optimizer.step()
    train(model, optimizer, 2)


def test_an_early_step_trains_as_torch_does(model):
    ours, theirs = twins(model)
    a = offstage.AdamW(ours.parameters(), drain="backward", early=True, nonfinite="apply", subgroup=4096)
    b = torch.optim.AdamW(theirs.parameters())
    assert train(ours, a, 10) == pytest.approx(train(theirs, b, 10), rel=1e-4)


def test_hooks_do_not_outlive_the_optimizer(model):
    optimizer = offstage.AdamW(model.parameters(), drain="backward")
    train(model, optimizer, 1)
    del optimizer
    gc.collect()
    loss_of(model, 0).backward()
    assert all(p.grad is not None for p in model.parameters())


# ---- overflow -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drain", ["step", "backward"])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_a_step_with_overflow_is_skipped_whole(dtype, value, drain):
    ps = parameters(dtype)
    optimizer = offstage.AdamW(ps, drain=drain, max_grad_norm=1.0)
    set_gradients(ps, 0)
    optimizer.step()
    before = snapshot(optimizer)
    versions = [p._version for p in ps]
    gradients = exact_gradients(ps, 1)
    gradients[1][4321] = value
    optimizer.zero_grad(set_to_none=True)
    if drain == "backward":
        for p, g in zip(ps, gradients):
            p.grad = g.clone()
    else:
        backward(ps, gradients)
    with pytest.warns(RuntimeWarning, match="param.1"):
        optimizer.step()
    assert optimizer.last_step.skipped == "nonfinite" and optimizer.last_step.nonfinite == "param.1"
    assert optimizer.last_step.updated == 0
    assert_same(before, snapshot(optimizer))
    assert versions == [p._version for p in ps]
    set_gradients(ps, 2)
    optimizer.step()
    assert optimizer.last_step.skipped is None


def test_skipping_warns_once():
    ps = parameters(torch.float32)
    optimizer = offstage.AdamW(ps)
    set_gradients(ps, 0)
    ps[0].grad[0, 0] = float("nan")
    with pytest.warns(RuntimeWarning):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    assert optimizer.last_step.skipped == "nonfinite"


def test_raise_stops_with_nothing_changed():
    ps = parameters(torch.float32)
    optimizer = offstage.AdamW(ps, nonfinite="raise")
    set_gradients(ps, 0)
    optimizer.step()
    before = snapshot(optimizer)
    ps[2].grad[0] = float("inf")
    with pytest.raises(FloatingPointError, match="param.2"):
        optimizer.step()
    assert_same(before, snapshot(optimizer))


def test_apply_does_as_torch_does():
    ps = parameters(torch.float32)
    optimizer = offstage.AdamW(ps, nonfinite="apply")
    set_gradients(ps, 0)
    ps[2].grad[0] = float("nan")
    optimizer.step()
    assert ps[2].isnan().all() and not ps[0].isnan().any()
    assert optimizer.last_step.skipped is None and optimizer.last_step.nonfinite == "param.2"


# ---- loss scale ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drain", ["step", "backward"])
def test_a_scaled_loss_gives_the_same_bits(model, drain):
    ours, other = twins(model)
    a, b = offstage.AdamW(ours.parameters(), drain=drain, max_grad_norm=0.1), \
        offstage.AdamW(other.parameters(), max_grad_norm=0.1)
    scaler = offstage.LossScaler(1024.0)
    for seed in range(5):
        a.zero_grad()
        scaler.scale(loss_of(ours, seed)).backward()
        scaler.step(a)
        scaler.update()
        train(other, b, 1, first=seed)
        assert a.last_step.norm == pytest.approx(b.last_step.norm, rel=1e-12)
    for p, q in zip(ours.parameters(), other.parameters()):
        assert same_bits(p, q)


@pytest.mark.parametrize("drain", ["step", "backward"])
def test_the_scale_backs_off_and_grows_as_torchs(drain):
    p = torch.nn.Parameter(torch.ones(10, dtype=torch.float16))
    optimizer = offstage.AdamW([p], drain=drain)
    scaler = offstage.LossScaler(2.0 ** 20, growth_interval=3)
    scales = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(14):
            optimizer.zero_grad(set_to_none=True)
            scaler.scale((p.float() * 2).sum()).backward()  # 2 * scale overflows fp16 from 2^15 on
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
    down = [2.0 ** k for k in (19, 18, 17, 16, 15, 14)]
    assert scales == down + [2.0 ** 14] * 2 + [2.0 ** 15] + [2.0 ** 14] * 3 + [2.0 ** 15, 2.0 ** 14]


def test_scaler_misuse_is_a_sentence(model):
    optimizer = offstage.AdamW(model.parameters(), drain="backward")
    scaler = offstage.LossScaler()
    scaler.scale(loss_of(model, 0)).backward()
    with pytest.raises(RuntimeError, match="max_grad_norm"):
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="scaler.step"):
        scaler.update()
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="twice"):
        scaler.step(optimizer)
    scaler.update()
    with pytest.raises(TypeError, match="GradScaler"):
        scaler.step(torch.optim.AdamW(model.parameters()))
    with pytest.raises(RuntimeError, match="nonfinite='skip'"):
        scaler.step(offstage.AdamW(model.parameters(), nonfinite="apply"))
    for bad in (dict(init_scale=0), dict(growth_factor=1.0), dict(backoff_factor=1.0)):
        with pytest.raises(ValueError):
            offstage.LossScaler(**bad)


def test_unscale_then_clip_then_step(model):
    ours, other = twins(model)
    a, b = offstage.AdamW(ours.parameters()), offstage.AdamW(other.parameters())
    scaler = offstage.LossScaler(256.0)
    scaler.scale(loss_of(ours, 0)).backward()
    scaler.unscale_(a)
    loss_of(other, 0).backward()
    for m in (ours, other):
        torch.nn.utils.clip_grad_norm_(m.parameters(), 0.01)
    scaler.step(a)
    scaler.update()
    b.step()
    for p, q in zip(ours.parameters(), other.parameters()):
        assert same_bits(p, q)


def test_a_disabled_scaler_does_nothing(model):
    optimizer = offstage.AdamW(model.parameters())
    scaler = offstage.LossScaler(enabled=False)
    loss = loss_of(model, 0)
    assert scaler.scale(loss) is loss and scaler.get_scale() == 1.0
    loss.backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.state_dict() == {} and optimizer.last_step.skipped is None


def test_scaler_state_is_torchs():
    scaler = offstage.LossScaler(8.0, growth_interval=5)
    state = scaler.state_dict()
    torch_keys = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}
    assert set(state) == torch_keys
    other = offstage.LossScaler()
    other.load_state_dict(state)
    assert other.state_dict() == state
    import pickle
    assert pickle.loads(pickle.dumps(scaler)).state_dict() == state


def cpu_grad_scaler(**options):
    try:
        return torch.amp.GradScaler("cpu", **options)
    except (AttributeError, TypeError):
        pytest.skip("this torch has no GradScaler for the CPU (it came with 2.3)")


@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler_works_with_drain_at_step(model, unscale):
    ours, theirs = twins(model)
    a, b = offstage.AdamW(ours.parameters()), torch.optim.AdamW(theirs.parameters())
    scalers = [cpu_grad_scaler(init_scale=1024.0) for _ in range(2)]
    for seed in range(4):
        for m, o, s in ((ours, a, scalers[0]), (theirs, b, scalers[1])):
            o.zero_grad()
            s.scale(loss_of(m, seed)).backward()
            if seed == 2:
                next(m.parameters()).grad[0, 0] = float("inf")
            if unscale:
                s.unscale_(o)
                torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            s.step(o)
            s.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert (a.last_step.skipped == "nonfinite") == (seed == 2)
    assert scalers[0].get_scale() == 512.0
    assert [float(e["step"]) for e in a.state_dict()["state"].values()] == [3] * 6
    for p, q in zip(ours.parameters(), theirs.parameters()):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-6)


def test_grad_scaler_takes_half_precision_gradients():
    scaler = cpu_grad_scaler(init_scale=64.0)
    p = torch.nn.Parameter(torch.ones(10, dtype=torch.float16))
    optimizer = offstage.AdamW([p], lr=0.1)
    scaler.scale((p * 2).sum().float()).backward()
    scaler.step(optimizer)
    assert optimizer.last_step.norm == pytest.approx(2 * 10 ** 0.5)


def test_grad_scaler_is_refused_when_gradients_are_gone(model):
    scaler = cpu_grad_scaler()
    optimizer = offstage.AdamW(model.parameters(), drain="backward")
    scaler.scale(loss_of(model, 0)).backward()
    with pytest.raises(RuntimeError, match="LossScaler"):
        scaler.step(optimizer)
    optimizer.zero_grad()
