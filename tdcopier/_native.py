"""Says why the native module cannot be loaded, and what to do. Imported only when it cannot."""

from __future__ import annotations

import importlib.util
import re
import sysconfig
from pathlib import Path

import torch

_MODULE = "tdcopier._C"
_BUILD = "`pip install --no-build-isolation .` in its source folder"
_BUILT_FOR = re.compile(rb"tdcopier is built for torch (\d+\.\d+)")  # csrc/python/torch_version.cpp


def not_loaded(error: ImportError) -> ImportError:
    """Return the error to raise instead of the one that the import of the native module raised."""
    spec = importlib.util.find_spec(_MODULE)
    if spec is None or spec.origin is None:
        return ImportError(_missing(), name=_MODULE)
    path = Path(spec.origin)
    found = _BUILT_FOR.search(path.read_bytes())
    built_for = _minor(torch.__version__) if found is None else found[1].decode()
    if built_for == _minor(torch.__version__):
        why = f"tdcopier's native module {path} cannot be loaded: {error}"
    else:
        why = (
            f"tdcopier was built for torch {built_for}, but torch {torch.__version__} is "
            f"installed: to build it again, run {_BUILD}"
        )
    return ImportError(why, name=_MODULE, path=str(path))


def _missing() -> str:
    """Say which module is missing, and which ones for other interpreters there are."""
    folder = Path(__file__).parent
    wanted = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    others = ", ".join(sorted(path.name for path in folder.glob("_C.*.so")))
    return (
        f"tdcopier has no native module {wanted} in {folder}{others and f' (only {others})'}: run "
        f"{_BUILD}, or start Python in another folder if tdcopier is installed already"
    )


def _minor(version: str) -> str:
    """Return "2.13" for "2.13.0+cpu"."""
    return ".".join(version.split(".")[:2])
