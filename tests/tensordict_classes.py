"""Classes of the tests of TensorDicts: subclasses and tensorclasses of every flavour, at module
level, so that they can be pickled.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorClass, TensorDict, TypedTensorDict, tensorclass


class Episode(TensorDict):
    """A subclass without anything of its own."""


class Labelled(torch.Tensor):
    """A subclass of tensor without anything of its own."""


# ---- tensorclasses -------------------------------------------------------------------------------


@tensorclass
class Decorated:
    pixels: torch.Tensor
    label: str
    mask: torch.Tensor | None = None


class Frames(TensorClass):
    pixels: torch.Tensor
    label: Any = "cat"
    mask: torch.Tensor | None = None


class Clip(Frames):
    """Inherits its fields, and has a tensorclass among its own."""

    inner: Frames | None = None
    weight: torch.Tensor | None = None


class Cast(TensorClass["autocast"]):
    pixels: torch.Tensor
    scale: float
    name: str
    array: np.ndarray[Any, Any]


class Uncast(TensorClass["nocast"]):
    pixels: torch.Tensor
    count: int
    anything: Any


class Frozen(TensorClass["frozen"]):
    pixels: torch.Tensor
    label: str = "cat"


class OnlyTensors(TensorClass["tensor_only"]):
    pixels: torch.Tensor
    mask: torch.Tensor


class Shadowing(TensorClass["shadow"]):
    keys: torch.Tensor
    values: torch.Tensor


class FrozenShadowing(TensorClass["frozen", "shadow"]):
    items: torch.Tensor
    size: str = "large"


class Checked(TensorClass):
    """Its `__post_init__` counts, and looks at what it is given."""

    pixels: torch.Tensor
    made = 0

    def __post_init__(self) -> None:
        type(self).made += 1
        assert self.pixels.dim() == 2


class WithMethods(TensorClass):
    """A property and a method that look like fields."""

    pixels: torch.Tensor

    @property
    def doubled(self) -> torch.Tensor:
        return self.pixels * 2

    def total(self) -> torch.Tensor:
        return self.pixels.sum()


# ---- typed ---------------------------------------------------------------------------------------


class State(TypedTensorDict):
    eta: torch.Tensor
    x: torch.Tensor


class LongerState(State):
    nested: State


class FrozenState(TypedTensorDict["frozen"]):
    eta: torch.Tensor
