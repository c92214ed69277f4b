"""Fixtures of the tests with torchrl."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def no_collections() -> Iterator[None]:
    """Collects garbage before a test, and none during it.

    A pinned storage that is collected waits for the device, and a test may be holding that.
    """
    gc.collect()
    gc.disable()
    yield
    gc.enable()
