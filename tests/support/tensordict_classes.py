"""Classes for the tests of TensorDicts: subclasses and tensorclasses of every flavour.

They are defined at module level so that they can be pickled.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    TensorClass,
    TensorDict,
    TypedTensorDict,
    UnbatchedTensor,
    tensorclass,
)


class Episode(TensorDict):
    """A subclass that adds nothing."""


class Labelled(torch.Tensor):
    """A tensor subclass that adds nothing."""


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
    array: Any


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
    """Its `__post_init__` counts its calls and checks the fields."""

    pixels: torch.Tensor
    made = 0

    def __post_init__(self) -> None:
        type(self).made += 1
        assert self.pixels.dim() >= 2


class WithMethods(TensorClass):
    """Has a property and a method that look like fields."""

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


# ---- classes that change how they are moved ------------------------------------------------------


class OwnTo(TensorDict):
    """Its `.to` adds an entry, so a test can see that it was called."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        moved = super().to(*args, **kwargs)
        return moved.set("moved", torch.ones(moved.batch_size, device=moved.device))


class OwnSet(TensorDict):
    """Doubles each value that is set, so that setting an entry twice would show."""

    def _set_str(self, key: str, value: Any, **kwargs: Any) -> Any:
        doubled = value * 2 if isinstance(value, torch.Tensor) else value
        return super()._set_str(key, doubled, **kwargs)


class OwnConstructor(TensorDict):
    """Its constructor differs from TensorDict's."""

    def __init__(self, rows: int, device: str) -> None:
        data = {"rows": torch.arange(float(rows)).to(device)}
        super().__init__(data, [rows], device=device)


class OwnToClass(TensorClass):
    pixels: torch.Tensor

    def to(self, *args: Any, **kwargs: Any) -> Any:
        moved = self._tensordict.to(*args, **kwargs)
        return type(self)._from_tensordict(moved + 1)


class Text(NonTensorData):
    """A subclass that adds nothing."""


class Table(UnbatchedTensor):
    """A subclass that adds nothing."""


class Batches(LazyStackedTensorDict):
    """A subclass that adds nothing."""
