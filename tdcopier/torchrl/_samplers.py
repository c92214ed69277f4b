"""Samplers that do not make the host wait for the device: of an index, or of priorities."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numpy as np
import torch
from torchrl.data import PrioritizedSampler, RandomSampler

from tdcopier import _copy
from tdcopier._C import AsyncCopyHandle
from tdcopier._options import Device
from tdcopier.torchrl._current_sample import current
from tdcopier.torchrl._to_device import with_index

MOST_LATE, MOST_CALLS = 64, 1024
"""Updates, and calls after the first update, that are not applied yet; a further one waits for the
oldest."""


class DeviceRandomSampler(RandomSampler):  # type: ignore[misc]
    """torchrl's `RandomSampler`, whose index is drawn on the device.

    For example::

        storage = tdcopier.torchrl.PackedLazyTensorStorage(8192, sample_device="cuda", pinned=True)
        sampler = tdcopier.torchrl.DeviceRandomSampler("cuda")
        buffer = tdcopier.torchrl.PackedTensorDictReplayBuffer(storage=storage, sampler=sampler)
        buffer.extend(rollout)
        index = buffer.sample(256)["index"]  # on the device

    From a `PackedLazyTensorStorage(..., sample_device=device, pinned=True)` the device then reads
    the rows that its own index names, after the work that the current stream has at the call, and
    `batch["index"]` is that tensor. With other storages torchrl copies the index to the host, which
    waits for it.

    The storage has one dimension. A `generator` of the buffer must be on the device; without one,
    the device's default generator draws.
    """

    def __init__(self, device: Device) -> None:
        """Args:
            device: where the index is drawn. "cuda" is the device that is current at this call.

        Raises:
            TypeError, ValueError: there is no such device.
        """
        self.device = with_index(device)

    def sample(self, storage: Any, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return row numbers, of shape [batch_size], on the device.

        Raises:
            RuntimeError: the storage is empty, or the generator is on another device.
            ValueError: the storage has several dimensions.
        """
        rows = len(storage)
        if rows == 0:
            raise RuntimeError("Cannot sample from an empty storage.")
        if storage.ndim != 1:
            raise ValueError(
                f"DeviceRandomSampler needs a storage of one dimension; this one has "
                f"{storage.ndim}: use torchrl's RandomSampler"
            )
        if (drawn := current.drawn_index) is not None:
            current.drawn_index = None
            return drawn, {}
        index = torch.empty(batch_size, dtype=torch.int64, device=self.device)
        draw(index, rows, self._rng)
        return index, {}


def draw(index: torch.Tensor, rows: int | torch.Tensor, generator: torch.Generator | None) -> None:
    """Fill an index with row numbers below `rows`, which may be on the device.

    They are 63 random bits modulo `rows`: probabilities of rows differ by less than 1e-9.
    """
    index.random_(generator=generator)
    index.remainder_(rows)


class PriorityStats(NamedTuple):
    """Counts of the calls to one `PackedPrioritizedSampler`, in this process.

    For example::

        sampler = tdcopier.torchrl.PackedPrioritizedSampler(50_000, 0.7, 0.5)
        print(f"{sampler.priority_stats.waits} of {sampler.priority_stats.late} updates waited")

    Attributes:
        late: Calls that were applied later, because an index or priorities were on the device.
        waits: Those of them for which the host had to wait.
    """

    late: int
    waits: int


class PackedPrioritizedSampler(PrioritizedSampler):  # type: ignore[misc]
    """torchrl's `PrioritizedSampler`, whose updates with priorities on the device do not wait.

    For example::

        sampler = tdcopier.torchrl.PackedPrioritizedSampler(50_000, 0.7, 0.5, priority_delay=1)
        buffer = tdcopier.torchrl.PackedTensorDictReplayBuffer(storage=storage, sampler=sampler)
        buffer.extend(rollout)
        batch = buffer.sample(256)
        buffer.update_priority(batch["index"], td_error(batch))

    Index and priorities travel to the host in one packed copy, and `update_priority` returns. The
    update is applied when its values are needed: before the next `sample` draws, and before the
    sampler is saved, loaded, emptied or given another `alpha`. Calls that follow, such as those of
    `extend`, are applied after it, in their order, so samples equal those of torchrl's sampler.

    With `priority_delay=n` a sample leaves the latest n updates, and what follows the first of
    them, to later samples. Which ones depends on the order of the calls, never on time. With 0,
    `sample` waits for the kernels that compute the latest priorities; with 1 the host enqueues a
    step while the device still works at the one before. At most 64 updates and 1,024 calls in all
    are left.

    You may overwrite index and priorities by work on the current stream. An update with priorities
    of the wrong shape raises torchrl's error when it is applied. Where torchrl keeps the priorities
    on the device (`device="cuda"`), all is done there, at once.
    """

    def __init__(self, *arguments: Any, priority_delay: int = 0, **options: Any) -> None:
        """Args:
            *arguments: those of torchrl's sampler.
            priority_delay: how many updates a sample may leave to later ones, at most 64.
            **options: those of torchrl's sampler.

        Raises:
            ValueError: `priority_delay` is not from 0 to 64.
        """
        if not 0 <= priority_delay <= MOST_LATE:
            raise ValueError(f"priority_delay must be from 0 to {MOST_LATE}, got {priority_delay}")
        self.priority_delay = priority_delay
        self._late = _LateCalls()
        super().__init__(*arguments, **options)

    @property
    def priority_stats(self) -> PriorityStats:
        """How many calls were late so far."""
        return PriorityStats(self._late.count, self._late.waits)

    # ---- calls that change priorities ------------------------------------------------------------

    def update_priority(self, index: Any, priority: Any, *, storage: Any = None) -> None:
        """Set the priorities of rows, at once or before the next sample.

        Args:
            index: row numbers, on the host or on a device.
            priority: one priority, or one for each row; on the host or on a device.
            storage: needed if it has several dimensions.

        Raises:
            RuntimeError: the priorities do not fit the index, if both are on the host.
        """
        self._call("update_priority", (index, priority), {"storage": storage}, is_update=True)

    def mark_update(self, index: Any, *, storage: Any = None) -> None:
        self._call("mark_update", (index,), {"storage": storage})

    def add(self, index: Any) -> None:
        self._call("add", (index,), {})

    def extend(self, index: Any) -> None:
        self._call("extend", (index,), {})

    def _call(
        self, name: str, arguments: Any, options: dict[str, Any], is_update: bool = False
    ) -> None:
        late = self._late
        with late.lock:
            is_on_host = _is_on_host(arguments)
            if late.is_applying or self.device.type != "cpu" or (is_on_host and not late.calls):
                getattr(super(), name)(*arguments, **options)
                return
            # The call is applied later, and the caller may change them meanwhile.
            arguments = tuple(_own(argument) for argument in arguments)
            handle = _copy.start_copy(arguments, "cpu")
            handle.wait_staged()  # work on this stream may overwrite the sources
            late.append(_LateCall(name, handle, options, is_update))
            while late.are_too_many():
                self._apply_first()

    def _apply(self, leave: int = 0) -> None:
        """Apply late calls in their order, except for the latest updates and what follows them."""
        late = self._late
        with late.lock:
            while not late.is_applying and late.is_due(leave):
                self._apply_first()

    def _apply_first(self) -> None:
        late = self._late
        call = late.calls[0]
        late.waits += not call.handle.ready()
        try:
            arguments = call.handle.get()
        except Exception:  # the copy has failed, and would at each call
            late.remove_first()
            raise
        late.remove_first()
        late.is_applying = True
        try:
            getattr(super(), call.name)(*arguments, **call.options)
        finally:
            late.is_applying = False

    # ---- calls that depend on priorities ---------------------------------------------------------

    def sample(self, storage: Any, batch_size: int) -> Any:
        self._apply(self.priority_delay)
        return super().sample(storage, batch_size)

    @property
    def default_priority(self) -> Any:
        """The priority of new rows: the highest one that has been applied."""
        self._apply(self.priority_delay)
        return super().default_priority

    @property
    def alpha(self) -> float:
        """The exponent of the priorities."""
        return float(self._alpha)

    @alpha.setter
    def alpha(self, value: float) -> None:
        self._apply()
        PrioritizedSampler.alpha.fset(self, value)

    def state_dict(self) -> dict[str, Any]:
        self._apply()
        state: dict[str, Any] = super().state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._apply()
        super().load_state_dict(state_dict)

    def dumps(self, path: Any) -> None:
        self._apply()
        super().dumps(path)

    def loads(self, path: Any) -> None:
        self._apply()
        super().loads(path)

    def _empty(self) -> None:
        self._apply()
        super()._empty()

    def __getstate__(self) -> Any:
        self._apply()
        return super().__getstate__()


class _LateCall(NamedTuple):
    name: str
    """Of a method of torchrl's sampler."""
    handle: AsyncCopyHandle[Any]
    """Of its arguments' copy to the host."""
    options: dict[str, Any]
    is_update: bool


class _LateCalls:
    """Calls that are not applied yet, in their order. A copy of the sampler has none.

    Thread: any that holds `lock`.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.calls: list[_LateCall] = []
        self.is_applying = False
        self.count = 0
        self.waits = 0
        self._updates = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return _LateCalls, ()

    def append(self, call: _LateCall) -> None:
        self.calls.append(call)
        self._updates += call.is_update
        self.count += 1

    def is_due(self, leave: int) -> bool:
        """Return whether there is a first call that is not one of the latest `leave` updates."""
        return bool(self.calls) and not (self.calls[0].is_update and self._updates <= leave)

    def are_too_many(self) -> bool:
        """Return whether the first call must be applied before a sample needs it."""
        most = MOST_CALLS if self.calls[0].is_update else MOST_LATE
        return self._updates > MOST_LATE or len(self.calls) > most

    def remove_first(self) -> None:
        self._updates -= self.calls.pop(0).is_update


def _is_on_host(arguments: tuple[Any, ...]) -> bool:
    return not any(isinstance(each, torch.Tensor) and not each.is_cpu for each in arguments)


def _own(argument: Any) -> Any:
    """Return a copy of what is in the caller's host memory."""
    if type(argument) in (tuple, list):  # an index of several dimensions
        return type(argument)(map(_own, argument))
    if isinstance(argument, np.ndarray):
        return argument.copy()
    return argument.clone() if isinstance(argument, torch.Tensor) and argument.is_cpu else argument
