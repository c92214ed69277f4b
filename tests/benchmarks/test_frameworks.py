"""Loaders of frameworks on the simulated device: packed, they give the same batches."""

from __future__ import annotations

import torch
from benchmark_support import load
from libraries import importing, library

entry = load("trainers.run")


def test_the_loaders_of_frameworks_give_the_same_batches_packed(sim, monkeypatch) -> None:
    with importing():
        frameworks = load("trainers.frameworks")
        for name in frameworks.FRAMEWORKS:
            library(name)
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "sim:0")  # restored: the benchmark sets it
    bench = load("tool.measure").Bench(torch.device("sim", 0), 4, lambda label: iter)
    try:
        result = frameworks.run(bench)
    finally:
        library("accelerate.state").AcceleratorState._reset_state(reset_partial_state=True)
    (target,) = entry.targets_of(frameworks, result, speed=False)
    assert target["hit"], target
    found = result["trainers"]["loop_images"]
    assert found["wrong"] == dict.fromkeys(["resident", *frameworks.OF_FRAMEWORKS], 0)
    over = found["over"]["transformers"]["transformers_packed"]
    assert over["ratio"] > 0
    assert len(list(frameworks.speed_targets(result))) == 2 * 3
