"""Copies a state to pinned host memory beside training, for checkpoints."""

from __future__ import annotations

import copy
import operator
import threading
from collections import OrderedDict
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from tdcopier import _C
from tdcopier._compile import keep_out_of_graphs
from tdcopier._containers.delegated_parts import is_tensor_collection
from tdcopier._containers.rule import Refused
from tdcopier._containers.visit import ITEM, level_of
from tdcopier._options import OnUnknown, bool_option, check_on_unknown
from tdcopier._park.gathered import DeviceCopy, ScratchCopy
from tdcopier._park.optimizer_steps import wait_in_step
from tdcopier._park.park import storages_of
from tdcopier._park.tensors import (
    FoundTensors,
    plain_parts,
    refuse_modes,
    tensors_in,
)
from tdcopier._park.transfers import PACKED_BYTES
from tdcopier._park.value_paths import Depth, Place, named, text_of
from tdcopier._progress import Progress

__all__ = ["Snapshot", "snapshot"]

_CPU = torch.device("cpu")
_USE_GET = "use what its get() returns"


class Snapshot:
    """The handle of a snapshot, as `snapshot` returns it.

    For example::

        taken = tdcopier.snapshot(averaged)
        taken.before_update()
        averaged.update_parameters(model)  # overwrites tensors without an optimizer
        torch.save(taken.get(), "averaged.pt")

    You may drop it at any time. Any thread may use it.
    """

    _instead_in_a_tree = "give what its get() returns"

    def __init__(self, tree: Any, copy: ScratchCopy | DeviceCopy, n_bytes: int) -> None:
        """Take over the tree, whose bytes may still be on their way."""
        if not isinstance(copy, (ScratchCopy, DeviceCopy)):
            raise TypeError(f"snapshot() makes handles; got {named(copy)}")
        self._tree = tree
        self._copy = copy
        self.nbytes = n_bytes
        """Bytes of the storages in the result."""
        self._lock = threading.RLock()  # a signal handler may call get(), too

    def ready(self) -> bool:
        """Return whether all bytes have arrived, or the device failed. Never blocks."""
        return self._copy.ready()

    def __repr__(self) -> str:
        """Return the number of bytes, and whether they have arrived."""
        state = "arrived" if self.ready() else "on its way"
        return f"<tdcopier.Snapshot: {self.nbytes} bytes, {state}>"

    def __getattr__(self, name: str) -> Any:
        """Say what to call: the caller takes the handle for the result."""
        raise AttributeError(f"a handle of snapshot() has no attribute {name!r}: {_USE_GET}")

    def __getitem__(self, key: object) -> Any:
        """Say what to call, also to a loop."""
        raise TypeError(f"a handle of snapshot() has no items: {_USE_GET}")

    def __reduce_ex__(self, protocol: object) -> Any:
        """Refuse to be copied or pickled."""
        raise TypeError("a handle of snapshot() cannot be copied or pickled: take its get()")

    @keep_out_of_graphs("get()")
    def get(self) -> Any:
        """Block until all bytes have arrived, and return the tree, the same object at each call.

        Raises:
            Exception: the error of a device that failed during the copy; every time.
        """
        with self._lock, Progress("waiting for a snapshot", self.nbytes) as progress:
            self._copy.wait(progress)
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
def snapshot(
    state: Any,
    *,
    optimizer: Optimizer | None = None,
    device_copy: bool = False,
    defer_wait: bool | None = None,
    on_unknown: OnUnknown = None,
) -> Snapshot:
    """Start to copy a state to pinned host memory, beside training, and return a handle.

    The copy has the values of all work that is on the current streams at the call. Later work runs
    beside it, except what would overwrite bytes that have not been read yet: the next `step` of
    each optimizer in the state waits for that, on the device, by itself. For example::

        taken = tdcopier.snapshot({"model": model, "optimizer": optimizer})
        train_one_step(model, optimizer)
        torch.save(taken.get(), "checkpoint.pt")

    **The result** has CPU tensors in pinned memory at the places of tensors. A module, an optimizer
    and any other object with `state_dict` is replaced by its state dict. All other values are
    copied too (by `copy.deepcopy`), so later changes do not reach the snapshot; only the non-tensor
    data of TensorDicts is the same. Tensors inside objects that tdcopier does not know are copied
    where they are: give such an object's state dict. Tensors that share a storage share one in the
    result, which is copied as a whole. The tensors have no gradients and the class `torch.Tensor`;
    DTensors and other wrappers keep their class. Their memory is leased from the pool of pinned
    memory, except for small ones: keep one that a kernel of yours reads on another stream than the
    current one until that has run.

    **What may be overwritten.** By later work on the current streams, everything: if no optimizer
    is known, all that work waits until the state has been read. With an optimizer, or with
    `defer_wait=True`, parameters and optimizer states only after `before_update`, which the `step`
    of known optimizers calls. Small storages, of up to 256 KiB, and the buffers of
    modules at any time: the current streams wait until the device has put them aside (large
    buffers are cloned on the device, which takes memory). Tensors on the host at any time.

    **Parking.** `park` takes the memory of tensors that a snapshot still reads, and need not wait
    for it if its current streams are those of this call. On others call `before_update` first: else
    the memory is used again while the device reads it, and the snapshot has other values.

    Args:
        state: modules, optimizers, state dicts, TensorDicts, tensors, in any nesting of containers.
        optimizer: an optimizer that updates tensors of the state without being in it.
        device_copy: copy the state on its devices first. That takes as much device memory as the
            state until the bytes have arrived on the host, and then no later work of the current
            streams waits, whatever it overwrites; that of other streams waits for the copies on the
            devices only. Without it, scratch chunks on a device take up to 64 MiB, and what
            storages of up to 256 KiB take together, until the bytes have arrived.
        defer_wait: let later work run beside the copies until `before_update`. By default, if
            there are optimizers, in the state or given, and torch calls hooks before anything in
            `step` of each: optimizers of torch and those derived from them, also in the wrappers of
            Lightning, Fabric and Accelerate, and with a scheduler. State dicts are no optimizers.
            With True and no such optimizer (another wrapper, a `step` that was replaced or
            compiled), call `before_update` yourself.
        on_unknown: what to do with values in which tensors may be that are not found, as for
            `park`. They are copied by `copy.deepcopy`, with the tensors in them where these are.

    Returns:
        The handle.

    Raises:
        TypeError, ValueError, RuntimeError: as `park`. Also a ValueError for quantized tensors on a
            device, and a TypeError for an `optimizer` that is none.
        torch.OutOfMemoryError: a device has too little memory for the copy or the scratch chunks.
        Exception: an error of `state_dict()` or `copy.deepcopy`, or from the copies.
    """
    refuse_modes("snapshot()")
    check_optimizer(optimizer)
    bool_option("device_copy", device_copy)
    if defer_wait is not None:
        bool_option("defer_wait", defer_wait)
    check_on_unknown(on_unknown)
    data = _Data()
    tree = data.of(state, "state")
    found = tensors_in(tree, gradients=False, on_unknown=on_unknown, owners=data.owners)
    _refuse_quantized(found)
    stable = found if device_copy else found._replace(tensors=data.stable(found.tensors))
    memory = storages_of(stable)
    n_bytes = sum(memory.sizes_bytes)
    kind = DeviceCopy if device_copy else ScratchCopy
    with Progress("taking a snapshot", n_bytes) as progress:
        copied = kind(memory.tensors(), memory.sizes_bytes, progress)
    on_host = memory.like(stable.tensors, copied.parts)
    replaced: dict[int, Any] = dict(zip(map(id, found.tensors), on_host, strict=True))
    with Depth():
        made = _TreeCopy(replaced).of(tree, "state")
    taken = Snapshot(made, copied, n_bytes)
    optimizers = {id(each): each for each in [*data.optimizers, optimizer] if each is not None}
    waiting = [wait_in_step(each, taken) for each in optimizers.values()]
    if not (bool(waiting) and all(waiting) if defer_wait is None else defer_wait):
        taken.before_update()
    return taken


def check_optimizer(optimizer: Any) -> None:
    """Raise a TypeError for what is neither an optimizer nor None."""
    if not isinstance(optimizer, Optimizer | None):
        raise TypeError(
            f"optimizer must be an optimizer or None; got {named(optimizer)}: give the optimizer "
            "itself, and whatever else is to be saved in the state"
        )


class _Data:
    """Replaces modules, optimizers and the like in a state by their state dicts."""

    def __init__(self) -> None:
        self.optimizers: list[Optimizer] = []
        self.owners: list[tuple[Place, Any]] = []
        self._depth = Depth()
        self._buffers: set[int] = set()
        self._clones: dict[int, torch.UntypedStorage] = {}

    def of(self, value: Any, at: Place) -> Any:
        if isinstance(value, torch.Tensor) or _is_plain(value):
            return value
        if is_tensor_collection(type(value)):
            return value
        if isinstance(value, nn.Module):
            for buffer in value.buffers():
                if not is_lazy(buffer):  # `tensors_in` says where
                    self._buffers |= {_storage_id(part) for part in plain_parts(buffer)}
        elif isinstance(value, Optimizer):
            self.optimizers.append(value)
        if not isinstance(value, type) and callable(getattr(value, "state_dict", None)):
            self.owners.append((at, value))
            return value.state_dict()
        try:
            level = level_of(value)
        except Refused:  # `tensors_in` says where
            return value
        if level is None:
            return value
        with self._depth:
            made = [self.of(child, (at, form, name)) for form, name, child in level.steps()]
        return value if all(map(operator.is_, made, level.children)) else level.rebuild(made)

    def stable(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors, or ones over clones of large buffers: a forward may change these."""
        return [self._stable(each) for each in tensors] if self._buffers else tensors

    def _stable(self, tensor: torch.Tensor) -> torch.Tensor:
        number = _storage_id(tensor)
        storage = tensor.untyped_storage()
        if number not in self._buffers or storage.nbytes() <= PACKED_BYTES:
            return tensor
        if number not in self._clones:
            self._clones[number] = storage.clone()  # type: ignore[no-untyped-call]
        bytes_ = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return _C.over_bytes(bytes_.set_(self._clones[number]), tensor)


def _storage_id(tensor: torch.Tensor) -> int:
    if not torch._C._has_storage(tensor):
        return 0
    return int(tensor.untyped_storage()._cdata)


def _refuse_quantized(found: FoundTensors) -> None:
    for number, tensor in enumerate(found.tensors):
        if tensor.is_quantized:
            raise ValueError(
                f"{found.path(number)} is quantized, and its scales are not in its memory: give "
                "int_repr()"
            )


_KEY = " (a key)"


class _TreeCopy:
    """Copies trees by `copy.deepcopy`, except for tensors, TensorDicts and state dicts.

    An object, because functions that refer to each other would keep the copies until the garbage
    collector runs, and with them pinned memory.
    """

    def __init__(self, memo: dict[int, Any]) -> None:
        """Take copies that are known, by the id of the value. The values outlive this object."""
        self._memo = memo
        self._kept: list[Any] = []  # so that their ids stay their own

    def of(self, value: Any, at: Place) -> Any:
        memo = self._memo
        known = memo.get(id(value))
        if known is not None:
            return known
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        cls: Any = type(value)
        if cls is tuple:
            return tuple(self.of(child, (at, ITEM, i)) for i, child in enumerate(value))
        if cls is list:
            made: Any = []
            memo[id(value)] = made
            made.extend(self.of(child, (at, ITEM, i)) for i, child in enumerate(value))
        elif cls in (dict, OrderedDict):
            made = cls()
            memo[id(value)] = made
            for key, child in value.items():
                made[self._deep(key, (at, "{}", _KEY))] = self.of(child, (at, ITEM, key))
            for name, attribute in getattr(value, "__dict__", {}).items():  # `_metadata`
                setattr(made, name, self._deep(attribute, (at, ".{}", name)))
        elif is_tensor_collection(cls):
            memo[id(value)] = self._collection(value)
        else:
            if not _is_plain(value):
                self._note(value, at)
            return self._deep(value, at)
        return memo[id(value)]

    def _deep(self, value: Any, at: Place) -> Any:
        """Return `copy.deepcopy` of it.

        Raises:
            TypeError: it refuses to be copied.
            Exception: another error of a method of the value.
        """
        try:
            return copy.deepcopy(value, self._memo)
        except TypeError as error:
            raise TypeError(
                f"{text_of(at)} is {named(value)}, which copy.deepcopy cannot copy: {error}; leave "
                "it out, or give what you want to save of it"
            ) from error

    def _note(self, value: Any, at: Place) -> None:
        """Copy the tensors and TensorDicts in any other container, for `copy.deepcopy` to find."""
        for _, leaf in _C.leaves_with_paths(value, _CPU):
            if isinstance(leaf, torch.Tensor):
                self._tensor(leaf)
        level = level_of(value)
        for form, name, child in () if level is None else level.steps():
            if not isinstance(child, torch.Tensor):
                self._kept.append(child)
                self.of(child, (at, form, name))

    def _collection(self, value: Any) -> Any:
        made = value.apply(self._tensor, device=_CPU)
        return made.lock_() if value.is_locked else made

    def _tensor(self, value: torch.Tensor) -> Any:
        memo = self._memo
        known = memo.get(id(value))
        if known is not None:
            return known
        self._kept.append(value)
        if hasattr(value, "__tensor_flatten__"):
            names, context = value.__tensor_flatten__()
            parts = {name: getattr(value, name) for name in names}
            inner = {
                name: self._tensor(part) if isinstance(part, torch.Tensor) else part
                for name, part in parts.items()
            }
            made = type(value).__tensor_unflatten__(  # type: ignore[attr-defined]
                inner, context, value.size(), value.stride()
            )
        else:
            plain = value.detach()
            if type(plain) is not torch.Tensor:
                plain = plain.as_subclass(torch.Tensor)
            # Keeps shared storages shared.
            made = plain if plain.is_meta else copy.deepcopy(plain, memo)
        memo[id(value)] = made
        return made


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, int | float | complex | str | bytes)
