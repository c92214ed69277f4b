"""A replay buffer whose samples are ordered, with index and weights, on the stream of the taker."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torchrl
from tensordict import is_tensor_collection, is_tensorclass
from tensordict.utils import expand_as_right
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer

from tdcopier import _C, _copy
from tdcopier.torchrl._sampling import NotingUnit, Sampling, sampling

_ORDER = "tdcopier: order of streams"
"""The key in a sample's info, between the thread that draws it and the one that takes it."""


class PackedTensorDictReplayBuffer(TensorDictReplayBuffer):  # type: ignore[misc]
    """torchrl's `TensorDictReplayBuffer`, whose `sample` waits for no copy of index and weights.

    Where torchrl moves each of them by a blocking copy, in the caller's thread, here they travel
    with the batch that `ToDevice` moves. (If a batch reaches a device otherwise, they follow in one
    copy of their own.) With `prefetch=`, no thread waits for the device: `sample` makes the current
    stream of its caller wait for the batch, and what was done to it, and tells the allocator which
    stream reads it.

    Samples are those of torchrl's buffer, for every sampler, storage, transform and sample unit.
    The info of `sample(return_info=True)` stays on the storage's device, as there. `include_info`
    is gone. `state_dict` and `dumps` copy prefetched batches on the current stream, as torchrl's:
    call them on the default stream.
    """

    def __init__(self, *, sample_unit: Any = None, **options: Any) -> None:
        """Takes the options of torchrl's buffer."""
        super().__init__(sample_unit=NotingUnit(sample_unit), **options)

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """A batch, ordered on the current stream; with `return_info`, a pair of batch and info."""
        batch, info = ReplayBuffer.sample(self, batch_size, return_info=True)
        orders = info.pop(_ORDER, None)
        if orders is None:
            raise _unknown("sample() does not call _sample()")
        for order in orders.each:
            order.hand_over(batch)
        return (batch, info) if return_info else batch

    def _sample(self, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        """torchrl's, in the thread that draws: the only internal method that is replaced."""
        with sampling() as now:
            drawn = super()._sample(batch_size)
            if not isinstance(drawn, tuple) or len(drawn) != 2 or drawn[1] is not now.info:
                raise _unknown("_sample() does not give a batch and the info of its sample unit")
            batch, info = drawn
            _put_into(batch, now)
            info[_ORDER] = _Orders([_Order.now_on(device) for device in _devices(batch, now)])
        return batch, info


def _unknown(what: str) -> RuntimeError:
    return RuntimeError(
        f"torchrl {torchrl.__version__} draws samples in a way that PackedTensorDictReplayBuffer "
        f"does not know ({what}): use TensorDictReplayBuffer"
    )


def _put_into(batch: Any, now: Sampling) -> None:
    """Set index, weights and so on in the batch, on its device."""
    if not is_tensor_collection(batch):
        raise RuntimeError(
            f"the batch is a {type(batch).__qualname__}, which cannot hold index and weights: "
            "use torchrl's ReplayBuffer for data that are no TensorDicts"
        )
    if is_tensorclass(batch):
        return
    tensors = now.tensors()
    if batch.device is None:
        now.moved = None  # as torchrl: they stay where the sampler made them
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


class _Order(NamedTuple):
    """Behind what a consumer on a device has to stand."""

    device: torch.device
    stream: Any
    event: torch.Event

    @classmethod
    def now_on(cls, device: torch.device) -> _Order:
        """Behind what the current stream of this thread has."""
        stream = torch.get_device_module(device).current_stream(device)
        event = torch.Event(device)
        event.record(stream)
        return cls(device, stream, event)

    def hand_over(self, batch: Any) -> None:
        """Order the current stream, and let the batch's memory wait for it when it is dropped."""
        stream = torch.get_device_module(self.device).current_stream(self.device)
        if stream == self.stream:
            return
        self.event.wait(stream)
        seen = set()
        for _, leaf in _C.leaves_with_paths(batch, torch.device("cpu")):
            if isinstance(leaf, torch.Tensor) and leaf.device == self.device:
                storage = leaf.untyped_storage().data_ptr()
                if storage not in seen:
                    seen.add(storage)
                    leaf.record_stream(stream)


class _Orders:
    """Those of one sample. A copy of it, as in a saved prefetch queue, is of one that is done."""

    def __init__(self, each: list[_Order]) -> None:
        self.each = each

    def __reduce__(self) -> tuple[Any, ...]:
        for order in self.each:
            order.event.synchronize()
        return _Orders, ([],)
