"""Shared by several tests: the oracle, and programs in a process of their own."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import os
import subprocess
import sys
import textwrap
import time
import warnings
from collections import UserDict, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as fwad
from container_classes import REBUILD, Box, Node
from fork_server import run_forked
from torch.multiprocessing.reductions import StorageWeakRef


def oracle(tree: Any, device: str) -> Any:
    """Returns the expected result: `.to` of each leaf, in containers of the same types."""
    if isinstance(tree, torch.Tensor) or is_collection(tree):
        return tree.to(device)
    if isinstance(tree, np.ndarray):
        if np.ma.isMaskedArray(tree) or tree.dtype.kind not in "biufc":
            return tree
        return _tensor_of(tree).to(device)
    rebuild = REBUILD.get(type(tree))
    return tree if rebuild is None else rebuild(tree, lambda child: oracle(child, device))


def is_collection(value: Any) -> bool:
    """Whether it is a TensorDict or a tensorclass."""
    return hasattr(value, "batch_size") and hasattr(value, "to_dict")


def _tensor_of(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Returns `torch.from_numpy`, of a copy in C order if torch does not support the array."""
    if not array.dtype.isnative or any(s < 0 or s % array.itemsize for s in array.strides):
        array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        return torch.from_numpy(array)


def assert_same(
    got: Any, expected: Any, path: str = "data", is_same: Callable[[Any, Any], bool] = operator.is_
) -> None:
    """Asserts equal structure, class, dtype, shape, stride, device, grad flag, layout and value.

    `is_same` compares values that are no tensors, for example with `==` after another process.
    """
    assert type(got) is type(expected), f"{path}: {type(got)} is not {type(expected)}"
    if isinstance(expected, torch.Tensor):
        _assert_same_tensor(got, expected, path)
    elif is_collection(expected):
        assert got.batch_size == expected.batch_size, path
        assert got.device == expected.device, path
        assert set(got.keys()) == set(expected.keys()), path
        for key in expected.keys():  # noqa: SIM118  # iterating over it would index it
            assert_same(got.get(key), expected.get(key), f"{path}[{key!r}]", is_same)
    elif type(expected) in REBUILD:
        _assert_same_container(got, expected, path, is_same)
    else:
        assert is_same(got, expected), f"{path}: not the same object"


def _assert_same_tensor(got: torch.Tensor, expected: torch.Tensor, path: str) -> None:
    names = ["dtype", "layout", "device", "requires_grad", "is_leaf", "is_quantized"]
    if not expected.is_nested:  # it has no shape, or one that is made anew; see below
        names.append("shape")
    for name in names:
        seen, wanted = getattr(got, name), getattr(expected, name)
        assert seen == wanted, f"{path}: {name} is {seen}, not {wanted}"
    for name in ("is_inference", "is_conj", "is_neg"):
        seen, wanted = getattr(got, name)(), getattr(expected, name)()
        assert seen == wanted, f"{path}: {name}() is {seen}, not {wanted}"
    tangents = [fwad.unpack_dual(tensor).tangent for tensor in (got, expected)]
    if tangents != [None, None]:
        assert_same(*tangents, f"the tangent of {path}")
    parts = getattr(expected, "__tensor_flatten__", None)
    if parts is not None:
        names = parts()[0]
        assert got.__tensor_flatten__()[0] == names, path
        for name in names:
            assert_same(getattr(got, name), getattr(expected, name), f"{path}.{name}")
    elif isinstance(expected, torch._subclasses.FakeTensor):
        assert got.stride() == expected.stride(), path
    elif expected.is_nested:
        for i, (a, b) in enumerate(zip(got.unbind(0), expected.unbind(0), strict=True)):
            assert_same(a, b, f"{path}.unbind()[{i}]")
    elif expected.layout != torch.strided:
        assert torch.equal(got.cpu().to_dense(), expected.cpu().to_dense()), path
    elif expected.is_quantized:
        assert torch.equal(got.cpu().dequantize(), expected.cpu().dequantize()), path
    else:
        steps = f"{path}: strides are {got.stride()}, not {expected.stride()}"
        assert got.stride() == expected.stride(), steps
        assert same_bytes(got, expected), f"{path}: values differ"


def _assert_same_container(
    got: Any, expected: Any, path: str, is_same: Callable[[Any, Any], bool]
) -> None:
    for name in ("default_factory", "maxlen", "version", "number", "tm_zone"):
        assert getattr(got, name, None) == getattr(expected, name, None), f"{path}.{name}"
    if isinstance(expected, (dict, UserDict)):
        assert list(got) == list(expected), path
        for key, value in expected.items():
            assert_same(got[key], value, f"{path}[{key!r}]", is_same)
    elif isinstance(expected, (list, tuple, deque)):
        assert len(got) == len(expected), path
        for index, value in enumerate(expected):
            assert_same(got[index], value, f"{path}[{index}]", is_same)
    if isinstance(expected, (Box, Node)):
        assert_same(got.children, expected.children, f"{path}.children", is_same)
    elif dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            assert hasattr(got, field.name) == hasattr(expected, field.name), path
            if hasattr(expected, field.name):
                value = getattr(expected, field.name)
                assert_same(getattr(got, field.name), value, f"{path}.{field.name}", is_same)
    attributes, wanted = getattr(got, "__dict__", {}), getattr(expected, "__dict__", {})
    assert attributes.keys() == wanted.keys(), f"{path}: attributes {list(attributes)}"
    for name, value in wanted.items():
        if isinstance(value, (str, int)):
            assert attributes[name] == value, f"{path}.{name}"


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether they are equal bit for bit, NaNs included."""
    if a.shape != b.shape:
        return False
    flat = [_flat_bytes(each) for each in (a, b)]
    if not any(each.numel() % 8 or each.storage_offset() % 8 for each in flat):
        flat = [each.view(torch.int64) for each in flat]  # compared six times as fast
    return torch.equal(*flat)


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    if getattr(plain, "has_names", bool)():  # removed in torch 2.13
        plain = plain.rename(None)
    if plain.numel() < 2 or not plain.is_contiguous():  # strides of one element may be any
        plain = torch.empty(plain.shape, dtype=plain.dtype).copy_(plain)
    return plain.reshape(-1).view(torch.uint8)


def memory_reference(tensor: torch.Tensor) -> Callable[[], Any]:
    """Returns a function that returns None once the tensor's memory was freed, like a `ref`."""
    reference = StorageWeakRef(tensor.untyped_storage())
    return lambda: None if reference.expired() else reference


def are_released(references: list[Callable[[], Any]], within: float = 10.0) -> bool:
    """Whether all references die soon, without any further call to tdcopier.

    A pending call of the interpreter does this when the main thread next takes the GIL,
    for example after each torch operation.
    """
    scratch = torch.zeros(10)
    deadline = time.monotonic() + within
    while any(reference() is not None for reference in references):
        if time.monotonic() > deadline:
            return False
        scratch.add_(1)
        time.sleep(0.0002)
    return True


def comes_true(is_so: Callable[[], bool], within: float = 10.0) -> bool:
    """Whether it is so soon: another thread or process makes it so."""
    deadline = time.monotonic() + within
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


@contextlib.contextmanager
def raises_exactly(error: type[BaseException], message: str) -> Iterator[None]:
    """Asserts that the block raises this error, and that the message is its whole text."""
    with pytest.raises(error) as caught:
        yield
    assert str(caught.value) == message


def run_python(code: str, timeout_s: float = 120, **environment: str) -> str:
    """Runs a program in a process of its own; returns its output, fails unless it exits with 0.

    Torch is imported already, unless the program is given variables that Python or torch may have
    read by then, or a library is loaded first (a sanitizer does not follow a fork).
    """
    done = _run(textwrap.dedent(code), timeout_s, environment)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_module(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs ``python -W error -m`` with this module, in a process as for `run_python`."""
    code = f"""
import runpy, sys
sys.argv[:] = {["", *arguments]!r}
runpy.run_module({name!r}, run_name="__main__", alter_sys=True)
"""
    return _run(code, 100, environment)


def run_program(path: str, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Runs a file as a program, in a process as for `run_python`."""
    code = f"""
import sys
sys.argv[:] = {[path, *arguments]!r}
with open({path!r}, encoding="utf-8") as file:
    text = file.read()
exec(compile(text, {path!r}, "exec"))
"""
    return _run(code, timeout_s, {})


def _run(
    code: str, timeout_s: float, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, **environment}
    read_later = all(
        name.startswith("TDCOPIER_") or name == "CUDA_VISIBLE_DEVICES" for name in environment
    )
    if read_later and "LD_PRELOAD" not in variables:
        return run_forked(code, timeout_s, variables)
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-W", "error", "-c", code],
        env=variables,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
