"""Lets the workers of a `DataLoader` pack their batches, without a change by the user.

The loader's collate function runs in the worker, then `pack`. A pass iterates a copy of the loader,
so the user's own iteration never gets parcels; unless its collate function packs already.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader, default_collate

from tdcopier import _slabs as slabs
from tdcopier._collate import Collate, _packed, collate
from tdcopier._containers.unknown import class_name
from tdcopier._options import Device
from tdcopier._pack import Parcel, memory_to_send, pack
from tdcopier._prefetch.source import copier_of_state
from tdcopier._prefetch.stats import PrefetchCounters


class Unpacked(NamedTuple):
    """A batch that a worker could not pack, and sends as torch does."""

    batch: Any
    why: str


class _Sending:
    """Such a batch on its way: pickled in the collate function, and read when it arrives.

    An error in the queue's thread would never reach the loop, which waits; and the worker, whose
    memory it may name, may have ended when its turn comes.
    """

    def __init__(self, batch: Any, why: str) -> None:
        """Pickle it, or raise why it cannot be sent."""
        self._pickled = bytes(ForkingPickler.dumps(batch))
        self._why = why

    def __reduce__(self) -> Any:
        return _arrived, (self._pickled, self._why)


def _arrived(pickled: bytes, why: str) -> Unpacked:
    return Unpacked(ForkingPickler.loads(pickled), why)


class PackingCollate:
    """A loader's collate function, whose batches are packed in the worker."""

    def __init__(self, collate_fn: Collate) -> None:
        """Take the loader's own function."""
        self._collate_fn = collate_fn

    def __call__(self, samples: Any) -> Parcel | _Sending:
        """Return the parcel of a batch, or the batch itself; raise what the function raises."""
        if self._collate_fn is pack:
            return pack(samples, out=memory_to_send)
        parcel = self._stacked(samples)
        if parcel is not None:
            return parcel
        batch = self._collate_fn(samples)
        if isinstance(batch, Parcel):
            return batch
        try:
            parcel = pack(batch, out=memory_to_send)
        except Exception as error:  # torch may be able to send it
            try:
                return _Sending(batch, f"{type(error).__name__}: {error}")
            except Exception as of_torch:
                raise error from of_torch
        if parcel.device.type != "cpu":  # torch sends memory of a device without a copy
            return _Sending(batch, f"its leaves are on {parcel.device}")
        return parcel

    def _stacked(self, samples: Any) -> Parcel | None:
        """Return a parcel in which samples are stacked, for the functions that this is known of."""
        if self._collate_fn is not collate and self._collate_fn is not default_collate:
            return None
        try:
            return _packed(self._collate_fn, samples)
        except Exception:  # the function is called next, and says what is wrong
            return None


class Packing:
    """Begins the passes over a source, and packs the batches of its workers where it can."""

    why_not: str | None
    """Why workers do not pack, or None: one sentence without a capital and a full stop."""

    def __init__(
        self,
        source: Any,
        device: Device,
        *,
        is_wanted: bool,
        inspects: bool,
        counters: PrefetchCounters,
    ) -> None:
        """Take the source and where its batches go; `inspects`: an option needs their values."""
        self._source = source
        self._counters = counters
        self._pins = torch.device(device).type != "cpu"
        if not is_wanted:
            self.why_not = "pack_in_workers is False"
        elif inspects:
            self.why_not = "on_unknown looks for values in the batch itself"
        else:
            self.why_not = why_not_packed(source, device)

    def begin(self) -> Iterator[Any]:
        """Return an iterator of the source, or of a copy whose workers pack."""
        # Attributes of a loader may be set between two passes.
        if self.why_not is not None or _packs_itself(self._source.collate_fn):
            return iter(self._source)
        source = self._source
        made = _copies.get(source) if source.persistent_workers else None
        if made is None:
            made = object.__new__(type(source))
            if source.persistent_workers:
                _copies[source] = made
        made.__dict__.update(
            {
                **source.__dict__,
                "_iterator": made.__dict__.get("_iterator"),  # its own persistent workers
                "collate_fn": PackingCollate(source.collate_fn),
                "pin_memory": False,  # the engine stages the batch in pinned memory
            }
        )
        return iter(made)

    def read(self, iterator: Iterator[Any]) -> Any:
        """Return the next batch, and count it."""
        batch = next(iterator)
        if type(batch) is Unpacked:
            self._counters.why_unpacked = batch.why
            return batch.batch
        if type(batch) is Parcel:
            self._counters.packed_batches += 1
            why_not = slabs.why_not_in_place(batch) if self._pins else _FOR_THE_HOST
            self._counters.slab_batches += why_not is None
            self._counters.why_not_in_place = why_not or self._counters.why_not_in_place
        return batch


_FOR_THE_HOST = "the batches stay on the host"

_copies: WeakKeyDictionary[DataLoader[Any], DataLoader[Any]] = WeakKeyDictionary()
"""The copies by loader, for persistent workers, which serve one prefetcher after the other."""


def _packs_itself(collate_fn: Any) -> bool:
    return isinstance(collate_fn, partial) and collate_fn.func is _packed


def why_not_packed(source: Any, device: Device) -> str | None:
    """Return why the workers of a source do not pack for a device, or None if they do."""
    cls = type(source)
    if not isinstance(source, DataLoader):
        return f"the source is no DataLoader of torch, but a {class_name(cls)}"
    if source.num_workers == 0:
        return "the loader has no workers"
    if _packs_itself(source.collate_fn):
        return None
    if torch.device(device).type == "cpu":
        return _FOR_THE_HOST
    if copier_of_state(source) is not None:
        return f"{class_name(cls)} has a state, which a copy of it would not share"
    own = [name for name in _ITERATION if getattr(cls, name) is not getattr(DataLoader, name)]
    if own:
        return f"{class_name(cls)} has its own {own[0]}, which may need the batches themselves"
    return None


_ITERATION = ("__iter__", "_get_iterator", "__getattribute__", "__setattr__", "__eq__")
