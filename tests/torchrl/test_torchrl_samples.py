"""Samples of packed storages and buffers equal those of torchrl's own with the same seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict_same import assert_same_tensordict

pytest.importorskip("torchrl")

from torchrl.data.replay_buffers import Sequence
from torchrl_support import (
    BATCH,
    ONE_DIMENSION,
    ROWS,
    SAMPLERS,
    STORAGES,
    WAYS,
    fill,
    two_buffers,
)

CASES = [
    pytest.param(sampler, ndim, id=f"{name}-{ndim}")
    for ndim, samplers in ((1, SAMPLERS | ONE_DIMENSION), (2, SAMPLERS))
    for name, sampler in samplers.items()
]


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("sampler", "ndim"), CASES)
def test_samples_are_torchrls_own(device, sampler, ndim, way, storage, rows, prefetch):
    pair = two_buffers(device, way, storage, sampler, ndim=ndim, prefetch=prefetch)
    fill(pair, rows, ndim)
    theirs, ours = pair
    for _ in range(4):
        expected, their_info = theirs.sample(return_info=True)
        got, info = ours.sample(return_info=True)
        assert_same_tensordict(got, expected)
        assert list(info) == list(their_info)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("sampler", "ndim"), CASES)
def test_two_threads_draw_whole_rows(device, sampler, ndim, way, storage):
    theirs, ours = two_buffers(device, way, storage, sampler, ndim=ndim, prefetch=2)
    fill((theirs, ours), 60, ndim)
    for _ in range(6):
        got = ours.sample().to("cpu")
        index = got["index"]
        rows = theirs.storage[tuple(index.unbind(-1)) if ndim == 2 else index.flatten()]
        for key in ("pixels", "observation", "episode", ("next", "reward")):
            assert torch.equal(got[key], rows[key]), key


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("boundary", ["pad", "stop"])
def test_a_sample_unit_is_kept(device, way, boundary, prefetch):
    unit = Sequence(length=3, burn_in=1, bootstrap=1, episode_boundary=boundary)
    options: dict[str, Any] = {"sample_unit": unit, "prefetch": prefetch}
    pair = two_buffers(device, way, "tensor", SAMPLERS["random"], **options)
    fill(pair, 44)
    for _ in range(3):
        expected, got = (buffer.sample() for buffer in pair)
        assert got.batch_size == (BATCH * 5,)
        assert_same_tensordict(got, expected)
