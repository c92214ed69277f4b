"""The machine's limits for a batch's bytes: one transfer, and memcpys by several threads.

They run as contenders, so that ratios to them compare times from the same rounds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from tool.tables import LIMIT_PREFIX, OURS
from tool.way import LIMIT, Way

from copies.directions import HOST, Direction
from tdcopier.workloads import leaves

DMA, MEMCPY = "dma", "memcpy"  # names of the limits in results
MEMCPY_INTO = f"{LIMIT_PREFIX}memcpy into pinned memory"
LARGE_BYTES = 1_000_000  # from here on, a memcpy takes longer than passing it to another thread
SEVERAL = 8
TEAM_BYTES = 1 << 22  # enough for torch to use all threads of a team


class Pieces(NamedTuple):
    """The bytes of a batch as one tensor at each end: (bytes,) uint8."""

    source: torch.Tensor
    """On the direction's source device; on the host, pinned unless it is for a memcpy."""
    target: torch.Tensor
    """On the direction's target device; on the host, pinned."""


def name_of_transfer(direction: Direction) -> str:
    pinned = HOST in (direction.source, direction.target)
    return f"{LIMIT_PREFIX}one{' pinned' * pinned} DMA"


def name_of_memcpy(threads: int) -> str:
    return f"{MEMCPY_INTO}, {threads} thread{'s' * (threads > 1)}"


class Crew:
    """A thread with its own team of torch threads that copy together, while it is at work.

    A team belongs to the thread that calls it. If the timed thread called it, its members would be
    ended and restarted whenever the size of the team changes, bound to the single processor of the
    timed thread. The team exists only during the crew's own bursts: when a process has more threads
    than processors, all its teams go to sleep sooner, and the memcpys of other contenders would
    take longer.
    """

    def __init__(self, threads: int, processors: set[int] | None) -> None:
        self.threads = threads
        self._processors = processors
        self._caller: ThreadPoolExecutor | None = None

    @contextmanager
    def at_work(self) -> Iterator[None]:
        usual = torch.get_num_threads()
        name = f"memcpy by {self.threads}"
        with ThreadPoolExecutor(1, name, self._call_together) as self._caller:
            try:
                self._caller.submit(torch.get_num_threads).result()  # waits until the team exists
                torch.set_num_threads(usual)  # the default for threads that start later
                yield
            finally:
                self._caller = None

    def memcpy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Copy the source to the target, and return the target. Only while at work."""
        assert self._caller is not None
        return self._caller.submit(target.copy_, source).result()

    def _call_together(self) -> None:
        if self._processors is not None:  # otherwise it inherits the timed thread's only processor
            os.sched_setaffinity(0, self._processors)
        torch.set_num_threads(self.threads)
        some = torch.zeros(TEAM_BYTES, dtype=torch.uint8)
        torch.empty_like(some).copy_(some)


def crews() -> list[Crew]:
    """Return crews of 1 thread, of 8, and of one thread per processor of the calling thread."""
    processors = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    most = len(processors or ()) or os.cpu_count() or 1
    return [Crew(threads, processors) for threads in sorted({1, min(SEVERAL, most), most})]


def ways(direction: Direction, size_bytes: int, crews: list[Crew]) -> list[Way]:
    """Return the limits of a batch of this size in one direction.

    Memcpys by crews are timed only if the source is the host and the batch is large.
    """
    found = [
        Way(
            name_of_transfer(direction),
            lambda pieces: pieces.target.copy_(pieces.source, non_blocking=True),
            prepare=lambda tree: Pieces(
                _piece(flat_bytes(tree), direction.source), _room(size_bytes, direction.target)
            ),
            kind=LIMIT,
        )
    ]
    if direction.source != HOST or size_bytes < LARGE_BYTES:
        return found
    return found + [
        Way(
            name_of_memcpy(crew.threads),
            lambda pieces, crew=crew: crew.memcpy(pieces.target, pieces.source),
            prepare=lambda tree: Pieces(flat_bytes(tree), _room(size_bytes, HOST)),
            kind=LIMIT,
            around=crew.at_work,
        )
        for crew in crews
    ]


def found_limits(
    direction: Direction, size_bytes: int, contenders: dict[str, dict[str, float]]
) -> dict[str, dict[str, Any]]:
    """Return the results of the limits that were timed: the transfer, and the fastest memcpy."""
    medians_us = {way: times["median_us"] for way, times in contenders.items()}
    if name_of_transfer(direction) not in medians_us:
        return {}
    ways = {DMA: name_of_transfer(direction)}
    memcpys = {way: int(way.split()[-2]) for way in medians_us if way.startswith(MEMCPY_INTO)}
    if memcpys:
        ways[MEMCPY] = min(memcpys, key=medians_us.__getitem__)
    return {
        limit: {
            "way": way,
            **({"threads": memcpys[way]} if limit == MEMCPY else {}),
            "median_us": medians_us[way],
            "gb_per_s": size_bytes / medians_us[way] / 1e3,
            "ours_over": medians_us[OURS] / medians_us[way],
        }
        for limit, way in ways.items()
    }


def flat_bytes(tree: Any) -> torch.Tensor:
    """Return the concatenated bytes of all leaves, on their device: (bytes,) uint8."""
    return torch.cat([leaf.reshape(-1).view(torch.uint8) for leaf in leaves(tree)])


def differs(result: torch.Tensor, tree: Any) -> bool:
    """Return whether a limit moved other bytes than those of the batch."""
    return not torch.equal(result.cpu(), flat_bytes(tree).cpu())


def _room(size_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(size_bytes, dtype=torch.uint8, device=device, pin_memory=device == HOST)


def _piece(flat: torch.Tensor, device: torch.device) -> torch.Tensor:
    return flat.pin_memory() if device == HOST else flat
