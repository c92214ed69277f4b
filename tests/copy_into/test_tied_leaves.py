"""Leaves that are the same memory in both trees, such as tied weights, are written once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from each_case import together
from support import same_bytes
from tensordict import TensorDict
from torch import nn

import tdcopier


class Tied(nn.Module):
    """A model whose decoder has the weight of its encoder."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.encoder = nn.Embedding(11, 7)
        self.decoder = nn.Linear(7, 11)
        self.decoder.weight = self.encoder.weight
        self.large = nn.Linear(300, 300)
        self.again = self.large

    def on(self, device: str) -> Tied:
        """Moves it; some devices get a parameter of their own for each name."""
        self.to(device)
        self.decoder.weight = self.encoder.weight
        return self


def test_the_state_of_a_model_with_tied_weights_is_copied(way):
    source, model = Tied(1).on(way[0]), Tied(2).on(way[1])
    state = model.state_dict()
    versions = [leaf._version for leaf in state.values()]
    handle = tdcopier.start_copy_into(source.state_dict(), state)
    handle.get()
    expected = Tied(3)
    expected.load_state_dict(source.state_dict())
    for name, value in expected.state_dict().items():
        assert same_bytes(model.state_dict()[name], value), name
    stats = handle.stats
    assert (stats.packed_leaves, stats.alone_leaves, stats.reused_leaves) == (3, 1, 3)
    assert all(leaf._version > old for leaf, old in zip(state.values(), versions, strict=True))
    tdcopier.copy_into(Tied(4).on(way[0]).state_dict(), state)  # once more
    assert same_bytes(model.decoder.weight, Tied(4).encoder.weight)


def test_more_than_two_names_in_any_containers(way):
    source, tied = torch.randn(5, 3).to(way[0]), torch.zeros(5, 3, device=way[1])
    other, plain = torch.randn(4).to(way[0]), torch.zeros(4, device=way[1])
    handle = tdcopier.start_copy_into(
        {"a": [source, {"b": source.view(5, 3)}], "c": other, "d": (source[:], other)},
        {"a": [tied, {"b": tied[:]}], "c": plain, "d": (tied, plain)},
    )
    handle.get()
    assert same_bytes(tied, source)
    assert same_bytes(plain, other)
    assert (handle.stats.packed_leaves, handle.stats.reused_leaves) == (2, 3)


def test_tensordicts_with_one_leaf_under_two_keys(way):
    def made(value: float, place: str) -> TensorDict:
        leaf = torch.full((4, 2), value, device=place)
        return TensorDict({"x": leaf, "next": {"x": leaf}, "y": torch.zeros(4, device=place)}, [4])

    source, destination = made(3, way[0]), made(0, way[1])
    tdcopier.copy_into(source, destination)
    assert destination["x"].cpu().tolist() == destination["next", "x"].cpu().tolist()
    assert destination["x"].eq(3).all()


@pytest.mark.parametrize(
    "view",
    [lambda x: x[::2], lambda x: x.t(), lambda x: x[:, 1:3], lambda x: x[0], lambda x: x[:0]],
    ids=["gaps", "transposed", "columns", "row", "no elements"],
)
def test_views_that_are_the_same_on_both_sides(way, view):
    source, base = torch.randn(6, 4).to(way[0]), torch.zeros(6, 4, device=way[1])
    tdcopier.copy_into([view(source), view(source)], [view(base), view(base)])
    expected = torch.zeros(6, 4)
    view(expected).copy_(view(source))
    assert same_bytes(base, expected)


def test_a_source_with_other_strides_than_the_destination(way):
    source, base = torch.randn(4, 6).to(way[0]), torch.zeros(6, 4, device=way[1])
    handle = tdcopier.start_copy_into([source.t(), source.t()], [base, base])
    handle.get()
    assert same_bytes(base, source.t())
    assert (handle.stats.packed_leaves, handle.stats.reused_leaves) == (1, 1)


def test_arrays_that_are_the_same_memory():
    source, array = np.arange(6.0), np.zeros(6)
    tensor = torch.from_numpy(array)
    swapped, kept = source.astype(">f8"), torch.zeros(6, dtype=torch.float64)
    handle = tdcopier.start_copy_into(
        [source, torch.from_numpy(source), source[:], swapped, swapped],
        [array, array[:], tensor, kept, kept],
    )
    handle.get()
    assert array.tolist() == kept.tolist() == source.tolist()
    assert tensor._version == 1
    assert handle.stats.reused_leaves == 2
    assert handle.stats.delegated_leaves == 2


@pytest.mark.parametrize("first", [True, False])
def test_a_name_that_needs_a_gradient_is_delegated_and_the_other_dropped(way, first):
    source = torch.randn(5).to(way[0]).requires_grad_()
    base = torch.zeros(5, device=way[1])
    ends = [(source, base), (source.detach(), base[:]), (source.detach(), base)]
    if not first:
        ends.reverse()
    handle = tdcopier.start_copy_into([a for a, _ in ends], [b for _, b in ends])
    handle.get()
    assert same_bytes(base.detach(), source.detach())
    assert base.requires_grad  # as after `copy_`
    assert (handle.stats.delegated_leaves, handle.stats.reused_leaves) == (1, 2)
    several = torch.zeros(5, device=way[1])
    handle = tdcopier.start_copy_into([source, source], [several, several])
    handle.get()
    assert same_bytes(several.detach(), source.detach())
    assert handle.stats.delegated_leaves == 2


def test_under_a_mode_every_name_is_delegated():
    from torch.overrides import TorchFunctionMode

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **kwargs or {})

    source, base = torch.ones(3), torch.zeros(3)
    with Mode():
        handle = tdcopier.start_copy_into([source, source], [base, base])
    handle.get()
    assert base.tolist() == [1] * 3
    assert handle.stats.delegated_leaves == 2


Ends = Callable[[torch.Tensor, torch.Tensor], tuple[list[Any], list[Any]]]

REFUSED: dict[str, Ends] = {
    "other sources": lambda s, d: ([s, s.clone()], [d, d]),
    "part of a source": lambda s, d: ([s[0], s[1]], [d[0], d[0]]),
    "a source with other strides": lambda s, d: ([s, s.t()], [d, d]),
    "a source of another type": lambda s, d: ([s.view(torch.int32), s], [d.view(torch.int32), d]),
    "a part of a destination": lambda s, d: ([s, s[:2]], [d, d[:2]]),
    "other strides": lambda s, d: ([s, s], [d, d.t()]),
    "another type": lambda s, d: ([s, s.view(torch.int32)], [d, d.view(torch.int32)]),
    "another shape": lambda s, d: ([s, s.view(16)], [d, d.view(16)]),
    "a third one": lambda s, d: ([s, s, s.clone()], [d, d, d]),
    "one beside": lambda s, d: ([s, s, s[1]], [d, d, d[1]]),
    "a delegated one": lambda s, d: ([s, s.clone().requires_grad_()], [d, d]),
    "two delegated ones": lambda s, d: (
        [s.clone().requires_grad_(), s.clone().requires_grad_()], [d, d]
    ),
    "the negative": lambda s, d: ([s, torch._neg_view(s)], [d, d]),
    "itself": lambda s, d: ([s, d], [d, d]),
    "views in both trees": lambda s, d: ([s, s.t()], [d, d.t()]),
}  # fmt: skip


@together("name", REFUSED)
def test_all_else_that_shares_memory_is_refused(way, name):
    source = torch.ones(4, 4).to(way[0])
    destination = torch.zeros(4, 4, device=way[1])
    ends = REFUSED[name](source, destination)
    with pytest.raises(ValueError, match=r"(source|destination)\[\d\] and .* share memory: "):
        tdcopier.start_copy_into(*ends)
    assert not destination.any()
    assert destination._version == 0


class TiedTransposed(nn.Module):
    """Has one weight under two names, once transposed."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2, 2), fill))
        self.register_buffer("decoder", self.weight.detach().t())


def test_the_error_says_which_tied_leaves_are_accepted_and_what_its_remedies_do():
    tied = torch.zeros(2)
    with pytest.raises(ValueError, match=r"only tied leaves may, .* are tied in the source too"):
        tdcopier.copy_into([torch.ones(2), torch.ones(2)], [tied, tied])
    source, destination = (TiedTransposed(fill).state_dict() for fill in (1.0, 0.0))
    with pytest.raises(
        ValueError,
        match=r"^destination\['weight'\] and destination\['decoder'\] share memory: .*"
        r"Views of one tensor, such as x and x\.t\(\), do not count as tied: leave one out",
    ):
        tdcopier.copy_into(source, destination)
    cloned = destination | {"decoder": destination["decoder"].clone()}
    tdcopier.copy_into(source, cloned)
    assert cloned["decoder"].tolist() == source["decoder"].tolist()
    for state in (source, destination):
        del state["decoder"]
    destination["weight"].zero_()
    tdcopier.copy_into(source, destination)
    assert destination["weight"].tolist() == source["weight"].tolist()


@pytest.mark.parametrize("pinned", [True, False])
def test_rows_of_one_table_under_two_names(device, pinned):
    tables = [torch.zeros(10, 3), torch.zeros(10)]
    batch = [torch.randn(2, 3).to(device), torch.ones(2, device=device)]
    index = torch.tensor([7, 2])

    def scatter() -> None:
        handle = tdcopier.start_scatter(
            [batch[0], {"tied": batch[0][:]}, batch[1]],
            [tables[0], {"tied": tables[0]}, tables[1]],
            index,
        )
        handle.get()
        assert handle.stats.reused_leaves == 1
        with pytest.raises(ValueError, match="share memory"):
            tdcopier.start_scatter([batch[0], batch[0].clone()], [tables[0], tables[0]], index)
        out = torch.zeros(2, 3, device=device)
        handle = tdcopier.start_gather([tables[0], tables[0]], index, out=[out, out[:]])
        handle.get()
        assert same_bytes(out, batch[0])
        assert handle.stats.reused_leaves == 1
        with pytest.raises(ValueError, match="share memory"):
            tdcopier.start_gather([tables[0], tables[0].clone()], index, out=[out, out])

    if pinned:
        with tdcopier.pin_memory_(tables, device):
            scatter()
    else:
        scatter()
    assert same_bytes(tables[0][index], batch[0])
    assert tables[0].count_nonzero() == 6
