"""Counts transfers from outside the engine, so that its own counters need not be believed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class Witness(NamedTuple):
    """How the transfers of one direction show in the records of somebody else."""

    memcpys: tuple[str, ...]
    """What torch.profiler calls them on CUDA, the surest name first."""
    sim_counter: str
    """The field of ``tdcopier.sim.Counts``."""


class Count(NamedTuple):
    """What was counted, and by whom."""

    memcpys: int
    counted_by: str


def count(
    witness: Witness, device_type: str, once: Callable[[], dict[str, Any]]
) -> tuple[dict[str, Any], Count]:
    """Run a copy and count its transfers meanwhile.

    Args:
        witness: How they show.
        device_type: ``"cuda"`` or ``"sim"``.
        once: Copies, synchronises, and gives the handle's own counters.

    Returns:
        The handle's own counters, and the outside count.

    """
    once()  # first use allocates and may load modules: not part of what is counted
    if device_type == "sim":
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
    """How many of the device's records are transfers of the witness's direction.

    Between two devices, a driver that knows ``Memcpy PtoP`` uses it for every transfer, and
    ``Memcpy DtoD`` is then a copy within one device. Another calls both ``DtoD``. So only the first
    name that is there at all counts. A gather or scatter is a kernel, and has neither name; but one
    that gathers little straight into host memory is the transfer, where there is no memcpy.
    """
    found = list(names)
    counts = (sum(memcpy in name for name in found) for memcpy in witness.memcpys)
    return next((number for number in counts if number), 0)
