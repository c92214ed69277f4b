"""`tensordict.backend`: runs TensorDict's own calls on the engine, by thread or for the process."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict import utils as _utils

from tdcopier import _C
from tdcopier._copy import start_copy
from tdcopier.tensordict import _walk


class BackendUse:
    """Counts of the calls made while a switch was on, over all of its threads."""

    def __init__(self) -> None:
        """Start at zero."""
        self.by_engine = 0
        """Calls of ``.to`` and of constructors whose tensors the engine moved."""
        self.by_tensordict = 0
        """Calls of ``.to`` that were left to tensordict: because of their arguments, the kind of
        collection, a torch mode or a graph capture, or because the collection was on the device
        already."""
        self._is_on = True  # false once its block has ended

    def __repr__(self) -> str:
        return f"BackendUse(by_engine={self.by_engine}, by_tensordict={self.by_tensordict})"


_lock = threading.RLock()  # held while calls are counted: a forked child must not inherit it locked
os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
)
_are_ours = False  # whether TensorDict currently has our methods; guarded by _lock
_of_blocks: list[BackendUse] = []  # guarded by _lock
_process_wide: list[BackendUse] = []  # writes are guarded by _lock
_own: ContextVar[tuple[BackendUse, ...]] = ContextVar("tdcopier_tensordict_backend", default=())


@contextlib.contextmanager
def backend() -> Iterator[BackendUse]:
    """Run TensorDict's own calls on the engine, within the block and in this thread (or task).

    For example::

        with tdcopier.tensordict.backend():
            moved = td.to("cuda")  # packed

    `td.to(device)`, with or without `non_blocking`, ``.cuda()``, ``.cpu()``, and `TensorDict(...,
    device=)` of a dict of tensors, and `with td.to(device) as moved:` give the same results as
    without the backend, packed. Their guarantees still hold, and these are added. You may overwrite
    a source in host memory, pinned or not, when the call returns. A copy to a device is ordered on
    the current stream, and the host does not wait for it (except for the bound of
    `limits.set_run_ahead`) unless `non_blocking=False` asks for that. A copy to the host has
    arrived when the call returns, even with `non_blocking=True`. Results on the host are pinned.

    All other calls go to tensordict's own code: those with a dtype, another tensor or TensorDict,
    `batch_size`, `inplace`, `non_blocking_pin` and so on; collections that `async_to` delegates to
    their ``.to``; calls under a torch mode, within a CUDA graph capture or `torch.compile`.

    Blocks may be nested. For all threads of the process, use `tensordict.install_backend`.

    Yields:
        Counts of the calls that the engine took, and of those that it left to tensordict.
    """
    use = BackendUse()
    try:
        with _lock:
            _of_blocks.append(use)
            _set_methods()
        _own.set((*_blocks(), use))
        yield use
    finally:
        # The block may end in another context than it began in, or before a block nested in it.
        # Contexts copied meanwhile, for example a task's, keep it forever: `_is_on` tells them.
        use._is_on = False
        _own.set(_blocks())
        _set_methods()


def install_backend() -> BackendUse:
    """Run TensorDict's own calls on the engine in every thread, until it is removed as often.

    For example::

        use = tdcopier.tensordict.install_backend()
        td = td.to("cuda")
        print(f"{use.by_engine} calls by the engine, {use.by_tensordict} by tensordict")

    Returns:
        Counts of calls since the installation; if it is installed already, since the first one.
    """
    with _lock:
        _process_wide.append(_process_wide[0] if _process_wide else BackendUse())
        _set_methods()
        return _process_wide[0]


def remove_backend() -> None:
    """Undo one `tensordict.install_backend`; the last removal restores tensordict's own methods.

    For example::

        tdcopier.tensordict.install_backend()
        train()
        tdcopier.tensordict.remove_backend()

    Raises:
        RuntimeError: the backend is not installed.
    """
    with _lock:
        if not _process_wide:
            raise RuntimeError("the backend is not installed")
        _process_wide.pop()
        _set_methods()


def switches_on() -> tuple[bool, bool]:
    """Return whether it is installed in the process, and whether this thread is in a block."""
    return bool(_process_wide), bool(_blocks())


# ---- the methods ---------------------------------------------------------------------------------

_owner_of_to: Any = next(cls for cls in TensorDictBase.__mro__ if "to" in vars(cls))
_own_to: Any = vars(_owner_of_to)["to"]
_raw_to: Any = inspect.unwrap(_own_to)  # without the decorator for use in a `with` statement
_own_init: Any = TensorDict.__dict__["__init__"]


def _set_methods() -> None:
    """Install our methods while a switch is on. After an interrupt, the next call finishes this."""
    global _are_ours
    dense: Any = TensorDict
    with _lock:
        _of_blocks[:] = [use for use in _of_blocks if use._is_on]
        is_on = bool(_of_blocks or _process_wide)
        if is_on != _are_ours:
            _owner_of_to.to = _to if is_on else _own_to
            dense.__init__ = _init if is_on else _own_init
            _are_ours = is_on


def _blocks() -> tuple[BackendUse, ...]:
    """Return the open blocks that this context is in."""
    return tuple(use for use in _own.get() if use._is_on)


def _uses() -> tuple[BackendUse, ...]:
    """Return the counters of this call; none if no switch is on here."""
    own = _blocks()
    return (*own, *_process_wide[:1]) if _process_wide else own


def _count(uses: tuple[BackendUse, ...], *, by_engine: bool) -> None:
    with _lock:
        for use in uses:
            if by_engine:
                use.by_engine += 1
            else:
                use.by_tensordict += 1


@functools.wraps(_raw_to)
def _switched_to(self: Any, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling() or not (uses := _uses()):
        return _raw_to(self, *args, **kwargs)
    device = _plain_device(args, kwargs)
    is_taken = device is not None and _walk.is_taken_apart(self, device)
    _count(uses, by_engine=is_taken)
    if device is None or not is_taken:
        return _raw_to(self, *args, **kwargs)
    return _moved(self, device, kwargs.get("non_blocking"))


# As in tensordict: allows the result to be used in a `with` statement.
_as_context_manager: Any = _utils._as_context_manager
_to: Any = _as_context_manager()(_switched_to)


def _plain_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """Return the device asked for, if it is the only argument and the engine supports it."""
    if len(args) + len(kwargs.keys() - {"non_blocking"}) != 1:
        return None
    asked: Any = args[0] if args else kwargs.get("device")
    if type(asked) not in (str, torch.device, int):
        return None
    try:
        device = _parsed(asked) if _C.engine_takes(asked) else None
    except (ValueError, RuntimeError):  # no such device: tensordict raises its own error
        return None
    # "cpu:1" is the host for the engine, but a separate device for tensordict.
    is_numbered_host = device is not None and device.type == "cpu" and device.index is not None
    return None if is_numbered_host else device


def _parsed(asked: str | torch.device | int) -> torch.device:
    """Return the device with its index, as tensordict does."""
    device = torch.device(asked)
    index: int | None = device.index
    if index is not None or device.type == "cpu":
        return device
    return torch.device(device.type, torch.get_device_module(device).current_device())


def _moved(data: Any, device: torch.device, non_blocking: bool | None) -> Any:
    """Return the data on the device, as ``.to`` would; the sources may then be overwritten."""
    handle = start_copy(data, device)
    if non_blocking is not None and not non_blocking:
        return handle.get()  # arrived, for every stream
    handle.wait_staged()
    return handle.wait()  # equals get() if the host is the target


@functools.wraps(_own_init)
def _init(self: Any, *args: Any, **kwargs: Any) -> None:
    if not torch.compiler.is_compiling() and (uses := _uses()):
        args, kwargs = _with_moved_source(args, kwargs, uses)
    _own_init(self, *args, **kwargs)


_INIT_PARAMETERS = tuple(inspect.signature(_own_init).parameters)[1:]  # without self


def _with_moved_source(
    args: tuple[Any, ...], kwargs: dict[str, Any], uses: tuple[BackendUse, ...]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the constructor's arguments, with the tensors of its dict moved to the device."""
    given = {**dict(zip(_INIT_PARAMETERS, args, strict=False)), **kwargs}
    asked, source = given.get("device"), given.get("source")
    device = None if asked is None else _plain_device((asked,), {})
    entries = {name: each for name, each in kwargs.items() if name not in _INIT_PARAMETERS}
    tree = entries if source is None else source
    if device is None or type(tree) is not dict:
        return args, kwargs
    leaves = _tensors_elsewhere(tree, device)
    if not leaves:
        return args, kwargs
    _count(uses, by_engine=True)
    moved = _with_tensors(tree, device, iter(_moved(leaves, device, given.get("non_blocking"))))
    if source is None:
        return args, {**kwargs, **moved}
    return (moved, *args[1:]) if args else args, kwargs if args else {**kwargs, "source": moved}


def _tensors_elsewhere(tree: dict[Any, Any], device: torch.device) -> list[torch.Tensor]:
    """Return the plain tensors in nested dicts that are not on the device yet."""
    found: list[torch.Tensor] = []
    for value in tree.values():
        if type(value) is dict:
            found += _tensors_elsewhere(value, device)
        elif type(value) is torch.Tensor and value.device != device:
            found.append(value)
    return found


def _with_tensors(
    tree: dict[Any, Any], device: torch.device, moved: Iterator[torch.Tensor]
) -> dict[Any, Any]:
    """Return the same nested dicts with the moved tensors in place of the originals, in order."""
    made: dict[Any, Any] = {}
    for key, value in tree.items():
        if type(value) is dict:
            made[key] = _with_tensors(value, device, moved)
        elif type(value) is torch.Tensor and value.device != device:
            made[key] = next(moved)
        else:
            made[key] = value
    return made
