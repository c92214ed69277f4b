"""The directions in which copies are timed, with their devices and targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from witness import Witness

import tdcopier

HOST = torch.device("cpu")
DMA, MEMCPY = "dma", "memcpy"  # names of the machine's limits in results
NOTHING: Mapping[str, Any] = MappingProxyType({})


class OverLimit(NamedTuple):
    """A target for how close a copy comes to the machine's limits."""

    most: float
    """The largest ratio of our time to that of the limit; of several limits, the slowest counts."""
    limits: tuple[str, ...] = (DMA,)


class Direction(NamedTuple):
    """One direction that :mod:`copies` runs."""

    name: str
    """``"h2d"``, ``"d2h"`` or ``"d2d"``: as in ``--only``, file names and the keys of results."""
    source: torch.device
    target: torch.device
    min_speedup: float
    """Detection batch: the target for the time of ``.to()`` per leaf over ours."""
    witness: Witness
    large_share: float = 1.0
    """The fraction of their usual rounds that large workloads get in this direction."""
    over_limits: Mapping[str, OverLimit] = NOTHING
    """By workload, the target relative to the machine's limits."""
    min_over_best: Mapping[str, float] = NOTHING
    """By workload, the target for the time of the best other way over ours."""

    @property
    def devices(self) -> list[torch.device]:
        """Its accelerators: one or two."""
        return [end for end in (self.source, self.target) if end.type != "cpu"]


def h2d(device: torch.device) -> Direction:
    either = OverLimit(1.15, (DMA, MEMCPY))
    return Direction(
        "h2d",
        HOST,
        device,
        48.0,
        Witness(("Memcpy HtoD",), "h2d"),
        over_limits={
            "detection_batch_with_images": OverLimit(1.5),
            "one_large": either,
            "many_large": either,
        },
        min_over_best={"atari_replay": 2.5},
    )


def d2h(device: torch.device) -> Direction:
    return Direction(
        "d2h",
        device,
        HOST,
        40.0,
        Witness(("Memcpy DtoH", "move_segments"), "d2h"),
        # Copies of a large tree into pageable memory are slow: it is new and faulted in each time.
        large_share=0.2,
        # The first call allocates pinned memory from the system. It is discarded as a warm-up.
        over_limits={"one_large": OverLimit(1.03)},
    )


def d2d(device: torch.device, other: torch.device) -> Direction:
    return Direction("d2d", device, other, 20.0, Witness(("Memcpy PtoP", "Memcpy DtoD"), "d2d"))


def possible(device: torch.device) -> dict[str, Direction]:
    """Return the directions that this machine has, by name.

    Args:
        device: The accelerator to benchmark; it is the source of D2D if there is a second one.

    """
    found = [h2d(device), d2h(device)]
    other = second_device(device)
    if other is not None:
        found.append(d2d(device, other))
    return {direction.name: direction for direction in found}


def second_device(device: torch.device) -> torch.device | None:
    """Return the next accelerator of the same kind, or None if there is only one."""
    count = torch.get_device_module(device).device_count()
    return torch.device(device.type, ((device.index or 0) + 1) % count) if count > 1 else None


def synchroniser(devices: list[torch.device]) -> Callable[[], None]:
    """Return a function that blocks the host until all work enqueued on these devices is done."""
    calls = [(torch.get_device_module(device).synchronize, device) for device in devices]

    def synchronise() -> None:
        for call, device in calls:
            call(device)

    return synchronise


def start_workers(direction: Direction) -> None:
    """Start the engine's and torch's threads now, so that they are not bound to one processor."""
    tdcopier.copy(torch.zeros(1 << 20, device=direction.source), direction.target)
    torch.ones(1 << 22).add_(1)
