"""Jagged nested tensors in the walk: values, offsets and lengths, each of them a plain tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch.nested._internal import nested_tensor as _nested
from torch.nested._internal.nested_tensor import NestedTensor

from tdcopier import _C
from tdcopier._containers.rule import Flat, Rule

_ragged_sizes: Any = (
    _nested._tensor_symint_registry
)  # keyed by the offsets, or by the lengths if it has any


def flatten(value: Any, device: torch.device | None, named: bool) -> Flat | None:
    """Return the tensors that a jagged tensor is made of, and the context needed to rebuild it.

    Returns:
        None if torch's own code must move it: it is on the device already, it has a gradient to
        keep, or it contains anything but plain tensors. Also None without a device, since existing
        memory has offsets of its own.
    """
    if device is None:
        return None
    parts = [value._values, value._offsets]
    if value._lengths is not None:
        parts.append(value._lengths)
    plain = all(type(part) is torch.Tensor and not part.requires_grad for part in parts)
    if not plain or value.requires_grad or value.device == device:
        return None
    ragged_size = _ragged_sizes.get(parts[-1] if len(parts) == 3 else parts[1])
    if ragged_size is None:
        return None
    others = {"_ragged_idx": value._ragged_idx, "_metadata_cache": value._metadata_cache}
    names = ["_values", "_offsets", "_lengths"][: len(parts)] if named else None
    return parts, (ragged_size, others), names


def unflatten(parts: list[torch.Tensor], context: tuple[Any, dict[str, Any]]) -> Any:
    """Rebuild a jagged tensor with the same ragged size, so that it still matches others."""
    ragged_size, others = context
    values, offsets = parts[:2]
    lengths = parts[2] if len(parts) == 3 else None
    _ragged_sizes[offsets if lengths is None else lengths] = ragged_size
    make: Any = NestedTensor
    return make(values, offsets=offsets, lengths=lengths, **others)


JAGGED = Rule(flatten, unflatten, _C.Step.ATTRIBUTE, by_target=True)
