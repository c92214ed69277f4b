"""A call that is held to the promises, and the leaves, memory and handle that it works with."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_leaves

import tdcopier
from tdcopier import _C

Leaves = list[torch.Tensor]
Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]
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
        pinned: How its host memory is pinned: "by torch", or "in place" by `pin_memory_`.
        requires_pinned: Whether it must fail if no memory can be pinned.
        tables: Which of its two sides are tables, of which it uses some rows; or "neither", if it
            puts rows together.
        numbers_on_device: Whether the device has the numbers of these rows.
        delegated: Why torch copies its leaves: each has a "gradient", or is a "wrapper" of two.
        plan: Whether it is the copy of a plan: "plain", or "reusing" the results.
        packed: Where it packs its sources first, and copies the parcel: "pageable" memory, "pinned"
            memory, "read-only" bytes, a "mapped" file, memory that was "given", or on their
            "device"; or "destination", if a parcel is what it fills.
        never: What does not apply, each with the reason: "held" is that the host goes on while
            the engine's streams are held, "busy" that it goes on while those of the caller are,
            "unasked" that the copy goes on before the handle is asked, "pinned" that results on
            the host are in pinned memory, "told" that a failure is told by a handle, "others" that
            any stream may be the handle's consumer, "itself" that the result is what was given, and
            "interrupted" that nothing is left by an interrupt at any point.
    """

    start: Callable[[Work], Any]
    source: str
    target: str
    fills: bool = False
    pinned: str = ""
    requires_pinned: bool = False
    tables: str = ""
    numbers_on_device: bool = False
    delegated: str = ""
    plan: str = ""
    packed: str = ""
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
    def reads_pinned(self) -> bool:
        return bool(self.pinned) or self.packed == "pinned"

    @property
    def makes_memory(self) -> bool:
        return not self.fills

    @property
    def makes_device_memory(self) -> bool:
        return self.is_to_device and self.makes_memory

    @property
    def makes_host_memory(self) -> bool:
        return not self.is_to_device and self.makes_memory


class Work:
    """A call that is ready to be made, with leaves of its own."""

    def __init__(self, call: Call, device: str, leaves: Leaves) -> None:
        """Takes leaves on the host; where tables take part, they are the rows that are copied."""
        places = {"host": "cpu", "device": device, "other": f"{device[:-1]}1"}
        self.call = call
        self.source, self.target = places[call.source], places[call.target]
        self.sources = [self._made(leaf, self.source, "source") for leaf in leaves]
        self.written: Leaves = []
        if call.fills:
            empty = [torch.zeros_like(leaf) for leaf in leaves]
            self.written = [self._made(leaf, self.target, "target") for leaf in empty]
        self.parcel_memory: Callable[[], Any] = lambda: None
        if call.packed == "destination":
            self.written = self._views_of_a_parcel(self.written)

        layouts = tuple((leaf.shape, leaf.stride(), leaf.dtype) for leaf in leaves)
        self.plan = _plan(self.target, self.source, layouts, call.plan)
        self.rows = ROWS.to(self.devices[0]) if call.numbers_on_device else ROWS
        self.pins: Any = None
        if call.pinned == "in place":
            on_host = self.sources if self.source == "cpu" else self.written
            self.pins = tdcopier.pin_memory_([*on_host], device)

    def _made(self, leaf: torch.Tensor, place: str, side: str) -> torch.Tensor:
        if self.call.tables == side:
            zeros = torch.zeros(
                8 * leaf[0].nbytes, dtype=torch.uint8
            )  # torch fills not every dtype
            table = zeros.view(leaf.dtype).view(8, *leaf.shape[1:])
            for row, number in zip(leaf, ROWS, strict=True):
                table[number].copy_(row)
            leaf = table
        if place == "cpu" and self.call.pinned == "by torch":
            return leaf.pin_memory()
        leaf = leaf.to(place)
        if self.call.delegated == "wrapper":
            return TwoTensor(leaf, leaf.clone())
        # A leaf of the graph could not be written in place.
        return leaf.requires_grad_().clone() if self.call.delegated else leaf

    def _views_of_a_parcel(self, leaves: Leaves) -> Leaves:
        """Returns views of a parcel's memory; only they, and who uses the memory, keep it."""
        memory = np.zeros(tdcopier.pack(leaves).nbytes, np.uint8)
        self.parcel_memory = weakref.ref(memory)
        views: Leaves = tdcopier.pack(leaves, out=memory).tree()
        return views

    def start(self) -> Any:
        return self.call.start(self)

    def arrived(self, result: Any) -> Leaves:
        """Returns the leaves of the result; of tables, the rows that were written."""
        if isinstance(result, tdcopier.Parcel):
            result = result.tree()
        leaves = list(result.values()) if isinstance(result, TensorDict) else tree_leaves(result)
        if self.call.tables == "target":
            leaves = [leaf[ROWS] for leaf in leaves]
        if self.call.delegated == "wrapper":
            leaves = [leaf.a for leaf in leaves]
        return leaves

    @property
    def devices(self) -> list[str]:
        return sorted({self.source, self.target} - {"cpu"})

    @property
    def reading(self) -> torch.Stream | None:
        """The stream of the engine that reads the sources, if they are on a device."""
        if self.source == "cpu":
            return None
        if self.call.delegated:
            return torch.get_device_module(self.source).current_stream(self.source)
        if self.source == self.target:
            return _C.copy_stream(self.source, "ordered")
        return _C.copy_stream(self.source, "from_device")

    @property
    def writing(self) -> torch.Stream | None:
        """The stream of the engine after which the results are there, if a device takes part."""
        if self.target == "cpu":
            return self.reading
        if self.call.delegated:
            return torch.get_device_module(self.target).current_stream(self.target)
        if self.call.fills or self.call.numbers_on_device or self.source != "cpu":
            return _C.copy_stream(self.target, "ordered")
        return _C.copy_stream(self.target, "to_device")


class Done:
    """A result that the call itself returned, with the methods of a handle."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def get(self) -> Any:
        return self._result

    wait = get

    def ready(self) -> bool:
        return True

    def wait_staged(self) -> None:
        return None


class Enqueued(Done):
    """A result that the current stream makes."""

    def __init__(self, result: Any, device: str) -> None:
        super().__init__(result)
        self._device = device
        self._made = torch.Event(device)
        self._made.record(self._current_stream())

    def _current_stream(self) -> torch.Stream:
        stream: torch.Stream = torch.get_device_module(self._device).current_stream(self._device)
        return stream

    def ready(self) -> bool:
        return self._made.query()

    def get(self) -> Any:
        self._made.synchronize()
        return self._result

    def wait(self) -> Any:
        """Lets the stream that is current now use the result, as a user of torch does."""
        stream = self._current_stream()
        self._made.wait(stream)
        for leaf in self._result:
            leaf.record_stream(stream)
        return self._result


class Failed:
    """A failure that a call itself raised, with the methods of a handle."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error.with_traceback(None)

    def get(self) -> Any:
        raise self._error

    wait = get

    def ready(self) -> bool:
        return True

    def wait_staged(self) -> None:
        return None


@functools.cache
def _plan(target: str, source: str, layouts: tuple[Layout, ...], kind: str) -> Any:
    """Returns a process's plan for such leaves; "reusing" ones keep two results."""
    if not kind:
        return None
    example = [
        torch.empty_strided(shape, stride, dtype=dtype, device=source)
        for shape, stride, dtype in layouts
    ]
    return tdcopier.prepare(example, target, reuse_outputs=kind == "reusing")
