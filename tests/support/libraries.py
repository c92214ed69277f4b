"""Imports libraries that some tests use, and skips a test where they are not installed."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import torch

# `make` has set up this environment, so no library may be missing. (One needs Python 3.11.)
IS_COMPLETE = (Path(sys.prefix) / ".has-test").exists() and sys.version_info >= (3, 11)
TORCHVISION = Path(sys.prefix) / "torchvision"  # the folder that `make` installs it into


def library(name: str) -> ModuleType:
    with importing():
        return importlib.import_module(name)


@contextmanager
def importing() -> Iterator[None]:
    """Skips the test if a library is not installed; ignores warnings about what libraries use."""
    _find_torchvision()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except ModuleNotFoundError as error:
        if IS_COMPLETE:
            raise
        pytest.skip(f"{error.name} is not installed")


@functools.cache
def _find_torchvision() -> torch.library.Library | None:
    """Makes torchvision importable beside a torch without CUDA.

    PyPI's wheel is built for CUDA. Where its operators cannot be loaded, it fails to import unless
    two of them are declared. Its tensor classes and transforms do not use them.
    """
    if TORCHVISION.is_dir():
        sys.path.append(str(TORCHVISION))
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return None
    try:
        torch.ops.load_library(Path(found.origin).with_name("_C.so"))
    except OSError:
        operators = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return operators  # which declares them as long as it exists
    return None
