# SPDX-License-Identifier: MIT
"""
offstage: training with the optimizer's state in host staging memory.

    import offstage
    optimizer = offstage.AdamW(model.parameters(), lr=3e-4)     # a torch.optim.Optimizer

    AdamW, Adam     torch.optim's, with state in staging memory and the update by the host's Adam
    LossScaler      torch.amp.GradScaler's interface, for gradients that are drained during backward
    Buffer          staging memory as memoryview, numpy array and torch tensor
    Context         threads, limits and provider; most programs need none
    info, stats     what was got, and the counters

torch and numpy are imported only by what needs them: Buffer works without either.
"""

from ._lib import Error, __version__
from .buffer import Buffer
from .context import Context, default_context, features

__all__ = ["Adam", "AdamW", "Buffer", "Context", "Error", "LossScaler", "StepResult", "__version__",
           "default_context", "features", "info", "stats"]

_FROM_TORCH_PARTS = {"Adam": "optimizer", "AdamW": "optimizer", "StepResult": "optimizer", "LossScaler": "scaler"}


def __getattr__(name):
    if name not in _FROM_TORCH_PARTS:
        raise AttributeError(f"module 'offstage' has no attribute {name!r}")
    import importlib

    try:
        importlib.import_module("torch")
    except ImportError as error:
        raise ImportError(f"offstage.{name} needs PyTorch 1.13 or newer, and this interpreter can't import it ({error}): "
                          "install python3-torch, or use the interpreter that scripts/setup --python prints") from error
    value = getattr(importlib.import_module("." + _FROM_TORCH_PARTS[name], __name__), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted(__all__)


def info():
    """What the shared context got, its NUMA nodes ("nodes") and what this build has ("features"), as a dict."""
    context = default_context()
    return dict(context.info(), nodes=context.nodes(), features=features())


def stats():
    """The shared context's counters, as a dict."""
    return default_context().stats()
