"""The devices between which a tree is copied into another."""

from __future__ import annotations

import pytest

WAYS = ["H2H", "H2D", "D2H", "D2D", "within"]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, device: str) -> tuple[str, str]:
    """Returns the devices of the sources and of the destinations."""
    if request.param == "D2D":
        return request.getfixturevalue("other_device"), device
    return {
        "H2H": ("cpu", "cpu"),
        "H2D": ("cpu", device),
        "D2H": (device, "cpu"),
        "within": (device, device),
    }[request.param]
