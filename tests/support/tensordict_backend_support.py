"""The state of TensorDict's methods, and calls under the switch of the backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tensordict import LazyStackedTensorDict, TensorDict
from tensordict.base import TensorDictBase


def methods() -> dict[str, Any]:
    """Returns all present methods of tensordict's classes that may be patched."""
    classes = {*TensorDictBase.__mro__, TensorDict, LazyStackedTensorDict}
    return {
        f"{cls.__qualname__}.{name}": value
        for cls in classes
        for name, value in vars(cls).items()
        if name in ("to", "cpu", "cuda", "__init__", "__new__", "_to", "__enter__", "__exit__")
    }


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Checks after each test that tensordict has its original methods."""
    before = methods()
    yield
    assert methods() == before


def outcome(call: Callable[[], Any]) -> Any:
    """Returns the call's result, or class and text of its error, for comparison with another."""
    try:
        return call()
    except Exception as error:
        return type(error), str(error)
