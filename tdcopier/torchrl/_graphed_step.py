"""Captures a step of a learner in a CUDA graph, and replays it."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tdcopier import _C
from tdcopier.torchrl._static_batch import StaticBatch
from tdcopier.torchrl._watched import Watched

_NOT_CAPTURED = (
    "the step failed while it was captured in a CUDA graph: {error}. One cause may be work that "
    "needs the host, such as .item(), printing a tensor, or a copy to pageable memory: do it with "
    "what step() returns, or give graph=False"
)
_COUNTS = (
    "update() changes numbers or tensors that Python binds to names, and a graph does not do that "
    "again: {names}. Change tensors on the device in place, or give graph=False"
)
_PAUSE_S = 20e-6

Named = list[tuple[str, Any]]


class GraphedStep:
    """One captured step. Its memory must stay: that of the batch, and of what the step uses."""

    def __init__(
        self,
        static: StaticBatch,
        learn: Callable[[StaticBatch], tuple[Any, Any]],
        stream: torch.cuda.Stream,
        reader: torch.cuda.Stream,
        *,
        draws: bool,
        generator: torch.Generator | None,
    ) -> None:
        """Capture a step.

        Args:
            static: the batch.
            learn: takes it, and returns a batch and a result.
            stream: where to capture: that of the steps before, which ran without a graph.
            reader: where to read, beside the learning if this is another one.
            draws: whether the graph draws the index.
            generator: draws it; None: the device's default one.

        Raises:
            RuntimeError: the step does something that a graph cannot hold.
        """
        self._device = static.index.device
        self._reads = torch.zeros(1, dtype=torch.int64, device=self._device)
        reads_on_host = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self._reads_on_host = reads_on_host.numpy()
        self._replays = 0
        self._static = static
        torch.cuda.synchronize(self._device)
        with _no_collections(), torch.cuda.stream(stream), _capturing(generator) as self._graph:
            static.advance()
            with _branch(stream, reader):
                with torch.cuda.stream(reader):
                    if draws:
                        static.draw(generator)
                    self._read = static.read()
                    self._reads.add_(1)
                    reads_on_host.copy_(self._reads, non_blocking=True)
                self.batch, self.result = learn(static)
        # Torch writes seed and offset on this stream before a capture, and on another for a replay.
        stream.synchronize()

    def replay(self, count: int) -> ReplayedRead:
        """Enqueue replays on the current stream; return when the device will have read the rows."""
        with _turn_on(self._device):
            for _ in range(count):
                self._replays += 1  # before: Ctrl-C may come between, and a read must not be missed
                self._graph.replay()
            end = _C.DeviceAccess(torch.cuda.current_stream(self._device))
        return ReplayedRead(self._reads_on_host, self._replays, end)

    def raise_if_bad(self) -> None:
        """Raise an `IndexError` if a replay that is done had a row that is out of range."""
        self._read.get()


@contextlib.contextmanager
def _capturing(generator: torch.Generator | None) -> Iterator[torch.cuda.CUDAGraph]:
    """Capture what a block does on the current stream."""
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    if generator is not None:
        graph.register_generator_state(generator)
    try:
        graph.capture_begin(pool, capture_error_mode="thread_local")
        yield graph
    except BaseException as error:
        _end_failed(graph, pool, generator)
        if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
            raise RuntimeError(_NOT_CAPTURED.format(error=error)) from error
        raise
    try:
        graph.capture_end()
    except RuntimeError as error:  # of work that torch did not refuse
        _end_failed(graph, pool, generator)
        raise RuntimeError(_NOT_CAPTURED.format(error=error)) from error


@contextlib.contextmanager
def _branch(stream: torch.cuda.Stream, branch: torch.cuda.Stream) -> Iterator[None]:
    """Let a stream begin where another is, and join it at the end of a block."""
    branch.wait_stream(stream)
    try:
        yield
    except BaseException:
        with contextlib.suppress(RuntimeError):  # CUDA has ended the capture with an error already
            stream.wait_stream(branch)
        raise
    stream.wait_stream(branch)


def _end_failed(
    graph: torch.cuda.CUDAGraph, pool: tuple[int, int], generator: torch.Generator | None
) -> None:
    """End a capture that failed, and what torch leaves begun then.

    Its allocator would take the memory of a later capture for that of this one, and would keep
    what several streams have used; its generators would refuse to draw. A capture that succeeds
    ends the latter. The allocator of pinned memory goes on to look at the failed graph.
    """
    try:
        graph.capture_end()
    except RuntimeError:  # of the same failure, told again
        _failed.append(graph)
        device = torch.cuda.current_device()
        with contextlib.suppress(RuntimeError):  # the capture did not begin
            torch._C._cuda_endAllocateToPool(device, pool)
            torch._C._cuda_releasePool(device, pool)
        empty = torch.cuda.CUDAGraph()
        if generator is not None:
            empty.register_generator_state(generator)
        empty.capture_begin(capture_error_mode="thread_local")
        try:
            torch.zeros(1, device="cuda")  # torch warns of a graph without work
        finally:
            empty.capture_end()
        torch.cuda.current_stream().synchronize()  # as after a capture that succeeds


_failed: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture failed, which stay as long as the process."""
_turns = threading.Lock()
_last: dict[torch.device, tuple[torch.cuda.Stream, _C.DeviceAccess]] = {}
"""The last replays on each device."""


@contextlib.contextmanager
def _turn_on(device: torch.device) -> Iterator[None]:
    """Order a block's replays after those of all learners on the device.

    Graphs that draw from one generator read seed and offset from the same memory, which torch
    writes before each replay.
    """
    stream = torch.cuda.current_stream(device)
    with _turns:
        if (last := _last.get(device)) is not None and last[0] != stream:
            last[1].order()
        try:
            yield
        finally:
            _last[device] = stream, _C.DeviceAccess(stream)


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Collect garbage before a block, and none in it: what is freed there would break a capture."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def captured(
    static: StaticBatch,
    learn: Callable[[StaticBatch], tuple[Any, Any]],
    stream: torch.cuda.Stream,
    reader: torch.cuda.Stream,
    watched: Watched,
    *,
    draws: bool,
    generator: torch.Generator | None,
) -> GraphedStep:
    """Return a `GraphedStep`; warn of what Python does in it, which no replay does again.

    If it fails, the gradients of what is `watched` are those from before.
    """
    gradients, before = watched.gradients(), watched.counters()
    try:
        step = GraphedStep(static, learn, stream, reader, draws=draws, generator=generator)
    except BaseException:
        for parameter, gradient in gradients:  # the capture has computed none
            parameter.grad = gradient
        raise
    if changed := changed_names(before, watched.counters()):
        warnings.warn(_COUNTS.format(names=", ".join(changed)), stacklevel=7)
    return step


def changed_names(before: Named, after: Named) -> list[str]:
    """Return the names whose number, or whose tensor, is another one."""
    pairs = zip(before, after, strict=False)
    return sorted({name for (name, old), (_, new) in pairs if _differ(old, new)})


def _differ(old: Any, new: Any) -> bool:
    is_tensor = isinstance(old, torch.Tensor) or isinstance(new, torch.Tensor)
    return old is not new if is_tensor else bool(old != new)


class ReplayedRead:
    """The reads of rows in replays of one graph, which end before the replays do.

    It stands where a `DeviceAccess` stands.
    """

    __slots__ = ("_end", "_number", "_reads_on_host")

    def __init__(self, reads_on_host: Any, number: int, end: _C.DeviceAccess) -> None:
        """Take the number of reads that have ended, as the device writes it, and that to reach."""
        self._reads_on_host = reads_on_host
        self._number = number
        self._end = end

    def has_ended(self) -> bool:
        return bool(self._reads_on_host[0] >= self._number) or self._end.has_ended()

    def wait(self) -> None:
        while not self.has_ended():
            time.sleep(_PAUSE_S)

    def order(self) -> None:
        """Make the current stream wait; a graph has no event after its reads alone."""
        self._end.order()
