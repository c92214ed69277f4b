"""Hazards of memory: changed, reused or freed too early, or leaked; and when they are sought."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
from sim_support import becomes, hazards_of, marker, pinned
from sim_support import fresh as fresh

import tdcopier
from tdcopier import _C
from tdcopier.sim import Detector, HazardError

pytestmark = [pytest.mark.sim, pytest.mark.hazardous]

Finds = Callable[..., None]


@pytest.fixture
def finds(sim: ModuleType) -> Finds:
    """Checks that a program has one hazard, of this kind and with these words, or none."""

    def check(
        program: Callable[[], object], kind: str | None, *words: str, **options: bool
    ) -> None:
        found = hazards_of(sim, program, **options)
        assert [hazard.kind for hazard in found] == ([] if kind is None else [kind])
        for word in words if found else ():
            assert word in found[0].message

    return check


def name(stream: torch.Stream) -> str:
    return f"stream {stream.stream_id} of sim:{stream.device_index}"


def at_address(address: int, count: int) -> torch.Tensor:
    """Returns bytes of the first device without keeping their memory alive."""
    storage = torch._C._construct_storage_from_data_pointer(address, torch.device("sim:0"), count)
    return torch.empty(0, dtype=torch.uint8, device="sim:0").set_(storage)


# ---- changed ------------------------------------------------------------------------------------


@pytest.mark.parametrize("waits", [False, True])
def test_a_source_that_the_host_changes_before_it_is_read_is_found(
    sim: ModuleType, finds: Finds, waits: bool
) -> None:
    source = pinned(*[1.0] * 1024)

    def program() -> None:
        with sim.hold() as hold:
            source.to("sim", non_blocking=True)
            if waits:
                hold.release()
                torch.sim.synchronize()
            source.add_(1)

    finds(
        program,
        None if waits else "changed",
        "source of a transfer h2d of 4096 bytes from the host to sim:0 on stream 0 of sim:0",
    )


def test_a_target_that_the_host_changes_before_it_is_written_is_found(
    sim: ModuleType, finds: Finds
) -> None:
    def program() -> None:
        target, on_device = pinned(0.0, 0.0), torch.ones(2).to("sim:1")
        with torch.sim.device(1), sim.hold():
            target.copy_(on_device, non_blocking=True)
            target.fill_(3)

    finds(program, "changed", "the target of a transfer d2h of 8 bytes from sim:1 to the host")


def test_a_pageable_source_is_watched_too(sim: ModuleType, finds: Finds) -> None:
    """Another thread changes it while the caller waits."""

    def program() -> None:
        source = torch.ones(100)
        reader = threading.Thread(target=lambda: source.to("sim"))
        with sim.hold(torch.sim.default_stream()):
            reader.start()
            assert becomes(lambda: sim.counts().h2d.transfers == 1)
            source.fill_(2)
        reader.join()

    finds(program, "changed", "source of a transfer h2d of 400 bytes")


def test_holes_between_the_elements_may_change(sim: ModuleType, finds: Finds) -> None:
    grid = torch.zeros(64, 8).pin_memory()

    def program(column: int) -> None:
        with sim.hold():
            torch.empty(64, 2, device="sim").copy_(grid[:, 2:4], non_blocking=True)
            grid[:, column] += 1

    finds(lambda: program(4), None)
    finds(lambda: program(3), "changed")


def test_a_chain_through_the_same_pinned_buffer_is_legal(sim: ModuleType, finds: Finds) -> None:
    """The bytes change between call and execution, but on the stream and in its order."""

    def program() -> None:
        buffer, there, back = pinned(0.0, 0.0), torch.ones(2).to("sim"), torch.zeros(2).to("sim")
        with sim.hold():
            buffer.copy_(there, non_blocking=True)
            back.copy_(buffer, non_blocking=True)
            buffer.copy_(back, non_blocking=True)
        torch.sim.synchronize()
        assert buffer.tolist() == [1, 1]

    finds(program, None)


def test_work_from_before_may_write_what_is_read_now(sim: ModuleType, finds: Finds) -> None:
    buffer, there = pinned(0.0, 0.0), torch.ones(2).to("sim")
    hold = sim.hold()
    buffer.copy_(there, non_blocking=True)

    def program() -> None:
        buffer.to("sim", non_blocking=True)
        hold.release()

    finds(program, None)


# ---- reused -------------------------------------------------------------------------------------


@pytest.mark.parametrize("recorded", [False, True])
def test_a_missing_record_stream_is_found_when_the_block_is_handed_out_again(
    sim: ModuleType, finds: Finds, recorded: bool
) -> None:
    side = torch.sim.Stream()

    def program() -> None:
        block = torch.ones(1000).to("sim")
        with torch.sim.stream(side):
            block.to("sim", copy=True)
        if recorded:
            block.record_stream(side)
        del block
        torch.empty(1000, device="sim")

    finds(
        program,
        None if recorded else "reused",
        "device memory that a transfer within of 4000 bytes from sim:0 to sim:0 on "
        f"{name(side)} reads is allocated again, on stream 0 of sim:0",
        f"record_stream was not called for {name(side)}",
    )


@pytest.mark.parametrize("waits", ["the stream", "the host", "by query"])
def test_reuse_behind_a_wait_is_legal(sim: ModuleType, finds: Finds, waits: str) -> None:
    side = torch.sim.Stream()

    def program() -> None:
        block = torch.ones(1000).to("sim")
        with torch.sim.stream(side):
            block.to("sim", copy=True)
        done = marker(side)
        del block
        if waits == "the stream":
            torch.sim.current_stream().wait_event(done)
        elif waits == "the host":
            done.synchronize()
        else:
            while not done.query():
                pass
        torch.empty(1000, device="sim")

    finds(program, None)


def test_a_recorded_stream_vouches_for_those_that_it_waited_for(
    sim: ModuleType, finds: Finds
) -> None:
    first, second = torch.sim.Stream(), torch.sim.Stream()

    def program() -> None:
        block = torch.ones(1000).to("sim")
        address = block.data_ptr()
        with torch.sim.stream(first):
            block.to("sim", copy=True)
        second.wait_stream(first)
        block.record_stream(second)
        del block
        kept = []
        while not kept or kept[-1].data_ptr() != address:  # until the allocator sees it done
            kept.append(torch.empty(1000, device="sim"))

    finds(program, None)


@pytest.mark.parametrize("known", [False, True])
def test_a_pinned_target_that_is_freed_and_handed_out_again_is_found(
    sim: ModuleType, finds: Finds, known: bool
) -> None:
    """The allocator knows tensors that begin with the block or share its storage, and no others."""
    on_device = torch.ones(100).to("sim")

    def program() -> None:
        target = torch.zeros(1000).pin_memory()
        part = target[8:108] if known else torch.from_numpy(target.numpy()[8:108])
        with sim.hold():
            part.copy_(on_device, non_blocking=True)
            del target, part
            torch.empty(1000, pin_memory=True)

    finds(
        program,
        None if known else "reused",
        "pinned memory that a transfer d2h of 400 bytes from sim:0 to the host on "
        "stream 0 of sim:0 writes is allocated again to the host",
    )


# ---- freed --------------------------------------------------------------------------------------


def test_work_on_memory_that_is_free_is_found(sim: ModuleType, finds: Finds) -> None:
    def program(keep: bool) -> None:
        leaf = torch.ones(100, dtype=torch.uint8).to("sim")
        seen = at_address(leaf.data_ptr(), 100)
        if not keep:
            del leaf
        seen.cpu()

    finds(lambda: program(keep=True), None)
    finds(
        lambda: program(keep=False),
        "freed",
        "a transfer d2h of 100 bytes from sim:0 to the host on stream 0 of sim:0 reads device "
        "memory that is free",
    )


def test_work_beyond_the_end_of_a_block_is_found(sim: ModuleType, finds: Finds) -> None:
    leaf = torch.ones(1024, dtype=torch.uint8).to("sim")
    finds(lambda: at_address(leaf.data_ptr(), 1024).cpu(), None)
    finds(
        lambda: at_address(leaf.data_ptr() + 24, 1024).cpu(),
        "freed",
        "24 bytes beyond the end of its block of 1024 bytes",
    )


def test_memory_that_went_back_to_the_system_is_found(sim: ModuleType, finds: Finds) -> None:
    host = torch.zeros(512, dtype=torch.uint8)
    finds(lambda: at_address(host.data_ptr(), 512).cpu(), "freed", "that the device does not have")


# ---- leak ---------------------------------------------------------------------------------------


def test_blocks_that_stay_in_use_are_leaks(sim: ModuleType) -> None:
    older, kept = torch.ones(4).to("sim"), []

    def program() -> None:
        torch.empty(700, device="sim")
        kept.append(torch.empty(700, device="sim:1"))
        kept.append(torch.empty(300, pin_memory=True))

    found = hazards_of(sim, program, leaks=True)
    assert older.sum().item() == 4
    assert [tuple(hazard) for hazard in found] == [
        (
            "leak",
            "1536 bytes of pinned memory are still in use at the end: "
            "pinned allocation number 1 since the beginning",
        ),
        (
            "leak",
            "3072 bytes of memory of sim:1 are still in use at the end: "
            "device allocation number 2 since the beginning",
        ),
    ]


def test_what_is_given_back_or_garbage_is_no_leak(sim: ModuleType, finds: Finds) -> None:
    def program() -> None:
        cycle: list[object] = [torch.empty(700, device="sim"), torch.empty(300, pin_memory=True)]
        cycle.append(cycle)

    finds(program, None, leaks=True)


@pytest.fixture
def staging(sim: ModuleType) -> Iterator[int]:
    """Leaves room for two staging buffers, of which at most one exists; returns their size."""
    size: int = _C.STAGING_BUFFER_BYTES
    tdcopier.limits.set_staging_bytes(size)
    tdcopier.pinned.staging_bytes("sim:0")  # releases buffers over the limit
    tdcopier.limits.set_staging_bytes(2 * size)
    yield size
    tdcopier.limits.set_staging_bytes(_C.DEFAULT_STAGING_LIMIT_BYTES)


def test_staging_that_is_kept_is_no_leak(sim: ModuleType, finds: Finds, staging: int) -> None:
    kept = []

    def copy() -> None:
        tdcopier.copy([torch.ones(3 * staging // 4)], "sim")

    def leak() -> None:
        kept.append(torch.empty(staging, dtype=torch.uint8, pin_memory=True))

    def replace() -> None:
        tdcopier.limits.set_staging_bytes(staging)
        assert tdcopier.pinned.staging_bytes("sim:0") == staging
        tdcopier.limits.set_staging_bytes(2 * staging)
        copy()
        assert tdcopier.pinned.staging_bytes("sim:0") == 2 * staging

    finds(lambda: (copy(), leak()), "leak", f"{staging} bytes of pinned memory", leaks=True)
    finds(copy, None, leaks=True)
    finds(replace, None, leaks=True)


def test_staging_over_the_limit_when_one_begins_to_look_hides_no_leak(
    sim: ModuleType, finds: Finds, staging: int
) -> None:
    tdcopier.limits.set_staging_bytes(_C.DEFAULT_STAGING_LIMIT_BYTES)
    with sim.hold(_C.copy_stream("sim:1")):  # each window needs its own buffer
        handle = tdcopier.start_copy([torch.ones(staging // 16)], "sim:1")  # four of 256 KiB
        handle.wait_staged()
    handle.get()
    tdcopier.limits.set_staging_bytes(staging)
    kept = []

    def leak() -> None:
        kept.append(torch.empty(staging, dtype=torch.uint8, pin_memory=True))

    finds(leak, "leak", f"{staging} bytes of pinned memory", leaks=True)


# ---- when hazards are sought ---------------------------------------------------------------------


def change_too_early(sim: ModuleType) -> None:
    source = pinned(1)
    with sim.hold():
        source.to("sim", non_blocking=True)
        source.fill_(2)
    torch.sim.synchronize()


def test_nothing_is_looked_for_outside(sim: ModuleType) -> None:
    change_too_early(sim)
    with sim.detect() as detector:
        pass
    change_too_early(sim)
    assert detector.hazards == ()


def test_what_is_under_way_at_the_end_is_waited_for(sim: ModuleType, finds: Finds) -> None:
    def program() -> None:
        source = pinned(1)
        with sim.hold():
            source.to("sim", non_blocking=True)
            source.fill_(2)

    finds(program, "changed")


def test_a_stream_that_is_held_at_the_end_is_not_waited_for(sim: ModuleType) -> None:
    source = pinned(1)
    hold = sim.hold()
    with sim.detect() as detector:
        source.to("sim", non_blocking=True)
        source.fill_(2)
    hold.release()
    torch.sim.synchronize()
    assert detector.hazards == ()


def test_hazards_can_be_asked_for_meanwhile_and_afterwards(sim: ModuleType) -> None:
    detector, seen = sim.detect(), []

    def program() -> None:
        with detector:
            change_too_early(sim)
            seen.extend(detector.hazards)

    with pytest.raises(HazardError, match=r"1 hazard found:\n\[changed\] the host") as caught:
        program()
    meanwhile = tuple(seen)
    assert meanwhile == detector.hazards == caught.value.hazards
    assert len(meanwhile) == 1
    copied = pickle.loads(pickle.dumps(caught.value))
    assert copied.hazards == meanwhile
    assert str(copied) == str(caught.value)


def test_another_exception_goes_on_with_a_note(sim: ModuleType) -> None:
    def fail(detector: Detector) -> None:
        with detector:
            change_too_early(sim)
            raise KeyError

    detector = sim.detect()
    with pytest.raises(KeyError) as caught:
        fail(detector)
    assert len(detector.hazards) == 1
    if hasattr(caught.value, "add_note"):
        (note,) = caught.value.__notes__
        assert note.startswith("1 hazard found:\n[changed]")


def test_detections_cannot_be_nested(sim: ModuleType) -> None:
    with sim.detect():
        with pytest.raises(RuntimeError, match="cannot be nested"), sim.detect():
            pass
        another = sim.detect()
    with another:
        pass


def test_the_same_mistake_is_reported_once(sim: ModuleType) -> None:
    def program() -> None:
        for _ in range(3):
            change_too_early(sim)

    assert len(hazards_of(sim, program)) == 1


def test_no_more_than_a_hundred_are_kept(sim: ModuleType) -> None:
    sources = [torch.ones(i + 1).pin_memory() for i in range(120)]

    def program() -> None:
        with sim.hold():
            for source in sources:
                source.to("sim", non_blocking=True)
                source.fill_(2)

    assert len(hazards_of(sim, program)) == 100
