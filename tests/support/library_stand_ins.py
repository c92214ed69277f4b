"""Classes of torchvision and torch_geometric: the libraries' own, and stand-ins for them.

The stand-ins are always there, so that what a copy does with such classes is tested on every
machine.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from libraries import library
from torch._C import DisableTorchFunctionSubclass
from torch.nn.utils.rnn import PackedSequence

LIBRARY_OR_STAND_IN = ("library", "stand-in")


# ---- torchvision.tv_tensors ----------------------------------------------------------------------


KEEPING = {
    torch.Tensor.to,
    torch.Tensor.clone,
    torch.Tensor.detach,
    torch.Tensor.requires_grad_,
}


class TVTensor(torch.Tensor):
    """Only a few functions return this class; the others return plain tensors."""

    @classmethod
    def _wrap_output(cls, output, args=(), kwargs=None):
        plain = isinstance(output, torch.Tensor) and not isinstance(output, cls)
        return output.as_subclass(cls) if plain else output

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with DisableTorchFunctionSubclass():
            output = func(*args, **(kwargs or {}))
        if func in KEEPING and isinstance(args[0], cls):
            return cls._wrap_output(output, args, kwargs)
        return output.as_subclass(torch.Tensor) if isinstance(output, cls) else output


class Image(TVTensor):
    pass


class Mask(TVTensor):
    pass


class Video(TVTensor):
    pass


class BoundingBoxes(TVTensor):
    def __new__(cls, data, *, format, canvas_size, clamping_mode="soft"):
        return cls._made(torch.as_tensor(data), (format, canvas_size, clamping_mode))

    @classmethod
    def _made(cls, tensor, metadata):
        boxes = tensor.as_subclass(cls)
        boxes.format, boxes.canvas_size, boxes.clamping_mode = metadata
        return boxes

    @classmethod
    def _wrap_output(cls, output, args=(), kwargs=None):
        like = next(each for each in args if isinstance(each, BoundingBoxes))
        metadata = like.format, like.canvas_size, like.clamping_mode
        if isinstance(output, torch.Tensor) and not isinstance(output, BoundingBoxes):
            return BoundingBoxes._made(output, metadata)
        return output


def tv_tensors(which: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns `torchvision.tv_tensors`, or the stand-in for it, which is then imported."""
    if which == "library":
        return library("torchvision.tv_tensors")
    module = ModuleType("torchvision.tv_tensors")
    for cls in (TVTensor, Image, Mask, Video, BoundingBoxes):
        setattr(module, cls.__name__, cls)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


# ---- torch_geometric -----------------------------------------------------------------------------


class Storage(MutableMapping):
    """The attributes of the nodes or edges of one type."""

    def __init__(self, parent: Any, key: Any = None) -> None:
        self._mapping: dict[str, Any] = {}
        self._key = key
        self._parent = weakref.ref(parent)

    def __getitem__(self, key: str) -> Any:
        return self._mapping[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if value is not None:
            self._mapping[key] = value
        else:
            self._mapping.pop(key, None)

    def __delitem__(self, key: str) -> None:
        del self._mapping[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._mapping)

    def __len__(self) -> int:
        return len(self._mapping)

    def copied_for(self, parent: Any) -> Storage:
        made = Storage(parent, self._key)
        made._mapping = dict(self._mapping)
        return made


def _applied(value: Any, function: Any) -> Any:
    if isinstance(value, (torch.Tensor, PackedSequence)):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[_applied(each, function) for each in value])
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_applied(each, function) for each in value]
    if isinstance(value, Mapping):
        return {key: _applied(each, function) for key, each in value.items()}
    try:
        return function(value)
    except Exception:
        return value


class BaseData:
    def apply(self, function: Any) -> Any:
        for store in self.stores:
            for key, value in list(store.items()):
                store[key] = _applied(value, function)
        return self

    def to(self, device: Any, *attributes: str, non_blocking: bool = False) -> Any:
        return self.apply(lambda value: value.to(device=device, non_blocking=non_blocking))


class Data(BaseData):
    def __init__(self, **attributes: Any) -> None:
        self.__dict__["_store"] = Storage(self)
        self._store.update(attributes)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_store"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            self.__dict__[name] = value
        else:
            self._store[name] = value

    @property
    def stores(self) -> list[Storage]:
        return [self._store]

    def __copy__(self) -> Any:
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        made.__dict__["_store"] = self._store.copied_for(made)
        return made


class HeteroData(BaseData):
    def __init__(self) -> None:
        self._all = {None: Storage(self)}

    def __getitem__(self, key: Any) -> Storage:
        return self._all.setdefault(key, Storage(self, key))

    @property
    def stores(self) -> list[Storage]:
        return list(self._all.values())

    def __copy__(self) -> Any:
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        made._all = {key: store.copied_for(made) for key, store in self._all.items()}
        return made


class Batch:
    """Its class is made with the first batch of such graphs."""

    _made: ClassVar[dict[type, type]] = {}

    @classmethod
    def from_data_list(cls, graphs: list[Any]) -> Any:
        kind = type(graphs[0])
        made = cls._made.setdefault(kind, type(f"{kind.__name__}Batch", (Batch, kind), {}))
        batch = made()
        for key in graphs[0]._store:
            batch[key] = torch.cat([graph._store[key] for graph in graphs])
        batch._slice_dict = {"x": torch.arange(len(graphs) + 1)}
        batch._num_graphs = len(graphs)
        return batch

    def __setitem__(self, key: str, value: Any) -> None:
        self._store[key] = value


for _class in (BaseData, Data, HeteroData):
    for _method in (*vars(_class).values(), _class):
        _function = _method.fget if isinstance(_method, property) else _method
        if callable(_function):
            _function.__module__ = "torch_geometric.stand_in"


def geometric(which: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns `torch_geometric.data`, or the stand-in for it, which is then imported."""
    if which == "library":
        return library("torch_geometric.data")
    base = ModuleType("torch_geometric.data.data")
    base.BaseData = BaseData
    monkeypatch.setitem(sys.modules, base.__name__, base)
    return SimpleNamespace(Data=Data, HeteroData=HeteroData, Batch=Batch)


def moved_by_to(graph: Any, device: str) -> Any:
    """Returns what `.to` makes of a graph, without changing the graph."""
    return copy.copy(graph).to(device)
