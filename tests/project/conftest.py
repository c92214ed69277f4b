"""Records what the recipes of the docs start."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import tdcopier
from tdcopier._prefetch import source


def recorded(monkeypatch: pytest.MonkeyPatch, place: Any, *names: str) -> list[Any]:
    """Returns a list of all results of these functions during the test."""
    made: list[Any] = []

    def record(make: Callable[..., Any], *args: Any, **options: Any) -> Any:
        made.append(make(*args, **options))
        return made[-1]

    for name in names:
        monkeypatch.setattr(place, name, partial(record, getattr(place, name)))
    return made


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> list[tdcopier.AsyncCopyHandle]:
    """Returns the handles of all gathers that the test starts."""
    return recorded(monkeypatch, tdcopier, "start_gather")


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[tdcopier.AsyncCopyHandle]:
    """Returns the handles of all copies that the test starts, to new and to existing memory."""
    return recorded(monkeypatch, tdcopier, "start_copy", "start_copy_into")


@pytest.fixture
def prefetchers(monkeypatch: pytest.MonkeyPatch) -> list[tdcopier.Prefetcher]:
    """Returns all prefetchers that the test makes."""
    return recorded(monkeypatch, tdcopier, "prefetch")


@pytest.fixture
def prefetched(monkeypatch: pytest.MonkeyPatch) -> list[tdcopier.AsyncCopyHandle]:
    """Returns the handles of the copies that prefetchers start."""
    return recorded(monkeypatch, source, "start_copy")
