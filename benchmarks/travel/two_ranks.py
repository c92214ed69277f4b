"""Two ranks of a group, this process and another one, which time the same ways at once.

Python's collector is off in each block, in both: each has collected before either begins.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from tool.measure import Bench, collector_paused, shuffled

WARM_UP = 1
HERE, THERE = 1, 0
"""Ranks of this process and of the other one."""


class End(Protocol):
    """One of the two ranks."""

    @property
    def ways(self) -> Mapping[str, Callable[[int], None]]:
        """Each makes a number of calls."""
        ...

    def batches_of(self, way: str) -> int: ...

    def close(self) -> None: ...


MakeEnd = Callable[[int, str, Any], Any]
"""Make the `End` of a rank, by a name and a case. A function of a module, for the other process."""


class Times(NamedTuple):
    """By way, for each block, a batch."""

    wall_us: dict[str, list[float]]
    process_us: dict[str, list[float]]
    """Processor time of both ranks."""
    calls_us: dict[str, list[float]]
    """Time in the calls of the other rank, without the work that they leave to a device."""


class Other:
    """The other rank."""

    def __init__(self, pipe: Any, make_end: MakeEnd, synchronise: Callable[[], None]) -> None:
        self._pipe, self._make_end, self._synchronise = pipe, make_end, synchronise

    @contextmanager
    def end(self, name: str, case: Any) -> Iterator[Any]:
        """Make the ends of both ranks."""
        self._pipe.send((name, case))
        end = self._make_end(HERE, name, case)
        yield end
        self._pipe.send(None)
        end.close()

    def times(self, bench: Bench, name: str, end: End) -> Times:
        """Time blocks of all ways, which take turns."""
        times = Times(*({way: [] for way in end.ways} for _ in Times._fields))
        for index, way in shuffled(
            list(end.ways), bench.progress(name), rounds=bench.rounds(0.05), warm_up=WARM_UP
        ):
            self._pipe.send(way)
            count = end.batches_of(way)
            with collector_paused():
                assert self._pipe.recv() == "ready"
                self._pipe.send("go")
                begin, used = time.perf_counter_ns(), time.process_time_ns()
                end.ways[way](count)
                self._synchronise()
                used, took = time.process_time_ns() - used, time.perf_counter_ns() - begin
            used_there, calls = self._pipe.recv()
            if index >= 0:
                times.wall_us[way].append(took / 1e3 / count)
                times.process_us[way].append((used + used_there) / 1e3 / count)
                times.calls_us[way].append(calls / 1e3 / count)
        return times


@contextmanager
def two_ranks(backend: str, make_end: MakeEnd) -> Iterator[Other]:
    """Make this process one of two ranks; with NCCL, each has a GPU of its number."""
    store = _store(0, is_master=True)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    arguments = (there, store.port, backend, make_end)
    process = context.Process(target=_serve, args=arguments, daemon=True)
    process.start()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    synchronise = _join(store, backend, HERE)
    try:
        yield Other(here, make_end, synchronise)
    finally:
        here.close()
        dist.destroy_process_group()
        process.join()
        torch.set_num_threads(threads)


def _join(store: Any, backend: str, rank: int) -> Callable[[], None]:
    """Make this process a rank; return what waits for its device."""
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2)
    return torch.cuda.synchronize if backend == "nccl" else lambda: None


def _store(port: int, *, is_master: bool) -> Any:
    made: Any = dist
    return made.TCPStore("127.0.0.1", port, is_master=is_master, wait_for_workers=False)


def _serve(pipe: Any, port: int, backend: str, make_end: MakeEnd) -> None:
    torch.set_num_threads(1)
    synchronise = _join(_store(port, is_master=False), backend, THERE)
    try:
        while True:
            _serve_case(pipe, make_end(THERE, *pipe.recv()), synchronise)
    except EOFError:
        dist.destroy_process_group()


def _serve_case(pipe: Any, end: End, synchronise: Callable[[], None]) -> None:
    while (way := pipe.recv()) is not None:
        with collector_paused():
            pipe.send("ready")
            assert pipe.recv() == "go"
            used, begin = time.process_time_ns(), time.perf_counter_ns()
            end.ways[way](end.batches_of(way))
            calls = time.perf_counter_ns() - begin
            synchronise()
            used = time.process_time_ns() - used
        pipe.send((used, calls))
    end.close()
