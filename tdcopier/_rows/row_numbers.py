"""Converts any index of rows to row numbers, in the shape that they have in the result.

Only the numbers of pairs are checked and wrapped here; for others `csrc/python/walk/row_leaves.cpp`
does it with `base/row_index.cpp`, and on a device the kernel (see `engine/device/bad_rows.h`).
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch

from tdcopier import _C
from tdcopier._containers.delegated_parts import plain_parts
from tdcopier._options import Device
from tdcopier._rows.request import RowIndex
from tdcopier._words import counted


def row_index(index: Any, storage: Any) -> RowIndex:
    """Convert an index of the rows of `storage`. A `RowIndex` is returned unchanged.

    Raises:
        TypeError: `index` is not an index of rows.
        IndexError: a row is out of range, as far as that is known without the leaves.
    """
    if is_numbers(index):
        return RowIndex(index, 1, False, (), index, False)
    if isinstance(index, RowIndex):
        return index
    if isinstance(index, tuple):
        if len(index) != 1:
            return _of_pair(index, storage)
        index = index[0]
    if isinstance(index, slice):
        _check_step(index)
        size = lead_sizes(storage, 1)[0]
        return RowIndex(_numbers_of_slice(index, size), 1, True, (size,), index, True)
    part = _as_part(index)
    if isinstance(part, int):
        return RowIndex(torch.tensor(part, device="cpu"), 1, False, (), part, True)
    if part.dtype == torch.bool:
        return _of_mask(part, storage)
    return RowIndex(part, 1, False, (), part, False)


def read_rows(value: Any, rows: RowIndex, device: Device) -> Any:
    """Read rows with the value's own indexing, into new memory if `.to(device)` would not copy.

    A collection may return its own tensors even for row numbers: a lazy stack returns its members.
    """
    read: Any = value[key_for_torch(rows)]
    if rows.is_view:
        return read.clone()
    if isinstance(read, torch.Tensor):
        return read
    target = torch.empty(0, device=device).device  # with its index
    places = [getattr(read, "device", None), *(part.device for part in plain_parts(read))]
    stays = any(isinstance(place, torch.device) and place == target for place in places)
    return read.clone() if stays else read


def key_for_torch(rows: RowIndex) -> Any:
    """Return the key of an index for torch's own indexing, which takes no tensor of int16."""
    key = rows.key
    return key.long() if isinstance(key, torch.Tensor) and key.dtype == torch.int16 else key


def is_numbers(index: Any) -> bool:
    """Return whether the engine can use the index as it is, which is nearly always the case.

    Fast path: loops for which microseconds count call this, and the other paths take ten times as
    long.
    """
    return (
        type(index) is torch.Tensor
        and index.dtype is torch.int64
        and index.is_cpu
        and index.dim() > 0
        and index.is_contiguous()
    )


def _of_mask(mask: torch.Tensor, storage: Any) -> RowIndex:
    if mask.dim() not in (1, 2):
        raise IndexError(
            f"a mask counts rows by one dimension or two; got one of shape {tuple(mask.shape)}"
        )
    sizes = lead_sizes(storage, mask.dim())
    if tuple(mask.shape) != sizes:
        raise IndexError(
            f"the shape of the mask {list(mask.shape)} does not match that of the rows "
            f"{list(sizes)}"
        )
    numbers = mask.flatten().nonzero().flatten()
    return RowIndex(numbers, mask.dim(), True, sizes, mask, False)


def _of_pair(index: tuple[Any, ...], storage: Any) -> RowIndex:
    if len(index) != 2:
        raise TypeError(
            f"index must be of one leading dimension, or a pair of indices of two; got a tuple of "
            f"{len(index)}"
        )
    for each in index:
        if isinstance(each, torch.Tensor) and each.device.type != "cpu":
            raise ValueError(
                f"a pair of indices must be on the host; one is on {each.device}: give each.cpu(), "
                "or flatten the leading dimensions of the storage and give one index"
            )
    key = tuple(each if isinstance(each, slice) else _as_part(each) for each in index)
    for each in key:
        if isinstance(each, slice):
            _check_step(each)
        if isinstance(each, torch.Tensor) and each.dtype == torch.bool and each.dim() != 1:
            raise IndexError(
                f"each of a pair of indices is of one dimension; got a mask of shape "
                f"{tuple(each.shape)}"
            )
    sizes = lead_sizes(storage, 2)
    is_view = not any(isinstance(each, torch.Tensor) for each in key)
    rows, columns = (_numbers_of(each, size) for each, size in zip(key, sizes, strict=True))
    if any(isinstance(each, slice) for each in key):  # every row with every column
        rows = rows.reshape(*rows.shape, *[1] * columns.dim())
    try:
        numbers = (rows * sizes[1] + columns).contiguous()
    except RuntimeError:
        raise IndexError(
            f"the two of a pair of indices pick {list(rows.shape)} and {list(columns.shape)}, "
            "which cannot be broadcast together"
        ) from None
    return RowIndex(numbers, 2, True, sizes, key, is_view)


def _numbers_of(part: Any, size: int) -> torch.Tensor:
    """Return the numbers, none negative, that one of a pair of indices selects in a dimension."""
    if isinstance(part, slice):
        return _numbers_of_slice(part, size)
    if not isinstance(part, torch.Tensor):
        return _wrap(torch.as_tensor(part, device="cpu"), size)
    if part.dtype != torch.bool:
        return _wrap(part, size)
    if part.shape != (size,):
        raise IndexError(
            f"the shape of the mask {list(part.shape)} does not match that of the rows [{size}]"
        )
    return part.nonzero().flatten()


def _numbers_of_slice(index: slice, size: int) -> torch.Tensor:
    first, last, step = index.indices(size)
    return torch.arange(first, max(first, last), step, device="cpu")


def _wrap(numbers: torch.Tensor, size: int) -> torch.Tensor:
    if numbers.numel() != 0:
        low, high = (int(bound) for bound in numbers.aminmax())
        for bound in (low, high):
            if not -size <= bound < size:
                there_are = "there is" if size == 1 else "there are"
                raise IndexError(
                    f"index {bound} is out of bounds: {there_are} {counted(size, 'row')}"
                )
        if low < 0:
            return torch.where(numbers < 0, numbers + size, numbers)
    return numbers


def _check_step(index: slice) -> None:
    if index.step is not None and operator.index(index.step) <= 0:
        raise ValueError(f"the step of a slice of rows must be positive; got {index.step}")


def _as_part(index: Any) -> torch.Tensor | int:
    """Return a mask, contiguous int64 row numbers, or one number."""
    if isinstance(index, np.ndarray):
        index = _of_array(index)
    elif isinstance(index, (list, range)):
        index = _of_list(list(index))
    if is_numbers(index):
        numbers: torch.Tensor = index
        return numbers
    if isinstance(index, torch.Tensor):
        if index.device.type != "cpu":
            return _of_device(index)
        if index.dtype == torch.bool:
            return index
        if index.dtype in (torch.int64, torch.int32, torch.int16):
            if index.dim() == 0:
                return int(index)
            return index.detach().long().contiguous()
        raise TypeError(_wrong_dtype(index))
    if isinstance(index, bool) or not hasattr(index, "__index__"):
        raise TypeError(
            "index must be a tensor, an array or a list of rows, a mask, a slice, a row, or a pair "
            f"of these for two leading dimensions; got {_found(index)}: the order is "
            "gather(storage, index, device), and scatter(batch, storage, index)"
        )
    row = operator.index(index)
    if not _INT64.min <= row <= _INT64.max:
        raise IndexError(f"index {row} is out of bounds: it does not fit in 64 bits")
    return row


def _found(index: Any) -> str:
    name = type(index).__qualname__
    return f"the {name} {index!r:.60}" if isinstance(index, (bool, float, str)) else name


_INT64 = torch.iinfo(torch.int64)
_KINDS_OF_ROWS = [{int}, {np.int64}]


def _of_device(index: torch.Tensor) -> torch.Tensor:
    """Return row numbers that the engine leaves on their device."""
    if not _C.has_row_kernels(index.device):
        raise ValueError(
            f"index must be on the host, where rows are gathered; it is on {index.device}: "
            "give index.cpu()"
        )
    if index.dtype == torch.bool:
        raise ValueError(
            f"index is a mask on {index.device}, so the host does not know how many rows it "
            "selects: give mask.nonzero().flatten(), or mask.cpu()"
        )
    if index.dtype not in (torch.int64, torch.int32, torch.int16):
        raise TypeError(_wrong_dtype(index))
    return index.detach().contiguous()


def _wrong_dtype(index: torch.Tensor) -> str:
    return (
        f"index must be of integers (int64, int32 or int16) or booleans; it is of {index.dtype}: "
        "give row numbers, for example index.long()"
    )


def _of_array(index: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return a tensor over the array's memory if torch accepts it, else over a copy.

    torch accepts arrays that are writable, in native byte order and without negative strides.
    """
    takes = index.flags.writeable and index.dtype.isnative and min(index.strides, default=0) >= 0
    readable = index if takes else index.astype(index.dtype.newbyteorder("="))
    return torch.from_numpy(readable)


def _of_list(index: list[Any]) -> torch.Tensor:
    try:
        if set(map(type, index)) in _KINDS_OF_ROWS:
            # Several times as fast as torch's own way.
            return torch.from_numpy(np.fromiter(index, np.int64, len(index)))
        numbers = torch.as_tensor(index, device="cpu")
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        if any(isinstance(row, int) and not _INT64.min <= row <= _INT64.max for row in index):
            raise IndexError(
                "index has a row that is out of bounds: it does not fit in 64 bits"
            ) from None
        raise TypeError(
            "index is a list, but not of row numbers or booleans, which make one tensor (for a "
            f"pair of indices give a tuple): {error}"
        ) from error
    return numbers if numbers.numel() != 0 else numbers.long()  # an empty list gives a float tensor


def lead_sizes(storage: Any, lead: int) -> tuple[int, ...]:
    """Return the sizes of the dimensions that count rows, from a collection or from the first leaf.

    Raises:
        ValueError: there are fewer dimensions than `lead`, or no leaf.
    """
    first = _first_table(storage)
    batch_size = getattr(first, "batch_size", None)
    if isinstance(batch_size, torch.Size):
        where = "storage" if first is storage else "the first TensorDict in storage"
        sizes, what = tuple(batch_size), f"the batch size of {where}"
    else:
        found = _C.leaves_with_paths(storage, torch.device("cpu"))
        if not found:
            raise ValueError("storage has no leaf, so its number of rows is unknown")
        path, leaf = found[0]
        sizes, what = tuple(getattr(leaf, "batch_size", leaf.shape)), f"the shape of {path}"
    if len(sizes) < lead:
        raise ValueError(f"index counts rows by {counted(lead, 'dimension')}; {what} is {sizes}")
    return sizes[:lead]


def _first_table(tree: Any) -> Any:
    """Return the first leaf or collection in lists, tuples and dicts; None if there is none.

    Leaves inside a collection are not used: their first dimensions need not be its rows, for
    example in a lazy stack.
    """
    if isinstance(tree, dict):
        tree = list(tree.values())
    if not isinstance(tree, (list, tuple)):
        is_table = isinstance(tree, (torch.Tensor, np.ndarray)) or hasattr(tree, "batch_size")
        return tree if is_table else None
    return next((found for each in tree if (found := _first_table(each)) is not None), None)
