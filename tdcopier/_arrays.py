"""numpy arrays whose bytes the engine cannot read as they are, made into tensors."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch


def as_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """A CPU tensor with the values of `array`, over the same memory where torch can use it.

    Copies arrays that torch has no strides or byte order for. Read-only arrays are not warned
    about: the tensor is handed to `Tensor.to`, or is what `torch.from_numpy` would have given.
    """
    if not array.dtype.isnative or any(
        stride < 0 or stride % array.itemsize for stride in array.strides
    ):
        array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*", category=UserWarning)
        return torch.from_numpy(array)
