"""Pinned memory of the process: its use, and the pool that is reserved, leased and trimmed."""

from tdcopier._C import PinnedMemory
from tdcopier._pinned_pool import Usage, reserve, staging_bytes, trim, usage

__all__ = ["PinnedMemory", "Usage", "reserve", "staging_bytes", "trim", "usage"]
