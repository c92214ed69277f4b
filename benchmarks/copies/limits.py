"""The machine's limit for a batch's bytes: one transfer between pinned and device memory.

It runs as a contender, so that ratios to it compare times from the same rounds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tool.tables import LIMIT_PREFIX
from tool.way import LIMIT, Way

from copies.directions import HOST, Direction
from tdcopier.workloads import leaves


class Pieces(NamedTuple):
    """The bytes of a batch as one tensor at each end: (bytes,) uint8; pinned on the host."""

    source: torch.Tensor
    target: torch.Tensor


def transfer(direction: Direction) -> Way:
    """Return one transfer of all bytes of a batch."""
    pinned = " pinned" if HOST in (direction.source, direction.target) else ""

    def pieces(tree: Any) -> Pieces:
        flat, target = flat_bytes(tree), direction.target
        room = torch.zeros(len(flat), dtype=torch.uint8, device=target, pin_memory=target == HOST)
        return Pieces(flat.pin_memory() if direction.source == HOST else flat, room)

    return Way(
        f"{LIMIT_PREFIX}one{pinned} DMA",
        lambda pieces: pieces.target.copy_(pieces.source, non_blocking=True),
        prepare=pieces,
        kind=LIMIT,
    )


def over_transfer(found: dict[str, Any]) -> float:
    """Return our time over that of one transfer, from the figures of all ways."""
    (ratio,) = (each for way, each in found["ratios"].items() if way.startswith(LIMIT_PREFIX))
    return 1 / ratio


def flat_bytes(tree: Any) -> torch.Tensor:
    """Return the concatenated bytes of all leaves, on their device: (bytes,) uint8."""
    return torch.cat([leaf.reshape(-1).view(torch.uint8) for leaf in leaves(tree)])


def differs(result: torch.Tensor, tree: Any) -> bool:
    """Return whether a limit moved other bytes than those of the batch."""
    return not torch.equal(result.cpu(), flat_bytes(tree).cpu())
