"""Packed asynchronous copies of nested tensors between devices.

Calls whose names begin with `start_` return a handle at once; without it, they block until the work
is done. `start_copy` and `copy` copy to new memory, and `async_to` and `to` are the same under the
names that TensorDict users expect. `start_copy_into` and `copy_into` copy into an existing tree.
`start_gather` and `gather` read rows of a storage; `start_scatter` and `scatter` write them.
`prefetch` reads batches and copies them ahead of a loop. `explain` lists what a copy does with each
value.
"""

import importlib
from types import FunctionType
from typing import TYPE_CHECKING, Any

from tdcopier import _native as _native  # isort: skip - loads the native module, or says why not

from tdcopier._C import AsyncCopyHandle, InternalError
from tdcopier._checking import SourceModifiedError
from tdcopier._collate import collate
from tdcopier._compile import keep_out_of_graphs as _keep_out_of_graphs
from tdcopier._containers.registry import (
    register_container,
    register_tensor_subclass,
    unregister_class,
)
from tdcopier._containers.unknown import UnknownTypeWarning
from tdcopier._copy import async_to, copy, start_copy, to
from tdcopier._explain import ExplainedCounts, ExplainedLeaf, Explanation, explain
from tdcopier._into import copy_into, start_copy_into
from tdcopier._limits import set_run_ahead_limit, set_staging_limit_bytes, staging_bytes
from tdcopier._options import CopyOptions
from tdcopier._prefetch.prefetcher import Prefetcher, PrefetchStats, prefetch
from tdcopier._prepared import PreparedCopy, prepare
from tdcopier._rows.gather import gather, start_gather
from tdcopier._rows.scatter import scatter, start_scatter
from tdcopier._stats import CopyStats, StepTimes
from tdcopier._steps import time_steps

if TYPE_CHECKING:
    from tdcopier import distributed, sim
    from tdcopier._commands.info_facts import info
    from tdcopier.tensordict._backend import (
        install_tensordict_backend,
        remove_tensordict_backend,
        tensordict_backend,
    )

__all__ = [
    "AsyncCopyHandle",
    "CopyOptions",
    "CopyStats",
    "ExplainedCounts",
    "ExplainedLeaf",
    "Explanation",
    "InternalError",
    "PrefetchStats",
    "Prefetcher",
    "PreparedCopy",
    "SourceModifiedError",
    "StepTimes",
    "UnknownTypeWarning",
    "async_to",
    "collate",
    "copy",
    "copy_into",
    "distributed",
    "explain",
    "gather",
    "info",
    "install_tensordict_backend",
    "prefetch",
    "prepare",
    "register_container",
    "register_tensor_subclass",
    "remove_tensordict_backend",
    "scatter",
    "set_run_ahead_limit",
    "set_staging_limit_bytes",
    "sim",
    "staging_bytes",
    "start_copy",
    "start_copy_into",
    "start_gather",
    "start_scatter",
    "tensordict_backend",
    "time_steps",
    "to",
    "unregister_class",
]

_BACKEND = "tdcopier.tensordict._backend"  # imports tensordict, which takes a second
_WHEN_ASKED_FOR = {
    "info": "tdcopier._commands.info_facts",
    "install_tensordict_backend": _BACKEND,
    "remove_tensordict_backend": _BACKEND,
    "tensordict_backend": _BACKEND,
}


_keep_out_of_graphs(
    value
    for name, value in globals().items()
    if name in __all__ and isinstance(value, FunctionType)
)

_MODULES_WHEN_ASKED_FOR = ("distributed", "sim")


def __getattr__(name: str) -> Any:
    """Import the modules of some names on first access."""
    if name in _MODULES_WHEN_ASKED_FOR:
        return importlib.import_module(f"tdcopier.{name}")
    if name not in _WHEN_ASKED_FOR:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_WHEN_ASKED_FOR[name]), name)


def __dir__() -> list[str]:
    """Return the public names, also of modules that are not imported yet."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


__version__ = "0.1.0"
