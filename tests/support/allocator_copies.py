"""Runs checked copies of every kind, for processes that use a different allocator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import tdcopier

SMALL = [torch.arange(n, dtype=torch.float32) for n in (1, 10, 300)]
LARGE = [torch.arange(1 << 20, dtype=torch.int32)]
BACKGROUND = [*SMALL, *(torch.arange(1 << 20, dtype=torch.int32) + n for n in range(4))]
BATCHES = {"small": SMALL, "large": LARGE, "background": BACKGROUND}
ROWS = {"frames": torch.arange(64 * 1000).view(64, 1000), "reward": torch.arange(64.0)}


def checked_copies(device: str) -> list[torch.Tensor]:
    """Runs copies in every direction and checks their values.

    Args:
        device: The accelerator.

    Returns:
        Leaves on the device that the copies allocated, all alive, so each has its own memory.

    """
    delivered: list[torch.Tensor] = []
    for name, source in BATCHES.items():
        on_device = tdcopier.start_copy(source, device).get()
        _check(f"{name} to the device", on_device, source)
        delivered += on_device
        _check(f"{name} to the host", tdcopier.start_copy(on_device, "cpu").get(), source)
        for from_where, tree in (("host", source), ("device", on_device)):
            for to_where, target in (("host", "cpu"), ("device", device)):
                destination = [torch.zeros_like(leaf, device=target) for leaf in source]
                tdcopier.start_copy_into(tree, destination).get()
                _check(f"{name} by copy_into(), {from_where} to {to_where}", destination, source)
        plan = tdcopier.prepare(source, device, reuse_outputs=True)
        for _ in range(2):
            _check(f"{name}, prepared", plan.start_copy(source).get(), source)
    index = torch.arange(63, -1, -3)
    rows = tdcopier.start_gather(ROWS, index, device).get()
    _check("rows", list(rows.values()), [leaf[index] for leaf in ROWS.values()])
    return [*delivered, *rows.values()]


def check_reuse_of_memory(device: str, rounds: int = 20) -> None:
    """Drops results at once, while the stream that reads them is late."""
    module: Any = torch.get_device_module(device)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    side = module.Stream(device)
    for value in range(rounds):
        source = [torch.full((n,), value, dtype=torch.int32) for n in (10, 1 << 18)]
        handle = tdcopier.start_copy(source, device)
        with module.stream(side):
            for leaf in handle.wait():
                wrong += (leaf != value).sum()
        del handle, leaf
    module.synchronize(device)
    assert wrong.item() == 0, f"{wrong.item()} wrong values after wait()"


def _check(what: str, found: list[torch.Tensor], source: list[torch.Tensor]) -> None:
    wrong = [
        index
        for index, (got, wanted) in enumerate(zip(found, source, strict=True))
        if not torch.equal(got.cpu(), wanted)
    ]
    assert not wrong, f"{what}: wrong leaves {wrong}"


def outside(leaves: list[torch.Tensor], segments: list[dict[str, Any]]) -> list[int]:
    """Returns the sizes of the leaves that no segment of a memory snapshot contains."""
    ends = list(_ends(segments))
    return [
        leaf.nbytes
        for leaf in leaves
        if not any(begin <= leaf.data_ptr() and leaf.data_ptr() + leaf.nbytes <= end
                   for begin, end in ends)
    ]  # fmt: skip


def _ends(segments: list[dict[str, Any]]) -> Iterator[tuple[int, int]]:
    return ((s["address"], s["address"] + s["total_size"]) for s in segments)
