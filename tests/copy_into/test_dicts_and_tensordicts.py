"""Nested dicts and TensorDicts on the two sides of a copy into existing memory."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import same_bytes
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    TensorDict,
    TensorDictParams,
    UnbatchedTensor,
    lazy_stack,
    tensorclass,
)

import tdcopier
from tdcopier import _C
from tdcopier.tensordict import _nodes, _walk

ROWS = 6


@tensorclass
class Sample:
    x: torch.Tensor
    name: str


@tensorclass
class Optional:
    x: torch.Tensor
    other: torch.Tensor | None = None


def leaf(value: float, *shape: int) -> torch.Tensor:
    return torch.full((ROWS, *shape), value)


def as_dict(value: float) -> dict[str, Any]:
    inner = {"obs": leaf(value, 3), "deep": {"done": leaf(value + 1), "none": {}}}
    return {"reward": leaf(value + 2), "next": inner, "empty": {}}


def as_tensordict(value: float) -> TensorDict:
    return TensorDict(as_dict(value), [ROWS])


def as_mixture(value: float) -> dict[str, Any]:
    made = as_dict(value)
    made["next"]["deep"] = TensorDict(made["next"]["deep"], [ROWS])
    return collections.OrderedDict(reversed(made.items()))


FORMS: dict[str, Callable[[float], Any]] = {
    "dict": as_dict,
    "TensorDict": as_tensordict,
    "mixture": as_mixture,
    "locked": lambda value: as_tensordict(value).lock_(),
}
WITHIN: dict[str, Callable[[Any], Any]] = {
    "root": lambda tree: tree,
    "list": lambda tree: [{"a": tree}, torch.zeros(ROWS, 0)],
}


def leaves_of(tree: Any) -> dict[str, torch.Tensor]:
    """Returns the leaves of a tree in one of the forms, by their joined keys."""
    if isinstance(tree, torch.Tensor):
        return {"": tree}
    items = enumerate(tree) if isinstance(tree, list) else tree.items()
    return {f"{key}/{rest}": x for key, child in items for rest, x in leaves_of(child).items()}


def assert_equal(tree: Any, expected: Any) -> None:
    got, wanted = leaves_of(tree), leaves_of(expected)
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        assert same_bytes(got[key], value), key


@pytest.mark.parametrize("within", WITHIN)
@pytest.mark.parametrize("destination", FORMS)
@pytest.mark.parametrize("source", FORMS)
def test_each_form_fills_each_other(device, source, destination, within):
    for places in ((device, "cpu"), ("cpu", device)):
        from_tree = tdcopier.copy(WITHIN[within](FORMS[source](5)), places[0])
        to_tree = tdcopier.copy(WITHIN[within](FORMS[destination](0)), places[1])
        handle = tdcopier.start_copy_into(from_tree, to_tree)
        assert handle.get() is to_tree
        assert_equal(to_tree, from_tree)
        assert handle.stats.packed_leaves == (3 if within == "root" else 4)
        assert handle.stats.delegated_leaves == 0


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("storage", FORMS)
@pytest.mark.parametrize("batch", FORMS)
def test_rows_go_from_each_form_to_each_other(device, batch, storage, pinned):
    index = torch.tensor([4, 1])
    tables = FORMS[storage](0)
    rows = [each[index] for each in leaves_of(FORMS[batch](7)).values()]
    flat = iter(rows)

    def picked(tree: Any) -> Any:
        if isinstance(tree, torch.Tensor):
            return next(flat).to(device)
        children = {key: picked(child) for key, child in tree.items()}
        return TensorDict(children, [2]) if isinstance(tree, TensorDict) else children

    given = picked(FORMS[batch](7))
    if pinned:
        with tdcopier.pin_memory_(tables, device):
            tdcopier.scatter(given, tables, index)
    else:
        tdcopier.scatter(given, tables, index)
    filled = leaves_of(tables)
    for key, value in leaves_of(given).items():
        expected = torch.zeros_like(filled[key]) + leaves_of(as_dict(0))[key]
        expected[index] = value.cpu()
        assert same_bytes(filled[key], expected), key
    out = tdcopier.copy(given, device)
    for each in leaves_of(out).values():
        each.zero_()
    assert tdcopier.gather(tables, index, device, out=out) is out
    assert_equal(out, given)


def _refused(source: Any, destination: Any) -> str:
    with pytest.raises((ValueError, TypeError)) as caught:
        tdcopier.copy_into(source, destination)
    return str(caught.value)


def test_differences_are_named_with_their_path():
    lacks = as_tensordict(0)
    del lacks["next", "deep", "done"]
    assert _refused(as_dict(1), lacks) == (
        "source['next']['deep'] has 'done', which destination['next']['deep'] lacks: both must "
        "have the same"
    )
    assert _refused(lacks, as_dict(0)) == (
        "destination['next']['deep'] has 'done', which source['next']['deep'] lacks: both must "
        "have the same"
    )
    assert _refused(lacks, as_tensordict(0)) == (
        "destination['next']['deep'] has 'done', which source['next']['deep'] lacks: both must "
        "have the same"
    )
    other = as_dict(0)
    other["next"]["obs"] = leaf(0, 4)
    assert _refused(as_tensordict(1), other).startswith(
        "source['next']['obs'] has shape (6, 3), but destination['next']['obs'] has shape (6, 4)"
    )
    other["next"] = leaf(0)
    assert _refused(as_tensordict(1), other).startswith(
        "source['next'] is a TensorDict, a container by key, but destination['next'] is a Tensor, "
        "a leaf: both must be leaves"
    )
    with pytest.raises(ValueError, match=r"batch\['next'\]\['deep'\] lacks"):
        tdcopier.scatter(lacks[:2], as_dict(0), [0, 1])
    wrong: dict[str, Any] = {"next": {"obs": torch.zeros(2, 4)}}
    with pytest.raises(ValueError, match=r"batch\['next'\]\['obs'\] has shape \(2, 4\)"):
        tdcopier.scatter(wrong, TensorDict({"next": {"obs": leaf(0, 3)}}, [ROWS]), [0, 1])


def _with_data(form: str, value: str) -> Any:
    tree = {
        "x": leaf(0),
        "name": value,
        "each": [value] * (ROWS - 1) + ["last"],
        "in": {"none": None, "name": value},
    }
    return TensorDict(tree, [ROWS]) if form == "TensorDict" else tree


def _plain(tree: Any) -> Any:
    """Returns the opaque values of `_with_data`, from either form."""
    if isinstance(tree, TensorDict):
        inner = tree["in"]
        return tree["name"], list(tree["each"]), inner["none"], inner["name"]
    return tree["name"], tree["each"], tree["in"]["none"], tree["in"]["name"]


@pytest.mark.parametrize("forms", [("dict", "TensorDict"), ("TensorDict", "dict")])
def test_non_tensor_data_stand_for_their_values(forms):
    source, destination = _with_data(forms[0], "new"), _with_data(forms[1], "old")
    handle = tdcopier.start_copy_into(source, destination)
    handle.get()
    assert _plain(destination) == _plain(_with_data("dict", "old"))
    assert handle.stats.opaque_leaves == ROWS + 3
    assert handle.stats.opaque_differences == ROWS + 1
    handle = tdcopier.start_copy_into(source, destination, copy_opaque=True)
    handle.get()
    assert _plain(destination) == _plain(source) == _plain(_with_data("dict", "new"))
    assert handle.stats.opaque_differences == 0
    if forms[1] == "TensorDict":
        assert type(destination.get("name")) is NonTensorData
        destination.lock_()
        with pytest.raises(ValueError, match=r"it is in a locked .*: call unlock_"):
            tdcopier.copy_into(_with_data("dict", "third"), destination, copy_opaque=True)
        assert _plain(destination) == _plain(source)


def test_a_value_in_a_container_of_non_tensor_data_is_compared_but_not_replaced():
    tensordict = TensorDict({"x": leaf(0)}, [ROWS]).set_non_tensor("meta", {"rate": 1})
    tree = {"x": leaf(2), "meta": {"rate": 2}}
    handle = tdcopier.start_copy_into(tree, tensordict)
    handle.get()
    assert handle.stats.opaque_differences == 1
    with pytest.raises(ValueError, match=r"\['meta'\]\['rate'\] differs .* set the data as a who"):
        tdcopier.copy_into(tree, tensordict, copy_opaque=True)
    assert tensordict["meta"] == {"rate": 1}
    tdcopier.copy_into(tensordict, tree, copy_opaque=True)
    assert tree["meta"] == {"rate": 1}
    assert "has 'other', which" in _refused({"x": leaf(2), "meta": {"other": 2}}, tensordict)
    assert _refused({"x": leaf(2), "meta": leaf(1)}, tensordict).startswith(
        "source['meta'] is a Tensor, a leaf, but destination['meta'] is a dict, a container by key"
    )
    assert tensordict["x"].eq(2).all()


def test_tensorclasses_are_dicts_of_their_fields(device):
    def sample(value: float, name: str) -> Sample:
        return Sample(x=leaf(value), name=name, batch_size=[ROWS])

    tree = {"in": {"x": leaf(0).to(device), "name": "old"}}
    tdcopier.copy_into({"in": sample(3, "new")}, tree, copy_opaque=True)
    assert tree["in"]["x"].eq(3).all()
    assert tree["in"]["name"] == "new"
    held = TensorDict({"in": sample(0, "old")}, [ROWS])
    tdcopier.copy_into(tree, held, copy_opaque=True)
    assert held["in"].x.eq(3).all()
    assert held["in"].name == "new"


def test_fields_of_a_tensorclass_that_are_none_do_not_count(device):
    filled = Optional(x=torch.zeros(2).to(device), batch_size=[])
    tdcopier.copy_into({"x": torch.ones(2)}, filled)
    assert filled.x.tolist() == [1, 1]
    assert filled.other is None


def test_a_lazy_stack_is_a_list_of_its_members(device):
    def stack(value: float) -> LazyStackedTensorDict:
        return lazy_stack([as_tensordict(value), as_tensordict(value + 1)])

    for source, destination in (
        ([as_dict(4), as_tensordict(5)], stack(0)),
        ([{"s": stack(4)}], [{"s": (as_dict(0), as_dict(0))}]),
    ):
        tdcopier.copy_into(tdcopier.copy(source, device), destination)
        members = destination.tensordicts if source[0].keys() != {"s"} else destination[0]["s"]
        for member, value in zip(members, (4, 5), strict=True):
            assert_equal(member, as_dict(value))
    dense = stack(0).to_tensordict()
    for source, destination in (
        ({"k": stack(1)}, {"k": as_dict(0)}),
        (TensorDict({"k": dense}), TensorDict({"k": stack(1)})),
        (TensorDict({"k": stack(1)}), {"k": dense}),
    ):
        message = _refused(source, destination)
        assert "source['k'] is a " in message
        assert "destination['k'] is a " in message
        assert "made with to_tensordict()" in message


def test_other_kinds_are_refused_with_their_path():
    part = as_tensordict(0)._get_sub_tensordict(slice(2))
    params = TensorDictParams(TensorDict({"x": torch.zeros(2)}))
    for kind in (part, params):
        with pytest.raises(TypeError, match=r"destination\['k'\] is a .*with to_tensordict\(\)"):
            tdcopier.copy_into({"k": {"x": torch.zeros(2)}}, {"k": kind})
    nested = TensorDict({"x": leaf(0)}, [ROWS])
    nested._tensordict["d"] = NonTensorData(NonTensorData("a"), batch_size=[ROWS])
    if type(nested._tensordict["d"].__dict__["_non_tensordict"]["data"]) is NonTensorData:
        with pytest.raises(TypeError, match=r"destination\['d'\] is a NonTensorData of a"):
            tdcopier.copy_into({"x": leaf(0), "d": "a"}, nested)


def test_a_tensor_without_batch_is_the_tensor_in_it():
    shared = UnbatchedTensor(torch.zeros(2))
    destination = TensorDict({"x": leaf(0), "in": {"shared": shared}}, [ROWS])
    tdcopier.copy_into({"x": leaf(1), "in": {"shared": torch.ones(2)}}, destination)
    assert shared._base_tensor().tolist() == [1, 1]
    back = {"x": leaf(0), "in": {"shared": torch.zeros(2)}}
    tdcopier.copy_into(destination, back)
    assert back["in"]["shared"].tolist() == [1, 1]


def test_paths_of_pairs_are_those_of_dicts():
    pairs = _C.pairs_with_paths(as_tensordict(0), as_dict(0))
    assert sorted(path for path, *_ in pairs) == [
        "['next']['deep']['done']",
        "['next']['obs']",
        "['reward']",
    ]


def test_two_tensordicts_of_tensors_are_paired_without_python_code(monkeypatch):
    taken = []

    def take(value: Any, walk: Any) -> Any:
        taken.append(value)
        return take_dense(value, walk)

    take_dense = _walk._take_dense
    monkeypatch.setattr(_walk, "_take_dense", take)
    tree = {"reward": leaf(0), "next": {"obs": leaf(0, 3), "deep": {"done": leaf(0)}}}
    source = TensorDict(tree, [ROWS])
    destination = TensorDict({key: source[key].clone() for key in reversed(tree)}, [ROWS])
    paths = ["['next']['deep']['done']", "['next']['obs']", "['reward']"]
    assert sorted(path for path, *_ in _C.pairs_with_paths(source, destination)) == paths
    source["next", "deep", "done"] += 1
    tdcopier.copy_into([source], [destination])
    assert_equal(destination, source)
    assert bool(taken) is not _nodes.IS_KNOWN_LAYOUT
    destination["next"].set_non_tensor("name", "old")
    source["next"].set_non_tensor("name", "new")
    handle = tdcopier.start_copy_into(source, destination)
    handle.get()
    assert handle.stats.opaque_differences == 1
    assert taken


def test_an_empty_tensordict_in_one_of_two_does_not_count():
    source = TensorDict({"x": leaf(1), "in": {"y": leaf(2)}}, [ROWS])
    destination = TensorDict({"x": leaf(0), "in": {"y": leaf(0), "none": {}}}, [ROWS])
    tdcopier.copy_into(source, destination)
    assert destination["x"].eq(1).all()
    assert destination["in", "y"].eq(2).all()
    tdcopier.copy_into(TensorDict({}), TensorDict({"none": {}}))
    tdcopier.copy_into(destination, source)


@pytest.mark.parametrize("both", [False, True])
def test_a_tensordict_that_contains_itself_is_refused(both):
    def nested(contains_itself: bool) -> TensorDict:
        made = TensorDict({"x": leaf(0)}, [ROWS])
        made._tensordict["in"] = made if contains_itself else made.clone()
        return made

    with pytest.raises(RecursionError):
        tdcopier.copy_into(nested(True), nested(both))


def test_a_dict_that_contains_itself_beside_a_tensordict_is_refused():
    inner: dict[str, Any] = {}
    inner["in"] = inner
    nested: Any = TensorDict({})
    nested._tensordict["in"] = nested
    with pytest.raises(RecursionError):
        tdcopier.copy_into(inner, nested)
