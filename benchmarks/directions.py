"""The directions in which copies are timed: from where to where, and what is wanted of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from witness import Witness

HOST = torch.device("cpu")


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

    @property
    def devices(self) -> list[torch.device]:
        """The accelerators at its ends: one, or two."""
        return [end for end in (self.source, self.target) if end.type != "cpu"]


def h2d(device: torch.device) -> Direction:
    return Direction("h2d", HOST, device, 35.0, Witness(("Memcpy HtoD",), "h2d"))


def d2h(device: torch.device) -> Direction:
    # A large tree takes long into pageable memory, which is fresh, and faulted in, at each call.
    return Direction(
        "d2h", device, HOST, 18.0, Witness(("Memcpy DtoH", "move_segments"), "d2h"), large_share=0.2
    )


def d2d(device: torch.device, other: torch.device) -> Direction:
    return Direction("d2d", device, other, 10.0, Witness(("Memcpy PtoP", "Memcpy DtoD"), "d2d"))


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
