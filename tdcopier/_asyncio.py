"""Waiting in an asyncio event loop without a thread: a task asks, sleeps, and asks again."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any, TypeVar

from tdcopier import _C

T = TypeVar("T")

_SHORTEST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.020
_SHARE_OF_WAIT = 0.1  # a result is noticed late by at most this share of the time it took


class Pauses:
    """The pauses of a task between two looks. They grow with the time that it has waited."""

    def __init__(self, instead: str) -> None:
        """Begin to wait.

        Args:
            instead: What a caller without an event loop should use, for the message.

        Raises:
            RuntimeError: no event loop is running in this thread.
        """
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError(
                f"no asyncio event loop is running in this thread: use {instead}, or await in a "
                "coroutine that asyncio runs"
            ) from None
        self._began_s = self._loop.time()

    async def pause(self) -> None:
        """Let the event loop run for a while."""
        waited_s = self._loop.time() - self._began_s
        await asyncio.sleep(
            min(max(_SHORTEST_PAUSE_S, _SHARE_OF_WAIT * waited_s), _LONGEST_PAUSE_S)
        )


def arrived(handle: _C.AsyncCopyHandle[T]) -> Generator[Any, None, T]:
    """Return the iterator of `await handle`.

    Raises:
        Exception: as `AsyncCopyHandle.get`.
        RuntimeError: no event loop is running in this thread.
    """
    pauses = Pauses("get()")
    while not handle.ready():
        handle._refuse_in_child()
        yield from pauses.pause().__await__()
    return handle.get()
