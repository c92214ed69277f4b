"""The batch that samples become: its leaves and containers, and the memory that leaves get."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, MutableMapping, MutableSequence, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch

from tdcopier import _C

# ---- memory of the leaves ------------------------------------------------------------------------


class Place(NamedTuple):
    """Where a leaf is in its dtype's chunk, and its form."""

    offset_bytes: int
    dtype: torch.dtype
    shape: Sequence[int]
    strides: Sequence[int] = ()
    """In elements, without gaps; empty for a contiguous leaf."""

    def new(self) -> torch.Tensor:
        """Return a leaf with memory of its own, which is not written."""
        if not self.strides:
            return torch.empty(self.shape, dtype=self.dtype, device="cpu")
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="cpu")

    def within(self, chunk: torch.UntypedStorage) -> torch.Tensor:
        """Return a leaf in shared memory; it is not a view of its neighbours."""
        light = torch.empty(0, dtype=self.dtype, device="cpu")
        offset = self.offset_bytes // self.dtype.itemsize
        return light.set_(chunk, offset, self.shape, self.strides)


class Slots:
    """Places leaves in one chunk per dtype, since torch saves a storage as elements of one dtype.

    Each slot and the length of each chunk are multiples of 16 bytes, hence of any element.
    """

    ALIGNMENT_BYTES = 16

    def __init__(self) -> None:
        """Start without leaves."""
        self.chunk_bytes: dict[torch.dtype, int] = {}

    def place(self, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int] = ()) -> Place:
        """Return the place of the next leaf."""
        offset = self.chunk_bytes.get(dtype, 0)
        bytes_ = math.prod(shape) * dtype.itemsize
        if bytes_ != 0:  # a tensor without elements has memory of its own
            units = -(-bytes_ // self.ALIGNMENT_BYTES)
            self.chunk_bytes[dtype] = offset + units * self.ALIGNMENT_BYTES
        return Place(offset, dtype, shape, strides)


class Unwritten(Protocol):
    """A leaf of the batch that has no memory yet."""

    @property
    def place(self) -> Place: ...
    @property
    def sources(self) -> Sequence[torch.Tensor]: ...
    def write(self, leaf: torch.Tensor) -> None:
        """Write it from its sources."""


Memory: TypeAlias = Callable[[Unwritten], torch.Tensor]
"""Returns a leaf with memory, and sees to it that it is written there."""


def in_own_memory(leaf: Unwritten) -> torch.Tensor:
    """Return a leaf with memory of its own."""
    made = leaf.place.new()
    leaf.write(made)
    return made


def in_chunks(chunks: dict[torch.dtype, torch.UntypedStorage]) -> Memory:
    """Return what puts leaves into one chunk of memory per dtype."""

    def put(leaf: Unwritten) -> torch.Tensor:
        place = leaf.place
        if 0 in place.shape:
            return in_own_memory(leaf)
        made = place.within(chunks[place.dtype])
        leaf.write(made)
        return made

    return put


class InParcel:
    """Leaves are written into a parcel; those of the tree are forms whose memory is not touched."""

    def __init__(self, memory_of: Callable[[int, torch.device], Any]) -> None:
        """Take a function of the parcel's size and device that returns its memory, or None."""
        self._memory_of = memory_of
        self._unwritten: dict[int, tuple[torch.Tensor, Unwritten]] = {}

    def __call__(self, leaf: Unwritten) -> torch.Tensor:
        """Return the form of a leaf."""
        if 0 in leaf.place.shape:
            return in_own_memory(leaf)
        form = leaf.place.new()
        self._unwritten[form.data_ptr()] = form, leaf
        return form

    def written(self, tree: Any) -> _C.Parcel | None:
        """Return the parcel of a tree of such leaves; None if it has them otherwise, or others.

        A class that only pickle can carry, for example, has them in its pickle.
        """
        parcel, places = _C.reserve(tree, self._memory_apart)
        if parcel is None or {address for address, _ in places} != self._unwritten.keys():
            return None
        storage = parcel._bytes.untyped_storage()
        for address, offset in places:
            form, leaf = self._unwritten[address]
            made = torch.empty(0, dtype=form.dtype, device="cpu")
            leaf.write(made.set_(storage, offset // form.itemsize, form.shape, form.stride()))
        return parcel

    def _memory_apart(self, nbytes: int, device: torch.device) -> Any:
        """Return the memory, if it does not overlap what is stacked there."""
        memory = self._memory_of(nbytes, device)
        if memory is not None:
            is_tensor = isinstance(memory, torch.Tensor)
            buffer = memory.detach().numpy() if is_tensor else memory
            begin = np.frombuffer(buffer, np.uint8).ctypes.data
            for _, leaf in self._unwritten.values():
                for source in leaf.sources:
                    _refuse_overlap(range(begin, begin + nbytes), source)
        return memory


def _refuse_overlap(taken: range, source: torch.Tensor) -> None:
    if not source.is_cpu or source.numel() == 0:
        return
    begin = source.data_ptr()
    reach = sum((n - 1) * s for n, s in zip(source.shape, source.stride(), strict=True)) + 1
    if begin < taken.stop and taken.start < begin + reach * source.itemsize:
        raise ValueError("out overlaps a leaf of the samples")


# ---- the batch -----------------------------------------------------------------------------------


class Leaf:
    """One leaf of the batch: its place, and the samples that fill it."""

    __slots__ = ("_path", "place", "sources")

    def __init__(self, samples: Sequence[torch.Tensor], slots: Slots, path: list[str]) -> None:
        """Take samples of one dtype; `torch.stack` checks later that their shapes agree."""
        first = samples[0]
        shape = (len(samples), *first.shape)
        self.sources = samples
        self.place = slots.place(first.dtype, shape, _strides_of_stack(samples))
        self._path = tuple(path)

    def build(self, memory: Memory) -> torch.Tensor:
        return memory(self)

    def write(self, leaf: torch.Tensor) -> None:
        try:
            torch.stack(self.sources, 0, out=leaf)  # type: ignore[arg-type]  # any sequence
        except Exception as error:
            raise_with_path(error, self._path)
            raise


def _strides_of_stack(samples: Sequence[torch.Tensor]) -> Sequence[int]:
    """Return the strides of `torch.stack`, which keeps orders such as channels last; () if plain.

    Nothing for samples of different shapes, which it refuses.
    """
    first = samples[0]
    plain = torch.empty(first.shape, device="meta").stride()
    if all(sample.stride() == plain for sample in samples):
        return ()
    if any(sample.shape != first.shape for sample in samples):
        return ()
    return torch.stack(
        [torch.empty_strided(s.shape, s.stride(), device="meta") for s in samples]
    ).stride()


class Made:
    """A leaf that was made elsewhere, and is copied to its place."""

    __slots__ = ("place", "sources")

    def __init__(self, made: torch.Tensor, slots: Slots) -> None:
        """Take a plain tensor."""
        self.sources = (made,)
        strides = torch.empty_like(made, device="meta").stride()
        self.place = slots.place(made.dtype, made.shape, strides)

    def build(self, memory: Memory) -> torch.Tensor:
        return memory(self)

    def write(self, leaf: torch.Tensor) -> None:
        leaf.copy_(self.sources[0])


class PassedThrough(NamedTuple):
    """A value that gets no other memory."""

    value: Any

    def build(self, memory: Memory) -> Any:
        return self.value


class Container(NamedTuple):
    """A container of the batch, built from its children."""

    make: Callable[[list[Any]], Any]
    children: list[Any]

    def build(self, memory: Memory) -> Any:
        return self.make([child.build(memory) for child in self.children])


class Collection(NamedTuple):
    """A TensorDict or tensorclass that is a batch, with its leaves by `id()`."""

    batch: Any
    leaves: dict[int, Made]

    def build(self, memory: Memory) -> Any:
        def put(leaf: Any) -> Any:
            made = self.leaves.get(id(leaf))
            return leaf if made is None else made.build(memory)

        return self.batch.apply(put)


Plan: TypeAlias = Leaf | Made | PassedThrough | Container | Collection


def raise_with_path(error: Exception, steps: Sequence[str]) -> None:
    """Raise an error of the same class that names the place in the samples.

    Returns without raising if the class may take other arguments than a message.
    """
    path = "sample" + "".join(steps)
    if type(error) is KeyError:
        raise KeyError(f"{path} is in the first sample, and not in every other") from error
    if type(error) in (RuntimeError, TypeError, ValueError, IndexError):
        apart = "; to keep samples of several sizes apart, use collate_fn=list or tdcopier.pack"
        is_size = str(error).startswith("stack expects each tensor to be equal size")
        raise type(error)(f"{path}: {error}{apart if is_size else ''}") from error
    if type(error) is RecursionError:
        start = "sample" + "".join(steps[:8])
        raise RecursionError(
            f"the samples are nested too deep, from {start}... on: does one contain itself?"
        ) from error
    if hasattr(error, "add_note"):
        error.add_note(f"while {path} was collated")


# ---- containers, made as `default_collate` makes them --------------------------------------------


def like_mapping(first: Any, keys: list[Any], children: list[Any]) -> Any:
    values = dict(zip(keys, children, strict=True))
    try:
        if isinstance(first, MutableMapping):
            before = {key: first[key] for key in keys}
            made = copy.copy(first)  # keeps attributes besides the items
            try:
                made.update(values)
            finally:
                # Its copy may share its items, and a dataset may keep the sample.
                is_shared = any(first[key] is value for key, value in values.items())
                if is_shared:
                    first.update(before)
            if not is_shared:
                return made
        return type(first)(values)
    except TypeError:  # a class whose constructor takes other arguments
        return values


def like_named_tuple(first: Any, children: list[Any]) -> Any:
    return type(first)(*children)


def like_sequence(first: Any, children: list[Any]) -> Any:
    if isinstance(first, tuple):
        return children
    try:
        if isinstance(first, MutableSequence):
            before, made = list(first), copy.copy(first)
            try:
                _set_items(made, children)
            finally:
                is_shared = any(first[i] is child for i, child in enumerate(children))
                if is_shared:
                    _set_items(first, before)
            if not is_shared:
                return made
        return type(first)(children)
    except TypeError:  # a class whose constructor takes other arguments, such as range
        return children


def _set_items(sequence: Any, items: list[Any]) -> None:
    for index, item in enumerate(items):
        sequence[index] = item
