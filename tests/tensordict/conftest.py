"""Fixtures of the tests on TensorDicts."""

from __future__ import annotations

from collections.abc import Iterator

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
