"""Makes the calls of `CALLS`, of the devices that there are."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
from calls import CALLS, FEW, work_of
from work_of_calls import Leaves, Work

import tdcopier


@pytest.fixture
def make(
    call: str, device: str, accelerator: ModuleType, loaded_kernels: None
) -> Iterator[Callable[..., Work]]:
    """Yields a function that prepares the call with these leaves, on idle devices.

    They are filled with a value, each with a number of elements, or they are given. The call has
    been made once: what only the first one does is done. No garbage is collected during the test:
    that of earlier tests may have memory of a device that is held.
    """
    row = CALLS[call]
    if "other" in (row.source, row.target) and accelerator.device_count() < 2:
        pytest.skip("needs two devices")
    tdcopier.limits.set_run_ahead(1000)

    def make(value: float = 0, elements: list[int] = FEW, leaves: Leaves | None = None) -> Work:
        work = work_of(call, device, value, elements, leaves)
        for place in work.devices:
            accelerator.synchronize(place)
        return work

    first = make()
    handle = first.start()
    first.arrived(handle.get())
    assert not row.delegated or handle.stats.delegated_leaves == len(FEW)
    del first, handle
    collecting = gc.isenabled()
    gc.disable()
    yield make
    if collecting:
        gc.enable()
