"""Runs the prefetcher in 200 orders of events, on a machine without a GPU."""

import os

import pytest
import torch
from prefetcher import Prefetcher

CAREFUL = os.environ.get("CARELESS") != "1"


@pytest.mark.schedules(200)
def test_every_batch_arrives(sim):
    prefetcher = Prefetcher(64, "sim", careful=CAREFUL)
    batches = [torch.full((64,), float(i)) for i in range(5)]
    moved = [prefetcher.send(batch) for batch in batches]
    values = [on_device.unique().tolist() for on_device in moved]
    assert values == [[0], [1], [2], [3], [4]]
