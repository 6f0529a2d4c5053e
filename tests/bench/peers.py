# SPDX-License-Identifier: MIT
"""
Adam against its peers, in one process and in turn: offstage_adam(), its ceiling, DeepSpeed's CPU Adam, and PyTorch's
fused AdamW. Fills the columns over_deepspeed and over_torch of BUILD/bench/adam.json; null where a peer is absent.

    GLIBC_TUNABLES=glibc.malloc.hugetlb=1 PYTHON tests/bench/peers.py BUILD [--params N] [--repeat N]

All do the same job: gradients of one type in, parameters of that type out, state in fp32. The peers know fp32 only, so
for bf16 they need a cast before and a cast after. For fp32 they need neither, and update the parameter in place (28 bytes
of traffic), while offstage writes master and parameter (32); "master only" is offstage without the latter. All have the same number of threads, and huge pages: the peers' tensors through
glibc's tunable above, which tests/bench/run sets.
"""

import argparse
import ctypes
import json
import os
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # no search for nvcc
os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")


def arguments():
    parser = argparse.ArgumentParser(description="Adam against its peers")
    parser.add_argument("build", type=Path)
    parser.add_argument("--params", type=lambda text: int(float(text)), default=64 << 20)
    parser.add_argument("--repeat", type=int, default=9)
    return parser.parse_args()


ARGS = arguments()
os.environ.setdefault("OFFSTAGE_LIBRARY", str((ARGS.build / "liboffstage.so.0").resolve()))
sys.path.insert(0, str(ROOT / "python"))

import torch  # noqa: E402
from offstage import _lib  # noqa: E402

LR, BETAS, EPS, DECAY = 1e-4, (0.9, 0.999), 1e-8, 0.01


class Ours:
    """offstage_adam() on staging memory."""

    def __init__(self, grad):
        self.context = ctypes.c_void_p()
        options = _lib.Options(lock=_lib.WANT["prefer"])
        _lib.lib.offstage_open(ctypes.byref(options), ctypes.byref(self.context))
        self.info = _lib.Info()
        _lib.lib.offstage_info(self.context, ctypes.byref(self.info))
        n, size = grad.numel(), grad.element_size()
        # Pages between the arrays keep them out of one another's cache sets, as the peers' separate allocations are.
        gap = 5 * 4096
        ends = [0]
        for each in (4, 4, 4, size, size):
            ends.append((ends[-1] + n * each + 4095) // 4096 * 4096 + gap)
        self.buffer = ctypes.c_void_p()
        _lib.lib.offstage_buffer_create(self.context, ends[-1], None, ctypes.byref(self.buffer))
        base = _lib.lib.offstage_buffer_data(self.buffer)
        self.group = _lib.Group(lr=LR, beta1=BETAS[0], beta2=BETAS[1], eps=EPS, weight_decay=DECAY)
        dtype = _lib.BF16 if grad.dtype == torch.bfloat16 else _lib.F32
        self.adam = _lib.Adam(n=n, moment_dtype=_lib.F32, grad_dtype=dtype, param_dtype=dtype,
                              group=ctypes.pointer(self.group), t=0)
        for name, at in zip(("master", "exp_avg", "exp_avg_sq", "grad", "param"), ends):
            kind = dict(_lib.Adam._fields_)[name]
            setattr(self.adam, name, ctypes.cast(base + at, kind) if kind is not ctypes.c_void_p else base + at)
        ctypes.memmove(base + ends[3], grad.data_ptr(), n * size)

    def step(self):
        self.adam.flags = 0
        self.adam.t += 1
        _lib.lib.offstage_adam(self.context, ctypes.byref(self.adam))

    def master_only(self):
        """No parameter is written: the peers' traffic in fp32, where their master is the parameter."""
        param, self.adam.param = self.adam.param, None
        self.step()
        self.adam.param = param

    def ceiling(self):
        self.adam.flags = 2  # OFFSTAGE_ADAM_CEILING
        self.adam.t = max(self.adam.t, 1)
        _lib.lib.offstage_adam(self.context, ctypes.byref(self.adam))

    def close(self):
        _lib.lib.offstage_buffer_close(self.buffer)
        _lib.lib.offstage_close(self.context)


class Peer:
    """A PyTorch optimizer over fp32, with the casts that 16-bit gradients and parameters need."""

    def __init__(self, grad, make):
        self.grad16 = grad if grad.dtype != torch.float32 else None
        self.param16 = torch.zeros_like(grad) if self.grad16 is not None else None
        self.master = torch.nn.Parameter(torch.zeros(grad.numel()))
        self.master.grad = torch.empty_like(self.master) if self.grad16 is not None else grad
        self.optimizer = make([self.master])

    def step(self):
        if self.grad16 is not None:
            self.master.grad.copy_(self.grad16)
        self.optimizer.step()
        if self.param16 is not None:
            self.param16.copy_(self.master.detach())


def make_torch(params):
    return torch.optim.AdamW(params, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True)


def make_deepspeed(params):
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(params, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, adamw_mode=True,
                            fp32_optimizer_states=True)


def peer(name, grad, make):
    """The peer after its first step, or None and a line that says why it isn't there."""
    try:
        made = Peer(grad, make)
        made.step()
        return made
    except Exception as error:  # whatever a peer's import or build does, the others are measured
        print(f"skipped: {name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        return None


def measure(dtype, repeat):
    grad = (torch.rand(ARGS.params) - 0.5).mul_(0.02).to(dtype)
    ours = Ours(grad)
    torch.set_num_threads(ours.info.threads)
    contestants = {"offstage": ours.step, "ceiling": ours.ceiling}
    if dtype == torch.float32:
        contestants["master only"] = ours.master_only
    for name, make in (("deepspeed", make_deepspeed), ("torch", make_torch)):
        made = peer(name, grad, make)
        if made:
            contestants[name] = made.step
    seconds = {name: [] for name in contestants}
    for i in range(-1, repeat):
        for name, run in contestants.items():
            begin = time.perf_counter()
            run()
            if i >= 0:
                seconds[name].append(time.perf_counter() - begin)
    ours.close()
    over = {name: statistics.median(theirs / mine for theirs, mine in zip(seconds[name], seconds["offstage"]))
            for name in seconds}
    return {name: statistics.median(values) for name, values in seconds.items()}, over, ours.info


def version(package):
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def main():
    path = ARGS.build / "bench" / "adam.json"
    result = json.loads(path.read_text()) if path.exists() else {}
    print(f"Adam against peers, {ARGS.params} parameters, medians of {ARGS.repeat} repetitions in turn")
    for key, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        seconds, over, info = measure(dtype, ARGS.repeat)
        for name, value in seconds.items():
            print(f"{key} {name:12}{value * 1e3:9.2f} ms   {over[name]:6.3f} of offstage's time")
        entry = result.setdefault(key, {"of_ceiling": over["ceiling"]})
        entry["over_deepspeed"] = over.get("deepspeed")
        entry["over_torch"] = over.get("torch")
        entry["peers_run"] = {"of_ceiling": over["ceiling"], "seconds": seconds, "params": ARGS.params,
                              "threads": info.threads}
    result["torch"], result["deepspeed"] = version("torch"), version("deepspeed")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
