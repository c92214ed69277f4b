"""The directions in which copies are timed: their devices, and counts from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

import tdcopier

HOST = torch.device("cpu")


MEMCPYS = {
    "h2d": ("Memcpy HtoD",),
    "d2h": ("Memcpy DtoH", "move_segments"),
    "d2d": ("Memcpy PtoP", "Memcpy DtoD", "move_segments"),
}
"""Names of a direction's transfers in torch.profiler on CUDA, the most specific first."""


class Direction(NamedTuple):
    """The two ends of a copy."""

    name: str
    """``"h2d"``, ``"d2h"`` or ``"d2d"``: as in ``--only``, file names and the keys of results."""
    source: torch.device
    target: torch.device

    @property
    def devices(self) -> list[torch.device]:
        """Its accelerators: one or two."""
        return [end for end in (self.source, self.target) if end.type != "cpu"]


def with_host(device: torch.device) -> dict[str, Direction]:
    """Return both directions between the host and a device, by name."""
    return {"h2d": Direction("h2d", HOST, device), "d2h": Direction("d2h", device, HOST)}


def possible(device: torch.device) -> dict[str, Direction]:
    """Return the directions that this machine has, by name.

    Args:
        device: The accelerator to benchmark; it is the source of D2D if there is a second one.

    """
    found, other = with_host(device), second_device(device)
    return found if other is None else found | {"d2d": Direction("d2d", device, other)}


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
    """Start the engine's and torch's threads now, so that they are not bound to one processor.

    A change of torch's number of threads ends its threads, so this is called before each benchmark.
    """
    tdcopier.copy(torch.zeros(1 << 20, device=direction.source), direction.target)
    torch.ones(1 << 22).add_(1)


# ---- transfers, counted from outside as a check of the engine's own counters ---------------------


def count_transfers(
    direction: Direction, start: Callable[[], tdcopier.AsyncCopyHandle]
) -> dict[str, Any]:
    """Return a copy's own counters, and its transfers as counted from outside of the engine."""
    synchronise = synchroniser(direction.devices)

    def once() -> dict[str, Any]:
        handle = start()
        handle.get()
        synchronise()
        return dict(handle.stats._asdict())

    once()  # not counted: the first use allocates and may load modules
    if direction.devices[0].type == "sim":
        from tdcopier import sim

        sim.reset_counts()
        stats = once()
        return {"stats": stats, "memcpys": getattr(sim.counts(), direction.name).transfers}
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        stats = once()
    on_device = [e.name for e in profiler.events() if e.device_type == DeviceType.CUDA]
    return {"stats": stats, "memcpys": memcpys_among(on_device, direction.name)}


def memcpys_among(names: Iterable[str], direction: str) -> int:
    """Count the device's records that are transfers of a direction.

    Between two devices, some drivers record every transfer as ``Memcpy PtoP``, and ``Memcpy DtoD``
    is then a copy within one device; others record both as ``DtoD``. So only the first name that
    occurs counts. A gather or scatter is a kernel with neither name. But a kernel that gathers
    directly into the memory of the target is itself the transfer, and counts if there is no memcpy.
    """
    found = list(names)
    counts = (sum(memcpy in name for name in found) for memcpy in MEMCPYS[direction])
    return next((number for number in counts if number), 0)
