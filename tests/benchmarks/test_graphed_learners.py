"""The benchmark of learners in one graph runs without one, and misses the target that is off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmark_support import load

pytest.importorskip("torchrl")

learners, entry = load("rows.graphed_learners"), load("tool.run")


def test_all_ways_learn_and_read_the_rows_of_their_index(sim, monkeypatch) -> None:
    monkeypatch.setattr(learners, "CASES", dict(list(learners.CASES.items())[:1]))
    bench = load("tool.measure").Bench(torch.device("sim", 0), 4, lambda label: iter)
    result = learners.run(bench)
    (found,) = result["learners"].values()
    assert found["updates_per_s"].keys() == learners._ways("cpu", False).keys()
    assert found["wrong"] == {learners.OF_ONE_GRAPH: 0, learners.AHEAD: 0}
    assert result["sample"]["leaves"] == 16
    assert result["sample"]["host"].keys() == {learners.OURS}
    (target,) = entry.targets_of(learners, result, speed=False)
    assert target["hit"]


def result(sample_us: float = 150.0, **changed: float) -> dict[str, Any]:
    rate = dict.fromkeys(learners._ways("cpu", True), 100.0)
    ours = dict.fromkeys((learners.AHEAD, learners.FLOOR), 140.0)
    rate = {**rate, **ours, **changed}
    return {
        "learners": {name: {"updates_per_s": rate, "wrong": {}} for name in learners.CASES},
        "sample": {"leaves": 16, "host": {learners.OURS: {"median_us": sample_us}}},
    }


def test_a_slow_sample_misses_its_target() -> None:
    found = entry.targets_of(learners, result(sample_us=151.0))
    (missed,) = (target["what"] for target in found if not target["hit"])
    assert missed.startswith("sample() alone, 16 leaves")


@pytest.mark.parametrize(
    ("way", "rate", "missed"),
    [
        (learners.FLOOR, 145.0, ["SAC, 13 leaves, 256 rows, tdcopier, GraphedLearner, read_ahead"]),
        (learners.RAM, 108.0, ["SAC, 13 leaves, 256 rows: the same over torchrl's best from RAM"]),
        (learners.RESIDENT_AHEAD, 128.0, ["SAC, 13 leaves, 256 rows: over torchrl's best on"]),
    ],
)
def test_a_rate_that_is_off_misses_its_own_target_alone(way, rate, missed) -> None:
    assert all(target["hit"] for target in entry.targets_of(learners, result()))
    found = entry.targets_of(learners, result(**{way: rate}))
    named = [target["what"] for target in found if not target["hit"]]
    assert len(named) == len(missed)
    assert all(name.startswith(begin) for name, begin in zip(named, missed, strict=True))
