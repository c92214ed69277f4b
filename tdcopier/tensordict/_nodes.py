"""Nodes: rebuild the parts of a TensorDict from its leaves, which come in order.

`_walk.py` takes TensorDicts apart and chooses the node of each. A node gets device, batch size and
names when it is made. Locks come last, when all nodes exist: `_walk.py` locks the root of what was
locked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

import tensordict
import torch
from tensordict import NonTensorData, TensorDict

from tdcopier._containers.rule import Carrier

Leaves = Iterator[Any]


class Node(Protocol):
    """A part of the result. `build` takes its leaves, and those of nodes in it, from `arrived`."""

    def build(self, arrived: Leaves, device: torch.device) -> Any: ...


class Whole:
    """A leaf, or a value that was moved as one."""

    __slots__ = ()

    def build(self, arrived: Leaves, device: torch.device) -> Any:
        return next(arrived)


WHOLE = Whole()


class Flat:
    """A TensorDict that contains only plain tensors; its dict arrives as one value."""

    __slots__ = ("_batch_size", "_names")

    def __init__(self, batch_size: torch.Size, names: list[str | None] | None) -> None:
        self._batch_size = batch_size
        self._names = names

    def build(self, arrived: Leaves, device: torch.device) -> Any:
        names = None if self._names is None else list(self._names)
        return make_tensordict(next(arrived), self._batch_size, device, names)


class Dense:
    """Any other TensorDict: takes its leaves, then its nested nodes; restores the key order."""

    __slots__ = ("_batch_size", "_keys", "_leaves", "_names", "_nested")

    def __init__(
        self,
        keys: tuple[str, ...],
        leaves: int,
        nested: Sequence[tuple[int, Node]],
        batch_size: torch.Size,
        names: list[str | None] | None,
    ) -> None:
        """Take the nested nodes with the index of their key, in ascending order."""
        self._keys = keys
        self._leaves = leaves
        self._nested = nested
        self._batch_size = batch_size
        self._names = names

    def build(self, arrived: Leaves, device: torch.device) -> Any:
        """Build with one call per node, so the nesting may be as deep as ``.to`` allows."""
        values = list(islice(arrived, self._leaves))
        for index, node in self._nested:
            values.insert(index, node.build(arrived, device))
        entries = dict(zip(self._keys, values, strict=True))
        names = None if self._names is None else list(self._names)
        return make_tensordict(entries, self._batch_size, device, names)


class Subclass:
    """A TensorDict of a user's class, whose own `empty` makes an instance without entries."""

    __slots__ = ("_dense", "_shell")

    def __init__(self, shell: Any, dense: Node) -> None:
        self._shell = shell
        self._dense = dense

    def build(self, arrived: Leaves, device: torch.device) -> Any:
        made = self._shell.empty(device=device)  # a copy, because `build` may be called twice
        made._tensordict.update(self._dense.build(arrived, device)._tensordict)
        return made


class Stacked:
    """A lazy stack of members, each with leaves of its own."""

    __slots__ = ("_cls", "_dim", "_dim_name", "_members")

    def __init__(self, cls: Any, members: list[Node], dim: int, dim_name: str | None) -> None:
        self._cls = cls
        self._members = members
        self._dim = dim
        self._dim_name = dim_name

    def build(self, arrived: Leaves, device: torch.device) -> Any:
        members = [member.build(arrived, device) for member in self._members]
        return self._cls(*members, stack_dim=self._dim, stack_dim_name=self._dim_name)


class Wrapped:
    """A tensorclass: an object with a TensorDict in an attribute."""

    __slots__ = ("_cls", "_inner", "_others")

    def __init__(self, cls: Any, inner: Node, others: dict[str, Any]) -> None:
        self._cls = cls
        self._inner = inner
        self._others = others

    def build(self, arrived: Leaves, device: torch.device) -> Any:
        made = self._cls.__new__(self._cls)
        state = made.__dict__
        state["_tensordict"] = self._inner.build(arrived, device)
        state["_non_tensordict"] = dict(self._others)
        return made


class Typed:
    """A TypedTensorDict: an object with its content in `_source`."""

    __slots__ = ("_cls", "_inner")

    def __init__(self, cls: Any, inner: Node) -> None:
        self._cls = cls
        self._inner = inner

    def build(self, arrived: Leaves, device: torch.device) -> Any:
        made = self._cls.__new__(self._cls)
        made._source = self._inner.build(arrived, device)
        return made


class Data(Carrier):
    """A non-tensor value in its wrapper; it travels as an opaque value, by identity."""

    __slots__ = ("_batch_size", "_cls", "_names", "value")

    def __init__(
        self, cls: Any, data: Any, batch_size: torch.Size, names: list[str | None] | None
    ) -> None:
        self._cls = cls
        self.value = data
        self._batch_size = batch_size
        self._names = names

    def build(self, arrived: Leaves, device: torch.device) -> Any:
        next(arrived)  # this node itself, which the walk counts as opaque
        names = None if self._names is None else list(self._names)
        made = self._cls.__new__(self._cls)
        state = made.__dict__
        state.update(_DATA_STATE)
        state["_tensordict"] = make_tensordict({}, self._batch_size, device, names)
        state["_non_tensordict"] = {**_DATA_FIELDS, "data": self.value}
        return made


class Unbatched:
    """A tensor without the batch dimensions, in its wrapper."""

    __slots__ = ("_batch_size", "_cls")

    def __init__(self, cls: Any, batch_size: torch.Size | None) -> None:
        self._cls = cls
        self._batch_size = batch_size

    def build(self, arrived: Leaves, device: torch.device) -> Any:
        made = self._cls(next(arrived))
        if self._batch_size is not None:
            made.batch_size = self._batch_size
        return made


# ---- attributes of tensordict's objects ----------------------------------------------------------

_A_DEVICE = torch.device("cpu")
_sample: Any = TensorDict._new_unsafe({}, batch_size=torch.Size([]), device=_A_DEVICE)
_KNOWN_STATE = {"_tensordict", "_batch_size", "_device", "_td_dim_names"}
IS_KNOWN_LAYOUT = {name for name in vars(_sample) if name != "_has_mps_val"} == _KNOWN_STATE
"""Whether a TensorDict has the attributes that `make_tensordict` writes."""

_data_sample: Any = NonTensorData(data=None)
_DATA_STATE = {
    name: value
    for name, value in vars(_data_sample).items()
    if name not in ("_tensordict", "_non_tensordict")
}
_DATA_FIELDS = dict(vars(_data_sample)["_non_tensordict"])

KEEPS_NONE_FIELDS = tuple(map(int, str(tensordict.__version__).split(".")[:2])) < (0, 15)
"""Whether a tensorclass field that is None is kept as None, rather than left out."""


def make_tensordict(
    entries: dict[str, Any],
    batch_size: torch.Size,
    device: torch.device,
    names: list[str | None] | None,
) -> Any:
    """Make a TensorDict that owns `entries`, which must fit the batch size and be on the device."""
    if not IS_KNOWN_LAYOUT:  # a later version: use its own constructor, which is slower
        construct: Any = TensorDict._new_unsafe
        return construct(entries, batch_size=batch_size, device=device, names=names, nested=False)
    made = TensorDict.__new__(TensorDict)
    made.__dict__ = {
        "_device": device,
        "_tensordict": entries,
        "_batch_size": batch_size,
        "_td_dim_names": names,
    }
    return made
