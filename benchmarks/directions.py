"""The directions in which copies are timed: from where to where, and what is wanted of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from witness import Witness

HOST = torch.device("cpu")
DMA, MEMCPY = "dma", "memcpy"  # the machine's limits, as results name them
NOTHING: Mapping[str, Any] = MappingProxyType({})


class OverLimit(NamedTuple):
    """How near to the machine's limits a copy is wanted to be."""

    most: float
    """Of our time over that of the limit; of several, the slowest."""
    limits: tuple[str, ...] = (DMA,)


class Direction(NamedTuple):
    """One direction, as :mod:`copies` runs it."""

    name: str
    """``"h2d"``, ``"d2h"`` or ``"d2d"``: as in ``--only``, file names and the keys of results."""
    source: torch.device
    target: torch.device
    min_speedup: float
    """Detection batch: how many times longer ``.to()`` per leaf is wanted to take."""
    witness: Witness
    large_share: float = 1.0
    """Share of the rounds of a large workload that it gets here."""
    over_limits: Mapping[str, OverLimit] = NOTHING
    """By workload, what is wanted of it beside the machine's limits."""
    min_over_best: Mapping[str, float] = NOTHING
    """By workload, how many times longer the best of the other ways is wanted to take."""

    @property
    def devices(self) -> list[torch.device]:
        """The accelerators at its ends: one, or two."""
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
        # A large tree takes long into pageable memory, which is fresh, and faulted in, each time.
        large_share=0.2,
        # The first call gets pinned memory from the system. It is not among those that are kept.
        over_limits={"one_large": OverLimit(1.03)},
    )


def d2d(device: torch.device, other: torch.device) -> Direction:
    return Direction("d2d", device, other, 20.0, Witness(("Memcpy PtoP", "Memcpy DtoD"), "d2d"))


def possible(device: torch.device) -> dict[str, Direction]:
    """The directions that this machine has, by name.

    Args:
        device: The accelerator that is benchmarked; with a second one, it is the source of D2D.

    """
    found = [h2d(device), d2h(device)]
    other = second_device(device)
    if other is not None:
        found.append(d2d(device, other))
    return {direction.name: direction for direction in found}


def second_device(device: torch.device) -> torch.device | None:
    """The next accelerator of the same kind; None where there is one only."""
    count = torch.get_device_module(device).device_count()
    return torch.device(device.type, ((device.index or 0) + 1) % count) if count > 1 else None


def synchroniser(devices: list[torch.device]) -> Callable[[], None]:
    """Blocks the host until everything that was enqueued on these devices is done."""
    calls = [(torch.get_device_module(device).synchronize, device) for device in devices]

    def synchronise() -> None:
        for call, device in calls:
            call(device)

    return synchronise
