"""Coroutines and sources for tests of `async for` over a prefetcher."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from prefetch_support import Counted, batch, value_of
from sim_support import BRIEFLY

COUNT = 5
LARGE = 1 << 20
"""4 MiB of floats, which workers stage."""


async def briefly() -> None:
    """Lets the event loop run until a task that is not held up would have looked several times."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + BRIEFLY
    while loop.time() < deadline:
        await asyncio.sleep(0.001)


async def happens(condition: Callable[[], bool]) -> None:
    """Lets the event loop run until the condition is true; the test's timeout ends it."""
    while not condition():
        await asyncio.sleep(0.0002)


async def next_of(batches: Any) -> Any:
    return await anext(batches)


async def all_values(batches: Any) -> list[int]:
    return [value_of(moved) async for moved in batches]


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(coroutine)


SOURCES: dict[str, Callable[[], Any]] = {
    "list": lambda: [batch(i) for i in range(COUNT)],
    "generator": lambda: (batch(i) for i in range(COUNT)),
    "callable": lambda: Counted(COUNT).sample,
}


class Broken(Exception):
    pass
