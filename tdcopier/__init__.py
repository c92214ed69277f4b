"""Packed asynchronous copies of nested tensors between devices.

Calls whose names begin with `start_` return a handle at once; without it, they block until the work
is done. `start_copy` and `copy` copy to new memory, and `async_to` and `to` are the same under the
names that TensorDict users expect. `start_copy_into` and `copy_into` copy into an existing tree.
`start_gather` and `gather` read rows of a storage; `start_scatter` and `scatter` write them.
`prefetch` reads batches and copies them ahead of a loop. `pin_memory_` pins memory that exists.
`pack` makes one run of bytes of a batch, for another process, a file or a socket. `park` moves the
memory of a model or an optimizer to the host and back, in place, and `snapshot` copies it beside
training. `explain` lists what a copy does with each value.

`stats`, `limits`, `pinned`, `containers`, `tensordict`, `checkpoint`, `distributed`, `replay`,
`sim` and `workloads` are namespaces for what a batch does not need; `torchrl` and `ray`, which need
those packages, are imported by name.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tdcopier import _native as _native  # isort: skip - loads the native module, or says why not

from tdcopier import _hooks as _hooks
from tdcopier import _limits as _limits  # reads the environment, as `_steps`
from tdcopier import _steps as _steps
from tdcopier._C import AsyncCopyHandle, InternalError
from tdcopier._checking import SourceModifiedError
from tdcopier._copy import async_to, copy, start_copy, to
from tdcopier._into import copy_into, start_copy_into
from tdcopier._options import CopyOptions
from tdcopier._pack import Parcel, pack

if TYPE_CHECKING:
    from tdcopier import (
        checkpoint,
        containers,
        distributed,
        limits,
        pinned,
        replay,
        sim,
        stats,
        tensordict,
        workloads,
    )
    from tdcopier._collate import collate, packed
    from tdcopier._commands.info_facts import info
    from tdcopier._explain import explain
    from tdcopier._park.park import Parked, park, parked
    from tdcopier._park.snapshot import Snapshot, snapshot
    from tdcopier._pin_memory import pin_memory_
    from tdcopier._prefetch.prefetch import prefetch
    from tdcopier._prefetch.prefetcher import Prefetcher
    from tdcopier._prepared import PreparedCopy, prepare
    from tdcopier._rows.gather import gather, start_gather
    from tdcopier._rows.scatter import scatter, start_scatter

_NAMESPACES = (
    "checkpoint",
    "containers",
    "distributed",
    "limits",
    "pinned",
    "replay",
    "sim",
    "stats",
    "tensordict",
    "workloads",
)
"""Modules that are imported when they are first asked for."""

__all__ = [
    "AsyncCopyHandle",
    "CopyOptions",
    "InternalError",
    "Parcel",
    "Parked",
    "Prefetcher",
    "PreparedCopy",
    "Snapshot",
    "SourceModifiedError",
    "async_to",
    "checkpoint",
    "collate",
    "containers",
    "copy",
    "copy_into",
    "distributed",
    "explain",
    "gather",
    "info",
    "limits",
    "pack",
    "packed",
    "park",
    "parked",
    "pin_memory_",
    "pinned",
    "prefetch",
    "prepare",
    "replay",
    "scatter",
    "sim",
    "snapshot",
    "start_copy",
    "start_copy_into",
    "start_gather",
    "start_scatter",
    "stats",
    "tensordict",
    "to",
    "workloads",
]

_WHEN_ASKED_FOR = {
    "tdcopier._collate": ("collate", "packed"),
    "tdcopier._commands.info_facts": ("info",),
    "tdcopier._explain": ("explain",),
    "tdcopier._park.park": ("Parked", "park", "parked"),
    "tdcopier._park.snapshot": ("Snapshot", "snapshot"),
    "tdcopier._pin_memory": ("pin_memory_",),
    "tdcopier._prefetch.prefetch": ("prefetch",),
    "tdcopier._prefetch.prefetcher": ("Prefetcher",),
    "tdcopier._prepared": ("PreparedCopy", "prepare"),
    "tdcopier._rows.gather": ("gather", "start_gather"),
    "tdcopier._rows.scatter": ("scatter", "start_scatter"),
}
"""Modules that are imported when one of their names is first asked for."""
_MODULE_OF = {name: module for module, names in _WHEN_ASKED_FOR.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import what a name needs on first access."""
    if name in _NAMESPACES:
        return importlib.import_module(f"tdcopier.{name}")
    if name in ("ray", "torchrl"):
        raise AttributeError(f"import tdcopier.{name} first: it needs {name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, also of modules that are not imported yet."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


__version__ = "0.1.0"
