"""Each kind of the catalogue in each direction, as parameters of tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from catalogue import (
    CONTAINERS,
    DIRECTIONS,
    EVERY_CONTAINER_IN_ANOTHER,
    KINDS,
    NOT_THERE,
    Kind,
)

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "no packing": {"pack_cpu_tensors": False},
    "no pinned staging": {"use_pinned_staging": False},
    "no background thread": {"use_background_thread": False},
    "tiny chunks": {"max_packed_chunk_bytes": 20},
    "large alignment": {"min_packed_alignment_bytes": 4096},
}

_WARNINGS = [
    "ignore:.*torch.jit.script",  # forward gradients
    "ignore:Sparse CSR tensor support is in beta state:UserWarning",
    "ignore:Named tensors and all their associated APIs:UserWarning",
]
CASES = [
    pytest.param(name, direction, id=f"{name}-{direction}")
    for name, kind in KINDS.items()
    for direction in DIRECTIONS
    if kind.outcome(direction) != NOT_THERE
]
ARRIVING = [
    pytest.param(*case.values, id=case.id, marks=[*map(pytest.mark.filterwarnings, _WARNINGS)])
    for case in CASES
    if KINDS[case.values[0]].arrives
]
REFUSED = [case for case in CASES if KINDS[case.values[0]].is_refused]
FAILING = [name for name, kind in KINDS.items() if kind.fails]
WRAPS = CONTAINERS | {"every container in another": EVERY_CONTAINER_IN_ANOTHER}
SOME_WRAPS = ("list", "every container in another")


def wraps_for(direction: str, is_of_leaves: bool) -> Iterable[str]:
    """Returns the containers for a direction, few if something is varied that is of leaves alone.

    The walk through containers knows no direction.
    """
    return SOME_WRAPS if is_of_leaves or direction != "H2D" else WRAPS


def ends_of(direction: str, device: str) -> tuple[str, str]:
    """Returns source and target."""
    if direction == "H2D":
        return "cpu", device
    if direction == "D2H":
        return device, "cpu"
    if torch.get_device_module(device).device_count() < 2:
        pytest.skip("needs two devices")
    return device[:-1] + "1", device


def kind_and_ends(name: str, direction: str, device: str) -> tuple[Kind, str, str]:
    """Returns the kind of leaf, source and target; skips the test if such a leaf is missing."""
    missing = KINDS[name].why_missing(device.split(":")[0])
    if missing:
        pytest.skip(missing)
    return KINDS[name], *ends_of(direction, device)
