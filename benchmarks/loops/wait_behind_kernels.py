"""Checks on a busy CUDA device that wait() does not block, and that values read after it are right.

Half of the checked rounds have a backlog: consumers run long after their outputs were dropped, so
if the next copy gets their memory too early, a wrong value shows it. In the others the stream is
idle and the copy is delayed by a large one: a consumer that does not wait reads too early.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from tool.measure import Bench
from tool.target_forms import Target, at_most, none

import tdcopier
from loops.learner import Decoy, Sleeper
from tdcopier._commands.interleave import summarise
from tdcopier.workloads import detection_batch, leaves, map_tensors, total_bytes

LONG_SLEEP_MS = 20.0  # queued on the current stream while wait() is timed
SHORT_SLEEP_MS = 1.5  # between the copies of a backlog, so that consumers run late
BLOCK = 10  # consecutive checked rounds of one kind
MAX_WAIT_US = 100.0
WARM_UP = 3


class ChangingBatch:
    """A batch whose values all change each round, and a twin on the device to compare with.

    The leaves are slices of one tensor per dtype, so that one operation per dtype changes them all.
    The twin is changed by the same operations on the device, and never copied again.
    """

    def __init__(self, tree: Any, device: torch.device) -> None:
        self.flat = by_dtype(tree)
        self.twin = {dtype: flat.to(device, copy=True) for dtype, flat in self.flat.items()}
        offsets = dict.fromkeys(self.flat, 0)

        def rehome(leaf: torch.Tensor) -> torch.Tensor:
            begin = offsets[leaf.dtype]
            offsets[leaf.dtype] = begin + leaf.numel()
            return self.flat[leaf.dtype][begin : offsets[leaf.dtype]].view(leaf.shape)

        self.tree = map_tensors(tree, rehome)

    def change(self) -> None:
        """Change the sources, on the host, and the twin, on the current stream."""
        for tensors in (self.flat, self.twin):
            for dtype, flat in tensors.items():
                if dtype is torch.bool:
                    flat.logical_not_()
                else:
                    flat.add_(1)

    def count_wrong(self, result: Any, into: torch.Tensor) -> None:
        """Compare every value of a copy on the current stream, and count the wrong ones.

        The count is added to ``into``, () int64 on the device.
        """
        for dtype, flat in by_dtype(result).items():
            into.add_(torch.count_nonzero(flat != self.twin[dtype]))


def by_dtype(tree: Any) -> dict[torch.dtype, torch.Tensor]:
    """Return the values of all leaves of each dtype in one tensor."""
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for leaf in leaves(tree):
        groups.setdefault(leaf.dtype, []).append(leaf.reshape(-1))
    return {dtype: torch.cat(group) for dtype, group in groups.items()}


def run(bench: Bench) -> dict[str, Any]:
    timed, checked = bench.rounds(0.1, 10), bench.rounds(20, 400)
    batch, sleeper = ChangingBatch(detection_batch(), bench.device), Sleeper(bench.device)
    waits = _timed_waits(bench, batch, sleeper, timed)
    wrong_rounds, seconds = _checked_rounds(bench, batch, sleeper, checked)
    return {
        "what": "Host time of wait() behind queued kernels, and values read on the device after it",
        "settings": {
            "queued_ms": LONG_SLEEP_MS,
            "checked": f"blocks of {BLOCK} rounds: a backlog of {SHORT_SLEEP_MS:g} ms kernels with "
            f"outputs dropped at once; an idle stream with a {Decoy.BYTES >> 20} MiB pinned "
            "H2D in front of the copy",
        },
        "bytes": total_bytes(batch.tree),
        "leaves": len(leaves(batch.tree)),
        **waits,
        "checked_rounds": checked,
        "checked_seconds": seconds,
        "wrong_rounds": waits["wrong_rounds"] + wrong_rounds,
    }


def value_targets(result: dict[str, Any]) -> Iterator[Target]:
    rounds = result["wait"]["repeats"] + result["checked_rounds"]
    yield none(f"rounds with a wrong value, of {rounds}", result["wrong_rounds"])


def speed_targets(result: dict[str, Any]) -> Iterator[Target]:
    what = f"median of wait() with {LONG_SLEEP_MS:g} ms of kernels queued"
    returned = at_most(what, result["wait"]["median_us"], MAX_WAIT_US, "us")
    busy = result["rounds_with_the_stream_still_busy_after_wait"]
    yield {**returned, "hit": returned["hit"] and busy == result["wait"]["repeats"]}


def _timed_waits(
    bench: Bench, batch: ChangingBatch, sleeper: Sleeper, rounds: int
) -> dict[str, Any]:
    device = bench.device
    wrong = torch.zeros(rounds, dtype=torch.int64, device=device)
    start_us: list[float] = []
    wait_us: list[float] = []
    still_busy = 0
    stats: dict[str, Any] = {}
    with bench.quiet() as quiet:
        for index in bench.progress("wait() behind 20 ms")(range(-WARM_UP, rounds)):
            quiet.seek()
            torch.cuda.synchronize(device)
            batch.change()
            sleeper.enqueue(LONG_SLEEP_MS)
            slept = torch.cuda.Event()
            slept.record()
            begin = time.perf_counter_ns()
            handle = tdcopier.start_copy(batch.tree, device)
            started = time.perf_counter_ns()
            result = handle.wait()
            waited = time.perf_counter_ns()
            busy = not slept.query()
            batch.count_wrong(result, wrong[max(index, 0)])
            handle.get()  # the sources may change again from here on
            if index >= 0:
                start_us.append((started - begin) / 1e3)
                wait_us.append((waited - started) / 1e3)
                still_busy += busy
                stats = dict(handle.stats._asdict())
            del handle, result
    torch.cuda.synchronize(device)
    return {
        "stats": stats,
        "wait": summarise(wait_us)._asdict(),
        "start_copy": summarise(start_us)._asdict(),
        "rounds_with_the_stream_still_busy_after_wait": still_busy,
        "rounds_within_100_us": sum(us <= MAX_WAIT_US for us in wait_us),
        "processor": quiet.described(),
        "wrong_rounds": int(torch.count_nonzero(wrong)),
    }


def _checked_rounds(
    bench: Bench, batch: ChangingBatch, sleeper: Sleeper, rounds: int
) -> tuple[int, float]:
    """Return the number of rounds with wrong values, and the seconds that all rounds took."""
    device, decoy = bench.device, Decoy(bench.device)
    wrong = torch.zeros(rounds, dtype=torch.int64, device=device)
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    for index in bench.progress("values after wait()")(range(rounds)):
        backlog = (index // BLOCK) % 2 == 0
        if not backlog:
            torch.cuda.synchronize(device)
        batch.change()
        if backlog:
            sleeper.enqueue(SHORT_SLEEP_MS)
        else:
            decoy.enqueue()
        handle = tdcopier.start_copy(batch.tree, device)
        result = handle.wait()
        batch.count_wrong(result, wrong[index])
        del result
        handle.get()  # the sources may change again from here on
        del handle
    torch.cuda.synchronize(device)
    return int(torch.count_nonzero(wrong)), round(time.perf_counter() - begin, 2)
