# SPDX-License-Identifier: MIT
"""
offstage.AdamW and offstage.Adam: torch.optim's, with the state in staging memory and the update by the host's Adam.

Owns: which of the model's tensors the library has under which number, when gradients are handed over, and that
nothing which somebody else did to a parameter or gradient is lost in silence. The arithmetic, the norm, skipping and
all memory are the library's.

A parameter's memory is given to the library in the order in which it lies (a transposed weight needs no copy), as one
or more pieces: one in a single process, those of this rank with shard=True (shard.py). Between steps the module looks
at each parameter's address and autograd version: what was moved is bound anew, what was written by somebody else is
read anew before the next gradient is drained.
"""

import ctypes
import errno
import math
import os
import resource
import threading
import warnings
import weakref
from collections import defaultdict, deque
from collections.abc import MutableMapping
from ctypes import byref, c_double, c_uint64, c_void_p
from typing import NamedTuple, Optional

import torch

from . import _lib, torch_versions
from ._lib import lib
from .context import default_context

_DTYPES = {torch.float32: _lib.F32, torch.bfloat16: _lib.BF16, torch.float16: _lib.F16}

# Gradients taken away during backward are kept until they have left the device; no more bytes than this wait.
_BYTES_UNDER_WAY = 256 << 20
# Elements that pass through a scratch tensor at a time where types differ. Memory that the library writes to says its
# type and device: torch.set_default_dtype() and set_default_device() are the program's.
_CHUNK = 1 << 18
# Bytes in the middle of each parameter by which a write is found that autograd doesn't see.
_SAMPLE = 256


class StepResult(NamedTuple):
    """What the last step did (`optimizer.last_step`)."""

    norm: float  #: of all gradients, unscaled, before clipping
    clip: float  #: the factor that they were multiplied with; 1.0 if not clipped
    skipped: Optional[str]  #: None, "nonfinite" (a gradient has Inf or NaN) or "empty" (there was no gradient)
    updated: int  #: parameters that were updated (in this process)
    nonfinite: Optional[str]  #: name of the first parameter whose gradient has Inf or NaN
    minor_faults: int  #: of the process, while the library drained, updated and refilled


class _Parameter:
    """One parameter as the library has it. Elements are counted in the order in which they lie in memory."""

    __slots__ = ("tensor", "name", "group", "slot", "count", "dtype", "shape", "pieces", "address", "stride", "version", "order",
                 "dense", "hook", "probe", "sample")

    def __init__(self, tensor, name, group):
        self.tensor = tensor
        self.name = name
        self.group = group  # index into param_groups now; None: it was taken out of them
        self.slot = None  # index of its group in the library
        self.count = tensor.numel()
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.pieces = []  # (number in the library, first element, elements)
        self.version = None  # unknown: somebody else may have written
        self.sample = b""
        self.hook = None
        self.locate()

    def locate(self):
        """Looks where the parameter lies now."""
        p = self.tensor
        self.address = p.data_ptr()
        self.stride = p.stride()
        self.order = sorted(range(p.dim()), key=lambda d: -self.stride[d])
        # Memory with gaps (a column of a larger tensor) is refilled into a dense copy, and copied from there.
        self.dense = None if _is_dense(p) else torch.empty(p.shape, dtype=p.dtype, device="cpu")
        if self.dense is not None:
            self.order = list(range(p.dim()))
            self.copy_in()
        size = p.element_size() * (p.numel() if self.dense is None else min(1, p.numel()))
        length = min(_SAMPLE, size)
        self.probe = self.address + (size - length) // 2, length

    def seen(self):
        """The parameter is now as the library has it: whoever writes from here on is found by written()."""
        self.version = self.tensor._version
        self.sample = ctypes.string_at(*self.probe)

    def written(self):
        """
        Whether somebody else wrote to the parameter since seen(). Autograd doesn't count what goes through .data, or into
        new memory that happens to lie where the old was: for these a sample is compared.
        """
        return self.version != self.tensor._version or self.sample != ctypes.string_at(*self.probe)

    def lies_as(self):
        """In which order the elements lie. Dimensions of one element say nothing about that."""
        return [d for d in self.order if self.shape[d] > 1]

    def copy_in(self):
        if self.dense is not None:
            self.dense.copy_(self.tensor.detach())

    def copy_out(self):
        if self.dense is not None:
            self.tensor.detach().copy_(self.dense)

    def flat(self, tensor=None):
        """The parameter's memory, or the same elements of another tensor of its shape, in one dimension. No copy if
        the other lies in the same order."""
        if tensor is None:
            tensor = self.tensor.detach() if self.dense is None else self.dense
        return tensor.permute(self.order).reshape(-1)

    def like(self, dtype):
        """A new tensor of the parameter's shape whose flat() is a view, also if the parameter lies elsewhere by now."""
        if self.dense is not None:
            return torch.empty(self.shape, dtype=dtype, device="cpu")
        return torch.empty_strided(self.shape, self.stride, dtype=dtype, device="cpu")


def _is_dense(p):
    """Whether the elements fill one run of memory, in any order of dimensions, each once and with its own sign."""
    if p.is_neg():
        return False
    expected = 1
    for size, stride in sorted(zip(p.shape, p.stride()), key=lambda pair: (pair[1], pair[0])):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _refuse(name, p):
    """Raises for a parameter that can't be offloaded; the sentence says which and what to do."""
    if p.layout != torch.strided:
        raise ValueError(f"parameter {name} is {p.layout}: offstage updates dense tensors only, torch.optim.SparseAdam is "
                         "for sparse ones")
    if p.dtype not in _DTYPES:
        raise ValueError(f"parameter {name} is {p.dtype}: offstage updates float32, bfloat16 and float16; keep it in "
                         "another optimizer or convert it")
    if p.device.type != "cpu":
        raise ValueError(f"parameter {name} is on {p.device}: this version drains from host memory only (it has no backend "
                         "for that device); move the model to the CPU or use torch.optim")
    gradient = torch_versions.gradient_dtype(p)
    if gradient not in _DTYPES:
        raise ValueError(f"the gradient of parameter {name} is {gradient}: offstage drains float32, bfloat16 and float16")
    if p.numel() and not p.data_ptr():
        raise ValueError(f"parameter {name} has no memory of its own ({type(p).__name__}): pass the plain tensor that it "
                         "wraps")
    if any(stride == 0 and size > 1 for size, stride in zip(p.shape, p.stride())):
        raise ValueError(f"parameter {name} is expanded, so that several of its elements are one place in memory: pass the "
                         "tensor that it was expanded from")


class _State(MutableMapping):
    """
    optimizer.state: {parameter: its state under torch's names}, as it is in the library now. What is read are copies;
    torch refuses to edit them in place, because that would change nothing here. Set an entry, or use load_state_dict().
    With shard=True all of it is collective.
    """

    def __init__(self, optimizer):
        self._optimizer = optimizer

    def _steps(self):
        with self._optimizer._lock, torch.no_grad():
            return {record.tensor: (record, step) for record, step in self._optimizer._with_state()}

    def __len__(self):
        return len(self._steps())

    def __iter__(self):
        return iter(self._steps())

    def __contains__(self, p):
        return p in self._steps()

    def __getitem__(self, p):
        # Tensors of inference mode can be read everywhere and not written outside of it.
        with self._optimizer._lock, torch.inference_mode():
            record, step = self._steps().get(p, (None, 0))
            return self._optimizer._entry(record, step) if step else {}  # as torch's defaultdict

    def get(self, p, default=None):
        return self[p] or default

    def __setitem__(self, p, entry):
        self._optimizer._set_state({p: entry})

    def __delitem__(self, p):
        if p not in self:
            raise KeyError(p)
        self._optimizer._set_state({p: None})

    def clear(self):
        self._optimizer._set_state(dict.fromkeys(self._steps()))

    def __repr__(self):
        return f"<state of {len(self)} parameters, in offstage's memory>"


def _close(handle, device, parameters):
    """What the end of an optimizer does; no reference to the optimizer itself."""
    for parameter in parameters:
        if parameter.hook is not None:
            parameter.hook.remove()
            parameter.hook = None
    parameters.clear()
    lib.offstage_optimizer_close(handle)
    if device is not None:
        lib.offstage_device_close(device)


class _Offloaded(torch.optim.Optimizer):
    """The body of AdamW and Adam."""

    _torch_class = None
    _l2 = False
    _shown = None  # what torch's own state_dict() is to find in self.state

    def __init__(self, params, defaults, *, max_grad_norm, nonfinite, drain, accumulate, early, moment_dtype,
                 stochastic_rounding, seed, subgroup, lock, state, staging, link, shard, process_group, context):
        self._options = dict(
            max_grad_norm=max_grad_norm, nonfinite=nonfinite, drain=drain, accumulate=accumulate, early=early,
            moment_dtype=moment_dtype, stochastic_rounding=stochastic_rounding, seed=seed, subgroup=subgroup, lock=lock,
            state=state, staging=staging, link=link, shard=shard, process_group=process_group, context=context)
        self._keys = tuple(defaults)  # of groups; torch 1.13 adds one to defaults later
        self._start()
        self._building = True
        try:
            super().__init__(params, defaults)
            self._building = False
            self._settle()
        except BaseException:
            self.close()
            raise

    def _start(self):
        """Checks the options and makes the library's optimizer, with no tensors."""
        o = self._options
        if o["drain"] not in ("step", "backward"):
            raise ValueError(f"drain is {o['drain']!r}: it is 'step' (gradients stay in p.grad until step()) or 'backward' "
                             "(each is drained when it is complete, and p.grad is None)")
        if o["nonfinite"] not in ("skip", "apply", "raise"):
            raise ValueError(f"nonfinite is {o['nonfinite']!r}: it is 'skip', 'apply' or 'raise'")
        if o["moment_dtype"] not in (torch.float32, torch.bfloat16):
            raise ValueError(f"moment_dtype is {o['moment_dtype']}: moments are kept in torch.float32 or torch.bfloat16")
        if o["max_grad_norm"] is not None and not o["max_grad_norm"] > 0:
            raise ValueError(f"max_grad_norm is {o['max_grad_norm']}: it is a number above 0, or None not to clip")
        backward = o["drain"] == "backward"
        accumulate = o["accumulate"]
        if accumulate is None:
            accumulate = backward and not o["early"]
        if accumulate and not backward:
            raise ValueError("accumulate=True sums micro-batches as they are drained, so it needs drain='backward'; with "
                             "drain='step' torch sums them in p.grad")
        if o["early"] and (not backward or accumulate or o["max_grad_norm"] or o["nonfinite"] != "apply"):
            raise ValueError("early=True updates each subgroup during backward: it needs drain='backward', accumulate=False, "
                             "no max_grad_norm and nonfinite='apply', because neither norm nor overflow is known before the "
                             "last gradient")
        if o["shard"] and backward:
            raise ValueError("shard=True reduces gradients over the ranks at step(): it needs drain='step'")

        self._lock = threading.RLock()
        self._parameters = []  # _Parameter, in the order of the library's numbers
        self._apart = []  # those that were in param_groups when it was checked that no two share memory
        self._known = {}  # tensor: its _Parameter
        self._owner = []  # the library's number: its _Parameter
        self._names = set()  # as the library has them
        self._under_way = deque()  # gradients taken away that may not have left yet: (number, memory)
        self._bytes_under_way = 0
        self._drained = False  # the next step has begun: gradients have been drained
        self._taken = {}  # drain="backward": the parameters whose gradients were (a set that keeps its order)
        self._announced = None  # early: the groups that were announced
        self._scaled = False  # a LossScaler is calling
        self._warned = set()
        self._debug = os.environ.get("OFFSTAGE_DEBUG", "0") not in ("", "0")
        self._result = _lib.StepResult()
        self.last_step = None

        context = o["context"] or default_context()
        options = _lib.OptimizerOptions(
            flags=(_lib.OPTIMIZER_ACCUMULATE if accumulate else 0) |
                  (_lib.OPTIMIZER_STOCHASTIC if o["stochastic_rounding"] else 0),
            subgroup=_lib.whole(o["subgroup"], "subgroup"), moment_dtype=_DTYPES[o["moment_dtype"]],
            seed=_lib.whole(o["seed"], "seed"))
        placement = dict(lock=o["lock"])
        state = _lib.buffer_options(**{**placement, **(o["state"] or {})})
        staging = _lib.buffer_options(**{**placement, **(o["staging"] or {})})
        options.state = ctypes.pointer(state)
        options.staging = ctypes.pointer(staging)
        device = None
        if o["link"] is not None:
            unknown = set(o["link"]) - {"d2h", "h2d", "latency"}
            if unknown:
                raise ValueError(f"link has no {sorted(unknown)[0]!r}: it has d2h and h2d (bytes per second) and latency "
                                 "(seconds)")
            for name, value in o["link"].items():
                if not 0 <= value < 2 ** (64 if name != "latency" else 2):
                    raise ValueError(f"{name} of the link is {value}: a bandwidth is 0 (as fast as memory copies go) or more bytes "
                                     "per second, a latency 0 to 4 seconds")
            device = c_void_p()
            lib.offstage_device_open(context.handle, byref(_lib.DeviceOptions(
                d2h_bytes_per_s=int(o["link"].get("d2h", 0)), h2d_bytes_per_s=int(o["link"].get("h2d", 0)),
                latency_ns=round(o["link"].get("latency", 0) * 1e9))), byref(device))
            options.device = device
        handle = c_void_p()
        try:
            lib.offstage_optimizer_create(context.handle, byref(options), byref(handle))
        except _lib.Error:
            if device is not None:
                lib.offstage_device_close(device)
            raise
        self._context = context
        self._handle = handle
        self._end = weakref.finalize(self, _close, handle, device, self._parameters)
        self._sharding = None
        if o["shard"]:
            from .shard import Sharding

            self._sharding = Sharding(o["process_group"])

    def close(self):
        """Frees the state and the slots now. The model keeps its parameters; the optimizer can't be used any more."""
        with self._lock:
            self._known.clear()
            self._owner.clear()
            self._under_way.clear()
            self._end()

    def _use(self):
        if not self._end.alive:
            raise RuntimeError("this optimizer is closed: make a new one, and load_state_dict() into it to go on")
        return self._handle

    # ---- parameters ------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group):
        """As torch.optim's: between steps, at any time. Its state is allocated here. With shard=True: on all ranks."""
        with self._lock:
            if not self._building and self._drained:
                raise RuntimeError("a parameter group was added after gradients of the next step had been drained: add it "
                                   "between step() and backward()")
            super().add_param_group(param_group)
            if self._building:
                return
            try:
                self._settle()
            except BaseException:
                self.param_groups.pop()
                raise

    def _place(self):
        """
        Looks in which group each parameter is now, if in any: groups are lists that the trainer may change. Gives the
        newcomers, as (parameter, name, group): those that the library doesn't have yet. Frozen ones are left out: they
        cost nothing until they are thawed.
        """
        found = []
        seen = set()
        position = 0
        for record in self._parameters:
            record.group = None
        for index, group in enumerate(self.param_groups):
            names = group.get("param_names")
            for k, p in enumerate(group["params"]):
                record = self._known.get(p)
                if record is not None:
                    record.group = index
                elif p not in seen and (p.requires_grad or p.grad is not None):  # the same one twice is one parameter
                    seen.add(p)
                    found.append((p, names[k] if names else f"param.{position}", index))
                position += 1
        return found

    def _assign_slots(self, added):
        """Gives new parameters the library's number of their group: the group's index, unless groups were taken out."""
        slots = {r.group: r.slot for r in self._parameters if r.group is not None}
        taken = {r.slot for r in self._parameters}
        for record in added:
            slot = slots.get(record.group)
            if slot is None:
                slot = record.group if record.group not in taken else 1 + max(taken)
                slots[record.group] = slot
                taken.add(slot)
            record.slot = slot

    def _check_overlap(self, newcomers):
        """Two parameters that share memory would each be refilled over the other's update."""
        live = [(r.tensor, r.name) for r in self._parameters if r.group is not None] + [(p, name) for p, name, _ in newcomers]
        spans = sorted((p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), name) for p, name in live
                       if p.numel() and _is_dense(p))
        for (_, end, name), (begin, _, other) in zip(spans, spans[1:]):
            if begin < end:
                raise ValueError(f"parameters {name} and {other} share memory, and each would be overwritten with the other's "
                                 "update: tie weights by using one Parameter object in both places")

    def _add(self, newcomers):
        for group in self.param_groups:
            self._check_group(group)
        for p, name, _ in newcomers:
            _refuse(name, p)
        self._check_overlap(newcomers)
        added = [_Parameter(*newcomer) for newcomer in newcomers]
        self._assign_slots(added)
        if self._sharding is None:
            pieces = [(record, 0, record.tensor.numel()) for record in added]
        else:
            pieces = self._sharding.add(added)
            for record in added:  # the broadcast from rank 0 wrote it
                record.copy_in()
        array = (_lib.Tensor * max(1, len(pieces)))()
        first = len(self._owner)
        names = set()
        for k, (record, start, count) in enumerate(pieces):
            # Names that the caller gave may repeat; a parameter of several pieces has its name several times.
            name = record.name
            if name in self._names or name in names:
                name = f"{record.name}#{first + k}"
            names.add(name)
            array[k] = _lib.Tensor(
                group=record.slot, name=_lib.text(name), count=count,
                param_dtype=_DTYPES[record.tensor.dtype],
                grad_dtype=_lib.F32 if self._sharding else _DTYPES[torch_versions.gradient_dtype(record.tensor)],
                param=self._piece_address(record, start) if count else None)
        lib.offstage_optimizer_add(self._use(), array, len(pieces))
        self._names |= names
        for k, (record, start, count) in enumerate(pieces):
            record.pieces.append((first + k, start, count))
            self._owner.append(record)
        for record in added:
            record.seen()
            self._parameters.append(record)
            self._known[record.tensor] = record
        if self._sharding is not None:
            self._sharding.number(added)
        if self._options["drain"] == "backward":
            for record in added:
                if record.tensor.requires_grad:
                    self._listen(record)

    @staticmethod
    def _piece_address(record, start):
        base = record.address if record.dense is None else record.dense.data_ptr()
        return base + start * record.tensor.element_size()

    def _settle(self):
        """
        Between steps, before the first gradient of the next one is drained: takes in what changed since. New parameters,
        moved ones, and ones that somebody else wrote to.
        """
        newcomers = self._place()
        live = [record for record in self._parameters if record.group is not None]
        moved = [record for record in live
                 if record.tensor.data_ptr() != record.address or record.tensor.stride() != record.stride]
        for record in moved:
            self._check_moved(record)
        if newcomers:
            self._add(newcomers)
            live += self._parameters[-len(newcomers):]
        elif moved or live != self._apart:
            self._check_overlap(())
        self._apart = live
        for record in moved:
            self._move(record)
        written = [record for record in live if record.written()]
        unseen = [record for record in written if record.version == record.tensor._version]
        if unseen or self._debug:
            # Whoever wrote one through .data may have written others, in places that aren't sampled.
            unseen = {record for record in live if record.version == record.tensor._version}
            written = live
        for record in written:
            record.copy_in()
            if self._take(record) and record in unseen:
                self._tell_unseen(record)
        for record in live:
            p = record.tensor
            if record.hook is None and self._options["drain"] == "backward" and p.requires_grad:
                self._listen(record)

    def _tell_unseen(self, record):
        if "unseen" not in self._warned:
            self._warned.add("unseen")
            warnings.warn(f"parameter {record.name} was written or replaced through .data, which autograd doesn't see: it was "
                          "taken in, and so were others, but it was found by a sample that a small change may miss. Write "
                          "under torch.no_grad(), or call optimizer.reload()", RuntimeWarning, stacklevel=5)

    @staticmethod
    def _check_moved(record):
        p = record.tensor
        if p.shape != record.shape or p.dtype != record.dtype:
            raise RuntimeError(f"parameter {record.name} has shape {tuple(p.shape)} and type {p.dtype} now, and had "
                               f"{tuple(record.shape)} and {record.dtype} when its state was made: make a new optimizer after "
                               "such a change")
        _refuse(record.name, p)

    def _move(self, record):
        """The parameter's memory is another one (p.data was set)."""
        before = record.lies_as(), record.order
        record.locate()
        if record.lies_as() != before[0]:
            self._reorder(record, before[1])
        for number, start, count in record.pieces:
            if count:
                lib.offstage_rebind(self._handle, number, self._piece_address(record, start))
        record.version = None

    def _reorder(self, record, before):
        """The parameter's elements lie in another order than `before` (channels_last, say): so must those of its state."""
        shape = [record.shape[d] for d in before]
        back = sorted(range(len(before)), key=before.__getitem__)
        for which in (_lib.MASTER, _lib.EXP_AVG, _lib.EXP_AVG_SQ):
            flat = torch.zeros(record.count, dtype=torch.float32, device="cpu")
            self._copy_state(record, which, flat, lib.offstage_state_read)
            if self._sharding is not None:
                self._sharding.merge(flat)
            flat = record.flat(flat.view(shape).permute(back)).contiguous()
            self._copy_state(record, which, flat, lib.offstage_state_write)

    def _copy_state(self, record, which, flat, copy):
        """Reads or writes this process's pieces of a parameter's state, in or out of `flat`, which has all elements."""
        for number, start, count in record.pieces:
            if count:
                copy(self._handle, number, which, 0, count, flat.data_ptr() + 4 * start)

    def _take(self, record):
        """
        Makes the master follow a parameter that somebody else wrote to; tells whether that changed anything. For 16-bit
        parameters only the elements that differ from their rounded master: the others keep its low bits, so that loading
        a model and its optimizer in either order resumes bit by bit.
        """
        p = record.tensor
        flat = record.flat()
        bits = {2: torch.int16, 4: torch.int32}[p.element_size()]
        changed = False
        for number, start, count in record.pieces:
            for at in range(0, count, _CHUNK):
                n = min(_CHUNK, count - at)
                part = flat[start + at:start + at + n]
                master = torch.empty(n, dtype=torch.float32, device="cpu")
                lib.offstage_state_read(self._handle, number, _lib.MASTER, at, n, master.data_ptr())
                differs = master.to(p.dtype).view(bits) != part.view(bits)
                if differs.any():
                    changed = True
                    master = torch.where(differs, part.float(), master)
                    lib.offstage_state_write(self._handle, number, _lib.MASTER, at, n, master.data_ptr())
        record.seen()
        return changed

    def reload(self, params=None):
        """
        Reads the masters anew from these parameters (None: all), as after `p.data[0] = …`: a write that autograd doesn't
        see. This optimizer compares a sample of each parameter, by which it finds most of those (and warns), but not all
        that change a few elements. Other writes are found without it.
        """
        with self._lock, torch.no_grad():
            self._use()
            for record in self._parameters if params is None else [self._known[p] for p in params]:
                record.copy_in()
                self._take(record)

    # ---- groups ----------------------------------------------------------------------------------------------------

    def _check_group(self, group):
        for name, why in (("amsgrad", "it needs a third moment, which the library doesn't keep"),
                          ("capturable", "the update runs on the host, outside of any CUDA graph"),
                          ("differentiable", "the update runs outside of autograd")):
            if group.get(name):
                raise ValueError(f"{name}=True can't be offloaded: {why}; use torch.optim.{self._torch_class.__name__}")

    def _groups(self):
        """The hyperparameters as they are now, as the library takes them."""
        index = {}
        for record in self._parameters:
            if record.group is not None and index.setdefault(record.slot, record.group) != record.group:
                raise RuntimeError(f"parameter {record.name} was moved to another parameter group and others of its group were "
                                   "not, which would need state of another layout: make a new optimizer, and "
                                   "load_state_dict() into it to go on")
        groups = (_lib.Group * max([1] + [record.slot + 1 for record in self._parameters]))()
        for out in groups:  # those that were taken out
            out.size = ctypes.sizeof(_lib.Group)
        for slot, k in index.items():
            out, group = groups[slot], self.param_groups[k]
            self._check_group(group)
            out.lr = float(group["lr"])
            out.beta1, out.beta2 = (float(beta) for beta in group["betas"])
            out.eps = float(group["eps"])
            out.weight_decay = float(group["weight_decay"])
            l2 = self._l2 and not group.get("decoupled_weight_decay")
            out.flags = (_lib.GROUP_L2 if l2 else 0) | (_lib.GROUP_MAXIMIZE if group.get("maximize") else 0)
        return groups

    # ---- gradients -------------------------------------------------------------------------------------------------

    def _gradient(self, record):
        """The gradient's elements as they are drained, in one run. Keep the result until they have left."""
        p = record.tensor
        gradient = p.grad
        if gradient.layout != torch.strided:
            raise RuntimeError(f"the gradient of parameter {record.name} is {gradient.layout}: offstage drains dense gradients "
                               "only (nn.Embedding: sparse=False)")
        if not self._sharding and gradient.dtype != torch_versions.gradient_dtype(p):
            raise RuntimeError(f"the gradient of parameter {record.name} is {gradient.dtype}, and "
                               f"{torch_versions.gradient_dtype(p)} when the optimizer was made: make a new optimizer after "
                               "converting the model")
        if gradient.device.type != "cpu":
            raise RuntimeError(f"the gradient of parameter {record.name} is on {gradient.device}: this version drains from "
                               "host memory only")
        # One dimension stays what it is in reshape(), with gaps or expanded; a view may be negated in name only.
        return record.flat(gradient.detach().resolve_neg()).contiguous()

    def _listen(self, record):
        """Has a parameter's gradient drained when backward has completed it. The hook must not keep the optimizer."""
        optimizer = weakref.ref(self)

        def complete(p):
            self = optimizer()
            if self is not None and self._end.alive:
                self._drain_now(p)

        record.hook = torch_versions.on_gradient(record.tensor, complete)

    @torch.no_grad()
    def _drain_now(self, p):
        with self._lock:
            self._begin()
            record = self._known[p]
            if record.group is None:
                return  # it was taken out of the groups
            if p.grad is None:
                raise RuntimeError(f"the gradient of parameter {record.name} was taken away before it could be drained: another "
                                   "optimizer with drain='backward' has the same parameter, a hook cleared it, or two "
                                   "backward passes ran over it at the same time")
            self._drain_one(record)

    def _begin(self):
        """Before the first gradient of a step."""
        if self._drained:
            return
        self._use()
        self._settle()
        if self._options["early"]:
            self._announced = self._groups()
            lib.offstage_step_early(self._handle, byref(self._step_options(self._announced, 1.0)))
        self._drained = True

    def _drain_one(self, record):
        """Drains a gradient and takes it away."""
        memory = self._gradient(record)
        number = record.pieces[0][0]
        try:
            lib.offstage_drain(self._handle, number, memory.data_ptr(), None)
        except _lib.Error as error:
            if error.errno == errno.EALREADY:
                raise RuntimeError(f"a second gradient of parameter {record.name} came before step(), and this optimizer sums no "
                                   "micro-batches: use accumulate=True (and not early=True), or call zero_grad() to drop the "
                                   "first") from error
            raise
        record.tensor.grad = None
        self._taken[record] = None
        self._under_way.append((number, memory))
        self._bytes_under_way += memory.numel() * memory.element_size()
        while self._bytes_under_way > _BYTES_UNDER_WAY:
            number, memory = self._under_way.popleft()
            lib.offstage_drain_wait(self._handle, number, None)
            self._bytes_under_way -= memory.numel() * memory.element_size()

    def _over(self):
        """The step is over, or was abandoned: all gradients have left, and their memory may go."""
        self._drained = False
        self._announced = None
        self._taken.clear()
        self._under_way.clear()
        self._bytes_under_way = 0

    def zero_grad(self, *arguments, **keywords):
        """
        As torch.optim's. With drain="backward" it also drops what was drained since the last step (model.zero_grad() can't
        do that).
        """
        with self._lock:
            self.abandon()
            super().zero_grad(*arguments, **keywords)

    def abandon(self):
        """Drops the gradients that were drained since the last step; with drain="step" there are none."""
        with self._lock:
            if self._drained:
                lib.offstage_abandon(self._use())
                self._over()

    # ---- the step --------------------------------------------------------------------------------------------------

    def _step_options(self, groups, loss_scale, sumsq=None):
        options = _lib.StepOptions(loss_scale=loss_scale, max_norm=self._options["max_grad_norm"] or 0,
                                   n_groups=len(groups), groups=groups)
        options.flags = _lib.STEP_APPLY_NONFINITE if self._options["nonfinite"] == "apply" else 0
        if sumsq is not None:
            options.flags |= _lib.STEP_SUMSQ_GIVEN
            options.sumsq = sumsq
        return options

    @torch.no_grad()
    def step(self, closure=None, *, loss_scale=1.0):
        """
        One step. When it returns, all parameters are updated and in place; `last_step` says what it did.

        closure: evaluates the model again and returns the loss, as in torch.optim
        loss_scale: what the loss was multiplied with; gradients are divided by it inside the update's pass
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # torch.amp.GradScaler leaves these two for optimizers that unscale by themselves.
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        by_scaler = self._scaled or found is not None or loss_scale != 1.0
        if scale is not None:
            loss_scale = loss_scale * float(scale)
        with self._lock:
            self._use()
            if found is not None and float(found):
                self.abandon()
                self.last_step = StepResult(float("nan"), 1.0, "nonfinite", 0, None, 0)
                return loss
            try:
                result = self._one_step(loss_scale)
            except BaseException:
                self._recover()
                raise
            self.last_step = result
        if result.skipped == "nonfinite":
            self._tell_nonfinite(result, by_scaler)
        return loss

    def _recover(self):
        """A step failed: nothing of it may be left, for the next one or in gradients that are still read."""
        try:
            try:
                lib.offstage_abandon(self._handle)
            except _lib.Error as error:
                if error.errno != errno.EALREADY:
                    raise
                # An early step has updated some: it can only be ended.
                lib.offstage_step(self._handle, None, None)
                lib.offstage_wait(self._handle, _lib.ALL, None)
        except _lib.Error:
            pass  # the failure that is being raised says more
        for record in self._taken:
            record.version = None
        self._over()

    def _tell_nonfinite(self, result, by_scaler):
        what = f"the gradient of parameter {result.nonfinite} has Inf or NaN: the whole step was skipped, state and " \
               "parameters are as they were"
        if self._options["nonfinite"] == "raise":
            raise FloatingPointError(what + " (nonfinite='raise')")
        # With a loss scale that is how the scale is found, and the scaler counts it.
        if not by_scaler and "nonfinite" not in self._warned:
            self._warned.add("nonfinite")
            warnings.warn(what + "; further ones are in optimizer.last_step only. nonfinite='apply' does as torch.optim does, "
                          "'raise' stops", RuntimeWarning, stacklevel=4)

    def _one_step(self, loss_scale):
        if self._sharding is not None:
            return self._sharded_step(loss_scale)
        if self._options["drain"] == "backward":
            return self._backward_step(loss_scale)
        self._begin()
        groups = self._groups()
        with_gradient = [record for record in self._parameters if record.group is not None and record.tensor.grad is not None]
        # Kept in a list until they have left: putting them in the parameter's order may have made copies.
        memory = [self._gradient(record) for record in with_gradient]
        calls = [(record.pieces[0][0], gradient.data_ptr()) for record, gradient in zip(with_gradient, memory)]
        options = byref(self._step_options(groups, loss_scale))
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for number, address in calls:
            lib.offstage_drain(self._handle, number, address, None)
        result, skipped = self._finish(options)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
        self._over()
        if skipped is None:
            self._arrived(with_gradient)
        return self._told(result, skipped, faults)

    def _backward_step(self, loss_scale):
        """The step when gradients have been drained during backward."""
        if self._drained:
            self._place()
            groups = self._groups()
            self._check_untouched(groups, loss_scale)
        else:
            self._begin()  # only now: there was no gradient, or it was set by hand
            groups = self._groups()
        for record in self._parameters:
            if record.group is not None and record.tensor.grad is not None:  # set by hand, or thawed during the backward pass
                self._drain_one(record)
        options = None if self._announced is not None else byref(self._step_options(groups, loss_scale))
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        result, skipped = self._finish(options)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
        taken = list(self._taken)
        self._over()
        if skipped is None:
            self._arrived(taken)
        return self._told(result, skipped, faults)

    def _finish(self, options):
        """Has the library decide, update and refill, and waits for all of it."""
        result = self._result
        lib.offstage_step(self._handle, options, byref(result))
        lib.offstage_wait(self._handle, _lib.ALL, None)
        return result, {0: None, _lib.SKIP_NONFINITE: "nonfinite", _lib.SKIP_EMPTY: "empty"}[result.skipped]

    def _told(self, result, skipped, faults):
        name = None if result.nonfinite == _lib.ALL else self._owner[result.nonfinite].name
        return StepResult(result.norm, result.clip, skipped, result.updated, name, faults)

    def _arrived(self, records):
        """Refills have written to parameters: tells autograd, and remembers that it was us."""
        for record in records:
            record.copy_out()
            torch_versions.bump_version(record.tensor)
            record.seen()

    def _check_untouched(self, groups, loss_scale):
        """Gradients have been drained during backward; what changed since can't be taken into this step any more."""
        for record in self._taken:
            if record.group is None:
                raise RuntimeError(f"parameter {record.name} was taken out of the groups between backward() and step(), when its "
                                   "gradient had been drained already: do it before backward(), or use drain='step'. The "
                                   "gradients were dropped (with early=True: what was updated stays)")
        for record in self._parameters:
            p = record.tensor
            # An early step has written already to what autograd will only be told of afterwards.
            written = record.written() if self._announced is None else p._version != record.version
            if record.group is not None and (written or p.data_ptr() != record.address):
                raise RuntimeError(f"parameter {record.name} was written to or moved between backward() and step(), when its "
                                   "gradient had been drained already: change parameters before backward(), or use "
                                   "drain='step'. The gradients were dropped (with early=True: what was updated stays)")
        if self._announced is not None and (loss_scale != 1.0 or bytes(groups) != bytes(self._announced)):
            raise RuntimeError("learning rate, other group values or loss scale were changed after backward() had begun, and "
                               "early=True updates during backward: the step was ended with those of before; change them "
                               "before backward()")

    def _sharded_step(self, loss_scale):
        sharding = self._sharding
        self._settle()
        groups = self._groups()
        self._drained = True
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        present = sharding.drain(self._handle, [r for r in self._parameters if r.group is not None], self._gradient)
        sumsq = c_double()
        lib.offstage_drain_finish(self._handle, byref(sumsq))
        total = sharding.sum(sumsq.value)
        # The mean over the ranks, as DistributedDataParallel has it: the division is part of the update's pass.
        result, skipped = self._finish(byref(self._step_options(groups, loss_scale * sharding.world, total)))
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
        self._over()
        if skipped == "empty" and present:
            skipped = None  # on this rank only: it owns nothing of what had a gradient
        name = None
        if not math.isfinite(total):  # on all ranks alike; only one may know where
            mine = None if result.nonfinite == _lib.ALL else self._parameters.index(self._owner[result.nonfinite])
            first = sharding.least(mine, len(self._parameters))
            name = None if first is None else self._parameters[first].name
        if skipped is None:
            sharding.gather(present)
            self._arrived(present)
        return self._told(result, skipped, faults)._replace(nonfinite=name)

    # ---- torch.amp.GradScaler --------------------------------------------------------------------------------------

    @property
    def _step_supports_amp_scaling(self):
        """Read by GradScaler.step(): unscaling is part of the update's pass, and half-precision gradients are fine."""
        if self._options["drain"] == "backward":
            raise RuntimeError("GradScaler looks for gradients in p.grad, and drain='backward' takes them away during backward: "
                               "use offstage.LossScaler, which has the same interface, or drain='step'")
        if self._options["shard"]:
            raise RuntimeError("GradScaler looks at this rank's gradients only, and with shard=True ranks would decide apart: "
                               "use offstage.LossScaler, which has the same interface")
        return True

    # ---- state -----------------------------------------------------------------------------------------------------

    def _steps(self, record):
        steps = c_uint64()
        most = 0
        for number, _, _ in record.pieces:
            lib.offstage_steps_get(self._handle, number, byref(steps))
            most = max(most, steps.value)
        return most

    @property
    def state(self):
        """The state by parameter, as torch.optim's has it: to be read, set and cleared, not edited in place."""
        return _State(self) if self._shown is None else self._shown

    @state.setter
    def state(self, value):
        if not self._building:  # torch's constructor sets it, too
            self._set_state({**dict.fromkeys(self.state), **value})

    @torch.no_grad()
    def _set_state(self, entries):
        """Sets the state of these parameters; None: forgets it."""
        with self._lock:
            handle = self._use()
            if self._drained:
                raise RuntimeError("state was set after gradients of the next step had been drained: set it between step() and "
                                   "backward()")
            self._settle()
            for p, entry in entries.items():
                if p not in self._known:
                    raise KeyError("state was set for a tensor that isn't one of this optimizer's parameters, or is frozen")
                if entry:
                    self._check_entry(p, entry)
            for p, entry in entries.items():
                self._write_state(handle, self._known[p], entry)

    def _with_state(self):
        """[(parameter, number of its steps)] of those that have state: as torch, none before the first gradient."""
        self._use()
        self._place()
        live = [record for record in self._parameters if record.group is not None]
        steps = [self._steps(record) for record in live]
        if self._sharding is not None:
            steps = self._sharding.most(steps)
        return [(record, step) for record, step in zip(live, steps) if step]

    def _read_state(self):
        """{parameter: its state under torch's names}, in new tensors. Collective with shard=True."""
        self._use()
        if self._drained:
            raise RuntimeError("state was asked for after gradients of the next step had been drained: ask between step() and "
                               "backward()")
        return defaultdict(dict, {record.tensor: self._entry(record, step) for record, step in self._with_state()})

    def _entry(self, record, step):
        entry = {"step": torch.tensor(float(step), dtype=torch.float32, device="cpu")}
        kinds = [("exp_avg", _lib.EXP_AVG), ("exp_avg_sq", _lib.EXP_AVG_SQ)]
        if record.tensor.dtype != torch.float32:
            kinds.append(("master", _lib.MASTER))
        for name, which in kinds:
            entry[name] = self._read_one(record, which)
        return entry

    def _read_one(self, record, which):
        value = record.like(torch.float32)
        flat = record.flat(value)
        if self._sharding is not None:
            flat.zero_()
        self._copy_state(record, which, flat, lib.offstage_state_read)
        if self._sharding is not None:
            self._sharding.merge(flat)
        if which != _lib.MASTER and self._options["moment_dtype"] == torch.bfloat16:
            return value.to(torch.bfloat16)  # exact: that is how they are kept
        return value

    @torch.no_grad()
    def state_dict(self):
        """
        As torch.optim's, under its keys, so that its optimizers load it: step, exp_avg, exp_avg_sq; 16-bit parameters
        have their fp32 `master` too. The tensors are new ones. With shard=True it is the whole state on every rank: call
        it on all of them.
        """
        with self._lock:
            self._shown = self._read_state()
            try:
                return super().state_dict()
            finally:
                self._shown = None

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        """
        Loads what state_dict() of this class or of torch.optim's gave, in place: no second copy of the state is made. A
        parameter without an entry starts anew. Either all of it is loaded or, when something doesn't fit, nothing.
        """
        with self._lock:
            handle = self._use()
            self.abandon()
            state_dict = torch_versions.run_load_hooks(self, dict(state_dict))
            self._settle()
            entries = self._match(state_dict)
            for record in self._parameters:
                self._write_state(handle, record, entries.get(record.tensor))
            with torch_versions.load_hooks_off(self):
                super().load_state_dict({**state_dict, "state": {}})

    def _match(self, state_dict):
        """{parameter: its entry}, checked: sizes, keys and options, before anything is written."""
        saved = state_dict["param_groups"]
        if len(saved) != len(self.param_groups):
            raise ValueError(f"the state dict has {len(saved)} parameter groups and the optimizer {len(self.param_groups)}")
        entries = {}
        frozen = []
        for index, (group, old) in enumerate(zip(self.param_groups, saved)):
            if len(group["params"]) != len(old["params"]):
                raise ValueError(f"parameter group {index} of the state dict has {len(old['params'])} parameters and the "
                                 f"optimizer's has {len(group['params'])}")
            self._check_group(old)
            for p, key in zip(group["params"], old["params"]):
                entry = state_dict["state"].get(key)
                if entry:
                    entries[p] = entry
                    if p not in self._known:
                        frozen.append((p, f"param.{key}", index))
        for p, entry in entries.items():
            self._check_entry(p, entry)
        if frozen:  # trained before, frozen now: their state is kept for when they are thawed
            self._add(frozen)
        return entries

    @staticmethod
    def _check_entry(p, entry):
        for name in ("step", "exp_avg", "exp_avg_sq"):
            if name not in entry:
                raise ValueError(f"the state dict has no {name!r} for a parameter of shape {tuple(p.shape)}: it isn't of "
                                 "Adam or AdamW")
        for name in ("exp_avg", "exp_avg_sq", "master"):
            if name in entry and entry[name].shape != p.shape:
                raise ValueError(f"{name} in the state dict has shape {tuple(entry[name].shape)} and its parameter "
                                 f"{tuple(p.shape)}")

    def _write_state(self, handle, record, entry):
        if not entry and not self._steps(record):
            record.version = None
            return
        zero = None if entry else torch.zeros(min(_CHUNK, max(1, record.tensor.numel())), dtype=torch.float32, device="cpu")
        kinds = [("exp_avg", _lib.EXP_AVG), ("exp_avg_sq", _lib.EXP_AVG_SQ)]
        master = entry.get("master") if entry else None
        if master is not None and master.dtype == torch.float32 and record.tensor.dtype != torch.float32:
            kinds.append(("master", _lib.MASTER))
        else:
            # Low bits of another run's master must not stay. Of one that was taken out, nobody knows where it lies.
            if record.group is not None:
                record.copy_in()
            for number, _, count in record.pieces:
                if count and record.group is not None:
                    lib.offstage_reload(handle, number)
        for name, which in kinds:
            flat = record.flat(entry[name].detach()) if entry else None
            for number, start, count in record.pieces:
                for at in range(0, count, _CHUNK):
                    n = min(_CHUNK, count - at)
                    part = zero[:n] if flat is None else flat[start + at:start + at + n]
                    part = part.to(device="cpu", dtype=torch.float32).contiguous()
                    lib.offstage_state_write(handle, number, which, at, n, part.data_ptr())
        for number, _, _ in record.pieces:
            lib.offstage_steps_set(handle, number, int(entry["step"]) if entry else 0)
        # Whatever wrote the parameter last wins over the master, also if that comes after this call.
        record.version = None

    def __getstate__(self):
        """For pickle and copy.deepcopy: the state is copied out, and the copy gets staging memory of its own."""
        with self._lock, torch.no_grad():
            state = [(p, entry) for p, entry in self._read_state().items()]
        return {"offstage": {"options": self._options, "keys": self._keys, "state": state}, "defaults": self.defaults,
                "param_groups": self.param_groups}

    def __setstate__(self, state):
        made = state.get("offstage")
        if made is None:  # torch's load_state_dict: groups only
            super().__setstate__({name: value for name, value in state.items() if name != "state"})
            for group in self.param_groups:  # saved by another version of torch, with fewer keys
                for name in self._keys:
                    group.setdefault(name, self.defaults[name])
                if not self._l2 and "decoupled_weight_decay" in self.defaults:
                    group["decoupled_weight_decay"] = True  # as torch.optim.AdamW: whoever saved it
            return
        self._options = made["options"]
        self._keys = made["keys"]
        self._start()
        self._building = False
        super().__setstate__({"defaults": state["defaults"], "param_groups": state["param_groups"]})
        with torch.no_grad():
            self._settle()
            entries = dict(made["state"])
            frozen = [(p, f"state.{k}", index) for index, group in enumerate(self.param_groups)
                      for k, p in enumerate(group["params"]) if p in entries and p not in self._known]
            if frozen:
                self._add(frozen)
            for record in self._parameters:
                self._write_state(self._handle, record, entries.get(record.tensor))

    # ---- facts -----------------------------------------------------------------------------------------------------

    def info(self):
        """What was got, as a dict: bytes of state and slots, how much of it is in huge pages and locked, the device."""
        out = _lib.OptimizerInfo()
        lib.offstage_optimizer_info(self._use(), byref(out))
        return out.as_dict()

    @property
    def context(self):
        """The context that it was made in, for stats() and traces."""
        return self._context


_OPTIONS_DOC = """
    Options beyond torch's, by keyword:

    max_grad_norm: clip the norm of all gradients of all groups to this, inside the update's pass; `last_step.norm` has
        the norm. With shard=True it is the norm over all ranks. None: don't clip.
    nonfinite: a gradient with Inf or NaN "skip"s the whole step (default; warned about once), is "apply"ed as
        torch.optim does, or "raise"s FloatingPointError with nothing changed.
    drain: "step" (default): gradients are the trainer's until step(), which drains them and waits for all. "backward":
        each gradient is drained as soon as backward has completed it, and p.grad is None from then on. Functions that
        look at p.grad after backward (clip_grad_norm_, GradScaler) see nothing: use max_grad_norm and LossScaler.
        Drop gradients with optimizer.zero_grad(), which model.zero_grad() can't do, and run one backward pass over a
        parameter at a time.
    accumulate: with drain="backward", sum micro-batches on the host in fp32 (default True there); False: a second
        gradient before step() is refused.
    early: with drain="backward" and accumulate=False, update during backward; no clipping, nonfinite="apply".
    moment_dtype, stochastic_rounding, seed: moments in torch.float32 (default) or torch.bfloat16, rounded to nearest or
        stochastically, reproducible from the seed.
    lock: of state and slots: "require" (default), "prefer" or "never". state, staging: dicts with nodes, placement,
        weights, huge and lock, as for Buffer.
    subgroup: elements updated as one unit (0: the default; the result never depends on it).
    link: emulate a link to the device: dict(d2h=bytes/s, h2d=bytes/s, latency=seconds).
    shard: ZeRO-1 over torch.distributed (process_group, None: the default one): this rank has 1/world of the state;
        gradients are averaged over the ranks at step(), so the model isn't wrapped in DistributedDataParallel. Parameters
        start as rank 0 has them. step(), state_dict() and add_param_group() are collective.
    context: an offstage.Context (threads, budget); None: the process's shared one.

    foreach and fused are accepted and change nothing. amsgrad, capturable and differentiable must be False.
    `optimizer.state` gives copies, and can be set and cleared.
"""


class AdamW(_Offloaded):
    __doc__ = "torch.optim.AdamW (decoupled weight decay), offloaded." + _OPTIONS_DOC
    _torch_class = torch.optim.AdamW

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, amsgrad=False, *,
                 maximize=False, foreach=None, capturable=False, differentiable=False, fused=None, max_grad_norm=None,
                 nonfinite="skip", drain="step", accumulate=None, early=False, moment_dtype=torch.float32,
                 stochastic_rounding=False, seed=0, subgroup=0, lock=None, state=None, staging=None, link=None,
                 shard=False, process_group=None, context=None):
        self._check_group(dict(amsgrad=amsgrad, capturable=capturable, differentiable=differentiable))
        defaults = torch_versions.optimizer_defaults(
            self._torch_class, lr, betas, eps, weight_decay, amsgrad=amsgrad, maximize=maximize, foreach=foreach,
            capturable=capturable, differentiable=differentiable, fused=fused)
        super().__init__(params, defaults, max_grad_norm=max_grad_norm, nonfinite=nonfinite, drain=drain,
                         accumulate=accumulate, early=early, moment_dtype=moment_dtype,
                         stochastic_rounding=stochastic_rounding, seed=seed, subgroup=subgroup, lock=lock, state=state,
                         staging=staging, link=link, shard=shard, process_group=process_group, context=context)


class Adam(_Offloaded):
    __doc__ = "torch.optim.Adam (weight decay is added to the gradient), offloaded." + _OPTIONS_DOC
    _torch_class = torch.optim.Adam
    _l2 = True

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0, amsgrad=False, *, foreach=None,
                 maximize=False, capturable=False, differentiable=False, fused=None, decoupled_weight_decay=False,
                 max_grad_norm=None, nonfinite="skip", drain="step", accumulate=None, early=False, moment_dtype=torch.float32,
                 stochastic_rounding=False, seed=0, subgroup=0, lock=None, state=None, staging=None, link=None,
                 shard=False, process_group=None, context=None):
        self._check_group(dict(amsgrad=amsgrad, capturable=capturable, differentiable=differentiable))
        defaults = torch_versions.optimizer_defaults(
            self._torch_class, lr, betas, eps, weight_decay, amsgrad=amsgrad, maximize=maximize, foreach=foreach,
            capturable=capturable, differentiable=differentiable, fused=fused,
            decoupled_weight_decay=decoupled_weight_decay)
        super().__init__(params, defaults, max_grad_norm=max_grad_norm, nonfinite=nonfinite, drain=drain,
                         accumulate=accumulate, early=early, moment_dtype=moment_dtype,
                         stochastic_rounding=stochastic_rounding, seed=seed, subgroup=subgroup, lock=lock, state=state,
                         staging=staging, link=link, shard=shard, process_group=process_group, context=context)
