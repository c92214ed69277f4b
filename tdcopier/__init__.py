"""Packed asynchronous copies of nested tensors between devices.

`start_copy` starts a copy and returns a handle; `copy` blocks until the copy is done. `async_to`
and `to` do the same under the names that TensorDict users expect. `copy_into` copies into an
existing tree. `start_gather` and `start_scatter` read and write rows of a storage. `prefetch` reads
batches and copies them ahead of a loop. `explain` lists what a copy does with each value.
"""

import importlib
from typing import TYPE_CHECKING, Any

import torch as _torch  # noqa: F401 - its libraries must be loaded before the native module

try:
    importlib.import_module("tdcopier._C")
except ImportError as error:
    from tdcopier._native import not_loaded

    raise not_loaded(error) from None

from tdcopier._checking import SourceModifiedError
from tdcopier._collate import collate
from tdcopier._containers.registry import (
    register_container,
    register_tensor_subclass,
    unregister_class,
)
from tdcopier._containers.unknown import UnknownTypeWarning
from tdcopier._copy import (
    AsyncCopyHandle,
    CopyOptions,
    InternalError,
    async_to,
    copy,
    copy_into,
    set_run_ahead_limit,
    set_staging_limit_bytes,
    staging_bytes,
    start_copy,
    to,
)
from tdcopier._explain import ExplainedCounts, ExplainedLeaf, Explanation, explain
from tdcopier._prefetch.prefetcher import Prefetcher, PrefetchStats, prefetch
from tdcopier._prepared import PreparedCopy, prepare
from tdcopier._rows.gather import start_gather
from tdcopier._rows.scatter import start_scatter
from tdcopier._stats import CopyStats, StepTimes
from tdcopier._steps import time_steps

if TYPE_CHECKING:
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
    "explain",
    "info",
    "install_tensordict_backend",
    "prefetch",
    "prepare",
    "register_container",
    "register_tensor_subclass",
    "remove_tensordict_backend",
    "set_run_ahead_limit",
    "set_staging_limit_bytes",
    "staging_bytes",
    "start_copy",
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


def __getattr__(name: str) -> Any:
    """Import the modules of some names on first access."""
    if name not in _WHEN_ASKED_FOR:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_WHEN_ASKED_FOR[name]), name)


__version__ = "0.1.0"
