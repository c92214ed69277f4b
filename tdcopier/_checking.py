"""`TDCOPIER_CHECK=1`: finds and names sources that were modified before their copy was done."""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from tdcopier import _C
from tdcopier._C import AsyncCopyHandle
from tdcopier._stats import CopyStats

_VARIABLE = "TDCOPIER_CHECK"
_MOST_BYTES = 1 << 40  # what claims more repeats its elements, and no copy of it can succeed
_PACKAGE = str(Path(__file__).parent) + os.sep


class SourceModifiedError(RuntimeError):
    """A source was modified before its copy was done; found with `TDCOPIER_CHECK=1` only."""


def checking_from_environment() -> bool:
    """Whether copies are to be checked.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    text = os.environ.get(_VARIABLE, "0")
    if text not in ("0", "1"):
        raise ValueError(f"{_VARIABLE} must be 0 or 1; got {text!r}")
    return text == "1"


class _HostLeaf:
    """A source in host memory: known again by a checksum of its bytes."""

    on_host = True

    def __init__(self, path: str, leaf: torch.Tensor | np.ndarray[Any, Any]) -> None:
        self.path = path
        self._leaf = leaf
        self._sum = _checksum(leaf)

    def is_modified(self) -> bool:
        return _checksum(self._leaf) != self._sum


class _DeviceLeaf:
    """A source on a device: compared with a copy of it, if its version counter has moved at all."""

    on_host = False

    def __init__(self, path: str, leaf: torch.Tensor) -> None:
        self.path = path
        self._leaf = leaf
        self._version = _version(leaf)
        with torch.no_grad():
            self._before = leaf.detach().clone()

    def is_modified(self) -> bool:
        if self._version is not None and _version(self._leaf) == self._version:
            return False
        # Views of one storage share a counter: a write to a neighbour moves it too.
        return _checksum(self._leaf.cpu()) != _checksum(self._before.cpu())


class SourceCheck:
    """What the sources of one copy were like when it was started."""

    def __init__(self) -> None:
        """None so far."""
        self._started_at = _caller()
        self._leaves: list[_HostLeaf | _DeviceLeaf] = []
        self._failure: SourceModifiedError | None = None
        self._told = False
        self._to_host = False

    @classmethod
    def of_copy(cls, data: Any, device: Any) -> SourceCheck:
        """Remember every leaf that `start_copy` is going to read."""
        check = cls()
        if _is_altered():
            return check
        _C.staging_bytes(device)  # raises what is wrong with the device, as the call itself would
        target = torch.empty(0, device=device).device
        check._to_host = target.type == "cpu"
        for path, leaf in _C.leaves_with_paths(data, device):
            # Arrays become tensors on the host, and what is on the target is not read.
            # What is neither an array nor a plain tensor need not have a device, or one of its own.
            if isinstance(leaf, np.ndarray):
                read = target.type != "cpu"
            else:
                read = _is_plain(leaf) and leaf.device != target
            if read:
                check._watch(path, leaf)
        return check

    @classmethod
    def of_filling(cls, source: Any, destination: Any) -> SourceCheck:
        """Remember every leaf that `copy_into` is going to read."""
        check = cls()
        if not _is_altered():
            for steps, leaf, filled in _C.pairs_with_paths(source, destination):
                if leaf is not filled:
                    check._watch(f"source{steps}", leaf)
        return check

    def _watch(self, path: str, leaf: Any) -> None:
        if isinstance(leaf, np.ndarray):
            if leaf.dtype.kind in "biufc" and leaf.nbytes <= _MOST_BYTES:
                self._leaves.append(_HostLeaf(path, leaf))
        elif _is_plain(leaf):
            kind = _HostLeaf if leaf.device.type == "cpu" else _DeviceLeaf
            self._leaves.append(kind(path, leaf))

    def look(self, *, is_done: bool = True) -> None:
        """Compare; forget what has been compared, since it may be modified from now on.

        Where the copy is not done, but handed over to a stream, only host sources were read.
        """
        host_only = not (is_done or self._to_host)
        every = self._leaves
        try:
            self._leaves = [leaf for leaf in every if not leaf.on_host and host_only]
            for leaf in every:
                if leaf.on_host or not host_only:
                    self._compare(leaf)
        except BaseException:  # such as an interrupt: the next look compares all of them
            self._leaves = every
            raise

    def _compare(self, leaf: _HostLeaf | _DeviceLeaf) -> None:
        if self._failure is None and leaf.is_modified():
            self._failure = SourceModifiedError(
                f"{leaf.path} was modified before its copy was done. The copy was started at "
                f"{self._started_at}. Before writing to a source, call wait_staged() or get() "
                "on its handle."
            )

    def forget(self) -> None:
        """From now on the sources may be modified."""
        self._leaves = []

    def raise_failure(self) -> None:
        """Raise what was found so far, every time."""
        if self._failure is not None:
            self._told = True
            raise self._failure

    def raise_failure_once(self) -> None:
        """Raise what was found, unless the caller has heard of it."""
        if not self._told:
            self.raise_failure()


class CheckedHandle:
    """An `AsyncCopyHandle` that looks at the sources wherever the caller learns of the copy."""

    __slots__ = ("__weakref__", "_check", "_handle")

    def __init__(self, handle: AsyncCopyHandle, check: SourceCheck) -> None:
        self._handle = handle
        self._check = check

    @property  # type: ignore[misc]  # for `isinstance`: it is used like one
    def __class__(self) -> type:
        return AsyncCopyHandle

    @property
    def stats(self) -> CopyStats:
        return self._handle.stats

    def ready(self) -> bool:
        is_ready = self._handle.ready()
        if is_ready:
            self._check.look()
        return is_ready

    def get(self) -> Any:
        result = self._asked(self._handle.get)
        self._check.look()
        self._check.raise_failure()
        return result

    def wait(self, stream: torch.Stream | None = None) -> Any:
        result = self._asked(self._handle.wait, stream)
        self._check.look(is_done=False)
        self._check.raise_failure()
        return result

    def wait_staged(self) -> None:
        self._handle.wait_staged()
        self._check.look()
        self._check.raise_failure()

    wait_gathered = wait_staged

    def _send_if_staged(self) -> bool:
        return self._handle._send_if_staged()

    @property
    def _reuses_leaves(self) -> bool:
        return self._handle._reuses_leaves

    def _asked(self, ask: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return ask(*arguments)
        except Exception:
            if self._handle.ready():  # the copy has failed: it reads nothing any more
                self._check.forget()
            raise

    def __del__(self) -> None:
        """A handle that is dropped is looked at once more; Python prints what this raises."""
        if sys.is_finalizing():
            return  # torch is not to be called any more
        self._check.look()
        self._check.raise_failure_once()


def checked(handle: AsyncCopyHandle, check: SourceCheck) -> AsyncCopyHandle:
    """The handle, with the check in its way."""
    return cast("AsyncCopyHandle", CheckedHandle(handle, check))


def _is_altered() -> bool:
    """Whether no leaf is what it seems, and each is left to torch, which reads it in the call."""
    interpreters: Any = torch._C._functorch
    return bool(torch._C._len_torch_dispatch_stack() or interpreters.peek_interpreter_stack())


def _is_plain(leaf: Any) -> bool:
    return (
        type(leaf) in (torch.Tensor, torch.nn.Parameter)
        and leaf.layout is torch.strided
        and not leaf.is_quantized
        and not leaf.is_meta
        and not leaf.is_nested
        and not getattr(leaf, "has_names", bool)()  # gone from torch 2.13 on
        and leaf.nbytes <= _MOST_BYTES
        and not _reaches_beyond_its_storage(leaf)  # the call refuses it
    )


def _reaches_beyond_its_storage(leaf: torch.Tensor) -> bool:
    if leaf.numel() == 0:
        return False
    last = sum((n - 1) * step for n, step in zip(leaf.shape, leaf.stride(), strict=True))
    end = (leaf.storage_offset() + last + 1) * leaf.element_size()
    return end > leaf.untyped_storage().nbytes()


def _version(leaf: torch.Tensor) -> int | None:
    return None if leaf.is_inference() else leaf._version


def _checksum(leaf: torch.Tensor | np.ndarray[Any, Any]) -> tuple[tuple[int, ...], int]:
    """Shape, and a checksum of the elements' bytes in order."""
    if isinstance(leaf, torch.Tensor):
        plain = leaf.detach().resolve_conj().resolve_neg().contiguous()
        # A single element may keep an odd stride, of which a view as bytes wants nothing.
        flat = plain.as_strided((plain.numel(),), (1,))
        array = flat.view(torch.uint8).numpy() if plain.numel() else np.empty(0, np.uint8)
    else:
        array = np.ascontiguousarray(leaf)
    return tuple(leaf.shape), zlib.crc32(array.data.cast("B") if array.size else b"")


def _caller() -> str:
    """Where the copy was started: the innermost frame that is not of this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
