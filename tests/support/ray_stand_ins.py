"""Stand-ins for the parts of Ray that tdcopier and its recipe use, for machines without it."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest


class Stored(NamedTuple):
    """A reference to a value."""

    head: bytes
    buffers: list[bytes]


class Store:
    """An object store as Ray's: buffers are out of band, and read-only when they come back."""

    def __init__(self) -> None:
        self.registered: dict[type, tuple[Callable[..., Any], Callable[..., Any]]] = {}

    def register_serializer(
        self, cls: type, *, serializer: Callable[..., Any], deserializer: Callable[..., Any]
    ) -> None:
        self.registered[cls] = (serializer, deserializer)

    def deregister_serializer(self, cls: type) -> None:
        self.registered.pop(cls, None)

    def put(self, value: Any) -> Stored:
        registered = self.registered

        class Pickler(pickle.Pickler):
            def reducer_override(self, each: Any) -> Any:
                if type(each) not in registered:
                    return NotImplemented
                serializer, deserializer = registered[type(each)]
                return deserializer, (serializer(each),)

        buffers: list[pickle.PickleBuffer] = []
        file = io.BytesIO()
        Pickler(file, 5, buffer_callback=buffers.append).dump(value)
        return Stored(file.getvalue(), [bytes(each.raw()) for each in buffers])

    def get(self, stored: Stored | list[Stored]) -> Any:
        if isinstance(stored, list):
            return [self.get(each) for each in stored]
        return pickle.loads(stored.head, buffers=stored.buffers)

    def remote(self, cls: type) -> Any:
        """Makes actors in this process. A call is done at once; what it takes and gives is put."""

        def call(method: Callable[..., Any], *arguments: Any) -> Stored:
            return self.put(method(*(self.get(self.put(each)) for each in arguments)))

        class Handle:
            def __init__(self, *arguments: Any) -> None:
                self.actor = cls(*arguments)

            def __getattr__(self, name: str) -> Any:
                return SimpleNamespace(remote=partial(call, getattr(self.actor, name)))

        return SimpleNamespace(remote=Handle)


class Rows:
    """A dataset of rows that are dicts of numbers and arrays."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows

    def iter_torch_batches(
        self, *, batch_size: int, prefetch_batches: int, collate_fn: Callable[[Any], Any]
    ) -> Iterator[Any]:
        coming = []
        for at in range(0, len(self._rows), batch_size):
            rows = self._rows[at : at + batch_size]
            columns = {key: np.stack([np.asarray(row[key]) for row in rows]) for key in rows[0]}
            coming.append(collate_fn(columns))
            if len(coming) > prefetch_batches:
                yield coming.pop(0)
        yield from coming


def stand_in_for_ray(monkeypatch: pytest.MonkeyPatch) -> Store:
    """Makes imports of ray find the classes above."""
    store = Store()
    collate_fn = SimpleNamespace(NumpyBatchCollateFn=type("NumpyBatchCollateFn", (), {}))
    contents = {
        "ray": {
            "put": store.put,
            "get": store.get,
            "remote": store.remote,
            "shutdown": lambda: None,
        },
        "ray.util": {
            "register_serializer": store.register_serializer,
            "deregister_serializer": store.deregister_serializer,
        },
        "ray.data": {"from_items": Rows},
        "ray.data.collate_fn": vars(collate_fn),
    }
    for name, names in contents.items():
        module = ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("util", "data"):
        setattr(sys.modules["ray"], name, sys.modules[f"ray.{name}"])
    return store
