"""Packed asynchronous copies of nested tensors between devices.

`start_copy` begins a copy and returns a handle, `copy` is its blocking form. `async_to` and `to`
are the same for TensorDicts.
"""

from tdcopier._checking import SourceModifiedError
from tdcopier._containers import register_container
from tdcopier._copy import (
    AsyncCopyHandle,
    CopyOptions,
    InternalError,
    async_to,
    copy,
    set_run_ahead_limit,
    set_staging_limit_bytes,
    staging_bytes,
    start_copy,
    to,
)
from tdcopier._stats import CopyStats

__all__ = [
    "AsyncCopyHandle",
    "CopyOptions",
    "CopyStats",
    "InternalError",
    "SourceModifiedError",
    "async_to",
    "copy",
    "register_container",
    "set_run_ahead_limit",
    "set_staging_limit_bytes",
    "staging_bytes",
    "start_copy",
    "to",
]

__version__ = "0.1.0"
