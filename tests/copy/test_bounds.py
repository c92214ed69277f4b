"""Pinned staging and the host's run-ahead stay within their documented bounds."""

from __future__ import annotations

import threading

import pytest
import torch

import tdcopier

BUFFER_BYTES = 2 * 1024 * 1024


@pytest.mark.parametrize("buffers", [1, 3])
def test_staging_never_exceeds_its_limit_whatever_the_size_of_the_data(device, buffers):
    tdcopier.limits.set_staging_bytes(buffers * BUFFER_BYTES)
    source = torch.randint(0, 255, (50 << 20,), dtype=torch.uint8)
    handle = tdcopier.start_copy([source, torch.ones(3)], device)
    assert torch.equal(handle.get()[0].cpu(), source)
    assert tdcopier.pinned.staging_bytes(device) <= buffers * BUFFER_BYTES


@pytest.mark.sim
@pytest.mark.parametrize("buffers", [1, 3])
def test_the_pinned_allocator_never_gave_more_than_the_limit(sim, device, buffers):
    tdcopier.limits.set_staging_bytes(BUFFER_BYTES)
    held = sum(tdcopier.pinned.staging_bytes(f"sim:{i}") for i in range(2))
    tdcopier.limits.set_staging_bytes(buffers * BUFFER_BYTES)
    before = sim.pinned_bytes().in_use - tdcopier.pinned.staging_bytes(device)
    seen = []
    done = threading.Event()

    def watch():
        while not done.is_set():
            seen.append(sim.pinned_bytes().in_use)

    thread = threading.Thread(target=watch)
    thread.start()
    tdcopier.copy([torch.ones(3 << 20) for _ in range(6)], device)
    done.set()
    thread.join()
    assert held <= 2 * BUFFER_BYTES
    assert max(seen) - before <= buffers * BUFFER_BYTES


@pytest.mark.sim
def test_staging_is_counted_as_the_pinned_allocator_counts_it(sim, device):
    tdcopier.copy(torch.ones(30 << 20, dtype=torch.uint8), device)
    assert (
        0
        < tdcopier.pinned.staging_bytes("sim:0") + tdcopier.pinned.staging_bytes("sim:1")
        <= sim.pinned_bytes().current
    )


def test_a_small_copy_that_finds_no_staging_does_not_hold_up_the_call(stall, device, copy_stream):
    tdcopier.limits.set_staging_bytes(BUFFER_BYTES)
    tdcopier.pinned.staging_bytes(device)
    with stall(copy_stream):
        first = tdcopier.start_copy([torch.full((3,), 1.0)], device)
        second = tdcopier.start_copy([torch.full((3,), 2.0)], device)  # hangs if it waits
        assert not first.stats.background
        assert second.stats.background
    assert second.get()[0].tolist() == [2, 2, 2]


def test_a_device_bound_loop_holds_a_handful_of_batches(device, accelerator):
    """Runs 200 iterations whose consumer is far slower than the host."""
    batch = [torch.full((30_000,), 1.0) for _ in range(10)]
    batch_bytes = sum(leaf.nbytes for leaf in batch)
    consumer = accelerator.Stream(device=device)
    seen = torch.zeros(200, device=device)
    accelerator.synchronize()
    accelerator.empty_cache()
    before = bytes_in_use_or_waiting(device)
    peak = 0
    with accelerator.stream(consumer):
        for i in range(200):
            moved = tdcopier.start_copy(batch, device).wait()
            busy(device, consumer)
            seen[i : i + 1].copy_(moved[9][-1:], non_blocking=True)
            del moved
            peak = max(peak, bytes_in_use_or_waiting(device) - before)
    accelerator.synchronize()
    assert seen.sum().item() == 200
    assert batch_bytes <= peak <= 6.5 * batch_bytes  # the limit is 4: five, and one being freed
    assert tdcopier.pinned.staging_bytes(device) <= 64 * 1024 * 1024


def busy(device: str, stream: torch.Stream) -> None:
    """Enqueues a kernel of about a millisecond."""
    if device.startswith("sim"):
        from tdcopier import sim

        sim.busy(0.001, stream)
    else:
        torch.cuda._sleep(2_000_000)


def bytes_in_use_or_waiting(device: str) -> int:
    """Returns the bytes of live tensors, and of dropped ones that a stream may still read."""
    if device.startswith("sim"):
        from tdcopier import sim

        return sim.memory_stats(0).reserved_bytes
    return torch.cuda.memory_stats()["active_bytes.all.current"]


@pytest.mark.sim
def test_the_host_waits_when_it_is_too_far_ahead(sim, device, accelerator):
    tdcopier.limits.set_run_ahead(2)
    consumer = accelerator.Stream(device=device)
    done = []

    def loop():
        with accelerator.stream(consumer):
            for i in range(4):
                tdcopier.start_copy([torch.ones(3)], device).wait()
                done.append(i)

    thread = threading.Thread(target=loop)
    with sim.hold(consumer):
        thread.start()
        while len(done) < 2:
            assert thread.is_alive()
        thread.join(timeout=0.2)
        assert thread.is_alive()
        assert done == [0, 1]
    thread.join()
    assert done == [0, 1, 2, 3]
