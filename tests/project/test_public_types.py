"""Typed input gives typed results: one run of mypy over programs that use each public function."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

FUNCTIONS = """
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple
from dataclasses import dataclass
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
    assert_type(tdcopier.pinned.staging_buffer_bytes("cuda"), int)
    assert_type(tdcopier.pinned.reserve(1), int)
    assert_type(tdcopier.pinned.trim(), int)
    assert_type(tdcopier.pinned.usage(), tdcopier.pinned.Usage)
    with tdcopier.parked(model, on_unknown=None):
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
    tdcopier.park(batch, on_unknown="no")  # error
    tdcopier.snapshot(batch, on_unknown="no")  # error
    tdcopier.checkpoint.SnapshotStager(on_unknown="no")  # error
    tdcopier.collate()  # error
    wrong: list[int] = tdcopier.collate([batch])  # error
"""

PREFETCH = """
from collections.abc import Callable, Iterable, Iterator
from typing import Any
import numpy as np
import torch
from torch.utils.data import DataLoader
from typing_extensions import assert_type
from tdcopier import AsyncCopyHandle, Prefetcher, prefetch

Batch = dict[str, torch.Tensor]

def check(
    loader: DataLoader[Batch],
    iterable: Iterable[Batch],
    generator: Iterator[Batch],
    sample: Callable[[], Batch],
    handles: Iterable[AsyncCopyHandle[Batch]],
    gather: Callable[[], AsyncCopyHandle[Batch]],
) -> None:
    for known in (iterable, generator):
        assert_type(prefetch(known, "cuda"), Prefetcher[Batch])
    assert_type(prefetch(sample, "cuda", depth=3), Prefetcher[Batch])
    assert_type(prefetch(handles, "cuda"), Prefetcher[Batch])
    assert_type(prefetch(gather, "cuda", threaded=False), Prefetcher[Batch])
    assert_type(prefetch(loader, "cuda"), Prefetcher[Any])
    assert_type(prefetch([np.zeros(3)], "cuda"), Prefetcher[torch.Tensor])
    assert_type(prefetch(loader, "cuda").set_epoch, Callable[[int], Any])
    batches: Prefetcher[Batch] = prefetch(loader, "cuda")
    for each in batches:
        assert_type(each, Batch)
    with batches as same:
        assert_type(next(same), Batch)
    print(batches.dataset, batches.batch_size, batches.sampler, batches.num_workers)
    wrong: Prefetcher[list[int]] = prefetch(iterable, "cuda")  # error
    batches.clos()  # error
    prefetch(loader, "cuda").clos()  # error
    batches[0]  # error
    batches.batch_size = 8  # error
    prefetch(loader, "cuda", num_workers=2)  # error
"""

PROGRAMS = {"functions": FUNCTIONS, "prefetch": PREFETCH}

UNUSED = ("_dynamo", "_export", "_functorch", "_higher_order_ops", "_inductor", "_prims", "_refs")
UNUSED += ("_subclasses", "ao", "distributed", "export", "fx", "jit", "onnx", "testing")
"""Parts of torch that no type of the programs comes from, and that take most of mypy's time."""


def test_results_have_the_types_of_what_is_given_and_mistakes_are_errors(tmp_path):
    pytest.importorskip("mypy.api", exc_type=ImportError)
    files = [tmp_path / f"{name}.py" for name in PROGRAMS]
    for file, code in zip(files, PROGRAMS.values(), strict=True):
        file.write_text(code)
    settings = tmp_path / "mypy.ini"
    unused = ",".join(["sympy.*", *(f"torch.{name}.*" for name in UNUSED)])
    settings.write_text(
        f"[mypy]\nstrict = True\nfollow_imports = silent\n[mypy-{unused}]\nfollow_imports = skip\n"
    )
    # At once, and in a process of its own: its half a million objects would slow down this one.
    mypy = [sys.executable, "-m", "mypy", "--config-file", settings, "--no-incremental"]
    done = subprocess.run([*mypy, *files], check=False, capture_output=True, text=True)
    assert not done.stderr
    wanted = {
        (name, number)
        for name, code in PROGRAMS.items()
        for number, line in enumerate(code.splitlines(), 1)
        if line.endswith("# error")
    }
    found = re.findall(r"(\w+)\.py:(\d+): error:", done.stdout)
    assert {(name, int(number)) for name, number in found} == wanted, done.stdout
