"""Snapshots that go through scratch memory: many chunks, of storages of all sizes."""

from __future__ import annotations

import random
import signal

import pytest
import torch
from support import same_bytes

import tdcopier
from tdcopier import _C
from tdcopier._park import gathered

KIB = 1024
MEDIUM = 300 * KIB
SCRATCH = 1024 * KIB


@pytest.fixture(autouse=True)
def small_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes many chunks of a small state."""
    monkeypatch.setattr(gathered, "SCRATCH_BYTES", SCRATCH)
    monkeypatch.setattr(gathered, "_GATHERED_BYTES", 700 * KIB)


def bytes_on(device: str, sizes: list[int]) -> list[torch.Tensor]:
    return [
        torch.full((n,), i % 251, dtype=torch.uint8, device=device) for i, n in enumerate(sizes)
    ]


@pytest.mark.parametrize("seed", range(8))
def test_storages_of_all_sizes_arrive_and_may_be_overwritten_after_before_update(
    device, accelerator, stall, seed
):
    """Under streams for which the engine reads on different ones."""
    dice = random.Random(seed)
    sizes = [
        dice.choice([1, 63, 64, 65, 5000, 250 * KIB, MEDIUM, MEDIUM + 1, 699 * KIB, 900 * KIB])
        for _ in range(dice.randint(1, 40))
    ]
    state = bytes_on(device, sizes)
    expected = [each.cpu() for each in state]
    new = [torch.full_like(each, 254) for each in state]
    tdcopier.snapshot(state).get()
    stream = accelerator.Stream(device)
    stream.wait_stream(accelerator.current_stream(device))
    with accelerator.stream(stream), stall(_C.copy_stream(device, "from_device")):
        taken = tdcopier.snapshot(state, defer_wait=True)
        for each, its in zip(state, new, strict=True):
            if each.numel() <= gathered.PACKED_BYTES:
                each.copy_(its)
        taken.before_update()
        for each, its in zip(state, new, strict=True):
            each.copy_(its)
    assert all(map(same_bytes, taken.get(), expected))
    accelerator.synchronize()
    assert all(bool(each.eq(254).all()) for each in state)


def test_later_chunks_may_be_larger_than_the_ones_whose_memory_they_get(device):
    sizes = [699 * KIB, 699 * KIB, MEDIUM, 699 * KIB, *[MEDIUM] * 9]
    state = bytes_on(device, sizes)
    assert all(map(same_bytes, tdcopier.snapshot(state).get(), state))


def test_what_was_enqueued_before_the_call_is_in_it(device, accelerator, stall):
    state = bytes_on(device, [100, *[MEDIUM] * 5, 900 * KIB])
    new = [torch.full_like(each, 254) for each in state]
    tdcopier.snapshot(state).get()
    with stall(accelerator.current_stream(device)):
        for each, its in zip(state, new, strict=True):
            each.copy_(its)
        taken = tdcopier.snapshot(state, defer_wait=True)
    assert all(bool(each.eq(254).all()) for each in taken.get())


def test_an_update_on_another_stream_waits_for_what_is_put_aside(device, accelerator, stall):
    state = bytes_on(device, [100, MEDIUM, MEDIUM])
    new = [torch.full_like(each, 254) for each in state]
    tdcopier.snapshot(state).get()
    takes, updates = accelerator.Stream(device), accelerator.Stream(device)
    accelerator.synchronize()
    with stall(takes):
        with accelerator.stream(takes):
            taken = tdcopier.snapshot(state, defer_wait=True)
        with accelerator.stream(updates):
            taken.before_update()
            for each, its in zip(state, new, strict=True):
                each.copy_(its)
        assert not updates.query()
    assert [int(each[-1]) for each in taken.get()] == [0, 1, 2]


def test_a_state_that_is_dropped_at_once_is_in_the_snapshot(device, stall, reading_stream):
    """The device still gathers from its memory, which nothing else may get."""
    sizes = [MEDIUM] * 12
    tdcopier.snapshot(bytes_on(device, sizes)).get()
    state = bytes_on(device, sizes)
    expected = [each.cpu() for each in state]
    new = [torch.full_like(each, 255) for each in state]
    with stall(reading_stream):
        taken = tdcopier.snapshot(state, defer_wait=True)
        del state
        others = [torch.empty_like(its).copy_(its) for its in new]
    assert all(map(same_bytes, taken.get(), expected))
    assert all(bool(each.eq(255).all()) for each in others)


def test_two_scratch_chunks_are_all_the_device_memory_that_it_takes(device, accelerator):
    state = bytes_on(device, [MEDIUM] * 40)
    tdcopier.snapshot(state).get()
    before = accelerator.memory_allocated(device)
    accelerator.reset_peak_memory_stats(device)
    tdcopier.snapshot(state).get()
    assert accelerator.max_memory_allocated(device) - before <= 2 * SCRATCH
    assert accelerator.memory_allocated(device) == before


def test_gathered_storages_share_transfers(sim):
    """Three of 300 KiB fill a chunk of 1 MiB, all small ones another; large ones go alone."""
    state = bytes_on("sim", [MEDIUM] * 10 + [10 * KIB] * 20 + [900 * KIB] * 2)
    tdcopier.snapshot(state).get()
    sim.reset_counts()
    tdcopier.snapshot(state).get()
    assert sim.counts().d2h.transfers == 4 + 1 + 2


def test_a_small_state_takes_little_scratch_memory(device, accelerator):
    state = bytes_on(device, [MEDIUM])
    tdcopier.snapshot(state).get()
    before = accelerator.memory_allocated(device)
    accelerator.reset_peak_memory_stats(device)
    tdcopier.snapshot(state).get()
    assert accelerator.max_memory_allocated(device) - before <= 2 * MEDIUM


def test_a_copy_on_the_device_does_not_keep_the_state(device, accelerator, stall, reading_stream):
    tdcopier.snapshot(bytes_on(device, [MEDIUM] * 40), device_copy=True).get()
    state = bytes_on(device, [MEDIUM] * 40)
    accelerator.synchronize()
    before = accelerator.memory_allocated(device)
    with stall(reading_stream):
        taken = tdcopier.snapshot(state, device_copy=True)
        del state
        assert accelerator.memory_allocated(device) <= before + 20 * MEDIUM  # it rounds up
    assert [int(each[-1]) for each in taken.get()] == list(range(40))


@pytest.mark.parametrize("at", range(1, 14))
def test_a_signal_handler_runs_with_the_streams_of_the_program(
    device, accelerator, stall, reading_stream, monkeypatch, at
):
    """It may take a snapshot itself, which holds back later work of the current stream."""
    state = bytes_on(device, [100, *[MEDIUM] * 30])
    others = bytes_on(device, [900 * KIB])
    new = torch.full_like(others[0], 254)
    tdcopier.snapshot([state, others]).get()
    current = accelerator.current_stream(device)
    inner: list[tdcopier.Snapshot] = []
    calls = 0

    def handler(*_: object) -> None:
        assert accelerator.current_stream(device) == current
        inner.append(tdcopier.snapshot(others))

    def gathering(*arguments: object) -> bool:
        nonlocal calls
        calls += 1
        done = pack_bytes(*arguments)
        if calls == at:
            signal.raise_signal(signal.SIGUSR1)
        return done

    pack_bytes = _C.pack_bytes
    monkeypatch.setattr(gathered._C, "pack_bytes", gathering)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with stall(reading_stream):
            taken = tdcopier.snapshot(state, defer_wait=True)
            others[0].copy_(new)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(inner) == (at <= 11)
    assert all(bool(each.get()[0].eq(0).all()) for each in inner)
    assert [int(each[-1]) for each in taken.get()] == [*range(31)]


@pytest.mark.sim
def test_without_room_for_scratch_memory_the_state_is_left(sim):
    state = bytes_on("sim", [100, *[MEDIUM] * 9])
    expected = [each.cpu() for each in state]
    for number in (1, 2, 3):
        with sim.fail_device_allocation(number), pytest.raises(torch.OutOfMemoryError):
            tdcopier.snapshot(state)
        assert all(map(same_bytes, state, expected))
    assert all(map(same_bytes, tdcopier.snapshot(state).get(), expected))


def test_states_on_two_devices_arrive(device, other_device):
    state = [
        each for place in (device, other_device) for each in bytes_on(place, [9, *[MEDIUM] * 9])
    ]
    taken = tdcopier.snapshot(state, defer_wait=True)
    expected = [each.cpu() for each in state]
    taken.before_update()
    for each in state:
        each.fill_(254)
    assert all(map(same_bytes, taken.get(), expected))
