"""Each kind of TensorDict in each direction, as parameters of tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from catalogue_cases import ends_of
from tensordict import PersistentTensorDict
from tensordict_kinds import TD_KINDS, TdKind
from tensordict_same import children_of, leaves_of, nodes_of

DIRECTIONS = ("H2D", "D2H", "D2D")


TO_META = "to meta"


CASES = [
    pytest.param(name, direction, id=f"{name}-{direction}")
    for name, kind in TD_KINDS.items()
    for direction in (*DIRECTIONS, TO_META)
    if direction == TO_META or kind.counts(direction) is not None
]


COPIED = [case for case in CASES if case.values[1] != TO_META]


def kind_and_ends(name: str, direction: str, device: str) -> tuple[TdKind, str, str]:
    """Returns kind, source and target; skips the test if the kind cannot be there."""
    kind = TD_KINDS[name]
    source, target = ("cpu", "meta") if direction == TO_META else ends_of(direction, device)
    missing = kind.why_missing(*{source.split(":")[0], target.split(":")[0]})
    if missing:
        pytest.skip(missing)
    if direction == TO_META and kind.on_target:
        pytest.skip("there are no bytes on meta")
    return kind, source, target


def moved_by_itself(td: Any, target: str) -> Any:
    """Returns the result of its own `.to`, once it has arrived."""
    expected = td.to(target)
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return expected


def state_of(td: Any) -> list[Any]:
    """Returns everything that a copy must not change in its source, except the leaves' values."""
    if any(isinstance(node, PersistentTensorDict) for _, node in nodes_of(td)):
        return [(path, type(each)) for path, each in nodes_of(td)]  # every read makes new ones
    state: list[Any] = []
    for path, node in nodes_of(td):
        state.append((path, id(node), type(node), node.device, node.is_locked, node.batch_size))
        state.append([(name, id(child)) for name, child in children_of(node)])
    for path, leaf in leaves_of(td):
        state.append((path, leaf.device, leaf.requires_grad, leaf._is_view(), shape_of(leaf)))
    return state


def shape_of(leaf: torch.Tensor) -> Any:
    """Returns the shape, or the rows' shapes of a strided nested tensor."""
    strided_nested = leaf.is_nested and leaf.layout is torch.strided
    return leaf._nested_tensor_size().tolist() if strided_nested else leaf.shape
