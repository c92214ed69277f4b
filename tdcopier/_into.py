"""Leaves that `copy_into` leaves to torch or numpy: whether they fit, and filling them."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch

from tdcopier._arrays import as_tensor


def is_plain_class(cls: type) -> bool:
    """Whether a tensor of this class is a plain one to whoever reads or writes its memory."""
    mapped = getattr(sys.modules.get("tensordict.memmap"), "MemoryMappedTensor", None)
    return cls in (torch.nn.Parameter, mapped)


def mismatch(source: Any, destination: Any) -> tuple[str | None, str] | None:
    """Why the source cannot be copied into the destination, told of one or of both; or None."""
    if isinstance(destination, np.ndarray):
        if not destination.flags.writeable:
            return None, " is a read-only array: give one that may be written, such as a copy"
    elif not hasattr(destination, "copy_"):
        name = type(destination).__qualname__
        return None, f" is a {name}, which cannot be filled: give the tensors in it"
    elif getattr(destination, "requires_grad", False) and torch.is_grad_enabled():
        return None, (
            " requires a gradient, and writing in place would break it: make the call within "
            "torch.no_grad(), or give detach()"
        )
    if isinstance(destination, torch.Tensor | np.ndarray) and not hasattr(source, "dtype"):
        name = type(source).__qualname__
        target = type(destination).__qualname__
        return f" is a {name}", f" is a {target}: give the tensors in it"
    for name, of in (("shape", _shape), ("dtype", _dtype)):
        have, want = of(source), of(destination)
        if have is not None and want is not None and have != want:
            return f" has {name} {have}", f" has {name} {want}: both must have the same"
    return None


def fill(destination: Any, source: Any) -> None:
    """Write the source's values, under the state that the calling thread is in."""
    values = as_tensor(source) if isinstance(source, np.ndarray) else source
    if not isinstance(destination, np.ndarray):
        destination.copy_(values)
        return
    plain = values.detach().cpu().resolve_conj().resolve_neg()
    np.copyto(destination, plain.numpy())


def _shape(leaf: Any) -> tuple[Any, ...] | None:
    if getattr(leaf, "is_nested", False) or not hasattr(leaf, "shape"):
        return None  # `copy_` knows better
    return tuple(leaf.shape)


def _dtype(leaf: Any) -> torch.dtype | None:
    if isinstance(leaf, np.ndarray):
        return as_tensor(np.empty(0, leaf.dtype.newbyteorder("="))).dtype
    dtype: torch.dtype | None = getattr(leaf, "dtype", None)
    return dtype
