"""Reads the next batch of a source, starts its copy, and returns the item for the queue."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from tdcopier import _C
from tdcopier import _slabs as slabs
from tdcopier._C import AsyncCopyHandle
from tdcopier._copy import start_copy
from tdcopier._options import SENDING, CopyOptions, Device
from tdcopier._prefetch.stats import PrefetchCounters
from tdcopier._prefetch.stream_position import StreamPosition


class NoState(NamedTuple):
    """In place of a state that the source did not give."""

    why: str


def copier_of_state(source: Any) -> Callable[[], Any] | None:
    """Return a function that copies the state of a source, or None if the source has none.

    Nor has a replay buffer of torchrl, whose state is all that it has stored.
    """
    cls = type(source)
    names = ("state_dict", "load_state_dict")
    has_state = all(callable(getattr(cls, name, None)) for name in names)
    if not has_state or any(each.__module__.startswith("torchrl.") for each in cls.__mro__):
        return None
    return lambda: copy.deepcopy(source.state_dict())


class Batch(NamedTuple):
    """A batch that was read, and whose copy was started."""

    handle: AsyncCopyHandle[Any]
    made_at: StreamPosition | None
    """Position of the reader's stream, if the batch has leaves that were on the device already."""
    may_be_written: bool
    """Whether the source may write to the batch's memory when it makes the next batch."""
    state: Any
    """That of the source when it had returned this batch; None if it is not asked for one."""

    def is_hand_over_instant(self) -> bool:
        """Return whether `hand_over` would return, or raise, without waiting for the copy."""
        return self.handle._is_wait_instant()

    def hand_over(self) -> Any:
        """Return the tree, ordered on the current stream. May block.

        Raises:
            Exception: The failure of the copy.
        """
        batch = self.handle.wait()
        if self.made_at is not None:
            self.made_at.hand_over(batch)
        return batch


@dataclass
class Failure:
    """An item in place of a batch whose copy could not be started."""

    error: BaseException | None
    state: Any = None
    """As of a batch."""

    def is_hand_over_instant(self) -> bool:
        return True

    def hand_over(self) -> Any:
        """Raise the error."""
        try:
            raise StopIteration if self.error is None else self.error
        finally:
            del self  # avoids a reference cycle: the traceback would keep it, and it the traceback


class EndOfPass(Failure):
    """The last item of a pass, with the source's error if it has failed."""


Item: TypeAlias = Batch | Failure


@dataclass
class Source:
    """Reads batches and starts their copies. Used by one thread at a time."""

    read: Callable[[], Any]
    """Returns the next batch; raises StopIteration at the end."""
    generator: Generator[Any, Any, Any] | None
    """Closed together with the pass."""
    device: Device
    options: CopyOptions
    counters: PrefetchCounters
    copy_state: Callable[[], Any] | None
    """Returns a copy of the source's state, which is part of each item; see `copier_of_state`."""
    in_callers_order: bool
    """Whether batches in slabs are in memory of the current stream: see `RouteOptions` of the
    engine. Then only their workers may write to them."""
    has_reader: bool
    """Whether a reader thread reads. If so, `begin` waits until a batch's memory has been read,
    if the source may write to it again."""
    is_copying: bool = False

    def begin(self, is_wanted: Callable[[], bool], sending: _C.Sending) -> Item | None:
        """Read the next batch and start its copy; return None if the pass was closed meanwhile.

        An Exception that the source raises is returned as the last item.

        Args:
            is_wanted: Called when the batch has been read: whether the pass is still open.
            sending: Which thread sends the batch once it has been staged, and when.

        Raises:
            BaseException: Without a reader, an error of the source or the copy that is not an
                Exception.
        """
        began = time.perf_counter_ns()
        try:
            SENDING.end()  # repeated: see Note [Interrupts]
            SENDING.now = sending  # applies to a copy that the source starts, too
            batch = self.read()
            read = time.perf_counter_ns()
            self.counters.read_ns += read - began
            if not is_wanted():
                if isinstance(batch, AsyncCopyHandle):
                    batch.wait_staged()
                return None
            passed = [batch]
            del batch
            return self._start(passed, read, self.state())
        except StopIteration:
            return EndOfPass(None, self.state())
        except Exception as error:
            return EndOfPass(error)
        except BaseException as error:
            if not self.has_reader:
                raise  # for example an interrupt, which the loop gets at once
            return EndOfPass(error)
        finally:
            SENDING.end()

    def state(self) -> Any:
        """Return a copy of the state; None for a source without one."""
        try:
            return None if self.copy_state is None else self.copy_state()
        except Exception as error:  # the batches go on: the loop may never ask
            return NoState(f"{type(error).__name__}: {error}")  # the error would keep this alive

    def is_generator_running(self) -> bool:
        """Return whether a thread is inside the generator, possibly the calling one."""
        return bool(getattr(self.generator, "gi_running", False))

    def close_generator(self) -> None:
        """Close the generator, so that it leaves its `with` and `finally` blocks.

        Raises:
            BaseException: An error that the generator raises meanwhile.
        """
        if self.generator is not None:
            self.generator.close()

    def _start(self, passed: list[Any], read_ns: int, state: Any) -> Item:
        """Start the copy of the only item of the list, which is removed.

        So the engine has the last reference to the memory when it has been read, and frees it
        without the GIL: that takes milliseconds for a large batch in a worker's shared memory.
        """
        self.is_copying = True
        try:
            batch = passed.pop()
            may_be_written = not slabs.has_parcel(batch)  # else its worker takes another slab
            if isinstance(batch, AsyncCopyHandle):  # the source has started the copy itself
                handle = batch
            else:
                # Their memory is read late then, which must not hold up the source.
                SENDING.in_callers_order = self.in_callers_order and not may_be_written
                handle = start_copy(batch, self.device, **self.options)
            del batch
            made_at = self._position() if handle._reuses_leaves else None
            if may_be_written and self.has_reader:
                handle.wait_staged()
            return Batch(handle, made_at, may_be_written, state)
        except Exception as error:
            return Failure(error, state)
        finally:
            self.is_copying = False
            self.counters.copy_ns += time.perf_counter_ns() - read_ns

    def _position(self) -> StreamPosition | None:
        """Return the position of the target's current stream; None for a target without streams."""
        device = torch.empty(0, device=self.device).device
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None or device.type != accelerator.type:
            return None
        return StreamPosition.current(device)
