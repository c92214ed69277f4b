"""Tensorclasses, values that are not tensors, and the other classes of TensorDict."""

from __future__ import annotations

import contextlib
import os
import warnings
from typing import Any

import numpy as np
import tensordict
import torch
from catalogue import ramp
from tensordict import (
    MetaData,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictParams,
    lazy_stack,
    set_lazy_legacy,
)
from tensordict_classes import (
    Cast,
    Checked,
    Clip,
    Decorated,
    Frames,
    Frozen,
    FrozenShadowing,
    FrozenState,
    LongerState,
    OnlyTensors,
    Shadowing,
    State,
    Uncast,
    WithMethods,
)
from tensordict_kind import TdKind, anywhere, delegated, opaque, packed
from tensordict_kinds_of_leaves import flat

# ---- tensorclasses -------------------------------------------------------------------------------


def _frames(device: str, **more: Any) -> Frames:
    return Frames(**{"pixels": ramp(device, 2, 3), "batch_size": [2], "device": device} | more)


def _clip(device: str) -> Clip:
    inner = _frames(device, label="dog", mask=ramp(device, 2))
    return Clip(pixels=ramp(device, 2), inner=inner, batch_size=[2], device=device)


def _cast(device: str) -> Cast:
    return Cast(ramp(device, 2), 1.5, "name", np.arange(3), batch_size=[], device=device)


def _within(device: str) -> TensorDict:
    return TensorDict({"frames": _frames(device), "a": ramp(device, 2)}, [2], device=device)


_TWO = {"batch_size": [2]}

TENSORCLASSES: dict[str, TdKind] = {
    "tensorclass by decorator": anywhere(
        lambda d: Decorated(ramp(d, 2, 3), label="cat", mask=ramp(d, 2), device=d, **_TWO),
        packed(2, opaque=1),
    ),
    "tensorclass by base class": anywhere(
        lambda d: _frames(d, mask=ramp(d, 2)), packed(2, opaque=1)
    ),
    "tensorclass, a field left out": anywhere(_frames, packed(1, opaque=1)),
    "tensorclass, device None": anywhere(
        lambda d: Frames(ramp(d, 2), batch_size=[2]), packed(1, opaque=1)
    ),
    "tensorclass, locked": anywhere(lambda d: _frames(d).lock_(), packed(1, opaque=1)),
    "tensorclass, names": anywhere(lambda d: _frames(d, names=["time"]), packed(1, opaque=1)),
    "tensorclass, an object in a field": anywhere(
        lambda d: _frames(d, label=object()), packed(1, opaque=1)
    ),
    "tensorclass, a tensor where the class says text": anywhere(
        lambda d: _frames(d, label=ramp(d, 2)), packed(2)
    ),
    "tensorclass, a TensorDict in a field": anywhere(
        lambda d: _frames(d, label=flat(d)), packed(3)
    ),
    "tensorclass in a tensorclass, inherited": anywhere(_clip, packed(3, opaque=2)),
    "tensorclass in a TensorDict": anywhere(_within, packed(2, opaque=1)),
    "tensorclass in a TensorDict, locked": anywhere(
        lambda d: _within(d).lock_(), packed(2, opaque=1)
    ),
    "tensorclass, autocast": anywhere(_cast, packed(2, opaque=2)),
    "tensorclass, nocast": anywhere(
        lambda d: Uncast(ramp(d, 2), 3, [1, 2], device=d, **_TWO), packed(2, opaque=1)
    ),
    "tensorclass, frozen": anywhere(
        lambda d: Frozen(ramp(d, 2), device=d, **_TWO), packed(1, opaque=1)
    ),
    "tensorclass, tensors only": anywhere(
        lambda d: OnlyTensors(ramp(d, 2), mask=ramp(d, 2, 3), device=d, **_TWO), packed(2)
    ),
    "tensorclass, fields that shadow methods": anywhere(
        lambda d: Shadowing(keys=ramp(d, 2), values=ramp(d, 2, 3), device=d, **_TWO), packed(2)
    ),
    "tensorclass, frozen, fields that shadow methods": anywhere(
        lambda d: FrozenShadowing(items=ramp(d, 2), device=d, **_TWO), packed(1, opaque=1)
    ),
    "tensorclass with `__post_init__`": anywhere(
        lambda d: Checked(ramp(d, 2, 3), device=d, **_TWO), delegated()
    ),
    "tensorclass with methods": anywhere(
        lambda d: WithMethods(ramp(d, 2, 3), device=d, **_TWO), packed(1)
    ),
    "tensorclass, indexed": anywhere(lambda d: _clip(d)[0], packed(3, opaque=2)),
    "tensorclass, stacked": anywhere(
        lambda d: torch.stack([_frames(d), _frames(d)]), packed(1, opaque=2)
    ),
    "tensorclass, lazily stacked, within": anywhere(
        lambda d: TensorDict({"s": lazy_stack([_frames(d), _frames(d, label="dog")])}, [2]),
        packed(2, opaque=2),
    ),
    "tensorclass that requires grad": anywhere(
        lambda d: _frames(d, mask=ramp(d, 2).requires_grad_()), delegated(1, packed=1, opaque=1)
    ),
}

# ---- values that are not tensors -----------------------------------------------------------------


def _holding(value: Any, device: str) -> TensorDict:
    data = {"a": ramp(device, 2), "value": value, "b": ramp(device, 2)}
    return TensorDict(data, [2], device=device)


def _hidden_tensors(device: str) -> NonTensorData:
    return NonTensorData(data={"hidden": [ramp(device, 3)]}, batch_size=[2])


def _texts(*texts: str) -> NonTensorStack:
    return NonTensorStack(*[NonTensorData(data=text) for text in texts])


def _set_later(device: str) -> TensorDict:
    td = flat(device)
    td.set_non_tensor("value", {"any": "thing"})
    return td


_WITH_ONE = packed(2, opaque=1)

NON_TENSOR: dict[str, TdKind] = {
    "text": anywhere(lambda d: _holding("word", d), _WITH_ONE),
    "text, locked": anywhere(lambda d: _holding("word", d).lock_(), _WITH_ONE),
    "text, device None": anywhere(
        lambda d: TensorDict({"value": "word", "a": ramp(d, 2)}, [2]), packed(1, opaque=1)
    ),
    "`set_non_tensor`": anywhere(_set_later, _WITH_ONE),
    "NonTensorData": anywhere(
        lambda d: _holding(NonTensorData(data=object(), batch_size=[2]), d), _WITH_ONE
    ),
    "NonTensorData of `None`": anywhere(
        lambda d: _holding(NonTensorData(data=None, batch_size=[2]), d), _WITH_ONE
    ),
    "NonTensorData with tensors in it": anywhere(
        lambda d: _holding(_hidden_tensors(d), d), _WITH_ONE
    ),
    "NonTensorData with a TensorDict in it": anywhere(
        lambda d: _holding(NonTensorData(data={"td": flat(d)}, batch_size=[2]), d), _WITH_ONE
    ),
    "NonTensorData as the root": anywhere(
        lambda d: NonTensorData(data=["word"], batch_size=[2], device=d), opaque()
    ),
    "NonTensorData as the root, device None": anywhere(
        lambda _: NonTensorData(data=["word"], batch_size=[2]), opaque()
    ),
    "MetaData": anywhere(
        lambda d: _holding(MetaData(data={"fps": 30}, batch_size=[2]), d), _WITH_ONE
    ),
    "NonTensorStack": anywhere(lambda d: _holding(_texts("x", "y"), d), packed(2, opaque=2)),
    "NonTensorStack, locked": anywhere(
        lambda d: _holding(_texts("x", "y"), d).lock_(), packed(2, opaque=2)
    ),
    "NonTensorStack as the root": anywhere(lambda _: _texts("x", "y", "z"), opaque(3)),
    "NonTensorStack of NonTensorStacks": anywhere(
        lambda d: TensorDict(
            {"t": NonTensorStack(_texts("a", "b"), _texts("c", "d"))}, [2], device=d
        ),
        opaque(4),
    ),
    "lazy stack of TensorDicts with tensors hidden in values": anywhere(
        lambda d: lazy_stack([_holding(_hidden_tensors(d), d) for _ in range(2)]),
        packed(4, opaque=2),
    ),
    "same value in all of a lazy stack": anywhere(
        lambda d: lazy_stack([_holding("same", d) for _ in range(2)]), packed(4, opaque=2)
    ),
}

# ---- other classes -------------------------------------------------------------------------------


def _params(device: str) -> TensorDictParams:
    data = {"w": torch.nn.Parameter(ramp(device, 2, 3)), "x": {"b": ramp(device, 2)}}
    return TensorDictParams(TensorDict(data, []))


def _params_of_a_module(device: str) -> Any:
    torch.manual_seed(0)
    return TensorDict.from_module(torch.nn.Linear(2, 3).to(device))


def _sub(device: str) -> Any:
    return _two_rows(device)._get_sub_tensordict(slice(0, 1))


def _two_rows(device: str) -> TensorDict:
    return TensorDict({"a": ramp(device, 2, 1, 3), "x": {"b": ramp(device, 2, 1)}}, [2, 1],
                      device=device)  # fmt: skip


def _legacy(name: str, *arguments: Any, lock: bool = False) -> TdKind:
    """A kind made by a method of this name in the mode where it returns lazy views."""

    def make(device: str) -> Any:
        with _lazy_legacy():
            source = _two_rows(device)
            return getattr(source.lock_() if lock else source, name)(*arguments)

    return anywhere(make, delegated())


@contextlib.contextmanager
def _lazy_legacy():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The legacy lazy mode", DeprecationWarning)
        with set_lazy_legacy(True):
            yield
    # It leaves the text of None there, which tensordict cannot read in a new process.
    if os.environ.get("LAZY_LEGACY_OP") == "None":
        del os.environ["LAZY_LEGACY_OP"]


_LEFT_WHERE_IT_IS = (
    dict.fromkeys(("cpu", "sim", "cuda"), "its own `.to` leaves it where it is before 0.15")
    if tensordict.__version__.startswith("0.14")
    else {}
)

CLASSES: dict[str, TdKind] = {
    "TensorDictParams": anywhere(_params, delegated()),
    "TensorDictParams, in `no_grad`": anywhere(_params, delegated(), within=torch.no_grad),
    "TensorDictParams, locked": anywhere(lambda d: _params(d).lock_(), delegated()),
    "TensorDictParams in a TensorDict": anywhere(
        lambda d: TensorDict({"p": _params(d), "a": ramp(d, 2)}, []), delegated(1, packed=1)
    ),
    "TensorDict of a module": anywhere(_params_of_a_module, delegated(2)),
    "TypedTensorDict": anywhere(
        lambda d: State(eta=ramp(d, 2, 3), x=ramp(d, 2), device=d, **_TWO), packed(2)
    ),
    "TypedTensorDict, inherited, nested": anywhere(
        lambda d: LongerState(
            eta=ramp(d, 2),
            x=ramp(d, 2),
            device=d,
            **_TWO,
            nested=State(eta=ramp(d, 2), x=ramp(d, 2), device=d, **_TWO),
        ),
        packed(4),
    ),
    "TypedTensorDict, frozen": anywhere(
        lambda d: FrozenState(eta=ramp(d, 2), device=d, **_TWO), packed(1)
    ),
    "TypedTensorDict of a lazy stack": anywhere(
        lambda d: State.from_tensordict(
            lazy_stack([TensorDict({"eta": ramp(d, 2), "x": ramp(d, 2)}, [2], device=d)] * 2)
        ),
        packed(4),
        lacking=_LEFT_WHERE_IT_IS,
    ),
    "TypedTensorDict in a TensorDict": anywhere(
        lambda d: TensorDict({"s": State(eta=ramp(d, 2), x=ramp(d, 2), **_TWO)}, [2], device=d),
        packed(2),
    ),
    "sub-tensordict": anywhere(_sub, delegated()),
    "sub-tensordict in a TensorDict": anywhere(
        lambda d: TensorDict({"s": _sub(d), "a": ramp(d, 1)}, [1], device=d),
        delegated(1, packed=1),
    ),
    "lazy view": _legacy("view", 2),
    "lazy permutation": _legacy("permute", 1, 0),
    "lazy transposition": _legacy("transpose", 0, 1),
    "lazy `unsqueeze`": _legacy("unsqueeze", 0),
    "lazy `squeeze`": _legacy("squeeze", 1),
    "lazy view of a locked one": _legacy("view", 2, lock=True),
}
