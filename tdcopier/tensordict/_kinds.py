"""Decides which of tensordict's classes are taken apart, by how they are built."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import tensordict
import torch
from tensordict import (
    LazyStackedTensorDict,
    MemoryMappedTensor,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    UnbatchedTensor,
)

# A newer tensordict may lack a class that an older one has, and the other way round.
MetaData: Any = getattr(tensordict, "MetaData", None)
TypedTensorDict: Any = getattr(tensordict, "TypedTensorDict", None)

_tensorclasses: Any = importlib.import_module("tensordict.tensorclass")  # a function shadows it

PLAIN_LEAVES = frozenset({torch.Tensor, MemoryMappedTensor, torch.nn.Parameter, torch.nn.Buffer})
"""Leaf classes that need no further check."""

NON_TENSOR_CLASSES = frozenset({NonTensorData, MetaData} - {None})
LAZY_STACKS = frozenset({LazyStackedTensorDict, NonTensorStack})

_TENSORDICT_METHODS = (
    "_apply_nest",
    "_fast_apply",
    "_new_unsafe",
    "_set_str",
    "empty",
    "items",
    "to",
)
"""Methods that ``.to`` calls. A subclass that overrides one is left to its own ``.to``."""


def is_leaf(cls: type) -> bool:
    """Return whether a TensorDict's entry of this class is a tensor, not a collection."""
    return torch.Tensor in cls.__mro__ and UnbatchedTensor not in cls.__mro__


def is_plain_subclass(cls: type) -> bool:
    """Return whether it is a subclass of TensorDict that moves as TensorDict does."""
    return issubclass(cls, TensorDict) and all(
        _is_of_tensordict(inspect.getattr_static(cls, name)) for name in _TENSORDICT_METHODS
    )


def is_plain_tensorclass(cls: Any) -> bool:
    """Return whether values of the class can be rebuilt without running its own code.

    ``.to`` runs `__post_init__` on the moved value; that method may read the data, so it needs
    arrived data.
    """
    if not getattr(cls, "_is_tensorclass", False) or getattr(cls, "_is_non_tensor", False):
        return False
    rebuild: Any = getattr(cls, "_from_tensordict", None)
    if getattr(rebuild, "__func__", None) is not _tensorclasses._from_tensordict:
        return False
    runs = hasattr(cls, "__post_init__") and not getattr(cls, "_skip_post_init_on_rebuild", False)
    has_own_to = (
        "to" not in cls.__expected_keys__
        and not _is_of_tensordict(  # a field may shadow it
            inspect.getattr_static(cls, "to")
        )
    )
    return not runs and not has_own_to


def _is_of_tensordict(method: Any) -> bool:
    function = inspect.unwrap(getattr(method, "__func__", method))
    module = str(getattr(function, "__module__", ""))
    return module.startswith(("tensordict.", "tdcopier."))
