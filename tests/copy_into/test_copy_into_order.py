"""Filling existing memory beside other copies, threads, forks and graphs; and its bounds."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from sim_support import BRIEFLY
from support import run_python

import tdcopier
from tdcopier import _C


def late_copy(leaf: torch.Tensor) -> torch.Tensor:
    """Enqueues a read on the current stream, as a kernel would."""
    late = torch.empty_like(leaf)
    late.copy_(leaf, non_blocking=True)
    return late


@pytest.mark.parametrize("kind", ["packed", "large", "delegated"])
@pytest.mark.parametrize("direction", ["D2H", "within", "D2D"])
def test_wait_staged_orders_any_stream_behind_the_reads(sim, device, accelerator, direction, kind):
    """Needs no particular order of events: the detector checks that the two are ordered at all."""
    target = {"D2H": "cpu", "within": device}.get(direction, "sim:1")
    size = 3_000_000 if kind == "large" else 50  # in several windows, if it is staged
    source = [torch.full((size,), float(i), device=device) for i in range(1, 4)]
    if kind == "delegated":
        source = [leaf.requires_grad_() for leaf in source]
    destination = [torch.zeros(size, device=target) for _ in source]
    other = torch.zeros(size, device=device)
    accelerator.synchronize()
    with sim.detect(), contextlib.ExitStack() as held:
        # Work that the host has seen finish is ordered before everything later, and a copy to the
        # host reads its next window only after the one before has arrived.
        if not (direction == "D2H" and kind == "large"):
            for place in {device, "sim:1"}:
                for which in ("from_device", "ordered"):
                    held.enter_context(sim.hold(_C.copy_stream(place, which)))
        with accelerator.stream(accelerator.Stream(device=device)):
            handle = tdcopier.start_copy_into(source, destination)
        assert (handle.stats.delegated_leaves == 3) == (kind == "delegated")
        with torch.no_grad(), accelerator.stream(accelerator.Stream(device=device)):
            handle.wait_staged()
            for leaf in source:
                leaf.copy_(other, non_blocking=True)
        held.close()
        handle.get()
        assert [leaf[-1].item() for leaf in destination] == [1, 2, 3]


@pytest.mark.sim
def test_wait_holds_the_host_back_where_some_leaves_arrive_there(device, sim):
    """Into pinned memory, which the device writes by itself once all is enqueued."""
    source = [torch.ones(3), torch.ones(300_000, device=device)]
    destination = [torch.zeros(3, device=device), torch.zeros(300_000).pin_memory()]
    with sim.pace("d2h", latency_us=200_000):
        tdcopier.start_copy_into(source, destination).wait()
        assert (destination[1] == 1).all()
    assert destination[0].tolist() == [1.0] * 3


def test_what_is_scattered_lies_on_the_device_where_it_goes(device, other_device, accelerator):
    source = [torch.ones(n, device=other_device) for n in range(1, 200)]
    destination = [torch.zeros(n, device=device) for n in range(1, 200)]
    before = {}
    for place in (device, other_device):
        accelerator.reset_peak_memory_stats(place)
        before[place] = accelerator.memory_allocated(place)
    handle = tdcopier.start_copy_into(source, destination)
    handle.get()
    assert handle.stats.chunks == 1
    for place, bytes_before in before.items():
        more = accelerator.max_memory_allocated(place) - bytes_before
        assert handle.stats.transfer_bytes <= more < 2 * handle.stats.transfer_bytes


@pytest.mark.cuda
def test_a_graph_that_was_replayed_before_sees_the_old_values(device, stall, accelerator):
    batch = [torch.full((n,), 1.0) for n in (5, 60)]
    static = tdcopier.copy(batch, device)
    total = torch.zeros((), device=device)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        total.copy_(sum(leaf.sum() for leaf in static))
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            total.copy_(sum(leaf.sum() for leaf in static))
        with stall(stream):
            graph.replay()
            before = late_copy(total)
            tdcopier.start_copy_into([leaf + 1 for leaf in batch], static).wait()
            graph.replay()
            after = late_copy(total)
    stream.synchronize()
    assert (before.item(), after.item()) == (65.0, 130.0)


def test_a_modified_source_is_named_in_check_mode(device, stall, copy_stream):
    program = f"""
        import torch, tdcopier
        if {device!r}.startswith("sim"):
            from tdcopier import sim
            sim.enable()
        source = {{"a": [torch.zeros(600_000)]}}
        destination = {{"a": [torch.ones(600_000, device={device!r})]}}
        tdcopier.start_copy_into(source, destination).get()
        handle = tdcopier.start_copy_into(source, destination)
        source["a"][0].fill_(3)
        try:
            handle.get()
        except tdcopier.SourceModifiedError as error:
            print(str(error).split(" was ")[0])
    """
    assert run_python(program, TDCOPIER_CHECK="1").strip() == "source['a'][0]"


def test_the_ring_is_not_exceeded_by_what_comes_back(device):
    tdcopier.limits.set_staging_bytes(2 * _C.STAGING_BUFFER_BYTES)
    sources = [torch.ones(n, device=device) for n in (10, 3_000_000, 4_000_000)]
    tdcopier.start_copy_into(sources, [torch.zeros(leaf.numel()) for leaf in sources]).get()
    assert _C.staging_bytes(device) <= 2 * _C.STAGING_BUFFER_BYTES


@pytest.mark.parametrize(("buffers", "is_held"), [(2, False), (3, True)])
def test_the_host_is_held_above_half_of_the_staging_limit(
    sim, device, accelerator, buffers, is_held
):
    tdcopier.limits.set_staging_bytes(4 * _C.STAGING_BUFFER_BYTES)
    source = torch.ones(buffers * _C.STAGING_BUFFER_BYTES // 4)
    destination = torch.zeros_like(source, device=device)
    is_staged = threading.Event()

    def wait() -> None:
        handle.wait_staged()
        is_staged.set()

    waiting = threading.Thread(target=wait)
    with sim.hold(accelerator.current_stream(device)):
        handle = tdcopier.start_copy_into(source, destination)
        waiting.start()
        assert is_staged.wait(BRIEFLY if is_held else 10) != is_held
    waiting.join()
    assert handle.get().cpu().eq(1).all()
