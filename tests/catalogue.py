"""Every kind of leaf: how to make it, and what becomes of it in each direction. Data, no tests."""

from __future__ import annotations

import contextlib
import importlib.util
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from container_classes import CONTAINERS, EVERY_CONTAINER_IN_ANOTHER

__all__ = [
    "CONTAINERS",
    "DIRECTIONS",
    "DTYPES",
    "EVERY_CONTAINER_IN_ANOTHER",
    "KINDS",
    "NOT_THERE",
    "Kind",
]

DIRECTIONS = ("H2D", "D2H", "D2D")

Outcome = str | type[Exception]
"""What a leaf counts as: "packed" and so on; the error that `start_copy` raises; or NOT_THERE."""

NOT_THERE = "-"
"""There is no such leaf on this side."""


@dataclass(frozen=True)
class Kind:
    make: Callable[[str], Any]
    """The leaf, or a list of leaves, on a device; one that is only on the host ignores it."""
    h2d: Outcome
    d2h: Outcome
    d2d: Outcome
    leaves: int = 1
    large: bool = False
    """Too large to be copied in every container."""
    on_target: bool = False
    """Made on the target, not on the source."""
    within: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    """What the copy is made in."""
    fails: type[Exception] | None = None
    """What its own `.to` raises, and so `get()`."""
    lacking: dict[str, str] = field(default_factory=dict)
    """Kinds of device, and why they have no such leaf."""
    needs: str = ""
    """A package, or a name in torch or numpy, without which there is no such leaf."""

    def outcome(self, direction: str) -> Outcome:
        return {"H2D": self.h2d, "D2H": self.d2h, "D2D": self.d2d}[direction]

    @property
    def is_refused(self) -> bool:
        return not isinstance(self.h2d, str)

    @property
    def arrives(self) -> bool:
        return not self.is_refused and self.fails is None

    def why_missing(self, device_type: str) -> str | None:
        """Why this process cannot have such a leaf, if it cannot."""
        if self.needs and not _is_there(self.needs):
            return f"needs {self.needs}"
        return self.lacking.get(device_type)


def _is_there(name: str) -> bool:
    package, *attributes = name.split(".")
    if importlib.util.find_spec(package) is None:
        return False
    found: Any = {"torch": torch, "numpy": np}.get(package)
    for attribute in attributes:
        found = getattr(found, attribute, None)
    return not attributes or found is not None


def _everywhere(make: Callable[[str], Any], outcome: Outcome, **more: Any) -> Kind:
    return Kind(make, outcome, outcome, outcome, **more)


def _on_host(make: Callable[[], Any], outcome: Outcome, **more: Any) -> Kind:
    return Kind(lambda _device: make(), outcome, NOT_THERE, NOT_THERE, **more)


def _value(make: Callable[[], Any]) -> Kind:
    return _everywhere(lambda _device: make(), "opaque")


# ---- tensors -------------------------------------------------------------------------------------


def ramp(device: str, *shape: int) -> torch.Tensor:
    """0, 1, 2 and so on; the device's bytes come from the host."""
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
    with tempfile.NamedTemporaryFile() as file:  # the mapping outlives its name
        Path(file.name).write_bytes(np.arange(4, dtype=np.float32).tobytes())
        return torch.from_file(file.name, size=4)


def _quantized(per_channel: bool) -> torch.Tensor:
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning)  # torch means to remove them
        if per_channel:
            scales, zeros = torch.tensor([0.1, 0.2]), torch.tensor([0, 1])
            return torch.quantize_per_channel(ramp("cpu", 2, 3), scales, zeros, 0, torch.qint8)
        return torch.quantize_per_tensor(ramp("cpu", 3), 0.1, 2, torch.quint8)


def _strided_nested(device: str) -> torch.Tensor:
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors", UserWarning)
        return torch.nested.nested_tensor([ramp("cpu", 2), ramp("cpu", 3)]).to(device)


def _jagged_nested(device: str) -> torch.Tensor:
    parts = [ramp("cpu", 2, 3), ramp("cpu", 4, 3)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged).to(device)


class Labelled(torch.Tensor):
    """A subclass without anything of its own."""


class Loud(torch.Tensor):
    """A subclass that has a say in what torch's functions do."""

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


def _tensordict(device: str) -> Any:
    from tensordict import TensorDict

    nested = TensorDict({"c": ramp(device, 2, 4)}, batch_size=[2], device=device)
    return TensorDict({"a": ramp(device, 2, 3), "b": nested}, batch_size=[2], device=device)


def _tensorclass(device: str) -> Any:
    import tensordict

    class Frames(tensordict.TensorClass):
        pixels: torch.Tensor
        label: str

    return Frames(pixels=ramp(device, 2, 3), label="x", batch_size=[2], device=device)


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


_MANY = 3 * 1024 * 1024  # elements, of four bytes: three staging buffers
_NO_SPARSE = {"sim": "the simulated device has no sparse tensors"}
_NO_QUANTIZED = {"sim": "the simulated device has no quantized tensors"}
_NO_NESTED = {"sim": "the simulated device has no strided nested tensors"}

_DENSE = {
    "0-dim": _everywhere(lambda d: torch.tensor(3.5).to(d), "packed"),
    "no elements": _everywhere(lambda d: torch.empty(0, device=d), "packed"),
    "no elements, but a shape": _everywhere(lambda d: torch.empty(3, 0, 2, device=d), "packed"),
    "no elements, transposed": _everywhere(lambda d: torch.empty(3, 0, device=d).t(), "packed"),
    "contiguous": _everywhere(lambda d: ramp(d, 2, 3), "packed"),
    "transposed": _everywhere(lambda d: ramp(d, 3, 5).t(), "packed"),
    "permuted": _everywhere(lambda d: ramp(d, 2, 3, 4).permute(1, 2, 0), "packed"),
    "channels_last": _everywhere(
        lambda d: ramp(d, 2, 3, 4, 5).contiguous(memory_format=torch.channels_last), "packed"
    ),
    "channels_last_3d": _everywhere(
        lambda d: ramp(d, 2, 3, 2, 2, 3).contiguous(memory_format=torch.channels_last_3d), "packed"
    ),
    "view in the middle of a storage": _everywhere(lambda d: ramp(d, 10)[3:7], "packed"),
    "one element with an odd stride": _everywhere(lambda d: ramp(d, 9)[2::7][:1], "packed"),
    "exactly 256 KiB": _everywhere(lambda d: ramp(d, 65536), "packed", large=True),
    "more than 256 KiB": _everywhere(lambda d: ramp(d, 65537), "alone", large=True),
    "several staging buffers": _everywhere(lambda d: ramp(d, _MANY + 5), "alone", large=True),
    "same tensor twice": _everywhere(lambda d: [ramp(d, 3)] * 2, "packed", leaves=2),
    "views of one storage": _everywhere(
        lambda d: [(base := ramp(d, 8))[:4], base[2:], base.view(2, 4)], "packed", leaves=3
    ),
    "in shared memory": _on_host(lambda: ramp("cpu", 6).share_memory_(), "packed"),
    "pinned": _on_host(lambda: ramp("cpu", 6).pin_memory(), "packed"),
    "memory-mapped by `torch.from_file`": _on_host(_from_file, "packed"),
    "copy-on-write": _everywhere(
        lambda d: torch._lazy_clone(ramp(d, 3)), "packed", needs="torch._lazy_clone"
    ),
    "`nn.Buffer`": _everywhere(lambda d: torch.nn.Buffer(ramp(d, 3)), "packed"),
    "inference tensor": _everywhere(_in_inference_mode, "packed"),
    "on the target": _everywhere(lambda d: ramp(d, 3), "reused", on_target=True),
    "on the target, strided": _everywhere(lambda d: ramp(d, 6)[::2], "reused", on_target=True),
}

_STRIDED = {
    "gapped": _everywhere(lambda d: ramp(d, 4, 6)[:, ::2], "packed"),
    "gapped rows, transposed": _everywhere(lambda d: ramp(d, 4, 6)[1:3].t()[2:], "packed"),
    "diagonal": _everywhere(lambda d: ramp(d, 4, 4).diagonal(), "packed"),
    "real part of complex": _everywhere(lambda d: _complex(d).real, "packed"),
    "expanded": _everywhere(lambda d: ramp(d, 1, 4).expand(3, 4), "packed"),
    "expanded 0-dim": _everywhere(lambda d: torch.tensor(2.5).to(d).expand(2, 3), "packed"),
    "expanded in the middle, transposed": _everywhere(
        lambda d: ramp(d, 3, 1, 4).expand(3, 2, 4).transpose(0, 2), "packed"
    ),
    "overlapping": _everywhere(lambda d: ramp(d, 6).as_strided((4, 3), (1, 1)), "packed"),
    "windows of `unfold`": _everywhere(lambda d: ramp(d, 9).unfold(0, 4, 2), "packed"),
    "channels_last, cropped": _everywhere(
        lambda d: ramp(d, 2, 3, 4, 5).contiguous(memory_format=torch.channels_last)[..., 1:3],
        "packed",
    ),
    "gapped, of more than 256 KiB": _everywhere(
        lambda d: ramp(d, 70_000, 2)[:, 0], "alone", large=True
    ),
    "gapped, of several staging buffers": _everywhere(  # rows of 2,998 bytes: windows cut them
        lambda d: ramp(d, 4099, 1000)[:, 1:].t(), "alone", large=True
    ),
    "expanded to several staging buffers": _everywhere(
        lambda d: ramp(d, 1, 1001).expand(2200, 1001), "alone", large=True
    ),
}

_GRADIENTS = {
    "requires grad": _everywhere(lambda d: ramp(d, 4).requires_grad_(), "delegated"),
    "result of an operation with a gradient": _everywhere(
        lambda d: ramp(d, 4).requires_grad_() * 2, "delegated"
    ),
    "requires grad, in `no_grad`": _everywhere(
        lambda d: ramp(d, 4).requires_grad_(), "packed", within=torch.no_grad
    ),
    "requires grad, in `inference_mode`": _everywhere(
        lambda d: ramp(d, 4).requires_grad_(), "packed", within=torch.inference_mode
    ),
    "parameter": _everywhere(lambda d: torch.nn.Parameter(ramp(d, 4)), "delegated"),
    "parameter without gradient": _everywhere(
        lambda d: torch.nn.Parameter(ramp(d, 4), requires_grad=False), "packed"
    ),
    "parameter, in `no_grad`": _everywhere(
        lambda d: torch.nn.Parameter(ramp(d, 4)), "packed", within=torch.no_grad
    ),
    "forward gradient": _everywhere(_dual, "delegated", within=_dual_level),
}

_DELEGATED = {
    "conjugate view": _everywhere(lambda d: _complex(d).conj(), "delegated"),
    "negative view": _everywhere(lambda d: _complex(d).conj().imag, "delegated"),
    "zero tensor of autograd": _on_host(lambda: torch._efficientzerotensor(3), "delegated"),
    "tensor subclass": _everywhere(lambda d: ramp(d, 3).as_subclass(Labelled), "delegated"),
    "subclass with `__torch_function__`": _everywhere(
        lambda d: ramp(d, 3).as_subclass(Loud), "delegated"
    ),
    "wrapper subclass": _everywhere(_two_tensor, "delegated"),
    "fake tensor": _everywhere(_fake, "delegated"),
    "meta tensor": _on_host(
        lambda: torch.empty(3, device="meta"), "delegated", fails=NotImplementedError
    ),
    "named": _everywhere(
        lambda d: ramp(d, 3).refine_names("n"), "delegated", needs="torch.Tensor.refine_names"
    ),
    "sparse COO": _everywhere(
        lambda d: torch.eye(3).to_sparse().to(d), "delegated", lacking=_NO_SPARSE
    ),
    "sparse CSR": _everywhere(
        lambda d: torch.eye(3).to_sparse_csr().to(d), "delegated", lacking=_NO_SPARSE
    ),
    "sparse BSC": _everywhere(
        lambda d: torch.eye(4).to_sparse_bsc((2, 2)).to(d), "delegated", lacking=_NO_SPARSE
    ),
    "quantized": _everywhere(
        lambda d: _quantized(per_channel=False).to(d), "delegated", lacking=_NO_QUANTIZED
    ),
    "quantized per channel": _everywhere(
        lambda d: _quantized(per_channel=True).to(d), "delegated", lacking=_NO_QUANTIZED
    ),
    "nested, strided": _everywhere(_strided_nested, "delegated", lacking=_NO_NESTED),
    "nested, jagged": _everywhere(_jagged_nested, "delegated"),
    "TensorDict": _everywhere(_tensordict, "delegated", needs="tensordict"),
    "tensorclass": _everywhere(_tensorclass, "delegated", needs="tensordict"),
    "any tensor, inside `vmap`": _everywhere(
        lambda d: ramp(d, 3), "delegated", within=_inside_vmap
    ),
    "any tensor, under a torch function mode": _everywhere(
        lambda d: ramp(d, 3), "delegated", within=_function_mode
    ),
    "any tensor, under a dispatch mode": _everywhere(
        lambda d: ramp(d, 3), "delegated", within=_dispatch_mode
    ),
}

_REFUSED = {
    "storage resized to nothing": _everywhere(lambda d: _shortened(d, 0), ValueError),
    "storage resized to a part": _everywhere(lambda d: _shortened(d, 23), ValueError),
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
    "numpy": _on_host(lambda: np.arange(6, dtype=np.float32).reshape(2, 3), "packed"),
    "numpy, 0-dim": _on_host(lambda: np.array(2.5), "packed"),
    "numpy, no elements": _on_host(lambda: np.empty((0, 3), np.int32), "packed"),
    "numpy, Fortran order": _on_host(
        lambda: np.asfortranarray(np.arange(6.0).reshape(2, 3)), "packed"
    ),
    "numpy, permuted": _on_host(
        lambda: np.arange(24.0).reshape(2, 3, 4).transpose(1, 0, 2), "packed"
    ),
    "numpy, gapped": _on_host(lambda: np.arange(24.0).reshape(4, 6)[:, ::2], "packed"),
    "numpy, broadcast": _on_host(lambda: np.broadcast_to(np.arange(3.0), (2, 3)), "packed"),
    "numpy, reversed": _on_host(lambda: np.arange(24).reshape(4, 6)[::-1, ::-2], "packed"),
    "numpy, strides that its elements do not divide": _on_host(_field, "packed"),
    "numpy, unaligned": _on_host(_unaligned, "packed"),
    "numpy, big-endian": _on_host(lambda: np.arange(6, dtype=">i4").reshape(2, 3), "packed"),
    "numpy, big-endian, reversed": _on_host(lambda: np.arange(5, dtype=">f8")[::-1], "packed"),
    "numpy, big-endian, 0-dim": _on_host(lambda: np.array(7, ">c16"), "packed"),
    "numpy, read-only": _on_host(_read_only, "packed"),
    "numpy, memory-mapped": _on_host(_memmap, "packed"),
    "numpy, subclass": _on_host(lambda: np.arange(3.0).view(np.recarray), "packed"),
    "numpy, of more than 256 KiB": _on_host(
        lambda: np.arange(65537, dtype=np.int32), "alone", large=True
    ),
    "numpy, reversed, of several staging buffers": _on_host(
        lambda: np.arange(_MANY, dtype=np.float32).reshape(1536, -1)[::-1, ::-1], "alone",
        large=True,
    ),
    "numpy, longdouble": _on_host(lambda: np.zeros(2, np.longdouble), TypeError),
    "numpy, clongdouble": _on_host(lambda: np.zeros(2, np.clongdouble), TypeError),
    "numpy, a dtype of an extension's": _on_host(_user_dtype, TypeError, needs="ml_dtypes"),
    "numpy, objects": _on_host(lambda: np.array([None, "a"], object), "opaque"),
    "numpy, text": _on_host(lambda: np.array(["a", "b"]), "opaque"),
    "numpy, bytes": _on_host(lambda: np.array([b"a", b"b"]), "opaque"),
    "numpy, text of any length": _on_host(
        lambda: np.array(["a", "bc"], np.dtypes.StringDType()), "opaque",
        needs="numpy.dtypes.StringDType",
    ),
    "numpy, dates": _on_host(lambda: np.array(["2020-01-01"], "datetime64[D]"), "opaque"),
    "numpy, durations": _on_host(lambda: np.array([3], "timedelta64[s]"), "opaque"),
    "numpy, structured": _on_host(lambda: np.zeros(2, [("x", float)]), "opaque"),
    "numpy, masked": _on_host(lambda: np.ma.masked_array([1.0, 2.0], [True, False]), "opaque"),
}  # fmt: skip

# ---- opaque values -------------------------------------------------------------------------------

_OPAQUE = {
    "`None`": _value(lambda: None),
    "number, text, bytes": Kind(
        lambda _device: [1, 2.5, True, 1j, "text", b"bytes"],
        "opaque", "opaque", "opaque", leaves=6,
    ),
    "numpy scalar": _value(lambda: np.float32(1.5)),
    "`torch.Size`": _value(lambda: torch.Size([2, 3])),
    "object of any other class": _value(object),
}  # fmt: skip

KINDS: dict[str, Kind] = _DENSE | _STRIDED | _GRADIENTS | _DELEGATED | _REFUSED | _ARRAYS | _OPAQUE

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
