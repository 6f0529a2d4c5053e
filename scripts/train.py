# SPDX-License-Identifier: MIT
"""
The demo: a small GPT, trained on bytes of real text, once with torch.optim.AdamW and once with offstage.AdamW.

Both runs have the same seed, data, schedule and clipping. Written: DIR/result.json (the table), DIR/demo.png (losses
and one step's timeline), DIR/trace.json (that timeline, for Perfetto or chrome://tracing). Called by scripts/demo.
"""

import argparse
import glob
import json
import math
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LICENCES = "/usr/share/common-licenses"
MODELS = {  # layers, width, heads
    "tiny": (2, 128, 4), "small": (4, 256, 8), "medium": (6, 384, 8), "large": (12, 768, 12)}
FEWEST = 5  # steps
SUBGROUP = 256 << 10  # elements: a small model has several of them this way, so that stages overlap as in a large one


def arguments():
    p = argparse.ArgumentParser(prog="demo", description="Trains a small GPT with torch.optim.AdamW and with "
                                "offstage.AdamW, same seed, and compares.")
    p.add_argument("--quick", action="store_true", help="a tiny model and few steps: under 20 seconds")
    p.add_argument("--text", metavar="FILE", help="what to train on (default: the licences in Debian's base-files)")
    p.add_argument("--model", choices=MODELS, help="layers x width: " + ", ".join(
        f"{name} {layers}x{width}" for name, (layers, width, _) in MODELS.items()) + " (default: small; --quick: tiny)")
    p.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of the parameters (default: fp32); bf16 has fp32 "
                   "masters, in torch's run too (kept and cast by this program, because torch.optim has none)")
    p.add_argument("--steps", type=int, help="of each run (default: as many as fit into the time, 100 at most)")
    p.add_argument("--batch", type=int, default=4, help="sequences per step (default: 4)")
    p.add_argument("--context", type=int, help="bytes per sequence (default: 128; --quick: 64)")
    p.add_argument("--lr", type=float, default=1e-3, help="largest learning rate (default: 1e-3)")
    p.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradients (default: 1)")
    p.add_argument("--seed", type=int, default=1, help="of model and data (default: 1)")
    p.add_argument("--drain", choices=("backward", "step"), default="backward", help="when gradients are drained "
                   "(default: backward)")
    p.add_argument("--link", type=float, default=4.0, metavar="GB/S", help="of the emulated link, each way; 0: as fast as "
                   "memory copies go (default: 4)")
    p.add_argument("--out", type=Path, default=ROOT / "build" / "demo", metavar="DIR", help="where results go "
                   "(default: build/demo)")
    a = p.parse_args()
    a.model = a.model or ("tiny" if a.quick else "small")
    a.context = a.context or (64 if a.quick else 128)
    a.seconds = math.inf if a.steps else 3.0 if a.quick else 60.0  # of the first run; the second does as many steps
    a.steps = a.steps or (30 if a.quick else 100)
    if a.steps < FEWEST or a.batch < 1 or a.context < 2:
        p.error(f"it takes {FEWEST} steps, a batch of 1 and a context of 2 bytes at least")
    if not (0 <= a.lr < math.inf and 0 < a.clip < math.inf and 0 <= a.link < math.inf):
        p.error("the learning rate and the link are 0 or more, and the norm to clip to is above 0")
    return a


def read_text(a):
    """The bytes to train on, and what they are called."""
    if a.text:
        name = a.text
        try:
            data = Path(a.text).read_bytes()
        except OSError as error:
            sys.exit(f"demo: the text {a.text} can't be read ({error.strerror}): give another file with --text")
    else:
        files = sorted(f for f in glob.glob(LICENCES + "/*") if not os.path.islink(f))
        data = b"".join(Path(f).read_bytes() for f in files)
        name = f"{LICENCES}/* (Debian package base-files, {len(files)} files)"
    if len(data) <= a.context + 1:
        sys.exit(f"demo: {name} has {len(data)} bytes, and a context of {a.context} needs more: give another file with --text, "
                 "or a smaller --context")
    return data, name


ARGUMENTS = arguments() if __name__ == "__main__" else None  # before torch, whose import takes seconds

sys.path.insert(0, str(ROOT / "python"))
try:
    import torch
    from torch import nn
    from torch.nn import functional
except ImportError as missing:
    sys.exit(f"demo: this Python ({sys.executable}) has no PyTorch ({missing}): run scripts/demo, which finds one")
import offstage  # noqa: E402


# ---- the model ------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a norm."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, mask):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-2, -1)) * (width // self.heads) ** -0.5 + mask[:length, :length]
        attended = functional.softmax(scores, dim=-1) @ v
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Bytes in, the next byte out. The embedding is tied to the head."""

    def __init__(self, layers, width, heads, context):
        super().__init__()
        self.embed, self.place = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.register_buffer("mask", torch.full((context, context), float("-inf")).triu(1), persistent=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        self.head.weight = self.embed.weight

    def forward(self, x, y):
        hidden = self.embed(x) + self.place.weight[:x.shape[1]]
        for block in self.blocks:
            hidden = block(hidden, self.mask)
        logits = self.head(self.norm(hidden)).float()
        return functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def make_model(a):
    torch.manual_seed(a.seed)
    model = GPT(*MODELS[a.model], a.context)
    return model.bfloat16() if a.dtype == "bf16" else model


def batches(a, data):
    """The same batches in each run."""
    generator = torch.Generator().manual_seed(a.seed)
    text = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    for _ in range(a.steps):
        starts = torch.randint(0, len(text) - a.context - 1, (a.batch,), generator=generator)
        rows = torch.stack([text[s:s + a.context + 1] for s in starts])
        yield rows[:, :-1], rows[:, 1:]


def schedule(k):
    """Factor of the learning rate: a short rise, then slowly down. The number of steps needn't be known."""
    return min((k + 1) / 10, (10 / (k + 1)) ** 0.3)


# ---- the two optimizers -----------------------------------------------------------------------------------------------


class WithTorch:
    """torch.optim.AdamW; for bf16 parameters on fp32 masters, with the casts that this needs."""

    name = "torch.optim.AdamW"

    def __init__(self, a, model):
        self.clip = a.clip
        self.parameters = list(model.parameters())
        self.masters = None
        if a.dtype == "bf16":
            self.masters = [nn.Parameter(p.detach().float()) for p in self.parameters]
        self.optimizer = torch.optim.AdamW(self.masters or self.parameters, lr=a.lr)

    def step(self):
        if self.masters:
            for p, master in zip(self.parameters, self.masters):
                master.grad = None if p.grad is None else p.grad.float()
        nn.utils.clip_grad_norm_(self.masters or self.parameters, self.clip)
        self.optimizer.step()
        if self.masters:
            with torch.no_grad():
                for p, master in zip(self.parameters, self.masters):
                    p.copy_(master)

    def zero_grad(self):
        for p in self.parameters:
            p.grad = None

    def bytes_per_parameter(self):
        count = sum(p.numel() for p in self.parameters)
        state = sum(v.numel() * v.element_size() for s in self.optimizer.state.values() for k, v in s.items() if k != "step")
        return (state + sum(4 * m.numel() for m in self.masters or [])) / count


class WithOffstage:
    """offstage.AdamW; clipping is part of its step."""

    name = "offstage.AdamW"

    def __init__(self, a, model):
        speed = a.link * 1e9
        self.context = offstage.default_context()
        self.optimizer = offstage.AdamW(
            model.parameters(), lr=a.lr, max_grad_norm=a.clip, drain=a.drain, subgroup=SUBGROUP, lock="prefer",
            accumulate=False if a.drain == "backward" else None, link=dict(d2h=speed, h2d=speed, latency=10e-6))

    def step(self):
        self.optimizer.step()

    def zero_grad(self):
        self.optimizer.zero_grad(set_to_none=True)


def library_faults():
    """Page faults so far of the library's own threads, which carry its name."""
    faults = 0
    for task in glob.glob("/proc/self/task/*/stat"):
        try:
            line = Path(task).read_text()
        except OSError:
            continue  # the thread has ended
        name, rest = line[line.index("(") + 1:].rsplit(")", 1)
        if name.startswith("offstage"):
            faults += int(rest.split()[7])
    return faults


# ---- training -----------------------------------------------------------------------------------------------------------


class Progress:
    """A bar on a terminal, a line now and then elsewhere."""

    def __init__(self, name, steps, seconds):
        self.name, self.steps, self.seconds = name, steps, seconds
        self.begin, self.quarter = time.monotonic(), 0
        self.bar = sys.stderr.isatty()

    def show(self, done, loss):
        """After a step. True when it was the last one: all are done, or the time is over."""
        passed = time.monotonic() - self.begin
        part = max(done / self.steps, min(1.0, passed / self.seconds) if done >= FEWEST else 0.0)
        text = f"{done:3} steps  loss {loss:.4f}  {passed / done * 1e3:.0f} ms/step"
        if self.bar:
            full = int(30 * part)
            sys.stderr.write(f"\r{self.name:18} [{'=' * full}{' ' * (30 - full)}] {text} \033[K{chr(10) if part == 1 else ''}")
            sys.stderr.flush()
        elif int(4 * part) > self.quarter:
            self.quarter = int(4 * part)
            print(f"{self.name:18} {25 * self.quarter:3}%  {text}", flush=True)
        return part == 1


def train(a, data, kind):
    """One run; gives its losses and measurements."""
    model = make_model(a)
    run = kind(a, model)
    ours = kind is WithOffstage
    scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, schedule)
    progress = Progress(run.name, a.steps, math.inf if ours else a.seconds)
    losses, spans = [], []
    optimizer_seconds = iteration_seconds = 0.0
    first = None
    faults = 0
    for k, (x, y) in enumerate(batches(a, data)):
        if ours and k == a.steps - 1:
            before = run.context.stats()["allocations"]
            run.context.trace_start(1 << 14)
            first["allocations"] += run.context.stats()["allocations"] - before  # for the trace, not for the step
        times = [time.monotonic_ns()]
        loss = model(x, y)
        times.append(time.monotonic_ns())
        loss.backward()
        times.append(time.monotonic_ns())
        run.step()
        times.append(time.monotonic_ns())
        scheduler.step()
        run.zero_grad()
        losses.append(loss.item())
        if k:  # the first step makes state and warms up, in both
            optimizer_seconds += (times[3] - times[2]) / 1e9
            iteration_seconds += (times[3] - times[0]) / 1e9
        if ours and k == 0:
            first = dict(run.context.stats(), library_faults=library_faults())
        elif ours:
            faults += run.optimizer.last_step.minor_faults
        spans = list(zip(("forward", "backward", "step"), times, times[1:]))
        if progress.show(k + 1, losses[-1]):
            break
    out = dict(losses=losses, optimizer_seconds=optimizer_seconds, iteration_seconds=iteration_seconds, spans=spans,
               model=model, run=run)
    if ours:
        stats = run.context.stats()
        out["since_first"] = {key: stats[key] - first[key] for key in stats}
        out["faults"] = faults + library_faults() - first["library_faults"]
        out["info"] = run.optimizer.info()
    return out


# ---- results ------------------------------------------------------------------------------------------------------------


def size_text(count):
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 10240 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024


def locked_text(info, limit):
    """Whether the optimizer's memory is locked, and why not."""
    need = info["state_bytes"] + info["slot_bytes"] + info["landing_bytes"]
    if info["locked"] >= need:
        return f"yes, {size_text(info['locked'])}"
    if limit < 1 << 63:
        return f"{size_text(info['locked'])} of {size_text(need)}: RLIMIT_MEMLOCK is {size_text(limit)} (ulimit -l)"
    return f"{size_text(info['locked'])} of {size_text(need)}"


def write_trace(path, context, spans, device):
    """The library's spans and the trainer's in one Chrome trace. Gives the spans as (track, name, begin ms, ms)."""
    context.trace_save(path)
    trace = json.loads(path.read_text())
    events = trace["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    work = [e for e in events if e["ph"] == "X"]
    # The library's clock starts at its first span; a step's last refill is what step() returns from.
    end = max((e["ts"] + e["dur"] for e in work), default=0.0)
    shift = (spans[-1][2] - spans[0][1]) / 1e3 - end
    for e in work:
        e["ts"] += shift
    tid = 1 + max(names, default=0)
    events.append(dict(ph="M", pid=1, name="process_name", args=dict(name="offstage on " + device)))
    events.append(dict(ph="M", pid=1, tid=tid, name="thread_name", args=dict(name="trainer")))
    zero = spans[0][1]
    for name, begin, finish in spans:
        events.append(dict(ph="X", pid=1, tid=tid, name=name, ts=(begin - zero) / 1e3, dur=(finish - begin) / 1e3))
    path.write_text(json.dumps(trace))
    out = [("trainer", name, (begin - zero) / 1e6, (finish - begin) / 1e6) for name, begin, finish in spans]
    return out + [(names[e["tid"]], e["name"], e["ts"] / 1e3, e["dur"] / 1e3) for e in work]


def draw(path, a, result, torch_losses, our_losses, timeline):
    """The picture: losses of both, how far they are apart, and where the time of the last step went."""
    try:
        import matplotlib
    except ImportError:
        print("no picture was drawn: this Python has no matplotlib (Debian: python3-matplotlib)")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    ink, torch_ink, our_ink = "#333333", "#e07b39", "#2a6f97"
    colours = dict(forward="#b8c4cc", backward="#8d9aa3", step="#5c6770", drain="#2a6f97", norm="#61a5c2",
                   update="#e07b39", refill="#6a994e")
    pyplot.rcParams.update({"font.size": 9, "axes.edgecolor": ink, "axes.labelcolor": ink, "xtick.color": ink,
                            "ytick.color": ink, "axes.spines.top": False, "axes.spines.right": False})
    figure = pyplot.figure(figsize=(9.5, 8.4))
    grid = figure.add_gridspec(3, 2, height_ratios=(3, 1.2, 2.2), width_ratios=(1.25, 1), hspace=0.48, wspace=0.06)
    top, middle = figure.add_subplot(grid[0, :]), figure.add_subplot(grid[1, :])
    whole = figure.add_subplot(grid[2, 0])
    close = figure.add_subplot(grid[2, 1], sharey=whole)
    steps = range(1, len(torch_losses) + 1)
    top.plot(steps, torch_losses, color=torch_ink, linewidth=4, alpha=0.55, label="torch.optim.AdamW")
    top.plot(steps, our_losses, color=our_ink, linewidth=1.2, label="offstage.AdamW")
    top.set_ylabel("loss (nats per byte)")
    top.set_title(f"GPT with {result['parameters'] / 1e6:.1f} M parameters ({a.dtype}), {a.steps} steps, same seed", loc="left",
                  color=ink)
    top.legend(frameon=False, loc="upper right")
    apart = [(k, abs(x - y)) for k, x, y in zip(steps, torch_losses, our_losses) if x != y]
    middle.set_yscale("log")
    if apart:
        middle.plot(*zip(*apart), ".", color=ink, markersize=4)
        middle.set_ylim(min(d for _, d in apart) / 3, max(d for _, d in apart) * 3)
    middle.set_ylabel("difference")
    middle.set_xlabel("step (equal in every bit where there is no dot)")
    for axis in (top, middle):
        axis.grid(axis="y", color="#e6e6e6", linewidth=0.6)
        axis.set_xlim(0.5, len(torch_losses) + 0.5)

    tracks = ["trainer", "drain", "norm", "update", "refill"]
    end = max(begin + length for _, _, begin, length in timeline)
    step = min(begin for track, name, begin, _ in timeline if (track, name) == ("trainer", "step"))
    for axis, left in ((whole, 0.0), (close, step - 0.04 * (end - step))):
        for track, name, begin, length in timeline:
            colour = colours.get(name, ink)
            # With an edge, so that what takes microseconds can be seen beside what takes a second.
            axis.broken_barh([(begin, length)], (tracks.index(track) - 0.34, 0.68), facecolors=colour, edgecolors=colour,
                             linewidth=0.5)
            shown = min(begin + length, end) - max(begin, left)
            if track == "trainer" and shown > 0.1 * (end - left):
                axis.text(max(begin, left) + shown / 2, 0, "step()" if name == "step" else name, ha="center", va="center",
                          color="white", fontsize=8)
        axis.set_xlim(left, end + 0.02 * (end - left))
        axis.tick_params(axis="y", length=0)
        axis.set_xlabel("ms since the iteration began")
        axis.grid(axis="x", color="#e6e6e6", linewidth=0.6)
        axis.set_axisbelow(True)
    whole.set_yticks(range(len(tracks)))
    whole.set_yticklabels(tracks)
    whole.set_ylim(len(tracks) - 0.4, -0.6)
    close.tick_params(labelleft=False)
    whole.set_title("the last iteration", loc="left", color=ink)
    close.set_title("its step(), larger", loc="left", color=ink)
    figure.text(0.125, 0.045, result["device"], color="#777777", fontsize=8)
    figure.savefig(path, dpi=140, bbox_inches="tight")
    pyplot.close(figure)


def main():
    a = ARGUMENTS
    begin = time.monotonic()
    # Debian's torch takes one thread where two share a core.
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    data, text = read_text(a)
    try:  # before the runs, which take minutes
        a.out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=a.out).close()
    except OSError as error:
        sys.exit(f"demo: results can't be written to {a.out} ({error.strerror}): give another directory with --out")
    info = offstage.default_context().info()
    count = sum(p.numel() for p in make_model(a).parameters())
    print(f"text: {text}, {size_text(len(data))}\nmodel: {a.model}, {count / 1e6:.2f} M parameters in {a.dtype}; "
          f"{a.batch} x {a.context} bytes per step; torch {torch.__version__}, {torch.get_num_threads()} threads", flush=True)

    theirs = train(a, data, WithTorch)
    a.steps = len(theirs["losses"])
    ours = train(a, data, WithOffstage)

    moved, got = ours["since_first"], ours["info"]
    shortest = min(moved["update_ns"], moved["refill_ns"])
    steps = a.steps - 1
    result = {
        "loss_torch": theirs["losses"][-1],
        "loss_offstage": ours["losses"][-1],
        "max_loss_diff": max(abs(x - y) for x, y in zip(theirs["losses"], ours["losses"])),
        "bytes_per_param": got["state_bytes"] / got["elements"],
        "provider": info["provider"],
        "isa": info["isa"],
        "pins_after_first_step": moved["pins"],
        "faults_after_first_step": ours["faults"],
        "optimizer_seconds_torch": theirs["optimizer_seconds"],
        "optimizer_seconds_offstage": ours["optimizer_seconds"],
        "allocations_after_first_step": moved["allocations"],
        "iteration_seconds_torch": theirs["iteration_seconds"],
        "iteration_seconds_offstage": ours["iteration_seconds"],
        "bytes_per_param_torch": theirs["run"].bytes_per_parameter(),
        "slot_bytes_per_param": (got["slot_bytes"] + got["landing_bytes"]) / got["elements"],
        "bytes_drained": moved["drained_bytes"],
        "bytes_refilled": moved["refilled_bytes"],
        "overlap": moved["overlap_ns"] / shortest if shortest else 0.0,
        "device": got["device"],
        "locked_bytes": got["locked"],
        "locked": locked_text(got, info["memlock_limit"]),
        "threads": info["threads"],
        "threads_why": info["threads_why"],
        "torch": torch.__version__,
        "text": text,
        "model": a.model,
        "dtype": a.dtype,
        "parameters": got["elements"],
        "steps": a.steps,
        "drain": a.drain,
        "losses_torch": theirs["losses"],
        "losses_offstage": ours["losses"],
    }
    (a.out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    timeline = write_trace(a.out / "trace.json", ours["run"].context, ours["spans"], got["device"])
    draw(a.out / "demo.png", a, result, theirs["losses"], ours["losses"], timeline)

    def milliseconds(seconds):
        return f"{seconds / steps * 1e3:.1f} ms"

    master = "state and fp32 master" if a.dtype == "bf16" else "the parameter is its own master"
    rows = [
        ("", "torch.optim.AdamW", "offstage.AdamW"),
        ("loss at the end", f"{result['loss_torch']:.5f}", f"{result['loss_offstage']:.5f}"),
        ("largest difference of the loss", "", f"{result['max_loss_diff']:.2e}"),
        ("optimizer bytes per parameter", f"{result['bytes_per_param_torch']:.2f} ({master})",
         f"{result['bytes_per_param']:.2f} (fp32 master and moments) + {result['slot_bytes_per_param']:.2f} of slots"),
        ("time in the optimizer, per step", milliseconds(theirs["optimizer_seconds"]), milliseconds(ours["optimizer_seconds"])),
        ("time of all, per step", milliseconds(theirs["iteration_seconds"]), milliseconds(ours["iteration_seconds"])),
        ("drained, per step", "", f"{size_text(result['bytes_drained'] / steps)}, during {a.drain}"),
        ("refilled, per step", "", size_text(result["bytes_refilled"] / steps)),
        ("update and refill overlap", "", f"{result['overlap'] * 100:.0f}% of the shorter one"),
        ("pins after the first step", "", str(result["pins_after_first_step"])),
        ("page faults after the first step", "", str(result["faults_after_first_step"])),
        ("memory locked", "", result["locked"]),
        ("device", "", result["device"]),
        ("provider, ISA, threads", "", f"{result['provider']}, {result['isa']}, {result['threads']} ({result['threads_why']})"),
    ]
    widths = [max(len(row[k]) for row in rows) for k in range(2)]
    print()
    for row in rows:
        print(f"{row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]}".rstrip())
    print("\nThe time in the optimizer includes clipping in both" +
          ("; offstage has drained most gradients by then, during backward." if a.drain == "backward" else "."))
    print("The device is emulated: its memory is ordinary memory and its link a model. The rest is real.")
    shown = a.out.relative_to(Path.cwd()) if a.out.is_relative_to(Path.cwd()) else a.out
    print(f"\n{shown}/demo.png  {shown}/trace.json (for Perfetto)  {shown}/result.json   "
          f"[{time.monotonic() - begin:.0f} s, {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB]")


if __name__ == "__main__":
    main()
