"""The ways of copying a tree that are compared: tdcopier and the alternatives."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from tool.tables import OURS
from tool.way import GET, PREPARED, Way

import tdcopier
from copies.directions import Direction
from tdcopier.workloads import leaves_with_paths, map_tensors

PER_LEAF_TO = ".to() per leaf"
PINNED = "pinned beforehand, non_blocking .to()"
REUSED = f"{OURS}, prepared, outputs reused"

Move = Callable[[torch.Tensor], torch.Tensor]


def multi_tensor_copier() -> ModuleType | None:
    """Return NVIDIA's package, or None if it is not installed."""
    try:
        return importlib.import_module("accvlab.multi_tensor_copier")
    except ImportError:
        return None


def ways(direction: Direction, finish: Callable[[Any], Any] = GET) -> list[Way]:
    """Return every way that can run here, ours first; ``finish`` ends our own copies.

    ``run`` returns the whole tree on the target, in some cases before the bytes have arrived. So
    the code that times them synchronises.
    """
    target = direction.target
    found = [
        ours(target, finish),
        Way(
            f"{OURS}, no background thread",
            lambda tree: tdcopier.start_copy(tree, target, use_background_thread=False),
            finish,
        ),
        prepared(f"{OURS}, prepared", target, finish, reuse_outputs=False),
        prepared(REUSED, target, finish, reuse_outputs=True),
        per_leaf(PER_LEAF_TO, lambda leaf: leaf.to(target)),
    ]
    if direction.name == "d2d":
        name = "non_blocking .to() per leaf"
        return [*found, per_leaf(name, lambda leaf: leaf.to(target, non_blocking=True))]
    if direction.devices[0].type != "cuda":  # the other ways are about pinned memory
        return found
    found += pinned_to_device(target) if direction.name == "h2d" else [device_to_pinned()]
    peer = multi_tensor_copier()
    if peer is not None:
        found += [
            Way(
                "multi_tensor_copier, inline",
                lambda tree: peer.start_copy(tree, target, use_background_thread=False),
                GET,
            ),
            Way("multi_tensor_copier, background", lambda tree: peer.start_copy(tree, target), GET),
        ]
    return found


def ours(target: torch.device, finish: Callable[[Any], Any]) -> Way:
    return Way(OURS, lambda tree: tdcopier.start_copy(tree, target), finish)


def prepared(
    name: str, target: torch.device, finish: Callable[[Any], Any], *, reuse_outputs: bool
) -> Way:
    """Return a way with a plan for each layout, as detection batches vary in their box counts."""
    plans: list[tdcopier.PreparedCopy] = []

    def planned(tree: Any) -> Any:
        for plan in plans:
            if plan.why_not(tree) is None:
                return plan, tree
        plans.append(tdcopier.prepare(tree, target, reuse_outputs=reuse_outputs))
        return plans[-1], tree

    return Way(name, lambda planned: planned[0].start_copy(planned[1]), finish, planned, PREPARED)


def per_leaf(name: str, move: Move) -> Way:
    """Return the plain recursive way: one call per leaf."""
    return Way(name, finish=lambda tree: map_tensors(tree, move))


def pinned_beforehand(device: torch.device) -> Way:
    way = per_leaf(PINNED, lambda leaf: leaf.to(device, non_blocking=True))
    return way._replace(
        prepare=lambda tree: map_tensors(tree, torch.Tensor.pin_memory), kind=PREPARED
    )


def pinned_to_device(device: torch.device) -> list[Way]:
    def move(leaf: torch.Tensor) -> torch.Tensor:
        return leaf.pin_memory().to(device, non_blocking=True)

    return [per_leaf("pin_memory() and .to() per leaf", move), pinned_beforehand(device)]


def device_to_pinned() -> Way:
    def copy(leaf: torch.Tensor) -> torch.Tensor:
        pinned = torch.empty_like(leaf, device="cpu", pin_memory=True)
        return pinned.copy_(leaf, non_blocking=True)

    return per_leaf("pinned, non_blocking copy_() per leaf", copy)


def differences(result: Any, source: Any, device: torch.device) -> list[str]:
    """Return paths of leaves whose value, dtype, shape or device differs from that of ``.to()``."""
    expected = leaves_with_paths(map_tensors(source, lambda leaf: leaf.to(device)))
    found = leaves_with_paths(result)
    if [path for path, _ in expected] != [path for path, _ in found]:
        return ["<structure>"]
    return [
        path
        for (path, want), (_, got) in zip(expected, found, strict=True)
        if got.device != want.device
        or got.dtype != want.dtype
        or got.shape != want.shape
        or not torch.equal(got.cpu(), want.cpu())
    ]
