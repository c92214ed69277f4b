"""What a source of batches gives, begun: batches on their way, failures, the end."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

import torch

from tdcopier import _C
from tdcopier._copy import AsyncCopyHandle, CopyOptions, Device, start_copy
from tdcopier._delegated import plain_parts


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

    def count_batch(self, is_late: bool, began_ns: int) -> None:
        """One was yielded that was asked for at `began_ns`."""
        with self.lock:
            self.batches += 1
            self.late_batches += is_late
            self.waited_ns += time.perf_counter_ns() - began_ns


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


class Batch(NamedTuple):
    """One that was read and is on its way."""

    handle: AsyncCopyHandle
    mark: Mark | None

    def hand_over(self) -> Any:
        """What has arrived, or will have: ordered on the current stream. May block."""
        batch = self.handle.wait()
        if self.mark is not None:
            self.mark.order(batch)
        return batch


class Failure(NamedTuple):
    """What comes instead of a batch, or of the end."""

    error: BaseException
    is_last: bool


class Sign(Enum):
    """What stays in a line, for everybody who comes."""

    END = "the source has ended"
    CLOSED = "nobody may take what is left"


Item: TypeAlias = Batch | Failure | Sign


def is_last(item: Item) -> bool:
    """Whether nothing comes behind it."""
    return item is Sign.END or (isinstance(item, Failure) and item.is_last)


def send_staged(held: deque[AsyncCopyHandle]) -> None:
    """Send the copies that have been staged, up to the first one that has not, and forget them."""
    while held:
        try:
            handle = held.popleft()
        except IndexError:  # another consumer was faster
            return
        if not handle._send_if_staged():
            held.appendleft(handle)
            return


@dataclass
class Source:
    """Gives batches, and begins their copies. One thread at a time."""

    read: Callable[[], Any]
    """The next batch; raises StopIteration where there is none."""
    generator: Generator[Any, Any, Any] | None
    """To be closed where the pass is."""
    device: Device
    options: CopyOptions
    tally: Tally
    is_readers: bool
    """Whether a thread of its own reads. It waits where that holds up nobody: the memory of a batch
    was read when `begin` returns."""
    is_copying: bool = False

    def begin(self, is_wanted: Callable[[], bool], sending: _C.Sending) -> Item | None:
        """Read the next batch and begin its copy; None if nobody wants it any more.

        Args:
            is_wanted: Asked when the batch has been read.
            sending: Who sends it once it was staged.

        Raises:
            BaseException: Other than an Exception, what the source or the copy has raised, unless
                a reader has.

        What the source raises is the last item.
        """
        began = time.perf_counter_ns()
        try:
            _C.set_sending(sending)  # also of a copy that the source begins
            batch = self.read()
            read = time.perf_counter_ns()
            self.tally.read_ns += read - began
            if not is_wanted():
                if isinstance(batch, AsyncCopyHandle):
                    batch.wait_staged()
                return None
            return self._start(batch, read)
        except StopIteration:
            return Sign.END
        except Exception as error:
            return Failure(error, is_last=True)
        except BaseException as error:
            if not self.is_readers:
                raise  # an interrupt is for the loop, at once
            return Failure(error, is_last=True)
        finally:
            _C.set_sending(_C.Sending.AT_ONCE)

    def close_generator(self) -> None:
        """Let a generator that is not to go on leave its `with` and `finally`.

        Raises:
            BaseException: What it raises meanwhile.
        """
        if self.generator is not None:
            self.generator.close()

    def _start(self, batch: Any, read_ns: int) -> Item:
        self.is_copying = True
        try:
            if isinstance(batch, AsyncCopyHandle):  # the source has begun it itself
                handle = batch
            else:
                handle = start_copy(batch, self.device, **self.options)
            mark = Mark.on(self.device) if handle._reuses_leaves else None
            if self.is_readers:
                handle.wait_staged()
            return Batch(handle, mark)
        except Exception as error:
            return Failure(error, is_last=False)
        finally:
            self.is_copying = False
            self.tally.copy_ns += time.perf_counter_ns() - read_ns
