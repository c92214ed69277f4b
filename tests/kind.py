"""What the catalogue says of one kind of leaf."""

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
"""What a leaf counts as: "packed" and so on; the error that `start_copy` raises; or NOT_THERE."""

NOT_THERE = "-"
"""There is no such leaf on this side."""


@dataclass(frozen=True)
class Kind:
    make: Callable[[str], Any]
    """The leaf, or a list of leaves, on a device; one that is only on the host ignores it."""
    h2d: Outcome
    d2h: Outcome
    d2d: Outcome
    leaves: int = 1
    large: bool = False
    """Too large to be copied in every container."""
    parts: Callable[[Any], list[Any]] = lambda leaf: leaf if isinstance(leaf, list) else [leaf]
    """The plain leaves that it travels as."""
    on_target: bool = False
    """Made on the target, not on the source."""
    within: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    """What the copy is made in."""
    fails: type[Exception] | None = None
    """What its own `.to` raises, and so `get()`."""
    lacking: dict[str, str] = field(default_factory=dict)
    """Kinds of device, and why they have no such leaf."""
    needs: str = ""
    """A package, or a name in torch or numpy, without which there is no such leaf."""

    def outcome(self, direction: str) -> Outcome:
        return {"H2D": self.h2d, "D2H": self.d2h, "D2D": self.d2d}[direction]

    @property
    def is_refused(self) -> bool:
        return not isinstance(self.h2d, str)

    @property
    def arrives(self) -> bool:
        return not self.is_refused and self.fails is None

    def why_missing(self, device_type: str) -> str | None:
        """Why this process cannot have such a leaf, if it cannot."""
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
