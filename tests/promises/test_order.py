"""Order, for every call: reads come after the work before, writes before the work after.

`tests/support/defects_of_order.py` has engines in which streams do not wait for each other.
"""

from __future__ import annotations

import pytest
import torch
from calls import each_call
from each_case import together
from filled_leaves import refill, sizes, values_of
from sim_support import BRIEFLY, becomes
from thread_support import let_go_without_the_gil
from work_of_calls import Work

import tdcopier

PACKED = [100, 50]


def late_copies(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """Enqueues reads on the current stream, as a kernel would."""
    late = [torch.empty_like(leaf) for leaf in leaves]
    for to, leaf in zip(late, leaves, strict=True):
        to.copy_(leaf, non_blocking=True)
    return late


# ---- work before the call ------------------------------------------------------------------------


@sizes
@each_call(lambda call: call.is_from_device)
@together("own_stream", [False, True], ids=["default stream", "own stream"])
def test_sources_are_read_behind_what_their_current_stream_has(
    make, accelerator, stall, elements, own_stream
):
    work = make(1, elements)
    stream = accelerator.current_stream(work.source)
    if own_stream:
        stream = accelerator.Stream(device=work.source)
    with accelerator.stream(stream), stall(stream):
        refill(work.sources, 2)
        handle = work.start()  # hangs if the call waits for the stream
        assert not becomes(handle.ready, within=BRIEFLY)
    assert values_of(work.arrived(handle.get())) == {2}


@each_call(lambda call: call.is_from_device)
def test_other_streams_of_the_source_are_not_waited_for(make, accelerator, stall):
    work = make(1, PACKED)
    stream = accelerator.Stream(device=work.source)
    with stall(accelerator.default_stream(work.source)), accelerator.stream(stream):
        result = work.start().get()  # hangs if it waits
        if not work.call.is_to_device:
            assert values_of(work.arrived(result)) == {1}
    assert values_of(work.arrived(result)) == {1}


@each_call(lambda call: call.fills and call.is_to_device, "busy")
def test_a_destination_is_written_after_the_reads_that_were_enqueued_before(
    make, accelerator, stall
):
    work = make(2, PACKED)
    reader = accelerator.Stream(device=work.target)
    with accelerator.stream(reader), stall(reader):
        before = late_copies(work.written)
        handle = work.start()
        assert not becomes(handle.ready, within=BRIEFLY)
        handle.wait()
        after = late_copies(work.written)
    reader.synchronize()
    assert (values_of(before), values_of(after)) == ({0}, {2})


# ---- the next work on the sources ----------------------------------------------------------------


def assert_may_be_refilled(work: Work, ask: str) -> None:
    results = []
    for step in range(4):
        for leaf in work.sources:
            leaf.fill_(step)
        handle = work.start()
        getattr(handle, ask)()
        if work.call.numbers_on_device:
            handle.wait_gathered()  # `wait` does not hold the host for rows that the device finds
        for leaf in work.sources:
            leaf.fill_(-1)
        results.append(values_of(work.arrived(handle.wait())))
    assert results == [{0}, {1}, {2}, {3}]


@each_call(lambda call: not call.is_from_device)
@sizes
@together("ask", ["get", "wait", "wait_staged"])
def test_a_host_source_may_be_refilled_when_the_call_has_returned(make, slow_link, elements, ask):
    """As in a loop that fills one buffer again and again."""
    with slow_link:
        assert_may_be_refilled(make(0, elements), ask)


@each_call(lambda call: call.tables == "source")
@sizes
def test_rows_may_be_overwritten_when_they_are_gathered(make, slow_link, elements):
    with slow_link:
        assert_may_be_refilled(make(0, elements), "wait_gathered")


@each_call(lambda call: not call.is_from_device, "held")
@together(("elements", "copies"), [(PACKED, 10), ([1 << 20, 3], 2)], ids=["packed", "large"])
def test_host_sources_may_be_refilled_though_the_transfer_is_held(make, stall, elements, copies):
    """Staging is not used again before the device has read it."""
    works = [make(value, elements) for value in range(copies)]
    ask = "wait_gathered" if works[0].call.tables else "wait_staged"
    with stall(works[0].writing):
        handles = [work.start() for work in works]
        for work, handle in zip(works, handles, strict=True):
            assert getattr(handle, ask)() is None  # hangs if it waits for the transfer
            for leaf in work.sources:
                leaf.fill_(-1)
        assert not any(handle.ready() for handle in handles)
    for value, (work, handle) in enumerate(zip(works, handles, strict=True)):
        assert values_of(work.arrived(handle.get())) == {value}


@sizes
@each_call(lambda call: call.is_from_device, "held")
def test_a_device_source_may_be_overwritten_behind_wait_and_wait_staged(
    make, accelerator, stall, elements
):
    """Only the stream that is current then waits for the read."""
    for ask in ("wait", "wait_staged"):
        work = make(1, elements)
        if ask == "wait" and not work.call.is_to_device:
            continue  # it waits for the arrival
        writer, bystander = (accelerator.Stream(device=work.source) for _ in range(2))
        with stall(work.reading):
            handle = work.start()
            with accelerator.stream(writer):
                getattr(handle, ask)()  # hangs if it waits for the read
                refill(work.sources, 2)
            assert becomes(bystander.query)
            assert not becomes(writer.query, within=BRIEFLY)
            assert not handle.ready()
        writer.synchronize()
        assert values_of(work.arrived(handle.get())) == {1}
        assert values_of(work.sources) == {2}


@sizes
@each_call(lambda call: call.is_from_device, "held")
def test_device_sources_behind_a_busy_stream_may_be_written_again(
    make, accelerator, stall, elements
):
    work = make(1, elements)
    with stall(accelerator.current_stream(work.source)):
        refill(work.sources, 2)
        handle = work.start()
        handle.wait_staged()
        refill(work.sources, 3)
    assert values_of(work.arrived(handle.get())) == {2}
    assert values_of(work.sources) == {3}


# ---- consumers -----------------------------------------------------------------------------------


@sizes
@each_call(lambda call: call.is_to_device, "held", "others")
def test_every_consumer_waits_for_a_copy_that_is_late_and_no_other_stream_does(
    make, accelerator, stall, elements
):
    """The current stream, a stream that is given, and the second as the first."""
    for late in ("reading", "writing"):
        work = make(7, elements)
        stalled = getattr(work, late)
        if stalled is None:
            continue  # the host reads
        current, given, bystander = (accelerator.Stream(device=work.target) for _ in range(3))
        with stall(stalled):
            handle = work.start()
            with accelerator.stream(current):
                result = handle.wait()
                copied = late_copies(work.arrived(result))
            assert handle.wait(given) is result
            assert becomes(bystander.query)
            assert not becomes(current.query, within=BRIEFLY)
            assert not given.query()
            assert not handle.ready()
        current.synchronize()
        given.synchronize()
        assert values_of(copied) == {7}
        assert handle.get() is handle.wait() is result


@each_call(lambda call: call.is_to_device, "busy")
def test_wait_returns_while_the_consumer_is_busy_and_what_is_read_later_is_right(
    make, accelerator, stall
):
    work = make(7, PACKED)
    consumer = accelerator.Stream(device=work.target)
    with accelerator.stream(consumer), stall(consumer):
        handle = work.start()
        result = handle.wait()  # hangs if it waits for the stream
        copied = late_copies(work.arrived(result))
        assert not consumer.query()
    consumer.synchronize()
    assert values_of(copied) == {7}


@each_call(lambda call: call.makes_device_memory and not call.numbers_on_device, "busy")
def test_a_copy_to_new_memory_is_not_held_up_by_the_consumers_queue(make, accelerator, stall):
    work = make(7, PACKED)
    with stall(accelerator.current_stream(work.target)):
        handle = work.start()
        handle.get()  # waits only for the engine's streams
        assert handle.ready()
        assert not accelerator.current_stream(work.target).query()


@each_call(lambda call: call.makes_device_memory, "others")
@together("hand_over", ["get", "wait"])
def test_memory_is_not_reused_while_a_stream_that_got_it_can_still_read_it(
    make, accelerator, stall, hand_over
):
    """The consumer, to which it was handed over second, reads late, after later copies."""
    works = [make(value, [100, 50, 70_000]) for value in range(20)]
    first, consumer = (accelerator.Stream(device=works[0].target) for _ in range(2))
    kept = []
    with stall(consumer):
        for work in works:
            handle = work.start()
            if len(kept) % 2:
                handle.wait(first)
            with accelerator.stream(consumer):
                result = getattr(handle, hand_over)()
                kept.append(late_copies(work.arrived(result)))
            del handle, result  # only the record keeps the memory from the next copy
    consumer.synchronize()
    assert [values_of(late) for late in kept] == [{value} for value in range(20)]


@pytest.mark.sim
@sizes
@each_call(lambda call: call.is_from_device and not call.is_to_device)
@together("ask", ["get", "wait"])
def test_what_goes_to_the_host_has_arrived_and_the_gil_is_free_meanwhile(sim, make, elements, ask):
    """Another thread releases the transfer, and must run Python code for it."""
    work = make(3, elements)
    hold = sim.hold(work.writing)
    handle = work.start()
    with let_go_without_the_gil(hold) as order:
        result = getattr(handle, ask)()
        order.append("arrived")
    assert order == ["let go", "arrived"]
    assert values_of(work.arrived(result)) == {3}


# ---- every round ---------------------------------------------------------------------------------


@each_call()
def test_every_round_is_right_with_streams_of_ones_own_on_every_side(make, accelerator):
    """Data that changes each round on one stream, consumed on another, compared at the end."""
    work = make(0, [300, 40, 5])
    tdcopier.limits.set_run_ahead(4)
    writer, reader = (
        accelerator.Stream(device=place) if place != "cpu" else None
        for place in (work.source, work.target)
    )
    seen: list[torch.Tensor] = []
    for step in range(30):
        with accelerator.stream(writer):
            refill(work.sources, step)
            handle = work.start()
            handle.wait_staged()  # the next round may overwrite them
        with accelerator.stream(reader):
            arrived = work.arrived(handle.wait())
            seen.append(sum((leaf == step).sum() for leaf in arrived))
        if work.written and reader:  # the next round overwrites what this one has read
            (writer or accelerator.current_stream(work.target)).wait_stream(reader)
    for place in work.devices:
        accelerator.synchronize(place)
    assert {int(right) for right in seen} == {sum(leaf.numel() for leaf in arrived)}
