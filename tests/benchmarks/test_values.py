"""The baselines give right values, and each benchmark's check finds wrong ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from benchmark_support import load

import tdcopier
from tdcopier import workloads

baselines, timed, directions, limits = (
    load(f"copies.{name}") for name in ("ways", "timed", "directions", "limits")
)
storages, replay, gathers = (load(f"rows.{name}") for name in ("storages", "replay", "gathers"))
steps, loop = load("loops.steps"), load("loops.training_loop")
metrics, kernels = load("loops.metrics_each_step"), load("loops.copies_beside_kernels")
containers, Way = load("copies.containers"), load("tool.way").Way


class Idle:
    """A step without work for the device."""

    def enqueue(self) -> None:
        pass


@pytest.fixture
def device(sim: ModuleType) -> torch.device:
    return torch.device("sim", 0)


def small_batches(count: int = 3) -> list[Any]:
    return [workloads.detection_batch(samples=2, cameras=2, seed=seed) for seed in range(count)]


# ---- copies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["h2d", "d2h", "d2d"])
def test_ways_for_pinned_memory_and_limits_give_right_values_too(device: Any, name: str) -> None:
    """The runner tests the other ways on the simulated device, and these only on CUDA."""
    direction = directions.possible(device)[name]
    on_host = {"a": workloads.one_large(4_000_000), "b": [torch.tensor([True, False, True])]}
    source = workloads.map_tensors(on_host, lambda leaf: leaf.to(direction.source))
    ways = [limits.transfer(direction)]
    short = ways[0]._replace(start=lambda pieces: pieces.source[1:])
    assert timed.wrong_places(short, source, direction) == ["<bytes>"]
    if name == "h2d":
        ways += baselines.pinned_to_device(direction.target)
    if name == "d2h":
        ways.append(baselines.device_to_pinned())
    for way in ways:
        assert timed.wrong_places(way, source, direction) == [], way.name


def test_a_wrong_value_a_wrong_place_and_a_lost_leaf_are_found() -> None:
    source = {"a": torch.zeros(2), "b": torch.ones(2)}
    wrong = {
        "['b']": source | {"b": torch.zeros(2)},
        "['a']": source | {"a": torch.zeros(2, device="meta")},
        "<structure>": {"a": source["a"]},
    }
    assert baselines.differences(source, source, directions.HOST) == []
    for place, tree in wrong.items():
        assert baselines.differences(tree, source, directions.HOST) == [place]


@pytest.mark.parametrize(
    ("name", "records", "count"),
    [
        ("h2d", ["Memcpy HtoD (Pinned -> Device)", "Memcpy DtoH (Device -> Pinned)"], 1),
        ("d2h", ["Memcpy DtoH (Device -> Pinned)", "Memcpy DtoH (Device -> Pageable)"], 2),
        ("d2h", ["void gather<16>(char*)", "Memset (Device)"], 0),
        ("d2d", ["Memcpy PtoP (Device -> Device)", "Memcpy DtoD (Device -> Device)"], 1),
        ("d2d", ["Memcpy DtoD (Device -> Device)"] * 2, 2),
    ],
)
def test_memcpys_of_the_direction_alone_are_counted(name: str, records: Any, count: int) -> None:
    assert directions.memcpys_among(records, name) == count


@pytest.mark.parametrize(
    "changed",
    [
        [(1, 2), {"key": 3}],
        [[1, 2], {"other": 3}],
        [[1, 2], {"key": None}],
        [[1, 2], {"key": 3}, 4],
    ],
)
def test_another_container_key_or_value_is_a_change(changed: Any) -> None:
    assert containers.changes(changed, [[1, 2], {"key": 3}]) == 1
    assert containers.changes(changed, changed) == 0


# ---- loops ---------------------------------------------------------------------------------------


def wrong_of(feed: Any, device: torch.device) -> int:
    """Returns the number of wrong steps and of wrong batches, of two, in one block."""
    sources = small_batches()
    prepared = [feed.prepare(source) for source in sources]
    check = loop.check(sources, device)
    return steps.one_block(feed, prepared, check, Idle(), device, first=1, warm_up=0)[1]


def resident(device: torch.device) -> Any:
    return loop.ways(device, "detection_batch")[0]


def test_a_feed_that_is_a_step_late_is_wrong_in_every_step(device: torch.device) -> None:
    right = resident(device)
    assert wrong_of(right, device) == 0
    late = right._replace(prepare=lambda tree: right.prepare(small_batches()[0]))
    steps_of_other_sources = sum((1 + step) % 3 != 0 for step in range(steps.STEPS))
    assert wrong_of(late, device) == steps_of_other_sources + 2


def test_a_wrong_value_that_no_step_reads_is_found_in_the_batches_that_are_compared(
    device: torch.device,
) -> None:
    right = resident(device)

    def prepare(tree: Any) -> Any:
        batch = right.prepare(tree)
        batch[0]["cameras"][1]["depths"][0] += 1
        return batch

    assert wrong_of(right._replace(prepare=prepare), device) == 2


def test_a_batch_that_is_right_only_after_its_step_is_wrong_in_that_step(device: Any) -> None:
    late: list[tuple[Any, Any]] = []

    def finish(tree: Any) -> Any:
        while late:
            for leaf, value in zip(*map(workloads.leaves, late.pop()), strict=True):
                leaf.copy_(value)
        batch = workloads.map_tensors(tree, torch.zeros_like)
        late.append((batch, tree))
        return batch

    # Of the batches that are compared, step 9's has arrived by the end of the block.
    assert wrong_of(resident(device)._replace(finish=finish), device) == steps.STEPS + 1


def test_a_replay_feed_with_other_rows_or_values_is_wrong(device: torch.device) -> None:
    storage = storages.REPLAYS["sac"].make(40)
    indices = [torch.randint(0, 40, (6,)) for _ in range(5)]
    every = {way.name: way for way in replay.ways(storage, 6, device)}
    plain = every["leaf[index].to(device)"]
    late = plain._replace(prepare=lambda index: (index + 1) % 40)
    torn = plain._replace(finish=lambda index: {**plain.run(index), "0": plain.run(index)["0"] + 1})
    drawing = torn._replace(name=next(iter(replay.TORCHRL)), prepare=late.prepare)
    for way, wrong in (
        (plain, 0),
        (late, steps.WARM_UP_STEPS + steps.STEPS),
        (torn, 2),
        (drawing, 2),
    ):
        prepared = [way.prepare(index) for index in indices]
        check = replay.check(storage, indices, way)
        assert steps.one_block(way, prepared, check, Idle(), device, first=3)[1] == wrong


# ---- rows of pinned storages ---------------------------------------------------------------------


@pytest.fixture
def samples(device: torch.device) -> Iterator[Any]:
    bench = load("tool.measure").Bench(device, 4, lambda label: iter)
    samples = storages.Tables([64, 12, 8], 5).samples(bench, gathers.INDICES)
    with tdcopier.pin_memory_(samples.storage, device):
        yield samples


@pytest.mark.parametrize("target", ["to_device", "to_host"])
def test_the_ways_of_gathering_rows_are_right_and_those_that_are_a_batch_late_are_not(
    samples: Any, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    for late in (0, 1):
        wrong: dict[str, int] = {}
        for own in getattr(gathers, target)(samples):
            delayed = own._replace(start=lambda number, own=own, by=late: own.start(number + by))
            way = gathers.checked(delayed, samples, wrong)
            for _ in range(3):
                with way.around():
                    way.run(None)
        assert len(wrong) == 4
        assert set(wrong.values()) == {3 * late}


def test_a_way_reads_by_the_device_or_by_threads_as_its_name_says(samples: Any) -> None:
    for way in gathers.to_device(samples)[:-1]:
        with way.around():
            by_device = way.name != gathers.BY_THREADS
            handle = way.start(3)
            assert handle.stats.rows_in_place == 3 * by_device
            assert not samples.is_wrong(handle.get(), 3)


def test_steps_of_a_learner_with_other_pinned_rows_are_wrong(samples: Any) -> None:
    every = steps.STEPS + steps.WARM_UP_STEPS
    check, numbers = gathers.check_of(samples), range(gathers.INDICES)

    def wrong_of(way: Any) -> int:
        return steps.one_block(way, numbers, check, Idle(), samples.device, first=5)[1]

    for way in gathers.to_device(samples, gathers.WAIT)[:-1]:
        assert wrong_of(way) == 0, way.name
        late = way._replace(start=lambda number, way=way: way.start(number + 2))
        assert wrong_of(late) == every + 2, way.name

    def torn(handle: Any) -> Any:
        batch = handle.wait()
        return {**batch, "0": batch["0"] + 1}

    assert wrong_of(gathers.to_device(samples, torn)[0]) == 2


# ---- beside kernels and other copies -------------------------------------------------------------


def test_repeated_batches_and_late_metrics_are_wrong(device: torch.device) -> None:
    pool = [metrics.make_batch(number, device) for number in range(2)]
    resident = metrics.ways(device)[0]
    stuck = resident._replace(prepare=lambda _: resident.prepare(pool[0]))

    def wrong(way: Any, send: Any) -> int:
        prepared = [way.prepare(batch) for batch in pool]
        work = metrics.MeteredWork(Idle(), send, device) if send else Idle()
        _, bad = steps.one_block(way, prepared, loop.check(pool, device), work, device)
        return bad + (work.finish() if send else 0)

    every = steps.STEPS + steps.WARM_UP_STEPS
    assert wrong(resident, metrics.send(resident.name, device)) == 0
    assert wrong(stuck, None) == every // 2 + 2
    assert wrong(resident, lambda values: lambda: values.cpu() - 1) == every


@pytest.mark.hazardous
def test_a_copy_after_the_kernels_takes_as_long_as_they_and_one_on_an_idle_stream_does_not(
    device: torch.device,
) -> None:
    trial = kernels.Trial(device)
    trial.queued_ms = 400.0
    soon_us, was_right = trial(kernels.BY_TORCH, lambda: None)
    assert was_right
    trial._by_torch = lambda: trial._source.to(device)  # on the current stream, which is busy
    late_us, was_right = trial(kernels.BY_TORCH, lambda: None)
    assert was_right
    assert late_us > max(soon_us, 200_000)
    trial._by_torch = lambda: trial._expected + 1
    assert trial(kernels.BY_TORCH, lambda: None)[1] is False


# ---- TensorDicts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "places"),
    [
        (lambda td: td, []),
        (lambda td: td.set("b", torch.zeros(2)), ["['b']"]),
        (lambda td: td.set("b", torch.ones(2, dtype=torch.int64)), ["['b']"]),
        (lambda td: td.set("b", torch.ones(2, device="meta")), ["['b']"]),
        (lambda td: td.exclude("b"), ["<structure>"]),
        (lambda td: td.auto_device_(), ["", "['inner']"]),
        (lambda td: setattr(td["inner"], "batch_size", [2, 3]) or td, ["['inner']"]),
    ],
)
def test_another_device_batch_size_leaf_or_value_is_a_difference(changed: Any, places: Any) -> None:
    tensordict = pytest.importorskip("tensordict")

    def made() -> Any:
        inner = tensordict.TensorDict({"c": torch.ones(2, 3)}, [2])
        return tensordict.TensorDict({"a": torch.zeros(2), "b": torch.ones(2), "inner": inner}, [2])

    assert load("copies.td_batches").differences(changed(made()), made()) == places


def test_an_error_of_another_way_is_a_finding_and_one_of_ours_is_raised(device: Any) -> None:
    pytest.importorskip("tensordict")
    tensordicts, td_batches = load("copies.tensordicts"), load("copies.td_batches")
    td, h2d = td_batches.control(0), directions.possible(device)["h2d"]

    def fail(td: Any) -> Any:
        raise TypeError("cannot do that\nin many words")

    other, ours = (Way(name, fail) for name in (tensordicts.TO, tensordicts.OURS))
    assert timed.wrong_places(other, td, h2d, tensordicts.TENSORDICT) == "TypeError: cannot do that"
    with pytest.raises(TypeError, match="cannot do that"):
        timed.wrong_places(ours, td, h2d, tensordicts.TENSORDICT)


def test_a_destination_that_was_not_filled_is_wrong(device: Any, tmp_path: Path) -> None:
    pytest.importorskip("tensordict")
    into, h2d = load("copies.into_existing"), directions.possible(device)["h2d"]
    case = into.filling(h2d, 0, tmp_path)
    way = Way("lazy", lambda case: case.destinations[into.CHUNK], prepare=into.zeroed)
    filled = [leaf for leaf in workloads.leaves(case.source) if leaf.any()]
    assert len(timed.wrong_places(way, case, h2d, into.FILLING)) == len(filled)
