"""Short programs that pack batches and copy parcels, for `scenario_table.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from parcel_parts import joined
from scenario_world import READ_IN_PLACE, ScenarioWorld, Tree, small_limits
from slab_pair import SlabPair

import tdcopier
from tdcopier import Parcel, pack


def one_memory_for_the_next_parcels(world: ScenarioWorld) -> None:
    """H2D: memory that was given is packed into again once the copy before has staged it."""
    device = world.devices[0]
    memory = bytearray(pack(world.batch((100, 30))).nbytes)
    for _ in range(3):
        batch = world.batch((100, 30))
        parcel = pack(batch, out=memory)
        with small_limits():
            handle = tdcopier.start_copy(parcel, device)
            handle.wait_staged()
            world.read_late(handle.wait(), batch)


def one_pinned_memory_for_the_next_parcels(world: ScenarioWorld) -> None:
    """H2D: a device reads pinned memory where it is, until `wait_staged` has returned."""
    device = world.devices[0]
    with world.on(world.stream(device)):
        memory = torch.empty(pack(world.batch((100, 30))).nbytes, dtype=torch.uint8).pin_memory()
        for _ in range(3):
            batch = world.batch((100, 30))
            handle = tdcopier.start_copy(pack(batch, out=memory), device)
            handle.wait_staged()
            world.read_late(handle.wait(), batch)


def parcels_are_dropped_at_once(world: ScenarioWorld) -> None:
    """H2D: only the copy keeps a parcel, whose memory workers read."""
    device = world.devices[0]
    with small_limits():
        copies = []
        for _ in range(2):
            batch = world.batch((100, 30))
            copies.append((tdcopier.start_copy(pack(batch), device), batch))
            for _ in range(3):
                world.schedule.point()
                junk = [bytearray(b"\xff" * pack(batch).nbytes) for _ in range(4)]
        for handle, batch in copies:
            world.read_late(handle.wait(), batch)
        del junk


def pinned_parcels_are_dropped_at_once(world: ScenarioWorld) -> None:
    """H2D: only the copy keeps a parcel, which the device reads where it is."""
    device = world.devices[0]
    with world.on(world.stream(device)):
        copies = []
        for _ in range(2):
            batch = world.batch((100, 30))
            parcel = pack(batch).pin_memory()
            size = parcel.nbytes
            copies.append((tdcopier.start_copy(parcel, device), batch))
            del parcel
            torch.empty(size, dtype=torch.uint8, pin_memory=True).fill_(255)
        for handle, batch in copies:
            world.read_late(handle.wait(), batch)


def a_slab_is_written_as_soon_as_it_is_free(world: ScenarioWorld) -> None:
    """H2D: a worker packs into a slab again when the device has read it, and not before."""
    device = world.devices[0]
    with world.on(world.stream(device)):
        pairs: list[SlabPair] = []
        for _ in range(4):
            batch = world.batch((100, 30))
            pair = next((pair for pair in pairs if pair.is_free()), None) or SlabPair(4096)
            pairs.append(pair)
            parcel = pair.send(batch)
            assert pair.opened.pin(device) is None
            handle = tdcopier.start_copy(parcel, device)
            del parcel
            for each in pairs:
                each.scribble()
            world.read_late(handle.wait(), batch)


def views_of_a_slab_are_sent_by_torch(world: ScenarioWorld) -> None:
    """Torch's own H2D from a slab: its worker waits for that too."""
    device = world.devices[0]
    with world.on(world.stream(device)):
        pairs, sent = [SlabPair(4096) for _ in range(3)], []
        for pair in pairs:
            batch = world.batch((40,))
            parcel = pair.send(batch)
            assert pair.opened.pin(device) is None
            shown = torch.frombuffer(parcel, dtype=torch.uint8)
            sent.append((shown.to(device, non_blocking=True), shown.clone()))
            del parcel, shown
            pair.scribble()
        for moved, leaf in sent:
            world.expect([moved], [leaf])


def views_outlive_their_parcel(world: ScenarioWorld) -> None:
    """H2H: views keep the memory that was given, which its owner drops."""
    copies = []
    for _ in range(2):
        batch = world.batch((100, 30))
        memory = np.zeros(pack(batch).nbytes, np.uint8)
        tree = pack(batch, out=memory).tree()
        size = memory.nbytes
        del memory
        junk = [np.full(size, 255, np.uint8) for _ in range(4)]
        copies.append((tree, batch))
    for tree, batch in copies:
        world.expect(tree, batch)
    del junk


def views_of_read_only_bytes_are_written(world: ScenarioWorld) -> None:
    """H2H: bytes that cannot be written stay as they are, and the parcel too."""
    batch = world.batch((100, 30))
    memory = np.frombuffer(bytearray(pack(batch)), np.uint8)
    before = memory.copy()
    memory.flags.writeable = False
    parcel = Parcel.from_buffer(memory)
    for leaf in parcel.tree():
        leaf.fill_(-1)
    assert np.array_equal(memory, before), "read-only bytes were written"
    world.expect(parcel.tree(), batch)


def gaps_are_cleared(world: ScenarioWorld) -> None:
    """H2H and within a device: a parcel has no bytes of what its memory had before."""
    leaves = [torch.ones(n, dtype=torch.int8) for n in (1, 3, 100)]
    expected = bytes(pack(leaves))
    memory = bytearray(b"\xff" * len(expected))
    pack(leaves, out=memory)
    assert memory == expected, "a gap has what was there before"
    on_device = torch.frombuffer(bytearray(b"\xff" * len(expected)), dtype=torch.uint8)
    on_device = on_device.to(world.devices[0])
    pack([leaf.to(world.devices[0]) for leaf in leaves], out=on_device)
    assert on_device.cpu().numpy().tobytes() == expected, "a gap has what was there before"


def bytes_of_others_are_refused(world: ScenarioWorld) -> None:
    """A leaf that reaches beyond its bytes, and a pickle without permission."""
    beyond = joined(bytes([0, 0, 8, 3, 2, 2, 2, 2, 2]), bytes(16))
    pickled = bytes(pack([{"a set"}, *world.batch()]))
    for data in (beyond, pickled):
        try:
            Parcel.from_buffer(bytearray(data)).tree()
        except ValueError:
            continue
        raise AssertionError("malformed bytes have become a tree")


def parcels_of_layouts_that_share_a_place(world: ScenarioWorld) -> None:
    """H2D by three threads: of many layouts, several have the same place among those known."""
    device = world.devices[0]

    def copy(sizes: range) -> Any:
        for size in sizes:
            batch = world.batch((size, 2))
            got = tdcopier.start_copy(Parcel.from_buffer(bytearray(pack(batch))), device).get()
            world.expect(got, batch)

    threads = [world.schedule.thread(lambda first=first: copy(_sizes(first))) for first in (0, 1)]
    copy(_sizes(2))
    for thread in threads:
        thread.join()


def _sizes(first: int) -> range:
    return range(10 + first, 100, 12)  # sizes of one byte in a layout of one length


def parcels_of_one_layout_are_in_flight(world: ScenarioWorld) -> None:
    """H2D from one thread and another: one layout, whose values differ."""
    device = world.devices[0]
    batches = [world.batch((50, 20)) for _ in range(4)]
    parcels = [pack(batch) for batch in batches]
    with small_limits():
        handles: list[Any] = [None] * 4

        def start(numbers: range) -> None:
            for number in numbers:
                handles[number] = tdcopier.start_copy(parcels[number], device)

        thread = world.schedule.thread(lambda: start(range(2, 4)))
        start(range(2))
        thread.join()
        for handle, batch in zip(handles, batches, strict=True):
            world.read_late(handle.wait(), batch)


def _written(world: ScenarioWorld, large: bool) -> tuple[Tree, Tree]:
    """Returns a batch on a device, written by the current stream, and its values."""
    device = world.devices[0]
    batch = world.batch((60, 25))
    leaves = world.write(device, batch)
    if large:
        values = torch.full((READ_IN_PLACE,), world.made, dtype=torch.int32)
        leaf = torch.empty(READ_IN_PLACE, dtype=torch.int32, device=device)
        leaf.copy_(world.values[device][world.made : world.made + 1].expand(READ_IN_PLACE))
        return [*leaves, leaf], [*batch, values]
    return leaves, batch


def a_tree_on_a_device_is_overwritten_when_it_is_packed(world: ScenarioWorld) -> None:
    """Within a device: leaves are read after the work before, and before that after the call."""
    with world.on(world.stream(world.devices[0])):
        for large in (False, True):
            leaves, batch = _written(world, large)
            parcel = pack(leaves)
            world.overwrite(leaves)
            del leaves
            world.read_late(parcel.tree(), batch)
            world.expect(tdcopier.start_copy(parcel, "cpu").get(), batch)


def a_parcel_on_a_device_is_dropped_at_once(world: ScenarioWorld) -> None:
    """D2H and D2D: the copy keeps the parcel, whose memory others would get."""
    near, far = world.devices
    with world.on(world.stream(near)):
        copies = []
        for target in ("cpu", far):
            leaves, batch = _written(world, large=False)
            parcel = pack(leaves)
            copies.append((tdcopier.start_copy(parcel, target), batch))
            size = parcel.nbytes // 4
            del parcel, leaves
            world.overwrite([torch.empty(size, dtype=torch.int32, device=near) for _ in range(2)])
        for handle, batch in copies:
            world.expect(handle.get(), batch)


def the_memory_of_a_parcel_on_a_device_is_given_again(world: ScenarioWorld) -> None:
    """D2H: memory on a device is packed into again after `wait_staged`."""
    device = world.devices[0]
    with world.on(world.stream(device)):
        leaves, _ = _written(world, large=False)
        memory = torch.empty(pack(leaves).nbytes, dtype=torch.uint8, device=device)
        copies = []
        for _ in range(3):
            leaves, batch = _written(world, large=False)
            handle = tdcopier.start_copy(pack(leaves, out=memory), "cpu")
            handle.wait_staged()
            copies.append((handle, batch))
        for handle, batch in copies:
            world.expect(handle.get(), batch)


PARCELS = (
    a_slab_is_written_as_soon_as_it_is_free,
    views_of_a_slab_are_sent_by_torch,
    one_memory_for_the_next_parcels,
    one_pinned_memory_for_the_next_parcels,
    parcels_are_dropped_at_once,
    pinned_parcels_are_dropped_at_once,
    views_outlive_their_parcel,
    views_of_read_only_bytes_are_written,
    gaps_are_cleared,
    bytes_of_others_are_refused,
    parcels_of_layouts_that_share_a_place,
    parcels_of_one_layout_are_in_flight,
    a_tree_on_a_device_is_overwritten_when_it_is_packed,
    a_parcel_on_a_device_is_dropped_at_once,
    the_memory_of_a_parcel_on_a_device_is_given_again,
)
