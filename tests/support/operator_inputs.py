"""Inputs that are the same on any device, for programs that run on several.

A program receives :class:`Inputs` and returns its outputs, in nested lists, tuples and dicts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Program = Callable[["Inputs"], Any]


class Inputs:
    """Makes the same inputs on any device, and keeps them, those with a gradient apart."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.leaves: list[torch.Tensor] = []
        self.others: list[torch.Tensor] = []
        self._numbers = torch.Generator().manual_seed(1)

    def rand(self, *shape: int, grad: bool = True, dtype: Any = torch.float32) -> torch.Tensor:
        """Returns a leaf in [0.1, 1.1)."""
        made = (torch.rand(shape, generator=self._numbers, dtype=dtype) + 0.1).to(self.device)
        if grad:
            self.leaves.append(made.requires_grad_())
        else:
            self.others.append(made)
        return made

    def ints(self, high: int, *shape: int) -> torch.Tensor:
        made = torch.randint(high, shape, generator=self._numbers).to(self.device)
        self.others.append(made)
        return made

    def bools(self, *shape: int) -> torch.Tensor:
        return self.ints(2, *shape).bool()

    def module(self, make: Callable[[], nn.Module]) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            made = copy.deepcopy(make()).to(self.device)
        self.leaves += [leaf for leaf in made.parameters() if leaf.requires_grad]
        self.others += made.buffers()
        return made

    def generator(self) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(4)


def applied(make: Callable[[], nn.Module], *shape: int) -> Program:
    """Applies a module to one input of this shape."""
    return lambda i: i.module(make)(i.rand(*shape))


def of_one(function: Callable[..., Any], *shape: int, **options: Any) -> Program:
    return lambda i: function(i.rand(*(shape or (3, 4))), **options)


def twice_differentiated(make: Callable[[], nn.Module], *shape: int) -> Program:
    """Penalises a gradient, as WGAN-GP and meta learning do."""

    def program(i: Inputs) -> Any:
        given = i.rand(*shape)
        result = i.module(make)(given)
        result = result[0] if isinstance(result, tuple) else result
        (gradient,) = torch.autograd.grad(result.square().sum(), given, create_graph=True)
        return gradient

    return program
