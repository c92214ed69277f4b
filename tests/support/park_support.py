"""Shared by the tests of parking: small models on a device, and their bytes."""

from __future__ import annotations

from typing import Any

import torch
from support import same_bytes
from torch import nn

from tdcopier._park.tensors import tensors_in

LARGE = 100_000
"""Elements of a float tensor that is transferred from where it is, without packing."""


class Model(nn.Module):
    """Tied weights, a view of a parameter, buffers, a tensor without elements, large and small."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 50)
        self.head.weight = self.embed.weight
        self.large = nn.Parameter(torch.randn(LARGE))
        self.register_buffer("table", torch.randn(300, 300))
        self.register_buffer("lower", self.table[150:])
        self.register_buffer("nothing", torch.empty(0, 3), persistent=False)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        found = self.norm(self.embed(numbers))
        return self.head(found) * self.large.mean() + self.lower.mean()


def trained(device: str, steps: int = 1) -> tuple[Model, torch.optim.Optimizer]:
    """Returns a model on the device and its optimizer, after some steps."""
    torch.manual_seed(0)
    model = Model().to(device)
    model.head.weight = model.embed.weight  # `to` may separate what is shared
    model.lower = model.table[150:]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number in range(steps):
        step(model, optimizer, number)
    return model, optimizer


class Overwriting(torch.optim.Optimizer):
    """Overwrites its parameters, on the device alone."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1.0})
        self.sevens = [torch.full_like(each, 7) for each in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            closure()
        for parameter, new in zip(self.param_groups[0]["params"], self.sevens, strict=True):
            parameter.copy_(new)


def step(model: Model, optimizer: torch.optim.Optimizer, number: int) -> float:
    device = model.large.device
    batch = ((torch.arange(8) + 5 * number) % 50).to(device)  # no row twice: sums keep their order
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def all_tensors(*states: Any) -> list[torch.Tensor]:
    """Returns the tensors, gradients included: first those on devices."""
    found = tensors_in(states, gradients=True)
    return [*found.tensors, *found.on_host]


def has_memory(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor with elements has memory; False if it is parked."""
    try:
        return tensor.untyped_storage().data_ptr() != 0
    except RuntimeError as error:
        if "parked" not in str(error):
            raise
        return False


def values_of(*states: Any) -> list[torch.Tensor]:
    """Returns copies on the host of all tensors, gradients included."""
    return [each.detach().cpu().clone() for each in all_tensors(*states)]


def assert_values(expected: list[torch.Tensor], *states: Any) -> None:
    now = values_of(*states)
    assert len(now) == len(expected)
    assert all(same_bytes(a, b) for a, b in zip(now, expected, strict=True))


def is_resident(*states: Any) -> bool:
    """Whether all tensors have memory; fails if only some have."""
    found = tensors_in(states, gradients=True).tensors
    have_it = [has_memory(each) for each in found if each.numel() != 0]
    assert all(have_it) or not any(have_it), have_it
    return all(have_it)
