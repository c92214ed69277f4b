"""A replay buffer that orders samples, with index and weights, on the stream of the caller."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torchrl
from tensordict import is_tensor_collection, is_tensorclass
from tensordict.utils import expand_as_right
from torch.utils._pytree import tree_map
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer, TensorStorage

from tdcopier import _checking, _copy
from tdcopier._options import SENDING
from tdcopier._prefetch.stream_position import StreamPosition
from tdcopier.torchrl._current_sample import (
    IndexOnDevice,
    RecordingSampleUnit,
    Sampling,
    current,
    untraced,
)
from tdcopier.torchrl._samplers import DeviceRandomSampler

_DRAWN = "tdcopier: a drawn sample"
"""Key in a sample's info; passes a `_Drawn` from the drawing thread to `sample`."""


class PackedTensorDictReplayBuffer(TensorDictReplayBuffer):  # type: ignore[misc]
    """torchrl's `TensorDictReplayBuffer`, whose `sample` waits for no copy of index and weights.

    For example::

        buffer = tdcopier.torchrl.PackedTensorDictReplayBuffer(
            storage=LazyTensorStorage(100_000), batch_size=256, prefetch=2
        )
        buffer.append_transform(tdcopier.torchrl.ToDevice("cuda"))

    torchrl moves index and weights to the device by one blocking copy each, in the caller's thread.
    Here they travel with the batch that `ToDevice` moves. (If the batch reaches a device in another
    way, they follow in one copy of their own.) With `prefetch=`, no thread waits for the device:
    `sample` makes its caller's current stream wait for the batch and for the transforms applied to
    it, and tells the allocator which stream reads it.

    Samples are equal to those of torchrl's buffer, for every sampler, storage, transform and sample
    unit. As in torchrl, the info of `sample(return_info=True)` stays on the storage's device. Like
    torchrl's, `state_dict` and `dumps` copy prefetched batches on the current stream: call them on
    the default stream.
    """

    def __init__(self, *, sample_unit: Any = None, **options: Any) -> None:
        """Take the options of torchrl's buffer."""
        super().__init__(sample_unit=RecordingSampleUnit(sample_unit), **options)

    @untraced
    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
    ) -> Any:
        """Return a batch, ordered on the current stream.

        Args:
            batch_size: number of samples; by default the buffer's.
            return_info: return a pair of the batch and its info.
            include_info: False leaves index, weights and other info out of the batch. torchrl has
                deprecated it, so a value other than None gives a `UserWarning`.

        Raises:
            RuntimeError: the batch cannot hold the info; or the buffer has `prefetch=`, and this
                thread is in the storage's `writing`.
        """
        if include_info is not None:
            warnings.warn(
                "include_info is going to be deprecated soon. Samples have index and weights "
                "without it; return_info=True also returns them apart.",
                stacklevel=2,
            )
        self._refuse_within_writing()
        if not return_info and include_info is None:
            sampled = self._sample_plainly(batch_size)
            if sampled is not None:
                return sampled
        if self._prefetch:
            batch, box = ReplayBuffer.sample(self, batch_size, return_info=True)
            drawn = box.pop(_DRAWN, None)
        else:
            current.drawn = None
            batch = ReplayBuffer.sample(self, batch_size)
            drawn, current.drawn = current.drawn, None
        if drawn is None:
            raise _unknown("sample() does not call _sample()")
        if include_info is None or include_info:
            put_into(batch, drawn.tensors)
        for position in drawn.positions:
            position.hand_over(batch)
        return (batch, _as_torchrls(drawn.info, self.storage)) if return_info else batch

    def _sample_plainly(self, batch_size: int | None) -> Any:
        """Draw a sample and let the device read it; None if Python has more to do.

        Fast path: the usual way passes through functions of torchrl and of this package that look
        for transforms, sample units and devices, and takes twice as long.
        """
        current.drawn_index = None
        storage, sampler = self._storage, self._sampler
        size = self._batch_size
        if (
            self._prefetch
            or size is None
            or (batch_size is not None and batch_size != size)
            or type(sampler) is not DeviceRandomSampler
            or not isinstance(storage, TensorStorage)  # it is made later
            or not hasattr(storage, "_plain_read")
            or sampler.device != storage.sample_device
            or type(self)._sample is not PackedTensorDictReplayBuffer._sample
            or self._sample_unit is None
            or self._sample_unit._unit is not None
            or (self._transform is not None and len(self._transform))
            or getattr(self._writer, "tracks_generations", False)
            or self._sample_dependency is not None
            or self._service_shutdown
            or self._pin_memory
            or _checking.enabled
            or SENDING.now is not None
        ):
            return None
        with self._replay_lock, self._write_lock:
            read = storage._plain_read(size)
            if read is None:
                return None
            index, _ = sampler.sample(storage, size)
            try:
                rows = storage._read_plainly(read, index)
            except (ValueError, TypeError):  # a leaf has changed in place, or a mode of torch is on
                current.drawn_index = index
                return None
        batch = self._collate_fn(rows)
        if batch is rows:
            read.put_index(batch, index)
        else:
            put_into(batch, {"index": index})
        return batch

    def _sample(self, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        """Draw a sample in torchrl's way. No other result of an internal method is replaced."""
        before, now = current.sampling, Sampling()
        now.keeps_index = not getattr(self._writer, "tracks_generations", False)
        try:
            current.sampling = now
            sampled = super()._sample(batch_size)
            if not isinstance(sampled, tuple) or len(sampled) != 2 or sampled[1] is not now.info:
                raise _unknown("_sample() does not give a batch and the info of its sample unit")
            batch, info = sampled
            tensors = _for_batch(batch, now)
            if isinstance(info.get("index"), IndexOnDevice):
                info["index"] = info["index"].numbers
            positions = []
            if self._prefetch:  # otherwise the caller's thread, with its current streams
                positions = [StreamPosition.current(device) for device in _devices(batch, now)]
            drawn = _Drawn(info, tensors, positions)
            if not self._prefetch:
                current.drawn = drawn
        finally:
            current.sampling = before  # not a call: no interrupt can come before it
            current.drawn_index = None
        return batch, {_DRAWN: drawn}

    # These wait for prefetched samples, with a lock that another thread may hold while it waits for
    # one: refuse before they take it.

    def synchronize(self) -> None:
        """Wait for prefetched samples and asynchronous updates, as torchrl does.

        Raises:
            RuntimeError: the buffer has `prefetch=`, and this thread is in the storage's `writing`.
        """
        self._refuse_within_writing()
        super().synchronize()

    def _capture_prefetch_state(self, *arguments: Any, **options: Any) -> Any:
        self._refuse_within_writing()
        return super()._capture_prefetch_state(*arguments, **options)

    def _refuse_within_writing(self) -> None:
        if self._prefetch and getattr(self._storage, "_is_being_written_here", False):
            raise RuntimeError(
                "within storage.writing(), a buffer with prefetch= would wait for ever for its "
                "prefetched samples: call it before or after"
            )

    # torchrl writes through views in these.

    def __setitem__(self, index: Any, value: Any) -> None:
        with self._writing():
            super().__setitem__(index, value)

    def set_at_(self, key: Any, value: Any, index: Any) -> Any:
        with self._writing():
            return super().set_at_(key, value, index)

    def set_(self, key: Any, value: Any) -> Any:
        with self._writing():
            return super().set_(key, value)

    def update_(self, input_dict_or_td: Any, clone: bool = False, **options: Any) -> Any:
        with self._writing():
            return super().update_(input_dict_or_td, clone, **options)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Keep samples from starting, and wait until a device accesses no row of the storage."""
        writing = getattr(self._storage, "_host_writes", contextlib.nullcontext)
        with self._replay_lock, writing():
            yield


def _unknown(what: str) -> RuntimeError:
    return RuntimeError(
        f"torchrl {torchrl.__version__} draws samples in a way that PackedTensorDictReplayBuffer "
        f"does not know ({what}): use TensorDictReplayBuffer"
    )


def _for_batch(batch: Any, now: Sampling) -> dict[Any, torch.Tensor]:
    """Return index, weights and other info tensors on the device of the batch."""
    if not is_tensor_collection(batch) or is_tensorclass(batch):
        return {}
    if batch.device is None:
        now.moved = None  # as in torchrl, they stay where the sampler made them
        return now.tensors()
    tensors = now.tensors()
    if any(tensor.device != batch.device for tensor in tensors.values()):
        tensors = _copy.start_copy(tensors, batch.device).wait()
    return tensors


def _as_torchrls(info: dict[Any, Any], storage: Any) -> dict[Any, Any]:
    """Return the info as torchrl's `sample` does: on the device of the storage."""
    device = getattr(storage, "device", None)
    if device is None:
        return info
    moved: dict[Any, Any] = tree_map(lambda x: x.to(device) if hasattr(x, "to") else x, info)
    return moved


def put_into(batch: Any, tensors: dict[Any, torch.Tensor]) -> None:
    """Set the tensors of the info in the batch, whatever keys the batch has already."""
    if not is_tensor_collection(batch):
        raise RuntimeError(
            f"the batch is a {type(batch).__qualname__}, which cannot hold index and weights: "
            "use torchrl's ReplayBuffer for data that are no TensorDicts"
        )
    was_locked = batch.is_locked
    if was_locked:
        batch.unlock_()
    for key, tensor in tensors.items():
        try:
            is_short = tensor.dim() < batch.dim()
            batch.set(key, expand_as_right(tensor, batch) if is_short else tensor)
        except RuntimeError as error:
            raise RuntimeError(
                f"{key!r} of shape {tuple(tensor.shape)} does not fit a batch of size "
                f"{tuple(batch.batch_size)}: has a transform changed its shape? torchrl's "
                "ReplayBuffer gives both apart, by sample(return_info=True)"
            ) from error
    if was_locked:
        batch.lock_()


def _devices(batch: Any, now: Sampling) -> set[torch.device]:
    devices = now.devices if batch.device is None else now.devices | {batch.device}
    return {device for device in devices if device.type not in ("cpu", "meta")}


class _Drawn:
    """A sample's info, its tensors where the batch is, and the stream positions of both.

    Copying and pickling wait for the positions, so a saved copy has none.
    """

    def __init__(
        self,
        info: dict[Any, Any],
        tensors: dict[Any, torch.Tensor],
        positions: list[StreamPosition],
    ) -> None:
        self.info = info
        self.tensors = tensors
        self.positions = positions

    def _wait(self) -> None:
        for position in self.positions:
            position.access.wait()

    def __reduce__(self) -> tuple[Any, ...]:
        self._wait()
        return _Drawn, (self.info, self.tensors, [])

    def __deepcopy__(self, memo: dict[int, Any]) -> _Drawn:
        """Copy the tensors alone; a deep copy of them would include all of the batch's chunk."""
        self._wait()
        tensors = {key: tensor.clone() for key, tensor in self.tensors.items()}
        return _Drawn(copy.deepcopy(self.info, memo), tensors, [])
