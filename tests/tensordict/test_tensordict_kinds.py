"""Copies every kind of TensorDict in every direction.

The result must equal that of its own `.to`, the counts must be those of the catalogue, and the
source must be unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from catalogue_cases import OPTIONS
from each_case import together
from tensordict_cases import (
    CASES,
    COPIED,
    DIRECTIONS,
    TO_META,
    kind_and_ends,
    moved_by_itself,
    state_of,
)
from tensordict_kinds import NOT_MADE, TD_KINDS
from tensordict_same import assert_invariants, assert_same_tensordict, leaves_of, nodes_of

import tdcopier

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning"),
]


ENTRIES: dict[str, tuple[Callable[..., Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "async_to": (tdcopier.async_to, lambda td: td, lambda got: got),
    "start_copy, in a list": (tdcopier.start_copy, lambda td: [td], lambda got: got[0]),
    "start_copy, deep within": (
        tdcopier.start_copy,
        lambda td: {"batch": ([td],)},
        lambda got: got["batch"][0][0],
    ),
}
"""How to start the copy, how to wrap the TensorDict, and how to take it from the result."""


# ---- arrival -------------------------------------------------------------------------------------


@together(("name", "direction"), CASES, by="direction")
def test_a_tensordict_arrives_as_through_its_own_to_and_is_counted(device, name, direction):
    kind, source, target = kind_and_ends(name, direction, device)
    for entry, (call, wrap, unwrap) in ENTRIES.items():
        with kind.within():
            td = kind.make(target if kind.on_target else source)
            handle = call(wrap(td), target)
            got = unwrap(handle.get())
            expected = moved_by_itself(td, target)
            try:
                assert_same_tensordict(got, expected)
                assert_invariants(got)
                if direction == TO_META:
                    assert handle.stats[:2] == (0, 0)  # there is nothing to pack for meta
                else:
                    assert handle.stats[:5] == kind.counts(direction)
            except AssertionError as error:
                raise AssertionError(f"through {entry}: {error}") from error


@together(("name", "direction"), CASES, by="direction")
@pytest.mark.usefixtures("python_nodes")
def test_python_builds_the_same_for_another_layout_of_tensordicts(device, name, direction):
    kind, source, target = kind_and_ends(name, direction, device)
    with kind.within():
        td = kind.make(target if kind.on_target else source)
        handle = tdcopier.start_copy([td], target)
        assert_same_tensordict(handle.get()[0], moved_by_itself(td, target))
        if direction != TO_META:
            assert handle.stats[:5] == kind.counts(direction)


@together(("name", "direction"), CASES, by="direction")
def test_the_source_is_as_it_was(device, name, direction):
    kind, source, target = kind_and_ends(name, direction, device)
    with kind.within():
        td = kind.make(target if kind.on_target else source)
        twin = kind.make(target if kind.on_target else source)
        before = state_of(td)
        got = tdcopier.to(td, target)
        assert state_of(td) == before
        for (path, leaf), (_, wanted) in zip(leaves_of(td), leaves_of(twin), strict=True):
            assert_same_tensordict(leaf, wanted, path)
        assert (got is td) == (td.to(target) is td)


@together(("name", "direction"), CASES, by="direction")
def test_what_is_on_the_target_stays_the_same_object(device, name, direction):
    kind, source, target = kind_and_ends(name, direction, device)
    with kind.within():
        td = kind.make(target if kind.on_target else source)
        got, expected = tdcopier.to(td, target), moved_by_itself(td, target)
        stays = expected.to(target) is expected
        assert (got.to(target) is got) == stays
        assert (tdcopier.to(got, target) is got) == stays
        handle = tdcopier.start_copy([got, got], target)
        assert [each is got for each in handle.get()] == [stays, stays]
        if stays:
            assert handle.stats[:4] == (0, 0, 0, 2)


@together(("name", "direction"), CASES, by="direction")
def test_entries_that_are_set_later_and_unlocking_do_as_they_do_after_to(device, name, direction):
    kind, source, target = kind_and_ends(name, direction, device)
    with kind.within():
        td, twin = (kind.make(target if kind.on_target else source) for _ in range(2))
        got, expected = tdcopier.to(td, target), moved_by_itself(twin, target)
        nodes = list(zip(nodes_of(got), nodes_of(expected), strict=True))
        for what in (_set_entry, _set_text, _unlock):
            for (path, node), (_, wanted) in reversed(nodes):
                later = torch.ones((*wanted.batch_size, 1), device=source)
                outcomes = [_outcome(what, each, later) for each in (node, wanted)]
                assert outcomes[0] == outcomes[1], f"{path}: {what.__name__}"


def _set_entry(node: Any, later: torch.Tensor) -> Any:
    node.set("later", later)
    found = node.get("later")
    assert type(found) is torch.Tensor
    return found.device


def _set_text(node: Any, _: torch.Tensor) -> Any:
    node.set_non_tensor("said later", "word")
    return type(node.get("said later"))


def _unlock(node: Any, _: torch.Tensor) -> Any:
    node.unlock_()
    return node.is_locked


def _outcome(what: Callable[[Any, torch.Tensor], Any], node: Any, later: torch.Tensor) -> Any:
    """Returns the result or the class of its error, to compare two that must do the same."""
    try:
        return what(node, later)
    except Exception as error:
        return type(error)


@together(("name", "direction"), COPIED, by="direction")
def test_leaves_share_memory_only_where_they_do_after_to(device, name, direction):
    """Writing to one leaf of the result must not show in another, nor in the source."""
    kind, source, target = kind_and_ends(name, direction, device)
    with kind.within(), torch.no_grad():
        td = kind.make(target if kind.on_target else source)
        got, expected = tdcopier.to(td, target), moved_by_itself(td, target)
        assert _sharing([*leaves_of(td), *leaves_of(got)]) == _sharing(
            [*leaves_of(td), *leaves_of(expected)]
        )


def _sharing(leaves: list[tuple[str, torch.Tensor]]) -> set[tuple[int, int]]:
    """Returns the pairs of leaves that have bytes in common."""
    spans = [(i, *_span(leaf)) for i, (_, leaf) in enumerate(leaves) if _has_bytes(leaf)]
    spans.sort(key=lambda span: span[1:])
    pairs = set()
    for at, (i, _, end) in enumerate(spans):
        for j, start, _ in spans[at + 1 :]:
            if start >= end:
                break
            pairs.add((min(i, j), max(i, j)))
    return pairs


def _has_bytes(leaf: torch.Tensor) -> bool:
    is_plain = leaf.layout == torch.strided and not leaf.is_nested and not leaf.is_quantized
    return is_plain and not hasattr(leaf, "__tensor_flatten__") and leaf.numel() > 0


def _span(leaf: torch.Tensor) -> tuple[int, int]:
    reach = sum((n - 1) * step for n, step in zip(leaf.shape, leaf.stride(), strict=True))
    return leaf.data_ptr(), leaf.data_ptr() + (reach + 1) * leaf.element_size()


# ---- options -------------------------------------------------------------------------------------

WITH_OPTIONS = (
    "nested, batch sizes of their own",
    "locked",
    "lazy stack within",
    "lazy stack of tensorclasses",
    "tensorclass in a tensorclass, inherited",
    "memory-mapped, with text",
    "unbatched tensor, locked",
    "leaf that requires grad",
    "leaves around 256 KiB",
    "strided leaves",
)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("options", OPTIONS)
@together("name", WITH_OPTIONS)
def test_under_every_option_the_same_arrives(device, name, options, direction):
    kind, source, target = kind_and_ends(name, direction, device)
    if kind.counts(direction) is None:
        pytest.skip("only on the host")
    td = kind.make(source)
    handle = tdcopier.async_to(td, target, **OPTIONS[options])
    assert_same_tensordict(handle.get(), moved_by_itself(td, target))
    counts = kind.counts(direction)
    assert sum(handle.stats[:2]) == counts.packed + counts.alone
    assert handle.stats[2:5] == counts[2:5]
    if not OPTIONS[options].get("pack_cpu_tensors", True):
        assert handle.stats.packed_leaves == 0


# ---- the catalogue -------------------------------------------------------------------------------


def test_every_class_of_tensordict_is_in_the_catalogue_or_said_to_be_missing():
    from tensordict.base import TensorDictBase

    def below(cls: type) -> set[type]:
        return {cls}.union(*[below(each) for each in cls.__subclasses__()])

    seen = set()
    for kind in TD_KINDS.values():
        if kind.why_missing("cpu") is None:
            with kind.within():
                seen |= {type(node) for _, node in nodes_of(kind.make("cpu"))}
    there = {each for each in below(TensorDictBase) if each.__module__.startswith("tensordict.")}
    missing = {each.__name__ for each in there - seen} - ABSTRACT
    named = {name.strip() for names in NOT_MADE for name in names.split(",")}
    assert missing <= named


ABSTRACT = {"TensorDictBase", "_CustomOpTensorDict", "TypedTensorDict", "PersistentTensorDict"}
"""Classes without objects of their own, and one that needs a package."""
