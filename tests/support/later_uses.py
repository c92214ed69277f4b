"""Later uses of the result of a copy, as a whole and of one leaf; random programs consist of them.

A use does the same to tdcopier's result and to that of `.to()`. Its choices come from the random
numbers it is given and from the shape of what it is given, so they are the same for both.
"""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import cloudpickle
import tensordict
import torch
from echo_process import echo
from support import is_collection, oracle
from tensordict import UnbatchedTensor, is_tensorclass
from tensordict_classes import OwnSet
from tensordict_same import leaves_of, nodes_of
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import tdcopier


@dataclass
class Side:
    """One of the two that do the same: tdcopier's result, or that of `.to()`."""

    by_engine: bool
    source: Any
    devices: tuple[str, ...]
    """Places that a value may be moved to."""
    values: list[Any] = field(default_factory=list)
    """The result first, then what later uses made."""


Use = Callable[[Side, Any, Random], Any]
"""Takes a side, one of its values and random numbers. Returns something to compare and to keep."""

# ---- parts of a value ----------------------------------------------------------------------------


def collections_in(value: Any) -> list[Any]:
    """Returns the TensorDicts in a value with those nested in them."""
    if isinstance(value, torch.Tensor):
        return []
    if is_collection(value):
        return [node for path, node in nodes_of(value) if not path.endswith(_WITHIN_A_CLASS)]
    return [node for child in _children(value) for node in collections_in(child)]


_WITHIN_A_CLASS = ("._tensordict", "._source", "._param_td")
"""Attributes that a tensorclass and others keep to themselves."""


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in a value, without those hidden in values that are not tensors."""
    if isinstance(value, torch.Tensor):
        return [value]
    if is_collection(value):
        return [leaf for _, leaf in leaves_of(value)]
    return [leaf for child in _children(value) for leaf in tensors_in(child)]


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple)) else []


def _plain(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    return [leaf for leaf in leaves if leaf.layout == torch.strided and not leaf.is_nested]


def _to_host(leaf: torch.Tensor) -> bool:
    return leaf.device.type == "cpu"


def crashes_torch(leaf: torch.Tensor) -> bool:
    """Whether torch crashes when the memory is shared or viewed as bytes: some have none."""
    is_wrapper = is_traceable_wrapper_subclass(leaf) and not leaf.is_nested
    return is_wrapper or leaf.is_quantized


def _can_be_shared(leaf: torch.Tensor) -> bool:
    return _to_host(leaf) and not crashes_torch(leaf)


_ADDRESSES = re.compile(r"0x[0-9a-f]+|/\S*tmp\S*|\b\d{6,}\b|\bj\d+\b")
"""Parts of a text that differ from object to object."""


def without_addresses(text: str) -> str:
    return _ADDRESSES.sub("...", text)


# ---- the whole value -----------------------------------------------------------------------------


def _saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def _has_other_keys_than_fields(value: Any) -> bool:
    """Whether a tensorclass has been given other keys, with which its `.to` does not rebuild it.

    Before tensordict 0.15 `.to` also sets fields to None that have been removed.
    """
    for node in collections_in(value):
        if is_tensorclass(node):
            fields, keys = node.__expected_keys__, set(node._tensordict.keys())
            held = keys | set(node.__dict__["_non_tensordict"])
            if keys - fields or (_SETS_REMOVED_FIELDS and fields - held):
                return True
    return False


_SETS_REMOVED_FIELDS = tensordict.__version__.startswith("0.14")


def moves_too_early(value: Any) -> bool:
    """Whether its own `.to` reads leaves while they may still be on their way to the host."""
    return any(type(node) is OwnSet and node.device != _HOST for node in collections_in(value))


_HOST = torch.device("cpu")


def _moved_again(side: Side, value: Any, rng: Random) -> Any:
    device = rng.choice(side.devices)
    if _has_other_keys_than_fields(value) or (device == "cpu" and moves_too_early(value)):
        return None
    if side.by_engine:
        return tdcopier.copy(value, device)
    moved = oracle(value, device)
    torch.accelerator.synchronize()
    return moved


def _copied_back(side: Side, value: Any, rng: Random) -> None:
    """Writes each leaf into the leaf of the source that it came from."""
    with torch.no_grad():
        for leaf, destination in zip(tensors_in(value), tensors_in(side.source), strict=False):
            if leaf.shape == destination.shape:
                destination.copy_(leaf)


def _differentiated(side: Side, value: Any, rng: Random) -> Any:
    """Takes gradients through leaves while another is written, which must not invalidate them."""
    leaves = [leaf for leaf in _plain(tensors_in(value)) if leaf.is_floating_point()]
    weights = [torch.ones_like(leaf, requires_grad=True) for leaf in leaves]
    products = [(leaf * weight).sum() for leaf, weight in zip(leaves[1:], weights[1:], strict=True)]
    with torch.no_grad():
        leaves[0].add_(1)
    torch.stack(products).sum().backward()
    return [weight.grad for weight in weights] + [
        leaf.grad for leaf in tensors_in(side.source) if leaf.is_leaf
    ]


def _sent(side: Side, value: Any, rng: Random) -> Any:
    # A tensor on a device is sent as a handle of its allocation, which the result shares.
    return echo(value) if all(map(_can_be_shared, tensors_in(value))) else None


WHOLE: dict[str, Use] = {
    "torch.save": lambda _side, value, _rng: _saved(value),
    "pickle": lambda _side, value, _rng: pickle.loads(pickle.dumps(value)),
    "cloudpickle": lambda _side, value, _rng: pickle.loads(cloudpickle.dumps(value)),
    "deepcopy": lambda _side, value, _rng: copy.deepcopy(value),
    "shallow copy": lambda _side, value, _rng: copy.copy(value),
    "repr": lambda _side, value, _rng: without_addresses(repr(value)),
    "move again": _moved_again,
    "copy back": _copied_back,
    "take gradients": _differentiated,
    "send to another process": _sent,
}

# ---- one leaf ------------------------------------------------------------------------------------


def _grown(leaf: torch.Tensor, rng: Random) -> Any:
    if not _to_host(leaf):
        # On a device the leaves of a chunk share its storage: a leaf that grows overwrites others.
        return None
    if leaf.is_shared() or torch._C._is_cow_tensor(leaf):
        return None  # torch crashes if memory that other processes share grows, or copied-on-write
    if leaf.is_inference() and not torch.is_inference_mode_enabled():
        return None  # torch changes the size before it refuses, and leaves new bytes as they are
    if not leaf.untyped_storage().resizable():
        return "refused"  # torch changes the shape before it refuses
    leaf.resize_(rng.choice([0, leaf.numel(), 4 * leaf.numel() + 4]))
    if crashes_torch(leaf):
        leaf.fill_(1)  # values: torch leaves new ones as the memory was
        return None
    every_byte = torch.empty(0, dtype=torch.uint8).set_(leaf.untyped_storage())
    every_byte.fill_(1)  # torch cannot fill every dtype
    return None


def _written(leaf: torch.Tensor, rng: Random) -> None:
    how = rng.choice(["add_", "mul_", "neg_", "zero_", "fill_", "logical_not_", "flip", "row"])
    if how == "row":
        leaf[rng.randrange(len(leaf))] = 1
    elif how == "flip":
        leaf.copy_(leaf.flip(0))
    else:
        getattr(leaf, how)(*[3] * (how in ("add_", "mul_", "fill_")))


def _viewed(leaf: torch.Tensor, rng: Random) -> torch.Tensor:
    how = rng.choice(["T", "flat", "bytes", "row", "as_strided", "detach"])
    if how == "T":
        return leaf.permute(*reversed(range(leaf.dim())))
    if how == "flat":
        return leaf.view(-1)
    if how == "bytes" and not crashes_torch(leaf):
        return leaf.view(torch.uint8)
    if how == "row":
        return leaf[rng.randrange(len(leaf))]
    return leaf.detach() if how == "detach" else leaf.as_strided(leaf.shape, leaf.stride())


def _set_data(leaf: torch.Tensor, rng: Random) -> None:
    if type(leaf) is not torch.Tensor or leaf.is_nested:
        return  # torch then keeps a part of what it was
    leaf.data = torch.zeros(rng.randrange(3), dtype=leaf.dtype, device=leaf.device)


LEAF: dict[str, Callable[[torch.Tensor, Random], Any]] = {
    "write to a leaf": _written,
    "write to a leaf in no_grad": lambda leaf, rng: torch.no_grad()(_written)(leaf, rng),
    "grow a leaf": _grown,
    "save a leaf": lambda leaf, _rng: _saved(leaf),
    "pickle a leaf": lambda leaf, _rng: pickle.loads(pickle.dumps(leaf)),
    "deepcopy a leaf": lambda leaf, _rng: copy.deepcopy(leaf),
    "send a leaf": lambda leaf, _rng: echo(leaf) if _can_be_shared(leaf) else None,
    "view a leaf": _viewed,
    "set the data of a leaf": _set_data,
    "squeeze a leaf in place": lambda leaf, _rng: leaf.unsqueeze_(0).transpose_(0, -1),
    "share a leaf": lambda leaf, _rng: (
        leaf.share_memory_().is_shared() if _can_be_shared(leaf) else None
    ),
    "numpy of a leaf": lambda leaf, _rng: leaf.numpy(),
    "require grad of a leaf": lambda leaf, rng: leaf.requires_grad_(rng.random() < 0.7) and None,
    "name a leaf": lambda leaf, _rng: setattr(leaf, "note", "mine"),
}

CHANGING_THE_OBJECT = (
    "grow a leaf",
    "set the data of a leaf",
    "squeeze a leaf in place",
    "require grad of a leaf",
    "name a leaf",
)
"""Not for unbatched tensors: `.to` wraps the same tensor anew, or not, depending on the device."""


def leaves_for(use: str, value: Any) -> list[torch.Tensor]:
    """Returns the leaves of a value that this use is for."""
    return [
        leaf
        for leaf in tensors_in(value)
        if not (use in CHANGING_THE_OBJECT and isinstance(leaf, UnbatchedTensor))
    ]
