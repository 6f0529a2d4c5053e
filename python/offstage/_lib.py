# SPDX-License-Identifier: MIT
"""
The C library, as ctypes sees it.

Owns: finding and loading liboffstage, the structs and argument types of offstage.h, and how a failure becomes an
exception. Everything else in the package calls `lib.offstage_*` and nothing else of ctypes. Nothing is compiled.

A function that returns int raises `Error` when it returns a negative errno, with the library's own sentence; ctypes
lets go of the interpreter lock during a call.
"""

import ctypes
import operator
import os
from ctypes import POINTER, Structure, c_char, c_char_p, c_double, c_int, c_uint32, c_uint64, c_void_p
from pathlib import Path

__version__ = "0.1.0"

F32, BF16, F16 = 0, 1, 2
ALL = 0xFFFFFFFF

WANT = {None: 0, "default": 0, "prefer": 1, "require": 2, "never": 3}
PLACEMENT = {"local": 0, "bind": 1, "interleave": 2, "weighted": 3, "spill": 4}

BUFFER_SHAREABLE = 1
BUFFER_DONTFORK = 2
GROUP_L2 = 1
GROUP_MAXIMIZE = 2
OPTIMIZER_ACCUMULATE = 1
OPTIMIZER_STOCHASTIC = 2
STEP_APPLY_NONFINITE = 1
STEP_SUMSQ_GIVEN = 2
SKIP_NONFINITE = 1
SKIP_EMPTY = 2
MASTER, EXP_AVG, EXP_AVG_SQ = 0, 1, 2


class Error(OSError):
    """A call of the library failed: `errno` says which kind, and the text is one sentence with what to do."""

    def __str__(self):
        return self.strerror or ""


class _Sized(Structure):
    """A struct of offstage.h whose first field is its own size."""

    def __init__(self, **fields):
        super().__init__(**fields)
        self.size = ctypes.sizeof(self)

    def as_dict(self):
        """The fields as Python values, without the size and reserved ones."""
        out = {}
        for name, _ in self._fields_:
            if name in ("size", "reserved"):
                continue
            value = getattr(self, name)
            out[name] = value.decode(errors="replace") if isinstance(value, bytes) else value
        return out


class Options(_Sized):
    _fields_ = [("size", c_uint32), ("threads", c_uint32), ("provider", c_char_p), ("isa", c_char_p),
                ("budget", c_uint64), ("lock", c_uint32), ("reserved", c_uint32)]


class Info(_Sized):
    _fields_ = [("size", c_uint32), ("threads", c_uint32), ("version", c_char * 16), ("provider", c_char * 16),
                ("isa", c_char * 16), ("isas", c_char * 96), ("threads_why", c_char * 160), ("budget", c_uint64),
                ("page_size", c_uint32), ("huge_page_size", c_uint32), ("hugetlb_free", c_uint64),
                ("memlock_limit", c_uint64), ("memory_available", c_uint64), ("thp", c_char * 16),
                ("thp_shmem", c_char * 16), ("memory_limit", c_char * 96)]


class NodeInfo(_Sized):
    _fields_ = [("size", c_uint32), ("node", c_uint32), ("cpus", c_uint32), ("flags", c_uint32), ("total", c_uint64),
                ("available", c_uint64), ("huge_free", c_uint64), ("hugetlb_free", c_uint64)]


class Feature(_Sized):
    _fields_ = [("size", c_uint32), ("on", c_uint32), ("name", c_char * 24), ("why", c_char * 136)]


class Stats(_Sized):
    _fields_ = [("size", c_uint32), ("reserved", c_uint32)] + [(name, c_uint64) for name in (
        "allocations", "buffers", "pins", "threads", "minor_faults", "major_faults", "requested_bytes",
        "backed_bytes", "locked_bytes", "steps", "steps_skipped", "drained_bytes", "refilled_bytes", "drain_ns",
        "norm_ns", "update_ns", "refill_ns", "overlap_ns", "step_ns")]


class BufferOptions(_Sized):
    _fields_ = [("size", c_uint32), ("flags", c_uint32), ("huge", c_uint32), ("lock", c_uint32),
                ("placement", c_uint32), ("n_nodes", c_uint32), ("nodes", POINTER(c_uint32)),
                ("weights", POINTER(c_uint32))]


class BufferInfo(_Sized):
    _fields_ = [("size", c_uint32), ("flags", c_uint32), ("requested", c_uint64), ("backed", c_uint64),
                ("huge", c_uint64), ("locked", c_uint64), ("page_size", c_uint32), ("nodes", c_uint32),
                ("memory", c_char * 16), ("why", c_char * 160)]


class DeviceOptions(_Sized):
    _fields_ = [("size", c_uint32), ("latency_ns", c_uint32), ("backend", c_char_p), ("d2h_bytes_per_s", c_uint64),
                ("h2d_bytes_per_s", c_uint64)]


class Group(_Sized):
    _fields_ = [("size", c_uint32), ("flags", c_uint32), ("lr", c_double), ("beta1", c_double), ("beta2", c_double),
                ("eps", c_double), ("weight_decay", c_double)]


class Adam(_Sized):
    _fields_ = [("size", c_uint32), ("flags", c_uint32), ("n", c_uint64), ("master", c_void_p),
                ("exp_avg", c_void_p), ("exp_avg_sq", c_void_p), ("grad", c_void_p), ("param", c_void_p),
                ("moment_dtype", c_uint32), ("grad_dtype", c_uint32), ("param_dtype", c_uint32),
                ("reserved", c_uint32), ("group", POINTER(Group)), ("grad_scale", c_double), ("t", c_uint64),
                ("seed", c_uint64), ("index", c_uint64)]


class Tensor(_Sized):
    _fields_ = [("size", c_uint32), ("group", c_uint32), ("name", c_char_p), ("count", c_uint64),
                ("param_dtype", c_uint32), ("grad_dtype", c_uint32), ("param", c_void_p)]


class OptimizerOptions(_Sized):
    _fields_ = [("size", c_uint32), ("flags", c_uint32), ("device", c_void_p), ("subgroup", c_uint64),
                ("moment_dtype", c_uint32), ("reserved", c_uint32), ("seed", c_uint64), ("tier", c_char_p),
                ("state", POINTER(BufferOptions)), ("staging", POINTER(BufferOptions))]


class OptimizerInfo(_Sized):
    _fields_ = [("size", c_uint32), ("tensors", c_uint32), ("elements", c_uint64), ("subgroups", c_uint32),
                ("reserved", c_uint32), ("state_bytes", c_uint64), ("slot_bytes", c_uint64),
                ("landing_bytes", c_uint64), ("huge", c_uint64), ("locked", c_uint64), ("tier", c_char * 16),
                ("device", c_char * 112)]


class StepOptions(_Sized):
    _fields_ = [("size", c_uint32), ("flags", c_uint32), ("groups", POINTER(Group)), ("n_groups", c_uint32),
                ("n_order", c_uint32), ("order", POINTER(c_uint32)), ("loss_scale", c_double),
                ("max_norm", c_double), ("sumsq", c_double)]


class StepResult(_Sized):
    _fields_ = [("size", c_uint32), ("skipped", c_uint32), ("norm", c_double), ("clip", c_double),
                ("updated", c_uint32), ("nonfinite", c_uint32)]


class Scaler(Structure):
    _fields_ = [("scale", c_double), ("growth_factor", c_double), ("backoff_factor", c_double),
                ("growth_interval", c_uint32), ("good_steps", c_uint32)]


_HANDLE, _OUT = c_void_p, POINTER(c_void_p)
_STREAM_FN = ctypes.CFUNCTYPE(None, c_void_p)

# name: (result, arguments); c_int results are checked.
_FUNCTIONS = {
    "offstage_version": (c_char_p, ()),
    "offstage_error": (c_char_p, ()),
    "offstage_open": (c_int, (POINTER(Options), _OUT)),
    "offstage_close": (None, (_HANDLE,)),
    "offstage_info": (c_int, (_HANDLE, POINTER(Info))),
    "offstage_node_info": (c_int, (_HANDLE, c_uint32, POINTER(NodeInfo))),
    "offstage_feature": (c_int, (c_uint32, POINTER(Feature))),
    "offstage_stats": (c_int, (_HANDLE, POINTER(Stats))),
    "offstage_trace_start": (c_int, (_HANDLE, c_uint32)),
    "offstage_trace_save": (c_int, (_HANDLE, c_char_p)),
    "offstage_buffer_create": (c_int, (_HANDLE, c_uint64, POINTER(BufferOptions), _OUT)),
    "offstage_buffer_import": (c_int, (_HANDLE, c_int, _OUT)),
    "offstage_buffer_close": (None, (_HANDLE,)),
    "offstage_buffer_data": (c_void_p, (_HANDLE,)),
    "offstage_buffer_fd": (c_int, (_HANDLE,)),
    "offstage_buffer_info": (c_int, (_HANDLE, POINTER(BufferInfo))),
    "offstage_buffer_nodes": (c_int, (_HANDLE, POINTER(c_uint64), c_uint32)),
    "offstage_arena_create": (c_int, (_HANDLE, _OUT)),
    "offstage_arena_alloc": (c_int, (_HANDLE, c_uint64, _OUT)),
    "offstage_arena_free": (c_int, (_HANDLE, c_void_p)),
    "offstage_arena_usage": (None, (_HANDLE, POINTER(c_uint64), POINTER(c_uint64))),
    "offstage_arena_close": (None, (_HANDLE,)),
    "offstage_device_open": (c_int, (_HANDLE, POINTER(DeviceOptions), _OUT)),
    "offstage_device_close": (c_int, (_HANDLE,)),
    "offstage_device_name": (c_char_p, (_HANDLE,)),
    "offstage_stream_create": (c_int, (_HANDLE, _OUT)),
    "offstage_stream_close": (None, (_HANDLE,)),
    "offstage_stream_wait": (c_int, (_HANDLE,)),
    "offstage_stream_call": (c_int, (_HANDLE, _STREAM_FN, c_void_p)),
    "offstage_adam": (c_int, (_HANDLE, POINTER(Adam))),
    "offstage_optimizer_create": (c_int, (_HANDLE, POINTER(OptimizerOptions), _OUT)),
    "offstage_optimizer_add": (c_int, (_HANDLE, POINTER(Tensor), c_uint32)),
    "offstage_optimizer_close": (None, (_HANDLE,)),
    "offstage_optimizer_info": (c_int, (_HANDLE, POINTER(OptimizerInfo))),
    "offstage_rebind": (c_int, (_HANDLE, c_uint32, c_void_p)),
    "offstage_reload": (c_int, (_HANDLE, c_uint32)),
    "offstage_drain": (c_int, (_HANDLE, c_uint32, c_void_p, _HANDLE)),
    "offstage_drain_wait": (c_int, (_HANDLE, c_uint32, _HANDLE)),
    "offstage_drain_finish": (c_int, (_HANDLE, POINTER(c_double))),
    "offstage_step": (c_int, (_HANDLE, POINTER(StepOptions), POINTER(StepResult))),
    "offstage_step_early": (c_int, (_HANDLE, POINTER(StepOptions))),
    "offstage_wait": (c_int, (_HANDLE, c_uint32, _HANDLE)),
    "offstage_refill": (c_int, (_HANDLE, POINTER(c_uint32), c_uint32)),
    "offstage_abandon": (c_int, (_HANDLE,)),
    "offstage_tensor_find": (c_int, (_HANDLE, c_char_p, POINTER(c_uint32))),
    "offstage_state_read": (c_int, (_HANDLE, c_uint32, c_int, c_uint64, c_uint64, c_void_p)),
    "offstage_state_write": (c_int, (_HANDLE, c_uint32, c_int, c_uint64, c_uint64, c_void_p)),
    "offstage_steps_get": (c_int, (_HANDLE, c_uint32, POINTER(c_uint64))),
    "offstage_steps_set": (c_int, (_HANDLE, c_uint32, c_uint64)),
    "offstage_scaler_init": (None, (POINTER(Scaler),)),
    "offstage_scaler_update": (None, (POINTER(Scaler), c_int)),
}


def _candidates():
    """Where the library may be, in order: said, built beside this source, installed beside this package, the loader's."""
    said = os.environ.get("OFFSTAGE_LIBRARY")
    if said:
        return [said]
    here = Path(__file__).resolve().parent
    found = []
    if (here.parent.parent / "include" / "offstage.h").exists():
        found.append(str(here.parent.parent / "build" / "liboffstage.so.0"))
    # PREFIX/lib/python3.N/dist-packages/offstage: PREFIX/lib is two or three levels above.
    for up in list(here.parents)[1:4]:
        found.append(str(up / "liboffstage.so.0"))
    found.append("liboffstage.so.0")
    return found


def _load():
    tried = []
    for path in _candidates():
        if os.sep in path and not os.path.exists(path):
            tried.append(f"{path}: not there")
            continue
        try:
            loaded = ctypes.CDLL(path)
        except OSError as error:
            tried.append(f"{path}: {error}")
            continue
        return path, loaded
    raise ImportError("liboffstage.so.0 was not found: run make in the source, or make install, or set "
                      "OFFSTAGE_LIBRARY to the file. Tried: " + "; ".join(tried))


def _bind(path, loaded):
    def checked(ret, function, arguments):
        if ret < 0:
            raise Error(-ret, loaded.offstage_error().decode(errors="replace"))
        return ret

    missing = [name for name in _FUNCTIONS if not hasattr(loaded, name)]
    if missing:
        raise ImportError(f"{path} has no {missing[0]}: the package is version {__version__}, the library is an older "
                          "one or a partial build; build or install both from the same source")
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(loaded, name)
        function.restype = result
        function.argtypes = arguments
        if result is c_int:
            function.errcheck = checked
    version = loaded.offstage_version().decode()
    if version.split(".")[:2] != __version__.split(".")[:2]:
        raise ImportError(f"{path} is version {version} and this package is version {__version__}: install both from "
                          "the same release")
    return loaded


library_path, _loaded = _load()
lib = _bind(library_path, _loaded)
del _loaded


def text(value):
    """A Python string as the library takes it (None stays None)."""
    return None if value is None else os.fsencode(value)


def choice(table, value, what):
    """The number behind a word, or a ValueError that lists the words."""
    try:
        return table[value]
    except (KeyError, TypeError):
        words = ", ".join(repr(word) for word in table if word is not None)
        raise ValueError(f"{what} is {value!r}: it is one of {words}") from None


def whole(value, what, most=2 ** 64 - 1):
    """
    An integer that the library takes, or a sentence. ctypes alone would cut it to its lowest bits in silence.
    """
    try:
        value = operator.index(value)
    except TypeError:
        raise TypeError(f"{what} is {value!r}: it is a whole number") from None
    if not 0 <= value <= most:
        raise ValueError(f"{what} is {value}: it is 0 or more, and at most {most}")
    return value


def buffer_options(*, nodes=None, placement=None, weights=None, huge=None, lock=None, shareable=False, dontfork=False):
    """
    A BufferOptions from Python values. With nodes and no placement: bind for one node, weighted if weights are given,
    interleave else. The arrays live as long as the struct.
    """
    options = BufferOptions()
    options.flags = (BUFFER_SHAREABLE if shareable else 0) | (BUFFER_DONTFORK if dontfork else 0)
    options.huge = choice(WANT, huge, "huge")
    options.lock = choice(WANT, lock, "lock")
    if nodes is None or hasattr(nodes, "__index__"):
        nodes = [] if nodes is None else [nodes]
    try:
        nodes = [whole(node, "a node's number", ALL) for node in nodes]
        weights = None if weights is None else [whole(weight, "a weight", ALL) for weight in weights]
    except TypeError as error:
        raise TypeError(f"nodes are {nodes!r} and weights {weights!r}: nodes are one number or several, weights one for each "
                        "node") from error
    if placement is None:
        placement = "local" if not nodes else "weighted" if weights else "bind" if len(nodes) == 1 else "interleave"
    options.placement = choice(PLACEMENT, placement, "placement")
    if weights is not None and len(weights) != len(nodes):
        raise ValueError(f"there are {len(weights)} weights for {len(nodes)} nodes: give one weight for each node")
    options.n_nodes = len(nodes)
    if nodes:
        options.nodes = (c_uint32 * len(nodes))(*nodes)
    if weights:
        options.weights = (c_uint32 * len(weights))(*weights)
    return options
