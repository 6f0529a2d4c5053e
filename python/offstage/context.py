# SPDX-License-Identifier: MIT
"""
Contexts: limits, threads and the provider that buffers and optimizers of a process share.

Most programs never name one: `default_context()` is opened when it is first needed. A forked child can't use its
parent's handles (their threads aren't there), so the child opens a default context of its own when it needs one.
"""

import os
import threading
import weakref
from ctypes import byref, c_void_p

from . import _lib
from ._lib import lib


class Context:
    """
    An open context. Buffers and optimizers made from it keep the C side alive until they are closed, in any order.

    threads: of the update (0: from the affinity mask, the CPU quota and the number of local ranks)
    provider, isa: as OFFSTAGE_PROVIDER and OFFSTAGE_ISA; None is the best there is
    budget: hard ceiling in bytes of all buffers together; 0 is none
    lock: "require" (default), "prefer" or "never", for buffers that don't say
    """

    def __init__(self, *, threads=0, provider=None, isa=None, budget=0, lock=None):
        self._arguments = dict(threads=threads, provider=provider, isa=isa, budget=budget, lock=lock)
        threads = _lib.whole(threads, "threads", _lib.ALL)
        budget = _lib.whole(budget, "budget")
        options = _lib.Options(threads=threads, provider=_lib.text(provider), isa=_lib.text(isa), budget=budget,
                               lock=_lib.choice(_lib.WANT, lock, "lock"))
        handle = c_void_p()
        lib.offstage_open(byref(options), byref(handle))
        self._handle = handle
        self._close = weakref.finalize(self, lib.offstage_close, handle)

    @property
    def handle(self):
        """The C handle, for the other parts of this package."""
        if not self._close.alive:
            raise ValueError("this context is closed: open a new one")
        return self._handle

    def close(self):
        """Drops this reference; what was made from the context stays usable."""
        self._close()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    # A context is a connection, not data: a copy of something that uses it uses the same one, and another process
    # opens one of its own with the same options.
    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        return _reopen, (self._arguments,)

    def info(self):
        """What was got, as a dict: version, provider, isa, threads and why so many, limits, page sizes."""
        out = _lib.Info()
        lib.offstage_info(self.handle, byref(out))
        return out.as_dict()

    def stats(self):
        """The counters since the context was opened, as a dict (offstage_stats in offstage.h)."""
        out = _lib.Stats()
        lib.offstage_stats(self.handle, byref(out))
        return out.as_dict()

    def nodes(self):
        """Facts of every NUMA node with memory, as a list of dicts."""
        out = []
        while True:
            node = _lib.NodeInfo()
            try:
                lib.offstage_node_info(self.handle, len(out), byref(node))
            except _lib.Error as error:
                if error.errno == 2:  # ENOENT: there are no more
                    return out
                raise
            out.append(node.as_dict())

    def trace_start(self, capacity=65536):
        """Keeps the first `capacity` spans of drain, norm, update and refill from now on; 0 stops and drops them."""
        lib.offstage_trace_start(self.handle, _lib.whole(capacity, "capacity", _lib.ALL))

    def trace_save(self, path):
        """Writes the spans as a Chrome trace that Perfetto opens."""
        lib.offstage_trace_save(self.handle, _lib.text(path))


def _reopen(arguments):
    return Context(**arguments)


def features():
    """What this build of the library has: a dict from the feature's name to "" when it is on, else to what is missing."""
    out = {}
    index = 0
    while True:
        feature = _lib.Feature()
        try:
            lib.offstage_feature(index, byref(feature))
        except _lib.Error as error:
            if error.errno == 2:  # ENOENT: there are no more
                return out
            raise
        facts = feature.as_dict()
        out[facts["name"]] = "" if facts["on"] else facts["why"] or "off"
        index += 1


_lock = threading.Lock()
_default = None


def default_context():
    """The process's shared context, opened at the first call."""
    global _default
    with _lock:
        if _default is None or not _default._close.alive:
            _default = Context()
        return _default


def _after_fork():
    # The parent may have held the lock at the moment of the fork; nobody in the child does.
    global _default, _lock
    _lock = threading.Lock()
    _default = None


os.register_at_fork(after_in_child=_after_fork)
