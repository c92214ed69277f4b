"""The build backend: scikit-build-core, with one sentence where a build cannot succeed."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping

from find_torch import torch_folder

_TOOLS = "scikit-build-core pybind11 cmake ninja"
_MISSING = [
    package
    for package, module in (("scikit-build-core", "scikit_build_core"), ("pybind11", "pybind11"))
    if importlib.util.find_spec(module) is None
]
if _MISSING:
    raise SystemExit(
        f"tdcopier's build needs {' and '.join(_MISSING)}: run `pip install .`, which brings them, "
        f"or `pip install {_TOOLS}` before a build without isolation"
    )

from scikit_build_core import build as _build  # noqa: E402
from scikit_build_core.build import *  # noqa: E402, F403 - the hooks of a backend

_Settings = Mapping[str, "str | list[str]"]


def _check_torch(settings: _Settings | None) -> None:
    asked = f"{settings} {os.environ.get('CMAKE_ARGS')}"
    if torch_folder() is not None or "TDCOPIER_TORCH" in asked:
        return
    if "UV" in os.environ:  # it hides the environment from the build
        then = f"run `uv pip install torch {_TOOLS}`, then `uv pip install --no-build-isolation .`"
    else:
        then = "run `pip install torch` first (in an environment that is active)"
    raise SystemExit(
        f"tdcopier is compiled against the torch that it will run with, and {sys.prefix} has none: "
        f"{then}"
    )


def build_wheel(
    wheel_directory: str,
    config_settings: _Settings | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Builds a wheel for the installed torch."""
    _check_torch(config_settings)
    return _build.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str,
    config_settings: _Settings | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Builds an editable installation for the installed torch."""
    _check_torch(config_settings)
    return _build.build_editable(wheel_directory, config_settings, metadata_directory)
