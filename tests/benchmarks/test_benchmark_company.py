"""The benchmark of concurrent copies: how it detects late and wrong copies and processor shares."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import torch
from benchmark_support import load

company, run = load("company"), load("run")
loop, kernels = load("company_loop"), load("company_kernels")
both_ways, waiting, refill = (
    load("company_both_ways"),
    load("company_waiting"),
    load("company_refill"),
)

OURS = kernels.OURS


@pytest.fixture
def device(sim: ModuleType) -> torch.device:
    return torch.device("sim", 0)


@pytest.fixture(scope="module")
def result(sim: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Runs the whole benchmark on the simulated device and loads the file that it wrote."""
    folder = tmp_path_factory.mktemp("company")
    arguments = ["--device", "sim", "--repeats", "4", "--only", "company", "--out", str(folder)]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("FAIL_WITHOUT_CUDA", raising=False)
        assert run.main(arguments) == 0
    return json.loads((folder / "company-sim.json").read_text())


class Idle:
    """A step without work for the device."""

    def enqueue(self) -> None:
        pass


# ---- the whole benchmark -------------------------------------------------------------------------


def test_speed_is_a_target_on_a_real_device_only(result: dict) -> None:
    assert len(result["targets"]) == 2
    found = company.targets(result)
    assert len(found) == 2 + 2 + len(result["kernels"]["times"]) + 1 + 7
    early, late = (json.loads(json.dumps(result)) for _ in range(2))
    early["kernels"]["times"][kernels.NOTHING][OURS]["median_us"] = 1.0  # this machine may be busy
    late["kernels"]["times"][kernels.NOTHING][OURS]["median_us"] = 1001.0
    (missed,) = [
        each["what"]
        for each, before in zip(company.targets(late), company.targets(early), strict=True)
        if before["hit"] and not each["hit"]
    ]
    assert missed == "small copy to the device beside kernels, after nothing"


def test_only_our_own_refills_must_be_right(result: dict) -> None:
    rows = [{**row, "wrong": 1} for row in result["refill"]["rows"]]
    spoilt = {**result, "refill": {**result["refill"], "rows": rows}}
    assert company.targets(spoilt, speed=False)[1]["found"] == 6


# ---- a learner with metrics ----------------------------------------------------------------------


def test_a_feed_that_repeats_a_batch_is_wrong_in_the_steps_that_wanted_another(device) -> None:
    pool = [loop.make_batch(number, device) for number in range(2)]

    @contextmanager
    def stuck(batches):
        yield iter(lambda: {key: leaf.to(device) for key, leaf in batches[0].items()}, None)

    feed = loop.feeds(device)[0]._replace(open=stuck)
    steps = loop.STEPS + 4
    assert loop.one_block(feed, pool, Idle(), device, metered=False)[1] == steps // 2 + 1


def test_metrics_of_another_step_are_wrong(device) -> None:
    pool = [loop.make_batch(0, device)]
    resident, *_ = loop.feeds(device)
    assert loop.one_block(resident, pool, Idle(), device, metered=True)[1] == 0
    late = resident._replace(send=lambda values: lambda: values.cpu() - 1)
    assert loop.one_block(late, pool, Idle(), device, metered=True)[1] == loop.STEPS + 4


# ---- beside kernels ------------------------------------------------------------------------------


@pytest.mark.hazardous
def test_a_copy_behind_the_kernels_counts_as_late_and_one_on_an_idle_stream_does_not(
    device,
) -> None:
    trial = kernels.Trial(device)
    trial.queued_ms = 100.0
    calls = kernels.earlier_calls(device)
    earlier = calls[kernels.NOTHING][kernels.BY_TORCH]
    assert trial(kernels.BY_TORCH, earlier)[1:] == (True, True)
    trial._by_torch = lambda: trial._source.to(device)  # on the current stream, which is busy
    assert trial(kernels.BY_TORCH, lambda: None)[1:] == (True, False)
    trial._by_torch = lambda: trial._expected + 1
    assert trial(kernels.BY_TORCH, lambda: None)[1] is False


# ---- waiting -------------------------------------------------------------------------------------


def test_a_wait_that_spins_takes_a_processor_and_one_that_sleeps_does_not(device) -> None:
    def measured(wait) -> tuple[float, float]:
        case = waiting.Case("it", lambda: None, wait)
        return waiting.measured(case, device, lambda: None)

    def spin(_) -> None:
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            pass

    share, held_ms = measured(spin)
    assert held_ms > 40
    assert share > 2 * measured(lambda _: time.sleep(0.2))[0]


def test_the_limits_of_the_waiting_part_end_with_it(monkeypatch) -> None:
    limits: list[int] = []
    monkeypatch.setattr(waiting.tdcopier, "set_staging_limit_bytes", limits.append)
    with pytest.raises(KeyError), waiting.limits_of_company():
        raise KeyError
    assert limits == [waiting.STAGING_LIMIT_BYTES, waiting.DEFAULT_STAGING_LIMIT_BYTES]


# ---- refills -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", refill.KINDS)
def test_a_batch_that_is_read_after_the_refill_is_wrong(device, tmp_path: Path, kind: str) -> None:
    buffer = refill.make_buffer(kind, 1 << 12, tmp_path / "file")
    assert (buffer.nbytes, buffer.is_pinned()) == (1 << 12, kind == "pinned")
    decoy = refill.Decoy(device)
    wrong = torch.zeros(refill.BLOCK, dtype=torch.bool, device=device)
    at_once = refill.Refill("at once", kind, buffer, lambda source: source.to(device))
    assert refill.block(at_once, 7, wrong, device, decoy) > 0
    assert wrong.sum().item() == 0
    too_late = at_once._replace(send=lambda source: source.to(device) + 1)
    refill.block(too_late, 7, wrong, device, decoy)
    assert wrong.sum().item() == refill.BLOCK


def test_non_blocking_copies_of_torch_are_only_from_pinned_memory(device, tmp_path: Path) -> None:
    every = refill.refills(device, tmp_path)
    raced = [each.kind for each in every if each.way == refill.BY_TORCH_ASYNC]
    assert raced == ["pinned"] * len(refill.SIZES_BYTES)
    assert {each.buffer.nbytes for each in every} == set(refill.SIZES_BYTES)
