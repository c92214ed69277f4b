"""The pool of pinned memory: what it has in use, and a fixture that nothing stays leased."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

import tdcopier
from tdcopier import _C

MIB = 1 << 20
LIMIT = tdcopier.pinned.usage().limit_bytes


@pytest.fixture
def all_comes_back(device: str) -> Iterator[None]:
    used_when_idle()
    tdcopier.pinned.trim()
    yield
    gc.collect()
    tdcopier.limits.set_pinned_bytes(LIMIT)
    assert used_when_idle()[0] == 0
    tdcopier.pinned.trim()
    assert used() == (0, 0)


def used() -> tuple[int, int]:
    """Returns the bytes that are leased, and that are free."""
    now = tdcopier.pinned.usage()
    return now.leased_bytes, now.free_bytes


def used_when_idle() -> tuple[int, int]:
    """Returns them once the devices have finished, and dropped sources are released."""
    _C.testing.settle()
    for index in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(index)
    return used()
