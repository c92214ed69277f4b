"""Refills a source buffer as soon as wait() has returned, and counts wrong batches."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from copies.directions import synchroniser
from tool.measure import Bench, shuffled
from tool.tables import OURS

import tdcopier
from tdcopier._commands.interleave import summarise

SIZES_BYTES = (1 << 16, 1 << 22)  # one that is packed, and one that is sent alone
DECOY_BYTES = 16 << 20  # a pinned transfer before every second copy, which delays the copy
DECOY_BYTES_OF_SIM = 1 << 16
BLOCK = 10  # consecutive rounds of one way
ROUNDS_PER_REPEAT = 2
BY_TORCH, BY_TORCH_ASYNC = ".to()", "non_blocking .to()"
KINDS = ("pageable", "pinned", "memory-mapped")


class Refill(NamedTuple):
    """A buffer that is refilled repeatedly, and one way to send it."""

    way: str
    kind: str
    buffer: torch.Tensor
    send: Callable[[torch.Tensor], torch.Tensor]
    """Copies the buffer to a tensor on the device that the current stream may read."""


def run(bench: Bench) -> dict[str, Any]:
    """Return the number of wrong batches and the time of a round, by kind of memory, size, way."""
    device, blocks = bench.device, bench.rounds(ROUNDS_PER_REPEAT / BLOCK)
    decoy = Decoy(device)
    with tempfile.TemporaryDirectory() as folder:
        every = refills(device, Path(folder))
        wrong = [0] * len(every)
        round_us: list[list[float]] = [[] for _ in every]
        found = torch.zeros(BLOCK, dtype=torch.bool, device=device)
        progress = bench.progress("company, refill")
        for index, each in shuffled(range(len(every)), progress, rounds=blocks):
            round_us[each].append(block(every[each], index * BLOCK, found, device, decoy))
            wrong[each] += int(found.sum())
        return {
            "rounds": blocks * BLOCK,
            "rows": [
                {
                    "way": refill.way,
                    "kind": refill.kind,
                    "bytes": refill.buffer.nbytes,
                    "wrong": wrong[each],
                    "round": summarise(round_us[each])._asdict(),
                }
                for each, refill in enumerate(every)
            ],
        }


class Decoy:
    """Keeps the link to the device busy with a transfer on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        size_bytes = DECOY_BYTES if device.type == "cuda" else DECOY_BYTES_OF_SIM
        self._source = torch.empty(size_bytes, dtype=torch.uint8).pin_memory()
        self._target = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self._side = self._module.Stream(device)

    def enqueue(self) -> None:
        with self._module.stream(self._side):
            self._target.copy_(self._source, non_blocking=True)


def block(
    refill: Refill, first: int, wrong: torch.Tensor, device: torch.device, decoy: Decoy
) -> float:
    """Run some rounds, and return microseconds per round, including the decoys.

    The buffer is filled with the number ``first`` and then with the next ones. Each round compares
    its batch on the device after the refill, and sets ``wrong``, (rounds,) bool on the device.
    """
    synchronise = synchroniser([device])
    synchronise()
    begin = time.perf_counter_ns()
    refill.buffer.fill_(first)
    for index in range(len(wrong)):
        if index % 2:
            decoy.enqueue()
        batch = refill.send(refill.buffer)
        refill.buffer.fill_(first + index + 1)
        wrong[index].copy_((batch != first + index).any())
    synchronise()
    return (time.perf_counter_ns() - begin) / 1e3 / len(wrong)


def refills(device: torch.device, folder: Path) -> list[Refill]:
    """Return every kind of memory, size and way; ``non_blocking`` only for pinned buffers."""
    found = []
    for size_bytes in SIZES_BYTES:
        for kind in KINDS:
            for way, send in _sends(device).items():
                if way != BY_TORCH_ASYNC or kind == "pinned":
                    path = folder / str(len(found))
                    found.append(Refill(way, kind, make_buffer(kind, size_bytes, path), send))
    return found


def make_buffer(kind: str, size_bytes: int, path: Path) -> torch.Tensor:
    """Return a tensor of 32-bit integers in memory of this kind; a mapped one is in a new file."""
    elements = size_bytes // 4
    if kind == "memory-mapped":
        return torch.from_file(str(path), shared=True, size=elements, dtype=torch.int32)
    buffer = torch.zeros(elements, dtype=torch.int32)
    return buffer.pin_memory() if kind == "pinned" else buffer


def _sends(device: torch.device) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    return {
        OURS: lambda buffer: tdcopier.start_copy(buffer, device).wait(),
        BY_TORCH: lambda buffer: buffer.to(device),
        BY_TORCH_ASYNC: lambda buffer: buffer.to(device, non_blocking=True),
    }
