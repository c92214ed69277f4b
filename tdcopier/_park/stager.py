"""Stages asynchronous checkpoints of torch.distributed.checkpoint by snapshots."""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch.optim import Optimizer

from tdcopier._options import OnUnknown, check_on_unknown
from tdcopier._park.snapshot import Snapshot, check_optimizer, snapshot

__all__ = ["SnapshotStager"]


class SnapshotStager:
    """A stager for `torch.distributed.checkpoint.async_save`, by `snapshot`.

    For example::

        stager = tdcopier.checkpoint.SnapshotStager(optimizer=optimizer)
        saved = dcp.async_save(state_dict, checkpoint_id=path, async_stager=stager)
        train_one_step()
        saved.upload_completion.result()
        stager.close()

    Or use it in a `with` statement. `async_save` turns modules and optimizers into state dicts
    before the stager sees them. With `optimizer`, its next `step` waits on the device until the
    state has been read; call `before_update` before anything else that overwrites tensors of the
    state of more than 256 KiB, for example before a forward that updates large buffers. Without,
    all later work on the stream that is current in `async_save` waits for that. It implements the
    protocol `AsyncStager`.
    """

    _synchronize_after_execute = False

    def __init__(self, *, optimizer: Optimizer | None = None, on_unknown: OnUnknown = None) -> None:
        """Start a thread, which waits for the snapshots.

        Args:
            optimizer: the optimizer that overwrites the state.
            on_unknown: what each snapshot does with values that may hide tensors, as for `park`.

        Raises:
            TypeError: it is no optimizer.
            TypeError, ValueError: `on_unknown` has another value.
        """
        check_optimizer(optimizer)
        check_on_unknown(on_unknown)
        self._on_unknown = on_unknown
        self._optimizer = optimizer
        self._thread: int | None = None
        self._executor = ThreadPoolExecutor(1, "tdcopier-stager", self._note_thread)
        self._is_closed = False
        self._last: Future[Any] | None = None
        self._taken: weakref.ref[Snapshot] | None = None

    def __enter__(self) -> SnapshotStager:
        """Return the stager."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def __repr__(self) -> str:
        """Return whether it is at work, and which optimizer waits for it."""
        last = self._last
        state = "idle" if last is None or last.done() else "staging"
        waits = ""
        if self._optimizer is not None:
            waits = f", waits in step of {type(self._optimizer).__qualname__}"
        return (
            f"<tdcopier.checkpoint.SnapshotStager: {'closed' if self._is_closed else state}{waits}>"
        )

    @property
    def should_synchronize_after_execute(self) -> bool:
        """False, since `async_save` need not wait until the snapshot has arrived."""
        return self._synchronize_after_execute

    def stage(self, state_dict: dict[str, Any], **_: Any) -> Future[dict[str, Any]]:
        """Start a snapshot, and return a future of its result.

        Raises:
            RuntimeError: the stager is closed.
            Exception: as `snapshot`.
        """
        if self._is_closed:
            raise RuntimeError("the stager is closed: make another one")
        is_own = threading.get_ident() == self._thread  # in a callback of a future
        if not is_own and (self._last is None or self._last.done()):
            self._executor.submit(int).result()  # the thread has dropped the result before
        taken = snapshot(state_dict, optimizer=self._optimizer, on_unknown=self._on_unknown)
        self._taken = weakref.ref(taken)
        self._last = future = self._executor.submit(taken.get)
        future.add_done_callback(self._forget)
        return future

    def _note_thread(self) -> None:
        self._thread = threading.get_ident()

    def _forget(self, future: Future[Any]) -> None:
        """Drop the result, so that its pinned memory can be leased for the next one."""
        if self._last is future and (future.cancelled() or future.exception() is None):
            self._last = None

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
        last = self._last
        if last is not None:
            last.result()

    def close(self) -> None:
        """Wait for all snapshots, and end the thread. A second call does nothing."""
        self._is_closed = True
        self._executor.shutdown(wait=True)
