"""Ordering of the reader of a prefetched source: memory, streams, modes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from sim_support import BRIEFLY, becomes

import tdcopier
from tdcopier import _C

LARGE = 1 << 20
"""4 MiB of floats, which workers stage."""


# ---- the memory of the source --------------------------------------------------------------------


@pytest.mark.parametrize("elements", [10, LARGE], ids=["inline", "background"])
def test_a_source_may_fill_one_buffer_again_and_again(prefetch, elements):
    buffer = np.zeros(elements, np.float32)

    def overwriting() -> Iterator[Any]:
        for i in range(15):
            buffer.fill(i)
            yield {"x": buffer, "first": buffer[:5]}

    for i, moved in enumerate(prefetch(overwriting(), depth=4)):
        assert moved["x"].unique().tolist() == moved["first"].unique().tolist() == [i]


@pytest.mark.sim
def test_the_source_is_not_asked_before_its_last_batch_was_read(sim, device, copy_stream):
    """The second staging buffer of a batch waits for the held stream."""
    tdcopier.limits.set_staging_bytes(_C.STAGING_BUFFER_BYTES)
    tdcopier.pinned.staging_bytes(device)
    asked = []

    def counting() -> Iterator[Any]:
        for i in range(2):
            asked.append(i)
            yield torch.full((2 * LARGE,), float(i))

    with sim.hold(copy_stream):
        passing = iter(tdcopier.prefetch(counting(), device, depth=2))
        assert becomes(lambda: asked == [0])
        assert not becomes(lambda: asked == [0, 1], within=BRIEFLY)
    assert [moved.unique().tolist() for moved in passing] == [[0], [1]]


def test_a_source_may_fill_one_tensor_of_a_device_again_and_again(prefetch, device, accelerator):
    buffer = torch.zeros(1000, device=device)

    def overwriting() -> Iterator[Any]:
        for i in range(15):
            buffer.copy_(torch.full((1000,), float(i)).pin_memory(), non_blocking=True)
            yield {"x": buffer}

    moved = list(prefetch(overwriting(), device="cpu", depth=4))
    assert [batch["x"].unique().tolist() for batch in moved] == [[i] for i in range(15)]


# ---- the state of torch --------------------------------------------------------------------------


def states() -> tuple[bool, bool]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_the_reader_is_in_the_modes_of_whoever_began_the_pass(device, mode):
    seen = []

    def looking() -> Iterator[Any]:
        for _ in range(2):
            seen.append(states())
            yield [torch.ones(3)]

    with mode():
        expected = states()
        passing = iter(tdcopier.prefetch(looking(), device))
    batches = list(passing)
    assert seen == [expected] * 2
    assert [moved.is_inference() for (moved,) in batches] == [expected[1]] * 2


def places(device: str) -> tuple[int, int]:
    return (
        torch.accelerator.current_device_index(),
        torch.accelerator.current_stream(torch.device(device)).stream_id,
    )


def test_the_reader_has_the_current_stream_of_whoever_began_the_pass(device, accelerator):
    side = accelerator.Stream(device=device)
    seen = []

    def looking() -> Iterator[Any]:
        seen.append(places(device))
        yield [torch.ones(3)]

    with accelerator.stream(side):
        passing = iter(tdcopier.prefetch(looking(), device))
        expected = places(device)
    list(passing)
    assert seen == [expected]
    assert expected[1] == side.stream_id


@pytest.mark.parametrize("target", ["its type", "cpu"])
def test_the_reader_has_all_streams_and_the_current_device(
    device, other_device, accelerator, target
):
    streams = {place: accelerator.Stream(device=place) for place in (device, other_device)}
    seen = []

    def looking() -> Iterator[Any]:
        seen.extend(places(place) for place in streams)
        yield torch.ones(3)

    with accelerator.stream(streams[device]), accelerator.stream(streams[other_device]):
        to = "cpu" if target == "cpu" else torch.device(device).type
        moved = list(tdcopier.prefetch(looking(), to))
    assert seen == [(1, stream.stream_id) for stream in streams.values()]
    assert str(moved[0].device) == ("cpu" if target == "cpu" else other_device)


@pytest.mark.parametrize("has_stream", [False, True])
def test_the_reader_has_the_current_device_whatever_streams_there_are(
    device, other_device, accelerator, has_stream
):
    """Setting a stream of a device makes that device current."""
    seen = []

    def looking() -> Iterator[Any]:
        seen.append(places(device)[0])
        yield torch.ones(3)

    side = accelerator.Stream(device=device) if has_stream else None
    with accelerator.stream(side), accelerator.device(other_device):
        list(tdcopier.prefetch(looking(), "cpu"))
    assert seen == [1]


# ---- leaves that are on the device already -------------------------------------------------------


def test_leaves_on_the_device_are_handed_through(prefetch, device):
    leaves = [torch.ones(3, device=device) for _ in range(4)]
    moved = prefetch([[leaf, torch.zeros(2)] for leaf in leaves])
    assert all(got is leaf for (got, _), leaf in zip(moved, leaves, strict=True))


def test_leaves_on_the_device_are_ordered_after_the_stream_that_made_them(
    prefetch, device, accelerator, stall
):
    """That stream was current when the batch was read, a step before it is taken."""
    writer, consumer = (accelerator.Stream(device=device) for _ in range(2))
    values = torch.full((1000,), 7.0).pin_memory()
    accelerator.synchronize()

    def writing() -> Iterator[Any]:
        yield {}
        written = torch.empty(1000, device=device)
        written.copy_(values, non_blocking=True)
        yield {"x": written}

    with stall(writer):
        with accelerator.stream(writer):
            passing = iter(prefetch(writing(), depth=1))
            next(passing)
        with accelerator.stream(consumer):
            moved = next(passing)
            late = torch.empty(1000, device=device)
            late.copy_(moved["x"], non_blocking=True)
        assert not consumer.query()
    consumer.synchronize()
    assert late.unique().tolist() == [7]
    list(passing)


def test_memory_of_leaves_on_the_device_is_not_reused_while_the_consumer_reads(
    device, accelerator, stall
):
    """The consumer reads late, after the source has used the same pool of memory."""
    consumer = accelerator.Stream(device=device)
    values = torch.arange(20.0).to(device)
    accelerator.synchronize()
    kept = []

    def writing() -> Iterator[Any]:
        for i in range(20):
            written = torch.empty(50, device=device)
            written.copy_(values[i].expand(50), non_blocking=True)
            yield [written]
            del written

    passing = iter(tdcopier.prefetch(writing(), device, depth=1))
    with accelerator.stream(consumer), stall(consumer):
        for (moved,) in passing:
            late = torch.empty(50, device=device)
            late.copy_(moved, non_blocking=True)
            kept.append(late)
            del moved
    consumer.synchronize()
    assert [late[0].item() for late in kept] == list(range(20))


# ---- run-ahead -----------------------------------------------------------------------------------


def test_a_reader_that_waits_for_the_device_holds_up_nothing_else(device, accelerator, stall):
    """With a limit of 1, a copy begins once the device has reached the batch before."""
    tdcopier.limits.set_run_ahead(1)
    batches = [torch.full((3,), float(i)) for i in range(4)]
    late = torch.empty(3, device=device)
    with tdcopier.prefetch(batches, device, depth=1) as prefetcher:
        with stall(accelerator.current_stream()):
            late.copy_(next(prefetcher), non_blocking=True)
            assert becomes(lambda: prefetcher._queue.is_copying)
        assert [moved.tolist()[0] for moved in (next(prefetcher) for _ in range(3))] == [1, 2, 3]
    assert late.tolist() == [0, 0, 0]
