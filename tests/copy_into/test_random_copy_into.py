"""Random trees of dicts, TensorDicts and lists with tied leaves, against `copy_` leaf by leaf."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from support import same_bytes
from tensordict import TensorDict

import tdcopier

PLACES = ("host", "first", "second")
VIEWS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda base: base,
    lambda base: base.t(),
    lambda base: base[:, 1:3],
    lambda base: base[::2],
    lambda base: base[:0],
]


class Weight(NamedTuple):
    """A weight of both trees, which may have several names."""

    shape: tuple[int, int]
    view: int
    source_place: str
    place: str


class Leaf(NamedTuple):
    """One name of a weight."""

    weight: int
    is_tied: bool
    """Whether its source is that of the weight, rather than a copy of it."""
    needs_gradient: bool


class Node(NamedTuple):
    """A container: of one kind in the source, and of one in the destination."""

    children: list[Any]
    by_key: bool
    kinds: tuple[bool, bool]
    """For each tree: a TensorDict rather than a dict, or a tuple rather than a list."""


weights = st.lists(
    st.builds(
        Weight,
        st.tuples(st.integers(1, 5), st.integers(3, 300)),
        st.integers(0, len(VIEWS) - 1),
        st.sampled_from(PLACES),
        st.sampled_from(PLACES),
    ),
    min_size=1,
    max_size=4,
)
names = st.builds(
    Leaf,
    st.integers(0, 3),
    st.sampled_from([True] * 15 + [False]),
    st.sampled_from([False] * 7 + [True]),
)
trees = st.recursive(
    names,
    lambda children: st.builds(
        Node,
        st.lists(children, max_size=4),
        st.booleans(),
        st.tuples(st.booleans(), st.booleans()),
    ),
    max_leaves=12,
)


def built(tree: Any, side: int, leaf: Callable[[Leaf], torch.Tensor]) -> Any:
    """Returns the tree of one side. A TensorDict has no lists in it."""
    if isinstance(tree, Leaf):
        return leaf(tree)
    children = [built(child, side, leaf) for child in tree.children]
    if not tree.by_key:
        return tuple(children) if tree.kinds[side] else children
    entries = {f"k{i}": child for i, child in enumerate(children)}
    return TensorDict(entries) if tree.kinds[side] and not has_lists(tree) else entries


def has_lists(tree: Any) -> bool:
    return isinstance(tree, Node) and (not tree.by_key or any(map(has_lists, tree.children)))


def names_in(tree: Any) -> Iterator[Leaf]:
    if isinstance(tree, Leaf):
        yield tree
        return
    for child in tree.children:
        yield from names_in(child)


def copy_each(source: Any, destination: Any) -> None:
    """The oracle: a plain recursive copy."""
    if isinstance(destination, torch.Tensor):
        destination.copy_(source)
    elif isinstance(destination, (dict, TensorDict)):
        assert set(source.keys()) == set(destination.keys())
        for key, child in destination.items():
            copy_each(source[key], child)
    else:
        for one, other in zip(source, destination, strict=True):
            copy_each(one, other)


@given(
    tree=trees,
    made=weights,
    background=st.booleans(),
    staged=st.booleans(),
    gradients=st.booleans(),
)
@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_random_trees_are_filled_as_by_copy_of_each_leaf(
    device, other_device, tree, made, background, staged, gradients
):
    devices = {"host": "cpu", "first": device, "second": other_device}
    weights_of = [torch.randn(each.shape).to(devices[each.source_place]) for each in made]
    bases, expected = (
        [torch.zeros(each.shape, device=devices[each.place]) for each in made] for _ in range(2)
    )

    def source_of(leaf: Leaf) -> torch.Tensor:
        number = leaf.weight % len(made)
        base = weights_of[number]
        view = VIEWS[made[number].view](base if leaf.is_tied else base.clone())
        return view.detach().requires_grad_(leaf.needs_gradient)

    def destination_in(tensors: list[torch.Tensor]) -> Any:
        numbers = range(len(made))
        views = [VIEWS[made[number].view](tensors[number]) for number in numbers]
        return built(tree, 1, lambda leaf: views[leaf.weight % len(made)])

    source, destination = built(tree, 0, source_of), destination_in(bases)
    leaves = list(names_in(tree))
    used = Counter(leaf.weight % len(made) for leaf in leaves)
    untied = {
        leaf.weight % len(made)
        for leaf in leaves
        if not leaf.is_tied and used[leaf.weight % len(made)] > 1
    }
    with torch.set_grad_enabled(gradients):
        if any(made[number].view != 4 for number in untied):  # 4: no elements
            event("refused")
            with pytest.raises(ValueError, match="share memory: only tied leaves may"):
                tdcopier.copy_into(source, destination)
            assert not any(base.any() for base in bases)
            return
        handle = tdcopier.start_copy_into(
            source, destination, use_background_thread=background, use_pinned_staging=staged
        )
        assert handle.get() is destination
        copy_each(source, destination_in(expected))
    for found, wanted in zip(bases, expected, strict=True):
        assert same_bytes(found.detach(), wanted.detach())
        assert found.requires_grad == wanted.requires_grad
    stats = handle.stats
    delegated = Counter(
        leaf.weight % len(made) for leaf in leaves if gradients and leaf.needs_gradient
    )
    again = 0  # delegated names are all copied, and the engine writes no others then
    for number, count in used.items():
        if made[number].view != 4:
            again += count - max(1, delegated[number])
    event("tied" if again else "apart")
    event("delegated" if delegated else "none delegated")
    assert sum(stats[:4]) == len(leaves)
    assert stats.delegated_leaves == delegated.total()
    assert stats.reused_leaves == again
