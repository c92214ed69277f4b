"""Makes the calls of `CALLS`, of the devices that there are."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
from calls import CALLS, Work, work_of

import tdcopier


@pytest.fixture
def make(
    call: str, device: str, accelerator: ModuleType, loaded_kernels: None
) -> Callable[..., Work]:
    """Returns a function that prepares the call with leaves of a value, on idle devices.

    The call has been made once: what only the first one does is done.
    """
    row = CALLS[call]
    if "other" in (row.source, row.target) and accelerator.device_count() < 2:
        pytest.skip("needs two devices")
    tdcopier.set_run_ahead_limit(1000)

    def make(value: float, elements: list[int]) -> Work:
        work = work_of(call, device, value, elements)
        for place in work.devices:
            accelerator.synchronize(place)
        return work

    first = make(0, [10, 20])
    first.arrived(first.start().get())
    return make
