"""What the machine itself can do with a batch's bytes: one transfer, and memcpys by many threads.

They run as contenders, so that a ratio to them is one of figures from the same rounds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from directions import DMA, HOST, MEMCPY, Direction
from measure import LIMIT, Contender
from tables import LIMIT_PREFIX

from tdcopier.workloads import leaves

LARGE_BYTES = 1_000_000  # from here on, a memcpy takes longer than to hand it to another thread
SEVERAL = 8
TEAM_BYTES = 1 << 22  # enough for torch to call all of a team

MemcpyBy = dict[int, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]
"""By how many threads: from a target and a source to the target, filled."""


class Pieces(NamedTuple):
    """The bytes of a batch in one piece each: (bytes,) uint8."""

    source: torch.Tensor
    """Where the direction begins; on the host, pinned."""
    target: torch.Tensor
    """Where it ends; on the host, pinned."""


def name_of_transfer(direction: Direction) -> str:
    pinned = HOST in (direction.source, direction.target)
    return f"{LIMIT_PREFIX}one{' pinned' * pinned} DMA"


def name_of_memcpy(threads: int) -> str:
    return f"{LIMIT_PREFIX}memcpy into pinned memory, {threads} thread{'s' * (threads > 1)}"


@contextmanager
def crews() -> Iterator[MemcpyBy]:
    """Teams of 1, of 8 and of as many threads as there are processors, for memcpys.

    Each has a thread of its own that calls it together. A team belongs to the thread that calls
    it, and where one thread changes the size of its team, members end and are made anew; they
    would be bound to the one processor on which the calling thread is kept while it is timed.
    """
    usual = torch.get_num_threads()
    most = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    callers: dict[int, ThreadPoolExecutor] = {}
    try:
        for threads in sorted({1, min(SEVERAL, most), most}):
            callers[threads] = ThreadPoolExecutor(1, f"memcpy by {threads}")
            callers[threads].submit(_call_together, threads).result()
        torch.set_num_threads(usual)  # the setting is also what threads to come begin with
        yield {threads: _by(caller) for threads, caller in callers.items()}
    finally:
        for caller in callers.values():
            caller.shutdown()


def contenders(direction: Direction, size_bytes: int, memcpy_by: MemcpyBy) -> list[Contender]:
    """The limits of one batch in one direction.

    Args:
        direction: From where to where.
        size_bytes: Bytes of the batch. Of a small one, memcpys are not timed.
        memcpy_by: From :func:`crews`; only what begins on the host is copied there.

    """
    found = [
        Contender(
            name_of_transfer(direction),
            lambda pieces: pieces.target.copy_(pieces.source, non_blocking=True),
            lambda tree: Pieces(
                _piece(flat_bytes(tree), direction.source),
                _room(size_bytes, direction.target),
            ),
            LIMIT,
        )
    ]
    if direction.source != HOST or size_bytes < LARGE_BYTES:
        return found
    return found + [
        Contender(
            name_of_memcpy(threads),
            lambda pieces, memcpy=memcpy: memcpy(pieces.target, pieces.source),
            lambda tree: Pieces(flat_bytes(tree), _room(size_bytes, HOST)),
            LIMIT,
        )
        for threads, memcpy in memcpy_by.items()
    ]


def found_limits(
    direction: Direction,
    size_bytes: int,
    memcpy_by: Iterable[int],
    medians_us: dict[str, float],
    ours: str,
) -> dict[str, dict[str, Any]]:
    """What the limits came to: the transfer, and the fastest of the memcpys.

    Args:
        direction: From where to where.
        size_bytes: Bytes of the batch.
        memcpy_by: How many threads there were to choose from.
        medians_us: By contender, the limits among them.
        ours: The contender that is held against them.

    """
    ours_us = medians_us[ours]
    ways = {DMA: name_of_transfer(direction)}
    threads = {name_of_memcpy(n): n for n in memcpy_by if name_of_memcpy(n) in medians_us}
    if threads:
        ways[MEMCPY] = min(threads, key=medians_us.__getitem__)
    return {
        limit: {
            "way": way,
            **({"threads": threads[way]} if limit == MEMCPY else {}),
            "median_us": medians_us[way],
            "gb_per_s": size_bytes / medians_us[way] / 1e3,
            "ours_over": ours_us / medians_us[way],
        }
        for limit, way in ways.items()
    }


def flat_bytes(tree: Any) -> torch.Tensor:
    """The bytes of all leaves, one behind the other, where the leaves are: (bytes,) uint8."""
    return torch.cat([leaf.reshape(-1).view(torch.uint8) for leaf in leaves(tree)])


def differs(result: torch.Tensor, tree: Any) -> bool:
    """Whether a limit has moved other bytes than those of the batch."""
    return not torch.equal(result.cpu(), flat_bytes(tree).cpu())


def _call_together(threads: int) -> None:
    torch.set_num_threads(threads)
    torch.empty(TEAM_BYTES, dtype=torch.uint8).copy_(torch.zeros(TEAM_BYTES, dtype=torch.uint8))


def _by(caller: ThreadPoolExecutor) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return lambda target, source: caller.submit(target.copy_, source).result()


def _room(size_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(size_bytes, dtype=torch.uint8, device=device, pin_memory=device == HOST)


def _piece(flat: torch.Tensor, device: torch.device) -> torch.Tensor:
    return flat.pin_memory() if device == HOST else flat
