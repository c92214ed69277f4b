"""Copies a state to pinned host memory beside training, for checkpoints."""

from __future__ import annotations

import copy
import threading
import weakref
from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tdcopier._compile import keep_out_of_graphs
from tdcopier._containers.delegated_parts import _is_tensor_collection
from tdcopier._park.park import storages_of
from tdcopier._park.tensors import FoundTensor, refuse_modes, tensors_in
from tdcopier._park.transfers import PACKED_BYTES, HostCopy

__all__ = ["Snapshot", "snapshot"]

_CPU = torch.device("cpu")


class Snapshot:
    """The handle of a snapshot, as `snapshot` returns it.

    You may drop it at any time. Any thread may use it.
    """

    def __init__(self, tree: Any, copy: HostCopy) -> None:
        """Take over the tree, whose bytes may still be on their way."""
        self._tree = tree
        self._copy = copy
        self._lock = threading.Lock()

    def ready(self) -> bool:
        """Return whether all bytes have arrived, or the device failed. Never blocks."""
        return self._copy.ready()

    @keep_out_of_graphs("get()")
    def get(self) -> Any:
        """Block until all bytes have arrived, and return the tree, the same object at each call.

        Raises:
            Exception: the error of a device that failed during the copy; every time.
        """
        with self._lock:
            self._copy.wait()
        return self._tree

    @keep_out_of_graphs("before_update()", "nothing of a snapshot")
    def before_update(self) -> None:
        """Make the current streams wait until the device has read what the snapshot copies.

        Call it before you enqueue work that overwrites tensors of the state, as late as possible:
        work that is enqueued before runs beside the copies. Optimizers that the snapshot knows do
        it in `step`. The host does not wait.
        """
        self._copy.before_overwriting()


@keep_out_of_graphs("snapshot()")
def snapshot(state: Any, *, optimizer: Optimizer | None = None) -> Snapshot:
    """Start to copy a state to pinned host memory, beside training, and return a handle.

    The copy has the values of all work that is on the current streams at the call. Later work runs
    beside it, except what would overwrite bytes that have not been read yet: the next `step` of
    each optimizer in the state waits for that, on the device, by itself. For example::

        taken = tdcopier.snapshot({"model": model, "optimizer": optimizer})
        train_one_step(model, optimizer)
        torch.save(taken.get(), "checkpoint.pt")

    **The result** has CPU tensors in pinned memory at the places of tensors. A module, an optimizer
    and any other object with `state_dict` is replaced by its state dict. All other values are
    copied too (by `copy.deepcopy`), so later changes do not reach the snapshot. Tensors that share
    a storage share one in the result, which is copied as a whole. The tensors have no gradients and
    the class `torch.Tensor`; DTensors and other wrappers keep their class.

    **What may be overwritten.** Parameters and optimizer states only after `before_update`, which
    the `step` of known optimizers calls. Small storages, of up to 256 KiB, and the buffers of
    modules at any time: the current streams wait until the device has put them aside (large
    buffers are cloned on the device, which takes memory). Tensors on the host at any time.

    Args:
        state: modules, optimizers, state dicts, TensorDicts, tensors, in any nesting of containers.
        optimizer: an optimizer that updates tensors of the state without being in it.

    Returns:
        The handle.

    Raises:
        TypeError, ValueError, RuntimeError: as `park`. Also a ValueError for quantized tensors.
        Exception: an error of `state_dict()` or `copy.deepcopy`, or from the copies.
    """
    refuse_modes("snapshot()")
    data = _Data()
    tree = data.of(state)
    found = tensors_in(tree, gradients=False)
    _refuse_quantized(found)
    on_device = [
        FoundTensor(path, data.stable(tensor))
        for path, tensor in found
        if tensor.device.type != "cpu"
    ]
    memory = storages_of(on_device)
    copied = HostCopy(memory.tensors(), small_first=True)
    numbers = iter(memory.numbers)
    replaced: dict[int, Any] = {}
    for (_, tensor), stable in zip(
        [each for each in found if each.tensor.device.type != "cpu"], on_device, strict=True
    ):
        number = next(numbers)
        part = copied.parts[number] if number >= 0 else None
        replaced[id(tensor)] = _on_host(stable.tensor, part)
    taken = Snapshot(_Copier(replaced).copy(tree), copied)
    for each in {id(o): o for o in [*data.optimizers, optimizer] if o is not None}.values():
        _wait_in_step(each, taken)
    return taken


class _Data:
    """Replaces modules, optimizers and the like in a state by their state dicts."""

    def __init__(self) -> None:
        self.optimizers: list[Optimizer] = []
        self._buffers: set[int] = set()
        self._clones: dict[int, torch.UntypedStorage] = {}

    def of(self, value: Any) -> Any:
        cls: Any = type(value)
        if cls in (dict, OrderedDict):
            return cls((key, self.of(child)) for key, child in value.items())
        if cls in (list, tuple):
            return cls(self.of(child) for child in value)
        if isinstance(value, nn.Module):
            self._buffers |= {_storage_id(each) for each in value.buffers()}
        elif isinstance(value, Optimizer):
            self.optimizers.append(value)
        elif isinstance(value, torch.Tensor) or _is_tensor_collection(cls):
            return value
        return value.state_dict() if callable(getattr(value, "state_dict", None)) else value

    def stable(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, or one over a clone of a large buffer: a forward may change it."""
        number = _storage_id(tensor)
        storage = tensor.untyped_storage()
        if number not in self._buffers or storage.nbytes() <= PACKED_BYTES:
            return tensor
        if number not in self._clones:
            self._clones[number] = storage.clone()  # type: ignore[no-untyped-call]
        return _over(self._clones[number], 0, tensor)


def _storage_id(tensor: torch.Tensor) -> int:
    if not torch._C._has_storage(tensor):
        return 0
    return int(tensor.untyped_storage()._cdata)


def _refuse_quantized(found: list[FoundTensor]) -> None:
    for path, tensor in found:
        if tensor.is_quantized:
            raise ValueError(
                f"{path} is quantized, and its scales are not in its memory: give int_repr()"
            )


def _on_host(tensor: torch.Tensor, part: torch.Tensor | None) -> torch.Tensor:
    """Return a CPU tensor like this one over the bytes of its storage."""
    if part is None:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=_CPU)
    return _over(part.untyped_storage(), part.storage_offset() // tensor.dtype.itemsize, tensor)


def _over(storage: torch.UntypedStorage, skipped: int, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor like this one over another storage, `skipped` elements further on."""
    made = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    made.set_(storage, skipped + tensor.storage_offset(), tensor.size(), tensor.stride())
    if tensor.is_conj():
        made = made.conj()
    return torch._neg_view(made) if tensor.is_neg() else made


class _Copier:
    """Copies a tree with other tensors in it, by `copy.deepcopy`."""

    def __init__(self, replaced: dict[int, Any]) -> None:
        self._memo: dict[int, Any] = replaced
        self._kept: list[Any] = []

    def copy(self, tree: Any) -> Any:
        self._prepare(tree)
        return copy.deepcopy(tree, self._memo)

    def _prepare(self, value: Any) -> None:
        """Note copies of values that `copy.deepcopy` would not copy as needed."""
        cls = type(value)
        if isinstance(value, torch.Tensor):
            if id(value) not in self._memo:
                self._memo[id(value)] = self._tensor(value)
        elif cls in (dict, OrderedDict, defaultdict):
            for child in value.values():
                self._prepare(child)
        elif cls in (list, tuple):
            for child in value:
                self._prepare(child)
        elif _is_tensor_collection(cls):
            self._memo[id(value)] = value.apply(self._tensor, device=_CPU)

    def _tensor(self, tensor: torch.Tensor) -> Any:
        """Return the copy of a tensor that is on the host, or a wrapper of others."""
        known = self._memo.get(id(tensor))
        if known is not None:
            return known
        self._kept.append(tensor)  # its id stays its own
        if hasattr(tensor, "__tensor_flatten__"):
            names, context = tensor.__tensor_flatten__()
            inner = {name: self._tensor(getattr(tensor, name)) for name in names}
            return type(tensor).__tensor_unflatten__(  # type: ignore[attr-defined]
                inner, context, tensor.size(), tensor.stride()
            )
        if tensor.device.type == "meta":
            return tensor.detach()
        plain = tensor.detach()
        if type(plain) is not torch.Tensor:
            plain = plain.as_subclass(torch.Tensor)
        return copy.deepcopy(plain, self._memo)  # which keeps shared storages shared


# ---- optimizers ----------------------------------------------------------------------------------

_waiting: weakref.WeakKeyDictionary[Optimizer, list[weakref.ref[Snapshot]]] = (
    weakref.WeakKeyDictionary()
)
"""Snapshots that the next `step` of an optimizer waits for. One hook per optimizer looks there: a
hook cannot remove itself while torch calls it."""


def _wait_in_step(optimizer: Optimizer, taken: Snapshot) -> None:
    if optimizer not in _waiting:
        optimizer.register_step_pre_hook(_before_step)
        _waiting[optimizer] = []
    _waiting[optimizer].append(weakref.ref(taken))


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    waiting = _waiting.get(optimizer, [])
    while waiting:
        taken = waiting[-1]()
        if taken is not None:
            taken.before_update()
        waiting.pop()
