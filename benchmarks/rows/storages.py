"""Storages by name: replay storages, with as many rows as a real buffer, and tables of bytes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from tool.measure import Bench

Storage = dict[str, torch.Tensor]
ROW = "row"
"""The leaf with the row numbers, which are compared with the index after the copy."""
ROWS_PER_REPEAT, ROWS_OF_SIM = 200, 500
TALL_OF_SIM, ROWS_OF_BATCH = 100, 5  # of tables on the simulated device
_TILE = 2048  # random rows that are repeated, since drawing gigabytes would take minutes


class Replay(NamedTuple):
    """A storage, and the number of rows in a batch."""

    title: str
    make: Callable[[int], Storage]
    """Makes the storage with a given number of rows."""
    batch: int


class Samples(NamedTuple):
    """A storage, and the rows of batches, which all ways take in the same order."""

    storage: Storage
    indices: list[torch.Tensor]
    device: torch.device

    def index(self, number: int) -> torch.Tensor:
        """Return the row numbers of a batch."""
        return self.indices[number % len(self.indices)]

    def batch(self, number: int) -> Storage:
        """Return a batch as torch's own indexing makes it."""
        return {name: leaf[self.index(number)] for name, leaf in self.storage.items()}

    def is_wrong(self, batch: Storage, number: int) -> bool:
        """Return whether it has other values than the rows of this batch."""
        return any(
            not torch.equal(batch[name].cpu(), right) for name, right in self.batch(number).items()
        )


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


class Tables(NamedTuple):
    """Leaves of bytes of a storage that is pinned, and the rows that go to the device."""

    row_bytes: list[int]
    rows: int
    most_us: float | None = None
    """Target for the time from the call to the rows on the device."""
    tall: int = 100_000
    """Rows in the storage."""
    feeds_a_learner: bool = True

    def samples(self, bench: Bench, batches: int) -> Samples:
        """Return a storage of random bytes. Pin it before the device reads it."""
        tall, rows = (self.tall, self.rows) if bench.is_real else (TALL_OF_SIM, ROWS_OF_BATCH)
        dice = torch.Generator().manual_seed(0)
        storage = {f"{i}": _bytes(tall, row, dice) for i, row in enumerate(self.row_bytes)}
        indices = [torch.randint(0, tall, (rows,), generator=dice) for _ in range(batches)]
        return Samples(storage, indices, bench.device)


def _bytes(rows: int, row_bytes: int, dice: torch.Generator) -> torch.Tensor:
    """Return random bytes: (rows, row_bytes). Drawn eight at a time, which is faster."""
    words = torch.randint(0, 1 << 62, (-(-rows * row_bytes // 8),), generator=dice)
    return words.view(torch.uint8)[: rows * row_bytes].view(rows, row_bytes)


SAC = [68, 68, *[24] * 3, *[4] * 8]
"""Two observations of 17 floats, three leaves of an action's 6, and eight of one."""
TABLES = {
    "2 leaves, 256 rows of 28 KB": Tables([4 * 84 * 84] * 2, 256, 330.0, 20_000),
    "4 leaves, 4096 rows of 256 B": Tables([256] * 4, 4096, 140.0, feeds_a_learner=False),
    "13 leaves, 4096 rows of 64 B": Tables([64] * 13, 4096, 150.0),
    "13 leaves, 256 rows of 64 B": Tables([64] * 13, 256, 55.0),
    "200 leaves, 256 rows of 32 B": Tables([32] * 200, 256, 190.0),
    "8 leaves, 4096 rows of 4 B": Tables([4] * 8, 4096, 85.0, feeds_a_learner=False),
    "SAC, 13 leaves, 256 rows of 4 to 68 B": Tables(SAC, 256),
    "SAC, 13 leaves, 4096 rows of 4 to 68 B": Tables(SAC, 4096, feeds_a_learner=False),
}


def rows_of(bench: Bench) -> int:
    """Return the rows in a replay storage: 100,000, and fewer in quick runs."""
    return ROWS_PER_REPEAT * bench.repeats if bench.is_real else ROWS_OF_SIM


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
