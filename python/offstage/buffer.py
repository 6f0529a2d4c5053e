# SPDX-License-Identifier: MIT
"""
Staging memory as Python sees it: one buffer as memoryview, numpy array and torch tensor, with no copy.

Who holds what: every view holds a small ctypes array, the array holds the memory, and the memory is closed when nobody
holds it any more. So a tensor keeps its buffer's bytes alive after the Buffer object is gone.
"""

import ctypes
import weakref
from ctypes import byref, c_uint64, c_void_p

from . import _lib
from ._lib import lib
from .context import default_context

_MAX_NODES = 1024


class _Memory:
    """The C buffer. Closed when the last view and the Buffer have let go."""

    def __init__(self, handle):
        self.handle = handle
        self.close = weakref.finalize(self, lib.offstage_buffer_close, handle)
        # Views may outlive the interpreter's last words; at exit the memory goes with the process.
        self.close.atexit = False


class Buffer:
    """
    `bytes` bytes of zeroed staging memory: placed, populated, locked, and checked page by page (offstage_buffer_create
    in offstage.h). Costs that many bytes rounded up to its page size.

    nodes: NUMA node or nodes on which the bytes lie; placement: "local", "bind", "interleave", "weighted" (with
    `weights`, one for each node) or "spill"; huge, lock: "prefer", "require" or "never"; shareable: other processes
    can map it (`fileno`); context: whose limits hold, default the process's shared context.
    """

    def __init__(self, bytes, *, nodes=None, placement=None, weights=None, huge=None, lock=None, shareable=False,
                 context=None):
        options = _lib.buffer_options(nodes=nodes, placement=placement, weights=weights, huge=huge, lock=lock,
                                      shareable=shareable)
        bytes = _lib.whole(bytes, "the size of a buffer in bytes")
        handle = c_void_p()
        context = context or default_context()
        lib.offstage_buffer_create(context.handle, bytes, byref(options), byref(handle))
        self._take(handle)

    @classmethod
    def from_fd(cls, fd, *, context=None):
        """Maps a buffer that another process made and passed as a descriptor, which stays the caller's."""
        self = cls.__new__(cls)
        handle = c_void_p()
        fd = fd if type(fd) is int and fd < 0 else _lib.whole(fd, "a descriptor", 2 ** 31 - 1)
        lib.offstage_buffer_import((context or default_context()).handle, fd, byref(handle))
        self._take(handle)
        return self

    def _take(self, handle):
        self._memory = _Memory(handle)
        self._views = None
        self._bytes = self.info()["requested"]

    def _open(self):
        if self._memory is None:
            raise ValueError("this buffer is closed: make a new one")
        return self._memory

    def _array(self):
        """The ctypes array that every view is made from: the same one as long as any view lives."""
        memory = self._open()
        array = self._views and self._views()
        if array is None:
            kind = ctypes.c_ubyte * self._bytes
            array = kind.from_address(lib.offstage_buffer_data(memory.handle)) if self._bytes else kind()
            array.memory = memory
            self._views = weakref.ref(array)
        return array

    def __len__(self):
        return self._bytes

    def __repr__(self):
        if self._memory is None:
            return "<offstage.Buffer, closed>"
        return f"<offstage.Buffer of {self._bytes} bytes ({self.info()['memory']})>"

    @property
    def nbytes(self):
        """How many bytes were asked for."""
        return self._bytes

    @property
    def address(self):
        """Where the first byte lies (0 for an empty buffer)."""
        return lib.offstage_buffer_data(self._open().handle) or 0

    def view(self):
        """The bytes as a writable memoryview."""
        return memoryview(self._array()).cast("B")

    # Python 3.12 and newer: memoryview(buffer), bytes(buffer), file.readinto(buffer).
    def __buffer__(self, flags):
        return self.view()

    @property
    def __array_interface__(self):
        # numpy keeps this object's array alive through the buffer that "data" exports.
        return {"version": 3, "shape": (self._bytes,), "typestr": "|u1", "data": self.view()}

    def numpy(self, dtype="uint8", shape=None):
        """The bytes as a numpy array of `dtype`; shape None is one dimension, as long as whole elements go."""
        import numpy

        dtype = numpy.dtype(dtype)
        if not dtype.itemsize:
            raise ValueError(f"elements of {dtype!r} have no bytes: name a type with a size, as 'S8'")
        array = numpy.frombuffer(self.view(), dtype=dtype, count=self._bytes // dtype.itemsize)
        return array if shape is None else _shaped(array, shape)

    def torch(self, dtype=None, shape=None):
        """The bytes as a torch tensor of `dtype` (None: uint8); shape None is one dimension."""
        import torch

        dtype = dtype or torch.uint8
        count = self._bytes // torch.empty((), dtype=dtype, device="cpu").element_size()
        tensor = torch.frombuffer(self._array(), dtype=dtype, count=count) if count else \
            torch.empty(0, dtype=dtype, device="cpu")
        return tensor if shape is None else _shaped(tensor, shape)

    def fileno(self):
        """The descriptor, owned by the buffer: dup it or pass it on. Needs shareable=True."""
        return lib.offstage_buffer_fd(self._open().handle)

    def info(self):
        """What was got, as a dict: requested, backed, huge and locked bytes, kind of memory, and why not more."""
        out = _lib.BufferInfo()
        lib.offstage_buffer_info(self._open().handle, byref(out))
        return out.as_dict()

    def nodes(self):
        """Bytes on each NUMA node, read from the kernel now: {node: bytes}."""
        counts = (c_uint64 * _MAX_NODES)()
        lib.offstage_buffer_nodes(self._open().handle, counts, _MAX_NODES)
        return {node: count for node, count in enumerate(counts) if count}

    def close(self):
        """
        Gives the memory back now. BufferError while a memoryview, array or tensor still shows it; without close() it
        goes when the last of them does.
        """
        if self._memory is None:
            return
        if self._views and self._views() is not None:
            raise BufferError("an array, tensor or memoryview still shows this buffer's memory: delete it first, or let "
                              "the buffer go out of scope and the memory is freed with its last view")
        self._memory.close()
        self._memory = None

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        # Views that live on keep the memory; leaving the block must not pull it away or hide the block's exception.
        if self._views and self._views() is not None:
            self._memory = None
        else:
            self.close()


def _shaped(flat, shape):
    """`flat` cut to `shape`, with a sentence when it doesn't fit."""
    need = 1
    for extent in (shape if isinstance(shape, (tuple, list)) else (shape,)):
        need *= _lib.whole(extent, "an extent of the shape")
    have = flat.shape[0]
    if need > have:
        raise ValueError(f"shape {tuple(shape) if isinstance(shape, (tuple, list)) else shape} needs {need} elements and "
                         f"the buffer has {have} of them: make the buffer larger")
    return flat[:need].reshape(shape)
