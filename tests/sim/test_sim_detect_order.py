"""Hazards of order: streams that touch the same bytes, and how one is made to wait for another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from sim_support import fresh as fresh
from sim_support import hazards_of, marker

import tdcopier
from tdcopier.sim import Hazard, Schedule

pytestmark = [pytest.mark.sim, pytest.mark.hazardous]


def assert_unordered(sim: ModuleType, program: Callable[[], object], *words: str) -> None:
    found = hazards_of(sim, program)
    assert {hazard.kind for hazard in found} == {"unordered"}
    for word in words:
        assert word in found[0].message


def name(stream: torch.Stream) -> str:
    return f"stream {stream.stream_id} of sim:{stream.device_index}"


def on(stream: torch.Stream, target: torch.Tensor, source: torch.Tensor) -> None:
    """Enqueues a copy on the stream."""
    with torch.sim.stream(stream):
        target.copy_(source, non_blocking=True)


class Scene:
    """Two streams of a device, memory of it that no recent work touched, and pinned memory."""

    def __init__(self) -> None:
        self.a, self.b = torch.sim.Stream(), torch.sim.Stream()
        self.shared, self.one, self.two = (torch.zeros(64, 64).to("sim") for _ in range(3))
        self.pinned = torch.zeros(64, 64).pin_memory()
        torch.sim.synchronize()

    def write_on_a(self) -> None:
        on(self.a, self.shared, self.one)

    def read_on_b(self) -> None:
        on(self.b, self.two, self.shared)


def test_a_read_that_waited_does_not_hide_a_write_from_one_that_did_not(sim: ModuleType) -> None:
    scene = Scene()
    late, three = torch.sim.Stream(), torch.zeros(64, 64).to("sim")

    def program() -> None:
        scene.write_on_a()
        scene.b.wait_stream(scene.a)
        scene.read_on_b()
        on(late, three, scene.shared)

    assert_unordered(sim, program, name(scene.a), name(late))


@pytest.fixture
def scene(fresh: None) -> Scene:
    return Scene()


def test_a_missing_wait_between_two_streams_is_found(sim: ModuleType, scene: Scene) -> None:
    def program() -> None:
        scene.write_on_a()
        scene.read_on_b()

    transfer = "a transfer within of 16384 bytes from sim:0 to sim:0 on"
    assert_unordered(
        sim,
        program,
        f"{transfer} {name(scene.b)} reads device memory that {transfer} {name(scene.a)} writes",
        f"no event makes {name(scene.b)} wait for {name(scene.a)}",
    )


def wait_by_event(scene: Scene) -> None:
    scene.b.wait_event(marker(scene.a))


def wait_by_stream(scene: Scene) -> None:
    scene.b.wait_stream(scene.a)


def wait_by_a_third_stream(scene: Scene) -> None:
    third = torch.sim.Stream(1)
    third.wait_stream(scene.a)
    scene.b.wait_stream(third)


def wait_for_an_event_that_is_done(scene: Scene) -> None:
    event = marker(scene.a)
    while not scene.a.query():
        pass
    scene.b.wait_event(event)


def ask_an_event(scene: Scene) -> None:
    event = marker(scene.a)
    while not event.query():
        pass


def ask_the_stream(scene: Scene) -> None:
    while not scene.a.query():
        pass


def copy_and_block(scene: Scene) -> None:
    with torch.sim.stream(scene.a):
        scene.one.cpu()


def get_a_number(scene: Scene) -> None:
    with torch.sim.stream(scene.a):
        scene.one[0, 0].item()


def get_a_shape(scene: Scene) -> None:
    with torch.sim.stream(scene.a):
        scene.one.nonzero()


def wait_on_another_thread(scene: Scene) -> None:
    thread = threading.Thread(target=scene.a.synchronize)
    thread.start()
    thread.join()


@pytest.mark.parametrize(
    "wait",
    [
        wait_by_event,
        wait_by_stream,
        wait_by_a_third_stream,
        wait_for_an_event_that_is_done,
        ask_an_event,
        ask_the_stream,
        copy_and_block,
        get_a_number,
        get_a_shape,
        wait_on_another_thread,
        lambda scene: scene.a.synchronize(),
        lambda scene: marker(scene.a).synchronize(),
        lambda scene: torch.sim.synchronize(),
        lambda scene: torch.accelerator.synchronize(),
    ],
)
def test_whatever_makes_one_wait_for_the_other_orders_them(
    sim: ModuleType, scene: Scene, wait: Callable[[Scene], object]
) -> None:
    def program() -> None:
        scene.write_on_a()
        wait(scene)
        scene.read_on_b()

    assert hazards_of(sim, program) == ()


@pytest.mark.parametrize(
    "wait",
    [
        lambda scene: scene.a.wait_stream(scene.b),  # the wrong way round
        lambda scene: scene.b.synchronize(),
        lambda scene: marker(scene.a).query(),  # returns False: the stream is held
        lambda scene: torch.sim.default_stream().wait_stream(scene.a),
        lambda scene: scene.two + 1,
    ],
)
def test_a_wait_for_something_else_does_not(
    sim: ModuleType, scene: Scene, wait: Callable[[Scene], object]
) -> None:
    def program() -> None:
        with sim.hold(scene.a):
            scene.write_on_a()
            wait(scene)
            scene.read_on_b()

    assert_unordered(sim, program)


def test_an_event_that_was_recorded_too_early_is_found(sim: ModuleType, scene: Scene) -> None:
    def program(early: bool) -> None:
        event = torch.sim.Event()
        on(scene.a, scene.one, scene.two)
        if early:
            event.record(scene.a)
        scene.write_on_a()
        if not early:
            event.record(scene.a)
        scene.b.wait_event(event)
        scene.read_on_b()

    assert hazards_of(sim, lambda: program(early=False)) == ()
    assert_unordered(
        sim,
        lambda: program(early=True),
        f"{name(scene.b)} waits for earlier work of {name(scene.a)} only: "
        "the event was recorded before",
    )


def test_a_write_after_a_read_needs_an_order_too_and_two_reads_need_none(
    sim: ModuleType, scene: Scene
) -> None:
    def program() -> None:
        scene.read_on_b()
        scene.write_on_a()

    def reads() -> None:
        scene.read_on_b()
        on(scene.a, scene.one, scene.shared)

    assert_unordered(sim, program, "writes device memory", "reads, and nothing orders the two")
    assert hazards_of(sim, reads) == ()


def test_a_kernel_counts_as_one_that_the_host_does_not_wait_for(
    sim: ModuleType, scene: Scene
) -> None:
    """The simulation runs it at once; a device would not."""

    def program(wait: bool) -> None:
        with torch.sim.stream(scene.a):
            scene.shared.add_(1)
        if wait:
            scene.b.wait_stream(scene.a)
        with torch.sim.stream(scene.b):
            scene.shared.mul_(2)

    assert hazards_of(sim, lambda: program(wait=True)) == ()
    found = hazards_of(sim, lambda: program(wait=False))
    assert "the operator aten::mul" in found[0].message
    assert "the operator aten::add" in found[0].message


@pytest.mark.parametrize("ordered", [False, True])
def test_pinned_memory_is_looked_at_too(sim: ModuleType, scene: Scene, ordered: bool) -> None:
    def program() -> None:
        on(scene.a, scene.pinned, scene.one)
        if ordered:
            scene.b.wait_stream(scene.a)
        on(scene.b, scene.two, scene.pinned)

    if ordered:
        assert hazards_of(sim, program) == ()
    else:
        # The host might have changed it as well.
        found = [hazard for hazard in hazards_of(sim, program) if hazard.kind == "unordered"]
        assert "reads pinned memory that a transfer d2h" in found[0].message


@pytest.mark.parametrize(
    ("first", "second", "meet"),
    [
        (lambda t: t[:, 0], lambda t: t[:, 1], False),
        (lambda t: t[:, 0], lambda t: t[:, 0], True),
        (lambda t: t[:, :3], lambda t: t[:, 2:], True),
        (lambda t: t[:, ::2], lambda t: t[:, 1::2], False),
        (lambda t: t[:, :5], lambda t: t[:8, 5:], False),
        (lambda t: t[:, :5], lambda t: t[8], True),
        (lambda t: t[:32], lambda t: t[32:], False),
        (lambda t: t.t()[3:5], lambda t: t[7:9, 4], True),
        (lambda t: t.view(8, 8, 8, 8)[:, :4, 1, ::3], lambda t: t.view(-1)[64:65], False),
        (lambda t: t.view(8, 8, 8, 8)[:, :4, 1, ::3], lambda t: t.view(-1)[11:12], True),
    ],
)
def test_only_bytes_that_both_touch_count(
    sim: ModuleType,
    scene: Scene,
    first: Callable[[torch.Tensor], torch.Tensor],
    second: Callable[[torch.Tensor], torch.Tensor],
    meet: bool,
) -> None:
    def program() -> None:
        for stream, part in ((scene.a, first), (scene.b, second)):
            on(stream, part(scene.shared), part(scene.one))

    assert bool(hazards_of(sim, program)) == meet


def test_memory_of_very_many_pieces_is_left_alone_only_against_its_like(
    sim: ModuleType, scene: Scene
) -> None:
    rows = torch.zeros(10_000, 8).to("sim")
    values = torch.zeros(10_000).to("sim")
    torch.sim.synchronize()

    def program(part: torch.Tensor, source: torch.Tensor) -> None:
        on(scene.a, rows[:, 3], values)
        on(scene.b, part, source)

    for column in (3, 4):
        assert hazards_of(sim, lambda column=column: program(rows[:, column], values)) == ()
    assert hazards_of(sim, lambda: program(rows[7:5000, :3], rows[7:5000, 4:7])) == ()
    assert_unordered(sim, lambda: program(rows.view(-1)[800:804], values[:4]))


@pytest.mark.parametrize("waits", [False, True])
def test_memory_is_used_on_another_stream_than_the_one_it_was_allocated_on(
    sim: ModuleType, scene: Scene, waits: bool
) -> None:
    """An earlier tensor used the same memory, in the order of that stream."""

    def program() -> None:
        former = torch.empty(64, 64, device="sim")
        former.copy_(scene.one, non_blocking=True)
        del former
        fresh_looking = torch.empty(64, 64, device="sim")
        if waits:
            scene.a.wait_stream(torch.sim.current_stream())
        on(scene.a, fresh_looking, scene.two)
        fresh_looking.record_stream(scene.a)

    if waits:
        assert hazards_of(sim, program) == ()
    else:
        assert_unordered(
            sim, program, "the memory was freed and allocated again, in the order of stream 0"
        )


@pytest.mark.parametrize("mistake", ["none", "source", "target"])
def test_a_copy_between_devices_orders_both_current_streams(
    sim: ModuleType, scene: Scene, mistake: str
) -> None:
    away = torch.zeros(64, 64).to("sim:1")

    def program() -> None:
        side = torch.sim.Stream(1)
        if mistake == "source":
            scene.write_on_a()
        away.copy_(scene.shared, non_blocking=True)
        back = torch.zeros(64, 64).pin_memory()
        if mistake != "target":
            side.wait_stream(torch.sim.default_stream(1))
        on(side, back, away)

    if mistake == "none":
        assert hazards_of(sim, program) == ()
    else:
        assert_unordered(sim, program, "a transfer d2d of 16384 bytes from sim:0 to sim:1")


def test_what_the_engine_does_by_itself_is_in_order(sim: ModuleType) -> None:
    tree = {"small": [torch.rand(i + 1) for i in range(40)], "large": torch.rand(600_000)}

    def program() -> None:
        there = tdcopier.start_copy(tree, "sim:0").wait()
        away = tdcopier.start_copy(there, "sim:1").wait()
        back = tdcopier.start_copy(away, "cpu").get()
        assert torch.equal(back["large"], tree["large"])

    assert hazards_of(sim, program) == ()


@pytest.mark.parametrize("inside", [False, True])
def test_a_schedule_gives_the_same_reports_for_the_same_seed(
    sim: ModuleType, scene: Scene, inside: bool
) -> None:
    """The seed picks which of two threads comes first, and so the report of each."""

    def race(schedule: Schedule) -> None:
        streams = (scene.a, scene.b)
        threads = [schedule.thread(on, streams[i], scene.shared[i:], scene.one[i:]) for i in (0, 1)]
        for thread in threads:
            thread.join()

    def run(seed: int) -> tuple[Hazard, ...]:
        def program() -> None:
            with sim.schedule(seed) as schedule:
                race(schedule)

        if not inside:
            return hazards_of(sim, program)
        with sim.schedule(seed) as schedule:
            return hazards_of(sim, lambda: race(schedule))

    found = [run(seed) for seed in range(12)]
    assert all(len(hazards) == 1 for hazards in found)
    assert len(set(found)) == 2  # some seeds give either order
    assert [run(seed) for seed in range(12)] == found
