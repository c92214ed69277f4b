"""A learner's step as one CUDA graph: an index is drawn, the device reads the rows, and learns.

`_graphed_step.py` captures and replays, `_static_batch.py` draws and reads, and `_watched.py` finds
what has changed; this file decides when to capture.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torchrl.data import PrioritizedSampler
from torchrl.data.replay_buffers.storages import _get_default_collate
from typing_extensions import Self

from tdcopier import _C
from tdcopier._prefetch.stream_position import StreamPosition
from tdcopier.torchrl._buffer import PackedTensorDictReplayBuffer
from tdcopier.torchrl._current_sample import RecordingSampleUnit
from tdcopier.torchrl._graphed_step import GraphedStep, captured
from tdcopier.torchrl._pinned import PackedLazyTensorStorage
from tdcopier.torchrl._samplers import DeviceRandomSampler
from tdcopier.torchrl._static_batch import StaticBatch
from tdcopier.torchrl._watched import Watched

STEPS_AT_ONCE = 32
"""Replays between two looks at what has changed, in `steps`."""
FEW_REPLAYS, MANY_CAPTURES = 10, 4
"""A learner warns if it begins anew so often in a row, each time after at most so few replays."""

_WANTED = (
    "GraphedLearner needs a PackedTensorDictReplayBuffer with a PackedLazyTensorStorage("
    "size, sample_device=device, pinned=True); "
)


class LearnerStats(NamedTuple):
    """Counts of the steps of one learner."""

    steps: int
    """All steps."""
    replays: int
    """Those that replayed a graph."""
    captures: int
    """Graphs that were captured."""
    why_captured: str | None
    """Why the last of them was captured anew; None: there was none, or one."""


class GraphedLearner:
    """Draws a batch of a replay buffer, reads it, and learns, as one CUDA graph.

    The buffer's storage stays in host memory and is pinned: the device reads the rows of a batch
    itself. A step then costs the host one replay, and no line of Python runs between its parts.

    The first steps run without a graph, as torch wants it before a capture; they are steps like all
    others. The learner captures a new graph, after as many such steps, when the memory of the
    storage, the layout of the batch, or anything that `update` depends on has changed: a parameter
    or an optimizer's state that was replaced, a learning rate that is a number, a mode. It knows
    the modules, optimizers and tensors that `update` finds in its closure, its globals and its
    object. Python in `update` runs in the steps without a graph and in the capture, and no more:
    what counts there stands still, and the learner warns of it.

    A batch, and what `update` returns, is overwritten by the next step. Without CUDA, and with
    ``graph=False``, the same steps run without a graph, with the same values.

    The buffer may grow, and any thread may write to it between two steps or during one: rows are
    written when the device has read the batches before, and read as a whole.
    """

    def __init__(
        self,
        buffer: PackedTensorDictReplayBuffer,
        update: Callable[[Any], Any],
        *,
        batch_size: int | None = None,
        keys: Sequence[Any] | None = None,
        watch: Iterable[Any] = (),
        graph: bool | None = None,
        warmup: int = 3,
        read_ahead: bool = False,
    ) -> None:
        """Args:
            buffer: with a pinned `PackedLazyTensorStorage` and no `prefetch=`. With a
                `DeviceRandomSampler` the graph draws the index. Other samplers draw it on the host,
                and index and weights travel to the graph before each step.
            update: takes a batch, a TensorDict on the device with the keys of `buffer.sample()`;
                computes losses, and steps the optimizers; returns any tree. It must do no work that
                needs the host, such as `.item()`.
            batch_size: number of samples; by default the buffer's.
            keys: the only keys to read, as for `TensorDict.select`. By default all.
            watch: further modules and optimizers that `update` depends on, if it reaches them in a
                way that the learner cannot see.
            graph: whether to capture; None: if the device is a CUDA device.
            warmup: number of steps without a graph before each capture, at least 1.
            read_ahead: whether each step reads the rows of the next one while it learns, which pays
                for large rows. A step then learns from rows as they were at the step before, and
                the device holds two batches. Needs a `DeviceRandomSampler`.

        Raises:
            TypeError: the buffer is of another class, or has another storage.
            ValueError: there is no batch size; `warmup` is less than 1; the buffer has `prefetch=`
                or `collate_fn=`; the storage is not pinned or has several dimensions; `graph` is
                true and the device is no CUDA device; or `read_ahead` is true and the graph cannot
                draw the index.
        """
        self._buffer, self._storage = buffer, _checked_storage(buffer)
        self._device: torch.device = self._storage.sample_device  # type: ignore[assignment]
        is_cuda = self._device.type == "cuda"
        if graph and not is_cuda:
            raise ValueError(f"graph=True needs a CUDA device; the rows go to {self._device}")
        if warmup < 1:
            raise ValueError(f"warmup must be at least 1, got {warmup}")
        size = buffer._batch_size if batch_size is None else batch_size
        if size is None:
            raise ValueError("there is no batch size: give the buffer or the learner one")
        self._batch_size: int = size
        self._update, self._keys, self._warmup = update, keys, warmup
        self._reads_ahead = read_ahead
        self._check_read_ahead()
        captures = is_cuda and graph is not False
        self._stream: Any = torch.Stream(self._device) if captures else None
        self._watched = Watched([update, *watch, buffer.transform])
        self._lock = threading.RLock()
        self._static: StaticBatch | None = None
        self._made_with: list[int] = []  # identities and addresses, for the batch
        self._kept: list[Any] = []  # or other objects might get these identities
        self._replacements = 0
        self._step: GraphedStep | None = None
        self._left = warmup  # steps without a graph, before the next capture
        self._why: str | None = None
        self._last: tuple[torch.Stream, _C.DeviceAccess] | None = None
        self._steps = self._replays = self._captures = 0
        self._replays_of_graph = self._short_lived = 0
        self._is_closed = False

    @property
    def stats(self) -> LearnerStats:
        """How many steps there were, and how they were done."""
        return LearnerStats(self._steps, self._replays, self._captures, self._why)

    # ---- steps -----------------------------------------------------------------------------------

    def step(self) -> Any:
        """Draw a batch, read it, and learn; return what `update` returns.

        The host does not wait for the device. The result is valid until the next step.

        Raises:
            RuntimeError: the learner is closed; the buffer is empty; or `update` does something
                that a graph cannot hold.
            IndexError: the index of an earlier step had a row that is not in use.
            Exception: what the sampler or `update` raises.
        """
        return self.steps(1)

    def steps(self, count: int) -> Any:
        """Do several steps, and return the result of the last.

        If the graph draws the index, no Python runs between most of them.

        Raises:
            ValueError: `count` is less than 1.
            Exception: as `step`.
        """
        if count < 1:
            raise ValueError(f"count must be at least 1, got {count}")
        result = None
        with self._lock:
            while count > 0:
                if self._is_closed:
                    raise RuntimeError("the learner is closed: make another one")
                done, result = self._some_steps(min(count, STEPS_AT_ONCE))
                count -= done
        return result

    def _some_steps(self, most: int) -> tuple[int, Any]:
        """Do at least one step, and at most that many; return their number, and the last result."""
        self._order_after_the_last()
        try:
            with self._reading() as static:
                if static.reads_ahead and not static.has_next:
                    static.draw(self._generator)
                    self._note(static.read()._device_access(), 1)
                step = self._graph_of(static)
                if step is None:
                    done = 1
                    static.advance()
                    if self._draws_on_the_device:
                        static.draw(self._generator)
                    self._note(static.read()._device_access(), done)
                else:
                    done = most if self._draws_on_the_device else 1
                    self._note(step.replay(done), done)
                    self._replays += done
                    self._replays_of_graph += done
            if step is None:
                is_first = self._left == self._warmup  # also after a state was loaded
                if is_first and self._device.type == "cuda":
                    self._watched.make_capturable(self._device)
                batch, result = self._learn_beside(static)
                self._left = max(0, self._left - 1)
                if self._stream is not None and self._left == 0:
                    self._watched.remember()  # what is changed before the capture needs such a step
            else:
                batch, result = step.batch, step.result
            self._steps += done
            if step is not None:
                step.raise_if_bad()
            if isinstance(self._buffer.sampler, PrioritizedSampler):
                key = self._buffer.priority_key
                if key in batch.keys(include_nested=True):
                    self._buffer.update_tensordict_priority(batch)
        finally:
            self._remember_the_last()
        return done, result

    @property
    def _draws_on_the_device(self) -> bool:
        """Whether the index needs nothing of the host: no sample unit, for example."""
        sampler, unit = self._buffer.sampler, self._buffer._sample_unit
        return (
            type(sampler) is DeviceRandomSampler
            and sampler.device == self._device
            and (unit is None or (type(unit) is RecordingSampleUnit and unit._unit is None))
            and not self._tracks_generations
        )

    @property
    def _tracks_generations(self) -> bool:
        return bool(getattr(self._buffer.writer, "tracks_generations", False))

    @property
    def _generator(self) -> torch.Generator | None:
        generator: torch.Generator | None = self._buffer.sampler._rng
        return generator

    # ---- reading ---------------------------------------------------------------------------------

    @contextmanager
    def _reading(self) -> Iterator[StaticBatch]:
        """Hold the buffer's locks for a block that starts reads, and notes them.

        Gives the batch, whose index has been drawn if that is done on the host.
        """
        buffer, storage = self._buffer, self._storage
        if storage.is_being_written_here:
            raise RuntimeError("within storage.writing(), no step can read rows: end it before")
        if (before := getattr(buffer, "_sample_dependency", None)) is not None:
            before.result()
        with ExitStack() as stack:
            for lock in (buffer._replay_lock, buffer._write_lock):
                stack.enter_context(lock)
            if len(storage) == 0:
                raise RuntimeError("Cannot sample from an empty storage.")
            self._check_read_ahead()
            is_drawn_here = self._draws_on_the_device
            info = self._batch_size if is_drawn_here else self._info_of_sampler()
            if storage.pinned:
                stack.enter_context(storage._in_flight.start(self._device))
                storage._pin.keep(storage._rows, self._device)
                if storage._in_flight.has_writes():
                    storage._in_flight.order_after_writes()
            static = self._static_for(info)
            static.set_rows_in_use(len(storage))
            if isinstance(info, dict):
                static.take(info)
            yield static

    def _check_read_ahead(self) -> None:
        if self._reads_ahead and not self._draws_on_the_device:
            raise ValueError(
                "read_ahead=True needs an index that the device draws: give the buffer a "
                f"DeviceRandomSampler({str(self._device)!r}), no sample unit of your own, and no "
                "writer that tracks generations"
            )

    def _info_of_sampler(self) -> dict[Any, Any]:
        """Draw on the host, as the buffer's `sample` does."""
        buffer, storage = self._buffer, self._storage
        index, info = buffer.sampler.sample(storage, self._batch_size)
        if buffer._sample_unit is not None:
            index, info = buffer._sample_unit.expand(index, info, storage)
        info["index"] = index
        if self._tracks_generations:
            info["index_generation"] = buffer.writer.generations_of(index)
        return dict(info)

    def _note(self, access: Any, reads: int) -> None:
        """Let writes to the storage wait for these reads."""
        storage = self._storage
        storage._reads.add(gathered=reads)
        if not storage.pinned:
            return
        if storage._pin.is_shared:  # other processes may write once the buffer's lock is free
            access.wait()
        else:
            storage._in_flight.add_read(access)

    def _static_for(self, info: dict[Any, Any] | int) -> StaticBatch:
        """Return the batch, a new one if the storage or the sampler needs another."""
        buffer, static, rows = self._buffer, self._static, self._storage._rows
        leaves = _leaves(rows)
        kept = [buffer.sampler, self._generator, *buffer.transform.transforms, rows, *leaves]
        # Of the same tensors too the memory may be another, if it was moved to shared memory.
        made_with = [*map(id, kept), *(leaf.data_ptr() for leaf in leaves)]
        is_same = made_with == self._made_with
        if static is not None and is_same and static.fits(info):
            if (
                self._storage.replacements != self._replacements
            ):  # rows that were read ahead are old
                self._replacements, static.has_next = self._storage.replacements, False
            return static
        if type(rows) is not TensorDict:
            raise TypeError(
                _WANTED + f"the storage has {type(rows).__qualname__}s: store TensorDicts"
            )
        if static is not None:
            self._forget(
                "the buffer has another storage, sampler or transform"
                if not is_same
                else "the sampler's index or info has another shape"
            )
        self._static = StaticBatch(
            rows, self._keys, self._device, info, reads_ahead=self._reads_ahead
        )
        self._made_with, self._kept = made_with, kept
        self._replacements = self._storage.replacements
        return self._static

    # ---- learning --------------------------------------------------------------------------------

    def _learn(self, static: StaticBatch) -> tuple[Any, Any]:
        batch = static.batch()
        if len(self._buffer.transform):
            batch = self._buffer.transform(batch)
        static.put_info_into(batch)
        return batch, self._update(batch)

    def _learn_beside(self, static: StaticBatch) -> tuple[Any, Any]:
        """Learn on the stream where graphs are captured, as torch wants it; the caller's waits."""
        if self._stream is None:
            return self._learn(static)
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                learned = self._learn(static)
                position = StreamPosition.current(self._device)
        finally:
            current.wait_stream(self._stream)
        position.hand_over(learned)
        return learned

    # ---- graphs ----------------------------------------------------------------------------------

    def _graph_of(self, static: StaticBatch) -> GraphedStep | None:
        """Return the captured step; None if this step runs without one."""
        if self._stream is None:
            return None
        if (self._step is not None or self._left == 0) and (
            why := self._watched.difference()
        ) is not None:
            self._forget(why)
        if self._step is None and self._left == 0:
            draws = self._draws_on_the_device
            self._step = captured(
                static,
                self._learn,
                self._stream,
                self._watched,
                draws=draws,
                generator=self._generator if draws else None,
            )
            self._watched.remember()
            self._captures += 1
        return self._step

    def _forget(self, why: str) -> None:
        """Drop the graph; the next steps run without one, and then another is captured."""
        left, self._left = self._left, self._warmup
        if self._step is not None:
            torch.cuda.synchronize(self._device)
            self._step, self._why = None, why
        elif left > 0:  # no graph was due yet
            return
        is_short_lived = self._replays_of_graph <= FEW_REPLAYS
        self._replays_of_graph = 0
        self._short_lived = self._short_lived + 1 if is_short_lived else 0
        if self._short_lived == MANY_CAPTURES:
            warnings.warn(
                f"GraphedLearner began anew {MANY_CAPTURES} times in a row, after at most "
                f"{FEW_REPLAYS} replays of a graph; the last time, {why}. Give a learning rate "
                "that changes as a tensor on the device, and set modes once.",
                stacklevel=6,
            )

    def _order_after_the_last(self) -> None:
        """Let the current stream wait for the last step, if that ran on another one."""
        if self._last is not None and self._last[0] != torch.accelerator.current_stream(
            self._device
        ):
            self._last[1].order()

    def _remember_the_last(self) -> None:
        if self._device.type != "cpu":
            stream = torch.accelerator.current_stream(self._device)
            self._last = stream, _C.DeviceAccess(stream)

    # ---- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the graph and the batch, when the device has done all steps. May be repeated."""
        with self._lock:
            if self._last is not None:
                self._last[1].wait()
            self._step = self._static = self._last = None
            self._made_with, self._kept = [], []
            self._is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("a GraphedLearner cannot be copied or pickled: make one in each process")


def _checked_storage(buffer: Any) -> PackedLazyTensorStorage:
    if not isinstance(buffer, PackedTensorDictReplayBuffer):
        raise TypeError(_WANTED + f"got a {type(buffer).__qualname__}")
    if buffer._delayed_init and not buffer.initialized:
        buffer._init()
    storage = buffer.storage
    if not isinstance(storage, PackedLazyTensorStorage):
        raise TypeError(_WANTED + f"its storage is a {type(storage).__qualname__}")
    device = storage.sample_device
    if device is None or not (storage.pinned or device.type == "cpu"):
        raise ValueError(_WANTED + "its storage is not pinned")
    if storage.ndim != 1:
        raise ValueError(_WANTED + f"its storage has {storage.ndim} dimensions, not one")
    if buffer._prefetch:
        raise ValueError("the buffer has prefetch=: a step reads its own batch, so leave it out")
    if buffer._collate_fn is not _get_default_collate(storage):
        raise ValueError("the buffer has collate_fn=: make it a transform, or do it in update()")
    return storage


def _leaves(rows: Any) -> list[Any]:
    return list(rows.values(include_nested=True, leaves_only=True)) if rows is not None else []
