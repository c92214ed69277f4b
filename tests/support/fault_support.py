"""Shared by tests of a copy's faults: leaves, what is told, and whether all is given back."""

from __future__ import annotations

import functools
import gc
from typing import Any

import pytest
import torch
from filled_leaves import values_of
from sim_support import becomes

import tdcopier
from tdcopier import _C

BUFFER_BYTES = _C.STAGING_BUFFER_BYTES
# Source devices and target; "several" has leaves on several devices.
ROUTES = {
    "H2D": (["cpu"], "sim:0"),
    "D2H": (["sim:0"], "cpu"),
    "D2D": (["sim:0"], "sim:1"),
    "several to the device": (["cpu", "sim:1"], "sim:0"),
    "several to the host": (["sim:0", "sim:1"], "cpu"),
}


def leaves_on(places: list[str], elements: list[int], value: float) -> list[torch.Tensor]:
    return [torch.full((n,), value).to(place) for place in places for n in elements]


def in_use(sim: Any) -> tuple[int, ...]:
    """Returns the bytes in use on both devices, and the pinned bytes besides staging."""
    staging = sum(tdcopier.pinned.staging_bytes(f"sim:{i}") for i in range(2))
    devices = [sim.memory_stats(i).allocated_bytes for i in range(2)]
    return (*devices, sim.pinned_bytes().in_use - staging)


@pytest.fixture(autouse=True)
def warm(fresh: None) -> None:
    """Makes the engine allocate everything that it allocates only once."""
    for places, target in ROUTES.values():
        tdcopier.copy(leaves_on(places, [10, 10], 0), target)
    gc.collect()
    torch.sim.synchronize(0)
    torch.sim.synchronize(1)


def assert_gives_back(sim: Any, before: tuple[int, ...]) -> None:
    """Asserts that all memory but staging is freed soon; a thread waits for the device first."""
    gc.collect()  # an error's traceback refers to the handle
    becomes(lambda: in_use(sim) == before)
    assert in_use(sim) == before


def assert_fails_every_time(
    handle: tdcopier.AsyncCopyHandle, error: type[Exception], what: str
) -> None:
    for ask in (handle.get, handle.wait, handle.get, handle.wait):
        with pytest.raises(error) as caught:
            ask()
        assert type(caught.value) is error
        assert f"{what} was made to fail" in str(caught.value)
        assert becomes(handle.ready)


@functools.cache
def _three_windows() -> torch.Tensor:
    return torch.full((2 * BUFFER_BYTES // 4 + 5,), 3.0)


def assert_no_staging_is_lost(target: str) -> None:
    """Copies three windows through one buffer, which would hang if that buffer were lost."""
    if target == "cpu":
        return
    tdcopier.limits.set_staging_bytes(BUFFER_BYTES)
    assert tdcopier.pinned.staging_bytes(target) <= BUFFER_BYTES
    (moved,) = tdcopier.copy([_three_windows()], target)
    assert values_of([moved]) == {3}
    assert tdcopier.pinned.staging_bytes(target) == BUFFER_BYTES
    tdcopier.limits.set_staging_bytes(_C.DEFAULT_STAGING_LIMIT_BYTES)
