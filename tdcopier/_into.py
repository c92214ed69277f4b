"""Leaves that `copy_into` delegates to torch or numpy: checks that a pair fits, and copies it."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch

from tdcopier._containers.arrays import as_tensor
from tdcopier._containers.registry import is_wrapped


def is_plain_class(cls: type) -> bool:
    """Return whether tensors of this class are read and written in memory like plain tensors."""
    return cls is torch.nn.Parameter or is_mapped_class(cls) or is_wrapped(cls)


def is_mapped_class(cls: type) -> bool:
    """Return whether this is tensordict's class of tensors over a mapped file."""
    mapped = getattr(sys.modules.get("tensordict.memmap"), "MemoryMappedTensor", None)
    return mapped is not None and cls is mapped


def mismatch(source: Any, destination: Any, rows: list[int] | None) -> str | None:
    """Return why the source cannot be copied into the destination, or None if it can.

    Args:
        source: a leaf.
        destination: the leaf that the source is copied into.
        rows: the shape of the rows if rows of the destination are written, else None.

    Returns:
        The reason, with `{source}` and `{destination}` as placeholders for their paths.
    """
    if isinstance(destination, np.ndarray):
        if not destination.flags.writeable:
            return (
                "{destination} is a read-only array: give one that may be written, such as a copy"
            )
    elif not hasattr(destination, "copy_"):
        name = type(destination).__qualname__
        return f"{{destination}} is a {name}, which cannot be filled: give the tensors in it"
    elif getattr(destination, "requires_grad", False) and torch.is_grad_enabled():
        return (
            "{destination} requires a gradient, and writing in place would break it: make the call "
            "within torch.no_grad(), or give detach()"
        )
    if isinstance(destination, torch.Tensor | np.ndarray) and not hasattr(source, "dtype"):
        name = type(source).__qualname__
        target = type(destination).__qualname__
        return f"{{source}} is a {name}, but {{destination}} is a {target}: give the tensors in it"
    have, want = _shape(source), _shape(destination) if rows is None else tuple(rows)
    if have is not None and want is not None and have != want:
        if rows is not None:
            return f"{{source}} has shape {have}, and the rows that it is for have {want} together"
        return (
            f"{{source}} has shape {have}, but {{destination}} has shape {want}: both must have "
            "the same"
        )
    dtype, target_dtype = _dtype(source), _dtype(destination)
    if dtype is not None and target_dtype is not None and dtype != target_dtype:
        return (
            f"{{source}} has dtype {dtype}, but {{destination}} has dtype {target_dtype}: both "
            "must have the same; convert one with to() first"
        )
    return None


def fill(destination: Any, source: Any) -> None:
    """Copy the source's values into the destination, under the calling thread's torch state."""
    values = as_tensor(source) if isinstance(source, np.ndarray) else source
    if not isinstance(destination, np.ndarray):
        destination.copy_(values)
        return
    plain = values.detach().cpu().resolve_conj().resolve_neg()
    np.copyto(destination, plain.numpy())


def _shape(leaf: Any) -> tuple[Any, ...] | None:
    if getattr(leaf, "is_nested", False) or not hasattr(leaf, "shape"):
        return None  # `copy_` checks these
    return tuple(leaf.shape)


def _dtype(leaf: Any) -> torch.dtype | None:
    if isinstance(leaf, np.ndarray):
        return as_tensor(np.empty(0, leaf.dtype.newbyteorder("="))).dtype
    dtype: torch.dtype | None = getattr(leaf, "dtype", None)
    return dtype
