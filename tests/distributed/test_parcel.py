"""A parcel that is packed on one device and opened on another has that other device."""

from __future__ import annotations

import threading

import pytest
import torch
from support import assert_same
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict
from tensordict_classes import Episode, Frames, Labelled

import tdcopier
from tdcopier import _C, Parcel, pack


def opened_on(tree, device, other_device):
    """Returns the tree as it arrives on `other_device`, sent from `device`."""
    return received(pack(tdcopier.copy(tree, device)), other_device)


def received(parcel, device):
    """Returns the tree of the parcel's bytes on the device."""
    return Parcel.from_buffer(parcel._bytes.to(device), allow_pickle=True).tree()


def test_leaves_are_on_the_device_where_it_is_opened(device, other_device):
    parameter = torch.nn.Parameter(torch.ones(2, device=device))
    tree = {"x": torch.arange(5), "y": [torch.ones(2, 3).t(), parameter]}
    got = opened_on(tree, device, other_device)
    leaves = [got["x"], *got["y"]]
    assert {leaf.device for leaf in leaves} == {torch.device(other_device)}
    assert got["x"].tolist() == [0, 1, 2, 3, 4]
    assert got["y"][0].stride() == (1, 3)
    assert type(got["y"][1]) is torch.nn.Parameter


@pytest.mark.parametrize(
    "leaf",
    [
        pytest.param(torch.empty(0, 3, 4).permute(2, 0, 1), id="empty"),
        pytest.param(torch.empty(4, 4)[:0, 1:], id="empty, with gaps"),
        pytest.param(torch.ones(2, 3, 3, 1).permute(0, 3, 1, 2), id="one channel, last"),
        pytest.param(torch.ones(3, 5).t()[:1], id="one row"),
    ],
)
def test_strides_are_those_of_a_copy(leaf, device, other_device):
    (got,) = opened_on([leaf], device, other_device)
    assert got.stride() == tdcopier.copy(leaf, other_device).stride()


@pytest.mark.parametrize(
    "leaf",
    [
        pytest.param(torch.tensor([1 + 2j, 3]).conj(), id="conjugated"),
        pytest.param(torch.tensor([1 + 2j, 3]).conj().imag, id="negated"),
        pytest.param(torch.arange(3.0).as_subclass(Labelled), id="subclass"),
        pytest.param(torch.eye(2).to_sparse(), id="sparse", marks=pytest.mark.cuda),
    ],
)
def test_tensors_that_are_not_plain_are_there_too(device, other_device, leaf):
    there = tdcopier.copy(leaf, device)
    if there.device != torch.device(device):
        pytest.skip("the device has no such tensors")
    got = opened_on([there, torch.ones(3)], device, other_device)
    assert got[0].device == torch.device(other_device)
    assert type(got[0]) is type(there)
    assert (got[0].is_conj(), got[0].is_neg()) == (there.is_conj(), there.is_neg())
    assert torch.equal(got[0].cpu().to_dense(), leaf.to_dense())
    assert got[1].tolist() == [1, 1, 1]


def test_every_node_of_a_tensordict_says_where_it_is_opened(device, other_device):
    tree = {
        "plain": TensorDict({"x": torch.ones(3), "n": {"y": torch.ones(3), "s": "text"}}),
        "subclass": Episode({"x": torch.ones(2), "n": {"y": torch.ones(2)}}, [2]),
        "class": Frames(torch.ones(4, 2), batch_size=[4]),
        "lazy": LazyStackedTensorDict.lazy_stack(
            [TensorDict({"z": torch.ones(n), "n": {"w": torch.ones(1)}}) for n in (2, 3)]
        ),
        "data": NonTensorData(3),
    }
    got = opened_on(tree, device, other_device)
    members = got["lazy"].tensordicts
    nodes = [*got.values(), got["plain"]["n"], got["subclass"]["n"], *members, members[0]["n"]]
    assert {node.device for node in nodes} == {torch.device(other_device)}
    assert got["lazy"].tensordicts[1]["z"].device == torch.device(other_device)
    assert got["plain"]["n", "s"] == "text"
    got["plain"]["later"] = torch.zeros(3)
    assert got["plain"]["later"].device == torch.device(other_device)


def test_a_device_that_is_a_value_of_the_tree_stays_what_it_is(device, other_device):
    tree = [torch.device(device), TensorDict({"x": torch.ones(1)}), torch.device(device)]
    got = opened_on(tree, device, other_device)
    assert got[0] == got[2] == torch.device(device)


def test_a_consolidated_tensordict_sends_its_leaves_once(device, other_device):
    tree = TensorDict({f"x{i}": torch.ones(1000) for i in range(10)}, device=device).consolidate()
    parcel = pack(tree)
    assert 10 * 4000 <= parcel.nbytes <= 11 * 4000
    got = received(parcel, other_device)
    assert got.device == torch.device(other_device)
    assert got["x9"].tolist() == [1] * 1000


@pytest.mark.parametrize("made", ["memory-mapped", "shared"])
def test_a_tensordict_does_not_say_that_its_leaves_are_files_or_shared(made, tmp_path):
    tree = TensorDict({"x": torch.ones(3), "n": {"y": torch.ones(2)}}, device="cpu")
    tree = tree.memmap_(tmp_path) if made == "memory-mapped" else tree.share_memory_()
    got = opened_on(tree, "cpu", "cpu")
    assert not got.is_memmap()
    assert not got.is_shared()
    assert not got["n"].is_memmap()
    assert not got["n"].is_shared()
    assert got.is_locked
    assert tree.is_memmap() or tree.is_shared()
    assert got["n", "y"].tolist() == [1, 1]


class Linked:
    """An object that refers to objects which refer back to it."""

    def __init__(self) -> None:
        self.peer: object = None


def test_the_path_of_what_cannot_be_pickled_ends_in_trees_that_go_in_circles():
    tree, inside = Linked(), Linked()
    tree.peer, inside.peer = inside, tree
    inside.lock = threading.Lock()
    with pytest.raises(TypeError, match=r"^data\['a'\]\.peer\.lock cannot be pickled "):
        pack({"a": tree})


def test_what_arrives_is_saved_whole_and_leaf_by_leaf(device, other_device, tmp_path):
    """Torch refuses to save a storage that is used by two dtypes, or ends within an element."""
    tree = {
        "w": torch.rand(7, 3),
        "b": torch.ones(5, dtype=torch.bool),
        "n": torch.arange(3),
        "half": torch.ones(9, dtype=torch.bfloat16),
    }
    parcel = pack(tdcopier.copy(tree, device))
    for got in (received(parcel, other_device), received(parcel, "cpu")):
        for saved in (got, *({key: leaf} for key, leaf in got.items())):
            torch.save(saved, tmp_path / "saved")
            again = torch.load(tmp_path / "saved")
            assert all(torch.equal(again[key].cpu(), tree[key]) for key in saved)


@pytest.mark.parametrize("knows_head", [False, True])
@pytest.mark.parametrize("dtypes", [1, 2])
def test_leaves_of_a_message_on_a_device_are_views_of_it_if_they_can_be_saved(
    device, tmp_path, dtypes, knows_head
):
    tree = {"a": torch.arange(300.0), "b": [torch.ones(2, 3), torch.zeros(0)]}
    if dtypes == 2:
        tree["c"] = torch.arange(3)
    sent = tdcopier.pack(tdcopier.copy(tree, device))
    message = sent._bytes.clone()
    head = sent._head if knows_head else b""
    got = _C.parcel_from(message, may_unpickle=True, is_owned=True, head=head).tree()
    assert_same(got, tdcopier.copy(tree, device))
    is_view = got["a"].untyped_storage().data_ptr() == message.untyped_storage().data_ptr()
    assert is_view == (dtypes == 1)
    torch.save(got, tmp_path / "tree.pt")
    assert_same(tdcopier.copy(torch.load(tmp_path / "tree.pt"), "cpu"), tree)


def test_a_head_that_is_not_that_of_the_message_is_refused(device):
    parcels = [tdcopier.pack(torch.ones(n, device=device)) for n in (3, 300)]
    heads = {"another size": parcels[1]._head, "no parcel": b"x" * 64, "too early": b"x"}
    for why, head in heads.items():
        with pytest.raises(ValueError, match=why):
            _C.parcel_from(parcels[0]._bytes, may_unpickle=False, head=head)
