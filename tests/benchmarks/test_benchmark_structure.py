"""The benchmark of containers and opaque values: its trees and times."""

from collections import OrderedDict
from types import ModuleType

import pytest
import torch
from benchmark_support import a_structure_result, load, measure

structure = load("structure")


def test_trees_are_of_the_size_that_their_names_say() -> None:
    cases = structure.cases()
    assert cases["empty list"].tree == []
    integers = cases["integers in a dict of lists"]
    values = [value for part in integers.tree.values() for value in part]
    assert values == list(range(960))
    assert integers.opaque_values == 960
    opaque = cases["opaque values"]
    assert len(opaque.tree) == opaque.opaque_values == 1000
    kinds = [type(value) for value in opaque.tree]
    assert {kinds.count(kind) for kind in (int, str, type(None), structure.Note)} == {250}


@pytest.mark.parametrize("kind", list(structure.KINDS))
def test_containers_hold_the_integers_that_are_taken_off_their_cost(kind: str) -> None:
    cases = structure.cases()
    tree = cases[kind].tree
    assert len(tree) == structure.CONTAINERS
    assert cases[kind].opaque_values == 2 * structure.CONTAINERS
    held = [value for value in structure._parts(tree) if type(value) is int]
    assert held == cases[structure.UNWRAPPED].tree


def test_containers_rebuilt_with_the_same_values_are_no_change() -> None:
    note = structure.Note()
    tree = [(note,), {"key": note}, structure.Pair(1, 2), structure.Record(3, 4)]
    rebuilt = [(note,), {"key": note}, structure.Pair(1, 2), structure.Record(3, 4)]
    assert structure.changes(rebuilt, tree) == 0


@pytest.mark.parametrize(
    "changed",
    [
        [(1, 2), {"key": 3}],
        [[1, 2], OrderedDict(key=3)],
        [[1, 2], {"other": 3}],
        [[1, 2], {"key": None}],
        [[1, 2], {"key": 3}, 4],
    ],
)
def test_another_type_key_or_value_is_a_change(changed) -> None:
    assert structure.changes(changed, [[1, 2], {"key": 3}]) == 1


def test_an_equal_value_that_is_another_object_is_a_change() -> None:
    assert structure.changes([float("1.5")], [float("1.5")]) == 1


def test_a_container_costs_what_it_adds_unless_it_is_passed_through_whole() -> None:
    wrapped, unwrapped = measure.summarise([30.0]), measure.summarise([10.0])
    assert structure.per_container_us(wrapped, unwrapped, walked=True) == pytest.approx(0.1)
    assert structure.per_container_us(wrapped, unwrapped, walked=False) is None


@pytest.mark.parametrize(
    ("opaque_us", "integers_us", "changed", "hits"),
    [
        (0.099, 99.9, 0, [True, True, True]),
        (0.1, 99.9, 0, [True, False, True]),
        (0.099, 100.0, 0, [True, True, False]),
        (0.099, 99.9, 1, [False, True, True]),
    ],
)
def test_targets_are_met_below_their_bounds(opaque_us, integers_us, changed, hits) -> None:
    result = a_structure_result()
    result["us_per_opaque_value"]["tdcopier"] = opaque_us
    integers = result["cases"]["integers in a dict of lists"]["contenders"]
    integers["tdcopier"]["median_us"] = integers_us
    result["changed_values"] = changed
    assert [target["hit"] for target in structure.targets(result)] == hits
    assert [target["hit"] for target in structure.targets(result, speed=False)] == hits[:1]


def test_it_runs_on_the_simulated_device_and_nothing_changes(sim: ModuleType) -> None:
    result = structure.run(torch.device("sim", 0), 10, lambda label: iter, keep_gc=False)
    assert result["changed_values"] == 0
    assert [target["hit"] for target in result["targets"]] == [True]
    compared = {case: list(found["contenders"]) for case, found in result["cases"].items()}
    assert compared.pop("empty list") == ["tdcopier", structure.PYTREE]
    assert compared.pop("opaque values") == ["tdcopier", structure.PYTREE]
    assert compared.pop("integers in a dict of lists") == ["tdcopier", structure.PYTREE]
    assert {tuple(ways) for ways in compared.values()} == {("tdcopier",)}
    seen = {case: found["opaque_values_seen"] for case, found in result["cases"].items()}
    assert seen["opaque values"] == 1000
    walked = {kind: us is not None for kind, us in result["us_per_container"].items()}
    assert walked == {kind: seen[kind] == 2 * structure.CONTAINERS for kind in structure.KINDS}
    assert all(walked[kind] for kind in ("list", "tuple", "dict"))


def test_one_value_costs_its_share_of_the_full_list_less_the_empty_one(sim: ModuleType) -> None:
    result = structure.run(torch.device("sim", 0), 5, lambda label: iter, keep_gc=False)
    for way, us in result["us_per_opaque_value"].items():
        full, empty = (
            result["cases"][case]["contenders"][way]["median_us"]
            for case in ("opaque values", "empty list")
        )
        assert us == pytest.approx((full - empty) / 1000)
