"""Reads rows of a buffer to the batch of a learner, as the buffer's `sample` does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data.replay_buffers.storages import _get_default_collate

from tdcopier.torchrl._buffer import PackedTensorDictReplayBuffer
from tdcopier.torchrl._current_sample import RecordingSampleUnit
from tdcopier.torchrl._pinned import PackedLazyTensorStorage
from tdcopier.torchrl._samplers import DeviceRandomSampler
from tdcopier.torchrl._static_batch import StaticBatch

_WANTED = (
    "GraphedLearner needs a PackedTensorDictReplayBuffer with a PackedLazyTensorStorage("
    "size, sample_device=device, pinned=True); "
)


class LearnerReads:
    """Keeps the batch of a learner, and draws and reads its rows. Thread: one at a time."""

    def __init__(
        self,
        buffer: PackedTensorDictReplayBuffer,
        batch_size: int | None,
        keys: Sequence[Any] | None,
        *,
        reads_ahead: bool,
        forget: Callable[[str], None],
    ) -> None:
        """Args:
            buffer: see `GraphedLearner`, as for the next three.
            batch_size: by default the buffer's.
            keys: those to read.
            reads_ahead: whether each step reads the rows of the next one.
            forget: called with the reason before the batch gets other memory, of which a graph of
                the learner knows nothing.

        Raises:
            TypeError: the buffer is of another class, or has another storage.
            ValueError: the buffer or its storage does not suit, or there is no batch size.
        """
        self._buffer, self._storage = buffer, _checked_storage(buffer)
        self.device: torch.device = self._storage.sample_device  # type: ignore[assignment]
        size = buffer._batch_size if batch_size is None else batch_size
        if size is None:
            raise ValueError("there is no batch size: give the buffer or the learner one")
        self._batch_size: int = size
        self._keys, self._reads_ahead, self._forget = keys, reads_ahead, forget
        self._check_read_ahead()
        self._static: StaticBatch | None = None
        self._made_with: list[int] = []  # identities and addresses, for the batch
        self._kept: list[Any] = []  # or other objects might get these identities
        self._replacements = 0

    @property
    def draws_on_the_device(self) -> bool:
        """Whether the index needs nothing of the host: no sample unit, for example."""
        sampler, unit = self._buffer.sampler, self._buffer._sample_unit
        return (
            type(sampler) is DeviceRandomSampler
            and sampler.device == self.device
            and (unit is None or (type(unit) is RecordingSampleUnit and unit._unit is None))
            and not self._tracks_generations
        )

    @property
    def _tracks_generations(self) -> bool:
        return bool(getattr(self._buffer.writer, "tracks_generations", False))

    @property
    def generator(self) -> torch.Generator | None:
        generator: torch.Generator | None = self._buffer.sampler._rng
        return generator

    @contextmanager
    def started(self) -> Iterator[StaticBatch]:
        """Hold the buffer's locks for a block that starts reads, and notes them.

        Gives the batch, whose index has been drawn if that is done on the host; and if the learner
        reads ahead, its next rows have been read.
        """
        buffer, storage = self._buffer, self._current_storage()
        if storage._is_being_written_here:
            raise RuntimeError("within storage.writing(), no step can read rows: end it before")
        if (before := getattr(buffer, "_sample_dependency", None)) is not None:
            before.result()
        with ExitStack() as stack:
            for lock in (buffer._replay_lock, buffer._write_lock):
                stack.enter_context(lock)
            if len(storage) == 0:
                raise RuntimeError("Cannot sample from an empty storage.")
            self._check_read_ahead()
            is_drawn_here = self.draws_on_the_device
            info = self._batch_size if is_drawn_here else self._info_of_sampler()
            if storage.pinned:
                stack.enter_context(storage._in_flight.start(self.device))
                storage._pin.keep(storage._rows, self.device)
                if storage._in_flight.has_writes():
                    storage._in_flight.order_after_writes()
            static = self._static_for(info)
            static.set_rows_in_use(len(storage))
            if isinstance(info, dict):
                static.take(info)
            if static.reads_ahead and not static.has_next:
                self._draw_and_read(static)
            yield static

    def read(self, static: StaticBatch) -> None:
        """Draw and read a batch without a graph."""
        static.advance()
        static.has_next = False  # until another one has been read as a whole
        self._draw_and_read(static)

    def _draw_and_read(self, static: StaticBatch) -> None:
        if self.draws_on_the_device:
            static.draw(self.generator)
        self.note(static.read()._device_access(), 1)

    def note(self, access: Any, reads: int) -> None:
        """Let writes to the storage wait for these reads."""
        storage = self._storage
        storage._reads.add(gathered=reads)
        if not storage.pinned:
            return
        if storage._pin.is_shared:  # other processes may write once the buffer's lock is free
            access.wait()
        else:
            storage._in_flight.add_read(access)

    def close(self) -> None:
        """Free the batch."""
        self._static, self._made_with, self._kept = None, [], []

    def _current_storage(self) -> PackedLazyTensorStorage:
        """Return the buffer's storage, which may be another one since the last step."""
        if self._buffer.storage is not self._storage:
            storage = _checked_storage(self._buffer)
            if storage.sample_device != self.device:
                raise ValueError(
                    f"the buffer has got a storage for {storage.sample_device}; the learner is on "
                    f"{self.device}: make another one"
                )
            self._storage = storage
        return self._storage

    def _check_read_ahead(self) -> None:
        if self._reads_ahead and not self.draws_on_the_device:
            raise ValueError(
                "read_ahead=True needs an index that the device draws: give the buffer a "
                f"DeviceRandomSampler({str(self.device)!r}), no sample unit of your own, and no "
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

    def _static_for(self, info: dict[Any, Any] | int) -> StaticBatch:
        """Return the batch, a new one if the storage or the sampler needs another."""
        buffer, storage, static, rows = (
            self._buffer,
            self._storage,
            self._static,
            self._storage._rows,
        )
        leaves = _leaves(rows)
        kept = [buffer.sampler, self.generator, *buffer.transform.transforms, rows, *leaves]
        # Of the same tensors too the memory may be another, if it was moved to shared memory.
        made_with = [*map(id, kept), *(leaf.data_ptr() for leaf in leaves)]
        is_same = made_with == self._made_with
        if static is not None and is_same and static.fits(info):
            if storage._replacements != self._replacements:
                self._replacements = storage._replacements
                static.has_next = False  # these rows were of before
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
            rows, self._keys, self.device, info, reads_ahead=self._reads_ahead
        )
        self._made_with, self._kept = made_with, kept
        self._replacements = storage._replacements
        return self._static


def _checked_storage(buffer: Any) -> PackedLazyTensorStorage:
    if not isinstance(buffer, PackedTensorDictReplayBuffer):
        raise TypeError(_WANTED + f"got {type(buffer).__qualname__}")
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
