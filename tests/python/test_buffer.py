# SPDX-License-Identifier: MIT
"""offstage.Buffer: the same bytes as memoryview, numpy array and torch tensor, and lifetimes that can't go wrong."""

import gc
import mmap
import os
import socket
import sys

import pytest

import offstage

numpy = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")


def live_bytes():
    gc.collect()
    return offstage.stats()["requested_bytes"]


def test_views_show_the_same_bytes():
    buffer = offstage.Buffer(64)
    view = buffer.view()
    array = buffer.numpy("float32", (4, 4))
    tensor = buffer.torch(torch.int32)
    array[0, 0] = 1.0
    assert view[:4].tobytes() == b"\0\0\x80\x3f"
    assert tensor[0] == 0x3F800000
    tensor[15] = 7
    assert view[60] == 7 and not view.readonly


@pytest.mark.parametrize("size", [1, 2, 4095, 4096, 4097, 2 << 20, (2 << 20) + 1])
def test_any_size_is_zeroed_and_costs_what_it_says(size):
    buffer = offstage.Buffer(size)
    info = buffer.info()
    assert info["requested"] == size == len(buffer) == buffer.nbytes
    assert size <= info["backed"] < size + max(info["page_size"], 2 << 20)
    assert not buffer.numpy().any()


def test_no_bytes_is_a_buffer_too():
    buffer = offstage.Buffer(0)
    assert len(buffer.view()) == 0 and buffer.numpy().size == 0 and buffer.torch().numel() == 0
    assert buffer.address == 0
    buffer.close()


def test_sizes_that_are_no_whole_elements_leave_the_rest():
    buffer = offstage.Buffer(11)
    assert buffer.numpy("float32").shape == (2,)
    assert buffer.torch(torch.bfloat16).shape == (5,)
    with pytest.raises(ValueError, match="make the buffer larger"):
        buffer.torch(torch.float32, (3,))


def test_numpy_takes_the_buffer_itself_without_a_copy():
    buffer = offstage.Buffer(16)
    array = numpy.asarray(buffer)
    array[3] = 9
    assert buffer.view()[3] == 9


@pytest.mark.skipif(sys.version_info < (3, 12), reason="memoryview(object) needs Python 3.12 (PEP 688); view() is everywhere")
def test_memoryview_takes_the_buffer_itself():
    buffer = offstage.Buffer(16)
    memoryview(buffer)[3] = 9
    assert buffer.view()[3] == 9


@pytest.mark.parametrize("make", [lambda b: b.torch(torch.float32, (4, 4)).t()[1:], lambda b: b.view()[8:],
                                  lambda b: b.numpy("float64")[1:], lambda b: numpy.asarray(b)[4:]],
                         ids=["tensor", "memoryview", "array", "asarray"])
def test_a_view_keeps_the_memory_alive(make):
    before = live_bytes()
    buffer = offstage.Buffer(64)
    buffer.view()[:] = b"\x07" * 64
    view = make(buffer)
    del buffer
    assert live_bytes() == before + 64
    assert bytes(view.tobytes() if hasattr(view, "tobytes") else view.contiguous().numpy().tobytes()).count(7) > 0
    del view
    assert live_bytes() == before


def test_close_is_refused_while_a_view_lives():
    buffer = offstage.Buffer(64)
    tensor = buffer.torch()
    with pytest.raises(BufferError, match="delete it first"):
        buffer.close()
    tensor[0] = 1
    del tensor
    before = live_bytes()
    buffer.close()
    assert live_bytes() == before - 64
    buffer.close()
    with pytest.raises(ValueError, match="closed"):
        buffer.view()


def test_leaving_a_with_block_frees_when_the_last_view_goes():
    before = live_bytes()
    with offstage.Buffer(64) as buffer:
        tensor = buffer.torch()
    tensor[0] = 1
    del tensor
    assert live_bytes() == before


def test_a_buffer_is_a_file_that_can_be_passed_on():
    buffer = offstage.Buffer(8192, shareable=True)
    buffer.view()[5000] = 42
    here, there = socket.socketpair(socket.AF_UNIX)
    with here, there:
        socket.send_fds(here, [b"x"], [buffer.fileno()])
        _, fds, _, _ = socket.recv_fds(there, 1, 1)
    other = offstage.Buffer.from_fd(fds[0])
    with mmap.mmap(fds[0], 8192) as mapped:
        mapped[1] = 3
    os.close(fds[0])
    assert other.view()[5000] == 42 and buffer.view()[1] == 3
    other.view()[0] = 1
    assert buffer.view()[0] == 1


def test_a_private_buffer_has_no_descriptor():
    with pytest.raises(offstage.Error) as caught:
        offstage.Buffer(64).fileno()
    assert "shareable" in str(caught.value).lower()


def test_what_is_no_buffer_is_refused():
    read, write = os.pipe()
    with pytest.raises(offstage.Error):
        offstage.Buffer.from_fd(read)
    os.close(read)
    os.close(write)


def test_placement_is_told_and_checked():
    node = offstage.default_context().nodes()[0]["node"]
    buffer = offstage.Buffer(1 << 20, nodes=node)
    assert set(buffer.nodes()) == {node}
    assert sum(buffer.nodes().values()) == buffer.info()["backed"]
    with pytest.raises(offstage.Error):
        offstage.Buffer(4096, nodes=63)
    with pytest.raises(ValueError, match="placement"):
        offstage.Buffer(4096, nodes=[node], placement="anywhere")
    with pytest.raises(ValueError, match="weight"):
        offstage.Buffer(4096, nodes=[node], weights=[1, 2])


def test_the_budget_is_a_hard_ceiling():
    with offstage.Context(budget=1 << 20) as context:
        kept = offstage.Buffer(1 << 19, context=context)
        with pytest.raises(offstage.Error) as caught:
            offstage.Buffer(1 << 20, context=context)
        assert "budget" in str(caught.value)
        assert context.stats()["requested_bytes"] == 1 << 19
        del kept


def test_a_negative_size_is_refused():
    with pytest.raises(ValueError, match="0 or more"):
        offstage.Buffer(-1)


@pytest.mark.parametrize("make, sentence", [
    (lambda: offstage.Buffer(2 ** 64 + 5), "at most"), (lambda: offstage.Buffer(1.5), "whole number"),
    (lambda: offstage.Buffer("5"), "whole number"), (lambda: offstage.Buffer(None), "whole number"),
    (lambda: offstage.Buffer(5, nodes=2 ** 32), "at most"), (lambda: offstage.Buffer(5, nodes=-1), "0 or more"),
    (lambda: offstage.Buffer(5, nodes=0.5), "nodes are"), (lambda: offstage.Buffer(5, nodes=[0], weights=5), "weights"),
    (lambda: offstage.Buffer.from_fd(2 ** 33 + 1), "at most"), (lambda: offstage.Buffer.from_fd("x"), "whole number"),
    (lambda: offstage.Context(budget=-1), "0 or more"), (lambda: offstage.Context(threads=2 ** 32 + 1), "at most"),
    (lambda: offstage.Buffer(64).numpy(shape=(-1, 4)), "0 or more"), (lambda: offstage.Buffer(64).numpy("S0"), "no bytes")],
    ids=str)
def test_numbers_are_not_cut_to_their_lowest_bits(make, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence):
        make()
