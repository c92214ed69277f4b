"""`ToDevice`: the transform that moves a sampled batch."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torchrl.envs import EnvBase
from torchrl.envs.transforms import Transform
from typing_extensions import Unpack

from tdcopier import _copy
from tdcopier._options import CopyOptions, Device, refuse_unknown_options
from tdcopier.torchrl._current_sample import current


class ToDevice(Transform):  # type: ignore[misc]
    """Moves the batches that a replay buffer samples to a device, packed; the storage stays.

    For example::

        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=64)
        buffer.append_transform(tdcopier.torchrl.ToDevice("cuda", on_unknown="raise"))

    Use it instead of `buffer.append_transform(lambda td: td.to(device))`. The batch equals the
    result of `td.to`; data that are no TensorDicts are moved as by `start_copy`. The transform can
    be pickled and copied.

    **Order.** In the main thread the host does not wait: the batch is ordered on the current
    stream, as by `AsyncCopyHandle.wait`. In any other thread, for example those of `prefetch=`, the
    consumer's stream is unknown, so the transform returns when the batch has arrived, as by `get`.
    Every stream may then read the batch. But a consumer on a stream other than the default one must
    call `record_stream` on tensors that it drops while it still reads them. In a
    `PackedTensorDictReplayBuffer` no thread waits: `sample` orders the stream of its caller, and
    records the batch on it.
    """

    def __init__(self, device: Device, **options: Unpack[CopyOptions]) -> None:
        """Args:
            device: the target. "cuda" is the device that is current at this call, not in the thread
                that samples.
            **options: see `CopyOptions`.

        Raises:
            TypeError, ValueError: as `start_copy`.
        """
        super().__init__()
        refuse_unknown_options("ToDevice", options)
        self.device = with_index(device)
        self.options: CopyOptions = options
        _copy.start_copy((), self.device, **options)  # checks the options

    def forward(self, tensordict: Any) -> Any:
        """Return the batch on the device."""
        now = current.sampling
        if now is not None and now.info is not None:
            both = _copy.start_copy((tensordict, now.tensors()), self.device, **self.options)
            batch, now.moved = both.wait()
            now.devices.add(self.device)
            return batch
        handle = _copy.start_copy(tensordict, self.device, **self.options)
        is_main = threading.current_thread() is threading.main_thread()
        return handle.wait() if is_main else handle.get()

    def set_container(self, container: Any) -> None:
        """Reject environments: their specs would have to move too.

        Raises:
            TypeError: the transform would belong to an environment.
        """
        if isinstance(_outermost(container), EnvBase):
            raise TypeError(
                "ToDevice is a transform of replay buffers, not of environments: there, use "
                "torchrl's DeviceCastTransform"
            )
        super().set_container(container)

    def extra_repr(self) -> str:
        return ", ".join([str(self.device), *(f"{k}={v}" for k, v in self.options.items())])

    def __repr__(self) -> str:
        return f"ToDevice({self.extra_repr()})"


def _outermost(container: Any) -> Any:
    """Return the outermost container of a transform; None if it is in no environment."""
    if not isinstance(container, Transform):
        return container
    try:
        return container.container
    except ValueError:  # torchrl raises it for a Compose within a Compose of a buffer
        return None


def with_index(device: Device) -> torch.device:
    """Return the device, with the current index if it has none.

    Raises:
        TypeError, ValueError: there is no such device.
    """
    _copy.start_copy((), device)
    target = torch.device(device)
    if ":" in str(target) or target.type in ("cpu", "meta"):
        return target
    return torch.device(target.type, torch.get_device_module(target).current_device())
