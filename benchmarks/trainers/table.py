"""The trainers: for each, its batches, the call that moves a batch as its users write it, its step.

For the loops a step is kernels of a given duration, and the host begins a step when the one before
the last is done. The step of a model ends with ``loss.item()``, as in torchvision's reference.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from loops.learner import Work

from tdcopier.workloads import map_tensors
from trainers import batches, models
from trainers.batches import Data

WORK_MS = 3.4
OBJECTS = (7, 6, 7, 7)


class Steps(NamedTuple):
    """The steps of a block, and the pause after it."""

    untimed: int = 2
    timed: int = 8
    pause_s: float = 0.1

    @property
    def period(self) -> int:
        return self.untimed + self.timed


SHORT = Steps(untimed=16, timed=32)
"""Of steps as short as reading a batch takes: first, the 14 batches are taken that six workers (two
each) and a prefetcher (two) have ahead."""


class Trainer(NamedTuple):
    """A training loop, without the way that its batches take."""

    what: str
    data: Callable[[int, bool], Data]
    """Takes the number of batches after which they repeat, and whether they are tiny."""
    move: Callable[[Any, torch.device, bool], Any]
    """Takes a batch, the device, and ``non_blocking``; returns the batch on the device."""
    make_step: Callable[..., models.Step]
    """Takes the device and ``small``; makes the model."""
    needs: tuple[str, ...] = ()
    """Packages that the model needs."""
    steps: Steps = Steps()
    workers: int = 6

    def missing(self) -> list[str]:
        """Return the packages that are not installed."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


# ---- batches, and how they are moved -------------------------------------------------------------


def _maskrcnn(period: int, small: bool) -> Data:
    height, width, size = (64, 96, 2) if small else (800, 1066, 4)
    dataset = batches.Detection(height, width, OBJECTS, period * size, masks=True)
    return Data(dataset, size, batches.collate_detection)


def _ssd(period: int, small: bool) -> Data:
    pixels, size = (64, 2) if small else (320, 24)
    dataset = batches.Detection(pixels, pixels, (3, 9, 5, 7), period * size)
    return Data(dataset, size, batches.collate_detection)


def _detr(period: int, small: bool) -> Data:
    pixels, size = (64, 2) if small else (640, 4)
    dataset = batches.Padded(pixels, pixels, (5, 9, 3, 7), period * size)
    return Data(dataset, size, batches.collate_padded)


def _rl(period: int, small: bool) -> Data:
    stored, rows = (16, 4) if small else (4096, 256)
    return Data(batches.Batches(batches.DrawnRows(stored, rows), period), None)


def _many(period: int, small: bool) -> Data:
    return Data(batches.Batches(batches.ManyLeaves(1 if small else 16), period), None)


def _images(period: int, small: bool) -> Data:
    pixels, size = (64, 2) if small else (320, 4)
    dataset = batches.Varied(pixels, pixels, OBJECTS, period * size, size)
    return Data(dataset, size, batches.collate_detection)


def _few(period: int, small: bool) -> Data:
    return Data(batches.Batches(batches.few_leaves, period), None)


def _move_targets(targets: Any, device: torch.device, non_blocking: bool) -> Any:
    return [
        {key: value.to(device, non_blocking=non_blocking) for key, value in target.items()}
        for target in targets
    ]


def _move_detection(batch: Any, device: torch.device, non_blocking: bool) -> Any:
    images, targets = batch
    images = [image.to(device, non_blocking=non_blocking) for image in images]
    return images, _move_targets(targets, device, non_blocking)


def _move_padded(batch: Any, device: torch.device, non_blocking: bool) -> Any:
    images, targets = batch
    images = images.to(device, non_blocking=non_blocking)
    return images, _move_targets(targets, device, non_blocking)


def _move_tree(batch: Any, device: torch.device, non_blocking: bool) -> Any:
    return map_tensors(batch, lambda leaf: leaf.to(device, non_blocking=non_blocking))


# ---- steps of the loops --------------------------------------------------------------------------


def _loop(device: torch.device, *, small: bool = False) -> models.Step:
    work, module = Work(device, WORK_MS), torch.get_device_module(device)
    ended = [module.Event(), module.Event()]
    for event in ended:
        event.record()

    def step(batch: Any) -> None:
        batches.leaves_of(batch)[0].sum()  # reads the batch in the order of the stream
        work.enqueue()
        ended.append(module.Event())
        ended[-1].record()
        ended.pop(0)
        ended[0].synchronize()

    return step


TRAINERS = {
    "maskrcnn": Trainer(
        "Mask R-CNN, 4 images of 3x800x1066 and masks",
        _maskrcnn,
        _move_detection,
        models.maskrcnn,
        ("torchvision",),
    ),
    "ssd": Trainer(
        "SSDlite, 24 images of 3x320x320", _ssd, _move_detection, models.ssd, ("torchvision",)
    ),
    "detr": Trainer(
        "a small DETR, 4 images of up to 3x640x640, padded",
        _detr,
        _move_padded,
        models.detr,
        ("torchvision", "scipy"),
    ),
    "rl": Trainer(
        "deep Q-learning, 256 rows of 4x84x84 frames",
        _rl,
        _move_tree,
        models.dqn,
        steps=SHORT,
    ),
    "loop_many": Trainer(
        f"{WORK_MS:g} ms of kernels, 528 leaves", _many, _move_tree, _loop, steps=SHORT, workers=4
    ),
    "loop_images": Trainer(
        f"{WORK_MS:g} ms of kernels, 4 images of 3x320x320, some up to 20 % smaller",
        _images,
        _move_detection,
        _loop,
        steps=SHORT,
        workers=4,
    ),
    "loop_few": Trainer(
        f"{WORK_MS:g} ms of kernels, 6 leaves, 2 MB", _few, _move_tree, _loop, steps=SHORT
    ),
}


def in_bytes(batch: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in batches.leaves_of(batch))


def checksums(batch: Any) -> torch.Tensor:
    """Return sums over the bytes of the first, the last and the largest leaf, where the batch is.

    Sums of integers are exact, so those of the host and of a device are equal.
    """
    leaves = batches.leaves_of(batch)
    some = (leaves[0], leaves[-1], max(leaves, key=lambda leaf: leaf.numel()))
    sums = [leaf.contiguous().reshape(-1).view(torch.uint8).sum() for leaf in some]
    return torch.stack(sums)
