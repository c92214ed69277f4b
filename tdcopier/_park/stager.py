"""Stages asynchronous checkpoints of torch.distributed.checkpoint by snapshots."""

from __future__ import annotations

import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch.optim import Optimizer

from tdcopier._park.snapshot import Snapshot, snapshot

__all__ = ["SnapshotStager"]


class SnapshotStager:
    """A stager for `torch.distributed.checkpoint.async_save`, by `snapshot`.

    For example::

        stager = tdcopier.SnapshotStager(optimizer=optimizer)
        saved = dcp.async_save(state_dict, checkpoint_id=path, async_stager=stager)
        train_one_step()
        saved.upload_completion.result()
        stager.close()

    `async_save` turns modules and optimizers into state dicts before the stager sees them. With
    `optimizer`, its next `step` waits on the device until the state has been read; call
    `before_update` before anything else that overwrites tensors of the state of more than 256 KiB,
    for example before a forward that updates large buffers. Without, all later work on the stream
    that is current in `async_save` waits for that. It implements the protocol `AsyncStager`.
    """

    _synchronize_after_execute = False

    def __init__(self, *, optimizer: Optimizer | None = None) -> None:
        """Start a thread, which waits for the snapshots.

        Args:
            optimizer: the optimizer that overwrites the state.
        """
        self._optimizer = optimizer
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tdcopier-stager")
        self._last: Future[Any] | None = None
        self._taken: weakref.ref[Snapshot] | None = None

    @property
    def should_synchronize_after_execute(self) -> bool:
        """False: `async_save` need not wait until the snapshot has arrived."""
        return self._synchronize_after_execute

    def stage(self, state_dict: dict[str, Any], **_: Any) -> Future[dict[str, Any]]:
        """Start a snapshot, and return a future of its result.

        Raises:
            Exception: as `snapshot`.
        """
        taken = snapshot(state_dict, optimizer=self._optimizer)
        if self._optimizer is None:
            taken.before_update()
        self._taken = weakref.ref(taken)
        self._last = self._executor.submit(taken.get)
        return self._last

    def before_update(self) -> None:
        """Make the current streams wait until the device has read the last state."""
        taken = None if self._taken is None else self._taken()
        if taken is not None:  # otherwise it has arrived
            taken.before_update()

    def synchronize_staging(self) -> None:
        """Block until the last snapshot has arrived.

        Raises:
            Exception: its error.
        """
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        """Wait for all snapshots, and end the thread."""
        self._executor.shutdown(wait=True)
