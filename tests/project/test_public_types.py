"""Typed input gives typed results: one run of mypy over each public function."""

from __future__ import annotations

from pathlib import Path

import pytest

TYPED = """
from collections.abc import Sequence
from dataclasses import dataclass
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from typing_extensions import assert_type
import tdcopier
from tdcopier import AsyncCopyHandle

Batch = dict[str, torch.Tensor]
Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]

@dataclass
class Sample:
    image: torch.Tensor

def copies(batch: Batch, array: Array, samples: list[Sample], device: torch.device) -> None:
    assert_type(tdcopier.start_copy(batch, device), AsyncCopyHandle[Batch])
    assert_type(tdcopier.start_copy(array, 0), AsyncCopyHandle[torch.Tensor])
    assert_type(tdcopier.start_copy(samples, "cuda").wait(), list[Sample])
    assert_type(tdcopier.start_copy(samples, "cuda").get(), list[Sample])
    assert_type(tdcopier.start_copy(batch, "cuda").ready(), bool)
    assert_type(tdcopier.start_copy(batch, "cuda").stats.transfers, int)
    assert_type(tdcopier.copy(batch, "cuda", on_unknown="raise"), Batch)
    assert_type(tdcopier.copy(array, "cuda"), torch.Tensor)
    assert_type(tdcopier.async_to(batch, "cuda"), AsyncCopyHandle[Batch])
    assert_type(tdcopier.async_to(array, "cuda"), AsyncCopyHandle[torch.Tensor])
    assert_type(tdcopier.to(batch, "cuda"), Batch)
    assert_type(tdcopier.to(array, "cuda"), torch.Tensor)

async def awaited(batch: Batch) -> None:
    assert_type(await tdcopier.start_copy(batch, "cuda"), Batch)

def filling(batch: Batch, array: Array, samples: list[Sample]) -> None:
    assert_type(tdcopier.start_copy_into(batch, samples), AsyncCopyHandle[list[Sample]])
    assert_type(tdcopier.copy_into(batch, batch), Batch)
    assert_type(tdcopier.copy_into(torch.ones(3), array), Array)

def rows(batch: Batch, array: Array, index: torch.Tensor) -> None:
    assert_type(tdcopier.start_gather(batch, index, "cuda"), AsyncCopyHandle[Batch])
    assert_type(tdcopier.start_gather(batch, [1], out=batch), AsyncCopyHandle[Batch])
    assert_type(tdcopier.start_gather(array, index, "cuda"), AsyncCopyHandle[torch.Tensor])
    assert_type(tdcopier.start_gather(array, index, out=array), AsyncCopyHandle[Array])
    assert_type(tdcopier.gather(batch, slice(3), "cuda", use_pinned_staging=False), Batch)
    assert_type(tdcopier.gather(batch, (0, index), "cuda", out=batch), Batch)
    assert_type(tdcopier.gather(array, index, "cuda"), torch.Tensor)
    assert_type(tdcopier.gather(array, index, out=array), Array)
    assert_type(tdcopier.gather(array, index, "cuda", out=torch.ones(3)), torch.Tensor)
    assert_type(tdcopier.start_scatter(batch, batch, index), AsyncCopyHandle[Batch])
    assert_type(tdcopier.scatter(batch, batch, index), Batch)
    assert_type(tdcopier.scatter(torch.ones(3), array, index), Array)

def plans(batch: Batch, array: Array) -> None:
    plan = tdcopier.prepare(batch, "cuda", reuse_outputs=True)
    assert_type(plan, tdcopier.PreparedCopy)
    assert_type(plan.start_copy(batch), AsyncCopyHandle[Batch])
    assert_type(plan.start_copy(array), AsyncCopyHandle[torch.Tensor])
    assert_type(plan.why_not(batch), str | None)
    assert_type(plan.device, torch.device)
    assert_type(plan.fits, int)

def collated(
    batches: list[Batch],
    tensors: Sequence[torch.Tensor],
    arrays: list[Array],
    pairs: list[tuple[torch.Tensor, int]],
    records: list[dict[str, float]],
    dataset: Dataset[Batch],
) -> None:
    assert_type(tdcopier.collate(batches), Batch)
    assert_type(tdcopier.collate(tensors), torch.Tensor)
    assert_type(tdcopier.collate(arrays), torch.Tensor)
    assert_type(tdcopier.collate([1, 2]), torch.Tensor)
    assert_type(tdcopier.collate(pairs), list[torch.Tensor])
    assert_type(tdcopier.collate(records), Batch)
    DataLoader(dataset, batch_size=4, collate_fn=tdcopier.collate)

def others(batch: Batch, model: torch.nn.Module) -> None:
    explained = tdcopier.explain(batch, "cuda")
    assert_type(explained, tdcopier.Explanation)
    assert_type([row.bytes for row in explained], list[int])
    assert_type(explained.counts.transfers, int)
    assert_type(tdcopier.pin_memory_(batch), tdcopier.PinnedMemory)
    with tdcopier.pin_memory_(batch) as pinned:
        assert_type(pinned.bytes, int)
    assert_type(tdcopier.prefetch([batch], "cuda"), tdcopier.Prefetcher[Batch])
    assert_type(tdcopier.park(model), tdcopier.Parked)
    assert_type(tdcopier.snapshot(model), tdcopier.Snapshot)
    assert_type(tdcopier.staging_bytes("cuda"), int)
    assert_type(tdcopier.reserve_pinned_memory(1), int)
    assert_type(tdcopier.trim_pinned_memory(), int)
    assert_type(tdcopier.pinned_memory(), tdcopier.PinnedMemoryUse)
    with tdcopier.parked(model):
        pass

def mistakes(batch: Batch, array: Array) -> None:
    handle = tdcopier.start_copy(batch, "cuda")
    handle["x"]  # error
    handle.cpu()  # error
    handle.wait().cpu()  # error
    len(handle)  # error
    list(handle)  # error
    tdcopier.pin_memory_(batch)["x"]  # error
    tdcopier.prepare(batch, "cuda").wait()  # error
    tdcopier.start_copy(batch)  # error
    tdcopier.start_copy("cuda", batch)  # error
    tdcopier.copy(batch, "cuda", non_blocking=True)  # error
    tdcopier.gather(array, [1])  # error
    tdcopier.gather(batch, [1], "cuda", on_unknown="no")  # error
    tdcopier.collate()  # error
    wrong: list[int] = tdcopier.collate([batch])  # error
"""


def test_each_public_function_gives_the_types_of_what_it_is_given(tmp_path):
    said = errors_of_mypy(tmp_path, TYPED)
    lines = {int(line.split(":")[1]) for line in said.splitlines() if ": error:" in line}
    wanted = {n for n, line in enumerate(TYPED.splitlines(), 1) if line.endswith("# error")}
    assert lines == wanted, said


def errors_of_mypy(folder: Path, code: str) -> str:
    api = pytest.importorskip("mypy.api", exc_type=ImportError)
    (folder / "typed.py").write_text(code)
    settings = folder / "mypy.ini"
    settings.write_text("[mypy]\nstrict = True\nfollow_imports = silent\n")
    arguments = ["--config-file", str(settings), "--no-incremental", str(folder / "typed.py")]
    said, problems, _ = api.run(arguments)
    assert not problems
    return str(said)
