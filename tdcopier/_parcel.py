"""Parcels: a tree as bytes, with one chunk for its tensors and a pickle of everything else."""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from tdcopier._containers.registry import _is_tensor_collection
from tdcopier._copy import copy_into, start_copy
from tdcopier._into import is_plain_class
from tdcopier._slots import Slots, light_tensor

_PROTOCOL = 5
_TARGET = object()
_TARGET_ID = "target"
_SPARSE = {
    torch.sparse_coo,
    torch.sparse_csr,
    torch.sparse_csc,
    torch.sparse_bsr,
    torch.sparse_bsc,
}
_MEMORY_OF_NODE = {"_consolidated", "_is_memmap", "_is_shared", "_memmap_prefix"}


class Parcel(NamedTuple):
    """A tree that is packed on `body.device`, ready to be sent."""

    moved: Any
    """The tree itself, on that device."""
    body: torch.Tensor
    """(chunk bytes + spec bytes,) uint8: the chunk, then the pickle."""
    chunk_bytes: int
    spec_bytes: int


class _LeafSpec(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Empty if they follow from the shape."""
    requires_grad: bool


def pack(tree: Any, device: torch.device) -> Parcel:
    """Move a tree to the device, and pack it there.

    Raises:
        TypeError: a value cannot be pickled; the message names its path.
        Exception: as `start_copy`.
    """
    moved = start_copy(tree, device).wait()
    pickled = io.BytesIO()
    pickler = _Pickler(pickled, device)
    try:
        pickler.dump(moved)
    except RecursionError:
        raise RecursionError("the tree is nested too deep to be pickled") from None
    except Exception as error:
        path = "data" + "".join(_steps_to_what_fails(moved, device, set()))
        raise TypeError(
            f"{path} cannot be pickled ({type(error).__name__}: {error}): leave it out, or give "
            "its class a __reduce__"
        ) from error
    leaves = [leaf.detach() for leaf in pickler.leaves]
    specs = [_spec_of(leaf) for leaf in pickler.leaves]
    offsets, chunk_bytes = _offsets_of(specs)
    spec = pickle.dumps((specs, pickled.getvalue()), _PROTOCOL)
    body = torch.empty(chunk_bytes + len(spec), dtype=torch.uint8, device=device)
    slots = _tensors_over(body.untyped_storage(), specs, offsets)
    filled = [(leaf, slot) for leaf, slot in zip(leaves, slots, strict=True) if leaf.numel()]
    copy_into([leaf for leaf, _ in filled], [slot for _, slot in filled]).wait()
    body[chunk_bytes:].copy_(torch.frombuffer(bytearray(spec), dtype=torch.uint8))
    return Parcel(moved, body, chunk_bytes, len(spec))


def unpack(body: torch.Tensor, chunk_bytes: int) -> Any:
    """Rebuild a tree from a parcel's body, over the body's memory. The host waits for the spec."""
    spec = body[chunk_bytes:].cpu().numpy().tobytes()
    specs, pickled = pickle.loads(spec)
    offsets, _ = _offsets_of(specs)
    leaves = _tensors_over(body.untyped_storage(), specs, offsets)
    for leaf, leaf_spec in zip(leaves, specs, strict=True):
        leaf.requires_grad_(leaf_spec.requires_grad)
    return _Unpickler(io.BytesIO(pickled), leaves, body.device).load()


class _Pickler(pickle.Pickler):
    """Replaces plain tensors on the device by indices, and that device by a placeholder."""

    def __init__(self, file: Any, device: torch.device) -> None:
        super().__init__(file, _PROTOCOL)
        self.leaves: list[torch.Tensor] = []  # also keeps the leaves alive, so ids stay unique
        self._device = device
        self._indices: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | str | None:
        if value is _TARGET:
            return _TARGET_ID
        if not _is_plain(value) or value.device != self._device:
            return None
        index = self._indices.setdefault(id(value), len(self.leaves))
        if index == len(self.leaves):
            self.leaves.append(value)
        return index

    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.storage.TypedStorage:
            memory = value._untyped_storage
            if memory.device == self._device:
                # Storage of a tensor that is not plain; its own pickle names this rank's device.
                as_bytes = torch.empty(0, dtype=torch.uint8, device=self._device).set_(memory)
                return _typed_storage, (as_bytes, value.dtype)
        if isinstance(value, torch.Tensor) and value.layout in _SPARSE:
            where = _TARGET if value.device == self._device else value.device
            detached: Any = value.detach()
            function, arguments = detached.__reduce_ex__(_PROTOCOL)
            return _sparse_tensor, (function, arguments, where, value.requires_grad)
        if not _is_tensor_collection(type(value)):
            return NotImplemented
        function, arguments, state, *rest = (*value.__reduce_ex__(_PROTOCOL), None)[:6]
        if isinstance(state, dict) and state.get("_device") == self._device:
            # The leaves arrive in a chunk: no longer memory-mapped, shared or consolidated.
            kept = {name: each for name, each in state.items() if name not in _MEMORY_OF_NODE}
            state = {**kept, "_device": _TARGET}
        return function, arguments, state, *rest


class _Unpickler(pickle.Unpickler):
    """Replaces the indices and placeholders of `_Pickler` by tensors and the device."""

    def __init__(self, file: Any, leaves: list[torch.Tensor], device: torch.device) -> None:
        super().__init__(file)
        self._leaves = leaves
        self._device = device

    def persistent_load(self, pid: Any) -> Any:
        return self._device if pid == _TARGET_ID else self._leaves[pid]


def _typed_storage(memory: torch.Tensor, dtype: torch.dtype) -> Any:
    """Make a storage with a copy of these bytes only."""
    storage: Any = torch.storage.TypedStorage
    return storage(wrap_storage=memory.clone().untyped_storage(), dtype=dtype, _internal=True)


def _sparse_tensor(
    function: Callable[..., torch.Tensor], arguments: Any, device: torch.device, needs_grad: bool
) -> torch.Tensor:
    """Rebuild a sparse tensor as torch's pickle does, on `device` and with its `requires_grad`."""
    with warnings.catch_warnings(), device:
        # Some versions of torch warn where they rebuild a sparse tensor that was pickled.
        warnings.filterwarnings("ignore", "Sparse invariant checks", UserWarning)
        return function(*arguments).requires_grad_(needs_grad)


def _is_plain(value: Any) -> bool:
    cls = type(value)
    if cls is not torch.Tensor and (cls is torch.nn.Parameter or not is_plain_class(cls)):
        return False  # a parameter's own pickle contains a plain tensor
    return (
        value.layout is torch.strided
        and not value.is_conj()
        and not value.is_neg()
        and not value.is_quantized
        and not value.is_nested
        and not getattr(value, "has_names", bool)()  # removed in torch 2.13
    )


def _spec_of(leaf: torch.Tensor) -> _LeafSpec:
    # Dimensions of size 0 and 1 count as contiguous with any stride, so their strides are kept.
    follow = leaf.is_contiguous() and min(leaf.shape, default=2) > 1
    strides = () if follow else torch.empty_like(leaf, device="meta").stride()
    return _LeafSpec(leaf.dtype, tuple(leaf.shape), tuple(strides), leaf.requires_grad)


def _offsets_of(specs: list[_LeafSpec]) -> tuple[list[int], int]:
    slots = Slots()
    return [slots.place(spec.dtype, spec.shape) for spec in specs], slots.chunk_bytes


def _tensors_over(
    chunk: torch.UntypedStorage, specs: list[_LeafSpec], offsets: list[int]
) -> list[torch.Tensor]:
    return [
        light_tensor(chunk, offset, spec.dtype, spec.shape, spec.strides)
        for spec, offset in zip(specs, offsets, strict=True)
    ]


def _steps_to_what_fails(value: Any, device: torch.device, above: set[int]) -> list[str]:
    """Return the path to the first value that cannot be pickled. Skips reference cycles."""
    above.add(id(value))
    for step, child in _children_of(value):
        if id(child) in above:
            continue
        try:
            _Pickler(io.BytesIO(), device).dump(child)
        except Exception:  # any error means that it cannot be pickled
            return [step, *_steps_to_what_fails(child, device, above)]
    return []


def _children_of(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) or _is_tensor_collection(type(value)):
        yield from ((f"[{key!r}]", child) for key, child in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{index}]", child) for index, child in enumerate(value))
    elif hasattr(value, "__dict__"):
        yield from ((f".{name}", child) for name, child in vars(value).items())
