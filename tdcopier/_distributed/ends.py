"""Parts of both ends of a channel: errors, memory of messages, and the beat."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from tdcopier._distributed.pair import HEADER_BYTES, Header, Kind

_PIECE_S, _LONG_PIECE_S = 0.05, 0.5
BEATS = 5
"""In the time after which the other end takes this one for lost."""


class ChannelClosed(EOFError):
    """The other end, or this one, has closed the channel."""


class PeerLost(ConnectionError):
    """The process at the other end has ended, or has not answered for the channel's timeout."""


def message(kind: Kind, nbytes: int = 0) -> torch.Tensor:
    """Return a message without a parcel."""
    memory = torch.zeros(HEADER_BYTES, dtype=torch.uint8, device="cpu")
    Header(kind, nbytes).write(memory)
    return memory


def new_memory(nbytes: int, *, pinned: bool) -> torch.Tensor:
    """Return memory for a message with a parcel of that size."""
    return torch.empty(HEADER_BYTES + nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)


def wait_a_piece(changed: threading.Condition, left_s: float | None) -> None:
    """Wait for a change; not for long, as a signal may have come to another thread."""
    changed.wait(_LONG_PIECE_S if left_s is None else min(left_s, _LONG_PIECE_S))


def has_ended(
    threads: Iterable[threading.Thread], is_lost: Callable[[], bool], end_s: float | None
) -> bool:
    """Wait until threads have ended, or the other end is lost; return False if it is late then."""
    for thread in threads:
        while thread.is_alive() and not is_lost():  # in pieces, for Ctrl-C
            left = _PIECE_S if end_s is None else min(end_s - time.monotonic(), _PIECE_S)
            if left <= 0:
                return False
            thread.join(left)
    return True


def first_line(error: Exception) -> str:
    """Return the begin of an error's text, as gloo's go on about hosts and causes."""
    return str(error).strip().partition("\n")[0]


open_ends: weakref.WeakSet[Any] = weakref.WeakSet()
"""Those that are closed when the interpreter exits."""


@atexit.register
def _close_at_exit() -> None:
    for end in list(open_ends):
        with contextlib.suppress(TimeoutError, ConnectionError):  # the other end cannot be told
            end.close(timeout_s=end.timeout_s)
