"""Datasets that give the same item for the same index, and the functions that make batches of them.

Each project has its own form of batch. A worker makes a base once, and an item by light work on it:
the loader's speed is not the subject.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset

from tdcopier.workloads import detection_batch, map_tensors

LENGTH = 1 << 40
"""Items of an epoch: it never ends within a run."""
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class NestedTensor:
    """Images that are padded to one size, and where the padding is: the class of DETR's projects.

    It is a plain class. tdcopier would move it by its own `to` in the reader thread;
    `ways.register` registers it as a container, as the guide recommends for own classes.
    """

    def __init__(self, tensors: torch.Tensor, mask: torch.Tensor) -> None:
        self.tensors = tensors
        self.mask = mask

    def to(self, device: torch.device, non_blocking: bool = False) -> NestedTensor:
        return NestedTensor(
            self.tensors.to(device, non_blocking=non_blocking),
            self.mask.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> NestedTensor:
        return NestedTensor(self.tensors.pin_memory(), self.mask.pin_memory())


class Data(NamedTuple):
    """The batches of a trainer."""

    dataset: Dataset[Any]
    batch_size: int | None
    """None: an item is a batch."""
    collate: Callable[[Any], Any] | None = None

    def batch(self, number: int) -> Any:
        """Return the loader's batch of this number, made in this process."""
        if self.batch_size is None:
            return self.dataset[number]
        begin = number * self.batch_size
        items = [self.dataset[index] for index in range(begin, begin + self.batch_size)]
        assert self.collate is not None
        return self.collate(items)


def leaves_of(tree: Any) -> list[torch.Tensor]:
    """Return every tensor of a batch."""
    if isinstance(tree, NestedTensor):
        return [tree.tensors, tree.mask]
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)):
        return [leaf for child in tree for leaf in leaves_of(child)]
    return []


# ---- images with targets -------------------------------------------------------------------------


@lru_cache(maxsize=8)
def _base(height: int, width: int) -> torch.Tensor:
    """Return the image that a process makes once."""
    generator = torch.Generator().manual_seed(7)
    shape = (3, height, width)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def _image(height: int, width: int, index: int) -> torch.Tensor:
    """Flip, convert and normalise: the usual work on a decoded image."""
    pixels = _base(height, width)
    if index % 2:
        pixels = pixels.flip(-1)
    values = pixels.to(torch.float32).add_(float(index)).div_(255.0)
    return values.sub_(torch.tensor(MEAN)[:, None, None]).div_(torch.tensor(STD)[:, None, None])


def _boxes(count: int, height: int, width: int, generator: torch.Generator) -> torch.Tensor:
    """Return boxes that are neither empty nor out of the image: x0, y0, x1, y1 in pixels."""
    begin = torch.rand(count, 2, generator=generator) * 0.6
    extent = 0.1 + 0.3 * torch.rand(count, 2, generator=generator)
    scale = torch.tensor([width, height], dtype=torch.float32)
    return torch.cat([begin * scale, (begin + extent) * scale], dim=1)


class Detection(Dataset[Any]):
    """Images with the targets of torchvision's detection models.

    Args:
        height: Pixels.
        width: Pixels.
        objects: Numbers of objects, by index.
        period: After that many items they repeat.
        classes: Classes, the background included.
        masks: Whether there is a mask for each object.

    """

    def __init__(
        self,
        height: int,
        width: int,
        objects: Sequence[int],
        period: int,
        *,
        classes: int = 91,
        masks: bool = False,
    ) -> None:
        self.height, self.width, self.objects, self.period = height, width, objects, period
        self.classes, self.masks = classes, masks

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        index %= self.period
        generator = torch.Generator().manual_seed(index)
        count = self.objects[index % len(self.objects)]
        boxes = _boxes(count, self.height, self.width, generator)
        size = boxes[:, 2:] - boxes[:, :2]
        target = {
            "boxes": boxes,
            "labels": torch.randint(1, self.classes, (count,), generator=generator),
            "image_id": torch.tensor([index]),
            "area": size[:, 0] * size[:, 1],
            "iscrowd": torch.zeros(count, dtype=torch.int64),
        }
        if self.masks:
            masks = torch.zeros(count, self.height, self.width, dtype=torch.uint8)
            for mask, (x0, y0, x1, y1) in zip(masks, boxes.long().tolist(), strict=True):
                mask[y0 : y1 + 1, x0 : x1 + 1] = 1
            target["masks"] = masks
        return _image(self.height, self.width, index), target


def collate_detection(items: Sequence[Any]) -> Any:
    """Return the images and the targets, as detection projects do."""
    return tuple(zip(*items, strict=True))


class Varied(Detection):
    """Images whose height is up to a fifth less, equal in a batch.

    Args:
        height: Pixels, at most.
        width: Pixels.
        objects: Numbers of objects, by index.
        period: After that many items they repeat.
        size: Items of a batch.

    """

    def __init__(
        self, height: int, width: int, objects: Sequence[int], period: int, size: int
    ) -> None:
        super().__init__(height, width, objects, period)
        self.size = size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        image, target = super().__getitem__(index)
        number = index % self.period // self.size
        height = self.height - self.height * (number * 3 % 5) // 20
        return image[:, :height].contiguous(), target


class Padded(Detection):
    """Images of several sizes, with boxes as DETR wants them."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        index %= self.period
        image, target = super().__getitem__(index)
        height = self.height - (index % 4) * (self.height // 16)
        boxes = target["boxes"] / torch.tensor([self.width, self.height] * 2)
        begin, end = boxes[:, :2], boxes[:, 2:]
        target["boxes"] = torch.cat([(begin + end) / 2, end - begin], dim=1)
        target["orig_size"] = torch.tensor([self.height, self.width])
        target["size"] = torch.tensor([height, self.width])
        return image[:, :height], target


def collate_padded(items: Sequence[Any]) -> tuple[NestedTensor, list[Any]]:
    """Return the images in one tensor, where they are padded, and the targets."""
    images, targets = zip(*items, strict=True)
    height, width = (max(image.shape[axis] for image in images) for axis in (1, 2))
    tensors = torch.zeros(len(images), 3, height, width)
    mask = torch.ones(len(images), height, width, dtype=torch.bool)
    for row, (image, padded) in enumerate(zip(images, mask, strict=True)):
        tensors[row, :, : image.shape[1], : image.shape[2]] = image
        padded[: image.shape[1], : image.shape[2]] = False
    return NestedTensor(tensors, mask), list(targets)


# ---- whole batches -------------------------------------------------------------------------------


class Batches(Dataset[Any]):
    """Items that are whole batches.

    Args:
        make: Makes the batch of a number.
        period: After that many batches they repeat.

    """

    def __init__(self, make: Callable[[int], Any], period: int) -> None:
        self.make, self.period = make, period

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, number: int) -> Any:
        return self.make(number % self.period)


class DrawnRows:
    """Draws the rows of a learner's batch from frames that are in memory.

    Args:
        stored: Rows in memory, which workers share with the process that starts them.
        rows: Rows in a batch.

    """

    def __init__(self, stored: int, rows: int) -> None:
        generator = torch.Generator().manual_seed(3)
        shape = (stored, 4, 84, 84)
        self.frames = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        self.actions = torch.randint(0, 6, (stored,), generator=generator)
        self.rewards = torch.randint(-1, 2, (stored,), generator=generator).float()
        self.done = torch.rand(stored, generator=generator) < 0.01
        self.rows = rows

    def __call__(self, number: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        at = torch.randint(0, len(self.frames) - 1, (self.rows,), generator=generator)
        return {
            "obs": self.frames[at],
            "next_obs": self.frames[at + 1],
            "action": self.actions[at],
            "reward": self.rewards[at],
            "done": self.done[at],
        }


@lru_cache(maxsize=16)
def _labels(samples: int, number: int) -> Any:
    return detection_batch(samples=samples, seed=number)


class ManyLeaves:
    """Makes the labels of a six-camera detection batch; a process computes each of them once."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __call__(self, number: int) -> Any:
        return map_tensors(_labels(self.samples, number), torch.Tensor.clone)


def few_leaves(number: int) -> dict[str, torch.Tensor]:
    """Return 6 tensors, 2 MB in all."""
    generator = torch.Generator().manual_seed(number)
    return {f"part_{i}": torch.rand(256, 326, generator=generator) for i in range(6)}
