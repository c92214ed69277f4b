"""Loads the scripts of benchmarks/ as modules, and fakes a clock for them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def load(name: str) -> ModuleType:
    """Loads a module of benchmarks/, which is a folder of scripts and not a package."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCHMARKS))


class Clock:
    """A fake clock: advances by one microsecond per reading, and by the times added to it."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        self.now_ns += 1000
        return self.now_ns

    def take_us(self, us: int) -> None:
        self.now_ns += us * 1000
