"""The benchmark of features that are for speed alone: their switches, its figures and targets."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from benchmark_support import load
from scenario_world import held

import tdcopier
from tdcopier import _C, workloads

speed_only, switched = load("loops.speed_only"), load("copies.switched")
entry, sections = load("tool.run"), load("tool.sections")
baselines, directions, timed = (load(f"copies.{name}") for name in ("ways", "directions", "timed"))
SWITCHES = {
    speed_only.DEFERRED: _C.testing.use_deferred_batches,
    speed_only.PREFETCHING: _C.testing.use_prefetching,
    speed_only.KERNEL: _C.testing.use_kernel_for_leaves,
    speed_only.SHARED_CACHE: _C.testing.use_shared_cache_store,
    speed_only.BATCHES: _C.testing.use_batch_transfers,
}
STARTS: dict[str, Callable[[Any, Any], Any]] = {
    "start_copy": tdcopier.start_copy,
    "prepared": lambda tree, device: tdcopier.prepare(tree, device).start_copy(tree),
}


def transfers_of_a_deferred_copy(start: Callable[[Any, Any], Any]) -> int:
    """Returns how many transfers have been made before the copy is used."""
    with held():
        handle = start([torch.ones(10)], "sim")
    handle.wait_staged()
    made = handle.stats.transfers
    assert bool((handle.get()[0] == 1).all())
    return int(made)


# ---- switches ------------------------------------------------------------------------------------


@pytest.mark.sim
@pytest.mark.parametrize("start", STARTS.values(), ids=list(STARTS))
def test_without_deferred_batches_each_is_sent_at_once(sim: ModuleType, start: Any) -> None:
    with switched.off(SWITCHES[speed_only.DEFERRED]):
        assert transfers_of_a_deferred_copy(start) == 1
    assert transfers_of_a_deferred_copy(start) == 0


@pytest.mark.sim
def test_without_the_kernel_for_leaves_they_are_staged(sim: ModuleType) -> None:
    tree = switched.pinned(workloads.many_large(64, 1 << 14))

    def read_in_place() -> int:
        handle = tdcopier.start_copy(tree, "sim")
        assert baselines.differences(handle.get(), tree, torch.device("sim:0")) == []
        return int(handle.stats.rows_in_place)

    with switched.off(SWITCHES[speed_only.KERNEL]):
        assert read_in_place() == 0
    assert read_in_place() == 64


@pytest.mark.sim
def test_without_stores_to_the_shared_cache_all_go_to_memory(sim: ModuleType) -> None:
    source = workloads.one_large(40 << 20)

    def stored() -> int:
        before = _C.testing.shared_cache_copies()
        with sim.hold(_C.copy_stream("sim")):
            handle = tdcopier.start_copy(source, "sim", use_background_thread=False)
            handle.wait_staged()
        assert torch.equal(handle.get().cpu(), source)
        return int(_C.testing.shared_cache_copies() - before)

    _C.testing.set_shared_cache_store(True)  # on any processor
    try:
        assert stored() > 0
        with switched.off(SWITCHES[speed_only.SHARED_CACHE]):
            assert stored() == 0
    finally:
        _C.testing.set_shared_cache_store(False)


@pytest.mark.sim
@pytest.mark.parametrize(
    ("name", "make"),
    [
        (speed_only.PREFETCHING, switched.of_prefetching),
        (speed_only.KERNEL, switched.of_kernel),
    ],
)
def test_a_case_copies_right_values_with_a_feature_and_without(
    sim: ModuleType, name: str, make: Callable[[], dict[str, Any]]
) -> None:
    switch, direction = SWITCHES[name], directions.with_host(torch.device("sim", 0))["h2d"]
    for case in make().values():
        source = case.sources(direction)[0]
        for way in switched.both(switch, partial(case.way, direction)):
            for _ in range(3):  # later ones reuse outputs
                assert timed.wrong_places(way, source, direction, case.kind) == []


def test_a_switch_is_on_again_after_an_error() -> None:
    states: list[bool] = []
    way = switched.both(states.append, lambda: load("tool.way").Way("any"))[1]
    with pytest.raises(ValueError, match="stop"), way.around():
        raise ValueError("stop")
    assert states == [False, True]


# ---- figures -------------------------------------------------------------------------------------


def test_a_ratio_is_the_median_of_those_of_pairs() -> None:
    found = switched.figures([1.0, 10.0, 100.0], [2.0, 11.0, 300.0])
    assert (found["with_us"], found["without_us"], found["repeats"]) == (10.0, 11.0, 3)
    assert found["ratio"] == 2.0
    assert (found["low"], found["high"]) == pytest.approx((1.1, 3.0))


def test_every_feature_has_cases(sim: ModuleType) -> None:
    bench = load("tool.measure").Bench(torch.device("sim", 0), 4, lambda label: iter)
    cases = {
        speed_only.DEFERRED: speed_only.LOOPS,
        speed_only.PREFETCHING: switched.of_prefetching(),
        speed_only.KERNEL: switched.of_kernel(),
        speed_only.SHARED_CACHE: switched.of_shared_cache(bench),
        speed_only.BATCHES: switched.of_batches(bench),
    }
    least = 4 if importlib.util.find_spec("tensordict") else 2
    assert all(len(each) >= least for each in cases.values())
    assert cases.keys() == SWITCHES.keys()


# ---- targets -------------------------------------------------------------------------------------


def result() -> dict[str, Any]:
    """Returns a result in which each feature gains in one case and loses in another."""

    def case(ratio: float) -> dict[str, Any]:
        by_case = {"with_us": 100.0, "without_us": 100 * ratio, "repeats": 7}
        size = {"leaves": 1000, "bytes": 64_000}
        return {**size, **by_case, "ratio": ratio, "low": ratio - 0.01, "high": ratio + 0.01}

    features = {
        name: {"cases": {"labels": case(0.9), "images": case(1.03)}, "wrong": {"labels": 0}}
        for name in SWITCHES
    }
    return {"features": features, "shared_cache_copies": 1234}


@pytest.mark.parametrize("name", list(SWITCHES))
def test_a_feature_that_gains_nothing_misses_its_own_target_alone(name: str) -> None:
    found = result()
    assert all(target["hit"] for target in entry.targets_of(speed_only, found))
    found["features"][name]["cases"]["images"]["ratio"] = 1.019
    (missed,) = [t for t in entry.targets_of(speed_only, found) if not t["hit"]]
    assert missed["what"] == f"{name}: images, time without over with"


def test_a_case_that_gains_by_chance_is_not_the_best_one() -> None:
    cases = result()["features"][speed_only.KERNEL]["cases"]
    cases["labels"] |= {"ratio": 1.2, "low": 0.9, "high": 1.5}
    assert speed_only.best_case(cases) == "images"


def test_a_wrong_value_misses_the_target_on_values() -> None:
    found = result()
    found["features"][speed_only.DEFERRED]["wrong"]["labels"] = 1
    (missed,) = entry.targets_of(speed_only, found, speed=False)
    assert not missed["hit"]
    assert "differ from .to()" in missed["what"]


def test_the_table_has_a_row_of_each_case_and_the_copies_to_the_shared_cache() -> None:
    found = result()
    found["features"][speed_only.DEFERRED]["wrong"]["labels"] = 2
    table, stored = sections.speed_only(found)
    row = "| 1,000 | 64 KB | 100 | 90 | 0.900 x | 0.890 x | 0.910 x | 7 |"
    assert f"| deferred batches | labels (wrong: 2) {row}" in table
    assert f"| kernel for small pinned leaves | labels {row}" in table
    assert table.count("|  | images |") == len(SWITCHES)
    assert stored.endswith(": 1,234.")
