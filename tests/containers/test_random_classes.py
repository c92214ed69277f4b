"""Values of classes with random features, in random trees: each tensor moves, or is reported."""

from __future__ import annotations

import os
from collections import Counter

import pytest
from random_class_trees import Tree, play

# A longer run: TDCOPIER_TEST_CLASSES=20000 make test-py, or
# python tests/support/random_class_trees.py --minutes 15.
SEEDS = int(os.environ.get("TDCOPIER_TEST_CLASSES", "600"))
FIRST_SEED = int(os.environ.get("TDCOPIER_TEST_FIRST_SEED", "0"))
PARTS = 6  # for several processes, and within the time limit of a test


@pytest.mark.parametrize("part", range(PARTS))
def test_values_of_random_classes_move_as_by_to_per_leaf(device, part):
    played = Counter(
        play(seed, device) for seed in range(FIRST_SEED + part, FIRST_SEED + SEEDS, PARTS)
    )
    assert played["copied"] >= played.total() // 2
    assert played["refused"] > 0


def test_the_random_classes_have_every_base_and_many_features():
    found: Counter[str] = Counter()
    for seed in range(300):
        for made in Tree(seed, "cpu").classes:
            found.update(made.features)
    bases = {"dict", "OrderedDict", "defaultdict", "UserDict", "list", "deque", "tuple"}
    assert bases | {"namedtuple", "dataclass", "object"} <= found.keys()
    assert {"frozen", "slots", "cache", "alias", "metaclass", "redirects"} <= found.keys()
    assert len(found) > 50
