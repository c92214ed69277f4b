"""Ordering of leaves that torch copies, and of several chunks; `tests/promises` has the rest."""

from __future__ import annotations

import pytest
import torch

import tdcopier


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
