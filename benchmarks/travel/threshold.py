"""Times parcels through a queue as bytes and as shared memory, from `pack()` until all is read."""

from __future__ import annotations

from typing import Any

import torch
from tool.measure import Bench, shuffled, summaries

import tdcopier
from tdcopier import _pack
from travel.transports import WHOLE, opened

KIB = (32, 128, 512, 768, 1024, 1536, 2048, 4096, 16384)
LEAVES = 16
SHARED_FROM = {"bytes": 1 << 62, "shared memory": 0}
WARM_UP = 3


def run(bench: Bench) -> dict[str, Any]:
    found, before = {}, _pack.SHARED_FROM_BYTES
    try:
        with opened("queue") as send:
            for kib in KIB:
                found[f"{kib:,} KiB"] = {"contenders": _timed(bench, kib, send)}
    finally:
        _pack.SHARED_FROM_BYTES = before
    return found


def _timed(bench: Bench, kib: int, send: Any) -> dict[str, dict[str, Any]]:
    tree = [torch.rand(kib * 1024 // 4 // LEAVES) for _ in range(LEAVES)]
    times_us: dict[str, list[float]] = {way: [] for way in SHARED_FROM}
    with bench.quiet(bound=False) as begin_round:
        for index, way in shuffled(
            SHARED_FROM,
            bench.progress(f"threshold, {kib:,} KiB"),
            rounds=bench.rounds(0.1),
            warm_up=WARM_UP,
            before_round=begin_round,
        ):
            _pack.SHARED_FROM_BYTES = SHARED_FROM[way]
            us, _ = send(WHOLE, tdcopier.pack, tree, False)
            if index >= 0:
                times_us[way].append(us)
    return summaries(times_us)
