"""Fixtures of the tests on TensorDicts."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tdcopier._containers import registry


@pytest.fixture
def python_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has Python take apart and build every TensorDict, as for one of an unknown layout."""
    nodes = pytest.importorskip("tdcopier.tensordict._nodes")
    monkeypatch.setattr(nodes, "IS_KNOWN_LAYOUT", False)
    registry._forget_rules()
    yield
    registry._forget_rules()


_last: list[Callable[..., Any]] = []


@pytest.fixture(autouse=True)
def nothing_of_other_functions_is_collected(request: pytest.FixtureRequest) -> None:
    """Freezes what the tests of other functions have left, once for all cases of a function.

    `unlock_()` of TensorDicts collects garbage, hundreds of times in the cases of one function.
    """
    if _last != [request.function]:
        _last[:] = [request.function]
        gc.collect()
        gc.freeze()
