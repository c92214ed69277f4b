"""The directions in which copies are timed: their devices, targets, and counts from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

import tdcopier

HOST = torch.device("cpu")
DMA, MEMCPY = "dma", "memcpy"  # names of the machine's limits in results
NOTHING: Mapping[str, Any] = MappingProxyType({})


class OverLimit(NamedTuple):
    """A target for how close a copy comes to the machine's limits."""

    most: float
    """The largest ratio of our time to that of the limit; of several limits, the slowest counts."""
    limits: tuple[str, ...] = (DMA,)


class Witness(NamedTuple):
    """The names of one direction's transfers in outside records."""

    memcpys: tuple[str, ...]
    """Names in torch.profiler on CUDA, the most specific first."""
    sim_counter: str
    """The field of ``tdcopier.sim.Counts``."""


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
    """Start the engine's and torch's threads now, so that they are not bound to one processor.

    A change of torch's number of threads ends its threads, so this is called before each benchmark.
    """
    tdcopier.copy(torch.zeros(1 << 20, device=direction.source), direction.target)
    torch.ones(1 << 22).add_(1)


# ---- transfers, counted from outside as a check of the engine's own counters ---------------------


class Count(NamedTuple):
    """An outside count, and the tool that counted."""

    memcpys: int
    counted_by: str


def count_transfers(
    direction: Direction, once: Callable[[], dict[str, Any]]
) -> tuple[dict[str, Any], Count]:
    """Return a copy's own counters, and its transfers as counted from outside of the engine.

    The function copies, synchronises, and returns the counters of the copy's handle.
    """
    witness = direction.witness
    once()  # not counted: the first use allocates and may load modules
    if direction.devices[0].type == "sim":
        from tdcopier import sim

        sim.reset_counts()
        stats = once()
        return stats, Count(getattr(sim.counts(), witness.sim_counter).transfers, "tdcopier.sim")
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        stats = once()
    on_device = [e.name for e in profiler.events() if e.device_type == DeviceType.CUDA]
    return stats, Count(memcpys_among(on_device, witness), "torch.profiler")


def memcpys_among(names: Iterable[str], witness: Witness) -> int:
    """Count the device's records that are transfers of the witness's direction.

    Between two devices, some drivers record every transfer as ``Memcpy PtoP``, and ``Memcpy DtoD``
    is then a copy within one device; others record both as ``DtoD``. So only the first name that
    occurs counts. A gather or scatter is a kernel with neither name. But a kernel that gathers
    directly into host memory is itself the transfer, and counts if there is no memcpy.
    """
    found = list(names)
    counts = (sum(memcpy in name for name in found) for memcpy in witness.memcpys)
    return next((number for number in counts if number), 0)
