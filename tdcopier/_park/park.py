"""Moves the device memory of a state to pinned host memory and back, in place.

`csrc/python/calls/storage_memory.cpp` empties and fills the storages; `transfers.py` moves the
bytes.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tdcopier import _C
from tdcopier._compile import keep_out_of_graphs
from tdcopier._options import OnUnknown, bool_option, check_on_unknown
from tdcopier._park.tensors import FoundTensors, refuse_modes, tensors_in
from tdcopier._park.transfers import HostCopy, copy_to_device
from tdcopier._park.value_paths import named
from tdcopier._progress import Progress

__all__ = ["Parked", "park", "parked"]

_USED = (
    "this tensor is parked: tdcopier.park() has moved its memory to the host. Call resume() of the "
    "handle before you use it"
)


_USE_THE_STATE = "call its resume(), and use the state itself"


class _Parking:
    """What is parked: the storages, and their bytes on the host.

    `_parkings` keeps it while the memory is out, so that no interrupt can lose the values.
    """

    def __init__(
        self, memory: _C.StorageMemory, copy: HostCopy, devices: list[torch.device]
    ) -> None:
        self.memory = memory
        self.handle: weakref.ref[Parked] | None = None
        self._devices = devices
        self._copy: HostCopy | None = copy
        self._process = os.getpid()
        self._is_dropped = False

    def is_lost(self) -> bool:
        """Return whether only a call of `park` can resume this."""
        if self._process != os.getpid():
            return False
        return self._is_dropped or (self.handle is not None and self.handle() is None)

    def take_out(self, users: list[torch.Stream]) -> None:
        _parkings.add(self)
        self.memory.take_out(users, _USED)

    def ready(self) -> bool:
        copy = self._copy
        is_ready = copy is None or copy.ready()
        if is_ready:
            self.memory.release_kept()
        return is_ready

    def wait(self) -> None:
        copy = self._copy
        if copy is not None:
            with Progress("waiting for the host's copy", sum(self.memory.sizes_bytes)) as progress:
                copy.wait(progress)
            self.memory.release_kept()

    def resume(self, *, block: bool) -> None:
        """Put memory with the old values in. With `block`, wait on the host until it has them."""
        if self._process != os.getpid() and self.memory.is_out:
            raise RuntimeError("only the process that parked the tensors can resume them")
        with _exchanging:
            if self.memory.is_out:
                refuse_modes("resume()")
                self.wait()
                self.memory.put_in(self._on_device(block=block))
            self._copy = None
            _parkings.discard(self)

    def _on_device(self, *, block: bool) -> list[torch.Tensor | None]:
        """Return new memory with the bytes of each storage that waits for them."""
        parts: list[torch.Tensor] = [] if self._copy is None else self._copy.parts
        waiting = self.memory.are_waiting()
        wanted = [part if waits else None for part, waits in zip(parts, waiting, strict=True)]
        sizes = self.memory.sizes_bytes
        total = sum(size for size, waits in zip(sizes, waiting, strict=True) if waits)
        with Progress("resuming", total) as progress:
            return copy_to_device(wanted, sizes, self._devices, progress, block=block)

    def resume_for_dropped_handle(self) -> None:
        """Resume tensors that would be lost, and say so. Any thread may be the one that does."""
        if self._process != os.getpid():
            return
        if not any(self.memory.are_waiting()):  # resumed, or the tensors are gone
            _parkings.discard(self)
            return
        self._is_dropped = True
        try:
            self.resume(block=True)  # so all streams see the values
        finally:
            warnings.warn(
                "the handle of tdcopier.park() was dropped while its tensors were parked, so they "
                "are resumed, now or in the next call of park(): keep the handle and call resume()",
                RuntimeWarning,
                stacklevel=3,
            )


_exchanging = threading.RLock()
"""Held by calls that take memory out of storages or put it in, so that those of several threads do
not meet: one could park what another has emptied and filled again meanwhile. Reentrant, for handles
that are dropped during a call."""


def _renew_lock() -> None:
    """In a forked child: a thread of the parent may hold the lock."""
    global _exchanging
    _exchanging = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)

_parkings: set[_Parking] = set()
"""All that is parked. Those without a handle could not be resumed when it was dropped, for example
for lack of memory, or because of Ctrl-C: the next call of `park` does it."""


class Parked:
    """The handle of a state that `park` has moved to the host.

    For example::

        parked = tdcopier.park(model)
        parked.wait_parked()
        print(f"{parked.nbytes / 1e9:.1f} GB are on the host")
        parked.resume()

    Keep it. If it is dropped while tensors are parked, they are resumed, with a `RuntimeWarning`.
    In a `with` statement, the end of the block resumes them. Any thread may use it.
    """

    _instead_in_a_tree = "give the state itself, after resume()"

    def __init__(self, parking: _Parking) -> None:
        """Become the handle of what `park` has made."""
        if not isinstance(parking, _Parking):
            raise TypeError(f"park() makes handles; got {named(parking)}")
        self._parking = parking
        parking.handle = weakref.ref(self)

    @property
    def nbytes(self) -> int:
        """Bytes of the storages that this handle parks, resumed or not."""
        return sum(self._parking.memory.sizes_bytes)

    @property
    def is_parked(self) -> bool:
        """Whether the tensors are parked; False once they have been resumed."""
        return self._parking.memory.is_out

    def ready(self) -> bool:
        """Return whether all bytes have arrived on the host, or the device failed. Never blocks."""
        return self._parking.ready()

    @keep_out_of_graphs("wait_parked()", "nothing parked")
    def wait_parked(self) -> None:
        """Block until all bytes have arrived on the host.

        There is no need to: torch's allocator reuses the memory in the right order without it. But
        large allocations right after `park` are faster after a wait.

        Raises:
            Exception: the error of a device that failed during the copy; every time.
        """
        self._parking.wait()

    @keep_out_of_graphs("resume()", "nothing parked")
    def resume(self) -> None:
        """Give the tensors device memory with the old values again, in the background.

        The memory is allocated on the calling thread's current stream of each device, and work that
        is enqueued there after this call sees the values; other streams must be made to wait for
        that stream. The host waits until the bytes have arrived there, usually not at all, and
        while small storages are staged. Tensors that are gone are left out, and so are those that
        were given other memory meanwhile. A second call does nothing.

        The pinned memory is released when the device has read it.

        Raises:
            torch.OutOfMemoryError: the device has too little memory. Everything is still parked:
                free some and call again.
            RuntimeError: a current stream is capturing a CUDA graph; a torch mode is active; this
                is a forked child.
            Exception: any other error. With each of them, everything is still parked. The error of
                a device that failed while the state was copied to the host is raised every time.
        """
        self._parking.resume(block=False)

    def __enter__(self) -> Parked:
        """Return the handle."""
        return self

    def __exit__(self, *_: object) -> None:
        """Resume, also after an error. Ctrl-C raises after that; a second one ends it."""
        try:
            self.resume()
        except KeyboardInterrupt:
            self.resume()
            raise

    def __repr__(self) -> str:
        """Return the number of bytes, and whether they are parked."""
        state = "parked" if self.is_parked else "resumed"
        return f"<tdcopier.Parked: {self.nbytes} bytes, {state}>"

    def __getattr__(self, name: str) -> Any:
        """Say what to call: the caller takes the handle for the state."""
        raise AttributeError(f"a handle of park() has no attribute {name!r}: {_USE_THE_STATE}")

    def __getitem__(self, key: object) -> Any:
        """Say what to call, also to a loop."""
        raise TypeError(f"a handle of park() has no items: {_USE_THE_STATE}")

    def __reduce_ex__(self, protocol: object) -> Any:
        """Refuse to be copied or pickled: dropping the copy would resume the state."""
        raise TypeError("a handle of park() cannot be copied or pickled: resume() first")

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Resume tensors that would be lost, and say so.

        Python empties modules when it ends, so this keeps what it calls then.
        """
        parking = getattr(self, "_parking", None)
        if parking is not None and not is_finalizing():
            parking.resume_for_dropped_handle()


@keep_out_of_graphs("park()", "nothing parked")
def park(*states: Any, gradients: bool = True, on_unknown: OnUnknown = None) -> Parked:
    """Move the device memory of a state to pinned host memory, in place, and return a handle.

    For programs that train and generate on one GPU, for example. The tensors keep their identity,
    so optimizers, hooks, tied weights and views continue to work when `resume` of the handle has
    given them memory again. Meanwhile they have shapes but no memory: any use of their values
    raises an error. For example::

        parked = tdcopier.park(model, optimizer)
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

    **Other copies and threads.** A call of this changes the tensors like one that overwrites them:
    before it, wait for copies of tdcopier that still read or fill them, and let no other thread use
    them during it. The same applies to `resume`. Snapshots are ordered by streams: see `snapshot`.

    Args:
        *states: modules (their parameters and buffers), optimizers (their state, without the
            parameters), state dicts, TensorDicts, tensors, in any nesting of containers. At least
            one.
        gradients: also park the gradients of the tensors in the state.
        on_unknown: what to do with values in which tensors may be that are not found. These are of
            classes that tdcopier does not know, as for `start_copy` (a trainer, a set, a
            scheduler). None: pass them beside tensors, but raise a `TypeError` if the state has no
            tensor at all: for such a value (beside modules and optimizers, only if tensors on a
            device can be seen in its attributes), for a module or a container that has them only in
            other attributes, or if the state is no container. "ignore": pass all of them. "raise":
            raise a `TypeError` for the first one, also beside tensors. "warn": an
            `UnknownTypeWarning` instead, for each class once per process. The path and what to give
            instead are in the text. By default, generators, sets of tensors, and objects that only
            their own `.to` knows are refused beside tensors too. Plain data are never reported, and
            a state of nothing else has nothing to park: the state dict of an optimizer before its
            first step is one.

    Returns:
        The handle. Keep it: if it is dropped, it resumes the tensors, and warns.

    Raises:
        TypeError: no state was given; a value may hide tensors, see `on_unknown`; or only the own
            `.to` of a tensor knows its memory. The message names the path.
        ValueError: a tensor has no memory, for example because it is parked already; it is not
            strided; its device is of a type that tdcopier has no transfers for. The message names
            the path. Or all tensors are on the host. A state without any tensor, such as an
            optimizer before its first step, is no error.
        MemoryError: the host can pin no more memory, or the limit of `limits.set_pinned_bytes` does
            not allow it.
        RuntimeError: a current stream is capturing a CUDA graph; a torch mode is active; the driver
            refuses to pin memory; another thread gives the tensors other memory during the call.
        Exception: any other error, or Ctrl-C. Whatever it is, all tensors have their memory and
            their values then.
    """
    refuse_modes("park()")
    if not states:
        raise TypeError("park() needs a state: give a model, an optimizer, or other tensors")
    bool_option("gradients", gradients)
    check_on_unknown(on_unknown)
    with _exchanging:
        return _park(states[0] if len(states) == 1 else states, gradients, on_unknown)


def _park(state: Any, gradients: bool, on_unknown: OnUnknown) -> Parked:
    _resume_without_handle()
    found = tensors_in(state, gradients=gradients, is_parking=True, on_unknown=on_unknown)
    memory = storages_of(found)
    del found
    storages = memory.tensors()
    devices = [storage.device for storage in storages]
    with Progress("parking", sum(memory.sizes_bytes)) as progress:
        copy = HostCopy(storages, memory.sizes_bytes, progress)
    del storages
    parking = _Parking(memory, copy, devices)
    handle = Parked(parking)
    # The allocator makes an event for each storage and stream. The stream of copies to new memory
    # needs none: its own memory is reused in its order.
    users = [
        _C.copy_stream(device, which)
        for device in dict.fromkeys(devices)
        for which in ("from_device", "ordered")  # that read the memory, and that fill it
    ]
    try:
        parking.take_out(users)
        return handle
    except BaseException:
        handle.resume()
        raise


@keep_out_of_graphs("parked()")
@contextlib.contextmanager
def parked(*states: Any, gradients: bool = True, on_unknown: OnUnknown = None) -> Iterator[Parked]:
    """Park states in a ``with`` block, and resume them at its end, also after an error.

    For example::

        with tdcopier.parked(model, optimizer):
            generate(rollout_engine)

    Args:
        *states: as for `park`, which describes the arguments and the errors.
        gradients: also park gradients.
        on_unknown: what to do with values that may hide tensors.

    Raises:
        Exception: as `park` at the beginning of the block, and as `Parked.resume` at its end. The
            handle, which is the target of ``as``, can then still be resumed.
    """
    with park(*states, gradients=gradients, on_unknown=on_unknown) as handle:
        yield handle


def storages_of(found: FoundTensors) -> _C.StorageMemory:
    """Return the storages of tensors.

    Raises:
        ValueError: a tensor has no memory; the message names its path.
    """
    memory = _C.StorageMemory(found.tensors)
    numbers = memory.numbers
    if memory.MISSING in numbers:
        missing = numbers.index(memory.MISSING)
        raise ValueError(
            f"{found.path(missing)} has no memory on {found.tensors[missing].device}: it is parked "
            "already, or its storage was emptied; resume it first, or leave it out"
        )
    return memory


def _resume_without_handle() -> None:
    for parking in list(_parkings):
        if not parking.is_lost():
            continue
        try:
            parking.resume(block=True)
        except Exception as error:
            warnings.warn(
                "tensors whose handle was dropped while they were parked are still parked, and the "
                f"next call of park() tries again to resume them: {error}",
                RuntimeWarning,
                stacklevel=4,
            )
