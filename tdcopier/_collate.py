"""`collate` and `packed`: stack samples of a dataset into a batch that is cheap to send."""

from __future__ import annotations

from collections.abc import (
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast, overload

import numpy as np
import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils import collate as _torch

from tdcopier._compile import keep_out_of_graphs
from tdcopier._containers.delegated_parts import is_tensor_collection
from tdcopier._containers.rule import Flat, Refused
from tdcopier._containers.unknown import class_name
from tdcopier._pack import Memory, Parcel, memory_to_send, pack, shared_memory
from tdcopier._stacking import (
    Collection,
    Container,
    InParcel,
    Leaf,
    Made,
    PassedThrough,
    Plan,
    Slots,
    in_chunks,
    in_own_memory,
    like_mapping,
    like_named_tuple,
    like_sequence,
    raise_with_path,
)

__all__ = ["collate", "packed"]

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

    Samples of several sizes cannot be stacked: `collate_fn=tdcopier.packed(list)` sends the list of
    them as one message instead, a parcel, which `start_copy` and `prefetch` take as the list.
    :func:`~tdcopier.packed` makes a parcel of a batch, which costs the main process less.

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
        RecursionError: samples are nested too deep, or contain themselves.
    """
    walk = _Walk()
    plan = walk.plan_all(samples)
    if get_worker_info() is None:
        return plan.build(in_own_memory)
    sizes = walk.slots.chunk_bytes
    return plan.build(in_chunks({dtype: shared_memory(size) for dtype, size in sizes.items()}))


_MOST_LEVELS = 1000
Collate: TypeAlias = Callable[[Any], Any]


@keep_out_of_graphs("packed()")
def packed(collate_fn: Collate = collate) -> Callable[..., Parcel]:
    """Return a collate function for a `DataLoader` whose batches are parcels.

    For example::

        loader = DataLoader(dataset, batch_size=32, num_workers=4, collate_fn=tdcopier.packed())
        for batch in tdcopier.prefetch(loader, "cuda"):  # what collate gives, on the device
            ...

    Each batch goes to the main process as one message; see :func:`~tdcopier.pack`. A worker writes
    batches of 16 KiB and more to slabs: shared memory that it uses again and again. `prefetch`, or
    the loader with `pin_memory=True`, pins each slab once, and devices read batches from it. With
    :func:`~tdcopier.collate` or torch's `default_collate`, the samples are stacked in the parcel,
    so that their bytes are copied once before it is sent. TensorDicts, and what torch's own
    functions have to stack, are stacked before. So are samples with containers of other classes
    than `dict`, `list`, `tuple` and named tuples, whose code may look at the leaves.

    Args:
        collate_fn: makes a batch of a list of samples. Start methods other than fork pickle it.

    Returns:
        A function of the samples. It takes `out` by keyword, as :func:`~tdcopier.pack` does: memory
        for the parcel. It raises what `collate_fn` and :func:`~tdcopier.pack` raise.

    Raises:
        TypeError: `collate_fn` cannot be called.
    """
    if not callable(collate_fn):
        raise TypeError(
            f"packed() takes a collate function; got {class_name(type(collate_fn))}: give what "
            "it returns to a loader, as in DataLoader(dataset, collate_fn=tdcopier.packed())"
        )
    return partial(_packed, collate_fn)


@keep_out_of_graphs("packed()")
def _packed(collate_fn: Collate, samples: Any, *, out: Any = None) -> Parcel:
    is_on_device = isinstance(out, torch.Tensor) and not out.is_cpu
    if out is None and get_worker_info() is not None:
        out = memory_to_send
    if not is_on_device and (collate_fn is collate or collate_fn is _torch.default_collate):
        # Of TensorDicts, torch's function may make lazy stacks.
        walk = _Walk(takes_collections=collate_fn is collate)
        plan = walk.plan_all(samples)
        if not walk.has_met_others:
            given = Memory(out)
            memory = InParcel(given.of)
            parcel = None if walk.has_met_code else memory.written(plan.build(memory))
            if parcel is not None:
                return given.noted(parcel)
            return pack(plan.build(in_own_memory), out=out)
    return pack(collate_fn(samples), out=out)


def _refuse_other(samples: Any) -> None:
    """Raise a TypeError for one sample, or for an iterator, in the place of a list of samples."""
    is_one = isinstance(samples, (Mapping, torch.Tensor, str, bytes))
    if is_one or not hasattr(type(samples), "__getitem__"):
        raise TypeError(
            f"collate() takes a list of samples; got {class_name(type(samples))}: give the "
            "function to a loader, as in DataLoader(dataset, collate_fn=tdcopier.collate), or call "
            "collate([sample, ...])"
        )


class _Walk:
    """One walk over all samples in parallel: plans the slots, and tracks the current path."""

    __slots__ = (
        "_is_altered",
        "_takes_collections",
        "has_met_code",
        "has_met_others",
        "path",
        "slots",
    )

    def __init__(self, *, takes_collections: bool = True) -> None:
        """Start at the samples themselves; `takes_collections`: plan TensorDicts too."""
        self.slots = Slots()
        self.path: list[str] = []
        self.has_met_code = False
        self.has_met_others = False
        self._takes_collections = takes_collections
        self._is_altered = _is_altered()

    def plan_all(self, samples: Any) -> Plan:
        """Plan the whole batch; the samples may be a batch already."""
        if is_tensor_collection(type(samples)):
            return self._taken(samples) if self._takes_collections else self._other()
        _refuse_other(samples)
        if len(samples) == 0:
            raise IndexError("there are no samples to make a batch of: give at least one")
        try:
            return self.plan(samples)
        except Exception as error:
            raise_with_path(error, self.path)
            raise

    def plan(self, samples: Sequence[Any]) -> Plan:
        """Plan the batch's value at one place, from the values there in every sample."""
        first = samples[0]
        if (function := _function_for(first)) is not None:
            return self._leaf(samples, function)
        if is_tensor_collection(type(first)):
            return self._collection(samples)
        if isinstance(first, Mapping):
            self._note_class(type(first) is dict)
            keys = list(first)
            columns = ([sample[key] for sample in samples] for key in keys)
            steps = [f"[{key!r}]" for key in keys]
            return Container(partial(like_mapping, first, keys), self._children(steps, columns))
        if isinstance(first, tuple) and hasattr(first, "_fields"):
            self._note_class(_is_generated(type(first)))
            steps = [f".{name}" for name in first._fields]
            children = self._children(steps, iter(zip(*samples, strict=False)))
            return Container(partial(like_named_tuple, first), children)
        if isinstance(first, Sequence):
            if any(len(sample) != len(first) for sample in samples):
                lengths = sorted({len(sample) for sample in samples})
                raise RuntimeError(
                    f"each element in list of batch should be of equal size; found sizes {lengths}"
                )
            self._note_class(type(first) is list or isinstance(first, tuple))
            steps = [f"[{index}]" for index in range(len(first))]
            children = self._children(steps, iter(zip(*samples, strict=True)))
            return Container(partial(like_sequence, first), children)
        raise TypeError(
            f"found {type(first)}; samples must contain tensors, numpy arrays, "
            "numbers, strings, mappings, sequences or TensorDicts, or classes for which "
            "torch.utils.data._utils.collate.default_collate_fn_map has a function"
        )

    def _children(self, steps: list[str], columns: Iterator[Sequence[Any]]) -> list[Plan]:
        if len(self.path) == _MOST_LEVELS:
            raise RecursionError
        children = []
        for step in steps:
            self.path.append(step)
            children.append(self.plan(next(columns)))
            self.path.pop()
        return children

    def _leaf(self, samples: Sequence[Any], function: Any) -> Plan:
        if self._is_altered:
            return PassedThrough(function(samples, collate_fn_map=_torch.default_collate_fn_map))
        if function is _torch.collate_numpy_array_fn and samples[0].dtype.kind in "biufc":
            samples = [torch.as_tensor(sample) for sample in samples]
            function = _torch.collate_tensor_fn
        if function is _torch.collate_tensor_fn and _are_plain(samples):
            if all(sample.dtype is samples[0].dtype for sample in samples):
                return Leaf(samples, self.slots, self.path)
            return Made(torch.stack(tuple(samples), 0), self.slots)
        made = function(samples, collate_fn_map=_torch.default_collate_fn_map)
        is_torchs = _module_of(function) == _torch.__name__
        return Made(made, self.slots) if is_torchs and _is_plain(made) else PassedThrough(made)

    def _note_class(self, runs_no_code: bool) -> None:
        """Note a class, whose code may look at leaves that are not written yet."""
        self.has_met_code |= not runs_no_code

    def _other(self) -> Plan:
        self.has_met_others = True
        return PassedThrough(None)

    def _collection(self, samples: Sequence[Any]) -> Plan:
        if not self._takes_collections:
            return self._other()
        try:
            stacked: Any = torch.stack(tuple(samples), 0)
        except Exception:
            self.path += _where_they_differ(samples)
            raise
        return self._taken(stacked)

    def _taken(self, batch: Any) -> Plan:
        self._note_class(_runs_no_code(batch))
        leaves: dict[int, Made] = {}

        def take(leaf: Any) -> Any:
            if not self._is_altered and _is_plain(leaf):
                leaves[id(leaf)] = Made(leaf, self.slots)
            return leaf

        batch.apply(take)
        return Collection(batch, leaves)


def _runs_no_code(collection: Any) -> bool:
    """Return whether it has no class of a user's: a TensorDict of tensors, values and others."""
    cls = type(collection)
    if not is_tensor_collection(cls):
        return True
    if cls.__module__.partition(".")[0] != "tensordict":
        return False
    if cls.__name__ != "TensorDict":
        return cls.__name__ == "NonTensorData"
    return all(_runs_no_code(each) for each in collection.values())


def _is_generated(cls: type) -> bool:
    """Return whether `collections.namedtuple` or `typing.NamedTuple` has made all of the class."""
    made: Any = cls.__new__
    return cls.__bases__ == (tuple,) and made.__module__ == f"namedtuple_{cls.__name__}"


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
