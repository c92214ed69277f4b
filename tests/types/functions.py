"""Types of results, and mistakes that are errors: mypy reads this, and nothing runs it.

An error that it does not find is an unused `type: ignore`, which is one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from typing_extensions import assert_type

import tdcopier
from tdcopier import AsyncCopyHandle

Batch = dict[str, torch.Tensor]
Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


class Point(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


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


def rows(
    batch: Batch, array: Array, index: torch.Tensor, maybe: torch.device | None, none: Batch | None
) -> None:
    assert_type(tdcopier.start_gather(batch, index, "cuda"), AsyncCopyHandle[Batch])
    assert_type(tdcopier.start_gather(batch, [1], out=batch), AsyncCopyHandle[Batch])
    assert_type(tdcopier.start_gather(array, index, "cuda"), AsyncCopyHandle[torch.Tensor])
    assert_type(tdcopier.start_gather(array, index, out=array), AsyncCopyHandle[Array])
    assert_type(tdcopier.gather(batch, slice(3), "cuda", use_pinned_staging=False), Batch)
    assert_type(tdcopier.gather(batch, (0, index), "cuda", out=batch), Batch)
    assert_type(tdcopier.gather(array, index, "cuda"), torch.Tensor)
    assert_type(tdcopier.gather(array, index, out=array), Array)
    assert_type(tdcopier.gather(array, index, "cuda", out=torch.ones(3)), torch.Tensor)
    assert_type(tdcopier.gather(array, index, maybe), torch.Tensor)
    assert_type(tdcopier.gather(batch, index, maybe, out=none), Batch)
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
    points: list[Point],
    ordered: list[OrderedDict[str, torch.Tensor]],
    records: list[dict[str, float]],
    dataset: Dataset[Batch],
) -> None:
    assert_type(tdcopier.collate(batches), Batch)
    assert_type(tdcopier.collate(tensors), torch.Tensor)
    assert_type(tdcopier.collate(arrays), torch.Tensor)
    assert_type(tdcopier.collate([1, 2]), torch.Tensor)
    assert_type(tdcopier.collate(points), Any)  # no type says that it is a Point of tensors
    assert_type(tdcopier.collate(ordered), OrderedDict[str, torch.Tensor])
    assert_type(tdcopier.collate(records), Batch)
    DataLoader(dataset, batch_size=4, collate_fn=tdcopier.collate)


def others(batch: Batch, model: torch.nn.Module) -> None:
    explained = tdcopier.explain(batch, "cuda")
    assert_type(explained, tdcopier.stats.Explanation)
    assert_type([row.nbytes for row in explained], list[int])
    assert_type(explained.counts.transfers, int)
    assert_type(tdcopier.pin_memory_(batch), tdcopier.pinned.PinnedMemory)
    with tdcopier.pin_memory_(batch) as pinned:
        assert_type(pinned.nbytes, int)
    assert_type(tdcopier.prefetch([batch], "cuda"), tdcopier.Prefetcher[Batch])
    parcel = tdcopier.pack(batch)
    assert_type(tdcopier.start_copy(parcel, "cuda").wait(), Any)
    assert_type(tdcopier.copy(parcel, "cuda"), Any)
    assert_type(tdcopier.prefetch([parcel], "cuda"), tdcopier.Prefetcher[Any])
    assert_type(tdcopier.prepare(batch, "cuda").start_copy(parcel).get(), Any)
    assert_type(tdcopier.park(model), tdcopier.Parked)
    assert_type(tdcopier.park(model, on_unknown="raise"), tdcopier.Parked)
    assert_type(tdcopier.snapshot(model), tdcopier.Snapshot)
    assert_type(tdcopier.snapshot(model, on_unknown="warn"), tdcopier.Snapshot)
    tdcopier.checkpoint.SnapshotStager(on_unknown="ignore")
    assert_type(tdcopier.pinned.staging_bytes("cuda"), int)
    assert_type(tdcopier.pinned.reserve(1), int)
    assert_type(tdcopier.pinned.trim(), int)
    assert_type(tdcopier.pinned.usage(), tdcopier.pinned.Usage)
    with tdcopier.parked(model, on_unknown=None):
        pass


def mistakes(batch: Batch, array: Array) -> None:
    handle = tdcopier.start_copy(batch, "cuda")
    handle["x"]  # type: ignore[index]
    handle.cpu()  # type: ignore[attr-defined]
    handle.wait().cpu()  # type: ignore[attr-defined]
    len(handle)  # type: ignore[arg-type]
    list(handle)  # type: ignore[call-overload]
    tdcopier.pin_memory_(batch)["x"]  # type: ignore[index]
    tdcopier.prepare(batch, "cuda").wait()  # type: ignore[attr-defined]
    tdcopier.start_copy(batch)  # type: ignore[call-overload]
    tdcopier.start_copy("cuda", batch)  # type: ignore[call-overload]
    tdcopier.copy(batch, "cuda", non_blocking=True)  # type: ignore[call-overload]
    tdcopier.gather(array, [1])  # type: ignore[call-overload]
    tdcopier.gather(batch, [1], "cuda", on_unknown="no")  # type: ignore[call-overload]
    tdcopier.park(batch, on_unknown="no")  # type: ignore[arg-type]
    tdcopier.snapshot(batch, on_unknown="no")  # type: ignore[arg-type]
    tdcopier.checkpoint.SnapshotStager(on_unknown="no")  # type: ignore[arg-type]
    tdcopier.collate()  # type: ignore[call-overload]
    wrong: list[int] = tdcopier.collate([batch])  # type: ignore[assignment]
