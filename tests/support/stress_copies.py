"""Copies from many threads at once, each compared with `.to`: for a test and the sanitizers.

The route, the size of the leaves, the options and the way to ask for the result depend only on the
numbers of thread and copy, so that every run does the same.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from support import assert_same, oracle

import tdcopier

SMALL, LARGE = 50, 150_000  # floats: staged in the call, and more than 512 KiB, which workers stage


def routes_between(devices: list[str]) -> list[tuple[list[str], str]]:
    """Returns sources and target for every direction that these devices allow."""
    routes = [(["cpu"], device) for device in devices]
    routes += [([device], "cpu") for device in devices]
    if len(devices) > 1:
        first, second = devices[:2]
        routes += [([first], second), ([second], first), (["cpu", second], first)]
        routes += [([first, second], "cpu")]
    return routes


class Stress:
    """Runs the copies, and counts them by the way in which the result was asked for."""

    def __init__(self, devices: list[str]) -> None:
        self.routes = routes_between(devices)
        self.ways: list[Way] = list(WAYS)
        self.counts: Counter[str] = Counter()
        self.failures: list[BaseException] = []
        self._lock = threading.Lock()

    def run(self, threads: int, copies_each: int) -> None:
        together = threading.Barrier(threads)

        def work(thread: int) -> None:
            counts: Counter[str] = Counter()
            try:
                together.wait()
                for i in range(copies_each):
                    counts[self.one_copy(thread, i)] += 1
            except BaseException as failure:
                self.failures.append(failure)
            with self._lock:
                self.counts += counts

        everybody = [threading.Thread(target=work, args=(thread,)) for thread in range(threads)]
        for thread in everybody:
            thread.start()
        for thread in everybody:
            thread.join()
        if self.failures:
            raise self.failures[0]

    def one_copy(self, thread: int, i: int) -> str:
        """Copies a tree, compares the result, and returns how it was asked for."""
        number = 7 * thread + i
        places, target = self.routes[number % len(self.routes)]
        elements = LARGE if i % 5 == 0 else SMALL
        tree = tree_on(places, elements, float(1000 * thread + i))
        way = self.ways[(number // len(self.routes)) % len(self.ways)]
        expected = self.expected(tree, target)
        result = way(tree, target, options_of(number))
        if result is not None:
            self.compare(result, expected)
        return way.__name__

    def expected(self, tree: Any, target: str) -> Any:
        return oracle(tree, target)

    def compare(self, result: Any, expected: Any) -> None:
        assert_same(result, expected)


def tree_on(places: list[str], elements: int, value: float) -> dict[str, Any]:
    tree: dict[str, Any] = {"opaque": object()}
    for place in places:
        large = torch.full((elements,), value).to(place)
        small = torch.arange(12, device=place).reshape(3, 4)
        tree[place] = [large, (small, small.t()), {"one": torch.tensor(value, device=place)}]
    tree["array"] = np.full(3, value)
    return tree


def options_of(number: int) -> dict[str, Any]:
    return {
        "use_pinned_staging": number % 11 != 0,
        "pack_cpu_tensors": number % 7 != 0,
        "use_background_thread": number % 13 != 0,
    }


# Starts a copy and returns its result; `dropped` returns none.
Way = Callable[[dict[str, Any], str, dict[str, Any]], Any]


def get(tree: dict[str, Any], target: str, options: dict[str, Any]) -> Any:
    handle = tdcopier.start_copy(tree, target, **options)
    result = handle.get()
    assert handle.ready()
    return result


def wait(tree: dict[str, Any], target: str, options: dict[str, Any]) -> Any:
    return tdcopier.start_copy(tree, target, **options).wait()


def ready(tree: dict[str, Any], target: str, options: dict[str, Any]) -> Any:
    handle = tdcopier.start_copy(tree, target, **options)
    handle.ready()  # may be False: other threads' work may be ahead
    return handle.get()


def sources_dropped(tree: dict[str, Any], target: str, options: dict[str, Any]) -> Any:
    handle = tdcopier.start_copy(tree, target, **options)
    tree.clear()
    return handle.get()


def sources_overwritten(tree: dict[str, Any], target: str, options: dict[str, Any]) -> Any:
    """Overwrites the sources as soon as `wait_staged` allows it."""
    handle = tdcopier.start_copy(tree, target, **options)
    handle.wait_staged()
    for name, leaves in tree.items():
        if name not in ("array", "opaque"):
            leaves[0].fill_(-1)
    return handle.wait()


def dropped(tree: dict[str, Any], target: str, options: dict[str, Any]) -> None:
    tdcopier.start_copy(tree, target, **options)


def asked_by_two(tree: dict[str, Any], target: str, options: dict[str, Any]) -> Any:
    handle = tdcopier.start_copy(tree, target, **options)
    answers: list[Any] = []

    def ask() -> None:
        try:
            answers.append(handle.get())
        except Exception as error:
            answers.append(error)

    other = threading.Thread(target=ask)
    other.start()
    ask()
    other.join()
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    assert answers[0] is answers[1]
    return answers[0]


WAYS: list[Way] = [get, wait, ready, sources_dropped, sources_overwritten, dropped, asked_by_two]
