"""Counts transfers from outside the engine, as a check of its own counters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class Witness(NamedTuple):
    """The names of one direction's transfers in outside records."""

    memcpys: tuple[str, ...]
    """Names in torch.profiler on CUDA, the most specific first."""
    sim_counter: str
    """The field of ``tdcopier.sim.Counts``."""


class Count(NamedTuple):
    """An outside count, and the tool that counted."""

    memcpys: int
    counted_by: str


def count(
    witness: Witness, device_type: str, once: Callable[[], dict[str, Any]]
) -> tuple[dict[str, Any], Count]:
    """Run a copy and count its transfers.

    Args:
        witness: Names of the transfers.
        device_type: ``"cuda"`` or ``"sim"``.
        once: Copies, synchronises, and returns the handle's own counters.

    Returns:
        The handle's own counters, and the outside count.

    """
    once()  # not counted: the first use allocates and may load modules
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
    """Count the device's records that are transfers of the witness's direction.

    Between two devices, some drivers record every transfer as ``Memcpy PtoP``, and ``Memcpy DtoD``
    is then a copy within one device; others record both as ``DtoD``. So only the first name that
    occurs counts. A gather or scatter is a kernel with neither name. But a kernel that gathers
    directly into host memory is itself the transfer, and counts if there is no memcpy.
    """
    found = list(names)
    counts = (sum(memcpy in name for name in found) for memcpy in witness.memcpys)
    return next((number for number in counts if number), 0)
