"""Replay storages by name: host tensors with as many rows as a real replay buffer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import torch

from tdcopier._commands.tables import size

Storage = dict[str, torch.Tensor]
ROW = "row"
"""The leaf with the row numbers, which are compared with the index after the copy."""
_TILE = 2048  # random rows that are repeated, since drawing gigabytes would take minutes


class Replay(NamedTuple):
    """A storage, and the number of rows in a batch."""

    title: str
    make: Callable[[int], Storage]
    """Makes the storage with a given number of rows."""
    batch: int


def _frames(rows: int, *shape: int) -> torch.Tensor:
    tile = torch.randint(0, 256, (min(rows, _TILE), *shape), dtype=torch.uint8)
    table = torch.empty(rows, *shape, dtype=torch.uint8)
    for first in range(0, rows, len(tile)):
        part = table[first : first + len(tile)]
        part.copy_(tile[: len(part)])
    return table


def _scalars(rows: int) -> Storage:
    return {
        "action": torch.randint(0, 18, (rows,)),
        "reward": torch.randn(rows),
        "done": torch.rand(rows) > 0.99,
        ROW: torch.arange(rows),
    }


def _atari(rows: int) -> Storage:
    shape = (4, 84, 84)
    return {"observation": _frames(rows, *shape), "next": _frames(rows, *shape), **_scalars(rows)}


def _sac(rows: int) -> Storage:
    """Return 18 leaves like those of half-cheetah; 256 rows are 54 KB."""
    widths = [17, 17, 6, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    floats = {f"{i}": torch.randn(rows, width) for i, width in enumerate(widths)}
    return {**floats, "done": torch.rand(rows, 1) > 0.99, ROW: torch.arange(rows)}


def _rgb(rows: int) -> Storage:
    shape = (9, 64, 64)
    return {"pixels": _frames(rows, *shape), "next": _frames(rows, *shape), **_scalars(rows)}


def _agents(rows: int) -> Storage:
    """Return an observation and an action for each of 100 agents."""
    leaves = {f"{i}": torch.randn(rows, 8) for i in range(199)}
    return {**leaves, ROW: torch.arange(rows)}


REPLAYS = {
    "atari_32": Replay("Atari frames, 32 rows", _atari, 32),
    "atari_256": Replay("Atari frames, 256 rows", _atari, 256),
    "sac": Replay("SAC, 256 rows", _sac, 256),
    "rgb": Replay("RGB frames, 512 rows", _rgb, 512),
    "agents": Replay("100 agents, 256 rows", _agents, 256),
}


def that_fit(rows: int, free_bytes: int | None = None) -> dict[str, Replay]:
    """Return the storages of which ``rows`` rows fit into three quarters of the free memory.

    Prints to stderr which ones do not.
    """
    free = _free_bytes() if free_bytes is None else free_bytes
    found = {}
    for name, replay in REPLAYS.items():
        needed = bytes_of_batch(replay.make(1), rows)
        if needed <= free * 3 / 4:
            found[name] = replay
        else:
            print(f"Skipped {name}: it takes {size(needed)}, and {size(free)} are free.",
                  file=sys.stderr)  # fmt: skip
    return found


def _free_bytes() -> int:
    with open("/proc/meminfo") as lines:
        kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return 1024 * kilobytes["MemAvailable"]


def bytes_of_batch(storage: Storage, rows: int) -> int:
    return sum(leaf[:1].nbytes * rows for leaf in storage.values())
