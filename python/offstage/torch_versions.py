# SPDX-License-Identifier: MIT
"""
Where PyTorch 1.13 and the versions after it differ. Nothing else in this package asks for torch's version or probes
its attributes; each function says what it is for and which versions need it.
"""

import torch
import torch.distributed as dist


def optimizer_defaults(torch_class, lr, betas, eps, weight_decay, **options):
    """
    The defaults that torch's own `torch_class` would have for these arguments, checked by torch's own rules: so the
    parameter groups have exactly the keys of this version, and state dicts go both ways. Options that this version
    doesn't have (fused and differentiable are not in 1.13's AdamW) change nothing here and are left out; None is
    this version's own default.
    """
    probe = torch.zeros(1, dtype=torch.float32, device="cpu", requires_grad=True)
    known = dict(torch_class([probe]).defaults)
    kept = {name: value for name, value in options.items() if name in known and value is not None}
    # fused=True on a probe only checks that the device has it; the choice itself is recorded below.
    quiet = {name: value for name, value in kept.items() if name not in ("fused", "foreach")}
    defaults = dict(torch_class([probe], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, **quiet).defaults)
    defaults.update(kept)
    if options.get("decoupled_weight_decay"):  # torch.optim.Adam has it from 2.6 on
        defaults["decoupled_weight_decay"] = True
    return defaults


def on_gradient(parameter, call):
    """
    Calls call(parameter) during backward whenever the parameter's .grad has got this backward's gradient. Returns a
    handle with remove(). Needs a leaf with requires_grad. In all versions torch has let go of its lock on the gradient
    when the call comes: backward passes over one parameter must not run at the same time.
    """
    if hasattr(parameter, "register_post_accumulate_grad_hook"):  # torch 2.1 and newer
        return parameter.register_post_accumulate_grad_hook(call)
    # Before that: a hook on the graph node that accumulates. The node lives only as long as somebody holds it.
    with torch.enable_grad():
        node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
    return _NodeHook(node, node.register_hook(lambda *_: call(parameter)))


class _NodeHook:
    def __init__(self, node, handle):
        self._node = node
        self._handle = handle

    def remove(self):
        self._handle.remove()
        self._node = None


def bump_version(tensor):
    """Tells autograd that the tensor's memory was written, as an in-place operation would."""
    increment = getattr(torch.autograd.graph, "increment_version", None)
    if increment is not None:  # torch 2.1 and newer
        increment(tensor)
        return
    with torch.no_grad():
        # An in-place operation on no elements. A 0-dimensional tensor can't be sliced, so it gets a dimension.
        (tensor.detach() if tensor.dim() else tensor.detach().view(1))[:0].zero_()


def gradient_dtype(parameter):
    """The type that the parameter's .grad has: its own, unless grad_dtype says otherwise (torch 2.9 and newer)."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def run_load_hooks(optimizer, state_dict):
    """Runs the hooks that come before load_state_dict (torch 2.1 and newer); gives the dict to load."""
    for hook in getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", {}).values():
        changed = hook(optimizer, state_dict)
        if changed is not None:
            state_dict = changed
    return state_dict


class load_hooks_off:
    """While this is entered, load_state_dict runs no hooks of the kind that run_load_hooks has run already."""

    def __init__(self, optimizer):
        self._optimizer = optimizer

    def __enter__(self):
        hooks = self._hooks = getattr(self._optimizer, "_optimizer_load_state_dict_pre_hooks", None)
        if hooks is not None:
            self._optimizer._optimizer_load_state_dict_pre_hooks = type(hooks)()

    def __exit__(self, *exception):
        if self._hooks is not None:
            self._optimizer._optimizer_load_state_dict_pre_hooks = self._hooks


def reduce_scatter(share, whole, process_group):
    """
    Sums `whole` over the ranks and leaves this rank's part of the sum in `share`. gloo has no reduce-scatter in torch
    1.13 (and for long after); there every rank gets the whole sum and keeps its part, at twice the traffic. Both give
    every rank the same bits. `whole` is overwritten.
    """
    scatter = getattr(dist, "reduce_scatter_tensor", None)
    if scatter is not None and (process_group, scatter) not in _without_reduce_scatter:
        try:
            scatter(share, whole, group=process_group)
            return
        except (RuntimeError, NotImplementedError) as error:
            # Backends refuse before anything is sent, and alike on all ranks; a failure of the network isn't that.
            if "support" not in str(error):
                raise
            _without_reduce_scatter.add((process_group, scatter))
    dist.all_reduce(whole, group=process_group)
    rank = dist.get_rank(process_group)
    share.copy_(whole[rank * share.numel():(rank + 1) * share.numel()])


_without_reduce_scatter = set()
