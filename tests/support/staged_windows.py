"""The windows in which one large leaf is staged, and how many parts each has."""

from __future__ import annotations

from tdcopier import _C

FIRST_BYTES, LAST_BYTES = 256 << 10, 1 << 20
LEAST_PART_BYTES, MOST_PART_BYTES = 64 << 10, 256 << 10
PAGE_BYTES = 4096


def windows_of(total_bytes: int) -> list[int]:
    """Returns the bytes of each window.

    Each is at most as large as all before it, and as half of what is left, beyond the two bounds;
    the largest are about equal.
    """
    windows: list[int] = []
    most = _C.STAGING_BUFFER_BYTES
    step = min(most, _even(total_bytes, most))
    while left := total_bytes - sum(windows):
        first = max(sum(windows), FIRST_BYTES)
        windows.append(min(left, step, first, max(left // 2, LAST_BYTES)))
    return windows


def parts_of(window_bytes: int) -> int:
    """Returns the number of parts of a window that is not the only one."""
    most = min(max(window_bytes // 8, LEAST_PART_BYTES), MOST_PART_BYTES)
    return -(-window_bytes // min(most, _even(window_bytes, most)))


def _even(total_bytes: int, most: int) -> int:
    steps = -(-total_bytes // most)
    return -(-total_bytes // (steps * PAGE_BYTES)) * PAGE_BYTES
