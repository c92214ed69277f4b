"""Moves the device memory of a state to pinned host memory and back, in place."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from tdcopier import _C
from tdcopier._compile import keep_out_of_graphs
from tdcopier._park.tensors import FoundTensor, refuse_modes, tensors_in
from tdcopier._park.transfers import HostCopy, copy_to_device

__all__ = ["Parked", "park", "parked"]

_USED = (
    "this tensor is parked: tdcopier.park() has moved its memory to the host. Call resume() of the "
    "handle before you use it"
)


class Parked:
    """The handle of a state that `park` has moved to the host.

    Keep it: it owns the values. If it is dropped while tensors are parked, it resumes them and
    warns with a `RuntimeWarning`.
    """

    def __init__(
        self, memory: _C.StorageMemory, copy: HostCopy, devices: list[torch.device]
    ) -> None:
        """Take over what `park` has made, before the memory is taken out."""
        self._memory = memory
        self._copy: HostCopy | None = copy
        self._devices = devices
        self._lock = threading.RLock()
        self._process = os.getpid()

    @property
    def bytes(self) -> int:
        """Bytes of the storages that this handle parks, resumed or not."""
        return sum(self._memory.sizes_bytes)

    @property
    def is_parked(self) -> bool:
        """Whether the tensors are parked; False once they have been resumed."""
        return self._memory.is_out

    def ready(self) -> bool:
        """Return whether all bytes have arrived on the host, or the device failed. Never blocks."""
        copy = self._copy
        return copy is None or copy.ready()

    @keep_out_of_graphs("wait()", "nothing parked")
    def wait(self) -> None:
        """Block until all bytes have arrived on the host.

        There is no need to: torch's allocator reuses the memory in the right order without it.

        Raises:
            Exception: the error of a device that failed during the copy; every time.
        """
        with self._lock:
            if self._copy is not None:
                self._copy.wait()
                self._memory.release_kept()

    @keep_out_of_graphs("resume()", "nothing parked")
    def resume(self) -> None:
        """Give the tensors device memory with the old values again, in the background.

        The memory is allocated on the calling thread's current stream of each device, and work that
        is enqueued there after this call sees the values; other streams must be made to wait for
        that stream. The host waits until the bytes have arrived there, usually not at all, and
        while small storages are staged. Tensors that are gone are left out, and so are those that
        were given memory meanwhile. A second call does nothing.

        The pinned memory is released when the device has read it.

        Raises:
            torch.OutOfMemoryError: the device has too little memory. Everything is still parked:
                free some and call again.
            Exception: any other error, with which everything is still parked, too. The error of a
                device that failed while the state was copied to the host is raised every time.
            RuntimeError: a current stream is capturing a CUDA graph; a torch mode is active; this
                is a forked child.
        """
        self._resume(block=False)

    def _resume(self, *, block: bool) -> None:
        with self._lock:
            if not self._memory.is_out:
                self._copy = None
                return
            if self._process != os.getpid():
                raise RuntimeError("only the process that parked the tensors can resume them")
            refuse_modes("resume()")
            self.wait()
            assert self._copy is not None  # only dropped when nothing is out
            waiting = self._memory.are_waiting()
            parts = [
                part if waits else None
                for part, waits in zip(self._copy.parts, waiting, strict=True)
            ]
            self._memory.put_in(copy_to_device(parts, self._devices, block=block))
            self._copy = None

    def __del__(self) -> None:
        """Resume tensors that would be lost, and say so."""
        memory = getattr(self, "_memory", None)
        if memory is None or sys.is_finalizing() or self._process != os.getpid():
            return
        if not any(memory.are_waiting()):
            return
        try:
            # Any thread may run this, so all streams must see the values.
            self._resume(block=True)
        except BaseException:
            _dropped.append(self)  # park() tries again
            raise
        finally:
            warnings.warn(
                "the handle of tdcopier.park() was dropped while its tensors were parked. They are "
                "being resumed, in whichever thread this is: keep the handle and call resume()",
                RuntimeWarning,
                source=self,
                stacklevel=2,
            )


_dropped: list[Parked] = []
"""Handles that were dropped, and could not resume their tensors, for example for lack of memory."""


@keep_out_of_graphs("park()", "nothing parked")
def park(state: Any, *, gradients: bool = True) -> Parked:
    """Move the device memory of a state to pinned host memory, in place, and return a handle.

    For programs that train and generate on one GPU, for example. The tensors keep their identity,
    so optimizers, hooks, tied weights and views continue to work when `resume` of the handle has
    given them memory again. Meanwhile they have shapes but no memory: any use of their values
    raises an error. For example::

        parked = tdcopier.park([model, optimizer])
        generate(rollout_engine)
        parked.resume()
        train(model, optimizer)

    All storages are moved as a whole: tensors that share one still do so afterwards, whether they
    are all in the state or not. Their addresses change, so CUDA graphs that access them must be
    captured again.

    Tensors on the host stay where they are, also those in a state that is on a device otherwise.
    So do meta tensors, and what is opaque (numbers, text, objects that tdcopier does not know).
    DTensors and other wrappers are parked by the tensors in them.

    **Order.** The copies run in the background, after all work that is on the current stream of
    each device at the call. The memory returns to torch's allocator in this call, which reuses it
    when the copies have read it: an allocation that needs it waits for them, and
    `torch.cuda.empty_cache()` does, too. As with any tensor that you drop, another stream that
    still uses the memory needs `record_stream`. You may resume at once.

    Args:
        state: modules (their parameters and buffers), optimizers (their state, without the
            parameters), state dicts, TensorDicts, tensors, in any nesting of containers.
        gradients: also park the gradients of the tensors in the state.

    Returns:
        The handle. Keep it: if it is dropped, it resumes the tensors, and warns.

    Raises:
        TypeError: the state has no tensors; or only the own `.to` of a value knows its memory. The
            message names the path.
        ValueError: a tensor has no memory, for example because it is parked already; it is not
            strided; its device is of a type that tdcopier has no transfers for. The message names
            the path.
        RuntimeError: a current stream is capturing a CUDA graph; a torch mode is active; the host
            can pin no more memory.
        Exception: any other error, or Ctrl-C. Whatever it is, all tensors have their memory and
            their values then.
    """
    refuse_modes("park()")
    _resume_dropped()
    found = [each for each in tensors_in(state, gradients=gradients) if _is_on_device(each)]
    memory = storages_of(found)
    storages = memory.tensors()
    devices = [storage.device for storage in storages]
    parked = Parked(memory, HostCopy(storages, small_first=False), devices)
    del storages
    readers = [_C.copy_stream(device, "from_device") for device in dict.fromkeys(devices)]
    try:
        memory.take_out(readers, _USED)
        return parked
    except BaseException:
        parked.resume()
        raise


@contextlib.contextmanager
def parked(*states: Any, gradients: bool = True) -> Iterator[Parked]:
    """Park states in a ``with`` block, and resume them at its end, also after an error.

    For example::

        with tdcopier.parked(model, optimizer):
            generate(rollout_engine)

    Args:
        states: as the `state` of `park`, which describes the arguments and the errors.
        gradients: also park gradients.

    Raises:
        Exception: as `park` at the beginning of the block, and as `Parked.resume` at its end. The
            handle, which is the target of ``as``, can then still be resumed.
    """
    handle = park(states[0] if len(states) == 1 else states, gradients=gradients)
    try:
        yield handle
    finally:
        handle.resume()


def storages_of(found: list[FoundTensor]) -> _C.StorageMemory:
    """Return the storages of tensors on devices.

    Raises:
        ValueError: a tensor has no memory; the message names its path.
    """
    memory = _C.StorageMemory([each.tensor for each in found])
    for each, number in zip(found, memory.numbers, strict=True):
        if number == _MISSING:
            raise ValueError(
                f"{each.path} has no memory on {each.tensor.device}: it is parked already, or its "
                "storage was emptied; resume it first, or leave it out"
            )
    return memory


_MISSING = -2  # of csrc/python/storage_memory.h


def _is_on_device(each: FoundTensor) -> bool:
    return each.tensor.device.type != "cpu"


def _resume_dropped() -> None:
    while _dropped:
        _dropped[-1].resume()
        _dropped.pop()
