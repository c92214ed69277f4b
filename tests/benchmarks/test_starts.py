"""How a pass begins, in the benchmark of trainers: its figures, and batches of varying sizes."""

from __future__ import annotations

from typing import Any

import pytest
from benchmark_support import load

starts, table = load("trainers.starts"), load("trainers.table")


def test_a_start_has_its_longest_step_and_what_is_later_than_the_loader() -> None:
    def start(seconds: float, longest: float, peak: int) -> Any:
        return starts.Start(seconds, [2.0, longest, 2.0], {"peak_allocated_bytes": peak})

    taken = {
        "loader": [start(1.0, 2.0, 5), start(3.0, 2.0, 5), start(1.0, 2.0, 5)],
        "prefetch": [start(1.5, 6.0, 7), start(3.1, 8.0, 9), start(1.2, 2.0, 8)],
    }
    found = starts._figures(taken, "prefetch")
    assert found["over_loader_s"] == pytest.approx(0.2)
    assert found["longest_over_median"] == 3.0
    assert found["peak_allocated_bytes"] == 9
    assert "over_loader_s" not in starts._figures({"prefetch": taken["prefetch"]}, "prefetch")


def test_images_vary_by_a_fifth_from_batch_to_batch() -> None:
    data = table.TRAINERS["loop_images"].data(10, False)
    sizes = [table.in_bytes(data.batch(number)[0]) for number in range(10)]
    assert min(sizes) == 0.8 * max(sizes)
    assert len(set(sizes)) == 5
    assert sizes[:5] == sizes[5:]
