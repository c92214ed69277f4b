"""Replay storages by name: host tensors with as many rows as a real replay buffer."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from tool.measure import Bench

Storage = dict[str, torch.Tensor]
ROW = "row"
"""The leaf with the row numbers, which are compared with the index after the copy."""
ROWS, ROWS_OF_SIM = 100_000, 500
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


def _images(name: str, *shape: int) -> Callable[[int], Storage]:
    """Return a function that makes a storage of images with this name and their successors."""
    return lambda rows: {
        name: _frames(rows, *shape),
        "next": _frames(rows, *shape),
        **_scalars(rows),
    }


def _sac(rows: int) -> Storage:
    """Return 18 leaves like those of half-cheetah; 256 rows are 54 KB."""
    widths = [17, 17, 6, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    floats = {f"{i}": torch.randn(rows, width) for i, width in enumerate(widths)}
    return {**floats, "done": torch.rand(rows, 1) > 0.99, ROW: torch.arange(rows)}


def _agents(rows: int) -> Storage:
    """Return an observation and an action for each of 100 agents."""
    leaves = {f"{i}": torch.randn(rows, 8) for i in range(199)}
    return {**leaves, ROW: torch.arange(rows)}


_ATARI = _images("observation", 4, 84, 84)
REPLAYS = {
    "atari_32": Replay("Atari frames, 32 rows", _ATARI, 32),
    "atari_256": Replay("Atari frames, 256 rows", _ATARI, 256),
    "sac": Replay("SAC, 256 rows", _sac, 256),
    "rgb": Replay("RGB frames, 512 rows", _images("pixels", 9, 64, 64), 512),
    "agents": Replay("100 agents, 256 rows", _agents, 256),
}


def rows_of(bench: Bench) -> int:
    return ROWS if bench.is_real else ROWS_OF_SIM


def with_each(
    rows: int, run: Callable[[str, Replay, Storage], dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return the result of a function with each storage, by name.

    A storage is freed before the next one is made: the largest one has 7.4 GB.
    """
    found = {}
    for name, replay in REPLAYS.items():
        storage = replay.make(rows)
        found[name] = {
            "title": replay.title,
            "leaves": len(storage),
            "bytes": bytes_of_batch(storage, replay.batch),
            **run(name, replay, storage),
        }
        del storage
        gc.collect()
    return found


def drawn(replay: Replay, rows: int, batches: int) -> list[torch.Tensor]:
    """Return the rows of some batches, drawn at random."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, rows, (replay.batch,), generator=generator) for _ in range(batches)]


def pinned_like(storage: Storage, rows: int) -> Storage:
    """Return a pinned batch with this number of rows."""
    return {
        name: torch.empty(rows, *leaf.shape[1:], dtype=leaf.dtype, pin_memory=True)
        for name, leaf in storage.items()
    }


def bytes_of_batch(storage: Storage, rows: int) -> int:
    return sum(leaf[:1].nbytes * rows for leaf in storage.values())
