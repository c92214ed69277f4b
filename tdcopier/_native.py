"""Loads the native module that fits the torch, or says why it cannot, and what to do."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import re
from pathlib import Path

import tdcopier

try:
    import torch  # its libraries must be loaded before the native module
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError(
        "tdcopier needs torch 2.11 or newer, and there is none: run `pip install torch`"
    ) from None

_MODULE = "tdcopier._C"
_FILE = f"_C{importlib.machinery.EXTENSION_SUFFIXES[0]}"
_FOLDER = Path(__file__).parent
_BUILD = "run `pip install .` in its source folder"
_BUILT_FOR = re.compile(
    rb"tdcopier is built for torch (\d+\.\d+)"
)  # csrc/python/runtime/torch_version.cpp
_A_WHEELS = "for_torch_"  # a wheel has modules for several versions, each in a folder of its own


def _load() -> None:
    tdcopier.__path__.append(str(_FOLDER / f"{_A_WHEELS}{_minor(torch.__version__)}"))
    try:
        importlib.import_module(_MODULE)
    except ImportError as error:
        raise _not_loaded(error) from None


def _not_loaded(error: ImportError) -> ImportError:
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
            f"installed: to build it again, {_BUILD}"
        )
    return ImportError(why, name=_MODULE, path=str(path))


def _missing() -> str:
    """Say which module is missing, and which ones for other versions there are."""
    folders = [path.parent.name for path in _FOLDER.glob(f"{_A_WHEELS}*/{_FILE}")]
    if folders:
        minors = sorted((name[len(_A_WHEELS) :] for name in folders), key=_numbers)
        return (
            f"tdcopier was built for torch {', '.join(minors)}, but torch {torch.__version__} is "
            f"installed: install one of these, or build tdcopier for this one: {_BUILD}"
        )
    others = ", ".join(sorted({path.name for path in _FOLDER.glob("**/_C.*.so")}))
    return (
        f"tdcopier has no native module {_FILE} in {_FOLDER}{others and f' (only {others})'}: "
        f"{_BUILD}, or start Python in another folder if tdcopier is installed already"
    )


def _minor(version: str) -> str:
    """Return "2.13" for "2.13.0+cpu"."""
    return ".".join(version.split(".")[:2])


def _numbers(minor: str) -> list[int]:
    return [int(number) for number in minor.split(".")]


_load()
