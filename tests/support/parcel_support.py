"""Trees that crossed a parcel: values that are no tensors arrive equal, and not the same."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import torch
from support import assert_same as assert_same_objects
from tensordict import TensorDict

from tdcopier import Parcel


def read(data: bytes, allow_pickle: bool = True) -> Parcel:
    return Parcel.from_buffer(bytearray(data), allow_pickle=allow_pickle)


def example() -> dict[Any, Any]:
    """A tree with everything that needs no pickle."""
    control = TensorDict(
        {"position": torch.randn(4, 3), "next": {"done": torch.ones(4, 1, dtype=torch.bool)}},
        [4],
        names=["step"],
    )
    return {
        "boxes": [torch.randn(3, 4).t(), torch.arange(20)[::3], torch.randn(0, 4)],
        "control": control.lock_(),
        ("key", 1, None): (torch.randn(2, 3, 4).permute(2, 0, 1), torch.ones(()).bfloat16()),
        "words": ["straße", 3, -(1 << 40), 2.5, True, None, (1, ("x",)), torch.Size([2, 3])],
        "image": torch.randn(300, 1000),
        "nothing": [(), {}, []],
    }


def assert_same(got: Any, expected: Any) -> None:
    """Asserts that the trees are the same, but for the identity of values that are no tensors."""
    assert_same_objects(got, expected, is_same=is_equal)


def is_equal(got: Any, expected: Any) -> bool:
    if isinstance(expected, np.ndarray):
        return got.dtype == expected.dtype and np.array_equal(got, expected)
    return type(got) is type(expected) and pickle.dumps(got) == pickle.dumps(expected)


def echo(arriving: Any, leaving: Any) -> None:
    """Sends parcels back from another process, with the last value of "x"; None ends it."""
    while (parcel := arriving.get()) is not None:
        leaving.put((parcel.tree()["x"][-1].item(), parcel))


def fill_with_sevens(arriving: Any, leaving: Any) -> None:
    """Writes to "x" of parcels, and sends their sizes back; None ends it."""
    while (parcel := arriving.get()) is not None:
        parcel.tree()["x"].fill_(7)
        leaving.put(parcel.nbytes)
