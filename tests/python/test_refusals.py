# SPDX-License-Identifier: MIT
"""What can't be done is refused with a sentence that says what to do, before anything has changed."""

import pytest

torch = pytest.importorskip("torch")

import offstage  # noqa: E402
from training import assert_same, set_gradients, snapshot  # noqa: E402


def one(*shape, dtype=torch.float32):
    return torch.nn.Parameter(torch.zeros(*shape, dtype=dtype))


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
@pytest.mark.parametrize("option", ["amsgrad", "capturable", "differentiable"])
def test_options_that_cannot_be_offloaded(name, option):
    with pytest.raises(ValueError, match=f"{option}=True.*use torch.optim.{name}"):
        getattr(offstage, name)([one(3)], **{option: True})


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_types_that_adam_here_does_not_update(dtype):
    with pytest.raises(ValueError, match="float32, bfloat16 and float16"):
        offstage.AdamW([one(3, dtype=dtype)])


def test_integer_parameters():
    p = torch.nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)
    optimizer = offstage.AdamW([one(2), p])  # frozen, as torch takes it: it never has a gradient
    assert optimizer.info()["tensors"] == 1


def test_parameters_on_a_device_without_a_backend():
    with pytest.raises(ValueError, match="on meta.*host memory only"):
        offstage.AdamW([torch.nn.Parameter(torch.zeros(3, device="meta"))])


def test_sparse_parameters():
    p = torch.sparse_coo_tensor([[0]], [1.0], (3,)).requires_grad_()
    with pytest.raises(ValueError, match="dense tensors only"):
        offstage.AdamW([p])


@pytest.mark.parametrize("drain", ["step", "backward"])
def test_sparse_gradients_change_nothing(drain):
    embedding = torch.nn.Embedding(10, 4, sparse=True)
    dense = one(5)
    optimizer = offstage.AdamW([dense, *embedding.parameters()], drain=drain)
    set_gradients([dense], 0)
    before = snapshot(optimizer)
    with pytest.raises(RuntimeError, match="sparse=False"):
        embedding(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    assert_same(before, snapshot(optimizer))


def test_expanded_parameters():
    p = torch.zeros(3, 1).expand(3, 4).requires_grad_()
    with pytest.raises(ValueError, match="expanded"):
        offstage.AdamW([p])


def test_parameters_that_share_memory():
    whole = torch.zeros(10)
    with pytest.raises(ValueError, match="param.0 and param.1 share memory"):
        offstage.AdamW([torch.nn.Parameter(whole[:6]), torch.nn.Parameter(whole[4:])])
    offstage.AdamW([torch.nn.Parameter(whole[:5]), torch.nn.Parameter(whole[5:])])


@pytest.mark.parametrize("options, sentence", [
    (dict(lr=-1.0), "learning rate"), (dict(betas=(1.0, 0.9)), "beta"), (dict(eps=-1.0), "epsilon"),
    (dict(weight_decay=-1.0), "weight_decay"), (dict(drain="later"), "drain"), (dict(nonfinite="ignore"), "nonfinite"),
    (dict(max_grad_norm=0.0), "max_grad_norm"), (dict(max_grad_norm=-1.0), "max_grad_norm"),
    (dict(moment_dtype=torch.float16), "moment_dtype"), (dict(accumulate=True), "drain='backward'"),
    (dict(early=True), "early=True"), (dict(drain="backward", early=True, max_grad_norm=1.0, nonfinite="apply"), "early=True"),
    (dict(drain="backward", shard=True), "drain='step'"), (dict(link=dict(bandwidth=1)), "d2h"), (dict(lock="maybe"), "lock"),
    (dict(state=dict(placement="somewhere")), "placement"), (dict(subgroup=-1), "subgroup"), (dict(seed=2 ** 64), "seed"),
    (dict(link=dict(d2h=-5)), "d2h"), (dict(link=dict(latency=1e6)), "latency")], ids=str)
def test_arguments_that_make_no_sense(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        offstage.AdamW([one(3)], **options)


def test_stochastic_rounding_needs_bf16_moments():
    with pytest.raises(offstage.Error, match="moment"):
        offstage.AdamW([one(3)], stochastic_rounding=True)


def test_no_parameters():
    with pytest.raises(ValueError, match="empty parameter list"):
        offstage.AdamW([])


def test_a_rate_that_went_wrong_changes_nothing():
    p = one(5)
    optimizer = offstage.AdamW([p])
    set_gradients([p], 0)
    optimizer.step()
    before = snapshot(optimizer)
    optimizer.param_groups[0]["lr"] = float("nan")
    with pytest.raises(offstage.Error, match="learning rate nan"):
        optimizer.step()
    assert_same(before, snapshot(optimizer))
    optimizer.param_groups[0]["lr"] = 1e-3
    optimizer.step()
    assert optimizer.last_step.skipped is None


def test_a_parameter_that_changed_its_size_or_type():
    p = one(5)
    optimizer = offstage.AdamW([p])
    p.data = torch.zeros(6)
    with pytest.raises(RuntimeError, match="make a new optimizer"):
        optimizer.step()
    q = one(5)
    optimizer = offstage.AdamW([q])
    q.data = torch.zeros(5, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="make a new optimizer"):
        optimizer.step()


def test_a_closed_optimizer_says_so():
    p = one(5)
    optimizer = offstage.AdamW([p])
    optimizer.close()
    set_gradients([p], 0)
    for call in (optimizer.step, optimizer.state_dict, optimizer.info):
        with pytest.raises(RuntimeError, match="closed"):
            call()
    optimizer.close()


def test_the_memory_limit_is_named(run):
    """As an ordinary user with 64 KiB to lock: need, limit and remedy, and lock="prefer" works."""
    import os
    if os.geteuid() != 0:
        pytest.skip("needs root, to become a user without CAP_IPC_LOCK")
    text = run("""
        import os, resource
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
        import torch, offstage
        import offstage.optimizer
        p = torch.nn.Parameter(torch.zeros(100000))
        torch.optim.AdamW([p])  # torch imports more at the first use, from where the user may not read
        os.setuid(65534)
        try:
            offstage.AdamW([p])
        except offstage.Error as error:
            print("said:", error)
        optimizer = offstage.AdamW([p], lock="prefer")
        p.grad = torch.ones_like(p)
        optimizer.step()
        print("locked", optimizer.info()["locked"], "skipped", optimizer.last_step.skipped)
    """)
    assert "said:" in text and "64" in text and "prefer" in text.lower(), text
    assert "locked 0 skipped None" in text


def test_no_shard_without_processes():
    with pytest.raises(RuntimeError, match="init_process_group"):
        offstage.AdamW([one(3)], shard=True)
