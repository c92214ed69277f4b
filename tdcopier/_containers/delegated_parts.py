"""Parts delegated to their own ``.to``, and the tensors that their results are made of.

Which leaves are delegated is decided by class in `csrc/python/value_kind.cpp`, and by tensor in
`look_at` of `csrc/engine/leaves/leaf.cpp`; for `copy_into`, in `csrc/python/plain_leaf.cpp`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


class DelegatedPart:
    """A part of a container that the walk delegates to its own ``.to``, and counts as delegated."""

    def __init__(self, value: Any) -> None:
        """Wrap the value that ``.to`` moves."""
        self.value = value

    def to(self, device: torch.device) -> Any:
        return self.value.to(device)


def plain_parts(moved: Any) -> list[torch.Tensor]:
    """Return the tensors that own a leaf's memory: the leaf itself, or those inside it.

    A collection that reads its tensors anew each time (from a file or a remote store) has none.
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
    elif isinstance(moved, tuple):  # a PackedSequence, which may have no indices
        inner = [part for part in moved if part is not None]
    else:
        inner = _held_by(moved)
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
