"""Values delegated to their own ``.to``, and the tensors that their results are made of.

Which leaves are delegated is decided by class in `csrc/python/walk/value_kind.cpp`, and by tensor
in `look_at` of `csrc/engine/leaves/leaf.cpp`; for `copy_into`, in
`csrc/python/walk/pair_leaf.cpp`.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence


class DelegatedPart:
    """A part of a container that the walk delegates to its own ``.to``, and counts as delegated."""

    def __init__(self, value: Any) -> None:
        """Wrap the value that ``.to`` moves."""
        self.value = value

    def to(self, device: torch.device) -> Any:
        return self.value.to(device)


def stays(value: Any, device: torch.device) -> bool:
    """Return whether the ``.to`` of a delegated leaf is expected to return the leaf itself.

    Only for messages: a copy calls ``.to`` and looks at its result. False for a class whose code
    decides.
    """
    if isinstance(value, np.ndarray):
        return device.type == "cpu"
    if isinstance(value, DelegatedPart):
        return False  # the wrapper never is the result
    if isinstance(value, PackedSequence):
        return value.data.device == device
    if isinstance(value, torch.Tensor):
        return value.device == device and _has_to_of_torch(type(value))
    return bool(getattr(value, "device", None) == device)


def _has_to_of_torch(cls: Any) -> bool:
    base: Any = torch.Tensor
    override = getattr(cls.__torch_function__, "__func__", cls.__torch_function__)
    of_torch = (base.__torch_function__.__func__, torch._C._disabled_torch_function_impl)
    is_known = cls.__module__.startswith(("torch.", "tensordict."))  # a jagged or mapped tensor
    return cls.to is torch.Tensor.to and (is_known or override in of_torch)


def plain_parts(moved: Any) -> list[torch.Tensor]:
    """Return the tensors that own a leaf's memory: the leaf itself, or those inside it.

    A collection that reads its tensors anew each time (from a file or a remote store) has none. An
    object with a ``.to`` of its own has those that can be reached through attributes and built-in
    containers.
    """
    if isinstance(moved, torch.Tensor):
        flatten = getattr(moved, "__tensor_flatten__", None)
        if flatten is None:
            return [moved]
        inner: list[Any] = [getattr(moved, name) for name in flatten()[0]]
    elif isinstance(moved, np.ndarray):  # on the host, where no stream is recorded
        inner = []
    elif isinstance(moved, DelegatedPart):
        inner = [moved.value]
    elif isinstance(moved, PackedSequence):  # it may have no indices
        inner = [part for part in moved if part is not None]
    elif is_tensor_collection(type(moved)):
        inner = _held_by(moved)
    else:
        inner = _reached_from(moved)
    return [part for value in inner for part in plain_parts(value)]


_HOLDERS = ("_tensordict", "_param_td", "_source")
"""Attributes in which collections keep their content: a dict of entries, or one collection."""


def _held_by(collection: Any) -> list[Any]:
    """Return the entries that a collection stores, from its state: methods may make new tensors."""
    state: dict[str, Any] = object.__getattribute__(collection, "__dict__")
    if "tensordicts" in state:
        return list(state["tensordicts"])
    for name in _HOLDERS:
        held = state.get(name)
        if isinstance(held, dict):
            return list(held.values())
        if held is not None:
            return [held]
    return []


MOST_VALUES = 20_000
"""How many values of an object are looked at; an object may refer to a whole program."""

WITHOUT_TENSORS = (
    str, bytes, int, float, complex, type(None), np.ndarray, type, types.ModuleType,
    types.FunctionType, types.BuiltinFunctionType, weakref.ref, torch.device, torch.dtype,
)  # fmt: skip


def _reached_from(moved: Any) -> list[torch.Tensor]:
    """Return the tensors and the collections in an object, nearest first."""
    found: list[Any] = []
    seen = {id(moved)}
    waiting = deque([moved])
    while waiting and len(seen) < MOST_VALUES:
        for _, _, child in children_of(waiting.popleft()):
            if isinstance(child, WITHOUT_TENSORS) or id(child) in seen:
                continue
            seen.add(id(child))
            if isinstance(child, torch.Tensor) or is_tensor_collection(type(child)):
                found.append(child)
            else:
                waiting.append(child)
    return found


def children_of(value: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the items and the attributes of a value, without code of its class.

    Each has a format and what it is given, which make the step to it in a path (see `text_of` in
    `_park/value_paths.py`).
    """
    cls = type(value)  # `isinstance` may run the code of a proxy
    if issubclass(cls, dict):
        yield from (("[{!r}]", key, child) for key, child in dict.items(value))
    kinds: tuple[Any, ...] = (list, tuple, deque)
    for kind in kinds:
        if issubclass(cls, kind):
            yield from (("[{}]", i, child) for i, child in enumerate(kind.__iter__(value)))
    sets: tuple[Any, ...] = (set, frozenset)
    for kind in sets:
        if issubclass(cls, kind):
            yield from (("an item of {of}", "item", child) for child in kind.__iter__(value))
    for base in cls.__mro__:
        for name, attribute in vars(base).items():
            if isinstance(attribute, types.MemberDescriptorType):  # a slot
                try:
                    child = attribute.__get__(value)
                except AttributeError:  # it is empty
                    continue
                yield ".{}", name, child
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:  # it has slots only
        return
    yield from ((".{}", name, child) for name, child in attributes.items())


def is_tensor_collection(cls: type) -> bool:
    """Return whether this is a TensorDict or a tensorclass, without importing tensordict.

    tensordict's `is_tensor_collection` would keep a reference to every class passed to it, and
    `issubclass` would hash the class, which its metaclass may forbid.
    """
    base = getattr(sys.modules.get("tensordict"), "TensorDictBase", None)
    return base is not None and (
        id(base) in map(id, cls.__mro__) or getattr(cls, "_is_tensorclass", False)
    )
