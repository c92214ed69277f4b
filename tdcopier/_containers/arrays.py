"""Converts numpy arrays to tensors when the engine cannot read their bytes as they are."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch


def as_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return a CPU tensor with the values of `array`, over the same memory if torch can use it.

    Copies arrays whose strides or byte order torch does not support. Suppresses torch's warning
    about read-only arrays: the tensor is passed to `Tensor.to`, or equals that of
    `torch.from_numpy`.
    """
    if not array.dtype.isnative or any(
        stride < 0 or stride % array.itemsize for stride in array.strides
    ):
        array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*", category=UserWarning)
        return torch.from_numpy(array)
