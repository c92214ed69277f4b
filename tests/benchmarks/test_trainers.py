"""The benchmark of training loops: its data, its blocks and rounds, statistics, and targets."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from copy import deepcopy
from itertools import cycle, islice
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from benchmark_support import load

from tdcopier import _C

benchmark, entry = load("trainers.benchmark"), load("trainers.run")
batches, paired, rounds = (load(f"trainers.{name}") for name in ("batches", "paired", "rounds"))
table, threads, ways = (load(f"trainers.{name}") for name in ("table", "threads", "ways"))

STEPS = rounds.Steps(untimed=2, timed=2, pause_s=0.0)


def block(us: float, **others: Any) -> Any:
    """Returns a block whose steps took a time."""
    used = {"process_cpu_us": us, "voluntary_switches": us}
    fields = {"per_step": used, "memory": {}, "checked": 2, "wrong": 0, "was_idle": True}
    return rounds.Block(step_us=[us, us, us], **{**fields, **others})


# ---- data ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "leaves", "mb"),
    [
        ("maskrcnn", 28, 64.0),
        ("ssd", 144, 29.5),
        ("detr", 30, 21.3),
        ("rl", 5, 14.5),
        ("loop_many", 528, 0.2),
        ("loop_few", 6, 2.0),
    ],
)
def test_a_trainers_batches_have_the_leaves_and_bytes_that_are_named(name, leaves, mb) -> None:
    batch = table.TRAINERS[name].data(10, False).batch(3)
    assert len(batches.leaves_of(batch)) == leaves
    assert round(table.in_bytes(batch) / 1e6, 1) == mb


@pytest.mark.parametrize("name", list(table.TRAINERS))
def test_batches_differ_within_a_period_and_repeat_after_it(name: str) -> None:
    data = table.TRAINERS[name].data(3, True)
    sums = [table.checksums(data.batch(number)).tolist() for number in range(6)]
    assert sums[:3] == sums[3:]
    assert len(set(map(tuple, sums))) == 3


def test_padding_is_marked_and_boxes_are_within_the_image() -> None:
    images, targets = table.TRAINERS["detr"].data(4, True).batch(0)
    assert images.tensors.shape[-2:] == images.mask.shape[-2:]
    for tensor, mask, target in zip(images.tensors, images.mask, targets, strict=True):
        height, width = target["size"].tolist()
        assert not mask[:height, :width].any()
        assert mask[height:].all()
        assert not tensor[:, mask].any()
        assert ((target["boxes"] > 0) & (target["boxes"] < 1)).all()


# ---- blocks --------------------------------------------------------------------------------------


def runner_of(name: str, device: torch.device) -> tuple[Any, list[Any]]:
    """Returns a runner of tiny batches without a model, and the batches on the device."""
    trainer = table.TRAINERS[name]
    data = trainer.data(STEPS.period, True)
    on_host = [data.batch(number) for number in range(STEPS.period)]
    expected = [table.checksums(batch).tolist() for batch in on_host[: STEPS.untimed]]
    runner = rounds.Runner(trainer, lambda batch: None, device, expected, STEPS)
    return runner, [trainer.move(batch, device, False) for batch in on_host]


@pytest.mark.parametrize("name", ["maskrcnn", "detr", "rl", "loop_many", "loop_few"])
def test_a_wrong_value_in_a_checked_batch_is_counted_and_a_right_one_is_not(sim, name) -> None:
    runner, on_device = runner_of(name, torch.device("sim", 0))
    way = ways.WAYS[ways.RESIDENT]
    assert runner.block(way, cycle(on_device)).wrong == 0
    last = batches.leaves_of(on_device[1])[-1]
    last.view(-1).view(torch.uint8)[-1:] ^= 1
    spoilt = runner.block(way, cycle(on_device))
    assert (spoilt.checked, spoilt.wrong) == (2, 1)


def test_a_batch_of_the_step_before_is_counted_as_wrong(sim) -> None:
    runner, on_device = runner_of("loop_few", torch.device("sim", 0))
    late = cycle([on_device[-1], *on_device[:-1]])
    assert runner.block(ways.WAYS[ways.RESIDENT], late).wrong == 2


@pytest.mark.parametrize("timed", [None, 1])
def test_a_block_takes_a_whole_period_so_the_next_one_begins_with_equal_data(sim, timed) -> None:
    runner, on_device = runner_of("loop_few", torch.device("sim", 0))
    taken = []
    numbered = (taken.append(number) or batch for number, batch in enumerate(cycle(on_device)))
    for count in (1, 2, 3):
        found = runner.block(ways.WAYS[ways.RESIDENT], numbered, timed=timed)
        assert found.wrong == 0
        assert len(found.step_us) == (timed or STEPS.timed)
        assert len(taken) == count * STEPS.period


@pytest.fixture(params=["fork", "spawn"])
def default_start(request: pytest.FixtureRequest) -> Iterator[None]:
    """Sets how processes start by default, which other packages change, too."""
    before = torch.multiprocessing.get_start_method()
    torch.multiprocessing.set_start_method(request.param, force=True)
    yield
    torch.multiprocessing.set_start_method(before, force=True)


@pytest.mark.usefixtures("default_start")
def test_every_way_is_fed_in_step_and_its_workers_are_always_equally_far_ahead(sim) -> None:
    """A worker makes a batch for each that is taken: after each block equally many are ahead."""
    device = torch.device("sim", 0)
    runner, on_device = runner_of("loop_few", device)
    made = torch.multiprocessing.get_context("fork").Value("q", 0)
    data = table.TRAINERS["loop_few"].data(STEPS.period, True)

    def counting(number: int) -> Any:
        with made.get_lock():
            made.value += 1
        return batches.few_leaves(number)

    data = data._replace(dataset=batches.Batches(counting, STEPS.period))
    source = ways.Source(data, device, 1, on_device)
    for name in (ways.FLOOR, ways.LOADER, ways.PINNED, ways.OURS):
        way, made.value = ways.WAYS[name], 0
        opened = way.batches(source)
        ahead = []
        for count in (1, 2, 3):
            assert runner.block(way, opened).wrong == 0
            limit = time.monotonic() + 20
            while made.value - count * STEPS.period < min(ahead, default=2):
                assert time.monotonic() < limit
                time.sleep(0.001)
            rounds.settle(0.05)
            ahead.append(made.value - count * STEPS.period)
        ways.close(opened)
        del opened
        assert ahead[0] == ahead[1] == ahead[2] > 0, name


def test_the_floors_workers_make_batches_and_send_numbers(sim) -> None:
    data = table.TRAINERS["ssd"].data(2, True)
    source = ways.Source(data, torch.device("sim", 0), 1, ["first", "second"])
    loader = iter(source.loader(discard=True))
    assert [next(loader) for _ in range(2)] == [12, 12]
    floor = ways.WAYS[ways.FLOOR].batches(source)
    assert list(islice(floor, 3)) == ["first", "second", "first"]


def test_a_process_that_works_on_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "MOST_PAUSE_S", 0.3)
    ended = threading.Event()

    def spin() -> None:
        while not ended.is_set():
            pass

    thread = threading.Thread(target=spin)
    thread.start()
    assert rounds.settle(0.0) is False
    ended.set()
    thread.join()
    monkeypatch.setattr(rounds, "MOST_PAUSE_S", 30.0)
    assert rounds.settle(0.0) is True


# ---- rounds --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("most", "left_s", "wanted"), [(9, 1e9, 9), (9, -1.0, 5), (3, -1.0, 3), (3, 1e9, 3)]
)
def test_rounds_end_with_time_but_not_before_the_fifth(most, left_s, wanted) -> None:
    order: list[str] = []

    def run_block(name: str) -> Any:
        order.append(name)
        return block(float(len(order)))

    end_s = time.monotonic() + left_s
    found = rounds.rounds(run_block, "abc", most, end_s, iter)
    assert {name: len(blocks) for name, blocks in found.items()} == dict.fromkeys("abc", wanted)
    by_round = [order[begin : begin + 3] for begin in range(0, len(order), 3)]
    assert all(sorted(names) == ["a", "b", "c"] for names in by_round)
    assert len(set(map(tuple, by_round))) > 1
    for number, names in enumerate(by_round):  # a block is at the place of its round
        for name in names:
            assert 3 * number < found[name][number].step_us[0] <= 3 * number + 3


# ---- statistics ----------------------------------------------------------------------------------


def test_ratios_are_of_blocks_of_the_same_round() -> None:
    """The machine is slower from round to round, which concerns both ways of a pair."""
    speeds = [1.0, 5.0, 2.0, 40.0, 9.0]
    found = {"x": [block(110.0 * s) for s in speeds], "y": [block(100.0 * s) for s in speeds]}
    over = paired.ratios(found, "y")["x"]
    assert over == {
        name: pytest.approx(1.1) if name != "rounds" else 5
        for name in ("ratio", "low", "high", "rounds")
    }
    found["x"].reverse()
    assert paired.ratios(found, "y")["x"]["high"] > 1.5
    assert paired.ratios(found, "z") == {}


def test_a_ratio_is_of_all_steps_of_a_block_so_bursts_are_no_gain() -> None:
    """A loop that waits for its loader: half of the batches come at once, after a long wait."""
    bursts, steady = (
        block(1.0)._replace(step_us=[40.0, 4.0, 4.0, 40.0, 4.0, 40.0, 4.0]),
        block(20.0),
    )
    found = paired.ratios({"x": [bursts] * 5, "y": [steady] * 5}, "y")["x"]
    assert found["ratio"] == pytest.approx(136 / 140)


@pytest.mark.parametrize("name", ["rl", *benchmark.LOOPS])
def test_untimed_steps_take_what_the_workers_and_a_prefetcher_had_ahead(name: str) -> None:
    trainer, default = table.TRAINERS[name], 2
    assert trainer.steps.untimed >= default * trainer.workers + default


def test_an_interval_holds_the_median_and_is_wider_for_fewer_rounds() -> None:
    values = [1.0 + (number * 37 % 100) / 1000 for number in range(100)]
    low, high = paired.interval(values)
    assert 1.03 < low < 1.0495 < high < 1.07
    few = paired.interval(values[:6])
    assert few[1] - few[0] > high - low
    assert paired.interval(values) == (low, high)
    assert paired.interval([1.5] * 6) == (1.5, 1.5)


def test_a_round_in_which_the_other_used_nothing_has_no_ratio() -> None:
    switches = paired.used("voluntary_switches")
    over = paired.ratio([block(2.0), block(4.0)], [block(0.0), block(2.0)], switches)
    assert (over["ratio"], over["rounds"]) == (2.0, 1)
    assert paired.ratio([block(2.0)], [block(0.0)], switches)["ratio"] is None


def test_a_summary_is_of_all_steps() -> None:
    found = paired.summary([block(1.0), block(2.0), block(9.0)])
    assert (found["median_us"], found["max_us"], found["repeats"]) == (2.0, 9.0, 9)
    assert found["mean_us"] == 4.0
    assert 2.0 < found["p90_us"] <= 9.0


# ---- ways, threads -------------------------------------------------------------------------------


def test_a_variation_gives_its_options_to_prefetch(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def prefetch(loader: Any, device: Any, **options: Any) -> Any:
        given.append((loader.pin_memory, options))
        return []

    monkeypatch.setattr(ways.tdcopier, "prefetch", prefetch)
    source = ways.Source(table.TRAINERS["loop_few"].data(2, True), torch.device("cpu"), 0)
    ways.variation("prefetch:depth=4,threaded=False").batches(source)
    ways.variation("prefetch_pinned:depth=3").batches(source)
    assert given == [(False, {"depth": 4, "threaded": False}), (True, {"depth": 3})]
    assert ways.variation("loader") is ways.WAYS["loader"]
    for text in ("other", "loader:depth=4", "prefetch:depth=many"):
        with pytest.raises(ValueError, match="prefetch"):
            ways.variation(text)


def test_a_thread_that_works_is_first_in_the_table_with_its_python_name() -> None:
    begun, ended = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        while not ended.is_set():
            sum(range(1000))

    thread = threading.Thread(target=work, name="busy one")
    before, begin = threads.snapshot(), time.monotonic()
    thread.start()
    begun.wait()
    ended.wait(0.2)
    rows = threads.differences(before, threads.snapshot(), 2)
    elapsed_us = (time.monotonic() - begin) * 1e6
    ended.set()
    thread.join()
    assert rows[0]["python"] == "busy one"
    assert 10_000 < rows[0]["run_us"] < elapsed_us / 2
    assert rows == sorted(rows, key=lambda row: -row["run_us"])


# ---- targets -------------------------------------------------------------------------------------


def good_result() -> dict[str, Any]:
    """Returns a result that hits each target."""
    found = {name: [block(100.0) for _ in range(6)] for name in ways.DEFAULT}
    first = {
        name: {
            "median_s": 1.0,
            "over_loader_s": 0.0,
            "longest_over_median": 1.0,
            "peak_allocated_bytes": 500,
            "peak_reserved_bytes": 600,
        }
        for name in ("loader", "pin_memory", "prefetch")
    }
    figures = {**benchmark.figures(found), "first_batch": first, "bytes": 100}
    return {"trainers": {"ssd": figures}}


@pytest.mark.parametrize(
    ("path", "value", "missed"),
    [
        ("wrong/floor", 1, "differ from the dataset's"),
        ("over/pin_memory/prefetch/high", 1.0201, "step, upper end"),
        ("more_over/process_cpu_us/prefetch/ratio", 1.0201, "processor time"),
        ("more_over/voluntary_switches/prefetch/ratio", 1.0501, "voluntary switches"),
        ("over/pin_memory/pin_memory_again/ratio", 0.9799, "distance from 1"),
        ("over/pin_memory/pin_memory_again/ratio", 1.0201, "distance from 1"),
        ("over/floor/prefetch/high", 1.0301, "over floor: step"),
        ("first_batch/prefetch/over_loader_s", 0.201, "first batch"),
        ("first_batch/prefetch/longest_over_median", 2.01, "longest of the first steps"),
        ("first_batch/pin_memory/peak_allocated_bytes", 299, "pin_memory, in batches"),
        ("first_batch/prefetch/peak_reserved_bytes", 601, "reserved above allocated"),
    ],
)
def test_a_figure_that_is_off_misses_its_own_target_alone(path, value, missed) -> None:
    result = good_result()
    assert all(target["hit"] for target in entry.targets_of(benchmark, result))
    part = deepcopy(result)
    result["trainers"]["ssd"] = part["trainers"]["ssd"]
    *outer, last = path.split("/")
    place = result["trainers"]["ssd"]
    for key in outer:
        place = place[key]
    assert last in place
    place[last] = value
    (found,) = [target for target in entry.targets_of(benchmark, result) if not target["hit"]]
    assert missed in found["what"]


# ---- runs ----------------------------------------------------------------------------------------


def test_the_command_tries_a_loop_on_the_simulated_device(sim, tmp_path, capsys) -> None:
    file = tmp_path / "result.json"
    asked = ["--only", "loop_few", "--ways", "resident", "pin_memory", "prefetch:depth=3"]
    asked += ["--rounds", "2", "--workers", "1", "--first", "1", "--threads"]
    asked += ["--untimed", "2", "--timed", "3", "--pictures", str(tmp_path), "--json", str(file)]
    assert entry.main(["--device", "sim", *asked]) == 0
    printed = capsys.readouterr()
    assert "loop_few: a round takes" in printed.err
    assert "hit: batches that differ from the dataset's" in printed.out
    result = json.loads(file.read_text("utf-8"))
    found = result["trainers"]["loop_few"]
    assert (found["leaves"], found["rounds"]) == (6, 2)
    assert found["wrong"] == {"resident": 0, "pin_memory": 0, "prefetch:depth=3": 0}
    assert found["over"]["resident"]["resident"]["ratio"] == 1.0
    assert found["reader"].keys() == {"prefetch:depth=3"}
    assert found["first_batch"].keys() == {"pin_memory", "prefetch:depth=3"}
    seen = found["threads"]["prefetch:depth=3"]
    assert "tdcopier-prefetch" in {row["python"] for row in seen["per_step"]}
    lengths = {len(parts) for parts in seen["timeline"]["parts"].values()}
    assert lengths == {len(seen["timeline"]["times_ms"]) - 1}
    assert len(seen["timeline"]["steps_ms"]) == 4
    assert (tmp_path / "loop_few-prefetch:depth=3.png").exists()


def test_the_runner_of_all_benchmarks_knows_it(sim, monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(benchmark, "ON_SIM", ("loop_few",))
    chosen = ways.RESIDENT, ways.PINNED, ways.OURS
    monkeypatch.setattr(ways, "COMPARED", chosen)
    run = load("run")
    asked = ["--device", "sim", "--quick", "--only", "trainers", "--out", str(tmp_path)]
    assert run.main(asked) == 0
    assert capsys.readouterr().out.endswith("targets: all hit\n")
    result = json.loads((tmp_path / "trainers-sim.json").read_text("utf-8"))
    assert result["trainers"]["loop_few"]["step"].keys() == set(chosen)
    assert result["seconds"] > 0


def test_a_trainer_whose_package_is_missing_is_left_out_and_named(sim, monkeypatch, capsys) -> None:
    trainer = table.TRAINERS["loop_few"]._replace(needs=("no_such_package",))
    monkeypatch.setitem(table.TRAINERS, "loop_few", trainer)
    options = benchmark.Options(("loop_few",), {}, 1, 1.0)
    result = benchmark.run_with(torch.device("sim", 0), options, lambda label: iter)
    assert result["left_out"] == {"loop_few": "not installed: no_such_package"}
    assert "loop_few is left out" in capsys.readouterr().err


def test_batches_that_shared_memory_cannot_hold_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(
        benchmark.os, "statvfs", lambda path: SimpleNamespace(f_bavail=10, f_frsize=1000)
    )
    chosen = {"loader": ways.WAYS["loader"]}
    benchmark._check_shared_memory(2500, 1, chosen)
    with pytest.raises(SystemExit, match=r"/dev/shm has 0\.0 GB free"):
        benchmark._check_shared_memory(2501, 1, chosen)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--ways", "other"], "'other' is no way"),
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--untimed", "0"], "--untimed must be at least 1"),
        (["--device", "cpu", "--ways", "prefetch"], "--device cpu has the ways"),
        (["--json", "no/such/folder/file"], "there is no folder no/such/folder"),
    ],
)
def test_mistakes_in_the_arguments_are_found_before_anything_runs(capsys, asked, said) -> None:
    with pytest.raises(SystemExit):
        entry.main(asked)
    assert said in capsys.readouterr().err


def test_modules_of_the_folder_do_not_hide_others() -> None:
    assert isinstance(load("run"), ModuleType)
    assert load("run") is not entry


def test_each_loader_that_is_open_at_once_may_pin_what_the_only_one_of_a_process_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = []
    alone = _C.slab_limit_bytes()
    monkeypatch.setattr(benchmark, "_measured", lambda *_: limits.append(_C.slab_limit_bytes()))
    three = dict.fromkeys(("a", "b", "c"), benchmark.ways.WAYS[benchmark.ways.OURS])
    options = benchmark.Options(("loop_few",), three, 1, 1.0)
    benchmark.run_with(torch.device("cpu"), options, lambda _: iter)
    assert limits == [3 * alone]
    assert _C.slab_limit_bytes() == alone
