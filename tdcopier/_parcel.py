"""Parcels: a tree as bytes, with chunks for its tensors and a pickle of everything else."""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from tdcopier._containers.delegated_parts import is_tensor_collection
from tdcopier._copy import start_copy
from tdcopier._into import is_mapped_class, start_copy_into
from tdcopier._slots import ALIGNMENT_BYTES, Slots, light_tensor, new_tensor

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
    """(chunk bytes + spec bytes,) uint8: a chunk for each dtype, then the pickle. Its length is a
    multiple of 16 bytes, so that torch can save its storage as elements of any dtype."""
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
    layout = _Layout(specs)
    chunk_bytes = layout.total_bytes
    spec = pickle.dumps((specs, pickled.getvalue()), _PROTOCOL)
    spec += bytes(-len(spec) % ALIGNMENT_BYTES)  # what follows a pickle is not read
    body = torch.empty(chunk_bytes + len(spec), dtype=torch.uint8, device=device)
    slots = layout.tensors(body, take_apart=False)
    filled = [(leaf, slot) for leaf, slot in zip(leaves, slots, strict=True) if leaf.numel()]
    start_copy_into([leaf for leaf, _ in filled], [slot for _, slot in filled]).wait()
    body[chunk_bytes:].copy_(torch.frombuffer(bytearray(spec), dtype=torch.uint8))
    return Parcel(moved, body, chunk_bytes, len(spec))


def unpack(body: torch.Tensor, chunk_bytes: int) -> Any:
    """Rebuild a tree from a parcel's body. The host waits for the spec.

    Leaves of one dtype stay in the body's memory. On a device, leaves of other dtypes move to a
    chunk for each dtype, because torch does not save a storage that has several.
    """
    spec = body[chunk_bytes:].cpu().numpy().tobytes()
    specs, pickled = pickle.loads(spec)
    leaves = _Layout(specs).tensors(body, take_apart=body.device.type != "cpu")
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
        if not is_tensor_collection(type(value)):
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
    if cls is not torch.Tensor and not is_mapped_class(cls):
        return False  # the own pickle of a parameter or another subclass contains a plain tensor
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


class _Layout:
    """Where the leaves of a parcel are: one chunk after the other, and slots in each."""

    def __init__(self, specs: list[_LeafSpec]) -> None:
        slots = Slots()
        self._specs = specs
        self._offsets = [slots.place(spec.dtype, spec.shape) for spec in specs]  # in their chunks
        self._chunk_bytes = slots.chunk_bytes
        self.total_bytes = sum(self._chunk_bytes.values())

    def tensors(self, body: torch.Tensor, *, take_apart: bool) -> list[torch.Tensor]:
        """Make a tensor for each leaf, over the body's memory.

        With `take_apart`, all dtypes but the one with the most bytes get memory of their own.
        """
        largest = max(self._chunk_bytes, key=lambda dtype: self._chunk_bytes[dtype], default=None)
        chunks: dict[torch.dtype, tuple[torch.UntypedStorage, int]] = {}
        begin = 0
        for dtype, size in self._chunk_bytes.items():
            if take_apart and dtype is not largest:
                chunks[dtype] = (body[begin : begin + size].clone().untyped_storage(), 0)
            else:
                chunks[dtype] = (body.untyped_storage(), begin)
            begin += size
        made = []
        for spec, offset in zip(self._specs, self._offsets, strict=True):
            if 0 in spec.shape:
                made.append(new_tensor(body.device, spec.dtype, spec.shape, spec.strides))
                continue
            chunk, first = chunks[spec.dtype]
            made.append(light_tensor(chunk, first + offset, spec.dtype, spec.shape, spec.strides))
        return made


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
    if isinstance(value, Mapping) or is_tensor_collection(type(value)):
        yield from ((f"[{key!r}]", child) for key, child in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{index}]", child) for index, child in enumerate(value))
    elif hasattr(value, "__dict__"):
        yield from ((f".{name}", child) for name, child in vars(value).items())
