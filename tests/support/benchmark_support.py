"""Finds the modules of benchmarks/, and fakes a clock for them."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def load(name: str) -> ModuleType:
    """Imports a module of benchmarks/, which is on the path of the tests (see pyproject.toml)."""
    return importlib.import_module(name)


class Clock:
    """A fake clock: advances by one microsecond per reading, and by the times added to it."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        self.now_ns += 1000
        return self.now_ns

    def take_us(self, us: int) -> None:
        self.now_ns += us * 1000
