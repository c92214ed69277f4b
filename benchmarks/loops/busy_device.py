"""Checks on a busy CUDA device: wait() does not block, values are right, memory is bounded."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from tool.measure import Bench, QuietProcessor
from tool.target_forms import at_most, none

import tdcopier
from loops.learner import Sleeper
from tdcopier._commands.interleave import summarise
from tdcopier.workloads import WORKLOADS, detection_batch, leaves, map_tensors, total_bytes

LONG_SLEEP_MS = 20.0  # queued on the current stream while wait() is timed
SHORT_SLEEP_MS = 1.5  # between the copies of a backlog, so that consumers run late
BLOCK = 10  # consecutive checked rounds of one kind
DECOY_BYTES = 16 << 20  # pinned H2D before a copy, which delays the copy
MAX_WAIT_US = 100.0
MAX_BATCHES = 8.0
STAGING_LIMIT_BYTES = 64 << 20
MEMORY_SLEEP_MS = 12.0
MEMORY_OF = ("detection_batch", "detection_batch_with_images")


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


def run_wait(bench: Bench, timed_rounds: int, checked_rounds: int) -> dict[str, Any]:
    """Time wait() while kernels are queued on a CUDA device, and check values read after it.

    In the timed rounds, 20 ms of kernels are queued; in the others only values are checked.
    """
    batch, sleeper = ChangingBatch(detection_batch(), bench.device), Sleeper(bench.device)
    with QuietProcessor() as quiet:
        timed = _timed_waits(bench, batch, sleeper, timed_rounds, quiet.seek)
    checked = _checked_rounds(bench, batch, sleeper, checked_rounds)
    wait = summarise(timed["wait_us"])
    wrong = timed["wrong_rounds"] + checked["wrong_rounds"]
    what = f"median of wait() with {LONG_SLEEP_MS:g} ms of kernels queued"
    returned = at_most(what, wait.median_us, MAX_WAIT_US, "us")
    returned["hit"] &= timed["still_busy"] == timed_rounds
    return {
        "what": "Host time of wait() behind queued kernels, and values read on the device after it",
        "settings": {
            "queued_ms": LONG_SLEEP_MS,
            "checked": f"blocks of {BLOCK} rounds: a backlog of {SHORT_SLEEP_MS:g} ms kernels with "
            f"outputs dropped at once; an idle stream with a {DECOY_BYTES >> 20} MiB pinned "
            "H2D in front of the copy",
        },
        "bytes": total_bytes(batch.tree),
        "leaves": len(leaves(batch.tree)),
        "stats": timed["stats"],
        "wait": wait._asdict(),
        "start_copy": summarise(timed["start_copy_us"])._asdict(),
        "rounds_with_the_stream_still_busy_after_wait": timed["still_busy"],
        "rounds_within_100_us": sum(t <= MAX_WAIT_US for t in timed["wait_us"]),
        "processor": quiet.described(),
        "checked_rounds": checked_rounds,
        "checked_seconds": checked["seconds"],
        "wrong_rounds": wrong,
        "targets": [
            returned,
            none(f"rounds with a wrong value, of {timed_rounds + checked_rounds}", wrong),
        ],
    }


def _timed_waits(
    bench: Bench,
    batch: ChangingBatch,
    sleeper: Sleeper,
    rounds: int,
    before_round: Callable[[], None],
) -> dict[str, Any]:
    device = bench.device
    wrong = torch.zeros(rounds, dtype=torch.int64, device=device)
    start_us: list[float] = []
    wait_us: list[float] = []
    still_busy = 0
    stats: dict[str, Any] = {}
    warm_up = 3
    for index in bench.progress("wait() behind 20 ms")(range(warm_up + rounds)):
        before_round()
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
        kept = index - warm_up
        batch.count_wrong(result, wrong[max(kept, 0)])
        handle.get()  # the sources may change again from here on
        if kept >= 0:
            start_us.append((started - begin) / 1e3)
            wait_us.append((waited - started) / 1e3)
            still_busy += busy
            stats = dict(handle.stats._asdict())
        del handle, result
    torch.cuda.synchronize(device)
    return {
        "start_copy_us": start_us,
        "wait_us": wait_us,
        "still_busy": still_busy,
        "stats": stats,
        "wrong_rounds": int(torch.count_nonzero(wrong)),
    }


def _checked_rounds(
    bench: Bench, batch: ChangingBatch, sleeper: Sleeper, rounds: int
) -> dict[str, Any]:
    """Run blocks of rounds that provoke two kinds of errors.

    With a backlog, consumers run long after their outputs were dropped: if the next copy gets their
    memory too early, a wrong value shows it. On an idle stream, with the copy delayed by a large
    one, a consumer that does not wait reads before the bytes have arrived.
    """
    device = bench.device
    wrong = torch.zeros(rounds, dtype=torch.int64, device=device)
    decoy_source = torch.empty(DECOY_BYTES, dtype=torch.uint8, pin_memory=True)
    decoy_target = torch.empty(DECOY_BYTES, dtype=torch.uint8, device=device)
    side = torch.cuda.Stream(device)
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
            with torch.cuda.stream(side):
                decoy_target.copy_(decoy_source, non_blocking=True)
        handle = tdcopier.start_copy(batch.tree, device)
        result = handle.wait()
        batch.count_wrong(result, wrong[index])
        del result
        handle.get()  # the sources may change again from here on
        del handle
    torch.cuda.synchronize(device)
    return {
        "wrong_rounds": int(torch.count_nonzero(wrong)),
        "seconds": round(time.perf_counter() - begin, 2),
    }


def run_memory(bench: Bench, iterations: int) -> dict[str, Any]:
    """Measure memory of a CUDA device and pinned staging while it is slower than the host.

    In each iteration, a consumer and 12 ms of kernels follow a copy.
    """
    tdcopier.set_staging_limit_bytes(STAGING_LIMIT_BYTES)
    sleeper = Sleeper(bench.device)
    workloads = {name: _memory(bench, name, iterations, sleeper) for name in MEMORY_OF}
    targets = []
    for name, found in workloads.items():
        peak = f"{name}: peak device memory above the start, in batches"
        held, held_bytes = f"{name}: most pinned staging held, bytes", found["max_staging_bytes"]
        targets.append(at_most(peak, found["peak_batches"], MAX_BATCHES))
        targets.append(at_most(held, held_bytes, STAGING_LIMIT_BYTES))
    return {
        "what": "Peak memory over GPU-bound iterations of start_copy() and wait()",
        "settings": {"iterations": iterations, "staging_limit_bytes": STAGING_LIMIT_BYTES},
        "workloads": workloads,
        "targets": targets,
    }


def _memory(bench: Bench, name: str, iterations: int, sleeper: Sleeper) -> dict[str, Any]:
    device = bench.device
    source = WORKLOADS[name].make(0)
    total = torch.zeros((), dtype=torch.float64, device=device)

    def consume(result: Any) -> None:
        # Adds up reductions to one value each, which need almost no memory.
        for sample in result:
            total.add_(sample["boxes_3d"].sum())
            if "images" in sample:
                total.add_(sample["images"].sum())

    for _ in range(3):
        consume(tdcopier.start_copy(source, device).wait())
    torch.cuda.empty_cache()  # synchronises, and frees blocks that streams were still reading
    at_start = torch.cuda.memory_stats(device)["active_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats(device)
    staging: list[int] = []
    device_behind = 0
    last = torch.cuda.Event()
    begin = time.perf_counter()
    for _ in bench.progress(f"memory, {name}")(range(iterations)):
        device_behind += not last.query()
        handle = tdcopier.start_copy(source, device)
        consume(handle.wait())
        sleeper.enqueue(MEMORY_SLEEP_MS)
        last = torch.cuda.Event()
        last.record()
        staging.append(tdcopier.staging_bytes(device))
    torch.cuda.synchronize(device)
    seconds = time.perf_counter() - begin
    # "active" counts blocks that are freed but may still be read by a stream; "allocated" does not.
    peak = torch.cuda.memory_stats(device)["active_bytes.all.peak"] - at_start
    batch_bytes = handle.stats.transfer_bytes
    return {
        "leaves": len(leaves(source)),
        "batch_bytes": batch_bytes,
        "peak_bytes": peak,
        "peak_batches": peak / batch_bytes,
        "max_staging_bytes": max(staging),
        "iterations_with_the_device_behind": device_behind,
        "seconds": round(seconds, 3),
        "queued_seconds": round(iterations * MEMORY_SLEEP_MS / 1e3, 3),
    }
