"""The ways of copying a tree that are compared: tdcopier and the alternatives."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from tool.tables import OURS

import tdcopier
from copies.directions import Direction
from tdcopier._commands.interleave import PREPARED, Contender
from tdcopier.workloads import leaves_with_paths, map_tensors

PER_LEAF_TO = ".to() per leaf"
PINNED = "pinned beforehand, non_blocking .to()"


def multi_tensor_copier() -> ModuleType | None:
    """Return NVIDIA's package, or None if it is not installed."""
    try:
        return importlib.import_module("accvlab.multi_tensor_copier")
    except ImportError:
        return None


def contenders(direction: Direction) -> list[Contender]:
    """Return every way that can run here, ours first.

    ``run`` returns the whole tree on the target, in some cases before the bytes have arrived. So
    the code that times them synchronises.
    """
    target = direction.target
    found = [
        Contender(OURS, lambda tree: tdcopier.start_copy(tree, target).get()),
        Contender(
            f"{OURS}, no background thread",
            lambda tree: tdcopier.start_copy(tree, target, use_background_thread=False).get(),
        ),
        _prepared(f"{OURS}, prepared", target, reuse_outputs=False),
        _prepared(f"{OURS}, prepared, outputs reused", target, reuse_outputs=True),
        per_leaf(PER_LEAF_TO, lambda leaf: leaf.to(target)),
    ]
    if direction.name == "d2d":
        found.append(
            per_leaf("non_blocking .to() per leaf", lambda leaf: leaf.to(target, non_blocking=True))
        )
        return found
    if direction.devices[0].type != "cuda":  # the other ways are about pinned memory
        return found
    found += pinned_to_device(target) if direction.name == "h2d" else [device_to_pinned()]
    peer = multi_tensor_copier()
    if peer is not None:
        found += [
            Contender(
                "multi_tensor_copier, inline",
                lambda tree: peer.start_copy(tree, target, use_background_thread=False).get(),
            ),
            Contender(
                "multi_tensor_copier, background", lambda tree: peer.start_copy(tree, target).get()
            ),
        ]
    return found


def _prepared(name: str, target: torch.device, *, reuse_outputs: bool) -> Contender:
    """Return a way with a plan for each source, as detection batches vary in their box counts."""
    return Contender(
        name,
        lambda planned: planned[0].start_copy(planned[1]).get(),
        lambda tree: (tdcopier.prepare(tree, target, reuse_outputs=reuse_outputs), tree),
        PREPARED,
    )


def per_leaf(name: str, move: Callable[[torch.Tensor], torch.Tensor]) -> Contender:
    """Return the plain recursive way: one call per leaf."""
    return Contender(name, lambda tree: map_tensors(tree, move))


def pinned_beforehand(device: torch.device) -> Contender:
    return Contender(
        PINNED,
        lambda tree: map_tensors(tree, lambda leaf: leaf.to(device, non_blocking=True)),
        lambda tree: map_tensors(tree, torch.Tensor.pin_memory),
        PREPARED,
    )


def pinned_to_device(device: torch.device) -> list[Contender]:
    def move(leaf: torch.Tensor) -> torch.Tensor:
        return leaf.pin_memory().to(device, non_blocking=True)

    return [per_leaf("pin_memory() and .to() per leaf", move), pinned_beforehand(device)]


def device_to_pinned() -> Contender:
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
