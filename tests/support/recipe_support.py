"""Loads the recipes of the docs, and looks at the copies that they have started."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from libraries import importing

import tdcopier

RECIPES = Path(__file__).resolve().parents[2] / "docs" / "recipes"


def recipe(name: str) -> ModuleType:
    """Imports a recipe, or skips the test if its library is not installed."""
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", RECIPES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with importing():
        spec.loader.exec_module(module)
    return module


def assert_all_packed(handles: list[tdcopier.AsyncCopyHandle], leaves: list[int]) -> None:
    """Compares the numbers of leaves of the copies, all of which must have been packed."""
    assert [handle.stats.packed_leaves for handle in handles] == leaves
    for stats in (handle.stats for handle in handles):
        assert (stats.alone_leaves, stats.delegated_leaves, stats.reused_leaves) == (0, 0, 0)
        assert stats.fallbacks == 0
        assert 0 < stats.transfers <= stats.chunks
