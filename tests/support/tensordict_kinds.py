"""Everything that a TensorDict can hold or be: how to make it, and how its leaves are copied.

Data for each direction, no tests.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack
from tensordict_classes import Episode, Frames
from tensordict_kind import Counts, TdKind, anywhere, packed
from tensordict_kinds_of_classes import CLASSES, NON_TENSOR, TENSORCLASSES
from tensordict_kinds_of_leaves import LEAVES, flat, ramp
from tensordict_kinds_of_memory import MEMORY
from tensordict_kinds_of_mixtures import MIXTURES

__all__ = ["NOT_MADE", "TD_KINDS", "TdKind"]

# ---- dict-backed ---------------------------------------------------------------------------------


def _nested(device: str) -> TensorDict:
    """Makes nodes that each have a batch size and names of their own."""
    deep = TensorDict({"b": ramp(device, 2, 3, 1)}, [2, 3, 1], device=device)
    inner = TensorDict({"a": ramp(device, 2, 3, 4), "deep": deep}, [2, 3], device=device)
    return TensorDict({"a": ramp(device, 2), "inner": inner}, [2], device=device)


def _named(device: str) -> TensorDict:
    inner = TensorDict({"a": ramp(device, 2, 3)}, [2, 3], names=["time", "x"], device=device)
    unnamed = TensorDict({"a": ramp(device, 2, 3)}, [2], device=device)
    data = {"inner": inner, "unnamed": unnamed, "a": ramp(device, 2, 5)}
    return TensorDict(data, [2], names=["time"], device=device)


def _names_in_the_nested_one_only(device: str) -> TensorDict:
    inner = TensorDict({"a": ramp(device, 2, 3)}, [2, 3], names=[None, "x"], device=device)
    return TensorDict({"inner": inner}, [2], device=device)


def _device_only_within(device: str) -> TensorDict:
    return TensorDict({"a": ramp(device, 2), "inner": flat(device)}, [2])


def _device_not_within(device: str) -> TensorDict:
    td = TensorDict({"a": ramp(device, 2), "inner": flat(device)}, [2], device=device)
    td.get("inner").clear_device_()
    return td


def _locked_within(device: str) -> TensorDict:
    return TensorDict({"a": ramp(device, 2), "inner": flat(device).lock_()}, [2], device=device)


def _with_cached_keys(device: str) -> TensorDict:
    td = _nested(device).lock_()
    list(td.keys(True, True))
    td.flatten_keys(".")
    return td


def _same_twice(device: str) -> TensorDict:
    leaf, inner = ramp(device, 2, 3), flat(device)
    return TensorDict({"a": leaf, "b": leaf, "x": inner, "y": inner}, [2], device=device)


def _deep(device: str) -> TensorDict:
    td = TensorDict({"leaf": ramp(device, 2)}, [2], device=device)
    for _ in range(30):
        td = TensorDict({"leaf": ramp(device, 2), "next": td}, [2], device=device)
    return td


def _many(device: str) -> TensorDict:
    return TensorDict(
        {f"n{i}": {f"a{j}": ramp(device, 2, j % 5 + 1) for j in range(60)} for i in range(5)},
        [2],
        device=device,
    )


def _large(device: str) -> TensorDict:
    data = {"small": ramp(device, 3), "large": ramp(device, 65537), "exactly": ramp(device, 65536)}
    return TensorDict(data, [], device=device)


def _on_both(device: str) -> TensorDict:
    return TensorDict({"there": ramp(device, 2), "host": ramp("cpu", 2, 3)}, [2])


def _odd_keys(device: str) -> TensorDict:
    names = ["z", "a", "with space", "", "keys", "_tensordict", "a.b", "0", "\u00fc"]
    return TensorDict({name: ramp(device, 2) for name in names}, [2], device=device)


_DICT_BACKED = {
    "flat": anywhere(flat, packed(2)),
    "no batch, 0-dim leaf": anywhere(
        lambda d: TensorDict({"a": torch.tensor(3.5).to(d)}, device=d), packed(1)
    ),
    "nothing in it": anywhere(lambda d: TensorDict({}, [2], device=d), Counts()),
    "nothing in it, device None": anywhere(lambda _: TensorDict({}, [2]), Counts()),
    "nothing in it, locked, with names": anywhere(
        lambda d: TensorDict({}, [2], names=["t"], device=d).lock_(), Counts()
    ),
    "empty batch": anywhere(
        lambda d: TensorDict({"a": ramp(d, 0, 3), "b": ramp(d, 0)}, [0], device=d), packed(2)
    ),
    "empty nested ones": anywhere(
        lambda d: TensorDict({"x": {}, "y": {"z": {}}, "a": ramp(d, 2)}, [2], device=d), packed(1)
    ),
    "nested, batch sizes of their own": anywhere(_nested, packed(3)),
    "thirty deep": anywhere(_deep, packed(31)),
    "names": anywhere(_named, packed(3)),
    "names in the nested one only": anywhere(_names_in_the_nested_one_only, packed(1)),
    "device None": anywhere(lambda d: TensorDict({"a": ramp(d, 2)}, [2]), packed(1)),
    "device None, nested with a device": anywhere(_device_only_within, packed(3)),
    "device, nested without": anywhere(_device_not_within, packed(3)),
    "device None, leaves on both": TdKind(_on_both, packed(2), packed(1, reused=1), packed(2)),
    "device None, on the target already": anywhere(
        lambda d: TensorDict({"a": ramp(d, 2), "b": {"c": ramp(d, 3)}}, []),
        Counts(reused=2),
        on_target=True,
    ),
    "on the target already": anywhere(flat, Counts(reused=1), on_target=True),
    "keys of every sort, in an order of their own": anywhere(_odd_keys, packed(9)),
    "same leaf and same node twice": anywhere(_same_twice, packed(6)),
    "views of one storage": anywhere(
        lambda d: TensorDict(
            {"a": (base := ramp(d, 2, 8))[:, :4], "b": base[:, 2:]}, [2], device=d
        ),
        packed(2),
    ),
    "locked": anywhere(lambda d: _nested(d).lock_(), packed(3)),
    "locked, keys in its cache": anywhere(_with_cached_keys, packed(3)),
    "locked within an unlocked one": anywhere(_locked_within, packed(3)),
    "subclass": anywhere(lambda d: Episode({"a": ramp(d, 2)}, [2], device=d), packed(1)),
    "subclass within a plain one": anywhere(
        lambda d: TensorDict({"x": Episode({"a": ramp(d, 2)}, [2], device=d)}, [2], device=d),
        packed(1),
    ),
    "subclass with a plain one within": anywhere(
        lambda d: Episode({"x": flat(d), "a": ramp(d, 2)}, [2], device=d).lock_(), packed(3)
    ),
    "300 leaves": anywhere(_many, packed(300), large=True),
    "leaves around 256 KiB": anywhere(_large, packed(2, alone=1), large=True),
}

# ---- views ---------------------------------------------------------------------------------------

_VIEWS = {
    "indexed by a number": anywhere(lambda d: _nested(d)[1], packed(3)),
    "indexed by a slice": anywhere(lambda d: _nested(d)[:1], packed(3)),
    "indexed by `None`": anywhere(lambda d: _nested(d)[..., None], packed(3)),
    "indexed by a tensor": anywhere(lambda d: _nested(d)[torch.tensor([1, 0])], packed(3)),
    "expanded": anywhere(lambda d: flat(d).expand(3, 2), packed(2)),
    "transposed": anywhere(lambda d: _nested(d).get("inner").exclude("deep").transpose(0, 1),
                           packed(1)),
    "selected": anywhere(lambda d: _nested(d).select(("inner", "a")), packed(1)),
    "flattened keys": anywhere(lambda d: _nested(d).flatten_keys("."), packed(3)),
    "shallow copy": anywhere(lambda d: _nested(d).clone(recurse=False), packed(3)),
}  # fmt: skip

# ---- lazy stacks ---------------------------------------------------------------------------------


def _member(device: str, columns: int = 3, **more: Any) -> TensorDict:
    return TensorDict({"a": ramp(device, 2, columns), **more}, [2], device=device)


def _lazy(device: str, stack_dim: int, *, count: int = 3) -> LazyStackedTensorDict:
    members = [_member(device, x=TensorDict({"b": ramp(device, 2)}, [2])) for _ in range(count)]
    return lazy_stack(members, stack_dim)


def _ragged(device: str) -> LazyStackedTensorDict:
    return lazy_stack([_member(device, columns) for columns in (1, 4, 2)], 0)


def _exclusive(device: str) -> LazyStackedTensorDict:
    return lazy_stack([_member(device, b=ramp(device, 2)), _member(device, c=ramp(device, 2, 2))])


def _lazy_of_lazy(device: str) -> LazyStackedTensorDict:
    return lazy_stack([lazy_stack([_member(device, i), _member(device, 5)], 1) for i in (1, 2)], 0)


def _lazy_within(device: str) -> TensorDict:
    data = {"before": ramp(device, 3), "stack": _ragged(device), "after": ramp(device, 3)}
    return TensorDict(data, [3], device=device)


def _lazy_of_mixed_locks(device: str) -> LazyStackedTensorDict:
    return lazy_stack([_member(device).lock_(), _member(device)])


def _lazy_of_tensorclasses(device: str) -> LazyStackedTensorDict:
    frames = [
        Frames(ramp(device, 2, i), label=str(i), batch_size=[2], device=device) for i in (1, 2)
    ]
    return lazy_stack(frames)


def _lazy_with_names(device: str) -> LazyStackedTensorDict:
    stack = _lazy(device, 1)
    stack.names = ["x", "time"]
    return stack


_LAZY = {
    "lazy stack": anywhere(lambda d: _lazy(d, 0), packed(6)),
    "lazy stack along 1": anywhere(lambda d: _lazy(d, 1), packed(6)),
    "lazy stack along -1": anywhere(lambda d: _lazy(d, -1), packed(6)),
    "lazy stack of one": anywhere(lambda d: _lazy(d, 0, count=1), packed(2)),
    "lazy stack of the same one twice": anywhere(
        lambda d: LazyStackedTensorDict(*[_member(d)] * 2), packed(2)
    ),
    "lazy stack, locked": anywhere(lambda d: _lazy(d, 0).lock_(), packed(6)),
    "lazy stack, names": anywhere(_lazy_with_names, packed(6)),
    "lazy stack, ragged": anywhere(_ragged, packed(3)),
    "lazy stack, ragged, locked": anywhere(lambda d: _ragged(d).lock_(), packed(3)),
    "lazy stack, keys of their own": anywhere(_exclusive, packed(4)),
    "lazy stack of lazy stacks": anywhere(_lazy_of_lazy, packed(4)),
    "lazy stack within": anywhere(_lazy_within, packed(5)),
    "lazy stack within, locked": anywhere(lambda d: _lazy_within(d).lock_(), packed(5)),
    "lazy stack, one member locked": anywhere(_lazy_of_mixed_locks, packed(2)),
    "lazy stack of subclasses": anywhere(
        lambda d: lazy_stack([Episode({"a": ramp(d, 2)}, [2], device=d) for _ in range(2)]),
        packed(2),
    ),
    "lazy stack of tensorclasses": anywhere(_lazy_of_tensorclasses, packed(2, opaque=2)),
    "lazy stack with text": anywhere(
        lambda d: lazy_stack([_member(d, text=name) for name in ("x", "y")]), packed(2, opaque=2)
    ),
    "lazy stack, indexed": anywhere(lambda d: _lazy(d, 0)[1:], packed(4)),
    "lazy stack, of members of nothing": anywhere(
        lambda d: lazy_stack([TensorDict({}, [2], device=d) for _ in range(2)]), Counts()
    ),
}

# ---- all -----------------------------------------------------------------------------------------

TD_KINDS: dict[str, TdKind] = (
    _DICT_BACKED
    | _VIEWS
    | _LAZY
    | TENSORCLASSES
    | NON_TENSOR
    | CLASSES
    | LEAVES
    | MEMORY
    | MIXTURES
)

NOT_MADE = {
    "TensorDictStore, LazyStackedTensorDictStore, _StoreStackElementView": (
        "their entries live on a Redis server"
    ),
    "a lazy stack of nothing": "tensordict makes one only by indexing, and cannot move it",
}
"""Kinds that the catalogue does not contain, and the reasons."""
