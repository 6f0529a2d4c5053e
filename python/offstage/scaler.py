# SPDX-License-Identifier: MIT
"""
offstage.LossScaler: a dynamic loss scale with torch.amp.GradScaler's interface and rules.

GradScaler looks for Inf and NaN in p.grad. With drain="backward" there is nothing left there, and with shard=True each
rank sees only its own: here the optimizer's step itself decides, over all gradients, and the scaler follows.
"""

import ctypes
from ctypes import byref

from . import _lib
from ._lib import lib
from .optimizer import _Offloaded


class LossScaler:
    """
    scaler = offstage.LossScaler()
    scaler.scale(loss).backward()
    scaler.step(optimizer)      # an offstage optimizer; unscaling is part of the update's pass
    scaler.update()

    State dicts are torch.amp.GradScaler's: either loads the other's.
    """

    def __init__(self, init_scale=65536.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, enabled=True):
        if not init_scale > 0:
            raise ValueError(f"init_scale is {init_scale}: a scale is above 0")
        if not growth_factor > 1.0:
            raise ValueError(f"growth_factor is {growth_factor}: it is above 1")
        if not 0.0 < backoff_factor < 1.0:
            raise ValueError(f"backoff_factor is {backoff_factor}: it is between 0 and 1")
        self._enabled = enabled
        self._scaler = _lib.Scaler()
        lib.offstage_scaler_init(byref(self._scaler))
        self._scaler.scale = init_scale
        self._scaler.growth_factor = growth_factor
        self._scaler.backoff_factor = backoff_factor
        self._scaler.growth_interval = growth_interval
        self._unscaled = set()  # ids of optimizers whose gradients unscale_ has divided
        self._stepped = {}  # id of an optimizer: whether its step was skipped

    def scale(self, outputs):
        """Multiplies a loss, or each of a list or tuple of them, by the scale."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, (list, tuple)):
            return type(outputs)(self.scale(output) for output in outputs)
        return outputs * self._scaler.scale

    def unscale_(self, optimizer):
        """Divides p.grad by the scale, for somebody who looks at gradients before step(). Needs drain="step"."""
        self._check(optimizer)
        if not self._enabled:
            return
        if optimizer._options["drain"] == "backward":
            raise RuntimeError("unscale_() divides what is in p.grad, and drain='backward' has taken it away: leave it out, "
                               "step() unscales; use max_grad_norm to clip")
        if id(optimizer) in self._stepped:
            raise RuntimeError("unscale_() was called after step(): call it before, or update() first")
        if id(optimizer) in self._unscaled:
            raise RuntimeError("unscale_() was called twice for this optimizer since the last update()")
        self._unscaled.add(id(optimizer))
        inverse = 1.0 / self._scaler.scale
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.detach().mul_(inverse)

    def step(self, optimizer, *arguments, **keywords):
        """optimizer.step(), which unscales, and skips the step whole if a gradient has Inf or NaN."""
        self._check(optimizer)
        if not self._enabled:
            return optimizer.step(*arguments, **keywords)
        if "closure" in keywords or arguments:
            raise RuntimeError("step() takes no closure with a loss scale, because the closure would need it: call backward() "
                               "first")
        if optimizer._options["nonfinite"] == "apply":
            raise RuntimeError("a loss scale is found by skipping steps that overflow, and this optimizer applies them "
                               "(nonfinite='apply'): make it with nonfinite='skip'")
        if id(optimizer) in self._stepped:
            raise RuntimeError("step() was called twice for this optimizer since the last update()")
        scale = 1.0 if id(optimizer) in self._unscaled else self._scaler.scale
        optimizer._scaled = True
        try:
            # By its public name: a learning-rate scheduler counts calls of it.
            out = optimizer.step(loss_scale=scale, **keywords)
        finally:
            optimizer._scaled = False
        self._stepped[id(optimizer)] = optimizer.last_step.skipped == "nonfinite"
        return out

    def update(self, new_scale=None):
        """After the steps of an iteration: backs off if one was skipped, grows after growth_interval good ones."""
        if not self._enabled:
            return
        if new_scale is not None:
            self._scaler.scale = float(new_scale)
        elif not self._stepped:
            raise RuntimeError("update() was called with no step() since the last one: call scaler.step(optimizer) first")
        else:
            lib.offstage_scaler_update(byref(self._scaler), any(self._stepped.values()))
        self._unscaled.clear()
        self._stepped.clear()

    @staticmethod
    def _check(optimizer):
        if not isinstance(optimizer, _Offloaded):
            raise TypeError(f"{type(optimizer).__name__} isn't one of offstage's optimizers: use torch.amp.GradScaler for it")

    def get_scale(self):
        """The scale now (1.0 when disabled)."""
        return self._scaler.scale if self._enabled else 1.0

    def is_enabled(self):
        """Whether it does anything."""
        return self._enabled

    def get_growth_factor(self):
        """The factor after growth_interval good steps."""
        return self._scaler.growth_factor

    def set_growth_factor(self, factor):
        """Sets the factor after growth_interval good steps."""
        self._scaler.growth_factor = factor

    def get_backoff_factor(self):
        """The factor after a skipped step."""
        return self._scaler.backoff_factor

    def set_backoff_factor(self, factor):
        """Sets the factor after a skipped step."""
        self._scaler.backoff_factor = factor

    def get_growth_interval(self):
        """How many good steps in a row make it grow."""
        return self._scaler.growth_interval

    def set_growth_interval(self, steps):
        """Sets how many good steps in a row make it grow."""
        self._scaler.growth_interval = steps

    def state_dict(self):
        """torch.amp.GradScaler's keys; empty when disabled."""
        if not self._enabled:
            return {}
        s = self._scaler
        return {"scale": s.scale, "growth_factor": s.growth_factor, "backoff_factor": s.backoff_factor,
                "growth_interval": s.growth_interval, "_growth_tracker": s.good_steps}

    def load_state_dict(self, state_dict):
        """Loads what state_dict() of this class or of torch.amp.GradScaler gave."""
        if not self._enabled:
            return
        if not state_dict:
            raise RuntimeError("the state dict is empty: it was saved by a disabled scaler")
        s = self._scaler
        s.scale = state_dict["scale"]
        s.growth_factor = state_dict["growth_factor"]
        s.backoff_factor = state_dict["backoff_factor"]
        s.growth_interval = state_dict["growth_interval"]
        s.good_steps = state_dict["_growth_tracker"]

    def __getstate__(self):
        if self._stepped or self._unscaled:
            raise RuntimeError("a scaler was pickled in the middle of an iteration: do it after update()")
        return {"enabled": self._enabled, "scaler": bytes(self._scaler)}

    def __setstate__(self, state):
        self._enabled = state["enabled"]
        self._scaler = _lib.Scaler.from_buffer_copy(state["scaler"])
        self._unscaled = set()
        self._stepped = {}


assert ctypes.sizeof(_lib.Scaler) == 32, "struct offstage_scaler and its ctypes form differ"
