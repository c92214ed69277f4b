"""`pack`, and the methods of parcels that are written in Python."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch

from tdcopier import _C
from tdcopier import _slabs as slabs
from tdcopier._C import Parcel as Parcel
from tdcopier._compile import keep_out_of_graphs
from tdcopier._copy import copy, start_copy
from tdcopier._into import copy_into
from tdcopier._mistaken_use import say_what_to_use
from tdcopier._options import Device, bool_option

SHARED_FROM_BYTES = 1024 * 1024
"""From this size a parcel goes to another process as shared memory, and below as bytes.

Measured from `put(pack(batch))` until a spawned process has read all leaves, with new memory each
time (benchmarks/travel/threshold.py), on 2 cores without other work: bytes take 0.73 of the time of
shared memory at 512 KiB, 0.81 at 768 KiB, 1.03 at 1 MiB, and 1.26 at 1.5 MiB."""

_sent_outs: WeakKeyDictionary[Parcel, torch.Tensor] = WeakKeyDictionary()
"""The memory of parcels that are in shared memory already, or in a slab, as the tensor that was
given."""


@keep_out_of_graphs("pack()")
def pack(data: Any, *, out: Any = None) -> Parcel:
    """Pack a nested batch into one run of bytes, which other processes and hosts take as one thing.

    For example, in a process that makes batches, and in one that trains::

        queue.put(tdcopier.pack(batch))  # one buffer, for any number of leaves

        handle = tdcopier.start_copy(queue.get(), "cuda")
        batch = handle.get()  # what start_copy(batch, "cuda") gives

    The parcel has a copy of every leaf, the structure, and all other values. `start_copy(parcel,
    device)` gives what `start_copy(data, device)` gives; it need not walk the leaves. `tree()`
    gives the tree on the host, of views.

    Lists, tuples, named tuples, dicts, dataclasses, TensorDicts, numbers, strings and `bytes` are
    written as they are. Everything else must be picklable, and `needs_pickle` says so: other
    containers, tensor subclasses, objects. Of a tensor in a pickled object only the bytes that it
    shows are packed, and they are beside the leaves, not in the pickle.

    Args:
        data: a leaf or any nesting of containers and leaves, all on one device; the parcel is there
            too. Numpy arrays arrive as tensors. Strided leaves are packed without gaps.
        out: memory for the parcel, of at least its size: an object with a writable buffer that
            begins at a multiple of 16 bytes, for example shared memory, a bytearray or a uint8
            tensor; for leaves on a device, a uint8 tensor there. Do not resize it, or write to it,
            while the parcel or a view of it is in use. A queue of `multiprocessing` does not copy
            a large parcel again that is in a tensor in shared memory: the receiver has that
            memory too. Or a function that is called as ``out(nbytes, device)``, once for each
            parcel, and returns such memory, or None. By default the parcel gets new memory.

    Returns:
        The parcel. The data may be changed as soon as the call returns. The call waits until
        leaves on the host are copied; for leaves on a device, the current stream waits.

    Raises:
        TypeError: a value cannot be packed: the message names its path. It cannot be pickled, or
            leaves are on several devices. Or `out` has no buffer, or is on another device.
        ValueError: `out` is too small, is read-only, is not aligned, or overlaps the leaves.
        RuntimeError: the leaves are on a device whose current stream is capturing a CUDA graph.
    """
    if out is None:
        return _C.pack(data, None)
    memory = Memory(out)
    return memory.noted(_C.pack(data, memory.of))


class Memory:
    """The memory that a caller has given for one parcel."""

    def __init__(self, out: Any) -> None:
        """Take what the caller has given as `out`."""
        self._out = out

    def of(self, nbytes: int, device: torch.device) -> Any:
        """Return the memory: a tensor there, or on the host a buffer. None for new memory."""
        if callable(self._out):
            self._out = self._out(nbytes, device)
        if isinstance(self._out, Parcel):
            raise TypeError("out is a parcel, which would read the new leaves by its old layout")
        is_tensor = isinstance(self._out, torch.Tensor)
        if not is_tensor and self._out is not None:
            try:
                memoryview(self._out)
            except TypeError as error:
                raise TypeError(f"out must be a tensor or a buffer: {error}") from error
        if is_tensor and device.type == "cpu" and not self._out.is_cpu:
            raise TypeError(f"out is on {self._out.device}, and the tree on the host")
        return self._out

    def noted(self, parcel: Parcel) -> Parcel:
        """Return the parcel, which has been written there; other processes may share that."""
        out = self._out
        is_on_host = isinstance(out, torch.Tensor) and out.is_cpu
        if is_on_host and (out.untyped_storage().is_shared() or slabs.has(out)):
            _sent_outs[parcel] = out.detach().view(-1).view(torch.uint8)[: parcel.nbytes]
        return parcel


def memory_to_send(nbytes: int, device: torch.device) -> torch.Tensor | None:
    """Return memory from which a worker of a loader sends a parcel without a copy: of its slabs.

    None for a small one, which goes as bytes, and for one that is not on the host.
    """
    if device.type != "cpu":
        return None
    if (memory := slabs.memory_in_slab(nbytes)) is not None:
        return memory
    return None if nbytes < SHARED_FROM_BYTES else _shared_tensor(nbytes)


def _shared_tensor(nbytes: int) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(shared_memory(nbytes))


def _from_buffer(buffer: Any, *, allow_pickle: bool = False) -> Parcel:
    """Read a parcel from its bytes, which may come from anywhere.

    Args:
        buffer: an object with the buffer protocol, or a uint8 tensor on the host or a device. The
            parcel uses its memory without a copy, if it begins at a multiple of 8 bytes (of 16 for
            complex128 leaves and pickled values): do not write to it or resize it meanwhile.
        allow_pickle: accept bytes with pickled values. Unpickling runs any code that the
            bytes' maker has chosen: only for bytes from a source that you trust.

    Raises:
        ValueError: the bytes are no parcel, have a damaged layout, are of another version, or
            have pickled values and `allow_pickle` is False. No code of the bytes has run.
        TypeError: `buffer` has no buffer.
    """
    return _C.parcel_from(buffer, may_unpickle=bool(allow_pickle))


def _save(self: Parcel, path: str | os.PathLike[str]) -> None:
    """Write all bytes to a file, which replaces one of this name once it is complete."""
    part = f"{os.path.abspath(os.fsdecode(path))}.{os.urandom(8).hex()}.part"
    # With the rights of any new file, which `tempfile` does not give.
    file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with open(file, "wb") as to:
            to.write(_on_host(self))
        os.replace(part, path)
    except BaseException:
        os.unlink(part)
        raise


def _load(path: str | os.PathLike[str], *, allow_pickle: bool = False) -> Parcel:
    """Map a file that `save` has written; leaves are read from disk when they are used.

    Writing to the leaves of `tree()` changes neither the file nor another process's leaves. The
    file must not be shortened while the parcel is in use; `save` replaces files instead.

    Raises:
        OSError: the file cannot be read.
        ValueError: as `from_buffer`.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            raise ValueError(f"{os.fspath(path)} is empty, and no parcel")
        # Keeps no file descriptor, as `mmap` does; and a file that replaces this one is not meant.
        mapped = torch.from_file(
            f"/proc/self/fd/{file.fileno()}", shared=False, size=size, dtype=torch.uint8
        )
    try:
        return _C.parcel_from(mapped, may_unpickle=bool(allow_pickle), is_mapped=True)
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from None


def _to(self: Parcel, device: Device, non_blocking: bool = False) -> Any:
    """Return the tree on a device, as trainers that call ``batch.to(device)`` expect.

    With `non_blocking` it returns before the bytes have arrived; the current stream waits for them.
    """
    if bool_option("non_blocking", non_blocking):  # a dtype is no bool
        return start_copy(self, device).wait()
    return copy(self, device)


def _pin_memory(self: Parcel, device: Device | None = None) -> Parcel:
    """Return the parcel in pinned memory, from which a device reads it without staging.

    `DataLoader(..., pin_memory=True)` calls this for a batch that is a parcel, in some versions of
    torch with a device, which changes nothing. A parcel that is pinned is returned as it is.
    """
    if self.is_pinned() or slabs.why_not_in_place(self) is None:
        return self
    pinned = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    pinned.numpy()[:] = memoryview(_on_host(self))
    return _C.parcel_from(pinned, may_unpickle=self._may_unpickle)


def _on_host(parcel: Parcel) -> Any:
    """Return the bytes as an object with a buffer on the host."""
    return parcel if parcel.device.type == "cpu" else parcel._bytes.cpu().numpy()


def _repr(self: Parcel) -> str:
    traits = [f"{self.nbytes:,} bytes", f"device={str(self.device)!r}"]
    if self.needs_pickle:
        traits.append("needs_pickle=True")
    return f"Parcel({', '.join(traits)})"


# ---- pickle --------------------------------------------------------------------------------------


def _reduce_ex(self: Parcel, protocol: Any) -> tuple[Callable[..., Parcel], tuple[Any, ...]]:
    """Pickle the bytes: as one buffer, out of band where the pickler allows that."""
    whole = _on_host(self)
    if protocol < 5:
        return _from_bytes, (bytes(whole),)
    return _unpickled, (pickle.PickleBuffer(whole),)


def _unpickled(buffer: Any) -> Parcel:
    # Unpickling a parcel has run a pickle of the same source already.
    return _C.parcel_from(buffer, may_unpickle=True)


def _reduce_to_process(parcel: Parcel) -> tuple[Callable[..., Parcel], tuple[Any, ...]]:
    """Send a parcel through a queue or a pipe of `multiprocessing`."""
    given = _sent_outs.get(parcel)
    if given is not None and (message := slabs.message_of(given, parcel.nbytes)) is not None:
        return slabs.receive, (message,)
    if parcel.nbytes < SHARED_FROM_BYTES:
        return _from_bytes, (bytes(_on_host(parcel)),)
    if given is not None and given.untyped_storage().is_shared():
        return _from_shared, (given,)
    shared = _shared_tensor(parcel.nbytes)
    # Not by torch, whose threads hang in a forked process.
    copy_into(parcel._bytes, shared)
    return _from_shared, (shared,)


def shared_memory(nbytes: int) -> torch.UntypedStorage:
    """Return new shared memory; `share_memory_()` would copy what is not written yet."""
    storages: Any = torch.UntypedStorage  # its private `_new_shared` has no type annotations
    return cast("torch.UntypedStorage", storages._new_shared(nbytes, device="cpu"))


def _from_bytes(whole: bytes) -> Parcel:
    # The unpickler has made the object for this call, and drops it, so its memory may be written;
    # unless the stream that it reads keeps the object too. (Sent as a bytearray, it would be copied
    # once more below protocol 5.)
    is_owned = sys.getrefcount(whole) <= _REFERENCES_OF_UNPICKLER
    return _C.parcel_from(
        whole if is_owned else bytearray(whole), may_unpickle=True, is_owned=is_owned
    )


_REFERENCES_OF_UNPICKLER = 4
"""To an object that only an unpickler has: of its memo, its stack, this call and `getrefcount`."""


def _from_shared(shared: torch.Tensor) -> Parcel:
    return _unpickled(shared)


_METHODS: dict[str, Any] = {
    "from_buffer": staticmethod(_from_buffer),
    "load": staticmethod(_load),
    "save": _save,
    "to": _to,
    "pin_memory": _pin_memory,
    "__repr__": _repr,
}


def _named(name: str, method: Any) -> Any:
    function = method.__func__ if isinstance(method, staticmethod) else method
    function.__name__, function.__qualname__ = name, f"Parcel.{name}"
    function.__module__ = "tdcopier"
    return method


say_what_to_use(
    Parcel,
    "a parcel",
    "it is a packed batch: parcel.tree() gives the batch on the host, and start_copy(parcel, "
    "device) on a device",
    "give parcel.tree()",
)
for _name, _method in _METHODS.items():
    setattr(Parcel, _name, _named(_name, _method))
Parcel.__reduce_ex__ = _reduce_ex  # type: ignore[method-assign, assignment]
ForkingPickler.register(Parcel, _reduce_to_process)
