"""The calls that every suite of this folder holds to its promise: one row of `CALLS` each.

A row says where the call reads and writes, and how it is made. All leaves of one call have one
value, so what arrives is compared with a number. To add a call is to add a row; where a promise
does not apply, `never` says why.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from filled_leaves import filled
from tensordict import TensorDict
from torch.utils._pytree import tree_leaves

import tdcopier
from tdcopier import _C

Leaves = list[torch.Tensor]
ROWS = torch.tensor([6, 0, 3])
"""The rows that calls of rows read or write, of tables that have 8."""


@dataclass(frozen=True)
class Call:
    """How a call is made, and which memory it uses.

    Attributes:
        start: Makes the call and returns the handle.
        source: Where it reads: "host", "device" (the first one) or "other" (the second one).
        target: Where it writes.
        fills: Whether it writes into memory that exists.
        pinned: Whether its host memory is pinned.
        requires_pinned: Whether it must fail if no memory can be pinned.
        tables: Which of its two sides are tables, of which it uses some rows.
        plan: Whether it is the copy of a plan: "plain", or "reusing" the results.
        never: What does not apply, each with the reason: "held" is that the host goes on while
            the engine's streams are held.
    """

    start: Callable[[Work], Any]
    source: str
    target: str
    fills: bool = False
    pinned: bool = False
    requires_pinned: bool = False
    tables: str = ""
    plan: str = ""
    never: dict[str, str] = field(default_factory=dict)

    @property
    def is_from_device(self) -> bool:
        return self.source != "host"

    @property
    def is_to_device(self) -> bool:
        return self.target != "host"

    @property
    def uses_a_device(self) -> bool:
        return self.is_from_device or self.is_to_device

    @property
    def makes_device_memory(self) -> bool:
        return self.is_to_device and not self.fills


class Work:
    """A call that is ready to be made, with leaves of its own."""

    def __init__(self, call: Call, device: str, value: float, elements: list[int]) -> None:
        places = {"host": "cpu", "device": device, "other": f"{device[:-1]}1"}
        self.call = call
        self.source, self.target = places[call.source], places[call.target]
        self.sources = [
            self._made(leaf, self.source, "source") for leaf in filled(value, elements, "cpu")
        ]
        self.written: Leaves = []
        if call.fills:
            self.written = [
                self._made(leaf, self.target, "target") for leaf in filled(0, elements, "cpu")
            ]

        self.plan = _plan(self.target, self.source, tuple(elements), call.plan)

    def _made(self, leaf: torch.Tensor, place: str, side: str) -> torch.Tensor:
        if self.call.tables:
            row = leaf[: len(leaf) // len(ROWS)]
            leaf = row.repeat(8 if side == self.call.tables else len(ROWS), 1)
        if place == "cpu" and self.call.pinned:
            return leaf.pin_memory()
        return leaf.to(place)

    def start(self) -> Any:
        return self.call.start(self)

    def arrived(self, result: Any) -> Leaves:
        """Returns the leaves of the result; of tables, the rows that were written."""
        leaves = list(result.values()) if isinstance(result, TensorDict) else tree_leaves(result)
        if self.call.tables == "target":
            leaves = [leaf[ROWS] for leaf in leaves]
        return leaves

    @property
    def devices(self) -> list[str]:
        return sorted({self.source, self.target} - {"cpu"})

    @property
    def reading(self) -> torch.Stream | None:
        """The stream of the engine that reads the sources, if they are on a device."""
        if self.source == "cpu":
            return None
        if self.source == self.target:
            return _C.copy_stream(self.source, "ordered")
        return _C.copy_stream(self.source, "from_device")

    @property
    def writing(self) -> torch.Stream | None:
        """The stream of the engine after which the results are there, if a device takes part."""
        if self.target == "cpu":
            return self.reading
        if self.call.fills or self.source != "cpu":
            return _C.copy_stream(self.target, "ordered")
        return _C.copy_stream(self.target, "to_device")


@functools.cache
def _plan(target: str, source: str, sizes: tuple[int, ...], kind: str) -> Any:
    """Returns a process's plan for such leaves; "reusing" ones keep two results."""
    example = [torch.zeros(size, device=source) for size in sizes]
    return tdcopier.prepare(example, target, reuse_outputs=kind == "reusing") if kind else None


def _copy(**options: Any) -> Callable[[Work], Any]:
    return lambda work: tdcopier.start_copy(work.sources, work.target, **options)


def _async_to(work: Work) -> Any:
    leaves = {f"{number}": leaf for number, leaf in enumerate(work.sources)}
    return tdcopier.async_to(TensorDict(leaves), work.target)


def _planned(work: Work) -> Any:
    return work.plan.start_copy(work.sources)


def _into(work: Work) -> Any:
    return tdcopier.start_copy_into(work.sources, [*work.written])


def _gather(work: Work) -> Any:
    if work.written:
        return tdcopier.start_gather(work.sources, ROWS, out=[*work.written])
    return tdcopier.start_gather(work.sources, ROWS, work.target)


def _scatter(work: Work) -> Any:
    return tdcopier.start_scatter(work.sources, [*work.written], ROWS)


HELD = {"held": "the host waits for the device, which reads or writes its memory where it is"}

CALLS: dict[str, Call] = {
    "copy to device": Call(_copy(), "host", "device"),
    "copy to host": Call(_copy(), "device", "host"),
    "copy between devices": Call(_copy(), "device", "other"),
    "pageable copy to device": Call(
        _copy(use_pinned_staging=False), "host", "device", never=HELD
    ),
    "pageable copy to host": Call(
        _copy(use_pinned_staging=False), "device", "host", never=HELD
    ),
    "copy to pinned results": Call(
        _copy(require_pinned_results=True), "device", "host", requires_pinned=True
    ),
    "copy without threads": Call(_copy(use_background_thread=False), "device", "host"),
    "copy of pinned": Call(_copy(), "host", "device", pinned=True, never=HELD),
    "async_to device": Call(_async_to, "host", "device"),
    "async_to host": Call(_async_to, "device", "host"),
    "planned to device": Call(_planned, "host", "device", plan="plain"),
    "planned to host": Call(_planned, "device", "host", plan="plain"),
    "planned between devices": Call(_planned, "device", "other", plan="plain"),
    "planned, reusing": Call(_planned, "host", "device", plan="reusing"),
    "into device": Call(_into, "host", "device", fills=True),
    "into host": Call(_into, "device", "host", fills=True),
    "into pinned": Call(_into, "device", "host", fills=True, pinned=True),
    "into the same device": Call(_into, "device", "device", fills=True),
    "into another device": Call(_into, "device", "other", fills=True),
    "into host from host": Call(
        _into, "host", "host", fills=True, never={"held": "no device takes part"}
    ),
    "gather to host": Call(
        _gather, "host", "host", tables="source", never={"held": "no device takes part"}
    ),
    "gather to device": Call(_gather, "host", "device", tables="source"),
    "gather of pinned": Call(
        _gather, "host", "device", pinned=True, tables="source", never=HELD
    ),
    "gather into device": Call(_gather, "host", "device", fills=True, tables="source"),
    "scatter": Call(_scatter, "device", "host", fills=True, tables="target"),
    "scatter to pinned": Call(
        _scatter, "device", "host", fills=True, pinned=True, tables="target"
    ),
}  # fmt: skip


def each_call(holds: Callable[[Call], bool] = lambda _: True, promise: str = "") -> Any:
    """Parametrizes a test over the calls for which this holds and to which the promise applies."""
    names = [name for name, call in CALLS.items() if holds(call) and promise not in call.never]
    return pytest.mark.parametrize("call", names)


def calls_for(devices: int) -> list[str]:
    """Returns the calls that can be made with this number of devices."""
    return [
        name
        for name, row in CALLS.items()
        if devices > 1 or "other" not in (row.source, row.target)
    ]


def work_of(call: str, device: str, value: float, elements: list[int]) -> Work:
    """Prepares the call with leaves of a value."""
    return Work(CALLS[call], device, value, elements)
