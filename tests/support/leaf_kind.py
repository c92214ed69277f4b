"""An entry of the catalogue: one kind of leaf."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

DIRECTIONS = ("H2D", "D2H", "D2D")

Outcome = str | type[Exception]
"""The outcome: "packed" and so on, an error class that `start_copy` raises, or NOT_THERE."""

NOT_THERE = "-"
"""This side cannot have such a leaf."""


@dataclass(frozen=True)
class Kind:
    make: Callable[[str], Any]
    """Makes the leaf, or a list of leaves, on a device; host-only leaves ignore the device."""
    h2d: Outcome
    d2h: Outcome
    d2d: Outcome
    leaves: int = 1
    large: bool = False
    """Whether it is too large for a copy in every container."""
    parts: Callable[[Any], list[Any]] = lambda leaf: leaf if isinstance(leaf, list) else [leaf]
    """Returns the plain leaves that it is copied as."""
    on_target: bool = False
    """Whether it is made on the target, not on the source."""
    within: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    """The context in which the copy is made."""
    fails: type[Exception] | None = None
    """The error that its own `.to` raises, and therefore `get()`."""
    lacking: dict[str, str] = field(default_factory=dict)
    """Device types that cannot have such a leaf, and the reasons."""
    needs: str = ""
    """A package, or a name in torch or numpy, that such a leaf needs."""

    def outcome(self, direction: str) -> Outcome:
        return {"H2D": self.h2d, "D2H": self.d2h, "D2D": self.d2d}[direction]

    @property
    def is_refused(self) -> bool:
        return not isinstance(self.h2d, str)

    @property
    def arrives(self) -> bool:
        return not self.is_refused and self.fails is None

    def why_missing(self, device_type: str) -> str | None:
        """Returns why this process cannot have such a leaf, or None if it can."""
        if self.needs and not is_there(self.needs):
            return f"needs {self.needs}"
        return self.lacking.get(device_type)


def is_there(name: str) -> bool:
    package, *attributes = name.split(".")
    if importlib.util.find_spec(package) is None:
        return False
    found: Any = {"torch": torch, "numpy": np}.get(package)
    for attribute in attributes:
        found = getattr(found, attribute, None)
    return not attributes or found is not None


def everywhere(make: Callable[[str], Any], outcome: Outcome, **more: Any) -> Kind:
    return Kind(make, outcome, outcome, outcome, **more)


def on_host(make: Callable[[], Any], outcome: Outcome, **more: Any) -> Kind:
    return Kind(lambda _device: make(), outcome, NOT_THERE, NOT_THERE, **more)


def value(make: Callable[[], Any]) -> Kind:
    return everywhere(lambda _device: make(), "opaque")
