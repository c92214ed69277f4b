"""Values that are no plain leaves, as a pickle, with the memory of the tensors in them beside it.

A pickle of torch's contains the whole storage of each tensor. Here it has placeholders for the
storage, the offset and the strides instead. The table that resolves them stands before the pickle,
since it is made when all views of a memory are known.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._tensor import _rebuild_from_type_v2

from tdcopier import _C
from tdcopier._containers.delegated_parts import is_tensor_collection
from tdcopier._into import is_mapped_class
from tdcopier._pickled_memory import Array, Memory, Place, Places, Views

__all__ = ["dump", "load"]

_PROTOCOL = 5
_REBUILD_TENSOR = {
    torch._utils._rebuild_tensor,
    torch._utils._rebuild_tensor_v2,
    torch._utils._rebuild_tensor_v3,
    torch._utils._rebuild_qtensor,
}
"""Functions whose first arguments are a storage, and a tensor's offset, shape and strides in it."""
_SPARSE = {
    torch.sparse_coo,
    torch.sparse_csr,
    torch.sparse_csc,
    torch.sparse_bsr,
    torch.sparse_bsc,
}
_PARTS_OF_BYTES = {torch.quint4x2, torch.quint2x4}
_PLAIN_KINDS = "?biufcmMSUV"
"""Kinds of dtypes whose arrays are bytes. Text of any length is not."""
_SEND_DESCRIPTORS = ("multiprocessing.", "torch.multiprocessing.", "tdcopier._pack")
"""The modules whose reducers share memory, files and sockets by descriptors, for one receiver."""
_FLAGS_OF_NODE = {"_is_memmap", "_is_shared"}
"""Some versions of tensordict ask for them in classes of their own."""
_MEMORY_OF_NODE = {"_consolidated", "_is_memmap", "_is_shared", "_memmap_prefix"}


class _Placeholder(NamedTuple):
    """Stands in a pickle for something that is known only where the memory is."""

    what: int
    number: int = 0
    """Of the view."""


_TARGET, _STORAGE, _OFFSET, _STRIDES, _MEMORY = range(5)


def dump(
    values: list[Any], path_of: Callable[[int], str], device: torch.device
) -> tuple[bytes, list[torch.Tensor]]:
    """Pickle values, without the memory of the tensors, storages and arrays in them.

    Tensors on other devices are pickled as torch does, with their memory.

    Args:
        values: one pickle contains them all, so objects that are met twice stay one object.
        path_of: returns the path of a value, for error messages.
        device: the device of the memory.

    Returns:
        The pickle, and the memory as 1-d uint8 tensors on the device: the bytes that views show,
        once for those that overlap. They are views of the values' own memory where possible.

    Raises:
        TypeError: a value cannot be pickled; the message has its path.
        RecursionError: a value is nested too deep.
    """
    device = torch.empty(0, device=device).device  # with its index
    file = io.BytesIO()
    pickler = _Pickler(file, device)
    try:
        pickler.dump(values)
    except RecursionError:
        raise RecursionError("the tree is nested too deep to be pickled") from None
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        path = _path_to_what_fails(values, path_of, device)
        raise TypeError(
            f"{path} cannot be pickled ({type(error).__name__}: {error}): leave it out, or give "
            "its class a __reduce__"
        ) from error
    places, memory = pickler.views.placed()
    if not memory and (pickler.names_target or places.places):
        memory = [torch.empty(0, dtype=torch.uint8, device=device)]  # says which device it is
        places = places._replace(run_bytes=[0])
    table = ([tuple(place) for place in places.places], *places[1:])
    return pickle.dumps(table, _PROTOCOL) + file.getvalue(), memory


def load(pickled: bytes, memory: list[torch.Tensor]) -> list[Any]:
    """Return the values of `dump` again, over this memory.

    Tensors are views of it; so are arrays if it is on the host. TensorDicts and sparse tensors get
    its device.

    Args:
        pickled: the pickle of `dump`.
        memory: as `dump` returned it, or tensors with the same bytes on any one device.

    Raises:
        ValueError: these are not as many tensors and bytes as `dump` returned.
    """
    file = io.BytesIO(pickled)
    table, run_bytes, whole = pickle.Unpickler(file).load()
    places = Places([Place(*row) for row in table], run_bytes, whole)
    values: list[Any] = _Unpickler(file, Memory(places, memory)).load()
    return values


class _Pickler(pickle.Pickler):
    """Puts placeholders for the memory of the values, and for its device."""

    def __init__(self, file: io.BytesIO, device: torch.device) -> None:
        super().__init__(file, _PROTOCOL)
        self.dispatch_table = _reducers()
        self.views = Views(device)
        self.names_target = False
        self._device = device
        self._keep_strides: dict[int, torch.Tensor] = {}

    def persistent_id(self, value: Any) -> tuple[int, int] | None:
        if value is _C.PACKING_DEVICE:
            value = self._target_for(self._device)
        return (value.what, value.number) if type(value) is _Placeholder else None

    def reducer_override(self, value: Any) -> Any:
        cls = type(value)
        if issubclass(cls, torch.Tensor):
            return self._reduced_tensor(value, cls)
        if issubclass(cls, np.ndarray):
            return self._reduced_array(value, cls)
        if cls in (torch.UntypedStorage, torch.storage.TypedStorage):
            return self._reduced_storage(value)
        if is_tensor_collection(cls):
            return self._reduced_collection(value, cls)
        return NotImplemented

    def _reduced_tensor(self, value: Any, cls: type) -> Any:
        if is_mapped_class(cls):
            with torch._C.DisableTorchFunctionSubclass():  # it arrives in memory, not in a file
                value = value.as_subclass(torch.Tensor)
        elif cls in self.dispatch_table:
            return self._with_placeholders(self.dispatch_table[cls](value))
        if value.layout in _SPARSE:
            where = self._target_for(value.device)
            detached = value.detach() if value.requires_grad else value
            function, arguments = detached.__reduce_ex__(_PROTOCOL)
            return _sparse_tensor, (function, arguments, where, value.requires_grad)
        keeps_strides = id(value) in self._keep_strides
        return self._with_placeholders(value.__reduce_ex__(_PROTOCOL), keeps_strides)

    def _with_placeholders(self, reduced: Any, keeps_strides: bool = False) -> Any:
        """Return how to rebuild a tensor, with placeholders instead of memory on the device."""
        if not isinstance(reduced, tuple):
            return reduced
        function, arguments, *rest = reduced
        if function is _rebuild_from_type_v2:
            inner, cls, inner_arguments, state = arguments
            if inner is torch._utils._rebuild_wrapper_subclass:
                # Its own strides, in the pickle, are about the tensors that it wraps.
                parts = state if isinstance(state, tuple) else (state,)
                self._keep_strides |= {
                    id(each): each
                    for part in parts
                    if isinstance(part, dict)
                    for each in part.values()
                    if isinstance(each, torch.Tensor)
                }
            inner, inner_arguments = self._with_placeholders(
                (inner, inner_arguments), keeps_strides
            )
            arguments = inner, cls, inner_arguments, state
        elif function is torch._utils._rebuild_wrapper_subclass:
            arguments = tuple(
                self._target_for(each) if isinstance(each, torch.device) else each
                for each in arguments
            )
        elif function in _REBUILD_TENSOR:
            arguments = self._tensor_arguments(function, arguments, keeps_strides)
            if function is torch._utils._rebuild_qtensor:
                function = _quantized_tensor
        return function, arguments, *rest

    def _tensor_arguments(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], keeps_strides: bool
    ) -> tuple[Any, ...]:
        storage, offset, shape, strides, *others = arguments
        is_typed = type(storage) is torch.storage.TypedStorage
        dtype = storage.dtype if is_typed else others[2]
        memory = storage._untyped_storage if is_typed else storage
        if memory.device != self._device or dtype in _PARTS_OF_BYTES:
            return arguments
        number = self.views.add_tensor(
            memory, dtype, offset, shape, strides, keeps_strides=keeps_strides
        )
        return (
            _Placeholder(_STORAGE, number), _Placeholder(_OFFSET, number), shape,
            _Placeholder(_STRIDES, number), *others,
        )  # fmt: skip

    def _reduced_array(self, value: Array, cls: type[Array]) -> Any:
        is_numpys = all(
            getattr(cls, name) is getattr(np.ndarray, name)
            for name in ("__reduce__", "__reduce_ex__", "__setstate__")
        )
        if (
            self._device.type != "cpu"
            or not is_numpys
            or cls in self.dispatch_table
            or value.dtype.kind not in _PLAIN_KINDS
            or value.dtype.hasobject
            or value.nbytes == 0
        ):
            return NotImplemented
        number = self.views.add_array(value)
        # As numpy's own pickle, which copies arrays with gaps into memory that may be written.
        is_writeable = value.flags.writeable or not value.flags.forc
        memory = _Placeholder(_MEMORY)
        return Memory.array, (memory, number, cls, value.dtype, value.shape, is_writeable)

    def _reduced_storage(self, value: Any) -> Any:
        is_typed = type(value) is torch.storage.TypedStorage
        memory = value._untyped_storage if is_typed else value
        if memory.device != self._device:
            return NotImplemented
        number = self.views.add_storage(memory, value.dtype if is_typed else torch.uint8)
        return _storage, (_Placeholder(_STORAGE, number), is_typed)

    def _reduced_collection(self, value: Any, cls: type) -> Any:
        reducer = self.dispatch_table.get(cls)
        if reducer is not None and not _module_of(reducer).startswith("tensordict."):
            return NotImplemented  # a user's own
        function, arguments, state, *rest = (*value.__reduce_ex__(_PROTOCOL), None)[:6]
        if isinstance(state, dict) and state.get("_device") in (None, self._device):
            # The leaves arrive in other memory: not memory-mapped, shared or consolidated.
            was = state
            state = {name: each for name, each in was.items() if name not in _MEMORY_OF_NODE}
            state |= dict.fromkeys(_FLAGS_OF_NODE & was.keys(), False)
            if state.get("_device") is not None:
                state["_device"] = self._target_for(self._device)
        return function, arguments, state, *rest

    def _target_for(self, device: torch.device) -> Any:
        if device != self._device:
            return device
        self.names_target = True
        return _Placeholder(_TARGET)


class _Unpickler(pickle.Unpickler):
    """Replaces the placeholders of `_Pickler`."""

    def __init__(self, file: io.BytesIO, memory: Memory) -> None:
        super().__init__(file)
        self._memory = memory

    def persistent_load(self, pid: tuple[int, int]) -> Any:
        what, number = pid
        if what == _STORAGE:
            return self._memory.storage(number)
        if what == _OFFSET:
            return self._memory.offset(number)
        if what == _STRIDES:
            return self._memory.strides(number)
        return self._memory.device if what == _TARGET else self._memory


def _reducers() -> dict[type, Callable[[Any], Any]]:
    """Return the reducers that users have registered, without those that send descriptors.

    Without these, a tensor is pickled with its values. A handle would be pickled as a mere number,
    which means another file, or none, in another process.
    """
    registry: Any = ForkingPickler
    own = {}
    for cls, reducer in registry._extra_reducers.copy().items():
        if cls is torch.cuda.Event or _module_of(reducer) == "multiprocessing.connection":
            own[cls] = _refuse_handle
        elif not _module_of(reducer).startswith(_SEND_DESCRIPTORS):
            own[cls] = reducer
    return {**copyreg.dispatch_table, **own}


def _refuse_handle(value: Any) -> Any:
    raise TypeError(f"a {type(value).__qualname__} is a handle of this process")


def _module_of(function: Any) -> str:
    return getattr(function, "__module__", None) or ""


def _storage(storage: Any, is_typed: bool) -> Any:
    return storage if is_typed else storage._untyped_storage


def _quantized_tensor(*arguments: Any) -> Any:
    """Rebuild a quantized tensor as torch's pickle does."""
    with warnings.catch_warnings():  # some versions of torch warn of what they do here themselves
        warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)
        rebuild: Any = torch._utils._rebuild_qtensor
        return rebuild(*arguments)


def _sparse_tensor(
    function: Callable[..., torch.Tensor], arguments: Any, device: torch.device, needs_grad: bool
) -> torch.Tensor:
    """Rebuild a sparse tensor as torch's pickle does, on `device` and with its `requires_grad`."""
    with warnings.catch_warnings(), device:
        # Some versions of torch warn where they rebuild a sparse tensor that was pickled.
        warnings.filterwarnings("ignore", "Sparse invariant checks", UserWarning)
        return function(*arguments).requires_grad_(needs_grad)


def _path_to_what_fails(
    values: list[Any], path_of: Callable[[int], str], device: torch.device
) -> str:
    for index, value in enumerate(values):
        if not _can_be_pickled(value, device):
            return path_of(index) + "".join(_steps_to_what_fails(value, device, set()))
    return path_of(0)  # it fails only sometimes


def _steps_to_what_fails(value: Any, device: torch.device, above: set[int]) -> list[str]:
    """Return the path to the first value that cannot be pickled. Skips reference cycles."""
    above.add(id(value))
    for step, child in _children_of(value):
        if id(child) not in above and not _can_be_pickled(child, device):
            return [step, *_steps_to_what_fails(child, device, above)]
    return []


def _can_be_pickled(value: Any, device: torch.device) -> bool:
    try:
        _Pickler(io.BytesIO(), device).dump(value)
    except Exception:  # any error means that it cannot be pickled
        return False
    return True


def _children_of(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) or is_tensor_collection(type(value)):
        yield from ((f"[{key!r}]", child) for key, child in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{index}]", child) for index, child in enumerate(value))
    elif hasattr(value, "__dict__"):
        yield from ((f".{name}", child) for name, child in vars(value).items())
