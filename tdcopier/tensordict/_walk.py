"""TensorDicts in the walk: taken apart into one flat list of leaves, at any nesting."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, UnbatchedTensor

from tdcopier import _C
from tdcopier._containers.delegated_parts import DelegatedPart
from tdcopier._containers.rule import Place, Refused, Rule
from tdcopier.tensordict import _kinds, _nodes
from tdcopier.tensordict._nodes import Node

Key = tuple[str, ...]


class Rows(Protocol):
    """Selects rows of each node, if not all rows are wanted."""

    def shape_of(self, value: Any) -> tuple[torch.Size, list[str | None] | None]:
        """Return the batch size and the names of a node of the result."""

    def read(self, value: Any) -> Any:
        """Return the rows of a part that is not taken apart."""


class _Taking:
    """The state of one walk: the leaves found so far."""

    __slots__ = ("device", "devices", "keys", "leaves", "prefix", "rows")

    def __init__(self, device: torch.device | None, named: bool, rows: Rows | None) -> None:
        self.device = device
        """The target; None to take the leaves wherever they are."""
        self.rows = rows
        """None to take all rows."""
        self.devices: set[torch.device | None] = set()
        """Of the nodes, if rows are taken."""
        self.leaves: list[Any] = []
        self.keys: list[Key] | None = [] if named else None
        """Keys of the leaves; None if they are not wanted."""
        self.prefix: Key = ()

    def add(self, leaf: Any) -> None:
        self.leaves.append(leaf)
        if self.keys is not None:
            self.keys.append(self.prefix)


Taker = Callable[[Any, _Taking], "Node | None"]
"""Takes a value of some class apart. Returns None, and takes nothing, if that is not possible."""

Taken = tuple[list[Any], Any, "list[Any] | None"]
"""Leaves, the context to build the result, and the leaves' keys if they are wanted."""


def flatten(value: Any, device: torch.device | None, named: bool) -> Taken | None:
    """Take a collection apart.

    Returns:
        None if `value` is delegated to its own ``.to``: it is on the device, or of a kind that
        cannot be taken apart.

    Raises:
        Refused: it is of such a kind, and no device is given.
    """
    inside = _inside(value)
    if device is not None and _is_left(inside, device):
        return None
    walk = _Taking(device, named, None)
    node = _take(value, walk)
    if node is None:
        if device is None:
            raise refused(value)
        return None
    return walk.leaves, (node, device, inside.is_locked), _names_of(walk)


def refused(value: Any) -> Refused:
    """Return the error about a collection of a kind that cannot be taken apart."""
    return Refused(
        f"is a {type(value).__qualname__}, whose leaves are not in memory of its own: make it a "
        "TensorDict with to_tensordict()"
    )


def is_taken_apart(value: Any, device: torch.device) -> bool:
    """Return whether a copy takes a collection apart, rather than to delegate it."""
    if type(value) is TensorDict:
        return not _is_left(value, device)
    return flatten(value, device, False) is not None


def _is_left(inside: Any, device: torch.device) -> bool:
    """Return whether ``.to`` returns the value itself, or copies its one consolidated storage."""
    return inside.device == device or hasattr(inside, "_consolidated")


def _names_of(walk: _Taking) -> list[Any] | None:
    if walk.keys is None:
        return None
    return [key[0] if len(key) == 1 else key for key in walk.keys]


def flatten_rows(value: Any, device: torch.device, rows: Rows, named: bool = False) -> Taken | None:
    """Take a collection apart to read rows; return None to leave it to its own indexing."""
    if type(value) is not TensorDict and not _kinds.is_plain_tensorclass(type(value)):
        return None
    walk = _Taking(device, named, rows)
    node = _take(value, walk)
    if _inside(value).device == device and walk.devices != {device}:
        return None  # `.to` then leaves nodes without a device as they are
    return None if node is None else (walk.leaves, (node, device, False), _names_of(walk))


def unflatten(leaves: list[Any], context: tuple[Node, torch.device, bool]) -> Any:
    """Build the collection with the leaves that have arrived, and lock it if it was locked."""
    node, device, is_locked = context
    made = node.build(iter(leaves), device)
    if is_locked:
        _inside(made).lock_()
    return made


_get = object.__getattribute__


def state_of(value: Any) -> dict[str, Any]:
    """Return a tensorclass's attributes; its own attribute access looks at its fields first."""
    state: dict[str, Any] = _get(value, "__dict__")
    return state


def _inside(value: Any) -> Any:
    """Return the TensorDict that a tensorclass wraps, whose fields may shadow its methods."""
    inside = value
    while type(inside) is not TensorDict and getattr(type(inside), "_is_tensorclass", False):
        inside = state_of(inside)["_tensordict"]
    return inside


def _place_of_data(collection: Any, name: str | int | Key) -> Place:
    """Return the place of non-tensor data in a TensorDict, or in a member of a lazy stack.

    `name` is an index for a member of a lazy stack that is taken apart alone.
    """
    keys = name if isinstance(name, tuple) else (str(name),)
    if not keys:
        raise Refused("it is the destination itself: give a TensorDict that holds it")
    holder = _content(collection)
    for key in keys[:-1]:
        holder = _content(_entry(holder, key))
    if holder.is_locked:
        raise Refused(f"it is in a locked {type(holder).__qualname__}: call unlock_() first")
    last = keys[-1]
    if len(keys) == 1 and holder is not collection:
        fields = vars(collection).get("_non_tensordict", {})
        if last in fields:  # of a tensorclass: kept beside the TensorDict in it
            return Place(fields, last, lambda value: fields.__setitem__(last, value))
    data = _entry(holder, last)

    def put(value: Any) -> None:
        if type(data) is NonTensorData and type(holder) not in _kinds.LAZY_STACKS:
            holder.set_non_tensor(last, value)
            return
        made = type(data)(data=value, batch_size=data.batch_size, device=data.device)
        if type(holder) in _kinds.LAZY_STACKS:
            holder.tensordicts[int(last)] = made
        else:
            holder.set(last, made)

    return Place(holder, last, put)


def _entry(holder: Any, key: str) -> Any:
    return (
        holder.tensordicts[int(key)]
        if type(holder) in _kinds.LAZY_STACKS
        else holder._tensordict[key]
    )


def _content(value: Any) -> Any:
    """Return the TensorDict or lazy stack that a tensorclass or a typed TensorDict wraps."""
    while True:
        if _kinds.TypedTensorDict is not None and isinstance(value, _kinds.TypedTensorDict):
            value = value._source
        elif getattr(type(value), "_is_tensorclass", False):
            value = state_of(value)["_tensordict"]
        else:
            return value


def flatten_entry(
    value: Any, device: torch.device, named: bool, batch_size: torch.Size
) -> Taken | None:
    """Take apart an entry that is neither a plain tensor nor an instance of TensorDict itself.

    Returns:
        None for a tensor. An entry that cannot be taken apart becomes a `DelegatedCollection`.
    """
    if _kinds.is_leaf(type(value)):
        return None
    walk = _Taking(device, named, None)
    node = _take(value, walk)
    if node is None:
        node = _leave(value, walk, batch_size)
    return walk.leaves, (node, device, False), _names_of(walk)


def rule_of(cls: type) -> Rule:
    """Return the walk's rule for a class of TensorDicts or a tensorclass."""
    rule = Rule(flatten, unflatten, _C.Step.NESTED_KEY, by_target=True, place=_place_of_data)
    if not _nodes.IS_KNOWN_LAYOUT:
        return rule
    if cls is TensorDict:
        return rule._replace(flatten_entry=flatten_entry)
    if _kinds.is_plain_tensorclass(cls):
        return rule._replace(keeps_none=_nodes.KEEPS_NONE_FIELDS)
    return rule


class DelegatedCollection(DelegatedPart):
    """A nested collection that its own code moves, as it would in any TensorDict."""

    def __init__(self, value: Any, batch_size: torch.Size) -> None:
        """Wrap a value; `batch_size` is that of the TensorDict that contains it."""
        super().__init__(value)
        self._batch_size = batch_size

    def to(self, device: torch.device) -> Any:
        parent = TensorDict._new_unsafe({"entry": self.value}, batch_size=self._batch_size)
        return _own_to(parent, device)._tensordict["entry"]


_own_to: Any = TensorDictBase.to  # tensordict's own, even if the backend replaces it later


# ---- by class ------------------------------------------------------------------------------------

_takers: weakref.WeakKeyDictionary[type, Taker] = weakref.WeakKeyDictionary()


def _take(value: Any, walk: _Taking) -> Node | None:
    return _taker_for(type(value), walk)(value, walk)


def leaves_of(value: Any) -> list[Any] | None:
    """Return the leaves of a value wherever they are; None if it cannot be taken apart."""
    walk = _Taking(None, False, None)
    return None if _take(value, walk) is None else walk.leaves


def taker_of_any(cls: type) -> Taker:
    """Return the function that takes values of a class apart."""
    return _takers.get(cls) or _find_taker(cls)


def _taker_for(cls: type, walk: _Taking) -> Taker:
    if cls is TensorDict:
        return _take_exact
    taker = taker_of_any(cls)
    return taker if walk.rows is None or taker in _TAKERS_OF_ROWS else _take_nothing


def _find_taker(cls: type) -> Taker:
    _takers[cls] = taker = _taker_of(cls)
    return taker


def _taker_of(cls: type) -> Taker:
    if _kinds.is_leaf(cls):
        return _take_leaf
    if cls in _kinds.LAZY_STACKS:
        return take_stack
    if cls in _kinds.NON_TENSOR_CLASSES:
        return take_data
    if _kinds.TypedTensorDict is not None and issubclass(cls, _kinds.TypedTensorDict):
        return take_typed
    if _kinds.is_plain_tensorclass(cls):
        return take_tensorclass
    if _kinds.is_plain_subclass(cls):
        return take_subclass
    if issubclass(cls, UnbatchedTensor):
        return _take_unbatched
    return _take_nothing


def _take_nothing(value: Any, walk: _Taking) -> None:
    return None


def _take_leaf(value: Any, walk: _Taking) -> Node:
    walk.add(value)
    return _nodes.WHOLE


def _take_exact(value: Any, walk: _Taking) -> Node:
    """Leave a TensorDict in a collection of another class to the walk, if that knows it."""
    if walk.rows is not None or walk.device is None or not _nodes.IS_KNOWN_LAYOUT:
        return _take_dense(value, walk)
    walk.add(value)
    return _nodes.WHOLE


def _take_dense(value: Any, walk: _Taking) -> _nodes.Flat | _nodes.Dense:
    """Take a TensorDict. One call per node, so the nesting may be as deep as ``.to`` allows."""
    entries: dict[str, Any] = value._tensordict
    names, batch_size = value._td_dim_names, value._batch_size
    if walk.rows is not None:
        batch_size, names = walk.rows.shape_of(value)
        walk.devices.add(value._device)
    if walk.device is not None and _C.is_dict_of_tensors(entries):
        walk.add(entries)  # the walk takes and rebuilds the whole dict in one step
        return _nodes.Flat(batch_size, names)
    keys, values, prefix = tuple(entries), list(entries.values()), walk.prefix
    others = _take_leaves(keys, values, walk)
    nested = []
    for index in others:
        walk.prefix = (*prefix, keys[index])
        each = values[index]
        node = _taker_for(type(each), walk)(each, walk)
        nested.append((index, _leave(each, walk, batch_size) if node is None else node))
    walk.prefix = prefix
    return _nodes.Dense(keys, len(values) - len(others), nested, batch_size, names)


def _take_leaves(keys: tuple[str, ...], values: list[Any], walk: _Taking) -> list[int]:
    """Take all leaves first, so that they form one range; return the indices of other entries."""
    others = []
    for index, each in enumerate(values):
        cls = type(each)
        if cls not in _kinds.PLAIN_LEAVES and not _kinds.is_leaf(cls):
            others.append(index)
            continue
        walk.leaves.append(each)
        if walk.keys is not None:
            walk.keys.append((*walk.prefix, keys[index]))
    return others


def _leave(value: Any, walk: _Taking, batch_size: torch.Size) -> Node:
    """Delegate a nested value to its own ``.to``, or to its own indexing of rows."""
    if walk.rows is not None and isinstance(value, UnbatchedTensor):
        value = _unbatched_for_rows(value, walk, batch_size)
    elif walk.rows is not None:
        value = walk.rows.read(value)
        batch_size = _inside(value).batch_size
    if walk.device is None:
        raise Refused(
            f"has a {type(value).__qualname__} at {walk.prefix}, whose leaves are not in memory of "
            "its own: make it a TensorDict with to_tensordict()"
        )
    walk.add(DelegatedCollection(value, batch_size))
    return _nodes.WHOLE


def _unbatched_for_rows(value: Any, walk: _Taking, batch_size: torch.Size) -> Any:
    """Return a tensor that belongs to the whole batch, so to any rows of it; in new memory."""
    whole = value._base_tensor()
    made = type(value)(whole.clone() if whole.device == walk.device else whole)
    made.batch_size = batch_size
    return made


def take_subclass(value: Any, walk: _Taking) -> Node:
    names = value.names if value._has_names() else None
    shell = value.empty(batch_size=None, device=None, names=names)
    return _nodes.Subclass(shell, _take_dense(value, walk))


def take_stack(value: Any, walk: _Taking) -> Node | None:
    members = value.tensordicts
    if not members or has_hooks(value):
        return None
    prefix = walk.prefix
    nodes = []
    for index, member in enumerate(members):
        walk.prefix = (*prefix, str(index))
        node = _take(member, walk)
        if node is None:
            node = _leave(member, walk, _inside(member).batch_size)
        nodes.append(node)
    walk.prefix = prefix
    return _nodes.Stacked(type(value), nodes, value.stack_dim, value._td_dim_name)


def has_hooks(stack: Any) -> bool:
    """Return whether code of the user makes the leaves of a lazy stack."""
    return any(vars(stack).get(name) for name in _HOOKS)


_HOOKS = ("_hook_out", "_hook_in", "hook_out", "hook_in")


def take_tensorclass(value: Any, walk: _Taking) -> Node | None:
    state = state_of(value)
    inner = _take(state["_tensordict"], walk)
    if inner is None:
        if walk.rows is None:
            return None
        inner = _leave(state["_tensordict"], walk, torch.Size())
    others = state["_non_tensordict"]
    if others and walk.rows is None and not _nodes.KEEPS_NONE_FIELDS:
        others = {name: other for name, other in others.items() if other is not None}
    return _nodes.Wrapped(type(value), inner, dict(others))


def take_typed(value: Any, walk: _Taking) -> Node | None:
    inner = _take(value._source, walk)
    return None if inner is None else _nodes.Typed(type(value), inner)


def take_data(value: Any, walk: _Taking) -> Node | None:
    state = state_of(value)
    inner, fields = state["_tensordict"], state["_non_tensordict"]
    if type(inner) is not TensorDict or inner._tensordict or "data" not in fields:
        return None
    names, batch_size = inner._td_dim_names, inner._batch_size
    if walk.rows is not None:
        batch_size, names = walk.rows.shape_of(inner)
        walk.devices.add(inner._device)
    node = _nodes.Data(type(value), fields["data"], batch_size, names)
    walk.add(node)  # opaque to the walk, and counted as such
    return node


def _take_unbatched(value: Any, walk: _Taking) -> Node | None:
    inner = value._base_tensor()
    # From torch 2.14 on, the wrapper requires a gradient even where the tensor in it has lost it.
    if type(inner) is not torch.Tensor or inner.requires_grad or value.requires_grad:
        return None
    walk.add(inner)
    return _nodes.Unbatched(type(value), getattr(value, "_batch_size", None))


_TAKERS_OF_ROWS = frozenset({_take_leaf, _take_exact, take_data, take_tensorclass})
"""For parts whose rows are the rows of their leaves."""
