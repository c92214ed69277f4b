"""When the figures of copies hit their targets, and what the machine's limits are."""

import threading
from types import ModuleType

import pytest
import torch
from benchmark_support import a_result, load

from tdcopier import workloads

copies, copy_targets = load("copies"), load("copy_targets")
directions, limits = load("directions"), load("limits")

CUDA = [torch.device("cuda", index) for index in range(2)]
ON_CUDA = {
    "h2d": directions.h2d(CUDA[0]),
    "d2h": directions.d2h(CUDA[0]),
    "d2d": directions.d2d(*CUDA),
}


def a_workload(dma: float, memcpy: float | None = None, **changes) -> dict:
    """Returns a workload's result, as multiples of the limits."""
    over = {"dma": dma} if memcpy is None else {"dma": dma, "memcpy": memcpy}
    return {
        "wrong_leaves": {"tdcopier": 0},
        "limits": {limit: {"ours_over": ratio} for limit, ratio in over.items()},
    } | changes


@pytest.mark.parametrize(
    ("name", "speedup", "hit"),
    [
        ("h2d", 47.9, False),
        ("h2d", 48.0, True),
        ("d2h", 39.9, False),
        ("d2h", 40.0, True),
        ("d2d", 19.9, False),
        ("d2d", 20.0, True),
    ],
)
def test_each_direction_has_its_own_speed_target(name: str, speedup: float, hit: bool) -> None:
    batch = a_result(name)["workloads"]["detection_batch"] | {"ratios": {".to() per leaf": speedup}}
    targets = copies.targets(ON_CUDA[name], {"detection_batch": batch})
    assert [target["hit"] for target in targets] == [True, hit, True]


@pytest.mark.parametrize("name", list(ON_CUDA))
def test_the_transfer_target_needs_the_outside_count_too(name: str) -> None:
    batch = a_result(name)["workloads"]["detection_batch"] | {f"{name}_memcpys": 528}
    targets = copies.targets(ON_CUDA[name], {"detection_batch": batch})
    assert [target["hit"] for target in targets] == [True, True, False]
    assert targets[-1]["found"] == [528, 1, 528]


def test_a_wrong_leaf_of_any_workload_misses_a_target() -> None:
    found = {"flat_dict": {"wrong_leaves": {"tdcopier": 2}}}
    assert [target["hit"] for target in copies.targets(ON_CUDA["h2d"], found)] == [False]


def test_a_limit_that_moved_other_bytes_misses_a_target_of_its_own() -> None:
    found = {"flat_dict": {"wrong_leaves": {"tdcopier": 0, "limit: one pinned DMA": 1}}}
    targets = copies.targets(ON_CUDA["h2d"], found)
    assert [(target["found"], target["hit"]) for target in targets] == [(0, True), (1, False)]


@pytest.mark.parametrize(
    ("direction", "workload", "dma", "memcpy", "found", "hit"),
    [
        ("h2d", "one_large", 1.3, 1.15, 1.15, True),
        ("h2d", "one_large", 1.15, 1.3, 1.15, True),
        ("h2d", "many_large", 1.3, 1.16, 1.16, False),
        ("h2d", "detection_batch_with_images", 1.51, 1.0, 1.51, False),
        ("h2d", "detection_batch_with_images", 1.5, 3.0, 1.5, True),
        ("d2h", "one_large", 1.04, None, 1.04, False),
        ("d2h", "one_large", 1.03, None, 1.03, True),
    ],
)
def test_large_copies_are_held_against_the_slower_of_the_limits_that_bind_them(
    direction: str, workload: str, dma: float, memcpy: float | None, found: float, hit: bool
) -> None:
    (_, target) = copies.targets(ON_CUDA[direction], {workload: a_workload(dma, memcpy)})
    assert (target["found"], target["hit"]) == (found, hit)


def test_a_limit_that_was_not_taken_is_no_hit_but_an_error() -> None:
    with pytest.raises(KeyError, match="memcpy"):
        copies.targets(ON_CUDA["h2d"], {"one_large": a_workload(1.0)})


def test_the_best_of_the_others_is_neither_ours_nor_a_limit_nor_pinned_before() -> None:
    kinds = {
        "tdcopier": ("way", None),
        "tdcopier, no background thread": ("way", 1.1),
        ".to() per leaf": ("way", 3.0),
        "pin_memory() and .to() per leaf": ("way", 2.4),
        "pinned beforehand, non_blocking .to()": ("prepared", 0.9),
        "limit: one pinned DMA": ("limit", 0.8),
    }
    batch = a_workload(
        1.25,
        kinds={way: kind for way, (kind, _) in kinds.items()},
        ratios={way: ratio for way, (_, ratio) in kinds.items() if ratio is not None},
    )
    assert copy_targets.best_other(batch) == ("pin_memory() and .to() per leaf", 2.4)
    (_, target) = copies.targets(ON_CUDA["h2d"], {"atari_replay": batch})
    assert (target["wanted"], target["found"], target["hit"]) == (">= 2.5", 2.4, False)
    batch["ratios"]["pin_memory() and .to() per leaf"] = 2.5
    assert copies.targets(ON_CUDA["h2d"], {"atari_replay": batch})[1]["hit"]


def test_every_workload_of_a_target_is_one_that_is_run() -> None:
    for direction in ON_CUDA.values():
        assert {*direction.over_limits, *direction.min_over_best} <= set(workloads.WORKLOADS)


def test_limits_come_from_the_fastest_memcpy_and_say_its_threads() -> None:
    medians_us = {
        "tdcopier": 30.0,
        "limit: one pinned DMA": 20.0,
        "limit: memcpy into pinned memory, 1 thread": 60.0,
        "limit: memcpy into pinned memory, 8 threads": 25.0,
        "limit: memcpy into pinned memory, 16 threads": 40.0,
    }
    found = limits.found_limits(ON_CUDA["h2d"], 1_000_000, (1, 8, 16), medians_us, "tdcopier")
    assert list(found) == ["dma", "memcpy"]
    assert found["dma"]["ours_over"] == 1.5
    assert found["dma"]["gb_per_s"] == 50.0
    assert found["memcpy"]["threads"] == 8
    assert found["memcpy"]["ours_over"] == 1.2
    with pytest.raises(KeyError, match="one pinned DMA"):
        limits.found_limits(ON_CUDA["h2d"], 1, (), {"tdcopier": 1.0}, "tdcopier")


@pytest.mark.parametrize(
    ("name", "size_bytes", "dmas", "memcpys"),
    [("h2d", 4_000_000, 1, 2), ("h2d", 4_000, 1, 0), ("d2h", 4_000_000, 1, 0), ("d2d", 4, 1, 0)],
)
def test_limits_move_the_bytes_of_the_batch_and_no_others(
    sim: ModuleType, name: str, size_bytes: int, dmas: int, memcpys: int
) -> None:
    direction = directions.possible(torch.device("sim", 0))[name]
    on_host = {"a": workloads.one_large(size_bytes - 3), "b": [torch.tensor([True, False, True])]}
    source = workloads.map_tensors(on_host, lambda leaf: leaf.to(direction.source))
    total = workloads.total_bytes(source)
    ways = limits.contenders(direction, total, [limits.Crew(threads, None) for threads in (1, 2)])
    assert [way.kind for way in ways] == ["limit"] * (dmas + memcpys)
    assert sum("DMA" in way.name for way in ways) == dmas
    for way in ways:
        assert copies._wrong(way, source, direction) == [], way.name
    short = ways[0]._replace(run=lambda pieces: pieces.source[1:])
    stale = ways[0]._replace(run=lambda pieces: pieces.target)
    assert copies._wrong(short, source, direction) == ["<bytes>"]
    assert copies._wrong(stale, source, direction) == ["<bytes>"]


def test_a_crew_and_its_team_are_there_only_while_it_is_at_work() -> None:
    usual = torch.get_num_threads()
    running = threading.active_count()
    source = torch.arange(200, dtype=torch.uint8)
    crews = limits.crews()
    assert crews[0].threads == 1
    for crew in crews:
        with crew.at_work():
            assert threading.active_count() == running + 1
            assert torch.get_num_threads() == usual
            assert torch.equal(crew.memcpy(torch.zeros_like(source), source), source)
        assert threading.active_count() == running


def test_a_crew_is_not_bound_to_the_processor_of_the_thread_that_is_timed(monkeypatch) -> None:
    bound: list[tuple[str, set[int]]] = []

    def bind(pid: int, processors: set[int]) -> None:
        bound.append((threading.current_thread().name, processors))

    monkeypatch.setattr(limits.os, "sched_getaffinity", lambda pid: {0, 1, 2}, raising=False)
    monkeypatch.setattr(limits.os, "sched_setaffinity", bind, raising=False)
    (one, three) = limits.crews()
    assert (one.threads, three.threads) == (1, 3)
    monkeypatch.setattr(limits.os, "sched_getaffinity", lambda pid: {1}, raising=False)
    with one.at_work():
        pass
    assert bound == [("memcpy by 1_0", {0, 1, 2})]
