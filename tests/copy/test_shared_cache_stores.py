"""Workers far ahead of the device store to the cache that all cores share, and only then."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from staged_windows import parts_of, windows_of

import tdcopier
from tdcopier import _C

pytestmark = pytest.mark.usefixtures("any_processor")

MANY_WINDOWS = 40 << 20
"""Bytes whose windows fit in the staging buffers together."""
FEW_WINDOWS = 4 << 20


@pytest.fixture
def any_processor() -> Iterator[None]:
    """Lets processors that cannot store to the shared cache act as if they did."""
    _C.testing.set_shared_cache_store(True)
    yield
    _C.testing.set_shared_cache_store(False)


def bytes_of(count: int) -> torch.Tensor:
    return torch.randint(0, 255, (count,), dtype=torch.uint8)


def begun(source: torch.Tensor) -> tdcopier.AsyncCopyHandle:
    """Returns a copy staged by one participant: each window is in flight before the next begins."""
    handle = tdcopier.start_copy(source, "sim", use_background_thread=False)
    handle.wait_staged()
    return handle


def test_the_windows_after_eight_that_the_device_has_not_read(sim):
    source = bytes_of(MANY_WINDOWS)
    before = _C.testing.shared_cache_copies()
    with sim.hold(_C.copy_stream("sim")):
        handle = begun(source)
    later = windows_of(MANY_WINDOWS)[8:]
    assert _C.testing.shared_cache_copies() - before == sum(map(parts_of, later))
    assert torch.equal(handle.get().cpu(), source)


def test_the_windows_after_two_while_more_than_64_mib_are_left(sim):
    source = bytes_of(80 << 20)
    tdcopier.limits.set_staging_bytes(96 << 20)
    before = _C.testing.shared_cache_copies()
    with sim.hold(_C.copy_stream("sim")):
        handle = begun(source)
    later = windows_of(source.nbytes)[2:]
    assert _C.testing.shared_cache_copies() - before == sum(map(parts_of, later))
    assert torch.equal(handle.get().cpu(), source)


def test_none_while_the_device_keeps_up(sim):
    source = bytes_of(MANY_WINDOWS)
    tdcopier.limits.set_staging_bytes(4 * _C.STAGING_BUFFER_BYTES)
    before = _C.testing.shared_cache_copies()
    assert torch.equal(begun(source).get().cpu(), source)
    assert _C.testing.shared_cache_copies() == before


def test_none_of_other_copies_meanwhile(sim):
    large, small = bytes_of(MANY_WINDOWS // 2), bytes_of(FEW_WINDOWS)
    target = torch.empty(large.shape, dtype=torch.uint8, device="sim")
    with sim.hold(_C.copy_stream("sim")):
        first = begun(large)
        before = _C.testing.shared_cache_copies()
        second = begun(small)
        tdcopier.copy_into(large, target, use_background_thread=False)
        assert _C.testing.shared_cache_copies() == before
    assert torch.equal(first.get().cpu(), large)
    assert torch.equal(second.get().cpu(), small)
    assert torch.equal(target.cpu(), large)
