"""Finds the tensors in a state, each with its path, and refuses those whose memory is not known.

A tensor that occurs twice is listed twice: `StorageMemory` makes one of each storage.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from tdcopier import _C
from tdcopier._containers.rule import Refused
from tdcopier._containers.visit import ATTRIBUTE, ITEM, level_of
from tdcopier._options import OnUnknown
from tdcopier._park.hiding_places import HidingPlaces
from tdcopier._park.value_paths import Depth, Place, named, text_of

_DICTS = (OrderedDict, defaultdict)
"""Their attributes, a factory or metadata, are not looked into."""


class FoundTensors(NamedTuple):
    """The plain strided tensors of a state, which may be parts of tensors of other classes."""

    tensors: list[torch.Tensor]
    """Those on devices."""
    places: list[Place]
    """Of each of these."""
    on_host: list[torch.Tensor]

    def path(self, number: int) -> str:
        """Return where a tensor is, for errors."""
        return text_of(self.places[number])


def tensors_in(
    state: Any,
    *,
    gradients: bool,
    is_parking: bool = False,
    on_unknown: OnUnknown = None,
    owners: Iterable[tuple[Place, Any]] = (),
) -> FoundTensors:
    """Return the tensors of a state that have memory, in the order of a walk through it.

    Args:
        state: modules (parameters and buffers), optimizers (their state, and tensors among their
            options, but not the parameters), and any containers that `start_copy` knows.
        gradients: also return the gradients of all leaf tensors.
        is_parking: raise if there are tensors, but none with device memory. Without any tensor,
            nothing is forgotten: an optimizer has none before its first step.
        on_unknown: what to do with values that may hide tensors, see `park`.
        owners: objects that the state has the state dicts of, with their places.

    Raises:
        TypeError: a value hides tensors, or may do so, and the option refuses it; only the own
            `.to` of a tensor knows its memory.
        ValueError: the memory of a tensor is not one strided piece that a device can copy; no
            tensor has device memory.
        RecursionError: containers are nested too deep, or contain themselves.
    """
    walk = _Walk(gradients, HidingPlaces(on_unknown, is_parking, owners))
    walk.value(state, "state")
    walk.hiding_places.report()
    if not walk.found.tensors:
        walk.refuse_nothing(state, is_parking=is_parking)
    return walk.found


def refuse_modes(call: str) -> None:
    """Raise a RuntimeError if a torch mode or a graph capture would change what copies do."""
    if not _C.engine_takes("cpu"):
        raise RuntimeError(
            f"a torch mode or transform is active, or the current stream is capturing a graph: "
            f"call {call} outside of it"
        )


def plain_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensor, or the plain tensors in a wrapper."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        part = getattr(tensor, name)
        if isinstance(part, torch.Tensor):  # a DTensor also names its mesh
            yield from plain_parts(part)


class _Walk:
    def __init__(self, gradients: bool, hiding_places: HidingPlaces) -> None:
        self.found = FoundTensors([], [], [])
        self.hiding_places = hiding_places
        self._depth = Depth()
        self._containers = 0
        self._options_on_host = 0
        self._gradients = gradients
        self._classes: dict[type, str] = {}

    def value(self, value: Any, at: Place) -> None:
        if isinstance(value, torch.Tensor):
            self._tensor(value, at)
        elif isinstance(value, nn.Module):
            self._module(value, at)
        elif isinstance(value, Optimizer):
            self._optimizer(value, at)
        elif not (value is None or isinstance(value, int | float | complex | str | bytes)):
            with self._depth:
                self._other(value, at)

    def refuse_nothing(self, state: Any, *, is_parking: bool) -> None:
        """Raise an error if no tensor with device memory was found and that is a mistake."""
        count = len(self.found.on_host) - self._options_on_host
        if count != 0 and not is_parking:
            return
        containers = self._containers + len(self.found.on_host)
        mistake = self.hiding_places.mistake(state, containers)
        if count != 0:
            tensors = "the tensor in the state is" if count == 1 else f"{count} tensors are"
            places = " and ".join(sorted({str(each.device) for each in self.found.on_host}))
            also = "" if mistake is None else f". {self.hiding_places.text_of(mistake)}"
            raise ValueError(
                f"nothing to park: {tensors} on {places}, and none is on a device; move the model "
                f"to the device first, or leave out the call{also}"
            )
        if mistake is not None:
            self.hiding_places.tell(mistake)

    def _module(self, module: nn.Module, at: Place) -> None:
        self._containers += 1
        self.hiding_places.add_owner(at, module)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self._tensor(parameter, (at, ATTRIBUTE, name))
        for name, buffer in module.named_buffers(remove_duplicate=False):
            self._tensor(buffer, (at, ATTRIBUTE, name))

    def _optimizer(self, optimizer: Optimizer, at: Place) -> None:
        self._containers += 1
        self.hiding_places.add_owner(at, optimizer)
        for number, values in enumerate(optimizer.state.values()):
            self.value(values, (at, ".state[{}]", number))
        before = len(self.found.on_host)
        for number, group in enumerate(optimizer.param_groups):
            options: Place = (at, ".param_groups[{}]", number)
            for name, value in group.items():
                if name != "params":
                    self.value(value, (options, ITEM, name))
        self._options_on_host += len(self.found.on_host) - before

    def _other(self, value: Any, at: Place) -> None:
        try:
            level = level_of(value)
        except Refused as error:
            raise TypeError(f"{text_of(at)} {error}") from None
        if level is not None:
            self._containers += 1
            if not level.is_plain and type(value) not in _DICTS:
                self.hiding_places.shells.append((at, value))
            for form, name, child in level.steps():
                self.value(child, (at, form, name))
            return
        if self.hiding_places.is_unread(at, value):
            return
        leaves = _C.leaves_with_paths(value, torch.device("cpu"))
        if leaves or _is_container(value):
            self._containers += 1
        else:
            self.hiding_places.opaque.append((at, value))
        for steps, leaf in leaves:
            where: Place = (at, "{}", steps.removeprefix("data"))
            if isinstance(leaf, torch.Tensor):
                self._tensor(leaf, where)
            elif isinstance(leaf, nn.Module):
                self._module(leaf, where)
            elif isinstance(leaf, np.ndarray):
                self.hiding_places.arrays.append((where, leaf))
            else:
                if isinstance(leaf, _collection_class() or ()):
                    raise TypeError(
                        f"{text_of(where)} is {named(leaf)} whose tensors are not its own, for "
                        "example because it is consolidated: give its .clone()"
                    )
                self.hiding_places.add_own_to(where, leaf)

    def _tensor(self, tensor: torch.Tensor, at: Place) -> None:
        cls = type(tensor)
        kind = self._classes.get(cls)
        if kind is None:
            kind = self._classes[cls] = _kind_of(cls)
        if kind == "plain":
            place = _C.place_of(tensor)
            if place is _C.MemoryPlace.DEVICE:
                self.found.tensors.append(tensor)
                self.found.places.append(at)
            elif place is _C.MemoryPlace.HOST:
                self.found.on_host.append(tensor)
            else:
                raise ValueError(f"{text_of(at)} {_why_not(tensor, place)}")
        elif kind == "wrapper":
            for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
                part = getattr(tensor, name)
                if isinstance(part, torch.Tensor):  # a DTensor also names its mesh
                    self._tensor(part, (at, ATTRIBUTE, name))
        elif kind == "lazy":
            raise ValueError(f"{text_of(at)} is not initialized: run the module on a batch first")
        else:
            raise TypeError(
                f"{text_of(at)} is {named(tensor)}, and only its own `.to` knows its memory: "
                "give the plain tensors in it"
            )
        if self._gradients and tensor.is_leaf and tensor.grad is not None:
            self._tensor(tensor.grad, (at, ATTRIBUTE, "grad"))


def _why_not(tensor: torch.Tensor, place: _C.MemoryPlace) -> str:
    """Return what is wrong with a tensor that is not in a known place."""
    if place is _C.MemoryPlace.OTHER_DEVICE:
        return (
            f"is on {tensor.device}, which tdcopier has no transfers for: accepted are tensors on "
            "CUDA and other accelerators of torch, and on the host"
        )
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "a nested tensor" if tensor.is_nested else f"of layout {tensor.layout}"
        return (
            f"is {kind}, and only strided tensors have their memory in one piece: give the "
            "tensors in it"
        )
    return "has no memory of its own: give the tensor that it stands for"


def _kind_of(cls: Any) -> str:
    """Return "wrapper" for a class of tensors made of others, "plain", "lazy", or "unknown"."""
    if not issubclass(cls, torch.Tensor):
        return "unknown"  # a weak proxy of a tensor
    if issubclass(cls, nn.UninitializedParameter | nn.UninitializedBuffer):
        return "lazy"
    if hasattr(cls, "__tensor_flatten__"):
        return "wrapper"
    if cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        return "plain"
    return "unknown"


def _collection_class() -> Any:
    return getattr(sys.modules.get("tensordict"), "TensorDictBase", None)


def _is_container(value: Any) -> bool:
    base = _collection_class()
    if base is not None and isinstance(value, base):
        return True
    return isinstance(value, tuple | list | dict)
