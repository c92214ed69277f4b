"""The loads beside which copies are timed: other processes."""

from __future__ import annotations

import pytest
from benchmark_support import load

loads = load("copies.host_loads")


@pytest.mark.parametrize("kind", loads.KINDS.values())
def test_a_load_runs_until_the_end_of_the_block(kind: str) -> None:
    with loads.running(kind) as process:
        assert process.poll() is None
    assert process.poll() is not None


def test_a_load_that_does_not_start_is_an_error() -> None:
    with (
        pytest.raises(RuntimeError, match="the load 'none' ended, with code 1"),
        loads.running("none"),
    ):
        pass
