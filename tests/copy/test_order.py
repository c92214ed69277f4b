"""Ordering of copies, consumers' streams, and the reuse of memory.

`tests/support/defects_of_order.py` has engines in which streams do not wait for each other.
"""

from __future__ import annotations

import pytest
import torch
from support import same_bytes

import tdcopier


def test_wait_returns_while_the_consumer_stream_is_busy_and_what_is_read_later_is_right(
    device, accelerator, stall
):
    source = torch.arange(1000.0)
    consumer = accelerator.Stream(device=device)
    with accelerator.stream(consumer):
        with stall(consumer):
            handle = tdcopier.start_copy([source], device)
            (moved,) = handle.wait()  # hangs if it waits for the stream
            total = torch.empty((), device=device)
        total.copy_(moved.sum())
    consumer.synchronize()
    assert total.item() == source.sum().item()


def test_the_copy_itself_is_not_held_up_by_the_consumers_queue(stall, device, accelerator):
    with stall(accelerator.current_stream()):
        handle = tdcopier.start_copy([torch.ones(3)], device)
        handle.get()  # waits only for the copy stream
        assert handle.ready()
        assert not accelerator.current_stream().query()


def test_a_consumer_waits_for_a_copy_that_is_late(stall, device, accelerator, copy_stream):
    consumer = accelerator.Stream(device=device)
    with stall(copy_stream):
        handle = tdcopier.start_copy([torch.full((4,), 7.0)], device)
        assert not handle.ready()
        with accelerator.stream(consumer):
            (moved,) = handle.wait()
            copied = torch.empty(4, device=device)
            copied.copy_(moved, non_blocking=True)
        assert not consumer.query()
    consumer.synchronize()
    assert copied.tolist() == [7, 7, 7, 7]


def test_a_given_stream_is_the_one_that_waits(stall, device, accelerator, copy_stream):
    consumer = accelerator.Stream(device=device)
    with stall(copy_stream):
        handle = tdcopier.start_copy([torch.ones(4)], device)
        handle.wait(consumer)
        assert not consumer.query()
        assert accelerator.current_stream().query()
    consumer.synchronize()


@pytest.mark.parametrize("hand_over", ["get", "wait"])
def test_memory_is_not_reused_while_a_stream_that_got_it_can_still_read_it(
    stall, device, accelerator, hand_over
):
    """The consumer reads late, after later copies have used the same pool of memory."""
    consumer = accelerator.Stream(device=device)
    tdcopier.set_run_ahead_limit(1000)
    kept = []
    with accelerator.stream(consumer), stall(consumer):
        for value in range(20):
            (moved,) = getattr(
                tdcopier.start_copy([torch.full((50,), float(value))], device), hand_over
            )()
            late = torch.empty(50, device=device)
            late.copy_(moved, non_blocking=True)
            kept.append(late)
            del moved  # returned to the allocator; only the record keeps it from the next copy
    consumer.synchronize()
    assert [late[0].item() for late in kept] == list(range(20))


def test_a_second_hand_over_records_the_memory_on_its_stream_too(stall, device, accelerator):
    first, second = (accelerator.Stream(device=device) for _ in range(2))
    handle = tdcopier.start_copy([torch.full((50,), 1.0)], device)
    with accelerator.stream(first):
        handle.wait()
    with accelerator.stream(second), stall(second):
        (moved,) = handle.wait()
        late = torch.empty(50, device=device)
        late.copy_(moved, non_blocking=True)
        del moved, handle
        others = [tdcopier.copy([torch.full((50,), 2.0)], device) for _ in range(3)]
    second.synchronize()
    assert late.tolist() == [1.0] * 50
    assert len(others) == 3


def test_staging_is_not_reused_before_the_device_has_read_it(stall, device, copy_stream):
    with stall(copy_stream):
        handles = [tdcopier.start_copy([torch.full((100,), float(v))], device) for v in range(10)]
    assert [handle.get()[0][0].item() for handle in handles] == list(range(10))


def test_get_returns_the_same_object_each_time_and_so_does_wait(device):
    handle = tdcopier.start_copy([torch.ones(2)], device)
    result = handle.wait()
    assert handle.get() is result
    assert handle.wait() is result


def test_delegated_outputs_are_ordered_too(stall, device, other_device, accelerator):
    """Torch copies such a leaf between devices on the streams that were current at the call."""
    source = torch.full((4,), 3.0).to(other_device).requires_grad_()
    starter, consumer = (accelerator.Stream(device=device) for _ in range(2))
    with stall(starter):
        with accelerator.stream(starter):
            handle = tdcopier.start_copy([source], device)
        assert handle.stats.delegated_leaves == 1
        assert not handle.ready()
        with accelerator.stream(consumer):
            (moved,) = handle.wait()
            copied = torch.empty(4, device=device)
            copied.copy_(moved.detach(), non_blocking=True)
        assert not consumer.query()
    consumer.synchronize()
    assert copied.tolist() == [3, 3, 3, 3]


def test_what_is_read_after_wait_is_right_in_every_round(device, accelerator):
    """Data that changes each round, consumed on the current stream, compared at the end."""
    rounds = 300
    sums = torch.zeros(rounds, dtype=torch.float64, device=device)
    expected = torch.zeros(rounds, dtype=torch.float64)
    for i in range(rounds):
        batch = [torch.full((n,), i * 31 + n, dtype=torch.float64) for n in range(1, 12)]
        expected[i] = sum(leaf.sum() for leaf in batch)
        moved = tdcopier.start_copy(batch, device).wait()
        sums[i] = sum(leaf.sum() for leaf in moved)
    accelerator.synchronize()
    assert same_bytes(sums, expected)


def test_a_second_stream_waits_for_a_late_copy_as_the_first_does(
    stall, device, accelerator, copy_stream
):
    first, second = (accelerator.Stream(device=device) for _ in range(2))
    with stall(copy_stream):
        handle = tdcopier.start_copy([torch.ones(4)], device)
        handle.wait(first)
        handle.wait(second)
        assert not first.query()
        assert not second.query()
    first.synchronize()
    second.synchronize()


def test_every_chunk_is_kept_from_reuse(stall, device, accelerator):
    """Several chunks, packed and alone: no later copy may take one while the consumer is late."""
    consumer = accelerator.Stream(device=device)
    source = [torch.full((n,), 1.0) for n in (100, 100, 100, 70_000)]
    with accelerator.stream(consumer), stall(consumer):
        moved = tdcopier.start_copy(source, device, max_packed_chunk_bytes=512).wait()
        late = [torch.empty_like(leaf) for leaf in moved]
        for target, leaf in zip(late, moved, strict=True):
            target.copy_(leaf, non_blocking=True)
        del moved, leaf
        others = [
            tdcopier.start_copy(
                [torch.full_like(leaf, 2.0) for leaf in source], device, max_packed_chunk_bytes=512
            )
            for _ in range(3)
        ]
    consumer.synchronize()
    assert [(leaf.min().item(), leaf.max().item()) for leaf in late] == [(1.0, 1.0)] * 4
    assert len(others) == 3


@pytest.mark.parametrize("kind", ["plain", "wrapper subclass"])
def test_memory_of_delegated_outputs_is_kept_from_reuse(stall, device, accelerator, kind):
    from torch.testing._internal.two_tensor import TwoTensor

    source = torch.full((200, 150), 1.0).requires_grad_()
    if kind == "wrapper subclass":
        source = TwoTensor(torch.full((200, 150), 1.0), torch.full((200, 150), 1.0))
    consumer = accelerator.Stream(device=device)
    handle = tdcopier.start_copy([source], device)
    assert handle.stats.delegated_leaves == 1
    with accelerator.stream(consumer), stall(consumer):
        (moved,) = handle.wait()
        part = moved.detach() if kind == "plain" else moved.a
        late = torch.empty((200, 150), device=device)
        late.copy_(part, non_blocking=True)
        del moved, part, handle
        with accelerator.stream(accelerator.default_stream(device)):
            others = [torch.full((200, 150), 9.0).to(device) for _ in range(4)]
    consumer.synchronize()
    assert (late.min().item(), late.max().item()) == (1.0, 1.0)
    assert len(others) == 4
