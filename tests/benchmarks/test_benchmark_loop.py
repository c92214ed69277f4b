"""The benchmark of training loops: how it times a step and the host, and checks batches."""

from types import ModuleType, SimpleNamespace

import pytest
import torch
from benchmark_support import Clock, a_loop_result, load

from tdcopier import workloads

loop, loop_work, host_work = load("loop"), load("loop_work"), load("host_work")
limits, run = load("limits"), load("run")


@pytest.fixture
def device(sim: ModuleType) -> torch.device:
    return torch.device("sim", 0)


class Idle:
    """A step without work for the device."""

    def enqueue(self) -> None:
        pass


def small_sources(count: int = 3) -> list:
    return [workloads.detection_batch(samples=2, cameras=2, seed=seed) for seed in range(count)]


def wrong_of(feed, sources: list, device: torch.device) -> tuple[int, int]:
    """Returns the numbers of wrong steps and wrong batches in one block."""
    reader = loop_work.Reader(sources, loop.STEPS, device)
    prepared = [feed.prepare(source) for source in sources]
    found = loop.block(feed, prepared, 1, loop.Work(device, loop.STEP_MS), reader, device)
    expected = [limits.flat_bytes(source).to(device) for source in sources]
    return loop.count_wrong(found, 1, reader, expected)


def test_all_ways_to_feed_a_loop_bring_the_right_batch_to_each_step(device: torch.device) -> None:
    feeds = loop.feeds(device)
    assert [feed.name for feed in feeds] == [
        "on the device already",
        "tdcopier",
        "tdcopier, prepared, outputs reused",
        ".to() per leaf",
        "pinned beforehand, non_blocking .to()",
    ]
    for feed in feeds:
        assert wrong_of(feed, small_sources(), device) == (0, 0), feed.name


def test_a_feed_that_is_a_step_behind_is_wrong_in_every_step(device: torch.device) -> None:
    sources = small_sources()
    (resident, *_) = loop.feeds(device)
    behind = resident._replace(prepare=lambda tree: resident.prepare(sources[0]))
    steps_of_other_sources = sum((1 + step) % 3 != 0 for step in range(loop.STEPS))
    assert wrong_of(behind, sources, device) == (steps_of_other_sources, 2)


def test_a_wrong_value_that_no_step_reads_is_found_in_the_batches_that_are_compared(
    device: torch.device,
) -> None:
    (resident, *_) = loop.feeds(device)

    def prepare(tree):
        batch = resident.prepare(tree)
        batch[0]["cameras"][1]["depths"][0] += 1
        return batch

    assert wrong_of(resident._replace(prepare=prepare), small_sources(), device) == (0, 2)


def test_a_batch_that_is_right_only_after_its_step_is_wrong_in_that_step(
    device: torch.device,
) -> None:
    (resident, *_) = loop.feeds(device)
    late: list[tuple] = []

    def finish(tree):
        while late:
            for leaf, value in zip(*map(workloads.leaves, late.pop()), strict=True):
                leaf.copy_(value)
        batch = workloads.map_tensors(tree, torch.zeros_like)
        late.append((batch, tree))
        return batch

    # Of the batches that are compared, step 9's has arrived by the end of the block.
    assert wrong_of(resident._replace(finish=finish), small_sources(), device) == (loop.STEPS, 1)


def test_a_step_that_did_not_read_is_wrong_whatever_the_block_before_has_read(
    device: torch.device,
) -> None:
    reader = loop_work.Reader(small_sources(1), 2, device)
    batch = loop.feeds(device)[0].prepare(small_sources(1)[0])
    reader.read(batch, 0)
    reader.read(batch, 1)
    assert reader.count_wrong(0) == 0
    reader.read(batch, 1)
    assert reader.count_wrong(0) == 1


def test_only_the_copy_calls_are_the_hosts_time_and_all_is_the_steps(device: torch.device) -> None:
    clock = Clock()
    sources = small_sources()
    (resident, *_) = loop.feeds(device)
    started: list[int] = []

    def start(tree):
        started.append(len(started))
        clock.take_us(30)
        return tree

    def finish(tree):
        clock.take_us(12)
        return tree

    class Slow(Idle):
        def enqueue(self) -> None:
            clock.take_us(1000)

    feed = resident._replace(start=start, finish=finish)
    prepared = [feed.prepare(source) for source in sources]
    reader = loop_work.Reader(sources, loop.STEPS, device)
    found = loop.block(feed, prepared, 0, Slow(), reader, device, clock)
    assert found.copy_calls_us == [43.0] * loop.STEPS
    # The clock is read twice in each step, and once at the end.
    assert found.step_us == pytest.approx(1000 + 43 + 1 + 1 / loop.STEPS)
    assert len(started) == loop.STEPS + 1  # one before the loop, and one in each step
    assert [step for step, _ in found.checked] == [9, 19]


def test_routes_lead_to_the_leaves_in_their_order() -> None:
    tree = {"a": [torch.zeros(1), {"b": torch.ones(1)}], "c": torch.ones(2)}
    assert loop_work.routes(tree) == [("a", 0), ("a", 1, "b"), ("c",)]


def test_work_of_the_host_lasts_as_long_as_asked() -> None:
    clock = Clock()
    host_work.work_on_host(100.0, clock)
    assert 100_000 <= clock.now_ns <= 103_000


def test_a_copy_that_is_wrong_beside_work_of_the_host_is_found(
    device: torch.device, monkeypatch
) -> None:
    steps = run.progress
    assert host_work.run(device, 10, steps, keep_gc=False)["wrong"] == 0
    other = workloads.WORKLOADS["detection_batch"].make(5)
    start_copy = host_work.tdcopier.start_copy
    stale = SimpleNamespace(start_copy=lambda tree, device: start_copy(other, device))
    monkeypatch.setattr(host_work, "tdcopier", stale)
    assert host_work.run(device, 10, steps, keep_gc=False)["wrong"] == 2


def test_the_loops_targets_are_hit_just_so() -> None:
    targets = loop.targets(a_loop_result())
    assert [target["hit"] for target in targets] == [True] * 8
    assert [target["wanted"] for target in targets][1:3] == ["<= 1.02", "<= 150 us"]


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        (lambda r: r["loops"]["detection_batch"]["ratios"].update(tdcopier=1.021), 1),
        (
            lambda r: r["loops"]["detection_batch_with_images"]["copy_calls"]["tdcopier"].update(
                median_us=501.0
            ),
            4,
        ),
        (lambda r: r["loops"]["atari_replay"]["ratios"].update(tdcopier=1.03), 5),
        (lambda r: r["loops"]["atari_replay"]["wrong"].update({".to() per leaf": 1}), 0),
        (lambda r: r["beside_host_work"].update(wrong=1), 0),
        (lambda r: r["beside_host_work"]["together"].update(median_us=80.1), 7),
    ],
)
def test_a_figure_that_is_too_high_misses_its_own_target_alone(changed, missed: int) -> None:
    result = a_loop_result()
    changed(result)
    hits = [target["hit"] for target in loop.targets(result)]
    assert hits == [index != missed for index in range(8)]


@pytest.mark.parametrize("part", ["ratios", "copy_calls"])
def test_a_loop_without_ours_in_it_is_no_hit_but_an_error(part: str) -> None:
    result = a_loop_result()
    del result["loops"]["atari_replay"][part]["tdcopier"]
    with pytest.raises(KeyError, match="tdcopier"):
        loop.targets(result)
