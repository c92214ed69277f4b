"""Warms up a CUDA device: kernels are loaded, and memory is pinned, before any test stalls it."""

from __future__ import annotations

import os
from typing import Any

import pytest
from park_support import trained

import tdcopier


@pytest.fixture(scope="session", autouse=True)
def warm(loaded_kernels: Any) -> None:
    if os.environ.get("TDCOPIER_TEST_DEVICE") != "cuda":
        return
    model, optimizer = trained("cuda:0")
    for _ in range(2):
        with tdcopier.parked(model, optimizer):
            pass
        tdcopier.snapshot([model, optimizer]).get()
