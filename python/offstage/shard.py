# SPDX-License-Identifier: MIT
"""
ZeRO-1: each rank keeps and updates its share of the optimizer's state.

Owns the layout and the collectives; optimizer.py owns the step. Parameters of one type are laid one after another, and
this line is cut into windows. Within a window each rank owns one run of equal length (the last one may be padded), so
what a rank owns of a parameter is a few pieces, each a tensor of the library: a parameter that has no gradient in a
step is untouched on all ranks, and step counters are per parameter, as in torch.

Gradients are summed window by window in fp32, whatever their type: gloo of torch 1.13 has no bfloat16, and a sum of
16-bit values would be rounded at every rank. Two windows of memory are all that it costs, allocated once.
"""

import torch
import torch.distributed as dist

from . import _lib, torch_versions
from ._lib import lib

_WINDOW = 4 << 20  # elements


class _Window:
    __slots__ = ("dtype", "share", "segments", "mine")

    def __init__(self, dtype, share):
        self.dtype = dtype
        self.share = share  # elements per rank
        self.segments = []  # (record, first element in the parameter, first in the window, elements)
        self.mine = []  # [number in the library, record, first in the parameter, first in the share, elements]


class Sharding:
    """One optimizer's share in a process group."""

    def __init__(self, process_group):
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError("shard=True needs torch.distributed, and it isn't initialised: call "
                               "torch.distributed.init_process_group() first")
        self.group = process_group
        self.world = dist.get_world_size(process_group)
        self.rank = dist.get_rank(process_group)
        self.windows = []
        self._whole = self._part = None

    # ---- layout ----------------------------------------------------------------------------------------------------

    def add(self, records):
        """
        Lays out new parameters and sends rank 0's values to all. Gives this rank's pieces, as (record, first element,
        elements), in the order in which the library is to number them.
        """
        self._agree(records)
        source = 0 if self.group is None else dist.get_global_rank(self.group, 0)
        for record in records:
            p = record.tensor.detach()
            if p.numel():
                flat = record.flat()
                dist.broadcast(flat.view(torch.uint8), source, group=self.group)
                record.copy_out()
                torch_versions.bump_version(record.tensor)
        pieces = []
        by_dtype = {}
        for record in records:
            by_dtype.setdefault(record.tensor.dtype, []).append(record)
        for dtype, of_dtype in by_dtype.items():
            pieces += self._lay(dtype, of_dtype)
        return pieces

    def _agree(self, records):
        """All ranks must have the same parameters: else collectives hang, or mix them up."""
        mine = [len(records)] + [record.count for record in records]
        digest = 0
        for count in mine:
            digest = (digest * 1000003 + count + 1) % (1 << 61)
        low = torch.tensor([digest, -digest], dtype=torch.int64, device="cpu")
        dist.all_reduce(low, op=dist.ReduceOp.MIN, group=self.group)
        if int(low[0]) != -int(low[1]):
            raise RuntimeError("the ranks gave the optimizer different parameters: with shard=True all ranks need the same, in "
                               "the same order, and the same ones frozen")

    def _lay(self, dtype, records):
        total = sum(record.count for record in records)
        most = _WINDOW // self.world
        windows = []
        left = total
        while left:
            share = min(most, -(-left // self.world))
            windows.append(_Window(dtype, share))
            left -= min(left, share * self.world)
        k = at = 0
        for record in records:
            start, count = 0, record.count
            while start < count:
                n = min(count - start, windows[k].share * self.world - at)
                windows[k].segments.append((record, start, at, n))
                start += n
                at += n
                if at == windows[k].share * self.world:
                    k, at = k + 1, 0
        pieces = [(record, 0, 0) for record in records if record.count == 0 and self.rank == 0]
        for window in windows:
            begin, end = self.rank * window.share, (self.rank + 1) * window.share
            for record, start, at, n in window.segments:
                first, last = max(at, begin), min(at + n, end)
                if first < last:
                    window.mine.append([None, record, start + first - at, first - begin, last - first])
                    pieces.append((record, start + first - at, last - first))
        largest = max([window.share for window in windows], default=0)
        if self._part is None or self._part.numel() < largest:
            self._whole = torch.zeros(largest * self.world, dtype=torch.float32, device="cpu")
            self._part = torch.zeros(largest, dtype=torch.float32, device="cpu")
        self.windows += windows
        return pieces

    def number(self, records):
        """Tells the windows the library's numbers of the pieces that add() gave."""
        numbers = {(id(record), start): number for record in records for number, start, _ in record.pieces}
        for window in self.windows:
            for piece in window.mine:
                if piece[0] is None:
                    piece[0] = numbers[id(piece[1]), piece[2]]

    # ---- the step --------------------------------------------------------------------------------------------------

    def drain(self, handle, records, gradient):
        """
        Sums gradients over the ranks and drains this rank's share of the sums. gradient(record) gives the elements of one.
        Returns the records that have a gradient on any rank; a rank that has none of it adds zero.
        """
        has = torch.tensor([record.tensor.grad is not None for record in records], dtype=torch.int32, device="cpu")
        dist.all_reduce(has, op=dist.ReduceOp.MAX, group=self.group)
        present = [record for record, flag in zip(records, has.tolist()) if flag]
        chosen = {id(record) for record in present}
        for window in self.windows:
            segments = [segment for segment in window.segments if id(segment[0]) in chosen]
            if not segments:
                continue
            whole = self._whole[:window.share * self.world]
            if len(segments) < len(window.segments) or sum(s[3] for s in segments) < whole.numel():
                whole.zero_()
            for record, start, at, n in segments:
                if record.tensor.grad is None:
                    whole[at:at + n].zero_()
                else:
                    whole[at:at + n].copy_(gradient(record)[start:start + n])
            part = self._part[:window.share]
            torch_versions.reduce_scatter(part, whole, self.group)
            for number, record, _, at, _ in window.mine:
                if id(record) in chosen:
                    lib.offstage_drain(handle, number, part.data_ptr() + 4 * at, None)
            # The same memory serves the next window.
            lib.offstage_drain_wait(handle, _lib.ALL, None)
        for record in present:
            if record.count == 0:  # in no window; it has a step counter all the same
                for number, _, _ in record.pieces:
                    lib.offstage_drain(handle, number, None, None)
        return present

    def gather(self, present):
        """Sends this rank's new parameters to the others and takes theirs. Bytes are sent: no type is too new for that."""
        chosen = {id(record) for record in present}
        for window in self.windows:
            if not any(id(segment[0]) in chosen for segment in window.segments):
                continue
            size = torch.empty((), dtype=window.dtype, device="cpu").element_size()
            whole = self._whole.view(torch.uint8)[:window.share * self.world * size]
            part = self._part.view(torch.uint8)[:window.share * size]
            typed = part.view(window.dtype)
            for _, record, start, at, n in window.mine:
                typed[at:at + n].copy_(record.flat()[start:start + n])
            dist.all_gather(list(whole.chunk(self.world)), part, group=self.group)
            typed = whole.view(window.dtype)
            for record, start, at, n in window.segments:
                if id(record) in chosen:
                    record.flat()[start:start + n].copy_(typed[at:at + n])

    # ---- small facts over all ranks --------------------------------------------------------------------------------

    def sum(self, value):
        """The sum of a number over the ranks; the same bits on all of them."""
        total = torch.tensor([value], dtype=torch.float64, device="cpu")
        dist.all_reduce(total, group=self.group)
        return float(total)

    def least(self, value, bound):
        """The least of an index over the ranks; None (nobody has one) counts as none."""
        index = torch.tensor([bound if value is None else value], dtype=torch.int64, device="cpu")
        dist.all_reduce(index, op=dist.ReduceOp.MIN, group=self.group)
        return None if int(index) == bound else int(index)

    def most(self, values):
        """The largest of each number over the ranks."""
        counts = torch.tensor(values, dtype=torch.int64, device="cpu")
        dist.all_reduce(counts, op=dist.ReduceOp.MAX, group=self.group)
        return counts.tolist()

    def merge(self, flat):
        """Puts together a tensor of which each rank has its pieces and zero elsewhere. As integers: the bits stay."""
        if flat.numel():
            dist.all_reduce(flat.view(torch.int32), group=self.group)
