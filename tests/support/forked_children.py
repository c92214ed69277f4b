"""Makes results, forks, and lets the child give them up; prints how the children ended, as JSON.

``python forked_children.py TIMES`` plays each case TIMES times: the child drops the last reference,
or its collector finds the result in a cycle. `tests/promises/test_processes.py` does this with the
calls of the table.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

import tdcopier

DEVICE_TYPE = os.environ.get("TDCOPIER_TEST_DEVICE", "sim")
if DEVICE_TYPE == "sim":
    from tdcopier import sim

    sim.enable(devices=2)
DEVICE = torch.device(DEVICE_TYPE, 0)


def host_batch(rows: int = 4) -> dict[str, Any]:
    return {
        "small": {str(i): torch.ones(rows, i + 1) for i in range(5)},
        "large": torch.ones(rows, 300_000),
    }


def pinned(*sizes: int) -> torch.Tensor:
    return torch.ones(*sizes).pin_memory(DEVICE_TYPE)


def on_device(value: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda leaf: leaf.to(DEVICE), value)


def prefetched() -> Any:
    with tdcopier.prefetch([host_batch(), host_batch(), host_batch()], DEVICE) as batches:
        return list(batches)


def prefetched_on_the_device() -> Any:
    with tdcopier.prefetch((on_device(host_batch()) for _ in range(3)), DEVICE) as batches:
        return list(batches)


def prefetcher_in_the_middle() -> Any:
    batches = tdcopier.prefetch([host_batch() for _ in range(5)], DEVICE)
    return [batches, next(iter(batches))]


def prefetcher_with_batches_on_the_device(threaded: bool) -> Any:
    """All have been read, and none taken but the first."""
    source = (on_device(host_batch()) for _ in range(3))
    batches = tdcopier.prefetch(source, DEVICE, depth=5, threaded=threaded)
    first = next(batches)
    time.sleep(0.2)  # its thread has ended
    return [batches, first]


def gathered_by_the_device() -> Any:
    table = pinned(1000, 200)
    index = torch.randint(0, 1000, (64,)).to(DEVICE)
    return [table, index, tdcopier.gather({"x": table}, index, DEVICE)]


def snapped(device_copy: bool) -> Any:
    model = torch.nn.Linear(500, 500).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 500).to(DEVICE)).sum().backward()
    optimizer.step()
    taken = tdcopier.snapshot({"model": model, "optimizer": optimizer}, device_copy=device_copy)
    return [taken.get(), taken, model, optimizer]


def resumed() -> Any:
    model = torch.nn.Linear(500, 500).to(DEVICE)
    parked = tdcopier.park(model)
    parked.resume()
    return [model, parked]


def still_parked() -> Any:
    model = torch.nn.Linear(500, 500).to(DEVICE)
    return [model, tdcopier.park(model)]


def delegated() -> Any:
    return tdcopier.copy(
        [torch.ones(3, requires_grad=True), torch.eye(4).to_sparse(), host_batch()], DEVICE
    )


def lazily_cloned() -> Any:
    result = tdcopier.start_copy([torch.ones(300_000)], DEVICE).wait()[0]
    return [result, torch._lazy_clone(result)]


def taken() -> Any:
    return tdcopier.start_copy(host_batch(), DEVICE).wait()


CASES: dict[str, Callable[[], Any]] = {
    "prefetch": prefetched,
    "prefetch of batches on the device": prefetched_on_the_device,
    "prefetch in the middle": prefetcher_in_the_middle,
    "prefetch of batches on the device, in the middle": (
        lambda: prefetcher_with_batches_on_the_device(threaded=True)
    ),
    "prefetch without a thread, in the middle": (
        lambda: prefetcher_with_batches_on_the_device(threaded=False)
    ),
    "gather by the device": gathered_by_the_device,
    "gather on the device": lambda: tdcopier.gather(
        on_device(host_batch(rows=50)), torch.arange(9), DEVICE
    ),
    "snapshot": lambda: snapped(device_copy=False),
    "snapshot, copied on the device": lambda: snapped(device_copy=True),
    "parked and resumed": resumed,
    "parked": still_parked,
    "delegated leaves": delegated,
    "lazy clone": lazily_cloned,
}
BESIDE_A_LOADER: dict[str, Callable[[], Any]] = {
    "wait": taken,
    "snapshot": CASES["snapshot"],
    "prefetch in the middle": CASES["prefetch of batches on the device, in the middle"],
}


class Cycle:
    def __init__(self, held: Any) -> None:
        self.held, self.itself = held, self


def dropped(make: Callable[[], Any]) -> int:
    held = [make()]
    child = os.fork()
    if child == 0:
        held.clear()
        gc.collect()
        os._exit(0)
    held.clear()
    gc.collect()  # so that the next child meets its own case only
    return os.waitpid(child, 0)[1]


def collected(make: Callable[[], Any]) -> int:
    """The parent has given up the cycle, and its collector has not looked yet."""
    Cycle(make())
    child = os.fork()
    if child == 0:
        gc.collect()
        os._exit(0)
    gc.collect()
    return os.waitpid(child, 0)[1]


class Rows(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index % 4 == 0:
            gc.collect()
        return index


def beside_a_loader(make: Callable[[], Any]) -> int:
    """Workers that find a result in a cycle; a worker that dies raises an error here."""
    Cycle(make())
    loader = torch.utils.data.DataLoader(
        Rows(), batch_size=2, num_workers=2, multiprocessing_context="fork"
    )
    try:
        return 0 if sum(batch.sum().item() for batch in loader) == 28 else 1
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1


def endings(times: int) -> Iterator[tuple[str, list[int]]]:
    for name, make in CASES.items():
        yield f"{name}, dropped", [dropped(make) for _ in range(times)]
        yield f"{name}, in a cycle", [collected(make) for _ in range(times)]
    for name, make in BESIDE_A_LOADER.items():
        yield f"{name}, beside a loader", [beside_a_loader(make) for _ in range(times)]


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of forks beside threads
    snapped(device_copy=False)  # torch imports more for an optimizer
    gc.collect()
    gc.disable()
    gc.freeze()  # collections look at what the cases make
    print(json.dumps(dict(endings(int(sys.argv[1])))))
