"""TensorDict's own calls, served by the engine: which of them, in which threads, for how long."""

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
    """What became of the calls that a switch was on for. Counts of calls, of all its threads."""

    def __init__(self) -> None:
        """None yet."""
        self.by_engine = 0
        """Calls of `.to` and constructors whose tensors the engine moved."""
        self.by_tensordict = 0
        """Calls of `.to` that were left to tensordict: for their arguments, the kind of collection,
        a torch mode or a graph capture, or because the collection was there already."""
        self._is_on = True  # until its block has ended

    def __repr__(self) -> str:
        return f"BackendUse(by_engine={self.by_engine}, by_tensordict={self.by_tensordict})"


_lock = threading.RLock()  # held whenever a call is counted: no child must be born with it taken
os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
)
_are_ours = False  # the methods of TensorDict that are in place; guarded by _lock
_of_blocks: list[BackendUse] = []  # guarded by _lock
_process_wide: list[BackendUse] = []  # guarded by _lock for writing
_own: ContextVar[tuple[BackendUse, ...]] = ContextVar("tdcopier_tensordict_backend", default=())


@contextlib.contextmanager
def tensordict_backend() -> Iterator[BackendUse]:
    """Let TensorDict's own calls use the engine, within the block and in this thread (or task).

    `td.to(device)`, with or without `non_blocking`, `.cuda()`, `.cpu()`, `TensorDict(...,
    device=)` of a dict of tensors, and `with td.to(device) as moved:` give the same results as
    ever, packed. What they guarantee stays, and more: a source in host memory, pinned or
    not, may be overwritten when the call returns; a copy to a device is ordered on the current
    stream and the host does not wait for it (but for the bound of `set_run_ahead_limit`), unless
    `non_blocking=False` asks for that; a copy to the host has arrived, also with
    `non_blocking=True`. Results on the host are pinned.

    Everything else goes to tensordict's own code: a dtype, another tensor or TensorDict,
    `batch_size`, `inplace`, `non_blocking_pin` and so on; collections that `async_to` leaves to
    their `.to`; calls under a torch mode, within a CUDA graph capture or `torch.compile`.

    Blocks may be nested. For all threads of the process: `install_tensordict_backend`.

    Yields:
        How many calls the engine took, and how many it left to tensordict.

    """
    use = BackendUse()
    try:
        with _lock:
            _of_blocks.append(use)
            _set_methods()
        _own.set((*_blocks(), use))
        yield use
    finally:
        # The block may end in another context than it began in, or before one that began within it.
        # Contexts that were copied meanwhile, such as a task's, have it for good: it says itself.
        use._is_on = False
        _own.set(_blocks())
        _set_methods()


def install_tensordict_backend() -> BackendUse:
    """Let TensorDict's own calls use the engine in every thread, until it is removed as often.

    Returns:
        The counts of calls since; of the outermost installation where it is installed already.

    """
    with _lock:
        _process_wide.append(_process_wide[0] if _process_wide else BackendUse())
        _set_methods()
        return _process_wide[0]


def remove_tensordict_backend() -> None:
    """Undo one `install_tensordict_backend`; the last one restores tensordict's own methods.

    Raises:
        RuntimeError: it is not installed.

    """
    with _lock:
        if not _process_wide:
            raise RuntimeError("the backend is not installed: there is nothing to remove")
        _process_wide.pop()
        _set_methods()


def switches_on() -> tuple[bool, bool]:
    """Whether it is installed in the process, and whether this thread is in a block of it."""
    return bool(_process_wide), bool(_blocks())


# ---- the methods ---------------------------------------------------------------------------------

_owner_of_to: Any = next(cls for cls in TensorDictBase.__mro__ if "to" in vars(cls))
_own_to: Any = vars(_owner_of_to)["to"]
_raw_to: Any = inspect.unwrap(_own_to)  # without what lets it be used in a `with` statement
_own_init: Any = TensorDict.__dict__["__init__"]


def _set_methods() -> None:
    """Have ours in place while a switch is on. Where Ctrl-C ends this, the next call does it."""
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
    """Those that this context is in."""
    return tuple(use for use in _own.get() if use._is_on)


def _uses() -> tuple[BackendUse, ...]:
    """What this call is counted in; empty if the switch is off here."""
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
    parts = None if device is None else _walk.flatten(self, device, False)
    _count(uses, by_engine=parts is not None)
    if device is None or parts is None:
        return _raw_to(self, *args, **kwargs)
    leaves, context, _ = parts
    return _walk.unflatten(_moved(leaves, device, kwargs.get("non_blocking")), context)


# As tensordict does: it lets the result be used in a `with` statement.
_as_context_manager: Any = _utils._as_context_manager
_to: Any = _as_context_manager()(_switched_to)


def _plain_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """The device that is asked for, if that is all, and the engine's to go to."""
    if len(args) + len(kwargs.keys() - {"non_blocking"}) != 1:
        return None
    asked: Any = args[0] if args else kwargs.get("device")
    if type(asked) not in (str, torch.device, int):
        return None
    try:
        device = _parsed(asked) if _C.engine_takes(asked) else None
    except (ValueError, RuntimeError):  # no such device: tensordict has its own words for that
        return None
    # "cpu:1" is the host to the engine, and a device of its own to tensordict.
    is_numbered_host = device is not None and device.type == "cpu" and device.index is not None
    return None if is_numbered_host else device


def _parsed(asked: str | torch.device | int) -> torch.device:
    """With its index, as tensordict gives it."""
    device = torch.device(asked)
    index: int | None = device.index
    if index is not None or device.type == "cpu":
        return device
    return torch.device(device.type, torch.get_device_module(device).current_device())


def _moved(leaves: list[Any], device: torch.device, non_blocking: bool | None) -> Any:
    """The leaves on the device, as `.to` hands them over; the sources may be written again."""
    handle = start_copy(leaves, device)
    if non_blocking is not None and not non_blocking:
        return handle.get()  # arrived, for every stream
    handle.wait_staged()
    return handle.wait()  # this is get() where the host is the target


@functools.wraps(_own_init)
def _init(self: Any, *args: Any, **kwargs: Any) -> None:
    if not torch.compiler.is_compiling() and (uses := _uses()):
        args, kwargs = _with_moved_source(args, kwargs, uses)
    _own_init(self, *args, **kwargs)


_INIT_PARAMETERS = tuple(inspect.signature(_own_init).parameters)[1:]  # without self


def _with_moved_source(
    args: tuple[Any, ...], kwargs: dict[str, Any], uses: tuple[BackendUse, ...]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The constructor's arguments, where the tensors of its dict are on the device already."""
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
    """The plain tensors of a dict of dicts that are not on the device yet."""
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
    """The same dict with these in their place, in the same order."""
    made: dict[Any, Any] = {}
    for key, value in tree.items():
        if type(value) is dict:
            made[key] = _with_tensors(value, device, moved)
        elif type(value) is torch.Tensor and value.device != device:
            made[key] = next(moved)
        else:
            made[key] = value
    return made
