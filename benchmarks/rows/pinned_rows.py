"""Times rows of a pinned storage on their way to the device, read by it or by host threads.

Of each way: from the call to the arrival, the host in the call, the processors, and a learner that
is fed with the rows. The gather of its next batch starts before the kernels of a step are enqueued.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import torch
from copies.directions import synchroniser
from copies.limits import flat_bytes
from loops.learner import SmallKernels, Work
from loops.steps import STEPS, Check
from loops.steps import compared as compared_steps
from tool.measure import Bench, shuffled, summaries
from tool.tables import OURS, RESIDENT
from tool.way import GET, WAIT, Way

import tdcopier
from rows.storages import Storage
from tdcopier import _C
from tdcopier._commands.interleave import collector_paused, compared

BURST = 3
INDICES = 64  # each call has other rows, because those of the last one are in the caches
TALL_OF_SIM, ROWS_OF_SIM = 100, 5
NUMBERS_THERE = f"{OURS}, index on the device"
INTO = f"{OURS}, out="
INTO_NUMBERS_THERE = f"{OURS}, out=, index on the device"
BY_THREADS, BY_TORCH = f"{OURS}, by host threads", "index_select, pin_memory() and .to() per leaf"
PROCESSED = (OURS, NUMBERS_THERE, BY_THREADS)
"""The ways whose processor time is measured."""
SAMPLES, SAMPLES_OF_SIM = 200, 3  # consecutive ones between two readings of the processors' clocks

Finish = Callable[[Any], Any]
STEP_MS = 3.4  # duration of a step of the learner with large kernels
FED = (OURS, NUMBERS_THERE, INTO_NUMBERS_THERE, BY_THREADS)
"""The ways that feed a learner, beside the batches on the device already."""
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
        outs: two batches on the device, for the ways that fill existing ones in turn.

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
        self.outs = [
            {name: torch.zeros_like(leaf) for name, leaf in self.resident[0].items()}
            for _ in range(2)
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

    def into(indices: list[torch.Tensor], number: int) -> tdcopier.AsyncCopyHandle[Storage]:
        out = samples.outs[number % 2]
        return tdcopier.start_gather(storage, indices[number % INDICES], out=out)

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
        INTO: partial(into, samples.indices),
        INTO_NUMBERS_THERE: partial(into, samples.indices_there),
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
    """Return the times of all ways. The storage must be pinned.

    ``host`` is the time until ``wait()`` has returned, ``host_in_call`` until ``start_gather()``
    has; the device is idle before, and is not waited for.
    """
    synchronise = synchroniser([bench.device])
    wrong: dict[str, int] = {}
    checks: dict[str, int] = {}

    def times(label: str, finish: Finish, **how: Any) -> Any:
        timed = in_turn(samples, finish, wrong, checks)
        how = {"rounds": bench.rounds(0.1), "burst": BURST, **how}
        return bench.interleaved(f"{label}, {name}", timed, [None], **how)

    arrived_us, processor = times("rows", GET, synchronise=synchronise)
    started: list[Any] = []  # threads may still be at work on it

    def idle() -> None:
        while started:
            started.pop().get()
        synchronise()

    only_before = {"synchronise": lambda: None, "before_call": idle}
    host_us, _ = times("host until wait() has returned", WAIT, **only_before)
    call_us, _ = times("host in start_gather()", started.append, **only_before)
    return {
        "bytes": sum(leaf.nbytes for leaf in samples.resident[0].values()),
        "processor": processor,
        **compared(arrived_us, OURS, BURST),
        "host": summaries(host_us),
        "host_in_call": summaries(call_us),
        "processor_time": processor_time(bench, name, samples, wrong, checks),
        "wrong": wrong,
        "checks": checks,
    }


def in_turn(
    samples: Samples, finish: Finish, wrong: dict[str, int], checks: dict[str, int]
) -> list[Way]:
    """Return the ways, each of which takes the batches in turn and ends ours by ``finish``.

    After each burst, one more batch is compared, and counted by way in ``wrong`` and ``checks``.
    """

    def timed(way: Way, whole: Way) -> Way:
        turn = cycle(range(INDICES))

        @contextmanager
        def around() -> Iterator[None]:
            with way.around():
                yield
                number = next(turn)
                wrong[way.name] = wrong.get(way.name, 0) + samples.is_wrong(
                    whole.run(number), number
                )
                checks[way.name] = checks.get(way.name, 0) + 1

        return way._replace(start=lambda _: way.start(next(turn)), around=around)

    return [timed(*both) for both in zip(ways(samples, finish), ways(samples), strict=True)]


# ---- a learner -----------------------------------------------------------------------------------


def run_learner(bench: Bench, label: str, samples: Samples, work: Work | SmallKernels) -> Any:
    """Return times of steps. The storage must be pinned."""
    feeds = [Way(RESIDENT, prepare=samples.resident.__getitem__)]
    feeds += [way for way in ways(samples, WAIT) if way.name in FED]
    return compared_steps(
        bench,
        f"steps, {label}",
        feeds,
        range(INDICES),
        check(samples),
        work,
        rounds=bench.rounds(0.02),
        bound=True,
        clocked=isinstance(work, Work),  # small ones take the host as long as the device
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
        every=STEPS,  # as some ways fill a batch again
    )


# ---- processors ----------------------------------------------------------------------------------


class Processed(NamedTuple):
    """Time that has passed, and that processors have worked for this process, in nanoseconds."""

    wall: int
    caller: int
    others: int

    @classmethod
    def now(cls) -> Processed:
        caller = time.thread_time_ns()
        return cls(time.perf_counter_ns(), caller, time.process_time_ns() - caller)


def processed(work: Callable[[], object]) -> Processed:
    """Return what a call takes of the calling thread, and of all others, those of CUDA included."""
    before = Processed.now()
    work()
    return Processed(*(b - a for a, b in zip(before, Processed.now(), strict=True)))


def processor_time(
    bench: Bench, name: str, samples: Samples, wrong: dict[str, int], checks: dict[str, int]
) -> dict[str, Any]:
    """Return processor times per sample: of the caller, of other threads, and of these when idle.

    The idle time is that of other threads while the caller sleeps for as long as its samples took.
    After each loop of samples, one more is compared, and counted as in :func:`contenders`.
    """
    count = SAMPLES if bench.is_real else SAMPLES_OF_SIM
    synchronise = synchroniser([bench.device])
    by_name = {way.name: way for way in ways(samples)}
    times_us: dict[str, dict[str, list[float]]] = {
        way: {"caller": [], "others": [], "idle": []} for way in PROCESSED
    }

    def take(way: str) -> None:
        for number in range(count):
            by_name[way].run(number)
        synchronise()

    progress = bench.progress(f"processors, {name}")
    with collector_paused(not bench.keep_gc):
        for index, way in shuffled(PROCESSED, progress, rounds=bench.rounds(0.01), warm_up=1):
            with reading(way):
                taken = processed(lambda way=way: take(way))
                wrong[way] += samples.is_wrong(by_name[way].run(count), count)
                checks[way] += 1
            idle = processed(lambda taken=taken: time.sleep(taken.wall / 1e9))
            if index >= 0:
                found = {"caller": taken.caller, "others": taken.others, "idle": idle.others}
                for whose, ns in found.items():
                    times_us[way][whose].append(ns / 1e3 / count)
    return {way: summaries(found) for way, found in times_us.items()}
