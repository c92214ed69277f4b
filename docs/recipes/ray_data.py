"""Batches of a Ray dataset: Ray's thread starts their copies to the device, ahead of the loop."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import ray
import torch
from ray.data.collate_fn import NumpyBatchCollateFn

import tdcopier

Batch = dict[str, torch.Tensor]
Columns = dict[str, np.ndarray[Any, Any]]


class StartCopy(NumpyBatchCollateFn):  # type: ignore[misc, unused-ignore]  # without ray
    """Starts the copy of all columns of a batch, packed."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def __call__(self, columns: Columns) -> Any:
        return tdcopier.start_copy(columns, self.device)


def batches(dataset: Any, device: str, size: int = 32, ahead: int = 2) -> Iterator[Batch]:
    """Yield batches on the device; the current stream waits for each copy."""
    for handle in dataset.iter_torch_batches(
        batch_size=size, prefetch_batches=ahead, collate_fn=StartCopy(device)
    ):
        yield handle.wait()


def main() -> None:
    device = "cuda"
    if not torch.cuda.is_available():
        from tdcopier import sim

        sim.enable()
        device = "sim"
    rows = [{"image": np.full((3, 8, 8), n, np.float32), "label": n % 10} for n in range(256)]
    labels = sum(int(batch["label"].sum()) for batch in batches(ray.data.from_items(rows), device))
    ray.shutdown()
    print(f"{device}: labels add up to {labels}")


if __name__ == "__main__":
    main()
