"""The benchmark of many leaves: its check of copies, the cost of a leaf, and its plot."""

import itertools
from types import ModuleType

import pytest
import torch
from benchmark_support import a_sizes_result, load

from tdcopier import workloads

sizes, run = load("sizes"), load("run")

CUDA = torch.device("cuda", 0)
SVG = "{http://www.w3.org/2000/svg}"


def test_leaves_go_from_10_to_100_000_in_steps_of_about_three() -> None:
    counts = sizes.counts(CUDA)
    assert (counts[0], counts[-1]) == (10, 100_000)
    assert {sizes.SMALL, sizes.LARGE} <= set(counts)
    ratios = [larger / smaller for smaller, larger in itertools.pairwise(counts)]
    assert all(3.0 <= ratio <= 10 / 3 for ratio in ratios)


@pytest.mark.parametrize(("count", "ways"), [(10_000, 3), (30_000, 2)])
def test_more_than_10_000_leaves_are_not_moved_by_to(count: int, ways: int) -> None:
    names = [way.name for way in sizes.contenders(CUDA, count)]
    assert len(names) == ways
    assert names[0] == "tdcopier"
    assert (".to() per leaf" in names) == (ways == 3)


def test_more_leaves_get_fewer_rounds_but_never_none() -> None:
    rounds = [sizes.rounds_of(count, 500) for count in sizes.COUNTS]
    assert rounds == sorted(rounds, reverse=True)
    assert rounds[-1] == sizes.MIN_ROUNDS


def test_all_ways_give_a_right_copy_and_a_wrong_one_is_found(sim: ModuleType) -> None:
    device = torch.device("sim", 0)
    source = workloads.flat_dict(leaves=20)
    for way in sizes.contenders(device, 20):
        assert not sizes._is_wrong(way, source, device), way.name
    right = sizes.contenders(device, 20)[0].run(source)
    other = workloads.flat_dict(leaves=20, seed=1)["leaf_7"].to(device)
    assert not sizes.differs(right, source, device)
    assert sizes.differs(right | {"leaf_7": other}, source, device)
    assert sizes.differs(right | {"leaf_7": source["leaf_7"]}, source, device)
    assert sizes.differs({key: right[key] for key in list(right)[1:]}, source, device)


@pytest.mark.parametrize(("large_us", "hit"), [(0.75, True), (0.76, False)])
def test_the_target_is_the_growth_of_the_cost_of_a_leaf(large_us: float, hit: bool) -> None:
    result = a_sizes_result()
    result["sizes"]["100000"]["us_per_leaf"]["tdcopier"] = large_us
    assert [target["hit"] for target in sizes.targets(result)] == [True, hit]


def test_a_wrong_copy_by_any_way_misses_a_target_and_a_missing_one_is_an_error() -> None:
    result = a_sizes_result()
    result["sizes"]["1000"]["wrong"][".to() per leaf"] = 1
    assert [target["hit"] for target in sizes.targets(result)] == [False, True]
    del result["sizes"]["100000"]["us_per_leaf"]["tdcopier"]
    with pytest.raises(KeyError, match="tdcopier"):
        sizes.targets(result)
