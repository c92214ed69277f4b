"""Trees that crossed a parcel: values that are no tensors arrive equal, and not the same."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
from support import assert_same as assert_same_objects


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
