"""The reader of a prefetched source: a thread that starts copies, and its line to the consumer."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from queue import Empty, SimpleQueue
from typing import Any, NoReturn, TypeAlias

import torch

from tdcopier import _C
from tdcopier._copy import AsyncCopyHandle, CopyOptions, Device, start_copy
from tdcopier._delegated import plain_parts

_SOURCE_GRACE_S = (
    1.0  # how long the end of the interpreter waits for a reader that is in its source
)
_COPY_GRACE_S = 10.0  # and for the engine, which a reader leaves in bounded time


@dataclass
class Tally:
    """What all passes over one source have come to so far."""

    batches: int = 0
    late_batches: int = 0
    waited_ns: int = 0
    read_ns: int = 0
    copy_ns: int = 0
    idle_ns: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)  # of what consumers count


@dataclass(frozen=True)
class Mark:
    """Where a stream was when it left leaves that are handed through."""

    device: torch.device
    stream: torch.Stream
    event: torch.Event

    @classmethod
    def on(cls, target: Device) -> Mark | None:
        """On the calling thread's current stream; None for a target that has no streams."""
        device = torch.empty(0, device=target).device
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None or device.type != accelerator.type:
            return None
        stream = torch.accelerator.current_stream(device)
        return cls(device, stream, stream.record_event())

    def order(self, batch: Any) -> None:
        """Let the calling thread's current stream use what of `batch` was handed through."""
        device = self.device
        stream = torch.accelerator.current_stream(device)
        if stream == self.stream:
            return
        stream.wait_event(self.event)
        for _, leaf in _C.leaves_with_paths(batch, device):
            for part in plain_parts(leaf):
                for owner in _owners(part):
                    if owner.device == device:
                        owner.record_stream(stream)


def _owners(part: torch.Tensor) -> list[torch.Tensor]:
    """The strided tensors that a tensor keeps its memory in."""
    if part.layout is torch.strided:
        return [part]
    if part.layout is torch.sparse_coo:
        return [part._indices(), part._values()]
    if part.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [part.crow_indices(), part.col_indices(), part.values()]
    return [part.ccol_indices(), part.row_indices(), part.values()]


@dataclass(frozen=True)
class Batch:
    """One that was read and is on its way."""

    handle: AsyncCopyHandle
    mark: Mark | None


@dataclass(frozen=True)
class Failure:
    """What comes instead of a batch, or of the end."""

    error: BaseException
    is_last: bool


class Sign(Enum):
    """What stays in a line, for everybody who comes."""

    END = "the source has ended"
    CLOSED = "nobody may take what is left"


Item: TypeAlias = Batch | Failure | Sign


class Line:
    """What a reader and its consumers share: batches in order, and room for more.

    Thread: any. Made of `SimpleQueue`s and no lock, since `close` may be called by the collection
    of garbage, which may happen in a thread that is in a method of the same line.
    """

    def __init__(self, depth: int, tally: Tally) -> None:
        self.tally = tally
        self.is_over = False  # the end was told, or the failure that is the last
        self.is_copying = False
        self.is_waited_for = False  # by a `close` that raises `failure_of_close`
        self.failure_of_close: BaseException | None = None
        self.why_closed: str | None = None
        self._thread: threading.Thread | None = None
        self._forks = forks()
        self._unused = depth  # room that was never taken: the reader's own
        self._room: SimpleQueue[None] = SimpleQueue()  # what was given back
        self._items: SimpleQueue[Item] = SimpleQueue()

    @property
    def is_of_parent(self) -> bool:
        """Whether this process was forked since, and has no such reader."""
        return self._forks != forks()

    def start(self, reader: Reader) -> None:
        """Let a reader of this line begin."""
        self._thread = threading.Thread(
            target=_run, args=(reader, self), name="tdcopier-prefetch", daemon=True
        )
        _lines.add(self)
        try:
            self._thread.start()
        except BaseException:
            _lines.discard(self)
            raise

    # ---- the reader's side ----

    def take_room(self) -> bool:
        """Wait until one batch more may be in flight; False once the line is closed. Blocks."""
        if self._unused > 0:
            self._unused -= 1
        elif self.why_closed is None:
            began = time.perf_counter_ns()
            self._room.get()
            self.tally.idle_ns += time.perf_counter_ns() - began
        return self.why_closed is None

    def put(self, item: Item) -> None:
        """Give the consumers one more."""
        self._items.put(item)
        if self.why_closed is not None:
            self._drop_items()

    # ---- the consumers' side ----

    def take(self) -> Any:
        """The next batch, ordered on the current stream. Blocks.

        Raises:
            StopIteration: there is none.
            RuntimeError: the line is closed, or the parent's.
            BaseException: what the source or the copy has raised.
        """
        if self.is_of_parent:
            refuse_in_child()
        began = time.perf_counter_ns()
        is_late = self._items.empty()
        item = self._items.get()
        if isinstance(item, Sign):
            self._items.put(item)
            if item is Sign.CLOSED and not self.is_over:
                raise RuntimeError(f"this pass was closed: {self.why_closed}")
            self.is_over = True
            raise StopIteration
        if isinstance(item, Failure):
            if item.is_last:
                self.is_over = True
                self._items.put(Sign.END)
            else:
                self._room.put(None)
            try:
                raise item.error
            finally:
                del item  # which the traceback would keep, and it the traceback
        try:
            batch = item.handle.wait()
            if item.mark is not None:
                item.mark.order(batch)
        finally:
            self._room.put(None)
        with self.tally.lock:
            self.tally.batches += 1
            self.tally.late_batches += is_late
            self.tally.waited_ns += time.perf_counter_ns() - began
        return batch

    def close(self, why: str) -> None:
        """Drop what nobody took, and let the reader and all consumers end. Waits for nobody."""
        if self.is_of_parent or self.why_closed is not None:
            return
        self.why_closed = why
        self._room.put(None)
        self._drop_items()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the end of the reader, unless the reader itself asks. Blocks."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _drop_items(self) -> None:
        try:
            while True:
                self._items.get_nowait()
        except Empty:
            self._items.put(Sign.CLOSED)


class Surroundings:
    """The state of torch of the thread that begins a pass, for the thread that reads."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._device_index: int | None = None
        self._streams: list[torch.Stream] = []
        if _is_accelerator_in_use():
            self._device_index = torch.accelerator.current_device_index()
            every = map(torch.accelerator.current_stream, range(torch.accelerator.device_count()))
            # To set a stream is to use its device: those that are left alone are a thread's first.
            self._streams = [stream for stream in every if stream.stream_id != 0]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within it the calling thread has the same state. It keeps devices and streams."""
        for stream in self._streams:
            torch.accelerator.set_stream(stream)
        index = self._device_index
        if index is not None and index != torch.accelerator.current_device_index():
            torch.accelerator.set_device_index(index)
        with torch.inference_mode(self._inference), torch.set_grad_enabled(self._grad):
            yield


def _is_accelerator_in_use() -> bool:
    """A process that has not touched its accelerator yet is not made to, so that it may fork."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and bool(torch.get_device_module(accelerator).is_initialized())


@dataclass(frozen=True)
class Reader:
    """Reads one pass and starts its copies."""

    read: Callable[[], Any]
    """The next batch; raises StopIteration where there is none."""
    generator: Generator[Any, Any, Any] | None
    """To be closed where the pass is."""
    device: Device
    options: CopyOptions
    surroundings: Surroundings

    def read_all(self, line: Line) -> None:
        """Until the source ends or fails, or the line is closed."""
        while line.take_room():
            began = time.perf_counter_ns()
            try:
                batch = self.read()
            except StopIteration:
                line.put(Sign.END)
                return
            except BaseException as error:
                line.put(Failure(error, is_last=True))
                return
            read = time.perf_counter_ns()
            line.tally.read_ns += read - began
            if line.why_closed is not None:
                return
            line.is_copying = True
            try:
                item: Item = self._start(batch)
            except Exception as error:
                item = Failure(error, is_last=False)
            finally:
                line.is_copying = False
            line.tally.copy_ns += time.perf_counter_ns() - read
            del batch
            line.put(item)
            del item  # the consumer's alone

    def _start(self, batch: Any) -> Batch:
        if isinstance(batch, AsyncCopyHandle):  # the source has begun it itself
            handle = batch
        else:
            handle = start_copy(batch, self.device, **self.options)
        mark = Mark.on(self.device) if handle.stats.reused_leaves > 0 else None
        handle.wait_staged()  # the source may write to the same memory next
        return Batch(handle, mark)

    def close_generator(self, line: Line) -> None:
        """Let a generator that is not to go on leave its `with` and `finally`."""
        if self.generator is None or line.why_closed is None:
            return
        try:
            self.generator.close()
        except BaseException as error:
            if not line.is_waited_for:
                raise
            line.failure_of_close = error


def _run(reader: Reader, line: Line) -> None:
    """What the thread does."""
    try:
        with reader.surroundings.entered():
            try:
                reader.read_all(line)
            finally:
                reader.close_generator(line)
    except BaseException as error:
        if line.why_closed is not None:
            raise  # nobody listens but `threading.excepthook`
        line.put(Failure(error, is_last=True))
    finally:
        _lines.discard(line)


_lines: set[Line] = set()
"""Those whose reader runs."""

_forks = 0


def forks() -> int:
    """How often this process, and those that it comes from, were forked."""
    return _forks


def refuse_in_child() -> NoReturn:
    """Say that a child has no reader."""
    raise RuntimeError(
        "this prefetcher was made before the process was forked, and the thread that reads its "
        "source is the parent's: make another one in the child"
    )


def _forget_the_parents_readers() -> None:
    global _forks
    _forks += 1
    _lines.clear()


def _end_readers() -> None:
    """Before the interpreter ends: a thread that it ends within C++ would take the process down."""
    lines = list(_lines)
    for line in lines:
        line.close("the interpreter ends")
    deadline = time.monotonic() + _SOURCE_GRACE_S
    for line in lines:
        line.join(max(0.0, deadline - time.monotonic()))
        if line.is_copying:
            line.join(_COPY_GRACE_S)


os.register_at_fork(after_in_child=_forget_the_parents_readers)
atexit.register(_end_readers)  # after the engine's own, and so called before it
