"""Types of `prefetch`, as in `functions.py`."""

from __future__ import annotations

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
    wrong: Prefetcher[list[int]] = prefetch(iterable, "cuda")  # type: ignore[arg-type]
    batches.clos()  # type: ignore[attr-defined]
    prefetch(loader, "cuda").clos()  # type: ignore[attr-defined]
    batches[0]  # type: ignore[index]
    batches.batch_size = 8  # type: ignore[misc]
    prefetch(loader, "cuda", num_workers=2)  # type: ignore[call-overload]
