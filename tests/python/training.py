# SPDX-License-Identifier: MIT
"""How tests train: data from a seed, losses, and gradients without a model."""

import copy

import torch
from torch.nn import functional


class Network(torch.nn.Sequential):
    """
    A small network with every kind of shape. It computes in fp32 whatever the type of its parameters: torch 1.13 has no
    fp16 on the CPU.
    """

    def __init__(self):
        super().__init__(torch.nn.Embedding(13, 16), torch.nn.Linear(16, 33), torch.nn.LayerNorm(33), torch.nn.GELU(),
                         torch.nn.Linear(33, 13, bias=False))

    def forward(self, x):
        hidden = functional.linear(functional.embedding(x, self[0].weight.float()), self[1].weight.float(),
                                   self[1].bias.float())
        hidden = functional.gelu(functional.layer_norm(hidden, (33,), self[2].weight.float(), self[2].bias.float()))
        return functional.linear(hidden, self[4].weight.float())


def network(dtype=torch.float32):
    """The same one each time."""
    torch.manual_seed(7)
    return Network().to(dtype)


def batch(seed, n=8):
    """Inputs and targets for the network."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 13, (n, 5), generator=generator), torch.randint(0, 13, (n, 5), generator=generator)


def loss_of(model, seed, n=8):
    """The mean loss on the batch of that seed."""
    x, y = batch(seed, n)
    return functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


def train(model, optimizer, steps, first=0, set_to_none=True):
    """Plain training; gives the losses."""
    losses = []
    for seed in range(first, first + steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = loss_of(model, seed)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def twins(model):
    """The model and an independent copy of it."""
    return model, copy.deepcopy(model)


def set_gradients(parameters, seed, scale=1.0):
    """The same normal gradients for each list of parameters, in each one's type."""
    generator = torch.Generator().manual_seed(seed)
    for p in parameters:
        p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.dtype)


def same_bits(a, b):
    """Whether two tensors are equal in every bit (NaN included)."""
    whole = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype == b.dtype and a.shape == b.shape and \
        torch.equal(a.detach().contiguous().view(whole), b.detach().contiguous().view(whole))


def snapshot(optimizer):
    """All parameters and all state, copied."""
    state = optimizer.state_dict()["state"]
    return ([p.detach().clone() for group in optimizer.param_groups for p in group["params"]],
            {key: {name: torch.as_tensor(value).clone() for name, value in entry.items()} for key, entry in state.items()})


def assert_same(before, after):
    """Two snapshots are the same, bit for bit."""
    for a, b in zip(before[0], after[0]):
        assert same_bits(a, b)
    assert before[1].keys() == after[1].keys()
    for key, entry in before[1].items():
        assert entry.keys() == after[1][key].keys()
        for name, value in entry.items():
            assert same_bits(value.float(), after[1][key][name].float()), (key, name)
