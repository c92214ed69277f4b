"""Both forms of `prefetch`: a reader thread reads the source, or the loop's own thread does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
from prefetch_support import all_is_over
from sim_support import becomes

import tdcopier


@pytest.fixture(params=[True, False], ids=["threaded", "in the loop"])
def threaded(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture
def prefetch(device: str, threaded: bool) -> Callable[..., tdcopier.Prefetcher]:
    """Returns `tdcopier.prefetch` to the device, in either form."""
    return partial(tdcopier.prefetch, device=device, threaded=threaded)


@pytest.fixture(autouse=True)
def no_reader_is_left() -> Iterator[None]:
    yield
    assert becomes(all_is_over)
