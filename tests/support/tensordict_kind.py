"""An entry of the catalogue of TensorDicts: one kind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from leaf_kind import is_there


class Counts(NamedTuple):
    """The expected first fields of `handle.stats`."""

    packed: int = 0
    alone: int = 0
    delegated: int = 0
    reused: int = 0
    opaque: int = 0


@dataclass(frozen=True)
class TdKind:
    make: Callable[[str], Any]
    """Makes the TensorDict on a device; host-only kinds ignore the device."""
    h2d: Counts
    d2h: Counts | None
    """None: this kind cannot be on a device."""
    d2d: Counts | None
    large: bool = False
    """Whether it is too large for a copy under every option."""
    on_target: bool = False
    """Whether it is made on the target, not on the source."""
    within: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    """The context in which it is made and copied."""
    lacking: dict[str, str] = field(default_factory=dict)
    """Device types, including "meta", that it cannot be copied from or to, and the reasons."""
    needs: str = ""
    """A package, or a name in torch or tensordict, that this kind needs."""

    def counts(self, direction: str) -> Counts | None:
        return {"H2D": self.h2d, "D2H": self.d2h, "D2D": self.d2d}[direction]

    def why_missing(self, *device_types: str) -> str | None:
        """Returns why it cannot be on, or move between, these device types here, or None."""
        if self.needs and not is_there(self.needs):
            return f"needs {self.needs}"
        return next((self.lacking[each] for each in device_types if each in self.lacking), None)


def anywhere(make: Callable[[str], Any], counts: Counts, **more: Any) -> TdKind:
    return TdKind(make, **{"h2d": counts, "d2h": counts, "d2d": counts} | more)


def host_only(make: Callable[[], Any], counts: Counts, **more: Any) -> TdKind:
    return TdKind(lambda _device: make(), counts, None, None, **more)


def packed(leaves: int, **others: int) -> Counts:
    return Counts(packed=leaves, **others)


def delegated(leaves: int = 1, **others: int) -> Counts:
    return Counts(delegated=leaves, **others)


def opaque(values: int = 1) -> Counts:
    return Counts(opaque=values)
