"""`collate`: stacks samples of a dataset into a batch, in workers with one chunk per dtype."""

from __future__ import annotations

import copy
from collections.abc import (
    Callable,
    Iterator,
    Mapping,
    MutableMapping,
    MutableSequence,
    Sequence,
)
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast, overload

import numpy as np
import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils import collate as _torch

from tdcopier._compile import keep_out_of_graphs
from tdcopier._containers.delegated_parts import is_tensor_collection
from tdcopier._containers.rule import Flat, Refused
from tdcopier._containers.unknown import class_name
from tdcopier._slots import Slots, light_tensor, new_tensor

__all__ = ["collate"]

_Chunks = dict[torch.dtype, torch.UntypedStorage] | None
"""Shared memory by dtype; None for leaves with memory of their own."""


K = TypeVar("K")
Stacked: TypeAlias = "torch.Tensor | np.ndarray[Any, Any] | int | float"
S = TypeVar("S", bound=Stacked)
Tensors = TypeVar("Tensors", bound=dict[Any, torch.Tensor])


@overload
def collate(samples: Sequence[Stacked]) -> torch.Tensor: ...
@overload
def collate(samples: Sequence[Tensors]) -> Tensors: ...
@overload
def collate(samples: Sequence[dict[K, S]]) -> dict[K, torch.Tensor]: ...
@overload
def collate(samples: Sequence[Any]) -> Any: ...
@keep_out_of_graphs("collate()")
def collate(samples: Sequence[Any]) -> Any:
    """Stack samples into a batch, like `torch.utils.data.default_collate`, for cheap transport.

    For example::

        loader = torch.utils.data.DataLoader(dataset, batch_size=32, collate_fn=tdcopier.collate)

    In a worker process the batch has one chunk of shared memory per dtype, so one file descriptor
    per dtype is sent to the main process, while `default_collate` sends one per leaf. Leaves are
    stored in their chunk in the order of the batch, each at a multiple of 16 bytes, and
    `start_copy` packs them like any others. In the main process each leaf has ordinary memory of
    its own.

    The result equals that of `default_collate` in the main process: same values, dtypes, strides
    and containers. Numbers become tensors, and strings are unchanged. Samples of mixed dtypes are
    promoted in workers too, where `default_collate` takes the dtype of the first one or fails.
    TensorDicts and tensorclasses, anywhere in a sample, are stacked by `torch.stack`: the result is
    dense, while `default_collate` makes lazy stacks of ragged ones.

    The chunks do not contain leaves that torch's own functions have to stack: tensors that need a
    gradient, tensors of a subclass, and tensors that are not on the host. Nor do they contain the
    results of functions that you have added to `default_collate_fn_map`.

    Samples of several sizes cannot be stacked: `collate_fn=tdcopier.pack` sends the list of them as
    one message instead, a parcel, which `start_copy` and `prefetch` take as the list. It also sends
    a batch of any other structure, and to other processes than that of a `DataLoader`.

    Set `pin_memory=False`: `start_copy` stages the batch in pinned memory itself, and the
    DataLoader's thread would give each leaf a pinned allocation of its own.

    A leaf from a worker keeps its whole chunk alive, and `torch.save` of it writes the whole chunk:
    `clone()` leaves that you keep for long. Growing such a leaf in place overwrites its neighbours.

    Args:
        samples: at least one sample. All are leaves, or have the same nesting of mappings,
            sequences, named tuples and TensorDicts. Or a single TensorDict that is a batch already,
            as a TensorDict that is used as the dataset returns it: its leaves are copied to the
            chunks.

    Raises:
        RuntimeError: leaves or sequences at the same place have different sizes; TensorDicts cannot
            be stacked. Messages name the place in the samples.
        TypeError: samples contain a value that cannot be stacked, or are no sequence.
        KeyError: a sample lacks a key of the first one.
        IndexError: there are no samples.
    """
    if not is_tensor_collection(type(samples)):
        _refuse_other(samples)
        if len(samples) == 0:
            raise IndexError("there are no samples to make a batch of: give at least one")
    walk = _Walk()
    try:
        plan = walk.plan_all(samples)
    except Exception as error:
        _raise_with_path(error, walk.path)
        raise
    if get_worker_info() is None:
        return plan.build(None)
    sizes = walk.slots.chunk_bytes
    return plan.build({dtype: _shared_memory(size) for dtype, size in sizes.items()})


def _refuse_other(samples: Any) -> None:
    """Raise a TypeError for one sample, or for an iterator, in the place of a list of samples."""
    is_one = isinstance(samples, (Mapping, torch.Tensor, str, bytes))
    if is_one or not hasattr(type(samples), "__getitem__"):
        raise TypeError(
            f"collate() takes a list of samples; got a {class_name(type(samples))}: give the "
            "function to a loader, as in DataLoader(dataset, collate_fn=tdcopier.collate), or call "
            "collate([sample, ...])"
        )


def _shared_memory(chunk_bytes: int) -> torch.UntypedStorage:
    storages: Any = torch.UntypedStorage  # its private `_new_shared` has no type annotations
    return cast("torch.UntypedStorage", storages._new_shared(chunk_bytes, device="cpu"))


def _slot(
    chunks: _Chunks,
    offset_bytes: int,
    dtype: torch.dtype,
    shape: Sequence[int],
    strides: Sequence[int] = (),
) -> torch.Tensor:
    if chunks is None or 0 in shape:
        return new_tensor(torch.device("cpu"), dtype, shape, strides)
    return light_tensor(chunks[dtype], offset_bytes, dtype, shape, strides)


class _Leaf:
    """One leaf of the batch: its slot, and the samples that fill it."""

    __slots__ = ("_dtype", "_offset_bytes", "_path", "_samples", "_shape", "_strides")

    def __init__(self, samples: Sequence[torch.Tensor], slots: Slots, path: list[str]) -> None:
        """Take samples of one dtype; `torch.stack` checks later that their shapes agree."""
        first = samples[0]
        self._samples = samples
        self._dtype = first.dtype
        self._shape = (len(samples), *first.shape)
        self._strides = _strides_of_stack(samples)
        self._offset_bytes = slots.place(self._dtype, self._shape)
        self._path = tuple(path)

    def build(self, chunks: _Chunks) -> torch.Tensor:
        slot = _slot(chunks, self._offset_bytes, self._dtype, self._shape, self._strides)
        try:
            return torch.stack(self._samples, 0, out=slot)  # type: ignore[arg-type]  # any sequence
        except Exception as error:
            _raise_with_path(error, self._path)
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


class _Made:
    """A leaf that was made elsewhere, and is copied to its slot."""

    __slots__ = ("_made", "_offset_bytes")

    def __init__(self, made: torch.Tensor, slots: Slots) -> None:
        """Take a plain tensor."""
        self._made = made
        self._offset_bytes = slots.place(made.dtype, made.shape)

    def build(self, chunks: _Chunks) -> torch.Tensor:
        made = self._made
        strides = torch.empty_like(made, device="meta").stride()
        return _slot(chunks, self._offset_bytes, made.dtype, made.shape, strides).copy_(made)


class _PassedThrough(NamedTuple):
    """A value that is not put into a chunk."""

    value: Any

    def build(self, chunks: _Chunks) -> Any:
        return self.value


class _Container(NamedTuple):
    """A container of the batch, built from its children."""

    make: Callable[[list[Any]], Any]
    children: list[Any]

    def build(self, chunks: _Chunks) -> Any:
        return self.make([child.build(chunks) for child in self.children])


class _Collection(NamedTuple):
    """A TensorDict or tensorclass that is a batch, with its leaves by `id()`."""

    batch: Any
    leaves: dict[int, _Made]

    def build(self, chunks: _Chunks) -> Any:
        def put(leaf: Any) -> Any:
            made = self.leaves.get(id(leaf))
            return leaf if made is None else made.build(chunks)

        return self.batch.apply(put)


_Plan = _Leaf | _Made | _PassedThrough | _Container | _Collection


class _Walk:
    """One walk over all samples in parallel: plans the slots, and tracks the current path."""

    __slots__ = ("_is_altered", "path", "slots")

    def __init__(self) -> None:
        """Start at the samples themselves."""
        self.slots = Slots()
        self.path: list[str] = []
        self._is_altered = _is_altered()

    def plan_all(self, samples: Any) -> _Plan:
        """Plan the whole batch; the samples may be a batch already."""
        if is_tensor_collection(type(samples)):
            return self._taken(samples)
        return self.plan(samples)

    def plan(self, samples: Sequence[Any]) -> _Plan:
        """Plan the batch's value at one place, from the values there in every sample."""
        first = samples[0]
        if (function := _function_for(first)) is not None:
            return self._leaf(samples, function)
        if is_tensor_collection(type(first)):
            return self._collection(samples)
        if isinstance(first, Mapping):
            keys = list(first)
            columns = ([sample[key] for sample in samples] for key in keys)
            steps = [f"[{key!r}]" for key in keys]
            return _Container(partial(_like_mapping, first, keys), self._children(steps, columns))
        if isinstance(first, tuple) and hasattr(first, "_fields"):
            steps = [f".{name}" for name in first._fields]
            children = self._children(steps, iter(zip(*samples, strict=False)))
            return _Container(partial(_like_named_tuple, first), children)
        if isinstance(first, Sequence):
            if any(len(sample) != len(first) for sample in samples):
                lengths = sorted({len(sample) for sample in samples})
                raise RuntimeError(
                    f"each element in list of batch should be of equal size; found sizes {lengths}"
                )
            steps = [f"[{index}]" for index in range(len(first))]
            children = self._children(steps, iter(zip(*samples, strict=True)))
            return _Container(partial(_like_sequence, first), children)
        raise TypeError(
            f"found {type(first)}; samples must contain tensors, numpy arrays, "
            "numbers, strings, mappings, sequences or TensorDicts, or classes for which "
            "torch.utils.data._utils.collate.default_collate_fn_map has a function"
        )

    def _children(self, steps: list[str], columns: Iterator[Sequence[Any]]) -> list[_Plan]:
        children = []
        for step in steps:
            self.path.append(step)
            children.append(self.plan(next(columns)))
            self.path.pop()
        return children

    def _leaf(self, samples: Sequence[Any], function: Any) -> _Plan:
        if self._is_altered:
            return _PassedThrough(function(samples, collate_fn_map=_torch.default_collate_fn_map))
        if function is _torch.collate_numpy_array_fn and samples[0].dtype.kind in "biufc":
            samples = [torch.as_tensor(sample) for sample in samples]
            function = _torch.collate_tensor_fn
        if function is _torch.collate_tensor_fn and _are_plain(samples):
            if all(sample.dtype is samples[0].dtype for sample in samples):
                return _Leaf(samples, self.slots, self.path)
            return _Made(torch.stack(tuple(samples), 0), self.slots)
        made = function(samples, collate_fn_map=_torch.default_collate_fn_map)
        is_torchs = _module_of(function) == _torch.__name__
        return _Made(made, self.slots) if is_torchs and _is_plain(made) else _PassedThrough(made)

    def _collection(self, samples: Sequence[Any]) -> _Plan:
        try:
            stacked: Any = torch.stack(tuple(samples), 0)
        except Exception:
            self.path += _where_they_differ(samples)
            raise
        return self._taken(stacked)

    def _taken(self, batch: Any) -> _Plan:
        leaves: dict[int, _Made] = {}

        def take(leaf: Any) -> Any:
            if not self._is_altered and _is_plain(leaf):
                leaves[id(leaf)] = _Made(leaf, self.slots)
            return leaf

        batch.apply(take)
        return _Collection(batch, leaves)


def _raise_with_path(error: Exception, steps: Sequence[str]) -> None:
    """Raise an error of the same class that names the place in the samples.

    Returns without raising if the class may take other arguments than a message.
    """
    path = "sample" + "".join(steps)
    if type(error) is KeyError:
        raise KeyError(f"{path} is in the first sample, and not in every other") from error
    if type(error) in (RuntimeError, TypeError, ValueError, IndexError):
        apart = "; to keep samples of several sizes apart, use collate_fn=list"
        is_size = str(error).startswith("stack expects each tensor to be equal size")
        raise type(error)(f"{path}: {error}{apart if is_size else ''}") from error
    if hasattr(error, "add_note") and not isinstance(error, RecursionError):
        error.add_note(f"while {path} was collated")


def _function_for(value: Any) -> Any:
    """Return the function for such a value in torch's own map, or None.

    Skips tensordict's functions, which make lazy stacks of ragged samples.
    """
    functions: dict[Any, Any] = _torch.default_collate_fn_map
    if type(value) in functions:
        return functions[type(value)]
    found = (functions[cls] for cls in functions if isinstance(value, cls))
    if is_tensor_collection(type(value)):
        found = (each for each in found if not _module_of(each).startswith("tensordict."))
    return next(found, None)


def _module_of(function: Any) -> str:
    return getattr(function, "__module__", None) or ""


def _is_altered() -> bool:
    """Return whether a torch mode or transform is active, under which no tensor is plain."""
    interpreters: Any = torch._C._functorch
    return bool(torch._C._len_torch_dispatch_stack() or interpreters.peek_interpreter_stack())


def _is_plain(value: Any) -> bool:
    return (
        type(value) is torch.Tensor
        and value.is_cpu
        and value.layout is torch.strided
        and not value.requires_grad
        and not value.is_conj()
        and not value.is_neg()
        and not value.is_quantized
        and not value.is_nested
        and not getattr(value, "has_names", bool)()  # removed in torch 2.13
    )


def _are_plain(samples: Sequence[Any]) -> bool:
    """Return whether `torch.stack` can take the samples, with existing memory for the result."""
    return _is_plain(samples[0]) and not any(
        type(sample) is not torch.Tensor or sample.requires_grad for sample in samples
    )


# ---- containers, made as `default_collate` makes them --------------------------------------------


def _like_mapping(first: Any, keys: list[Any], children: list[Any]) -> Any:
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


def _like_named_tuple(first: Any, children: list[Any]) -> Any:
    return type(first)(*children)


def _like_sequence(first: Any, children: list[Any]) -> Any:
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


def _where_they_differ(collections: Sequence[Any]) -> list[str]:
    """Return the step to the first entry that differs between them, if it can be found."""
    try:
        first, *others = (_shapes_of(collection) for collection in collections)
    except Refused:
        return []  # its entries cannot be inspected
    for other in others:
        for key in [*first, *other]:
            if first.get(key) != other.get(key):
                return [f"[{key!r}]"]
    return []


def _shapes_of(collection: Any) -> dict[Any, Any]:
    from tdcopier.tensordict._walk import flatten  # tensordict is imported already

    leaves, _, keys = cast("Flat", flatten(collection, None, named=True))
    return {
        key: getattr(leaf, "shape", ())
        for key, leaf in zip(cast("list[Any]", keys), leaves, strict=True)
    }
