"""Graphs of torch_geometric: packed, equal to what `.to` gives, and the source stays as it is."""

from __future__ import annotations

import copy
import dataclasses
import gc
import weakref
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from catalogue import ramp
from library_stand_ins import LIBRARY_OR_STAND_IN, geometric, moved_by_to
from support import assert_same

import tdcopier


@pytest.fixture(params=LIBRARY_OR_STAND_IN)
def pyg(request, monkeypatch, registry) -> Any:
    return geometric(request.param, monkeypatch)


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Note:
    x: torch.Tensor


def graph_on(pyg: Any, device: str, nodes: int = 3) -> Any:
    return pyg.Data(
        x=ramp(device, nodes, 2), edge_index=torch.tensor([[0, 1], [1, 2]], device=device)
    )


def values_of(graph: Any) -> list[tuple[int, str, Any]]:
    return [
        (number, key, value)
        for number, store in enumerate(graph.stores)
        for key, value in store.items()
    ]


def assert_equal(got: Any, expected: Any, path: str) -> None:
    if isinstance(expected, torch.Tensor):
        assert_same(got, expected, path)
    elif isinstance(expected, (list, tuple)):
        assert (type(got), len(got)) == (type(expected), len(expected)), path
        for index, value in enumerate(expected):
            assert_equal(got[index], value, f"{path}[{index}]")
    elif isinstance(expected, dict):
        assert (type(got), list(got)) == (type(expected), list(expected)), path
        for key, value in expected.items():
            assert_equal(got[key], value, f"{path}[{key!r}]")
    elif type(expected).__module__.startswith("torch_geometric"):
        assert_graph(got, expected)
    else:
        assert got is expected, path


def assert_graph(got: Any, expected: Any) -> None:
    assert type(got) is type(expected)
    assert [at[:2] for at in values_of(got)] == [at[:2] for at in values_of(expected)]
    for (_, key, value), (_, _, wanted) in zip(values_of(got), values_of(expected), strict=True):
        assert_equal(value, wanted, key)
    for store in got.stores:
        parent = store._parent
        assert (parent() if isinstance(parent, weakref.ref) else parent) is got


@pytest.mark.parametrize("background", [False, True])
def test_a_graph_is_packed_and_arrives_as_by_to(ends, pyg, background):
    source, target = ends
    graphs = [graph_on(pyg, source, nodes) for nodes in (3, 5)]
    handle = tdcopier.start_copy({"graphs": graphs}, target, use_background_thread=background)
    for got, graph in zip(handle.get()["graphs"], graphs, strict=True):
        assert_graph(got, moved_by_to(graph, target))
    assert handle.stats[:4] == (4, 0, 0, 0)


def test_the_source_is_left_as_it_was(device, pyg):
    graph = graph_on(pyg, "cpu")
    before = values_of(graph)
    moved = tdcopier.copy(graph, device)
    assert moved is not graph
    after = values_of(graph)
    assert [at[:2] for at in after] == [at[:2] for at in before]
    assert all(a[2] is b[2] for a, b in zip(after, before, strict=True))
    moved.y = ramp("cpu", 1)
    assert len(values_of(graph)) == len(before)


def test_every_kind_of_attribute_is_what_to_makes_of_it(device, pyg):
    graph = graph_on(pyg, "cpu")
    graph.names = ["a", "b"]
    graph.count, graph.ratio, graph.flag, graph.text = 3, 0.5, True, "text"
    graph.array = np.arange(3.0)
    graph.nested = [
        ramp("cpu", 2),
        (ramp("cpu", 1), np.ones(2), "x"),
        OrderedDict(a=ramp("cpu", 4)),
    ]
    graph.pair = Pair(ramp("cpu", 2), np.ones(1))
    graph.note = Note(ramp("cpu", 2))
    graph.size = torch.Size([2, 3])
    graph.inner = graph_on(pyg, "cpu")
    graph.module = torch.nn.Linear(1, 1)
    got = tdcopier.copy(graph, device)
    expected = moved_by_to(graph, device)  # moves the module and the inner graph in place
    assert_graph(got, expected)
    assert graph.note.x.device.type == "cpu"
    assert got.nested[1][1] is graph.nested[1][1]


def test_a_batch_keeps_what_separates_its_graphs(ends, pyg):
    """Its class is made at run time."""
    source, target = ends
    batch = pyg.Batch.from_data_list([graph_on(pyg, source), graph_on(pyg, source, 4)])
    handle = tdcopier.start_copy(batch, target)
    got = handle.get()
    assert_graph(got, moved_by_to(batch, target))
    assert got._num_graphs == 2
    assert got._slice_dict is batch._slice_dict
    assert handle.stats.delegated_leaves == 0


def test_a_graph_of_several_types_is_taken_apart_store_by_store(ends, pyg):
    source, target = ends
    graph = pyg.HeteroData()
    graph["paper"]["x"] = ramp(source, 4, 2)
    graph["author"]["x"] = ramp(source, 2, 2)
    graph["paper", "of", "author"]["edge_index"] = torch.zeros(2, 3, dtype=torch.long).to(source)
    handle = tdcopier.start_copy([graph], target)
    (got,) = handle.get()
    assert_graph(got, moved_by_to(graph, target))
    assert got["author"]["x"].tolist() == [[0, 1], [2, 3]]
    assert handle.stats[:4] == (3, 0, 0, 0)


def test_a_subclass_is_rebuilt_without_its_init(device, pyg):
    class Molecule(pyg.Data):
        def __init__(self, smiles: str, **attributes: Any) -> None:
            super().__init__(**attributes)
            self.__dict__["_smiles"] = smiles

    molecule = Molecule("CO", x=ramp("cpu", 3))
    handle = tdcopier.start_copy(molecule, device)
    moved = handle.get()
    assert (type(moved), moved._smiles) == (Molecule, "CO")
    assert_same(moved.x, ramp("cpu", 3).to(device))
    assert handle.stats.packed_leaves == 1


def test_a_subclass_with_its_own_to_is_left_to_it(device, pyg):
    class Doubling(pyg.Data):
        def to(self, device: Any) -> Any:
            made = copy.copy(self)
            made.x = self.x.to(device) * 2
            return made

    handle = tdcopier.start_copy(Doubling(x=torch.ones(3)), device)
    assert handle.get().x.tolist() == [2, 2, 2]
    assert handle.stats.delegated_leaves == 1


def test_a_graph_on_the_target_is_a_new_one_with_the_same_tensors(device, pyg):
    graph = graph_on(pyg, device)
    handle = tdcopier.start_copy(graph, device)
    moved = handle.get()
    assert moved is not graph
    assert moved.x is graph.x
    assert handle.stats.reused_leaves == 2


def test_a_copy_does_not_keep_the_source(device, pyg):
    graph = graph_on(pyg, "cpu")
    alive = weakref.ref(graph.x)
    handle = tdcopier.start_copy(graph, device)
    del graph
    handle.wait_staged()
    gc.collect()
    assert alive() is None
    assert handle.get().x.shape == (3, 2)


def test_the_path_of_a_leaf_that_cannot_be_read_is_its_own(device, pyg):
    graph = graph_on(pyg, "cpu")
    graph.x.untyped_storage().resize_(4)
    with pytest.raises(ValueError, match=r"^data\['g'\]\['x'\] reaches beyond its storage"):
        tdcopier.start_copy({"g": graph}, device)


def test_existing_graphs_are_filled(device, pyg):
    static = moved_by_to(graph_on(pyg, "cpu"), device)
    static.x.zero_()
    address = static.x.data_ptr()
    handle = tdcopier.start_copy_into(graph_on(pyg, "cpu"), static)
    assert handle.get() is static
    assert static.x.data_ptr() == address
    assert static.x.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert handle.stats.packed_leaves == 2


def test_prepared_and_prefetched_graphs_arrive(device, pyg):
    plan = tdcopier.prepare(graph_on(pyg, "cpu"), device)
    assert_graph(plan.start_copy(graph_on(pyg, "cpu")).get(), graph_on(pyg, device))
    plan.start_copy(graph_on(pyg, "cpu", 7)).get()
    assert (plan.fits, plan.misfits) == (1, 1)
    with tdcopier.prefetch([graph_on(pyg, "cpu", n) for n in (3, 4)], device) as loader:
        for nodes, moved in zip((3, 4), loader, strict=True):
            assert_graph(moved, graph_on(pyg, device, nodes))


def test_a_modified_attribute_is_found_in_check_mode(sim, device, pyg, monkeypatch, copy_stream):
    monkeypatch.setattr("tdcopier._checking.enabled", True)
    graph = graph_on(pyg, "cpu")
    with sim.hold(copy_stream):
        handle = tdcopier.start_copy([graph], device)
        graph.x.add_(1)
    with pytest.raises(tdcopier.SourceModifiedError, match=r"^data\[0\]\['x'\] was modified"):
        handle.get()
    del handle
