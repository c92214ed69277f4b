"""What several tests need: the oracle, and runs in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import torch


def oracle(tree: Any, device: str) -> Any:
    """What the copy must equal: `.to` leaf by leaf, in containers of the same types."""
    if isinstance(tree, torch.Tensor):
        return tree.to(device)
    if isinstance(tree, np.ndarray):
        return torch.from_numpy(tree).to(device)
    if type(tree) is dict:
        return {key: oracle(value, device) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(oracle(value, device) for value in tree)
    return tree


def assert_same(got: Any, expected: Any, path: str = "data") -> None:
    """Same structure, class, dtype, shape, stride, device, grad flag, layout and value."""
    assert type(got) is type(expected), f"{path}: {type(got)} is not {type(expected)}"
    if isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype, path
        assert got.shape == expected.shape, path
        assert got.layout == expected.layout, path
        assert got.device == expected.device, path
        assert got.requires_grad == expected.requires_grad, path
        if expected.layout == torch.strided:
            assert got.stride() == expected.stride(), path
            assert same_bytes(got, expected), f"{path}: values differ"
        else:
            assert torch.equal(got.cpu().to_dense(), expected.cpu().to_dense()), path
    elif isinstance(expected, dict):
        assert list(got) == list(expected), path
        for key, value in expected.items():
            assert_same(got[key], value, f"{path}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected), path
        for index, value in enumerate(expected):
            assert_same(got[index], value, f"{path}[{index}]")
    else:
        assert got is expected, f"{path}: not the same object"


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit, NaNs included."""
    return a.shape == b.shape and _flat_bytes(a) == _flat_bytes(b)


def _flat_bytes(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    dense = torch.empty(plain.shape, dtype=plain.dtype).copy_(plain)
    return dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""


def run_python(code: str, timeout_s: float = 120, **environment: str) -> str:
    """The output of a program in a process of its own; fails unless it exits with 0."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-W", "error", "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
