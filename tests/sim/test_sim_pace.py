"""The time that transfers take, which is zero until it is set."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from sim_support import fresh as fresh

pytestmark = pytest.mark.sim

KIB = torch.ones(256)


def milliseconds(source: torch.Tensor, target: str) -> float:
    """Returns the time of a copy on the device, between two events."""
    stream = torch.sim.current_stream(source.device if source.device.type == "sim" else target)
    start, end = (torch.sim.Event(stream.device, enable_timing=True) for _ in range(2))
    source = source if source.device.type == "sim" else source.pin_memory()
    start.record(stream)
    source.to(target, non_blocking=True)
    end.record(stream)
    end.synchronize()
    return start.elapsed_time(end)


@pytest.mark.parametrize(
    ("direction", "source", "target"),
    [("h2d", "cpu", "sim:0"), ("d2h", "sim:0", "cpu"), ("d2d", "sim:0", "sim:1")],
)
def test_a_transfer_takes_its_latency_and_its_bytes_time(
    sim: ModuleType, direction: str, source: str, target: str
) -> None:
    leaf = KIB.to(source)
    with sim.pace(direction, latency_us=20_000):
        assert milliseconds(leaf, target) >= 20
    with sim.pace(direction, bandwidth_bytes_per_s=1024 / 0.03):
        assert milliseconds(leaf, target) >= 30
    with sim.pace(direction, latency_us=20_000, bandwidth_bytes_per_s=1024 / 0.03):
        assert milliseconds(leaf, target) >= 50


@pytest.mark.hazardous
def test_the_bytes_move_when_the_time_has_passed(sim: ModuleType) -> None:
    source = torch.ones(4).pin_memory()
    with sim.pace("h2d", latency_us=100_000):
        target = source.to("sim", non_blocking=True)
        source.fill_(7)
    assert target.tolist() == [7] * 4


def test_other_directions_and_kernels_take_no_time(sim: ModuleType) -> None:
    with sim.pace("d2d", latency_us=3e9):  # nearly an hour: the test would time out
        leaf = KIB.to("sim") + 1
        assert leaf.cpu().eq(2).all()
        assert leaf.clone().sum().item() == 512
    with sim.pace("h2d", latency_us=3e9):
        leaf = leaf + 1


def test_the_last_pace_counts_and_ends_with_its_block(sim: ModuleType) -> None:
    with sim.pace("h2d", latency_us=3e9):
        with sim.pace("h2d", latency_us=20_000) as inner:
            assert milliseconds(KIB, "sim") >= 20
            with sim.pace("h2d"):
                KIB.to("sim")
        inner.end()
    KIB.to("sim")


def test_a_time_that_was_begun_does_not_hold_up_the_end_of_the_process() -> None:
    from support import run_python

    run_python("""
        import torch
        from tdcopier import sim
        sim.enable()
        source = torch.ones(4).pin_memory()
        sim.pace("h2d", latency_us=3e9)
        target = source.to("sim", non_blocking=True)
    """)


def test_what_is_no_time_is_refused(sim: ModuleType) -> None:
    for latency_us in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="the latency must be a time that is not negative"):
            sim.pace("h2d", latency_us=latency_us)
    for bandwidth in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="the bandwidth must be positive"):
            sim.pace("h2d", bandwidth_bytes_per_s=bandwidth)
    with pytest.raises(ValueError, match="expected one of the directions"):
        sim.pace("up")
