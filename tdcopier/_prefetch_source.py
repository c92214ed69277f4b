"""Reads the next batch of a source, starts its copy, and says what became of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch

from tdcopier import _C
from tdcopier._copy import AsyncCopyHandle, CopyOptions, Device, start_copy
from tdcopier._stream_position import StreamPosition


@dataclass
class PrefetchCounters:
    """Counts and times of all passes over one source."""

    batches: int = 0
    late_batches: int = 0
    waited_ns: int = 0
    read_ns: int = 0
    copy_ns: int = 0
    idle_ns: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)  # of what consumers count

    def count_batch(self, is_late: bool, began_ns: int) -> None:
        """A batch was yielded that a consumer asked for at `began_ns`."""
        with self.lock:
            self.batches += 1
            self.late_batches += is_late
            self.waited_ns += time.perf_counter_ns() - began_ns


class Batch(NamedTuple):
    """A batch that was read, and whose copy was started."""

    handle: AsyncCopyHandle
    made_at: StreamPosition | None
    """Where the reader's stream was, if leaves are handed through that were on the device."""

    def hand_over(self) -> Any:
        """The tree, ordered on the current stream. May block.

        Raises:
            Exception: The failure of the copy.
        """
        batch = self.handle.wait()
        if self.made_at is not None:
            self.made_at.hand_over(batch)
        return batch


@dataclass
class Failure:
    """Stands in the place of a batch whose copy could not be started."""

    error: BaseException | None

    def hand_over(self) -> Any:
        """Raise the error."""
        try:
            raise StopIteration if self.error is None else self.error
        finally:
            del self  # which the traceback would keep, and it the traceback


class EndOfPass(Failure):
    """The last item: no error where the source has ended, else what it has raised."""


Item: TypeAlias = Batch | Failure


@dataclass
class Source:
    """Gives batches, and starts their copies. Used by one thread at a time."""

    read: Callable[[], Any]
    """Returns the next batch; raises StopIteration where there is none."""
    generator: Generator[Any, Any, Any] | None
    """Closed with the pass."""
    device: Device
    options: CopyOptions
    counters: PrefetchCounters
    has_reader: bool
    """Whether a thread of its own reads. There `begin` waits until a batch's memory was read."""
    is_copying: bool = False

    def begin(self, is_wanted: Callable[[], bool], sending: _C.Sending) -> Item | None:
        """Read the next batch and start its copy; None if the pass was closed meanwhile.

        Args:
            is_wanted: Called when the batch has been read.
            sending: Which thread sends the batch once it was staged.

        Raises:
            BaseException: Other than an Exception, what the source or the copy has raised, unless
                a reader has.

        What the source raises becomes the last item.
        """
        began = time.perf_counter_ns()
        try:
            _C.set_sending(sending)  # also of a copy that the source starts
            batch = self.read()
            read = time.perf_counter_ns()
            self.counters.read_ns += read - began
            if not is_wanted():
                if isinstance(batch, AsyncCopyHandle):
                    batch.wait_staged()
                return None
            return self._start(batch, read)
        except StopIteration:
            return EndOfPass(None)
        except Exception as error:
            return EndOfPass(error)
        except BaseException as error:
            if not self.has_reader:
                raise  # an interrupt is for the loop, at once
            return EndOfPass(error)
        finally:
            _C.set_sending(_C.Sending.AT_ONCE)

    def is_generator_running(self) -> bool:
        """Whether a thread is in the generator; the calling one, if a call from there asks."""
        return bool(getattr(self.generator, "gi_running", False))

    def close_generator(self) -> None:
        """Let a generator that does not go on leave its `with` and `finally`.

        Raises:
            BaseException: What it raises meanwhile.
        """
        if self.generator is not None:
            self.generator.close()

    def _start(self, batch: Any, read_ns: int) -> Item:
        self.is_copying = True
        try:
            if isinstance(batch, AsyncCopyHandle):  # the source has started it itself
                handle = batch
            else:
                handle = start_copy(batch, self.device, **self.options)
            made_at = self._position() if handle._reuses_leaves else None
            if self.has_reader:
                handle.wait_staged()
            return Batch(handle, made_at)
        except Exception as error:
            return Failure(error)
        finally:
            self.is_copying = False
            self.counters.copy_ns += time.perf_counter_ns() - read_ns

    def _position(self) -> StreamPosition | None:
        """Of the calling thread's current stream; None for a target that has no streams."""
        device = torch.empty(0, device=self.device).device
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None or device.type != accelerator.type:
            return None
        return StreamPosition.current(device)
