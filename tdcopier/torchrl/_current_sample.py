"""State of the sample that a thread draws, shared by the buffer, its storage and its transforms.

`_buffer.py` sends index and weights to the batch's device, and puts them into the batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torchrl.data.replay_buffers import SampleUnit

from tdcopier._compile import keep_out_of_graphs

_F = TypeVar("_F", bound=Callable[..., Any])


untraced: Callable[[_F], _F] = keep_out_of_graphs("sample() or the storage", "the batch")
"""Makes a compiled function call another between two of its graphs.

Native threads gather the rows, and streams order the samples: a compiler traces neither.
"""


class IndexOnDevice:
    """An index on the device, on its way from the sampler to the storage.

    torchrl copies the tensors of an index to the storage's device, which waits for them, and leaves
    other objects as they are.
    """

    def __init__(self, numbers: torch.Tensor) -> None:
        self.numbers = numbers


class Sampling:
    """One sample on its way through a `PackedTensorDictReplayBuffer`.

    Thread: only the one that draws the sample.
    """

    def __init__(self) -> None:
        self.keeps_index = True
        """Whether an index on a device may stay there."""
        self.info: dict[Any, Any] | None = None
        """torchrl's info, once the sampler has chosen the rows; its index is added later."""
        self.moved: dict[Any, torch.Tensor] | None = None
        """The tensors of `info`, on the last device that they were sent to."""
        self.storage: Any = None
        """The buffer's storage, set together with `info`."""
        self.is_read = False
        """Whether the rows that the sampler has chosen have been read."""
        self.devices: set[torch.device] = set()
        """Devices that data was sent to, ordered on this thread's current streams."""

    def tensors(self) -> dict[Any, torch.Tensor]:
        """Return the tensors of `info` in the form that the batch needs, wherever they are now."""
        if self.moved is not None:
            return self.moved
        return {key: as_tensor(key, value) for key, value in (self.info or {}).items()}


def as_tensor(key: Any, value: Any) -> torch.Tensor:
    if isinstance(value, IndexOnDevice):
        return value.numbers
    if key == "index" and isinstance(value, tuple):  # a tensor for each dimension of the storage
        return torch.stack(value, -1)
    return torch.as_tensor(value)


class _Current(threading.local):
    sampling: Sampling | None = None
    drawn: Any = None
    """What the last `_sample` of this thread has drawn, for the `sample` that called it."""
    drawn_index: torch.Tensor | None = None
    """An index that `DeviceRandomSampler` has drawn, and whose rows are still to be read."""


current = _Current()
"""The sample that this thread draws for a `PackedTensorDictReplayBuffer`, if any."""


class RecordingSampleUnit(SampleUnit):  # type: ignore[misc]
    """A sample unit that wraps the buffer's own and also records the info of the sample.

    It reports the class of the unit that it wraps, because buffers test for it.
    """

    def __init__(self, unit: Any) -> None:
        """Args:
            unit: a SampleUnit, or None for the rows that the sampler chooses.

        Raises:
            TypeError: it is neither; the message is torchrl's.
        """
        if unit is not None and not isinstance(unit, SampleUnit):
            raise TypeError(
                f"sample_unit must be a SampleUnit instance, got {type(unit).__name__}."
            )
        self._unit = unit

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return RecordingSampleUnit if self._unit is None else type(self._unit)

    def __reduce__(self) -> tuple[Any, ...]:
        return RecordingSampleUnit, (self._unit,)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_unit":
            raise AttributeError(name)
        return getattr(self._unit, name)

    def expand(self, index: Any, info: dict[Any, Any], storage: Any) -> tuple[Any, dict[Any, Any]]:
        if self._unit is not None:
            index, info = self._unit.expand(index, info, storage)
        now = current.sampling
        if now is not None:
            now.info = info
            now.storage = storage
            if now.keeps_index and isinstance(index, torch.Tensor) and not index.is_cpu:
                takes: Any = getattr(storage, "_takes_index_on", None)
                if index.dim() > 0 and takes is not None and takes(index.device):
                    index = IndexOnDevice(index)
        return index, info
