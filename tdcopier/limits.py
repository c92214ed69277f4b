"""Bounds of the whole process, on memory and on batches in flight.

Each has an environment variable that sets it at import (`python -m tdcopier info` lists them).
"""

from tdcopier._limits import (
    set_pinned_bytes,
    set_run_ahead,
    set_slab_bytes,
    set_staging_bytes,
    staging_bytes,
)

__all__ = [
    "set_pinned_bytes",
    "set_run_ahead",
    "set_slab_bytes",
    "set_staging_bytes",
    "staging_bytes",
]
