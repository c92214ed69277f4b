"""A replay buffer that orders samples, with index and weights, on the stream of the caller."""

from __future__ import annotations

from typing import Any

import torch
import torchrl
from tensordict import is_tensor_collection, is_tensorclass
from tensordict.utils import expand_as_right
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer

from tdcopier import _copy
from tdcopier._prefetch.stream_position import StreamPosition
from tdcopier.torchrl._sampling import RecordingSampleUnit, Sampling, current

_MADE_AT = "tdcopier: positions of streams"
"""Key in a sample's info; passes stream positions from the drawing thread to `sample`."""


class PackedTensorDictReplayBuffer(TensorDictReplayBuffer):  # type: ignore[misc]
    """torchrl's `TensorDictReplayBuffer`, whose `sample` waits for no copy of index and weights.

    torchrl moves index and weights to the device by one blocking copy each, in the caller's thread.
    Here they travel with the batch that `ToDevice` moves. (If the batch reaches a device in another
    way, they follow in one copy of their own.) With `prefetch=`, no thread waits for the device:
    `sample` makes its caller's current stream wait for the batch and for the transforms applied to
    it, and tells the allocator which stream reads it.

    Samples are equal to those of torchrl's buffer, for every sampler, storage, transform and sample
    unit. As in torchrl, the info of `sample(return_info=True)` stays on the storage's device.
    `include_info` is not supported. Like torchrl's, `state_dict` and `dumps` copy prefetched
    batches on the current stream: call them on the default stream.
    """

    def __init__(self, *, sample_unit: Any = None, **options: Any) -> None:
        """Take the options of torchrl's buffer."""
        super().__init__(sample_unit=RecordingSampleUnit(sample_unit), **options)

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """Return a batch, ordered on the current stream; with `return_info`, also its info."""
        batch, info = ReplayBuffer.sample(self, batch_size, return_info=True)
        made_at = info.pop(_MADE_AT, None)
        if made_at is None:
            raise _unknown("sample() does not call _sample()")
        for position in made_at.positions:
            position.hand_over(batch)
        return (batch, info) if return_info else batch

    def _sample(self, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        """Draw a sample in torchrl's way. No other internal method of torchrl is replaced."""
        before, now = current.sampling, Sampling()
        try:
            current.sampling = now
            drawn = super()._sample(batch_size)
            if not isinstance(drawn, tuple) or len(drawn) != 2 or drawn[1] is not now.info:
                raise _unknown("_sample() does not give a batch and the info of its sample unit")
            batch, info = drawn
            _put_into(batch, now)
            info[_MADE_AT] = _Positions(
                [StreamPosition.current(device) for device in _devices(batch, now)]
            )
        finally:
            current.sampling = before  # not a call: no interrupt can come before it
        return batch, info


def _unknown(what: str) -> RuntimeError:
    return RuntimeError(
        f"torchrl {torchrl.__version__} draws samples in a way that PackedTensorDictReplayBuffer "
        f"does not know ({what}): use TensorDictReplayBuffer"
    )


def _put_into(batch: Any, now: Sampling) -> None:
    """Set index, weights and other info tensors in the batch, on its device."""
    if not is_tensor_collection(batch):
        raise RuntimeError(
            f"the batch is a {type(batch).__qualname__}, which cannot hold index and weights: "
            "use torchrl's ReplayBuffer for data that are no TensorDicts"
        )
    if is_tensorclass(batch):
        return
    tensors = now.tensors()
    if batch.device is None:
        now.moved = None  # as in torchrl, they stay where the sampler made them
        tensors = now.tensors()
    elif any(tensor.device != batch.device for tensor in tensors.values()):
        tensors = _copy.start_copy(tensors, batch.device).wait()
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


class _Positions:
    """Stream positions of one sample. Pickling waits for them, so a saved copy has none."""

    def __init__(self, positions: list[StreamPosition]) -> None:
        self.positions = positions

    def __reduce__(self) -> tuple[Any, ...]:
        for position in self.positions:
            position.event.synchronize()
        return _Positions, ([],)
