"""Asserts that two TensorDicts are the same in everything that users can see, node by node.

Reads the nodes directly, because tensordict's accessors build new tensors, hide the members of a
stack and unwrap values.
"""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import torch
from support import assert_same, is_collection
from tensordict import (
    LazyStackedTensorDict,
    PersistentTensorDict,
    TensorDict,
    TensorDictParams,
    TypedTensorDict,
    UnbatchedTensor,
    is_tensorclass,
)
from tensordict import utils as tensordict_utils

_STATE = (
    "device",
    "batch_size",
    "names",
    "is_locked",
    "stack_dim",  # of a lazy stack
    "custom_op",  # of a lazy view
    "inv_op",
    "custom_op_kwargs",
    "inv_op_kwargs",
    "no_convert",  # of parameters
    "training",
    "_locked_schema",
)
_WITHOUT_COPY = {getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in range(1, 8)}
"""Dtypes that torch can neither copy on the host nor print."""
_ALIGNMENT = 16
"""A leaf's storage in host memory is longer than the leaf by fewer bytes."""
_OWN_FILES = "._metadata"
"""Where a value was memory-mapped; the place of a value decides whether its `.to` keeps this."""
_QUESTIONS = ("is_memmap", "is_shared", "is_consolidated", "is_empty")


class Twins:
    """Pairs the objects of two that were made in the same way, which are not the same objects.

    Where one has an object twice, the other must too.
    """

    def __init__(self) -> None:
        self._pairs: dict[tuple[int, bool], tuple[Any, Any]] = {}
        self._storages: dict[tuple[int, bool], tuple[int, int]] = {}

    def pair(self, got: Any, expected: Any, path: str) -> None:
        if isinstance(expected, UnbatchedTensor):
            return  # whether `.to` wraps it anew depends on the lock and on the device
        for key in ((id(got), False), (id(expected), True)):
            mine, other = self._pairs.setdefault(key, (got, expected))
            assert mine is got, f"{path}: not the object that it is in the other"
            assert other is expected, f"{path}: an object that is another in the other"

    def pair_storages(self, got: torch.Tensor, expected: torch.Tensor, path: str) -> None:
        """Asserts storages of the same size for the same leaves, on the host.

        On a device the leaves of a chunk share its storage.
        """
        if expected.device.type != "cpu" or expected.layout != torch.strided or expected.is_nested:
            return
        mine, other = got.untyped_storage(), expected.untyped_storage()
        assert abs(mine.nbytes() - other.nbytes()) < _ALIGNMENT, (
            f"{path}: a storage of {mine.nbytes()} bytes, not {other.nbytes()}"
        )
        for key in ((mine._cdata, False), (other._cdata, True)):
            found = self._storages.setdefault(key, (mine._cdata, other._cdata))
            assert found == (mine._cdata, other._cdata), f"{path}: shares another's storage"

    def assert_equal(self, got: Any, expected: Any, path: str) -> None:
        if isinstance(expected, np.ndarray):
            assert got.dtype == expected.dtype, f"{path}: dtype is {got.dtype}"
            assert np.array_equal(got, expected, equal_nan=got.dtype.kind == "f"), path
        elif type(expected).__eq__ is not object.__eq__:
            assert got == expected, f"{path}: {got!r} is not {expected!r}"


def assert_same_tensordict(
    got: Any, expected: Any, path: str = "data", twins: Twins | None = None
) -> None:
    """Asserts same classes, state of each node, order of keys, and leaves.

    Python values must be the same objects, or equal ones if `twins` are given. On "meta" values
    are not compared.
    """
    if twins is not None and path.endswith(_OWN_FILES):
        return
    assert type(got) is type(expected), f"{path}: {_name(got)} is not {_name(expected)}"
    if twins is not None and (isinstance(expected, torch.Tensor) or is_collection(expected)):
        twins.pair(got, expected, path)
    if isinstance(expected, torch.Tensor):
        _assert_same_leaf(got, expected, path)
        if twins is not None:
            twins.pair_storages(got, expected, path)
    elif is_collection(expected):
        _assert_same_node(got, expected, path, twins)
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected), f"{path}: {len(got)} items, not {len(expected)}"
        for i, (a, b) in enumerate(zip(got, expected, strict=True)):
            assert_same_tensordict(a, b, f"{path}[{i}]", twins)
    elif isinstance(expected, dict):
        assert list(got) == list(expected), f"{path}: keys {list(got)}, not {list(expected)}"
        for key in expected:
            assert_same_tensordict(got[key], expected[key], f"{path}[{key!r}]", twins)
    elif twins is not None:
        twins.assert_equal(got, expected, path)
    else:
        assert got is expected, f"{path}: {got!r} is not the object {expected!r}"


def children_of(node: Any) -> list[tuple[str, Any]]:
    """Returns the leaves, nodes and Python values directly in a node, with their path parts."""
    if is_tensorclass(node):
        values = node.__dict__["_non_tensordict"]
        return [("._tensordict", node.__dict__["_tensordict"])] + [
            (f".{name}", value) for name, value in values.items() if name != "_is_non_tensor"
        ]
    if isinstance(node, TensorDict):
        return [(f"[{key!r}]", value) for key, value in node._tensordict.items()]
    if isinstance(node, LazyStackedTensorDict):
        return [(f".tensordicts[{i}]", member) for i, member in enumerate(node.tensordicts)]
    if isinstance(node, TensorDictParams):
        return [("._param_td", node._param_td)]
    if isinstance(node, PersistentTensorDict):  # each read makes new tensors
        return [(f"[{key!r}]", node.get(key)) for key in sorted(node.keys())]
    return [("._source", node._source)]  # a TypedTensorDict or a view


def leaves_of(node: Any, path: str = "data") -> list[tuple[str, torch.Tensor]]:
    """Returns the tensors in a node and below with their paths, without those hidden in values."""
    found = []
    for name, child in children_of(node):
        if isinstance(child, torch.Tensor):
            found.append((path + name, child))
        elif is_collection(child):
            found += leaves_of(child, path + name)
    return found


def assert_invariants(made: Any) -> None:
    """Asserts what tensordict does with TD_CHECK_INVARIANTS=1 of each TensorDict that it makes."""
    check: Any = getattr(tensordict_utils, "_check_invariants", None)  # since 0.15
    for _, node in nodes_of(made) if check is not None else ():
        if type(node) is TensorDict:
            check(node)


def nodes_of(node: Any, path: str = "data") -> list[tuple[str, Any]]:
    """Returns the node and those below with their paths."""
    below = [nodes_of(child, path + name) for name, child in children_of(node) if _is_node(child)]
    return [(path, node), *[each for found in below for each in found]]


def _assert_same_node(got: Any, expected: Any, path: str, twins: Twins | None) -> None:
    for name in _STATE:
        wanted = _attribute(expected, name)
        seen = _attribute(got, name)
        assert seen == wanted, f"{path}: {name} is {seen!r}, not {wanted!r}"
    for name in _QUESTIONS:
        wanted, seen = _answer(expected, name), _answer(got, name)
        assert seen == wanted, f"{path}: {name}() is {seen!r}, not {wanted!r}"
    if not isinstance(expected, TypedTensorDict):  # a typed one has the parents of its source
        seen, wanted = _parents(got), _parents(expected)
        if seen != wanted:
            gc.collect()  # nodes above it may be garbage
            seen, wanted = _parents(got), _parents(expected)
        assert seen == wanted, f"{path}: locked by {seen} nodes above it, not {wanted}"
    children, wanted_children = children_of(got), children_of(expected)
    names, wanted_names = [name for name, _ in children], [name for name, _ in wanted_children]
    assert names == wanted_names, f"{path}: holds {names}, not {wanted_names}"
    for (name, child), (_, wanted) in zip(children, wanted_children, strict=True):
        assert_same_tensordict(child, wanted, path + name, twins)
    if isinstance(expected, TensorDictParams):
        for kind in ("named_parameters", "named_buffers"):
            seen = [name for name, _ in getattr(got, kind)()]
            wanted = [name for name, _ in getattr(expected, kind)()]
            assert seen == wanted, f"{path}: {kind}() are {seen}, not {wanted}"
    if _answer(expected, "is_consolidated") is True:
        _assert_one_storage(got, expected, path)


def _assert_one_storage(got: Any, expected: Any, path: str) -> None:
    """Asserts that a consolidated TensorDict's leaves are in the storage that is saved with it."""
    if any(leaf.is_nested for _, leaf in leaves_of(expected)):
        return  # their storage has no address
    seen, wanted = _storage_of(got), _storage_of(expected)
    assert_same_tensordict(seen, wanted, f"{path}._consolidated['storage']")
    start = seen.untyped_storage().data_ptr()
    for (name, leaf), (_, wanted_leaf) in zip(leaves_of(got), leaves_of(expected), strict=True):
        is_inside = leaf.untyped_storage().data_ptr() == start
        wanted_inside = wanted_leaf.untyped_storage().data_ptr() == (
            wanted.untyped_storage().data_ptr()
        )
        assert is_inside == wanted_inside, f"{path}: {name} is not in the consolidated storage"


def _assert_same_leaf(got: torch.Tensor, expected: torch.Tensor, path: str) -> None:
    if expected.device.type == "meta":
        for name in ("dtype", "layout", "device", "requires_grad", "is_leaf", "is_nested"):
            seen, wanted = getattr(got, name), getattr(expected, name)
            assert seen == wanted, f"{path}: {name} is {seen}, not {wanted}"
        if not expected.is_nested:
            assert got.shape == expected.shape, f"{path}: shape is {got.shape}"
        if expected.layout == torch.strided and not expected.is_nested:
            assert got.stride() == expected.stride(), f"{path}: strides are {got.stride()}"
    elif expected.dtype in _WITHOUT_COPY:
        assert got.dtype == expected.dtype, f"{path}: dtype is {got.dtype}, not {expected.dtype}"
        assert_same(got.view(torch.uint8), expected.view(torch.uint8), path)
    else:
        assert_same(got, expected, path)
    assert _attribute(got, "batch_size") == _attribute(expected, "batch_size"), path


def _parents(node: Any) -> int:
    """Returns how many nodes above keep this one locked; they must be unlocked first."""
    return sum(reference() is not None for reference in _attribute(node, "_lock_parents_weakrefs"))


def _attribute(value: Any, name: str) -> Any:
    """Reads the state of a tensorclass's TensorDict, even if a field has the same name."""
    if is_tensorclass(value):
        value = value.__dict__["_tensordict"]
    try:
        found = getattr(value, name, None)
    except ValueError as error:  # names of a stack whose members differ
        return type(error)
    return [] if found is None and name == "_lock_parents_weakrefs" else found


def _answer(node: Any, question: str) -> Any:
    """Returns the answer, or the error that a stack raises if its members answer differently."""
    try:
        return getattr(node, question)()
    except Exception as error:
        return type(error)


def _storage_of(node: Any) -> torch.Tensor:
    if is_tensorclass(node):
        node = node.__dict__["_tensordict"]
    return node._consolidated["storage"]


def _is_node(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) and is_collection(value)


def _name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
