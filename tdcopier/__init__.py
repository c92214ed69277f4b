"""Packed asynchronous copies of nested tensors between devices.

`start_copy` begins a copy and returns a handle, `copy` is its blocking form.
"""

from tdcopier._checking import SourceModifiedError
from tdcopier._containers import register_container
from tdcopier._copy import (
    AsyncCopyHandle,
    InternalError,
    copy,
    set_run_ahead_limit,
    set_staging_limit_bytes,
    staging_bytes,
    start_copy,
)
from tdcopier._stats import CopyStats

__all__ = [
    "AsyncCopyHandle",
    "CopyStats",
    "InternalError",
    "SourceModifiedError",
    "copy",
    "register_container",
    "set_run_ahead_limit",
    "set_staging_limit_bytes",
    "staging_bytes",
    "start_copy",
]

__version__ = "0.1.0"
