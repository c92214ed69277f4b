"""The ways in which a DataLoader's batches get to the device: one table of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import cycle
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, default_convert

import tdcopier
from trainers.batches import Data, NestedTensor, leaves_of

RESIDENT, LOADER, PINNED = "resident", "loader", "pin_memory"
FLOOR, FLOOR_PACKED = "floor", "floor_packed"
PINNED_AGAIN, OURS, OURS_PINNED = "pin_memory_again", "prefetch", "prefetch_pinned"


class Source(NamedTuple):
    """What a way makes its batches of."""

    data: Data
    device: torch.device
    workers: int
    on_device: Sequence[Any] = ()
    """The batches of a period, moved before."""

    def collate(self, *, discard: bool = False, is_packed: bool = False) -> Any:
        """Return the function that makes a batch of a worker's items, or None for torch's.

        Args:
            discard: The workers make the batches and drop them; the loader gives integers.
            is_packed: The workers pack the batches.

        """
        collate = partial(_discarded, self.data.collate) if discard else self.data.collate
        return tdcopier.packed(collate or default_convert) if is_packed else collate

    def loader(self, *, pin_memory: bool = False, **options: bool) -> DataLoader[Any]:
        """Return a loader with workers of its own; ``options`` are those of `collate`."""
        return DataLoader(
            self.data.dataset,
            batch_size=self.data.batch_size,
            collate_fn=self.collate(**options),
            num_workers=self.workers,
            # Other packages change the default, and Python 3.14 has another one.
            multiprocessing_context="fork" if self.workers else None,
            pin_memory=pin_memory,
            persistent_workers=self.workers > 0,
        )


class Way(NamedTuple):
    """A way to the device."""

    batches: Callable[[Source], Iterator[Any]]
    """Starts the workers, and returns an iterator of batches. Those that are not on the device are
    moved by the trainer's own call."""
    non_blocking: bool = False
    """The argument of the trainer's ``.to``."""
    has_workers: bool = True
    has_first_batch: bool = True
    """Whether a user would have this way, so that the time of its first batch says something."""


@cache
def register() -> None:
    """Register the class of images as a container, as users of tdcopier do with own classes."""
    tdcopier.containers.register(
        NestedTensor,
        lambda images: ((images.tensors, images.mask), None),
        lambda children, _: NestedTensor(*children),
    )


def _discarded(collate: Callable[[Any], Any] | None, items: Any) -> int:
    """Make the batch as a worker does, move it to shared memory, as torch would, and drop it."""
    leaves = leaves_of(collate(items) if collate else items)
    for leaf in leaves:
        leaf.share_memory_()
    return len(leaves)


def _resident(source: Source) -> Iterator[Any]:
    return cycle(source.on_device)


def _floor(source: Source, **options: bool) -> Iterator[Any]:
    return _Beside(iter(source.loader(**options)), cycle(source.on_device))


class _Beside:
    """Takes what a loader gives, drops it, and yields a batch that is on the device."""

    def __init__(self, discarded: Iterator[Any], on_device: Iterator[Any]) -> None:
        self._discarded, self._on_device = discarded, on_device

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        next(self._discarded)
        return next(self._on_device)


def _loader(source: Source, pin_memory: bool = False) -> Iterator[Any]:
    return iter(source.loader(pin_memory=pin_memory))


def _prefetch(source: Source, pin_memory: bool = False, **options: Any) -> Iterator[Any]:
    """Return a prefetcher, whose pass begins here: it starts the workers."""
    loader = source.loader(pin_memory=pin_memory)
    prefetcher = tdcopier.prefetch(loader, source.device, **options)
    iter(prefetcher)
    return prefetcher


WAYS: dict[str, Way] = {
    RESIDENT: Way(_resident, has_workers=False, has_first_batch=False),
    FLOOR: Way(partial(_floor, discard=True), has_first_batch=False),
    FLOOR_PACKED: Way(partial(_floor, is_packed=True), has_first_batch=False),
    LOADER: Way(_loader),
    PINNED: Way(partial(_loader, pin_memory=True), non_blocking=True),
    OURS: Way(_prefetch),
    OURS_PINNED: Way(partial(_prefetch, pin_memory=True), non_blocking=True),
    PINNED_AGAIN: Way(partial(_loader, pin_memory=True), non_blocking=True, has_first_batch=False),
}
"""By name. A variation is a row, for example ``"prefetch_depth_4": Way(partial(_prefetch,
depth=4))`` or ``"prefetch_in_loop": Way(partial(_prefetch, threaded=False))``. In a floor
the workers do all their work, with torch's leaves or packed, and nothing is copied."""
COMPARED = (RESIDENT, FLOOR, LOADER, PINNED, OURS)
"""Those of a run of all benchmarks. The others check it: two pinned loops give the noise."""
DEFAULT = (*COMPARED, FLOOR_PACKED, OURS_PINNED, PINNED_AGAIN)
"""Those of a run of the trainers alone."""


def variation(text: str) -> Way:
    """Return the way that a text such as ``prefetch:depth=4,threaded=False`` describes.

    Raises:
        ValueError: The text has another form, or a value is neither an integer nor True or False.

    """
    name, _, options = text.partition(":")
    if name in WAYS and not options:
        return WAYS[name]
    if name not in (OURS, OURS_PINNED):
        raise ValueError(f"{text!r} is no way; there are {', '.join(WAYS)}, and {OURS}:depth=4")
    found: dict[str, Any] = {}
    for option in options.split(","):
        key, _, value = option.partition("=")
        if value not in ("True", "False") and not value.isdigit():
            raise ValueError(f"{option!r} in {text!r}: give key=integer, key=True or key=False")
        found[key] = int(value) if value.isdigit() else value == "True"
    is_pinned = name == OURS_PINNED
    return Way(partial(_prefetch, pin_memory=is_pinned, **found), is_pinned)


def close(batches: Iterator[Any]) -> None:
    """End the pass of an iterator, and its workers, as far as it has some."""
    if isinstance(batches, tdcopier.Prefetcher):
        batches.close()
