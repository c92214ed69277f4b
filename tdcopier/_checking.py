"""Check mode (`TDCOPIER_CHECK=1`): finds sources that were modified before their copy was done.

`_rows/checking.py` has the rows of gathers.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import torch

from tdcopier import _C
from tdcopier._asyncio import arrived
from tdcopier._C import AsyncCopyHandle
from tdcopier._compile import keep_out_of_graphs
from tdcopier._containers.registry import is_wrapped
from tdcopier._limits import is_on
from tdcopier._stats import CopyStats

T = TypeVar("T")

_VARIABLE = "TDCOPIER_CHECK"
MOST_BYTES = 1 << 40  # a larger leaf must repeat its elements, and copying it would fail
_PACKAGE = str(Path(__file__).parent) + os.sep


class SourceModifiedError(RuntimeError):
    """A source was modified before its copy was done. Raised only with `TDCOPIER_CHECK=1`.

    For example::

        try:
            result = handle.get()
        except tdcopier.SourceModifiedError as error:
            print(error)  # names the leaf, and the line that started the copy
    """


SourceModifiedError.__module__ = "tdcopier"


enabled = is_on(_VARIABLE)
"""Whether copies are checked; each call asks."""


class _HostLeaf:
    """A source in host memory, checked by a checksum of its bytes."""

    is_read_at_wait = True

    def __init__(self, path: str, leaf: torch.Tensor | np.ndarray[Any, Any]) -> None:
        self.path = path
        self._leaf = leaf
        self._sum = _checksum(leaf)

    def is_modified(self) -> bool:
        return _checksum(self._leaf) != self._sum


class _DeviceLeaf:
    """A source on a device, compared with a copy of it if its version counter has changed."""

    is_read_at_wait = False

    def __init__(self, path: str, leaf: torch.Tensor) -> None:
        self.path = path
        self._leaf = leaf
        self._version = version(leaf)
        self._before = leaf.detach().clone()

    def is_modified(self) -> bool:
        if self._version is not None and version(self._leaf) == self._version:
            return False
        # Views of one storage share a counter, so a write to a neighbour changes it too.
        return _checksum(self._leaf.cpu()) != _checksum(self._before.cpu())


class WatchedLeaf(Protocol):
    """The recorded state of one leaf."""

    path: str
    is_read_at_wait: bool
    """Whether the leaf has been read when `wait()` has handed the copy over to a stream."""

    def is_modified(self) -> bool:
        """Return whether the leaf differs from its recorded state."""


class SourceCheck:
    """The state of the sources of one copy when the copy was started."""

    def __init__(self) -> None:
        """Start without leaves."""
        self._started_at = _caller()
        self._leaves: list[WatchedLeaf] = []
        self._failure: SourceModifiedError | None = None
        self._told = False
        self._to_host = False

    @classmethod
    def of_copy(cls, data: Any, device: Any) -> SourceCheck:
        """Record every leaf that `start_copy` will read."""
        check = cls()
        if is_altered():
            return check
        _C.staging_bytes(device)  # raises if the device is wrong, as the call itself would
        target = torch.empty(0, device=device).device
        check._to_host = target.type == "cpu"
        for path, leaf in _C.leaves_with_paths(data, device):
            # If the host is the target, arrays become tensors without a read. Leaves on the target
            # are reused. Only plain tensors are asked for their device: other leaves may have none.
            if isinstance(leaf, np.ndarray):
                read = target.type != "cpu"
            else:
                plain = without_class(leaf)
                read = is_plain(plain) and plain.device != target
            if read:
                check._watch(path, leaf)
        return check

    @classmethod
    def of_filling(cls, source: Any, destination: Any) -> SourceCheck:
        """Record every leaf that `copy_into` will read."""
        check = cls()
        if not is_altered():
            for steps, leaf, filled in _C.pairs_with_paths(source, destination):
                if leaf is not filled:
                    check._watch(f"source{steps}", leaf)
        return check

    @classmethod
    def of_scatter(cls, batch: Any, storage: Any) -> SourceCheck:
        """Record every leaf of the batch that `start_scatter` will read."""
        check = cls()
        check._to_host = True
        if not is_altered():
            for steps, leaf, filled in _C.pairs_with_paths(batch, storage, "batch", "storage"):
                if not is_captured(leaf, filled):
                    check._watch(f"batch{steps}", leaf)
        return check

    def _watch(self, path: str, leaf: Any) -> None:
        leaf = without_class(leaf)
        if isinstance(leaf, np.ndarray):
            if leaf.dtype.kind in "biufc" and leaf.nbytes <= MOST_BYTES:
                self._leaves.append(_HostLeaf(path, leaf))
        elif is_plain(leaf) and leaf.nbytes <= MOST_BYTES:
            kind = _HostLeaf if leaf.device.type == "cpu" else _DeviceLeaf
            self._leaves.append(kind(path, leaf))

    def look(self, *, is_done: bool = True) -> None:
        """Compare the sources with their recorded state, and forget those that have been read.

        Args:
            is_done: False if the copy was only handed over to a stream; then sources on a device
                may not have been read yet.
        """
        all_are_read = is_done or self._to_host
        every = self._leaves
        try:
            self._leaves = [leaf for leaf in every if not (all_are_read or leaf.is_read_at_wait)]
            for leaf in every:
                if all_are_read or leaf.is_read_at_wait:
                    self._compare(leaf)
        except BaseException:  # for example an interrupt: the next look compares all of them
            self._leaves = every
            raise

    def _compare(self, leaf: WatchedLeaf) -> None:
        if self._failure is None and leaf.is_modified():
            self._failure = SourceModifiedError(self._report(leaf))

    def _report(self, leaf: Any) -> str:
        return (
            f"{leaf.path} was modified before its copy was done. The copy was started at "
            f"{self._started_at}. Before writing to a source, call wait_staged() or get() "
            "on its handle."
        )

    def forget(self) -> None:
        """Allow modifications of the sources from now on."""
        self._leaves = []

    def raise_failure(self) -> None:
        """Raise the modification found so far, if any, at every call."""
        if self._failure is not None:
            self._told = True
            raise self._failure

    def raise_failure_once(self) -> None:
        """Raise the modification found, unless it was raised already."""
        if not self._told:
            self.raise_failure()


class CheckedHandle:
    """An `AsyncCopyHandle` that checks the sources in every call that reports on the copy."""

    __slots__ = ("__weakref__", "_check", "_handle")

    def __init__(self, handle: AsyncCopyHandle[Any], check: SourceCheck) -> None:
        self._handle = handle
        self._check = check

    @property  # type: ignore[misc]  # makes `isinstance` accept it as an AsyncCopyHandle
    def __class__(self) -> type:
        return AsyncCopyHandle

    @property
    def stats(self) -> CopyStats:
        return self._handle.stats

    def __repr__(self) -> str:
        return repr(self._handle)

    def ready(self) -> bool:
        is_ready = self._handle.ready()
        if is_ready:
            self._check.look()
        return is_ready

    @keep_out_of_graphs("get()", "the tree")
    def get(self) -> Any:
        result = self._asked(self._handle.get)
        self._check.look()
        self._check.raise_failure()
        return result

    @keep_out_of_graphs("wait()", "the tree")
    def wait(self, stream: torch.Stream | None = None) -> Any:
        result = self._asked(self._handle.wait, stream)
        self._check.look(is_done=False)
        self._check.raise_failure()
        return result

    def wait_staged(self) -> None:
        self._asked(self._handle.wait_staged)
        self._check.look()
        self._check.raise_failure()

    wait_gathered = wait_staged

    def __await__(self) -> Generator[Any, None, Any]:
        return arrived(cast("AsyncCopyHandle[Any]", self))

    def _enqueued(self) -> Any:
        return self._asked(self._handle._enqueued)

    def _hand_over(self, stream: torch.Stream | None = None) -> Any:
        return self._asked(self._handle._hand_over, stream)

    def _device_access(self) -> _C.DeviceAccess:
        access: _C.DeviceAccess = self._asked(self._handle._device_access)
        self._check.look()  # the caller orders its later writes after this access
        self._check.raise_failure()
        return access

    def _send_if_staged(self) -> bool:
        return self._handle._send_if_staged()

    def _is_wait_instant(self) -> bool:
        return self._handle._is_wait_instant()

    def _refuse_in_child(self) -> None:
        self._handle._refuse_in_child()

    @property
    def _reuses_leaves(self) -> bool:
        return self._handle._reuses_leaves

    def _asked(self, ask: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return ask(*arguments)
        except Exception:
            if self._handle.ready():  # the copy has failed and reads no source any more
                self._check.forget()
            raise

    def __del__(self) -> None:
        """Check once more when the handle is dropped; Python prints the error that this raises."""
        if sys.is_finalizing() or not hasattr(self, "_check"):
            return  # torch must not be called any more, or an interrupt ended `__init__`
        self._check.look()
        self._check.raise_failure_once()


def checked(handle: AsyncCopyHandle[T], check: SourceCheck) -> AsyncCopyHandle[T]:
    """Return a handle that also checks the sources."""
    return cast("AsyncCopyHandle[T]", CheckedHandle(handle, check))


def is_altered() -> bool:
    """Return whether a torch mode or transform is active, so that torch copies every leaf."""
    interpreters: Any = torch._C._functorch
    return bool(torch._C._len_torch_dispatch_stack() or interpreters.peek_interpreter_stack())


def is_captured(*leaves: Any) -> bool:
    """Return whether a CUDA graph is being captured on a device of these leaves.

    Its replays read what the sources contain by then, so there is nothing to compare.
    """
    places = {leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)}
    for place in places:
        if place.type == "cuda":
            with torch.cuda.device(place):
                if torch.cuda.is_current_stream_capturing():
                    return True
    return False


def without_class(leaf: Any) -> Any:
    """Return a tensor of a subclass over plain memory as a plain tensor; others as they are."""
    if isinstance(leaf, torch.Tensor) and is_wrapped(type(leaf)) and not leaf.requires_grad:
        return torch.Tensor.as_subclass(leaf, torch.Tensor)  # shares memory and version
    return leaf


def is_plain(leaf: Any) -> bool:
    return (
        type(leaf) in (torch.Tensor, torch.nn.Parameter)
        and leaf.layout is torch.strided
        and not leaf.is_quantized
        and not leaf.is_meta
        and not leaf.is_nested
        and not leaf._is_zerotensor()
        and not getattr(leaf, "has_names", bool)()  # removed in torch 2.13
        and not _reaches_beyond_its_storage(leaf)  # the call itself rejects such a leaf
    )


def _reaches_beyond_its_storage(leaf: torch.Tensor) -> bool:
    if leaf.numel() == 0:
        return False
    last = sum((n - 1) * step for n, step in zip(leaf.shape, leaf.stride(), strict=True))
    end = (leaf.storage_offset() + last + 1) * leaf.element_size()
    return end > leaf.untyped_storage().nbytes()


def version(leaf: torch.Tensor) -> int | None:
    return None if leaf.is_inference() else leaf._version


def _checksum(leaf: torch.Tensor | np.ndarray[Any, Any]) -> tuple[tuple[int, ...], int]:
    """Return the shape, and a checksum of the elements' bytes in order."""
    if isinstance(leaf, torch.Tensor):
        plain = leaf.detach().resolve_conj().resolve_neg().contiguous()
        # A single element may keep an odd stride, which `view` as bytes would reject.
        flat = plain.as_strided((plain.numel(),), (1,))
        array = flat.view(torch.uint8).numpy() if plain.numel() else np.empty(0, np.uint8)
    else:
        array = np.ascontiguousarray(leaf)
    return tuple(leaf.shape), zlib.crc32(array.data.cast("B") if array.size else b"")


def _caller() -> str:
    """Return where the copy was started: the innermost frame outside this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
