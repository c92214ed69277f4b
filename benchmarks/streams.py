"""Checks on a busy CUDA device: wait() does not block, values are right, memory is bounded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from busy import Sleeper
from measure import summarise
from quiet import QuietProcessor

import tdcopier
from tdcopier.workloads import WORKLOADS, detection_batch, leaves, map_tensors, total_bytes

LONG_SLEEP_MS = 20.0  # queued on the current stream while wait() is timed
SHORT_SLEEP_MS = 1.5  # between the copies of a backlog, so that consumers run late
BLOCK = 10  # consecutive checked rounds of one kind
DECOY_BYTES = 16 << 20  # pinned H2D before a copy, which delays the copy
MAX_WAIT_US = 100.0
MAX_BATCHES = 8.0
STAGING_LIMIT_BYTES = 64 << 20

Progress = Callable[[str], Callable[[Iterable[int]], Iterable[int]]]


class ChangingBatch:
    """A batch whose values all change each round, and a twin on the device to compare with.

    The leaves are slices of one tensor per dtype, so that one operation per dtype changes them all.
    The twin is changed by the same operations on the device, and never copied again.
    """

    def __init__(self, tree: Any, device: torch.device) -> None:
        groups: dict[torch.dtype, list[torch.Tensor]] = {}
        for leaf in leaves(tree):
            groups.setdefault(leaf.dtype, []).append(leaf.reshape(-1))
        self.flat = {dtype: torch.cat(group) for dtype, group in groups.items()}
        self.twin = {dtype: flat.to(device, copy=True) for dtype, flat in self.flat.items()}
        offsets = dict.fromkeys(groups, 0)

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
        """Compare every value of every output on the current stream, and count the wrong ones.

        Args:
            result: The copied tree.
            into: () int64 on the device, to which the count is added.

        """
        groups: dict[torch.dtype, list[torch.Tensor]] = {}
        for leaf in leaves(result):
            groups.setdefault(leaf.dtype, []).append(leaf.reshape(-1))
        for dtype, group in groups.items():
            into.add_(torch.count_nonzero(torch.cat(group) != self.twin[dtype]))


def run_wait(
    device: torch.device, timed_rounds: int, checked_rounds: int, progress: Progress
) -> dict[str, Any]:
    """Time wait() while kernels are queued, and check the values that are read after it.

    Args:
        device: The target, a CUDA device.
        timed_rounds: Rounds with 20 ms of kernels queued; wait() is timed, values are checked.
        checked_rounds: Rounds in which only values are checked.
        progress: Returns a wrapper of the rounds for a label.

    """
    batch = ChangingBatch(detection_batch(), device)
    sleeper = Sleeper(device)
    with QuietProcessor() as quiet:
        timed = _timed_waits(device, batch, sleeper, timed_rounds, progress, quiet.seek)
    checked = _checked_rounds(device, batch, sleeper, checked_rounds, progress)
    wait = summarise(timed["wait_us"])
    wrong = timed["wrong_rounds"] + checked["wrong_rounds"]
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
            {
                "what": f"median of wait() with {LONG_SLEEP_MS:g} ms of kernels queued",
                "wanted": f"<= {MAX_WAIT_US:g} us",
                "found": round(wait.median_us, 2),
                "hit": wait.median_us <= MAX_WAIT_US and timed["still_busy"] == timed_rounds,
            },
            {
                "what": f"rounds with a wrong value, of {timed_rounds + checked_rounds}",
                "wanted": "0",
                "found": wrong,
                "hit": wrong == 0,
            },
        ],
    }


def _timed_waits(
    device: torch.device,
    batch: ChangingBatch,
    sleeper: Sleeper,
    rounds: int,
    progress: Progress,
    before_round: Callable[[], None],
) -> dict[str, Any]:
    wrong = torch.zeros(rounds, dtype=torch.int64, device=device)
    start_us: list[float] = []
    wait_us: list[float] = []
    still_busy = 0
    stats: dict[str, Any] = {}
    warm_up = 3
    for index in progress("wait() behind 20 ms")(range(warm_up + rounds)):
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
    device: torch.device,
    batch: ChangingBatch,
    sleeper: Sleeper,
    rounds: int,
    progress: Progress,
) -> dict[str, Any]:
    """Run blocks of rounds that provoke two kinds of errors.

    With a backlog, consumers run long after their outputs were dropped: if the next copy gets their
    memory too early, a wrong value shows it. On an idle stream, with the copy delayed by a large
    one, a consumer that does not wait reads before the bytes have arrived.
    """
    wrong = torch.zeros(rounds, dtype=torch.int64, device=device)
    decoy_source = torch.empty(DECOY_BYTES, dtype=torch.uint8, pin_memory=True)
    decoy_target = torch.empty(DECOY_BYTES, dtype=torch.uint8, device=device)
    side = torch.cuda.Stream(device)
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    for index in progress("values after wait()")(range(rounds)):
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


def run_memory(
    device: torch.device, names: list[str], iterations: int, progress: Progress
) -> dict[str, Any]:
    """Measure device memory and pinned staging while the device is slower than the host.

    Args:
        device: The target, a CUDA device.
        names: Workloads to run.
        iterations: Copies per workload, each followed by a consumer and 12 ms of kernels.
        progress: Returns a wrapper of the iterations for a label.

    """
    tdcopier.set_staging_limit_bytes(STAGING_LIMIT_BYTES)
    sleeper = Sleeper(device)
    workloads = {n: _memory(device, n, iterations, sleeper, progress) for n in names}
    targets = []
    for name, found in workloads.items():
        targets += [
            {
                "what": f"{name}: peak device memory above the start, in batches",
                "wanted": f"<= {MAX_BATCHES:g}",
                "found": round(found["peak_batches"], 2),
                "hit": found["peak_batches"] <= MAX_BATCHES,
            },
            {
                "what": f"{name}: most pinned staging held, bytes",
                "wanted": f"<= {STAGING_LIMIT_BYTES}",
                "found": found["max_staging_bytes"],
                "hit": found["max_staging_bytes"] <= STAGING_LIMIT_BYTES,
            },
        ]
    return {
        "what": "Peak memory over GPU-bound iterations of start_copy() and wait()",
        "settings": {"iterations": iterations, "staging_limit_bytes": STAGING_LIMIT_BYTES},
        "workloads": workloads,
        "targets": targets,
    }


def _memory(
    device: torch.device, name: str, iterations: int, sleeper: Sleeper, progress: Progress
) -> dict[str, Any]:
    source = WORKLOADS[name].make(0)
    total = torch.zeros((), dtype=torch.float64, device=device)
    sleep_ms = 12.0

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
    for _ in progress(f"memory, {name}")(range(iterations)):
        device_behind += not last.query()
        handle = tdcopier.start_copy(source, device)
        consume(handle.wait())
        sleeper.enqueue(sleep_ms)
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
        "queued_seconds": round(iterations * sleep_ms / 1e3, 3),
    }
