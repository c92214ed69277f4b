"""The ways of copying a tree that tdcopier is held against, and tdcopier itself."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch
from measure import Contender

import tdcopier
from tdcopier.workloads import leaves_with_paths, map_tensors

OURS = "tdcopier"
PER_LEAF_TO = ".to() per leaf"


def multi_tensor_copier() -> ModuleType | None:
    """NVIDIA's package, where it is installed."""
    try:
        return importlib.import_module("accvlab.multi_tensor_copier")
    except ImportError:
        return None


def contenders(device: torch.device) -> list[Contender]:
    """Every way that can run here, ours first.

    Args:
        device: The target.

    Returns:
        Contenders whose ``run`` gives the whole tree on the target; whoever times them
        synchronises, since some give it before the bytes have arrived.

    """

    def to(leaf: torch.Tensor) -> torch.Tensor:
        return leaf.to(device)

    def pin_to(leaf: torch.Tensor) -> torch.Tensor:
        return leaf.pin_memory().to(device, non_blocking=True)

    def pin(leaf: torch.Tensor) -> torch.Tensor:
        return leaf.pin_memory()

    def pinned_to(leaf: torch.Tensor) -> torch.Tensor:
        return leaf.to(device, non_blocking=True)

    found = [
        Contender(OURS, lambda tree: tdcopier.start_copy(tree, device).get()),
        Contender(
            f"{OURS}, no background thread",
            lambda tree: tdcopier.start_copy(tree, device, use_background_thread=False).get(),
        ),
        Contender(PER_LEAF_TO, lambda tree: map_tensors(tree, to)),
    ]
    if device.type == "cuda":  # pinning is what these two are about
        found += [
            Contender("pin_memory() and .to() per leaf", lambda tree: map_tensors(tree, pin_to)),
            Contender(
                "pinned beforehand, non_blocking .to()",
                lambda tree: map_tensors(tree, pinned_to),
                lambda tree: map_tensors(tree, pin),
            ),
        ]
    peer = multi_tensor_copier()
    if peer is not None and device.type == "cuda":
        found += [
            Contender(
                "multi_tensor_copier, inline",
                lambda tree: peer.start_copy(tree, device, use_background_thread=False).get(),
            ),
            Contender(
                "multi_tensor_copier, background",
                lambda tree: peer.start_copy(tree, device).get(),
            ),
        ]
    return found


def differences(result: Any, source: Any, device: torch.device) -> list[str]:
    """Paths of the leaves whose value, dtype, shape or device is not what ``.to()`` gives.

    Args:
        result: A tree on the target.
        source: The tree that it was copied from.
        device: The target.

    Returns:
        Paths, none if all is right.

    """
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
