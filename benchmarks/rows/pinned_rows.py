"""Times rows of a pinned storage on their way to the device, read by it or by host threads.

Of each way: from the call to the arrival, and a learner that is fed with the rows. The gather of
its next batch starts before the kernels of a step are enqueued.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import torch
from copies.directions import synchroniser
from copies.limits import flat_bytes
from loops.learner import SmallKernels, Work
from loops.steps import Check, compared
from tool.measure import Bench
from tool.tables import OURS, RESIDENT
from tool.way import GET, WAIT, Way

import tdcopier
from rows.storages import Storage
from tdcopier import _C

BURST = 3
INDICES = 64  # each call has other rows, because those of the last one are in the caches
TALL_OF_SIM, ROWS_OF_SIM = 100, 5
NUMBERS_THERE = f"{OURS}, index on the device"
BY_THREADS, BY_TORCH = f"{OURS}, by host threads", "index_select, pin_memory() and .to() per leaf"

Finish = Callable[[Any], Any]
STEP_MS = 3.4  # duration of a step of the learner with large kernels
PRINT_BYTES = 8  # at the end of each row of the last leaf, compared at every step


class Tables(NamedTuple):
    """Leaves of a pinned storage, and the rows that go to the device."""

    row_bytes: list[int]
    rows: int
    most_us: float | None = None
    """Target for the time from the call to the rows on the device."""
    tall: int = 100_000
    """Rows in the storage."""
    feeds_a_learner: bool = True


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


class Samples:
    """A storage of random bytes, and batches of its rows, in the order in which all ways take them.

    Attributes:
        storage: the tables. Pin them before the device reads them.
        indices: the row numbers of each batch, on the host.
        indices_there: the same on the device.
        resident: the batches as torch's own indexing and ``.to()`` make them.

    """

    def __init__(self, bench: Bench, tables: Tables) -> None:
        tall, rows = (tables.tall, tables.rows) if bench.is_real else (TALL_OF_SIM, ROWS_OF_SIM)
        dice = torch.Generator().manual_seed(0)
        self.device = bench.device
        self.storage = {f"{i}": _bytes(tall, row, dice) for i, row in enumerate(tables.row_bytes)}
        self.indices = [torch.randint(0, tall, (rows,), generator=dice) for _ in range(INDICES)]
        self.indices_there = [index.to(self.device) for index in self.indices]
        self.resident = [
            {name: leaf[index].to(self.device) for name, leaf in self.storage.items()}
            for index in self.indices
        ]

    def is_wrong(self, batch: Storage, number: int) -> bool:
        """Return whether it has other bytes than the rows of this batch."""
        return not torch.equal(flat_bytes(batch), flat_bytes(self.resident[number % INDICES]))


def _bytes(rows: int, row_bytes: int, dice: torch.Generator) -> torch.Tensor:
    """Return random bytes: (rows, row_bytes). Drawn eight at a time, which is faster."""
    words = torch.randint(0, 1 << 62, (-(-rows * row_bytes // 8),), generator=dice)
    return words.view(torch.uint8)[: rows * row_bytes].view(rows, row_bytes)


def ways(samples: Samples, finish: Finish = GET) -> list[Way]:
    """Return all ways; their sources are the numbers of batches, and ``finish`` ends our own."""
    storage, device = samples.storage, samples.device

    def gather(indices: list[torch.Tensor], number: int) -> tdcopier.AsyncCopyHandle[Storage]:
        return tdcopier.start_gather(storage, indices[number % INDICES], device)

    def by_torch(number: int) -> Storage:
        index, pin = samples.indices[number % INDICES], device.type == "cuda"
        rows = {name: leaf.index_select(0, index) for name, leaf in storage.items()}
        return {
            name: (leaf.pin_memory() if pin else leaf).to(device, non_blocking=True)
            for name, leaf in rows.items()
        }

    ours = {
        OURS: partial(gather, samples.indices),
        NUMBERS_THERE: partial(gather, samples.indices_there),
        BY_THREADS: partial(gather, samples.indices),
    }
    found = [
        Way(name, start, finish, around=partial(reading, name)) for name, start in ours.items()
    ]
    return [*found, Way(BY_TORCH, by_torch)]


@contextmanager
def reading(way: str) -> Iterator[None]:
    """Let the device or host threads read the rows, as this way does."""
    _C.testing.use_row_kernels(way != BY_THREADS)
    try:
        yield
    finally:
        _C.testing.use_row_kernels(True)


# ---- one batch alone -----------------------------------------------------------------------------


def run(bench: Bench, name: str, samples: Samples) -> dict[str, Any]:
    """Return the times of all ways. The storage must be pinned."""
    wrong: dict[str, int] = {}
    times = bench.compared(
        f"rows, {name}",
        [in_turn(way, samples, wrong) for way in ways(samples)],
        [None],
        synchroniser([bench.device]),
        rounds=bench.rounds(0.1),
        burst=BURST,
    )
    size_bytes = sum(leaf.nbytes for leaf in samples.resident[0].values())
    return {"bytes": size_bytes, **times, "wrong": wrong}


def in_turn(way: Way, samples: Samples, wrong: dict[str, int]) -> Way:
    """Return a way that takes the batches in turn.

    After each burst, one more batch is compared, and counted by way in ``wrong``.
    """
    turn = cycle(range(INDICES))

    @contextmanager
    def around() -> Iterator[None]:
        with way.around():
            yield
            number = next(turn)
            is_wrong = samples.is_wrong(way.run(number), number)
            wrong[way.name] = wrong.get(way.name, 0) + is_wrong

    return way._replace(start=lambda _: way.start(next(turn)), around=around)


# ---- a learner -----------------------------------------------------------------------------------


def run_learner(bench: Bench, label: str, samples: Samples, work: Work | SmallKernels) -> Any:
    """Return times of steps. The storage must be pinned."""
    feeds = [Way(RESIDENT, prepare=samples.resident.__getitem__), *ways(samples, WAIT)[:-1]]
    checked = check(samples)
    return compared(
        bench,
        f"steps, {label}",
        feeds,
        range(INDICES),
        lambda way: checked,
        lambda way: work,
        rounds=bench.rounds(0.02),
        bound=True,
    )[0]


def check(samples: Samples) -> Check:
    """Compare the ends of the rows of the last leaf at each step, and the last batch."""
    last = list(samples.storage)[-1]

    def part(batch: Storage) -> torch.Tensor:
        return batch[last][:, -PRINT_BYTES:]

    return Check(
        part,
        lambda number: part(samples.resident[number % INDICES]),
        lambda number, batch: not samples.is_wrong(batch, number),
    )
