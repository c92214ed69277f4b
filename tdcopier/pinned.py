"""The pool of pinned memory: its use, and what fills and empties it."""

from tdcopier._C import PinnedMemory
from tdcopier._pinned_pool import Usage, reserve, trim, usage

__all__ = ["PinnedMemory", "Usage", "reserve", "trim", "usage"]
