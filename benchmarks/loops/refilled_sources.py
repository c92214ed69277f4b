"""Refills a source buffer as soon as wait() has returned, and counts wrong batches."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from copies.directions import synchroniser
from tool.measure import Bench, shuffled
from tool.tables import OURS
from tool.way import WAIT, Way

import tdcopier
from loops.learner import Decoy
from tdcopier._commands.interleave import summarise

SIZES_BYTES = (1 << 16, 1 << 22)  # one that is packed, and one that is sent alone
BLOCK = 10  # consecutive rounds of one way
ROUNDS_PER_REPEAT = 2
BY_TORCH, BY_TORCH_ASYNC = ".to()", "non_blocking .to()"
KINDS = ("pageable", "pinned", "memory-mapped")


def run(bench: Bench) -> dict[str, Any]:
    """Return the number of wrong batches and the time of a round, by kind of memory, size, way."""
    device, blocks = bench.device, bench.rounds(ROUNDS_PER_REPEAT / BLOCK)
    decoy = Decoy(device)
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            {"way": way.name, "kind": kind, "bytes": size_bytes, "wrong": 0, "round": []}
            for size_bytes in SIZES_BYTES
            for kind in KINDS
            for way in ways(device)
            if way.name != BY_TORCH_ASYNC or kind == "pinned"
        ]
        buffers = [
            make_buffer(row["kind"], row["bytes"], Path(folder, str(index)))
            for index, row in enumerate(rows)
        ]
        by_name = {way.name: way for way in ways(device)}
        found = torch.zeros(BLOCK, dtype=torch.bool, device=device)
        progress = bench.progress("refilled sources")
        for index, each in shuffled(range(len(rows)), progress, rounds=blocks):
            way = by_name[rows[each]["way"]]
            taken_us = block(way, buffers[each], index * BLOCK, found, device, decoy)
            rows[each]["round"].append(taken_us)
            rows[each]["wrong"] += int(found.sum())
        del buffers
    summed = [{**row, "round": summarise(row["round"])._asdict()} for row in rows]
    return {"rounds": blocks * BLOCK, "rows": summed}


def block(
    way: Way,
    buffer: torch.Tensor,
    first: int,
    wrong: torch.Tensor,
    device: torch.device,
    decoy: Decoy,
) -> float:
    """Run some rounds, and return microseconds per round, including the decoys.

    The buffer is filled with the number ``first`` and then with the next ones. A pinned transfer
    before every second copy delays it. Each round compares its batch on the device after the
    refill, and sets ``wrong``, (rounds,) bool on the device.
    """
    synchronise = synchroniser([device])
    synchronise()
    begin = time.perf_counter_ns()
    buffer.fill_(first)
    for index in range(len(wrong)):
        if index % 2:
            decoy.enqueue()
        batch = way.run(buffer)
        buffer.fill_(first + index + 1)
        wrong[index].copy_((batch != first + index).any())
    synchronise()
    return (time.perf_counter_ns() - begin) / 1e3 / len(wrong)


def make_buffer(kind: str, size_bytes: int, path: Path) -> torch.Tensor:
    """Return a tensor of 32-bit integers in memory of this kind; a mapped one is in a new file."""
    elements = size_bytes // 4
    if kind == "memory-mapped":
        return torch.from_file(str(path), shared=True, size=elements, dtype=torch.int32)
    buffer = torch.zeros(elements, dtype=torch.int32)
    return buffer.pin_memory() if kind == "pinned" else buffer


def ways(device: torch.device) -> list[Way]:
    return [
        Way(OURS, lambda buffer: tdcopier.start_copy(buffer, device), WAIT),
        Way(BY_TORCH, lambda buffer: buffer.to(device)),
        Way(BY_TORCH_ASYNC, lambda buffer: buffer.to(device, non_blocking=True)),
    ]
