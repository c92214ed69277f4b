"""Parcels and TensorDicts in the object store of Ray, and of a stand-in for it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from ray_stand_ins import stand_in_for_ray
from support import assert_same, oracle, run_python

import tdcopier

tensordict = pytest.importorskip("tensordict")


@pytest.fixture(scope="module")
def real_ray() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    ray.init(
        num_cpus=1, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False
    )
    yield ray
    ray.shutdown()


@pytest.fixture(params=["its stand-in", "ray"])
def ray(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Ray, with `tdcopier.ray` made anew for it."""
    if request.param == "ray":
        found = request.getfixturevalue("real_ray")
    else:
        stand_in_for_ray(monkeypatch)
        found = importlib.import_module("ray")
    monkeypatch.delitem(sys.modules, "tdcopier.ray", raising=False)
    importlib.import_module("tdcopier.ray")
    yield found
    found.util.deregister_serializer(tensordict.TensorDict)


def batch() -> Any:
    inner = tensordict.TensorDict({"b": torch.ones(4, 2, dtype=torch.int8)}, [4])
    leaves = {"a": torch.arange(4.0), "inner": inner, "column": torch.rand(2, 4).t()}
    return tensordict.TensorDict(leaves, [4])


class Derived(tensordict.TensorDict):
    pass


def packed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Returns what is packed from now on by `tdcopier.ray`."""
    seen: list[Any] = []

    def pack(tree: Any) -> tdcopier.Parcel:
        seen.append(tree)
        return tdcopier.pack(tree)

    monkeypatch.setattr(sys.modules["tdcopier.ray"], "pack", pack)
    return seen


def test_a_tensordict_is_put_as_a_parcel_and_may_be_written_when_it_is_back(ray, monkeypatch):
    seen, td = packed(monkeypatch), batch()
    sys.modules["tdcopier.ray"].register()
    reference = ray.put([td, {"again": td["inner"]}])
    assert [each is one for each, one in zip(seen, [td, td["inner"]], strict=True)] == [True] * 2
    first, second = ray.get(reference), ray.get(reference)
    assert type(first[0]) is tensordict.TensorDict
    assert_same(first[0], oracle(td, "cpu"))
    first[0]["a"].fill_(-1)
    first[1]["again"]["b"].fill_(-1)
    assert_same(second[0], oracle(td, "cpu"))
    assert_same(second[1]["again"], oracle(td["inner"], "cpu"))


def test_only_the_classes_that_are_named_are_packed(ray, monkeypatch):
    seen, register = packed(monkeypatch), sys.modules["tdcopier.ray"].register
    register(dict)
    ray.put(batch())
    ray.util.deregister_serializer(dict)
    assert not any(isinstance(each, tensordict.TensorDict) for each in seen)
    seen.clear()
    register()
    ray.put(Derived({"a": torch.ones(2)}, [2]))
    assert not [each for each in seen if type(each) is Derived]


def test_a_parcel_is_read_where_the_store_has_it(ray, device):
    tree = {"x": torch.rand(50_000), "n": 3}
    reference = ray.put(tdcopier.pack(tree))
    first, second = ray.get(reference), ray.get(reference)
    addresses = {np.frombuffer(each, np.uint8).ctypes.data for each in (first, second)}
    assert len(addresses) == 1
    assert first._is_read_only
    got = tdcopier.copy(first, device)
    assert torch.equal(got["x"].cpu(), tree["x"])
    assert got["n"] == 3


def test_without_ray_its_part_says_how_to_get_it():
    program = """
        import sys
        sys.modules["ray"] = None
        try:
            import tdcopier.ray
        except ModuleNotFoundError as error:
            print(error)
        """
    assert run_python(program).startswith("tdcopier.ray needs Ray: pip install ray")
