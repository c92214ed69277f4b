"""TensorDicts in TensorDicts of other classes, and classes that change how they are moved."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from catalogue import ramp
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    TensorClass,
    TensorDict,
    TensorDictParams,
    UnbatchedTensor,
    lazy_stack,
)
from tensordict_classes import (
    Batches,
    Checked,
    Frames,
    OwnConstructor,
    OwnSet,
    OwnTo,
    OwnToClass,
    State,
    Table,
    Text,
)
from tensordict_kind import TdKind, anywhere, delegated, host_only, packed
from tensordict_kinds_of_classes import NON_TENSOR
from tensordict_kinds_of_leaves import flat


def _params(device: str) -> TensorDictParams:
    data = TensorDict({"w": torch.nn.Parameter(ramp(device, 2, 3))}, [2], device=device)
    return TensorDictParams(data)


def _sub(device: str) -> Any:
    source = TensorDict({"a": ramp(device, 3, 2)}, [3], device=device)
    return source._get_sub_tensordict(slice(0, 2))


def _consolidated(device: str) -> TensorDict:
    return flat(device).consolidate()


def _checked(device: str) -> Checked:
    return Checked(ramp(device, 2, 3), batch_size=[2], device=device)


def _own_to(device: str) -> OwnTo:
    return OwnTo({"a": ramp(device, 2)}, [2], device=device)


def _own_to_class(device: str) -> OwnToClass:
    return OwnToClass(ramp(device, 2), batch_size=[2], device=device)


def _named_around(make: Callable[[str], Any], device: str) -> TensorDict:
    """Wraps it in a TensorDict with names and plain leaves."""
    data = {"before": ramp(device, 2), "odd": make(device), "after": ramp(device, 2)}
    names = None if make is _sub else ["time"]  # a sub-tensordict does not allow setting names
    return TensorDict(data, [2], names=names, device=device)


def _stacked(make: Callable[[str], Any], device: str) -> LazyStackedTensorDict:
    return lazy_stack([make(device), make(device)])


MOVED_BY_ITSELF: dict[str, Callable[[str], Any]] = {
    "parameters": _params,
    "sub-tensordict": _sub,
    "consolidated one": _consolidated,
    "tensorclass with `__post_init__`": _checked,
    "subclass with a `.to` of its own": _own_to,
    "tensorclass with a `.to` of its own": _own_to_class,
}
"""Kinds that are delegated to their own `.to`, at least when they are the root."""

_AROUND: dict[str, tuple[TdKind, ...]] = {}
for _name, _make in MOVED_BY_ITSELF.items():
    _inner = packed(2) if _make is _consolidated else delegated()
    _one = _inner._replace(packed=_inner.packed + 2)
    if isinstance(_make("cpu"), TensorClass):  # its stack is a tensorclass too
        _two = _inner
    else:
        _two = type(_inner)(*[2 * each for each in _inner])
    _AROUND[_name] = (
        anywhere(lambda d, make=_make: _named_around(make, d), _one),
        anywhere(lambda d, make=_make: _named_around(make, d).lock_(), _one),
        anywhere(lambda d, make=_make: _stacked(make, d), _two),
    )

_MIXED = {
    f"{name} {where}": kind
    for name, kinds in _AROUND.items()
    for where, kind in zip(("in names", "in names, locked", "in a lazy stack"), kinds, strict=True)
}
del _MIXED["sub-tensordict in names, locked"]  # cannot be made

# ---- classes that change how they are moved ------------------------------------------------------


def _hook_out(stack: Any) -> Any:
    return stack + 1


def _with_hook(device: str) -> LazyStackedTensorDict:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*hook_out=", DeprecationWarning)
        return LazyStackedTensorDict(flat(device), flat(device), hook_out=_hook_out)


def _tagged(device: str) -> TensorDict:
    """Returns a TensorDict with an attribute that no other has."""
    td = flat(device)
    td.tag = "mine"
    return td


def _unbatched_stack(device: str) -> LazyStackedTensorDict:
    members = [
        TensorDict({"a": ramp(device, 2), "t": UnbatchedTensor(ramp(device, 7))}, [2])
        for _ in range(2)
    ]
    return lazy_stack(members)


def _with(value: Any, device: str) -> TensorDict:
    return TensorDict({"a": ramp(device, 2), "value": value}, [2], device=device)


_ODD = {
    "subclass with a `.to` of its own": anywhere(_own_to, delegated()),
    "subclass with a `_set_str` of its own": anywhere(
        lambda d: OwnSet({"a": ramp(d, 2)}, [2], device=d), delegated()
    ),
    "subclass with a constructor of its own": anywhere(lambda d: OwnConstructor(3, d), packed(1)),
    "tensorclass with a `.to` of its own": anywhere(_own_to_class, delegated()),
    "subclass of NonTensorData": anywhere(
        lambda d: _with(Text(data="word", batch_size=[2]), d), delegated(1, packed=1)
    ),
    "subclass of UnbatchedTensor": anywhere(
        lambda d: _with(Table(ramp(d, 7)), d), packed(2)
    ),
    "subclass of LazyStackedTensorDict": anywhere(
        lambda d: Batches(flat(d), flat(d)), delegated()
    ),
    "lazy stack with a hook": anywhere(_with_hook, delegated()),
    "an attribute of its own": anywhere(_tagged, packed(2)),
    "unbatched tensors in a lazy stack": anywhere(_unbatched_stack, packed(4)),
    "unbatched tensor that requires grad": anywhere(
        lambda d: _with(UnbatchedTensor(ramp(d, 7).requires_grad_()), d),
        packed(1, delegated=1) if UnbatchedTensor(ramp("cpu").requires_grad_()).requires_grad
        else packed(2),  # before torch 2.14 the wrapper loses the gradient
    ),
    "tensorclass of parameters": anywhere(
        lambda d: Frames._from_tensordict(
            TensorDictParams(TensorDict({"pixels": ramp(d, 2)}, [2], device=d))
        ),
        delegated(),
    ),
    "tensorclass of a lazy stack": anywhere(
        lambda d: Frames._from_tensordict(
            lazy_stack([TensorDict({"pixels": ramp(d, i + 1)}, device=d) for i in range(2)])
        ),
        packed(2),
    ),
    "TypedTensorDict of a memory-mapped one": host_only(
        lambda: State.from_tensordict(
            TensorDict({"eta": ramp("cpu", 2), "x": ramp("cpu", 2)}, [2]).memmap_()
        ),
        packed(2),
    ),
    "TypedTensorDict of parameters": anywhere(
        lambda d: State.from_tensordict(
            TensorDictParams(TensorDict({"eta": ramp(d, 2), "x": ramp(d, 2)}, [2], device=d))
        ),
        delegated(),
    ),
    "NonTensorData with names": anywhere(
        lambda d: TensorDict(
            {"v": NonTensorData(data="word", batch_size=[2], names=["time"])},
            [2], names=["time"], device=d,
        ),
        NON_TENSOR["NonTensorData as the root"].h2d,
    ),
}  # fmt: skip

MIXTURES: dict[str, TdKind] = _MIXED | _ODD
