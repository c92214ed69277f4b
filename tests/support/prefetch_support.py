"""Sources for tests of prefetching, which count their batches or stop at a gate."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

import tdcopier
from tdcopier._prefetch.reader import _passes


def batch(value: int) -> dict[str, Any]:
    return {"x": torch.full((3,), float(value)), "name": f"b{value}"}


def value_of(moved: dict[str, Any]) -> int:
    value = int(moved["x"][0].item())
    assert moved["x"].tolist() == [value] * 3
    assert moved["name"] == f"b{value}"
    return value


def values_of(batches: Any) -> list[int]:
    return [value_of(moved) for moved in batches]


def in_loop(source: Any, device: str, **options: Any) -> tdcopier.Prefetcher:
    """Returns a prefetcher whose source is read by the loop's own thread."""
    return tdcopier.prefetch(source, device, threaded=False, **options)


class Counted:
    """An iterator over `count` batches that counts the requests in `reads`."""

    def __init__(self, count: int = 1_000_000) -> None:
        self.count = count
        self.reads = 0
        self.threads: set[threading.Thread] = set()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.threads.add(threading.current_thread())
        self.reads += 1
        if self.reads > self.count:
            raise StopIteration
        return batch(self.reads - 1)

    sample: Callable[[Counted], Any] = __next__


class Stops:
    """A generator function whose generators stop before batch `at` until the gate opens."""

    def __init__(self, at: int, count: int = 5) -> None:
        self.at, self.count = at, count
        self.gate, self.is_there = threading.Event(), threading.Event()
        self.ended: list[str] = []

    def __call__(self) -> Iterator[Any]:
        try:
            for i in range(self.count):
                if i == self.at:
                    self.is_there.set()
                    self.gate.wait()
                yield batch(i)
        finally:
            self.ended.append("ended")


class Asked:
    """Wraps the wake-up that consumers wait for, and records when one waits."""

    def __init__(self, arrival: Any) -> None:
        self._arrival = arrival
        self.found_none = threading.Event()

    def set(self) -> None:
        self._arrival.set()

    def wait(self, within_s: float | None = None) -> None:
        self.found_none.set()
        self._arrival.wait(within_s)


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tdcopier-prefetch"]


def all_is_over() -> bool:
    return not readers() and not _passes


class StatefulLoader:
    """Yields the batches of an epoch, from where its state says; the next pass is a new epoch."""

    BATCHES = 10

    def __init__(self) -> None:
        self.position = {"epoch": 0, "next": 0}

    def __iter__(self) -> Iterator[Any]:
        while self.position["next"] < self.BATCHES:
            number = self.position["next"]
            self.position["next"] += 1
            yield batch(self.position["epoch"] * self.BATCHES + number)
        self.position["epoch"] += 1
        self.position["next"] = 0

    def state_dict(self) -> dict[str, int]:
        return self.position  # which changes with the next batch

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = dict(state)
