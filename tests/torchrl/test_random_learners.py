"""Random steps of a learner, with writes and changes between them: those of a loop by hand."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("torchrl")

from play_learners import CASES, Game, play_seeds

from tdcopier.torchrl import _static_batch

# A longer run: python tests/support/play_learners.py --cases 100000 --jobs 8.
PARTS = 2
SEEDS = -(-int(os.environ.get("TDCOPIER_TEST_LEARNERS", "200")) // (CASES * PARTS))
FIRST_SEED = int(os.environ.get("TDCOPIER_TEST_FIRST_SEED", "0"))

pytestmark = pytest.mark.usefixtures("no_collections")


@pytest.mark.parametrize("part", range(PARTS))
def test_steps_are_those_of_a_loop_by_hand(device, part):
    first = FIRST_SEED + part * SEEDS
    played = play_seeds(range(first, first + SEEDS))
    assert played.wrong == []
    assert played.cases == SEEDS * CASES
    assert (played.replays > 0) == (torch.device(device).type == "cuda")


def test_other_rows_are_counted_with_their_seed(device, monkeypatch):
    gather = _static_batch.start_gather

    def rolled(tables, index, *arguments, **options):
        return gather(tables, index.roll(1), *arguments, **options)

    monkeypatch.setattr(_static_batch, "start_gather", rolled)
    played = Game(1, device).play()
    assert played.wrong
    assert all(text.startswith("seed 1, case ") for text in played.wrong[:-1])
