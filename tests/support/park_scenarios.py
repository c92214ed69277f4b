"""Short programs that park states and take snapshots, for `scenario_table.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from scenario_world import READ_IN_PLACE, ScenarioWorld, Tree

import tdcopier

Scenario = Callable[[ScenarioWorld], None]


def _pinned_by_torch(sizes: list[int]) -> Iterator[torch.Tensor]:
    return (torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes)


def without_pool(scenario: Scenario) -> Scenario:
    """Pins by torch's allocator, so that a seed gives one order.

    The pool outlives a schedule: what it asks the device depends on what came back to it before.
    Scenarios of its own have a pool that is trimmed first.
    """

    @functools.wraps(scenario)
    def run(world: ScenarioWorld) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tdcopier._pinned_pool.lease", _pinned_by_torch)
            scenario(world)

    return run


def _state(world: ScenarioWorld, device: str) -> tuple[Tree, Tree]:
    """Returns small leaves and a large one on a device, and what they have."""
    batch = world.batch((40, 17))
    large = torch.empty(READ_IN_PLACE, dtype=torch.int32, device=device)
    _set(world, large, 100 + world.made)
    state = [*world.write(device, batch), large]
    return state, [*batch, torch.full((READ_IN_PLACE,), 100 + world.made, dtype=torch.int32)]


def _set(world: ScenarioWorld, leaf: torch.Tensor, number: int) -> None:
    value = world.values[str(leaf.device)][number : number + 1]
    leaf.copy_(value.expand(leaf.numel()), non_blocking=True)


def _use(world: ScenarioWorld, device: str) -> None:
    """Uses memory of the sizes that were parked, on the current stream."""
    world.churn(device, world.batch((40, 17)))
    for number in range(2):
        _set(world, torch.empty(READ_IN_PLACE, dtype=torch.int32, device=device), number)


@without_pool
def parked_memory_is_used_for_something_else(world: ScenarioWorld) -> None:
    """The memory of a parked state is reused only when it has been read, and the values return."""
    device = world.devices[0]
    with world.on(world.stream(device)):
        state, expected = _state(world, device)
        for _ in range(2):
            parked = tdcopier.park(state)
            _use(world, device)
            parked.resume()
            world.read_late(state, expected)


@without_pool
def a_state_is_resumed_on_another_stream(world: ScenarioWorld) -> None:
    """A read of a resumed state is ordered on the stream of that call."""
    device = world.devices[0]
    with world.on(world.stream(device)):
        state, expected = _state(world, device)
        parked = tdcopier.park(state)
    with world.on(world.stream(device)):
        _use(world, device)
        parked.resume()
        world.read_late(state, expected)
        parked = tdcopier.park(state)
        parked.resume()
        world.read_late(state, expected)


@without_pool
def two_states_take_turns_beside_copies(world: ScenarioWorld) -> None:
    """Pinned memory of one state is not reused while the device still reads it."""
    device = world.devices[0]
    with world.on(world.stream(device)):
        states = [_state(world, device) for _ in range(2)]
        for state, expected in states * 2:
            batch = world.batch((64, 30))
            moved = tdcopier.start_copy(batch, device)
            parked = tdcopier.park(state)
            back = tdcopier.start_copy(moved.wait(), "cpu")
            parked.resume()
            world.read_late(state, expected)
            world.expect(back.get(), batch)


@without_pool
def a_state_of_two_devices_is_parked(world: ScenarioWorld) -> None:
    """Each device's memory is ordered by its own streams."""
    near, far = world.devices
    with world.on(world.stream(far)), world.on(world.stream(near)):
        state, expected = _state(world, near)
        others, expected_others = _state(world, far)
        parked = tdcopier.park([state, others])
        _use(world, near)
        _use(world, far)
        parked.resume()
        world.read_late(state, expected)
        world.read_late(others, expected_others)


@without_pool
def a_snapshot_is_taken_beside_updates(world: ScenarioWorld) -> None:
    """A snapshot has the values of the call, and writes after `before_update` wait for it."""
    device = world.devices[0]
    with world.on(world.stream(device)):
        state, expected = _state(world, device)
        taken = tdcopier.snapshot(state)
        world.overwrite(state[:2])  # small leaves are put aside in the call
        taken.before_update()
        _set(world, state[2], 7)
        changed = tdcopier.snapshot(state)
        world.expect(taken.get(), expected)
        assert changed.get()[2].eq(7).all()


@without_pool
def a_state_is_parked_beside_its_snapshot(world: ScenarioWorld) -> None:
    """Its memory is reused only when a snapshot has read it too: on its stream, or on another."""
    device = world.devices[0]
    first, other = world.stream(device), world.stream(device)
    with world.on(first):
        state, expected = _state(world, device)
        taken = tdcopier.snapshot(state, defer_wait=True)
        parked = tdcopier.park(state)
        _use(world, device)
        parked.resume()
        world.read_late(state, expected)
        after = tdcopier.snapshot(state, defer_wait=True)
    with world.on(other):
        other.wait_stream(first)
        after.before_update()
        parked = tdcopier.park(state)
        _use(world, device)
        parked.resume()
        world.read_late(state, expected)
    world.expect(taken.get(), expected)
    world.expect(after.get(), expected)


@without_pool
def parking_fails_beside_a_copy(world: ScenarioWorld) -> None:
    """A transfer that cannot be enqueued leaves the state resident, and the next call works."""
    device = world.devices[0]
    with world.on(world.stream(device)):
        state, expected = _state(world, device)
        for n in (1, 2):
            other = world.batch((30,))
            copy = tdcopier.start_copy(other, device)
            refused = pytest.raises(torch.AcceleratorError, match="was made to fail")
            with world.sim.fail_transfer(n, direction="d2h"), refused:
                tdcopier.park(state)
            world.read_late(state, expected)
            parked = tdcopier.park(state)
            out_of_memory = pytest.raises(torch.OutOfMemoryError)
            with world.sim.fail_device_allocation(1), out_of_memory:
                parked.resume()
            parked.resume()
            world.read_late(state, expected)
            world.read_late(copy.wait(), other)


PARK = (
    parked_memory_is_used_for_something_else,
    a_state_is_resumed_on_another_stream,
    two_states_take_turns_beside_copies,
    a_state_of_two_devices_is_parked,
    a_snapshot_is_taken_beside_updates,
    a_state_is_parked_beside_its_snapshot,
    parking_fails_beside_a_copy,
)
