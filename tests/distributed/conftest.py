"""Channels whose ends are both in the test's process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from tdcopier import distributed

TIMEOUT_S = 2.5
Ends = tuple[distributed.Sender, distributed.Receiver]
Open = Callable[..., Ends]


@pytest.fixture
def store() -> Any:
    return dist.HashStore()  # type: ignore[attr-defined]


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


@pytest.fixture
def channel(store: Any) -> Iterator[Open]:
    """Returns a function that opens both ends in this process."""
    opened: list[Any] = []

    def both(device: Any = "cpu", *, of: tuple[str, ...] = (), **options: Any) -> Ends:
        of_sender = {key: options.pop(key) for key in of}
        common = {"store": store, "peer_timeout_s": TIMEOUT_S, "host": "127.0.0.1"}
        rx = distributed.receiver(device=device, **common, **options)
        opened.append(rx)
        tx = distributed.sender(**common, **of_sender)
        opened.insert(0, tx)
        return tx, rx

    yield both
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda end: end.close(timeout_s=5), opened))
