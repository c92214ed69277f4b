"""Named example batches, shared by the tutorials, the tests and the benchmarks.

Every batch is a plain tree of ``list`` and ``dict`` with CPU tensors as leaves. The same arguments
give the same values. The numbers of leaves and bytes do not depend on the seed, so figures taken
with different seeds are comparable. Sizes use 1 KB = 1000 bytes, and 1 KiB = 1024 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict

import torch

__all__ = [
    "WORKLOADS",
    "AtariReplay",
    "AtariStep",
    "AtariStepAfter",
    "Camera",
    "Sample",
    "SampleWithImages",
    "Workload",
    "atari_replay",
    "detection_batch",
    "detection_batch_with_images",
    "flat_dict",
    "leaves",
    "leaves_with_paths",
    "many_large",
    "map_tensors",
    "one_large",
    "total_bytes",
]


def __dir__() -> list[str]:
    return __all__


# Objects seen by one camera, or in one sample: spread evenly from minimum to maximum.
MIN_OBJECTS = 8
MAX_OBJECTS = 80
NUM_CLASSES = 10
IMAGE_HEIGHT = 256
IMAGE_WIDTH = 704


class Camera(TypedDict):
    """Labels in one camera's image, with ``N`` objects: ``29 * N + 48`` bytes in 5 leaves.

    For example::

        boxes = tdcopier.workloads.detection_batch()[0]["cameras"][5]["boxes"]
    """

    boxes: torch.Tensor
    """(N, 4) float32: x0, y0, x1, y1 in pixels."""
    class_ids: torch.Tensor
    """(N,) int64."""
    active: torch.Tensor
    """(N,) bool: whether the object counts in the loss."""
    depths: torch.Tensor
    """(N,) float32, metres."""
    projection: torch.Tensor
    """(3, 4) float32: from the vehicle's frame to pixels."""


class Sample(TypedDict):
    """Labels of one moment in time, with ``M`` objects around the vehicle.

    For example::

        objects = [len(sample["boxes_3d"]) for sample in tdcopier.workloads.detection_batch()]
    """

    cameras: list[Camera]
    boxes_3d: torch.Tensor
    """(M, 7) float32: centre, size, yaw."""
    class_ids_3d: torch.Tensor
    """(M,) int64."""
    active_3d: torch.Tensor
    """(M,) bool."""


class SampleWithImages(Sample):
    """A sample with the pixels of its cameras.

    For example::

        images = tdcopier.workloads.detection_batch_with_images(samples=1)[0]["images"]
    """

    images: torch.Tensor
    """(cameras, 3, 256, 704) uint8."""


class AtariStep(TypedDict):
    """State of an environment at one step, in ``R`` rows: ``28,227 * R`` bytes in 4 leaves.

    For example::

        pixels = tdcopier.workloads.atari_replay(rows=4)["pixels"]
    """

    pixels: torch.Tensor
    """(R, 4, 84, 84) uint8: the last four frames, in greyscale."""
    done: torch.Tensor
    """(R, 1) bool: terminated or truncated."""
    terminated: torch.Tensor
    """(R, 1) bool."""
    truncated: torch.Tensor
    """(R, 1) bool."""


class AtariStepAfter(AtariStep):
    """State of an environment after an action, with the reward.

    For example::

        reward = tdcopier.workloads.atari_replay(rows=4)["next"]["reward"]
    """

    reward: torch.Tensor
    """(R, 1) float32."""


class AtariReplay(AtariStep):
    """Rows of a replay buffer.

    For example::

        index = tdcopier.workloads.atari_replay(rows=4)["index"]
    """

    action: torch.Tensor
    """(R,) int64."""
    next: AtariStepAfter
    index: torch.Tensor
    """(R,) int64: position of the row in the buffer."""


def detection_batch(samples: int = 16, cameras: int = 6, seed: int = 0) -> list[Sample]:
    """Return six-camera 3D detection labels, as a data loader yields them.

    For example::

        batch = tdcopier.workloads.detection_batch(samples=4, cameras=2)
        print(tdcopier.explain(batch, "cuda"))

    With the defaults: 528 leaves, 153,152 bytes, the largest leaf 2,240 bytes. The number of
    objects varies from 8 to 80 over the cameras and over the samples. The counts are spread evenly
    and assigned in an order that depends on the seed, so the total stays the same.

    Args:
        samples: Samples in the batch.
        cameras: Cameras per sample.
        seed: Determines the values and the order of the counts.

    Returns:
        One :class:`Sample` per sample.
    """
    generator = torch.Generator().manual_seed(seed)
    in_cameras = iter(_object_counts(samples * cameras, generator))
    in_samples = iter(_object_counts(samples, generator))
    return [
        _sample([_camera(next(in_cameras), generator) for _ in range(cameras)], count, generator)
        for count in in_samples
    ]


def detection_batch_with_images(
    samples: int = 16, cameras: int = 6, seed: int = 0
) -> list[SampleWithImages]:
    """Return :func:`detection_batch` plus (cameras, 3, 256, 704) uint8 images for each sample.

    For example::

        batches = [tdcopier.workloads.detection_batch_with_images(seed=seed) for seed in range(4)]

    With the defaults: 544 leaves, 52,057,664 bytes, of which 16 leaves of 3,244,032 bytes each are
    images. This is the common case of a training step: many tiny leaves and a few large ones.

    Args:
        samples: Samples in the batch.
        cameras: Cameras per sample.
        seed: As in :func:`detection_batch`.

    Returns:
        One :class:`SampleWithImages` per sample.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    shape = (cameras, 3, IMAGE_HEIGHT, IMAGE_WIDTH)
    return [
        {
            **sample,
            "images": torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator),
        }
        for sample in detection_batch(samples, cameras, seed)
    ]


def one_large(size_bytes: int = 1 << 28, seed: int = 0) -> torch.Tensor:
    """Return one (``size_bytes // 4``,) int32 tensor; by default 256 MiB (268,435,456 bytes).

    For example::

        handle = tdcopier.start_copy(tdcopier.workloads.one_large(1 << 24), "cuda")

    Each value encodes its position, so a piece that arrives in the wrong place is detected.

    Args:
        size_bytes: Bytes of the tensor, rounded down to whole int32 values.
        seed: The first value.

    Returns:
        The tensor; the tree is a single leaf.
    """
    return torch.arange(seed, seed + size_bytes // 4, dtype=torch.int32)


def many_large(leaves: int = 64, leaf_bytes: int = 1 << 22, seed: int = 0) -> list[torch.Tensor]:
    """Return int32 leaves of one size; by default 64 of 4 MiB, together 268,435,456 bytes.

    For example::

        weights = tdcopier.workloads.many_large(leaves=8, leaf_bytes=1 << 20)

    Examples of such batches are the weights of a layer or its optimizer state, brought back from
    the host, and precomputed features of a clip. Values encode positions, as in :func:`one_large`,
    and no two leaves are equal.

    Args:
        leaves: Leaves in the list.
        leaf_bytes: Bytes of each, rounded down to whole int32 values.
        seed: The first value.

    Returns:
        The list.
    """
    count = leaf_bytes // 4
    begins = range(seed, seed + leaves * count, count)
    return [torch.arange(begin, begin + count, dtype=torch.int32) for begin in begins]


def atari_replay(rows: int = 256, seed: int = 0) -> AtariReplay:
    """Return rows sampled from a replay buffer of Atari frames, as a learner gets them.

    For example::

        rows = tdcopier.copy(tdcopier.workloads.atari_replay(rows=64), "cuda")

    With the defaults: 11 leaves, 14,457,344 bytes, of which the two stacks of frames have 7,225,344
    each and all others together 6,656. The nesting is that of torchrl's buffers: the step, the step
    after the action under ``"next"``, and the index of each row in the buffer.

    Args:
        rows: Rows in the batch.
        seed: Determines the values.

    Returns:
        One dict, with one dict in it.
    """
    generator = torch.Generator().manual_seed(seed)
    reward = torch.randint(-1, 2, (rows, 1), generator=generator).float()
    return {
        **_atari_step(rows, generator),
        "action": torch.randint(0, 18, (rows,), generator=generator),
        "next": {**_atari_step(rows, generator), "reward": reward},
        "index": torch.randint(0, 1_000_000, (rows,), generator=generator),
    }


def flat_dict(leaves: int = 1000, floats: int = 64, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return one dict of (``floats``,) float32 leaves; by default 1000 leaves, 256,000 bytes.

    For example::

        last = tdcopier.workloads.flat_dict(leaves=100, floats=16)["leaf_99"]

    Args:
        leaves: Leaves in the dict, under the keys ``"leaf_0"``, ``"leaf_1"``, ...
        floats: Values per leaf.
        seed: Determines the values.

    Returns:
        The dict.
    """
    generator = torch.Generator().manual_seed(seed)
    return {f"leaf_{i}": torch.rand(floats, generator=generator) for i in range(leaves)}


class Workload(NamedTuple):
    """A batch with a name.

    For example::

        batch = tdcopier.workloads.WORKLOADS["flat_dict"].make(7)  # 7 is the seed

    Attributes:
        make: Takes a seed and returns a tree.
        pool: Number of batches with different values that a benchmark cycles through.
        repeat_share: The share of a benchmark's repeats that this batch gets; large ones get less.
    """

    make: Callable[[int], Any]
    pool: int
    repeat_share: float


WORKLOADS: dict[str, Workload] = {
    "detection_batch": Workload(lambda seed: detection_batch(seed=seed), 4, 1.0),
    "detection_batch_with_images": Workload(
        lambda seed: detection_batch_with_images(seed=seed), 2, 0.25
    ),
    "atari_replay": Workload(lambda seed: atari_replay(seed=seed), 4, 0.5),
    "flat_dict": Workload(lambda seed: flat_dict(seed=seed), 4, 1.0),
    "many_large": Workload(lambda seed: many_large(seed=seed), 1, 0.1),
    "one_large": Workload(lambda seed: one_large(seed=seed), 1, 0.1),
}
"""The batches that benchmarks run by name."""


def map_tensors(tree: Any, fn: Callable[[torch.Tensor], Any]) -> Any:
    """Apply ``fn`` to every tensor of the tree in the plain recursive way, with one call per leaf.

    For example::

        expected = tdcopier.workloads.map_tensors(batch, lambda leaf: leaf.to("cuda"))

    With ``fn=lambda leaf: leaf.to(device)`` it is the reference that a copy is compared with.

    Args:
        tree: ``list``, ``tuple`` and ``dict`` containers; a value that is neither a container nor a
            tensor is opaque and comes back unchanged.
        fn: Takes a tensor and returns its replacement.

    Returns:
        New containers of the same types.
    """
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    if type(tree) is dict:
        return {key: map_tensors(value, fn) for key, value in tree.items()}
    if type(tree) is list:
        return [map_tensors(value, fn) for value in tree]
    if type(tree) is tuple:
        return tuple(map_tensors(value, fn) for value in tree)
    return tree


def leaves_with_paths(tree: Any, path: str = "") -> list[tuple[str, torch.Tensor]]:
    """Return every tensor of the tree with its path, for example ``"[3]['cameras'][0]['boxes']"``.

    For example::

        for path, leaf in tdcopier.workloads.leaves_with_paths(batch):
            print(path, tuple(leaf.shape))

    Args:
        tree: As in :func:`map_tensors`.
        path: A prefix of every path.

    Returns:
        Pairs of path and tensor, in the order of the containers.
    """
    if isinstance(tree, torch.Tensor):
        return [(path, tree)]
    if type(tree) is dict:
        children = list(tree.items())
    elif type(tree) in (list, tuple):
        children = list(enumerate(tree))
    else:
        return []
    return [
        pair for key, value in children for pair in leaves_with_paths(value, f"{path}[{key!r}]")
    ]


def leaves(tree: Any) -> list[torch.Tensor]:
    """Return every tensor of the tree, in the order of the containers.

    For example::

        largest_bytes = max(leaf.nbytes for leaf in tdcopier.workloads.leaves(batch))

    Args:
        tree: As in :func:`map_tensors`.

    Returns:
        The tensors themselves, not copies.
    """
    return [leaf for _, leaf in leaves_with_paths(tree)]


def total_bytes(tree: Any) -> int:
    """Return the bytes of all tensors of the tree, without padding between them.

    For example::

        print(f"{tdcopier.workloads.total_bytes(batch) / 1e6:.1f} MB")

    Args:
        tree: As in :func:`map_tensors`.

    Returns:
        The sum of ``numel * element size``.
    """
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(tree))


def _object_counts(how_many: int, generator: torch.Generator) -> list[int]:
    """Return counts spread evenly from MIN_OBJECTS to MAX_OBJECTS, shuffled; the sum is fixed."""
    evenly = torch.linspace(MIN_OBJECTS, MAX_OBJECTS, how_many).round().long()
    counts: list[int] = evenly[torch.randperm(how_many, generator=generator)].tolist()
    return counts


def _camera(count: int, generator: torch.Generator) -> Camera:
    corners = torch.rand(count, 2, 2, generator=generator).sort(dim=1).values.reshape(count, 4)
    return {
        "boxes": corners * torch.tensor([IMAGE_WIDTH, IMAGE_HEIGHT] * 2),
        "class_ids": torch.randint(0, NUM_CLASSES, (count,), generator=generator),
        "active": torch.rand(count, generator=generator) < 0.8,
        "depths": 2.0 + 58.0 * torch.rand(count, generator=generator),
        "projection": torch.randn(3, 4, generator=generator),
    }


def _sample(cameras: list[Camera], count: int, generator: torch.Generator) -> Sample:
    return {
        "cameras": cameras,
        "boxes_3d": torch.randn(count, 7, generator=generator),
        "class_ids_3d": torch.randint(0, NUM_CLASSES, (count,), generator=generator),
        "active_3d": torch.rand(count, generator=generator) < 0.8,
    }


def _atari_step(rows: int, generator: torch.Generator) -> AtariStep:
    terminated, truncated = torch.rand(2, rows, 1, generator=generator) < 0.01
    return {
        "pixels": torch.randint(0, 256, (rows, 4, 84, 84), dtype=torch.uint8, generator=generator),
        "done": terminated | truncated,
        "terminated": terminated.clone(),
        "truncated": truncated.clone(),
    }
