"""Every kind of leaf: how to make it, and its outcome in each direction. Data, no tests."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from container_classes import CONTAINERS, EVERY_CONTAINER_IN_ANOTHER
from leaf_kind import DIRECTIONS, NOT_THERE, Kind, everywhere, on_host, value

import tdcopier

__all__ = [
    "CONTAINERS",
    "DIRECTIONS",
    "DTYPES",
    "EVERY_CONTAINER_IN_ANOTHER",
    "KINDS",
    "NOT_THERE",
    "Kind",
]

# ---- tensors -------------------------------------------------------------------------------------


def ramp(device: str, *shape: int) -> torch.Tensor:
    """Returns 0, 1, 2 and so on as a tensor; the device's bytes are copied from the host."""
    elements = int(np.prod(shape))
    return torch.arange(elements, dtype=torch.float32).reshape(shape).to(device)


def _complex(device: str) -> torch.Tensor:
    return torch.complex(ramp("cpu", 4), -ramp("cpu", 4)).to(device)


def _shortened(device: str, storage_bytes: int) -> torch.Tensor:
    leaf = ramp(device, 6)
    leaf.untyped_storage().resize_(storage_bytes)
    return leaf


def _in_inference_mode(device: str) -> torch.Tensor:
    with torch.inference_mode():
        return ramp(device, 4)


def _from_file() -> torch.Tensor:
    with tempfile.NamedTemporaryFile() as file:  # the mapping outlives the file's name
        Path(file.name).write_bytes(np.arange(4, dtype=np.float32).tobytes())
        return torch.from_file(file.name, size=4)


def _quietly(make: Callable[[], torch.Tensor]) -> Callable[[str], torch.Tensor]:
    """Silences torch's warnings about new and deprecated features."""

    def made(device: str) -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make().to(device)

    return made


def _quantized_per_channel() -> torch.Tensor:
    scales, zeros = torch.tensor([0.1, 0.2]), torch.tensor([0, 1])
    return torch.quantize_per_channel(ramp("cpu", 2, 3), scales, zeros, 0, torch.qint8)


def _jagged_nested(device: str) -> torch.Tensor:
    parts = [ramp("cpu", 2, 3), ramp("cpu", 4, 3)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged).to(device)


def _jagged_with_lengths(device: str) -> torch.Tensor:
    values, offsets = ramp(device, 9, 3), torch.tensor([0, 4, 9]).to(device)
    lengths = torch.tensor([2, 5]).to(device)
    return torch.nested.nested_tensor_from_jagged(values, offsets, lengths)


class Registered(torch.Tensor):
    pass


tdcopier.containers.register_tensor_subclass(Registered)


class Labelled(torch.Tensor):
    """A subclass that adds nothing."""


class Loud(torch.Tensor):
    """A subclass that overrides `__torch_function__`."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_function__(func, types, args, kwargs or {})
        return made.add(1) if func is torch.Tensor.to else made


def _two_tensor(device: str) -> torch.Tensor:
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(ramp(device, 3), ramp(device, 3))


def _fake(device: str) -> torch.Tensor:
    return torch._subclasses.FakeTensorMode().from_tensor(ramp(device, 3))


def _dual(device: str) -> torch.Tensor:
    import torch.autograd.forward_ad as fwad

    return fwad.make_dual(ramp(device, 3), ramp(device, 3) + 1)


def _function_mode() -> AbstractContextManager[Any]:
    from torch.overrides import TorchFunctionMode

    class PassOn(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            return func(*args, **(kwargs or {}))

    return PassOn()


def _dispatch_mode() -> AbstractContextManager[Any]:
    from torch.utils._python_dispatch import TorchDispatchMode

    class PassOn(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            return func(*args, **(kwargs or {}))

    return PassOn()


def _dual_level() -> AbstractContextManager[Any]:
    import torch.autograd.forward_ad as fwad

    return fwad.dual_level()


@contextlib.contextmanager
def _inside_vmap():
    level = torch._C._functorch._vmap_increment_nesting(2, "error")
    try:
        yield level
    finally:
        torch._C._functorch._vmap_decrement_nesting()


_MANY = 3 * 1024 * 1024  # four-byte elements: three staging buffers
_NO_QUANTIZED = {"sim": "the simulated device has no quantized tensors"}
_NO_NESTED = {"sim": "the simulated device has no strided nested tensors"}

_DENSE = {
    "0-dim": everywhere(lambda d: torch.tensor(3.5).to(d), "packed"),
    "no elements": everywhere(lambda d: torch.empty(0, device=d), "packed"),
    "no elements, but a shape": everywhere(lambda d: torch.empty(3, 0, 2, device=d), "packed"),
    "no elements, transposed": everywhere(lambda d: torch.empty(3, 0, device=d).t(), "packed"),
    "contiguous": everywhere(lambda d: ramp(d, 2, 3), "packed"),
    "transposed": everywhere(lambda d: ramp(d, 3, 5).t(), "packed"),
    "permuted": everywhere(lambda d: ramp(d, 2, 3, 4).permute(1, 2, 0), "packed"),
    "channels_last": everywhere(
        lambda d: ramp(d, 2, 3, 4, 5).contiguous(memory_format=torch.channels_last), "packed"
    ),
    "channels_last_3d": everywhere(
        lambda d: ramp(d, 2, 3, 2, 2, 3).contiguous(memory_format=torch.channels_last_3d), "packed"
    ),
    "view in the middle of a storage": everywhere(lambda d: ramp(d, 10)[3:7], "packed"),
    "one element with an odd stride": everywhere(lambda d: ramp(d, 9)[2::7][:1], "packed"),
    "exactly 256 KiB": everywhere(lambda d: ramp(d, 65536), "packed", large=True),
    "more than 256 KiB": everywhere(lambda d: ramp(d, 65537), "alone", large=True),
    "several staging buffers": everywhere(lambda d: ramp(d, _MANY + 5), "alone", large=True),
    "same tensor twice": everywhere(lambda d: [ramp(d, 3)] * 2, "packed", leaves=2),
    "views of one storage": everywhere(
        lambda d: [(base := ramp(d, 8))[:4], base[2:], base.view(2, 4)], "packed", leaves=3
    ),
    "in shared memory": on_host(lambda: ramp("cpu", 6).share_memory_(), "packed"),
    "pinned": on_host(lambda: ramp("cpu", 6).pin_memory(), "packed"),
    "memory-mapped by `torch.from_file`": on_host(_from_file, "packed"),
    "copy-on-write": everywhere(
        lambda d: torch._lazy_clone(ramp(d, 3)), "packed", needs="torch._lazy_clone"
    ),
    "`nn.Buffer`": everywhere(lambda d: torch.nn.Buffer(ramp(d, 3)), "packed"),
    "inference tensor": everywhere(_in_inference_mode, "packed"),
    "on the target": everywhere(lambda d: ramp(d, 3), "reused", on_target=True),
    "on the target, strided": everywhere(lambda d: ramp(d, 6)[::2], "reused", on_target=True),
}

_STRIDED = {
    "gapped": everywhere(lambda d: ramp(d, 4, 6)[:, ::2], "packed"),
    "gapped rows, transposed": everywhere(lambda d: ramp(d, 4, 6)[1:3].t()[2:], "packed"),
    "diagonal": everywhere(lambda d: ramp(d, 4, 4).diagonal(), "packed"),
    "real part of complex": everywhere(lambda d: _complex(d).real, "packed"),
    "expanded": everywhere(lambda d: ramp(d, 1, 4).expand(3, 4), "packed"),
    "expanded 0-dim": everywhere(lambda d: torch.tensor(2.5).to(d).expand(2, 3), "packed"),
    "expanded in the middle, transposed": everywhere(
        lambda d: ramp(d, 3, 1, 4).expand(3, 2, 4).transpose(0, 2), "packed"
    ),
    "overlapping": everywhere(lambda d: ramp(d, 6).as_strided((4, 3), (1, 1)), "packed"),
    "windows of `unfold`": everywhere(lambda d: ramp(d, 9).unfold(0, 4, 2), "packed"),
    "channels_last, cropped": everywhere(
        lambda d: ramp(d, 2, 3, 4, 5).contiguous(memory_format=torch.channels_last)[..., 1:3],
        "packed",
    ),
    "gapped, of more than 256 KiB": everywhere(
        lambda d: ramp(d, 70_000, 2)[:, 0], "alone", large=True
    ),
    "gapped, of several staging buffers": everywhere(  # rows of 2,998 bytes, which windows split
        lambda d: ramp(d, 4099, 1000)[:, 1:].t(), "alone", large=True
    ),
    "expanded to several staging buffers": everywhere(
        lambda d: ramp(d, 1, 1001).expand(2200, 1001), "alone", large=True
    ),
}

_GRADIENTS = {
    "requires grad": everywhere(lambda d: ramp(d, 4).requires_grad_(), "delegated"),
    "result of an operation with a gradient": everywhere(
        lambda d: ramp(d, 4).requires_grad_() * 2, "delegated"
    ),
    "requires grad, in `no_grad`": everywhere(
        lambda d: ramp(d, 4).requires_grad_(), "packed", within=torch.no_grad
    ),
    "requires grad, in `inference_mode`": everywhere(
        lambda d: ramp(d, 4).requires_grad_(), "packed", within=torch.inference_mode
    ),
    "parameter": everywhere(lambda d: torch.nn.Parameter(ramp(d, 4)), "delegated"),
    "parameter without gradient": everywhere(
        lambda d: torch.nn.Parameter(ramp(d, 4), requires_grad=False), "packed"
    ),
    "parameter, in `no_grad`": everywhere(
        lambda d: torch.nn.Parameter(ramp(d, 4)), "packed", within=torch.no_grad
    ),
    "forward gradient": everywhere(_dual, "delegated", within=_dual_level),
}

_JAGGED = {
    "nested, jagged": everywhere(
        _jagged_nested, "packed", leaves=2, parts=lambda leaf: [leaf._values, leaf._offsets]
    ),
    "nested, jagged, with lengths": everywhere(
        _jagged_with_lengths, "packed", leaves=3,
        parts=lambda leaf: [leaf._values, leaf._offsets, leaf._lengths],
    ),
    "nested, jagged, that requires grad": everywhere(
        lambda d: _jagged_nested(d).requires_grad_(), "delegated"
    ),
    "nested, jagged, on the target": everywhere(_jagged_nested, "reused", on_target=True),
}  # fmt: skip

_SUBCLASSES = {
    "tensor subclass that is registered": everywhere(
        lambda d: ramp(d, 2, 3).t().as_subclass(Registered), "packed"
    ),
    "tensor subclass that is registered, gapped": everywhere(
        lambda d: ramp(d, 4, 6)[:, ::2].as_subclass(Registered), "packed"
    ),
    "tensor subclass that is registered, and requires grad": everywhere(
        lambda d: ramp(d, 3).as_subclass(Registered).requires_grad_(), "delegated"
    ),
    "tensor subclass that is registered, on the target": everywhere(
        lambda d: ramp(d, 3).as_subclass(Registered), "reused", on_target=True
    ),
}

_DELEGATED = {
    "conjugate view": everywhere(lambda d: _complex(d).conj(), "delegated"),
    "negative view": everywhere(lambda d: _complex(d).conj().imag, "delegated"),
    "zero tensor of autograd": on_host(lambda: torch._efficientzerotensor(3), "delegated"),
    "tensor subclass": everywhere(lambda d: ramp(d, 3).as_subclass(Labelled), "delegated"),
    "subclass with `__torch_function__`": everywhere(
        lambda d: ramp(d, 3).as_subclass(Loud), "delegated"
    ),
    "wrapper subclass": everywhere(_two_tensor, "delegated"),
    "fake tensor": everywhere(_fake, "delegated"),
    "meta tensor": on_host(
        lambda: torch.empty(3, device="meta"), "delegated", fails=NotImplementedError
    ),
    "named": everywhere(
        lambda d: ramp(d, 3).refine_names("n"), "delegated", needs="torch.Tensor.refine_names"
    ),
    "sparse COO": everywhere(_quietly(lambda: torch.eye(3).to_sparse()), "delegated"),
    "sparse CSR": everywhere(_quietly(lambda: torch.eye(3).to_sparse_csr()), "delegated"),
    "sparse BSC": everywhere(_quietly(lambda: torch.eye(4).to_sparse_bsc((2, 2))), "delegated"),
    "quantized": everywhere(
        _quietly(lambda: torch.quantize_per_tensor(ramp("cpu", 3), 0.1, 2, torch.quint8)),
        "delegated",
        lacking=_NO_QUANTIZED,
    ),
    "quantized per channel": everywhere(
        _quietly(_quantized_per_channel), "delegated", lacking=_NO_QUANTIZED
    ),
    "nested, strided": everywhere(
        _quietly(lambda: torch.nested.nested_tensor([ramp("cpu", 2), ramp("cpu", 3)])),
        "delegated",
        lacking=_NO_NESTED,
    ),
    "any tensor, inside `vmap`": everywhere(lambda d: ramp(d, 3), "delegated", within=_inside_vmap),
    "any tensor, under a torch function mode": everywhere(
        lambda d: ramp(d, 3), "delegated", within=_function_mode
    ),
    "any tensor, under a dispatch mode": everywhere(
        lambda d: ramp(d, 3), "delegated", within=_dispatch_mode
    ),
}

_REFUSED = {
    "storage resized to nothing": everywhere(lambda d: _shortened(d, 0), ValueError),
    "storage resized to a part": everywhere(lambda d: _shortened(d, 23), ValueError),
}

# ---- arrays --------------------------------------------------------------------------------------


def _read_only() -> np.ndarray[Any, Any]:
    array = np.arange(3.0)
    array.flags.writeable = False
    return array


def _memmap() -> np.ndarray[Any, Any]:
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(np.arange(6, dtype=np.int16).tobytes())
        return np.memmap(file.name, dtype=np.int16, mode="r", shape=(2, 3))


def _unaligned() -> np.ndarray[Any, Any]:
    return np.frombuffer(b"x" + np.arange(3.0).tobytes(), np.uint8)[1:].view(np.float64)


def _field() -> np.ndarray[Any, Any]:
    records = np.zeros(4, np.dtype([("flag", np.uint8), ("x", np.float32)]))  # five bytes each
    records["x"] = np.arange(4)
    return records["x"]


def _user_dtype() -> np.ndarray[Any, Any]:
    import ml_dtypes

    return np.zeros(2, ml_dtypes.bfloat16)


_ARRAYS = {
    "numpy": on_host(lambda: np.arange(6, dtype=np.float32).reshape(2, 3), "packed"),
    "numpy, 0-dim": on_host(lambda: np.array(2.5), "packed"),
    "numpy, no elements": on_host(lambda: np.empty((0, 3), np.int32), "packed"),
    "numpy, Fortran order": on_host(
        lambda: np.asfortranarray(np.arange(6.0).reshape(2, 3)), "packed"
    ),
    "numpy, permuted": on_host(
        lambda: np.arange(24.0).reshape(2, 3, 4).transpose(1, 0, 2), "packed"
    ),
    "numpy, gapped": on_host(lambda: np.arange(24.0).reshape(4, 6)[:, ::2], "packed"),
    "numpy, broadcast": on_host(lambda: np.broadcast_to(np.arange(3.0), (2, 3)), "packed"),
    "numpy, reversed": on_host(lambda: np.arange(24).reshape(4, 6)[::-1, ::-2], "packed"),
    "numpy, strides that its elements do not divide": on_host(_field, "packed"),
    "numpy, unaligned": on_host(_unaligned, "packed"),
    "numpy, big-endian": on_host(lambda: np.arange(6, dtype=">i4").reshape(2, 3), "packed"),
    "numpy, big-endian, reversed": on_host(lambda: np.arange(5, dtype=">f8")[::-1], "packed"),
    "numpy, big-endian, 0-dim": on_host(lambda: np.array(7, ">c16"), "packed"),
    "numpy, read-only": on_host(_read_only, "packed"),
    "numpy, memory-mapped": on_host(_memmap, "packed"),
    "numpy, subclass": on_host(lambda: np.arange(3.0).view(np.recarray), "packed"),
    "numpy, of more than 256 KiB": on_host(
        lambda: np.arange(65537, dtype=np.int32), "alone", large=True
    ),
    "numpy, reversed, of several staging buffers": on_host(
        lambda: np.arange(_MANY, dtype=np.float32).reshape(1536, -1)[::-1, ::-1], "alone",
        large=True,
    ),
    "numpy, longdouble": on_host(lambda: np.zeros(2, np.longdouble), TypeError),
    "numpy, clongdouble": on_host(lambda: np.zeros(2, np.clongdouble), TypeError),
    "numpy, a dtype of an extension's": on_host(_user_dtype, TypeError, needs="ml_dtypes"),
    "numpy, objects": on_host(lambda: np.array([None, "a"], object), "opaque"),
    "numpy, text": on_host(lambda: np.array(["a", "b"]), "opaque"),
    "numpy, bytes": on_host(lambda: np.array([b"a", b"b"]), "opaque"),
    "numpy, text of any length": on_host(
        lambda: np.array(["a", "bc"], np.dtypes.StringDType()), "opaque",
        needs="numpy.dtypes.StringDType",
    ),
    "numpy, dates": on_host(lambda: np.array(["2020-01-01"], "datetime64[D]"), "opaque"),
    "numpy, durations": on_host(lambda: np.array([3], "timedelta64[s]"), "opaque"),
    "numpy, structured": on_host(lambda: np.zeros(2, [("x", float)]), "opaque"),
    "numpy, masked": on_host(lambda: np.ma.masked_array([1.0, 2.0], [True, False]), "opaque"),
}  # fmt: skip

# ---- opaque values -------------------------------------------------------------------------------

_OPAQUE = {
    "`None`": value(lambda: None),
    "number, text, bytes": Kind(
        lambda _device: [1, 2.5, True, 1j, "text", b"bytes"],
        "opaque", "opaque", "opaque", leaves=6,
    ),
    "numpy scalar": value(lambda: np.float32(1.5)),
    "`torch.Size`": value(lambda: torch.Size([2, 3])),
    "object of any other class": value(object),
}  # fmt: skip

KINDS: dict[str, Kind] = (
    _DENSE
    | _STRIDED
    | _GRADIENTS
    | _JAGGED
    | _SUBCLASSES
    | _DELEGATED
    | _REFUSED
    | _ARRAYS
    | _OPAQUE
)

# ---- dtypes --------------------------------------------------------------------------------------

DTYPES_LEFT_OUT = dict.fromkeys(
    ("qint8", "quint8", "qint32", "quint4x2", "quint2x4"),
    "quantized tensors are made from a scale: see the kinds",
)
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
    if str(dtype).removeprefix("torch.") not in DTYPES_LEFT_OUT
}

ARRAY_DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16",
    "float32", "float64", "complex64", "complex128",
)  # fmt: skip
