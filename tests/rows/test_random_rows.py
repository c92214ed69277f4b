"""Random gathers and scatters of rows of pinned storages: the same as torch's own indexing."""

from __future__ import annotations

import os

import pytest
import torch
from play_rows import CASES, Game, play_seeds

import tdcopier

# A longer run: TDCOPIER_TEST_ROWS=100000 make test-py, or
# python tests/support/play_rows.py --cases 100000 --jobs 4.
PARTS = 4
SEEDS = -(-int(os.environ.get("TDCOPIER_TEST_ROWS", "2000")) // (CASES * PARTS))
FIRST_SEED = int(os.environ.get("TDCOPIER_TEST_FIRST_SEED", "0"))


@pytest.mark.parametrize("part", range(PARTS))
def test_rows_are_those_of_torchs_own_indexing(device, part):
    first = FIRST_SEED + part * SEEDS
    played = play_seeds(range(first, first + SEEDS))
    assert played.wrong == []
    assert played.cases == SEEDS * CASES
    for kind in ("gather, Tensor", "gather, index on the device", "scatter, index on the device"):
        assert sum(n for name, n in played.kinds.items() if name.startswith(kind)) > SEEDS


def test_a_seed_is_one_game(device):
    one, other = (Game(7, device).play() for _ in range(2))
    assert one.kinds == other.kinds
    assert one.cases == CASES


@pytest.mark.parametrize("call", ["gather", "scatter"])
def test_other_rows_are_counted_with_their_seed(device, monkeypatch, call):
    own = getattr(tdcopier, f"start_{call}")
    place = 1 if call == "gather" else 2  # of the index among the arguments

    def rolled(*arguments, **out):
        given = list(arguments)
        if isinstance(given[place], torch.Tensor):
            given[place] = given[place].roll(1)
        return own(*given, **out)

    monkeypatch.setattr(tdcopier, f"start_{call}", rolled)
    played = play_seeds(range(10))
    assert all(text.startswith("seed ") for text in played.wrong)
    for kind in ("Tensor", "index on the device"):
        assert any(f": {call}, {kind}" in text for text in played.wrong)
