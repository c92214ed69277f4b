"""TensorDicts with every kind of leaf: how to make them, and how the leaf is copied."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from catalogue import DTYPES, KINDS, ramp
from tensordict import TensorDict, UnbatchedTensor
from tensordict_classes import Labelled
from tensordict_kind import Counts, TdKind, anywhere, delegated, host_only, packed

__all__ = ["LEAVES", "flat", "ramp"]


def flat(device: str) -> TensorDict:
    return TensorDict({"a": ramp(device, 2, 3), "b": ramp(device, 2)}, [2], device=device)


def beside(leaf: Any, device: str | None, batch_size: Any = ()) -> TensorDict:
    """Returns a TensorDict with the leaf in a nested node, between plain leaves."""
    shape = (*batch_size, 2)
    inner = TensorDict({"leaf": leaf, "after": ramp(device or "cpu", *shape)}, batch_size)
    return TensorDict({"before": ramp(device or "cpu", *shape), "inner": inner}, batch_size,
                      device=device)  # fmt: skip


def _of_catalogue(name: str, counts: Counts, *, not_to_meta: bool = False) -> TdKind:
    """Returns the kind for the leaf of this name in the catalogue of leaves."""
    kind = KINDS[name]
    lacking = kind.lacking | (_NO_META if not_to_meta else {})
    more = {"within": kind.within, "lacking": lacking, "needs": kind.needs}
    if kind.d2h == "-":
        return host_only(lambda: beside(kind.make("cpu"), "cpu"), counts, **more)
    return anywhere(lambda d: beside(kind.make(d), d), counts, **more)


def _every_dtype(device: str) -> TensorDict:
    bits = torch.arange(32, dtype=torch.uint8) % 2
    leaves = {n: bits.to(t) if n == "bool" else bits.view(t) for n, t in DTYPES.items()}
    return TensorDict({name: leaf.to(device) for name, leaf in leaves.items()}, device=device)


def _strided(device: str) -> TensorDict:
    base = ramp(device, 4, 6, 2)
    leaves = {
        "transposed": base[:, :4].transpose(0, 1),
        "gapped": base[:, ::2],
        "expanded": base[:, :1].expand(4, 5, 2),
        "row": base[:, 0, 0],
        "windows": ramp(device, 9).unfold(0, 4, 2)[:1].expand(4, 4),
        "channels_last": ramp(device, 4, 3, 2, 5).contiguous(memory_format=torch.channels_last),
    }
    return TensorDict(leaves, [4], device=device)


def _unbatched(device: str) -> TensorDict:
    leaf = UnbatchedTensor(ramp(device, 7))
    return TensorDict({"a": ramp(device, 2), "table": leaf}, [2], device=device)


def _in(make: Callable[[str], torch.Tensor], batch_size: Any = ()) -> Callable[[str], TensorDict]:
    return lambda device: beside(make(device), device, batch_size)


def _values_of_python(device: str) -> TensorDict:
    values = {"number": 3, "float": 2.5, "flag": True, "list": [1, 2], "array": np.arange(3.0)}
    return TensorDict(values, device=device)


@contextlib.contextmanager
def _default_dtype_double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


_BESIDE = 2
"""Number of plain leaves beside the one in question."""
_THREE = packed(_BESIDE + 1)
_ONE_DELEGATED = delegated(1, packed=_BESIDE)
_NO_META = {"meta": "torch has no such tensors on meta"}

LEAVES: dict[str, TdKind] = {
    "leaves of every dtype": anywhere(_every_dtype, packed(len(DTYPES))),
    "strided leaves": anywhere(_strided, packed(6)),
    "values of Python and numpy": anywhere(_values_of_python, packed(5)),
    "leaf without elements": anywhere(_in(lambda d: ramp(d, 3, 0, 2)), _THREE),
    "double by default": anywhere(
        _in(lambda d: ramp(d, 3).double()), _THREE, within=_default_dtype_double
    ),
    "pinned leaf": _of_catalogue("pinned", _THREE),
    "leaf in shared memory": _of_catalogue("in shared memory", _THREE),
    "leaf of `torch.from_file`": _of_catalogue("memory-mapped by `torch.from_file`", _THREE),
    "copy-on-write leaf": _of_catalogue("copy-on-write", _THREE),
    "inference tensor": _of_catalogue("inference tensor", _THREE),
    "buffer": _of_catalogue("`nn.Buffer`", _THREE),
    "leaf that requires grad": _of_catalogue("requires grad", _ONE_DELEGATED),
    "leaf that is the result of an operation with a gradient": _of_catalogue(
        "result of an operation with a gradient", _ONE_DELEGATED
    ),
    "leaf that requires grad, in `no_grad`": _of_catalogue("requires grad, in `no_grad`", _THREE),
    "leaf that requires grad, in `inference_mode`": _of_catalogue(
        "requires grad, in `inference_mode`", _THREE
    ),
    "leaf that requires grad, locked": anywhere(
        lambda d: beside(ramp(d, 3).requires_grad_(), d).lock_(), _ONE_DELEGATED
    ),
    "parameter": _of_catalogue("parameter", _ONE_DELEGATED),
    "parameter without gradient": _of_catalogue("parameter without gradient", _THREE),
    "parameter, in `no_grad`": _of_catalogue("parameter, in `no_grad`", _THREE),
    "conjugate view": _of_catalogue("conjugate view", _ONE_DELEGATED),
    "negative view": _of_catalogue("negative view", _ONE_DELEGATED),
    "tensor subclass": anywhere(_in(lambda d: ramp(d, 3).as_subclass(Labelled)), _ONE_DELEGATED),
    "wrapper subclass": _of_catalogue("wrapper subclass", _ONE_DELEGATED),
    "sparse COO": _of_catalogue("sparse COO", _ONE_DELEGATED),
    "sparse CSR": _of_catalogue("sparse CSR", _ONE_DELEGATED),
    "quantized": _of_catalogue("quantized", _ONE_DELEGATED, not_to_meta=True),
    "nested tensor, strided": _of_catalogue("nested, strided", _ONE_DELEGATED, not_to_meta=True),
    "nested tensor, jagged": _of_catalogue("nested, jagged", packed(_BESIDE + 2)),
    "jagged leaf at the root, locked": anywhere(
        lambda d: TensorDict({"j": KINDS["nested, jagged"].make(d)}, device=d).lock_(), packed(2)
    ),
    "unbatched tensor": anywhere(_unbatched, packed(2)),
    "unbatched tensor, locked": anywhere(lambda d: _unbatched(d).lock_(), packed(2)),
    "any, under a function mode": anywhere(
        flat, delegated(), within=KINDS["any tensor, under a torch function mode"].within
    ),
    "any, under a dispatch mode": anywhere(
        flat, delegated(), within=KINDS["any tensor, under a dispatch mode"].within
    ),
}
