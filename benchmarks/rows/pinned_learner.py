"""Times a learner that is fed with rows of a pinned storage, against one with resident batches.

The gather of the next batch starts before the kernels of a step are enqueued.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, cycle
from typing import Any

import torch
from loops.learner import (
    SMALL_KERNELS,
    Block,
    KernelClock,
    RowReader,
    SmallKernels,
    Work,
    block,
)
from tool.measure import Bench
from tool.tables import OURS, RESIDENT

from rows.pinned_rows import (
    BY_THREADS,
    INDICES,
    INTO_NUMBERS_THERE,
    NUMBERS_THERE,
    Samples,
    Start,
    reading,
    starts,
)
from rows.replay import WARM_UP_STEPS, compare
from rows.storages import Storage

STEP_MS = 3.4  # duration of a step of the learner with large kernels
ROUNDS_PER_REPEAT = 0.02
FEEDS = (RESIDENT, OURS, NUMBERS_THERE, INTO_NUMBERS_THERE, BY_THREADS)
PRINT_BYTES = 8  # at the end of each row of the last leaf, compared at every step


def learners(device: torch.device) -> dict[str, Work | SmallKernels]:
    return {
        f"{SMALL_KERNELS} small kernels": SmallKernels(device),
        f"{STEP_MS:g} ms of large kernels": Work(device, STEP_MS),
    }


def run(
    bench: Bench, name: str, samples: Samples, works: dict[str, Work | SmallKernels]
) -> dict[str, Any]:
    """Return times of steps, by learner. The storage must be pinned."""
    return {
        learner: compare(
            bench,
            f"steps, {name}, {learner}",
            dict.fromkeys(FEEDS, 1),
            lambda way, work=work: one_block(way, samples, work),
            rounds=bench.rounds(ROUNDS_PER_REPEAT),
            bound=True,
        )
        for learner, work in works.items()
    }


def one_block(way: str, samples: Samples, work: Work | SmallKernels) -> tuple[Block, int]:
    """Run one block. Return its times, and the number of steps with wrong rows.

    At each step the ends of the rows of the last leaf are compared, and the last batch as a whole.
    """
    last = list(samples.storage)[-1]
    reader = RowReader(lambda batch: batch[last][:, -PRINT_BYTES:])
    clock = KernelClock(work, samples.device)
    with reading(way):
        found = block(
            batches(way, samples), reader.read, clock, samples.device, warm_up=WARM_UP_STEPS
        )
    wrong = sum(
        not torch.equal(rows, samples.resident[step % INDICES][last][:, -PRINT_BYTES:])
        for step, rows in enumerate(reader.rows)
    )
    wrong += samples.is_wrong(reader.last, len(reader.rows) - 1)
    is_large = isinstance(work, Work)  # small ones take the host as long as the device
    return found._replace(kernels_us=clock.mean_us() if is_large else None), wrong


def batches(way: str, samples: Samples) -> Iterator[Storage]:
    return cycle(samples.resident) if way == RESIDENT else one_ahead(starts(samples)[way])


def one_ahead(start: Start) -> Iterator[Storage]:
    """Yield batches that the learner's own thread starts one ahead."""
    coming = start(0)
    for number in count(1):
        batch = coming.wait()
        coming = start(number)
        yield batch
