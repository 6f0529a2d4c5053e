# SPDX-License-Identifier: MIT
"""offstage's optimizers are torch.optim.Optimizers: what trainers do with those works."""

import copy
import warnings

import pytest

torch = pytest.importorskip("torch")

import offstage  # noqa: E402
from training import batch, loss_of, same_bits, set_gradients, train, twins  # noqa: E402


def test_it_is_an_optimizer(model):
    optimizer = offstage.AdamW(model.parameters(), lr=0.25)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert "lr: 0.25" in repr(optimizer) and repr(optimizer).startswith("AdamW")


@pytest.mark.parametrize("make", [lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.1),
                                  lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.01, total_steps=12),
                                  lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda k: 1 / (1 + k)),
                                  lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5)],
                         ids=["StepLR", "OneCycleLR", "LambdaLR", "CosineAnnealingLR"])
def test_schedulers_set_the_rate_of_the_next_step(model, make):
    ours, theirs = twins(model)
    pairs = [(m, o, make(o)) for m, o in ((ours, offstage.AdamW(ours.parameters(), lr=1e-2)),
                                          (theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-2)))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(10):
            for m, o, s in pairs:
                o.zero_grad()
                loss_of(m, seed).backward()
                o.step()
                s.step()
    for p, q in zip(ours.parameters(), theirs.parameters()):
        assert torch.allclose(p, q, rtol=1e-4, atol=2e-6)


def test_a_closure_is_called_with_gradients_on(model):
    ours, theirs = twins(model)
    a, b = offstage.AdamW(ours.parameters()), torch.optim.AdamW(theirs.parameters())
    for seed in range(3):
        losses = []
        for m, o in ((ours, a), (theirs, b)):
            def closure():
                o.zero_grad()
                loss = loss_of(m, seed)
                loss.backward()
                return loss
            with torch.no_grad():
                losses.append(o.step(closure).item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("drain", ["step", "backward"])
def test_a_closure_works_with_either_drain(model, drain):
    optimizer = offstage.AdamW(model.parameters(), lr=1e-2, drain=drain)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(5)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_does_as_in_torch(model, set_to_none):
    ours, theirs = twins(model)
    a, b = offstage.AdamW(ours.parameters()), torch.optim.AdamW(theirs.parameters())
    train(ours, a, 3, set_to_none=set_to_none)
    train(theirs, b, 3, set_to_none=set_to_none)
    a.zero_grad(set_to_none=set_to_none)
    for p in ours.parameters():
        assert p.grad is None if set_to_none else not p.grad.any()
    for p, q in zip(ours.parameters(), theirs.parameters()):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-6)


def test_gradients_stay_the_trainers_with_drain_at_step(model):
    optimizer = offstage.AdamW(model.parameters())
    loss_of(model, 0).backward()
    before = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    for p, g in zip(model.parameters(), before):
        assert same_bits(p.grad, g)


def test_clip_grad_norm_before_the_step_counts(model):
    ours, theirs = twins(model)
    a, b = offstage.AdamW(ours.parameters()), torch.optim.AdamW(theirs.parameters())
    for seed in range(3):
        for m, o in ((ours, a), (theirs, b)):
            o.zero_grad()
            loss_of(m, seed).backward()
            torch.nn.utils.clip_grad_norm_(m.parameters(), 0.01)
            o.step()
        assert a.last_step.norm == pytest.approx(0.01, rel=1e-3)
    for p, q in zip(ours.parameters(), theirs.parameters()):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-6)


def test_groups_can_be_added_later(model):
    ours, theirs = twins(model)
    results = []
    for m, kind in ((ours, offstage.AdamW), (theirs, torch.optim.AdamW)):
        ps = list(m.parameters())
        o = kind(ps[:2], lr=1e-2)
        train(m, o, 3)
        o.add_param_group(dict(params=ps[2:], lr=1e-3, weight_decay=0))
        m.zero_grad()
        train(m, o, 3, first=3)
        results.append([float(entry["step"]) for entry in o.state_dict()["state"].values()])
    assert results[0] == results[1] == [6, 6] + [3] * (len(results[0]) - 2)
    for p, q in zip(ours.parameters(), theirs.parameters()):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-6)


def test_a_group_that_is_refused_leaves_the_optimizer_as_it_was(model):
    ps = list(model.parameters())
    optimizer = offstage.AdamW(ps)
    for bad in (torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.complex64)):
        with pytest.raises(ValueError):
            optimizer.add_param_group(dict(params=[torch.nn.Parameter(bad)]))
    with pytest.raises(ValueError):
        optimizer.add_param_group(dict(params=[torch.nn.Parameter(torch.zeros(3))], amsgrad=True))
    assert len(optimizer.param_groups) == 1
    train(model, optimizer, 1)


def test_a_group_added_in_the_middle_of_a_step_is_refused(model):
    ps = list(model.parameters())
    optimizer = offstage.AdamW(ps[:-1], drain="backward")
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match="between step"):
        optimizer.add_param_group(dict(params=ps[-1:]))
    optimizer.step()
    optimizer.add_param_group(dict(params=ps[-1:]))
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize("drain", ["step", "backward"])
def test_frozen_parameters_stay_and_cost_nothing_until_thawed(model, drain):
    ours, theirs = twins(model)
    for m in (ours, theirs):
        m[1].requires_grad_(False)
    a = offstage.AdamW(ours.parameters(), drain=drain)
    elements = a.info()["elements"]
    assert elements == sum(p.numel() for p in ours.parameters() if p.requires_grad)
    b = torch.optim.AdamW(theirs.parameters())
    train(ours, a, 2), train(theirs, b, 2)
    for m in (ours, theirs):
        m[1].requires_grad_(True)
    train(ours, a, 2, first=2), train(theirs, b, 2, first=2)
    assert a.info()["elements"] == sum(p.numel() for p in ours.parameters())
    for p, q in zip(ours.parameters(), theirs.parameters()):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("drain", ["step", "backward"])
def test_a_parameter_with_no_gradient_this_step_is_untouched(drain):
    start = torch.randn(2, 30)
    runs = []
    for kind, options in ((offstage.AdamW, dict(drain=drain)), (torch.optim.AdamW, {})):
        ps = [torch.nn.Parameter(row.clone()) for row in start]
        o = kind(ps, weight_decay=0.5, **options)
        for k in range(6):
            o.zero_grad(set_to_none=True)
            (ps[k % 2] * torch.arange(30.0)).sum().backward()
            o.step()
            if k == 0:
                assert torch.equal(ps[1], start[1])
        runs.append((ps, [float(e["step"]) for e in o.state_dict()["state"].values()]))
    assert runs[0][1] == runs[1][1] == [3, 3]
    for p, q in zip(runs[0][0], runs[1][0]):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("drain", ["step", "backward"])
def test_tied_weights_get_one_update(drain):
    def network():
        torch.manual_seed(2)
        m = torch.nn.Sequential(torch.nn.Embedding(13, 8), torch.nn.Linear(8, 13, bias=False))
        m[1].weight = m[0].weight
        return m

    ours, theirs = network(), network()
    a, b = offstage.AdamW(ours.parameters(), drain=drain), torch.optim.AdamW(theirs.parameters())
    assert train(ours, a, 5) == pytest.approx(train(theirs, b, 5), rel=1e-5)
    assert ours[0].weight is ours[1].weight and torch.allclose(ours[0].weight, theirs[0].weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("drain", ["step", "backward"])
def test_empty_and_scalar_parameters_work(drain):
    ps = [torch.nn.Parameter(torch.zeros(0)), torch.nn.Parameter(torch.tensor(2.0)), torch.nn.Parameter(torch.zeros(3, 0, 2))]
    optimizer = offstage.AdamW(ps, lr=0.1, drain=drain)
    for _ in range(2):
        (ps[0].sum() + ps[1] * 3 + ps[2].sum()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    assert ps[1].item() < 2
    state = optimizer.state_dict()["state"]
    assert [float(state[k]["step"]) for k in range(3)] == [2, 2, 2]
    assert state[2]["exp_avg"].shape == (3, 0, 2)


def test_a_step_with_no_gradient_at_all_changes_nothing(model):
    optimizer = offstage.AdamW(model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    assert optimizer.step() is None
    assert optimizer.last_step.skipped == "empty" and optimizer.last_step.updated == 0
    for p, q in zip(model.parameters(), before):
        assert same_bits(p, q)
    assert optimizer.state_dict()["state"] == {}


@pytest.mark.parametrize("drain", ["step", "backward"])
@pytest.mark.parametrize("layout", ["transposed", "channels_last", "column", "gradient"])
def test_any_layout_of_parameters_and_gradients_is_right(layout, drain):
    torch.manual_seed(4)
    start = torch.randn(4, 6, 3, 5)

    def parameter():
        x = start.clone()
        if layout == "transposed":
            return torch.nn.Parameter(x.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2))
        if layout == "channels_last":
            return torch.nn.Parameter(x.contiguous(memory_format=torch.channels_last))
        if layout == "column":
            whole = torch.full((4, 6, 3, 10), 8.0)
            whole[..., ::2] = x
            return torch.nn.Parameter(whole[..., ::2])
        return torch.nn.Parameter(x)

    ours, theirs = parameter(), torch.nn.Parameter(start.clone())
    assert torch.equal(ours, theirs)
    a, b = offstage.AdamW([ours], drain=drain), torch.optim.AdamW([theirs])
    weight = torch.randn(4, 6, 3, 5)
    for _ in range(3):
        for p, o in ((ours, a), (theirs, b)):
            if layout == "gradient" and p is ours:
                p.grad = weight.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
                assert not p.grad.is_contiguous()
            else:
                (p * weight).sum().backward()
            o.step()
            o.zero_grad(set_to_none=True)
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    entry, other = a.state_dict()["state"][0], b.state_dict()["state"][0]
    assert torch.allclose(entry["exp_avg"], other["exp_avg"], rtol=1e-5, atol=1e-6)
    if layout == "column":
        assert (ours._base[..., 1::2] == 8.0).all() if ours._base is not None else True


def test_a_parameter_that_was_moved_is_followed(model):
    ours, theirs = twins(model)
    a, b = offstage.AdamW(ours.parameters()), torch.optim.AdamW(theirs.parameters())
    for seed in range(3):
        for m, o in ((ours, a), (theirs, b)):
            for p in m.parameters():
                p.data = p.data.clone() * 0.9
            train(m, o, 1, first=seed)
    for p, q in zip(ours.parameters(), theirs.parameters()):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("drain", ["step", "backward"])
def test_what_somebody_else_writes_to_a_parameter_is_kept(model, drain):
    ours, theirs = twins(model)
    other = copy.deepcopy(model)
    a, b = offstage.AdamW(ours.parameters(), drain=drain), torch.optim.AdamW(theirs.parameters())
    for m, o in ((ours, a), (theirs, b)):
        train(m, o, 2)
        m.load_state_dict(other.state_dict())
        train(m, o, 1)
        with torch.no_grad():
            for p in m.parameters():
                p.clamp_(-0.05, 0.05)
        train(m, o, 2)
    for p, q in zip(ours.parameters(), theirs.parameters()):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-6)


def test_a_write_between_backward_and_step_is_refused_when_gradients_are_gone(model):
    optimizer = offstage.AdamW(model.parameters(), drain="backward")
    loss_of(model, 0).backward()
    with torch.no_grad():
        model[1].weight.mul_(0.5)
    with pytest.raises(RuntimeError, match="between backward"):
        optimizer.step()
    train(model, optimizer, 1)
    assert optimizer.last_step.skipped is None


def test_a_write_through_data_is_taken_by_reload(model):
    optimizer = offstage.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    train(model, optimizer, 1)
    wanted = torch.full_like(model[1].weight, 0.25)
    model[1].weight.data.copy_(wanted)
    optimizer.reload([model[1].weight])
    train(model, optimizer, 1)
    assert same_bits(model[1].weight, wanted)


@pytest.mark.parametrize("drain", ["step", "backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bulk_writes_through_data_are_found(model, dtype, drain):
    """What trainers do: clamp all weights, start them anew, scale them twice (the second time into the first memory)."""
    def clamp(p):
        p.data.clamp_(-0.01, 0.01)

    def start_anew(p):
        p.data.fill_(0.25)

    def scale(p):
        p.data = p.data * 0.5
        p.data = p.data * 0.5

    ours, theirs = twins(model.to(dtype))
    a, b = offstage.AdamW(ours.parameters(), drain=drain), offstage.AdamW(theirs.parameters(), drain=drain)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for write in (clamp, start_anew, scale):
            for m, o in ((ours, a), (theirs, b)):
                train(m, o, 2)
                for p in m.parameters():
                    write(p)
            b.reload()
    train(ours, a, 2)
    train(theirs, b, 2)
    for p, q in zip(ours.parameters(), theirs.parameters()):
        assert same_bits(p, q)
    assert [w for w in caught if "through .data" in str(w.message)]


def test_broadcast_parameters_are_found(model):
    """torch.distributed.broadcast(p.data, 0) is how ranks are made equal; it doesn't tell autograd."""
    optimizer = offstage.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    train(model, optimizer, 1)
    wanted = [torch.randn_like(p) for p in model.parameters()]
    for p, value in zip(model.parameters(), wanted):
        p.data.numpy()[...] = value.numpy()
    with pytest.warns(RuntimeWarning, match="through .data"):
        train(model, optimizer, 1)
    for p, value in zip(model.parameters(), wanted):
        assert same_bits(p, value)


def test_a_write_through_data_between_backward_and_step_is_refused_too(model):
    optimizer = offstage.AdamW(model.parameters(), drain="backward")
    loss_of(model, 0).backward()
    model[1].weight.data.mul_(0.5)
    with pytest.raises(RuntimeError, match="between backward"):
        optimizer.step()


def test_a_write_through_data_is_found_in_debug_mode(monkeypatch):
    monkeypatch.setenv("OFFSTAGE_DEBUG", "1")
    for dtype in (torch.float32, torch.bfloat16):
        p = torch.nn.Parameter(torch.randn(300).to(dtype))
        optimizer = offstage.AdamW([p], lr=0.0, weight_decay=0.0)
        set_gradients([p], 0)
        optimizer.step()
        wanted = torch.full_like(p, 0.25)
        p.data.copy_(wanted)
        with pytest.warns(RuntimeWarning, match="through .data"):
            optimizer.step()
        assert same_bits(p, wanted)


def test_a_write_to_some_elements_keeps_the_low_bits_of_the_others():
    p = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = offstage.AdamW([p], lr=1e-4, weight_decay=0)
    p.grad = torch.ones_like(p)
    optimizer.step()
    master = optimizer.state_dict()["state"][0]["master"]
    with torch.no_grad():
        p[3] = 5.0
    p.grad = torch.zeros_like(p)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    after = optimizer.state_dict()["state"][0]["master"]
    assert after[3] == 5.0 and p[3] == 5.0
    keep = [0, 1, 2, 4, 5, 6, 7]
    assert same_bits(after[keep], master[keep]) and (master != 1).all()


def test_autograd_sees_that_a_step_wrote(model):
    optimizer = offstage.AdamW(model.parameters())
    stale = loss_of(model, 0)
    loss_of(model, 1).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()


def test_foreach_and_fused_are_accepted(model):
    for options in (dict(foreach=True), dict(foreach=False), dict(fused=True), dict(fused=False)):
        optimizer = offstage.AdamW(model.parameters(), **options)
        train(model, optimizer, 1)


def test_step_hooks_run_where_torch_has_them(model):
    optimizer = offstage.AdamW(model.parameters())
    if not hasattr(optimizer, "register_step_pre_hook"):
        pytest.skip("torch 1.13 has no step hooks (they came with 2.0)")
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    train(model, optimizer, 1)
    assert calls == ["before", "after"]


def test_named_parameters_name_what_went_wrong(model):
    try:
        torch.optim.AdamW(model.named_parameters())
    except TypeError:
        pytest.skip("this torch takes no named parameters (they came with 2.6)")
    optimizer = offstage.AdamW(model.named_parameters(), nonfinite="raise")
    loss_of(model, 0).backward()
    model[2].bias.grad[0] = float("nan")
    with pytest.raises(FloatingPointError, match="2.bias"):
        optimizer.step()


def test_it_may_be_subclassed(model):
    class Mine(offstage.AdamW):
        def step(self, closure=None):
            self.called = True
            return super().step(closure)

    optimizer = Mine(model.parameters(), lr=1e-2)
    losses = train(model, optimizer, 5)
    assert optimizer.called and losses[-1] < losses[0]


def test_two_optimizers_share_a_model(model):
    a = offstage.AdamW(model[0].parameters(), drain="backward")
    b = offstage.Adam([p for m in list(model)[1:] for p in m.parameters()], lr=1e-2)
    for seed in range(3):
        a.zero_grad()
        b.zero_grad()
        loss_of(model, seed).backward()
        a.step()
        b.step()
    assert a.last_step.updated == 1 and b.last_step.updated == 5


def test_gradient_checkpointing_works(model):
    from torch.utils.checkpoint import checkpoint
    ours, theirs = twins(model)
    a, b = offstage.AdamW(ours.parameters(), drain="backward"), torch.optim.AdamW(theirs.parameters())
    for seed in range(2):
        for m, o in ((ours, a), (theirs, b)):
            x, y = batch(seed)
            hidden = m[0](x)
            hidden = checkpoint(torch.nn.Sequential(*list(m)[1:]), hidden, use_reentrant=True)
            torch.nn.functional.cross_entropy(hidden.flatten(0, 1), y.flatten()).backward()
            o.step()
            o.zero_grad()
    for p, q in zip(ours.parameters(), theirs.parameters()):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_the_programs_default_type_changes_nothing(model, default):
    """torch.set_default_dtype() is how some programs make their models; scratch memory of this package isn't theirs."""
    ours, theirs = twins(model)
    a, b = offstage.AdamW(ours.parameters(), lr=1e-2), torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    torch.set_default_dtype(default)
    try:
        for seed in range(3):
            for m, optimizer in ((ours, a), (theirs, b)):
                set_gradients(m.parameters(), seed)
                optimizer.step()
                with torch.no_grad():
                    m[1].weight.mul_(0.5)  # is read anew
        state = a.state_dict()
        a.load_state_dict(state)
        for m, optimizer in ((ours, a), (theirs, b)):
            set_gradients(m.parameters(), 9)
            optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    for p, q in zip(ours.parameters(), theirs.parameters()):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not hasattr(torch, "set_default_device"), reason="torch.set_default_device is new in torch 2.0")
def test_the_programs_default_device_changes_nothing(model):
    before = [p.detach().clone() for p in model.parameters()]
    torch.set_default_device("meta")
    try:
        optimizer = offstage.AdamW(model.parameters(), lr=1e-2)
        for p, value in zip(model.parameters(), before):
            p.grad = value.clone()
        optimizer.step()
        with torch.no_grad():
            model[1].weight.mul_(0.5)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    finally:
        torch.set_default_device("cpu")
    assert optimizer.last_step.updated == len(before)


@pytest.mark.parametrize("drain", ["step", "backward"])
@pytest.mark.parametrize("kind", ["every second", "expanded", "negated view"])
def test_a_gradient_that_is_a_view_is_drained_as_it_reads(kind, drain):
    """One dimension is already flat, and yet its elements may lie apart, be one place in memory, or be negated lazily."""
    def gradient():
        if kind == "every second":
            return torch.arange(12.0)[::2]
        if kind == "expanded":
            return torch.full((1,), 2.0).expand(6)
        return torch.complex(torch.zeros(6), torch.arange(6.0) - 2).conj().imag

    ours, theirs = torch.nn.Parameter(torch.ones(6)), torch.nn.Parameter(torch.ones(6))
    a, b = offstage.AdamW([ours], drain=drain), torch.optim.AdamW([theirs])
    for _ in range(2):
        ours.grad, theirs.grad = gradient(), gradient()
        a.step()
        b.step()
        assert a.last_step.norm == pytest.approx(float(gradient().norm()))
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_parameter_that_is_a_negated_view_is_updated_as_it_reads():
    def parameter():
        return torch.nn.Parameter(torch.complex(torch.zeros(6), torch.arange(6.0) - 2).conj().imag)

    ours, theirs = parameter(), parameter()
    a, b = offstage.AdamW([ours], lr=0.1), torch.optim.AdamW([theirs], lr=0.1)
    for _ in range(2):
        ours.grad, theirs.grad = torch.arange(6.0), torch.arange(6.0)
        a.step()
        b.step()
    assert torch.allclose(ours.detach().clone(), theirs.detach().clone(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_follows_a_parameter_into_another_memory_format(dtype):
    """model.to(memory_format=torch.channels_last) in the middle of training: the same elements in another order."""
    torch.manual_seed(2)
    ours = torch.nn.Conv2d(3, 4, 3).to(dtype)
    _, theirs = twins(ours)
    a, b = offstage.AdamW(ours.parameters(), lr=1e-2), offstage.AdamW(theirs.parameters(), lr=1e-2)
    for seed in range(3):
        for m, optimizer in ((ours, a), (theirs, b)):
            set_gradients(m.parameters(), seed)
            optimizer.step()
    ours.to(memory_format=torch.channels_last)
    assert ours.weight.stride() != theirs.weight.stride()
    assert same_bits(a.state_dict()["state"][0]["exp_avg"], b.state_dict()["state"][0]["exp_avg"])
    for seed in range(3, 6):
        for m, optimizer in ((ours, a), (theirs, b)):
            set_gradients(m.parameters(), seed)
            optimizer.step()
    entries, others = a.state_dict()["state"], b.state_dict()["state"]
    for k, (p, q) in enumerate(zip(ours.parameters(), theirs.parameters())):
        assert same_bits(p, q)
        for name, value in others[k].items():
            assert same_bits(entries[k][name], value), name


@pytest.mark.parametrize("drain", ["step", "backward"])
def test_groups_and_parameters_can_be_taken_out_replaced_and_put_back(drain):
    """As torch.optim has it: what is in param_groups at the step is updated, with the values of its group."""
    def run(kind, **options):
        ps = [torch.nn.Parameter(torch.ones(3) * k) for k in range(1, 5)]
        optimizer = kind([dict(params=[ps[0]], lr=0.3), dict(params=[ps[1], ps[2]], lr=0.1), dict(params=[ps[3]], lr=0.02)],
                         **options)
        seed = 0

        def step():
            nonlocal seed
            for k, p in enumerate(ps):
                generator = torch.Generator().manual_seed(100 * seed + k)
                p.grad = None
                (p * torch.randn(p.shape, generator=generator)).sum().backward()
            optimizer.step()
            seed += 1

        step()
        first = optimizer.param_groups.pop(0)
        step()
        ps.append(torch.nn.Parameter(ps[2].detach()))  # the same memory: the old one isn't updated any more
        optimizer.param_groups[0]["params"][1] = ps[-1]
        step()
        optimizer.param_groups.append(first)
        step()
        optimizer.param_groups.reverse()
        step()
        return ps, optimizer

    ours, a = run(offstage.AdamW, drain=drain)
    theirs, b = run(torch.optim.AdamW)
    for p, q in zip(ours, theirs):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-6)
    state = a.state_dict()["state"]  # torch's own fails with a KeyError once a parameter was taken out
    for key, p in enumerate(p for group in b.param_groups for p in group["params"]):
        assert torch.allclose(state[key]["exp_avg"], b.state[p]["exp_avg"], rtol=1e-5, atol=1e-6)


def test_parameters_of_one_group_that_part_are_refused_with_nothing_changed():
    p, q = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    optimizer = offstage.AdamW([dict(params=[p, q]), dict(params=[torch.nn.Parameter(torch.ones(3))])])
    set_gradients([p, q], 0)
    optimizer.step()
    before = p.detach().clone()
    optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop())
    with pytest.raises(RuntimeError, match="param.1 was moved"):
        optimizer.step()
    assert same_bits(p, before)


def test_a_parameter_taken_out_between_backward_and_step_is_refused_when_its_gradient_is_gone(model):
    optimizer = offstage.AdamW(model.parameters(), drain="backward")
    loss_of(model, 0).backward()
    optimizer.param_groups[0]["params"].pop()
    with pytest.raises(RuntimeError, match="between backward"):
        optimizer.step()


def test_weights_tied_through_data_later_are_refused(model):
    p, q = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.zeros(3))
    optimizer = offstage.AdamW([p, q])
    set_gradients([p, q], 0)
    optimizer.step()
    q.data = p.data
    for _ in range(2):
        with pytest.raises(ValueError, match="share memory"):
            optimizer.step()
    q.data = torch.zeros(3)
    optimizer.step()
