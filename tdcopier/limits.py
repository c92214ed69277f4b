"""Bounds of the whole process, on memory and on batches in flight.

Those on memory can be set at import by `TDCOPIER_STAGING_LIMIT_BYTES`, `TDCOPIER_SLAB_LIMIT_BYTES`
and `TDCOPIER_PINNED_LIMIT_BYTES`. `python -m tdcopier info` tells those in force.
"""

from tdcopier._limits import set_pinned_bytes, set_run_ahead, set_slab_bytes, set_staging_bytes

__all__ = ["set_pinned_bytes", "set_run_ahead", "set_slab_bytes", "set_staging_bytes"]
