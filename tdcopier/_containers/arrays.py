"""Converts numpy arrays to tensors when the engine cannot read their bytes as they are."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch


def as_tensor(array: np.ndarray[Any, Any], *, is_result: bool = False) -> torch.Tensor:
    """Return a CPU tensor with the values of `array`, over the same memory if torch can use it.

    Copies arrays whose strides or byte order torch does not support. Where the tensor is only read,
    torch's warning about read-only arrays is suppressed. It is not for a result: a write to one
    that is memory-mapped for reading ends the process.
    """
    if not array.dtype.isnative or any(
        stride < 0 or stride % array.itemsize for stride in array.strides
    ):
        array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
    if array.dtype == np.ulonglong:  # of the same bytes, but torch takes `np.uint64` only
        array = array.view(np.uint64)
    if is_result:
        return torch.from_numpy(array)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*", category=UserWarning)
        return torch.from_numpy(array)
