"""Replay servers with clients in the test's process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist
from replay_support import TIMEOUT_S, RowBuffer

from tdcopier.replay import ReplayClient, ReplayServer

Serve = Callable[..., ReplayServer]
Connect = Callable[..., ReplayClient]


@pytest.fixture
def opened() -> Iterator[list[Any]]:
    """Holds what is closed after a test, the last first."""
    made: list[Any] = []
    yield made
    for end in reversed(made):
        end.close()


@pytest.fixture
def store() -> Any:
    return dist.HashStore()  # type: ignore[attr-defined]


@pytest.fixture
def serve(store: Any, opened: list[Any]) -> Serve:
    """Returns a function that opens a server in this process."""

    def one(buffer: Any = None, **options: Any) -> ReplayServer:
        common = {"store": store, "peer_timeout_s": TIMEOUT_S, "host": "127.0.0.1"}
        buffer = RowBuffer() if buffer is None else buffer
        opened.append(ReplayServer(buffer, **{**common, **options}))
        return opened[-1]

    return one


@pytest.fixture
def connect(store: Any, opened: list[Any]) -> Connect:
    """Returns a function that opens a client in this process."""

    def one(**options: Any) -> ReplayClient:
        common = {
            "store": store,
            "peer_timeout_s": TIMEOUT_S,
            "host": "127.0.0.1",
            "reconnect_timeout_s": 20,
        }
        opened.append(ReplayClient(**{**common, **options}))
        return opened[-1]

    return one


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool
