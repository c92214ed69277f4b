"""The calls that every suite of this folder holds to its promise: one row of `CALLS` each.

A row says where the call reads and writes, and how it is made. In most tests all leaves of one call
have one value, so what arrives is compared with a number. To add a call is to add a row; where a
promise does not apply, `never` says why.

Not here are `prefetch`, whose passes ask for batches on their own, `park` and `snapshot`, which
raise what fails in the call itself and leave it to torch's allocator to keep what they read, and
TensorDict's own calls, which return no handle. Their folders have the same promises.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from filled_leaves import filled
from scenario_world import held
from tensordict import TensorDict
from work_of_calls import ROWS, Call, Done, Enqueued, Failed, Leaves, Work

import tdcopier

FEW = [10, 20]


def _copy(**options: Any) -> Callable[[Work], Any]:
    return lambda work: tdcopier.start_copy(work.sources, work.target, **options)


def _async_to(work: Work) -> Any:
    leaves = {f"{number}": leaf for number, leaf in enumerate(work.sources)}
    return tdcopier.async_to(TensorDict(leaves), work.target)


def _planned(work: Work) -> Any:
    return work.plan.start_copy(work.sources)


def _into(**options: Any) -> Callable[[Work], Any]:
    return lambda work: tdcopier.start_copy_into(work.sources, [*work.written], **options)


def _collated(work: Work) -> Any:
    return Done(
        tdcopier.collate([[leaf[row] for leaf in work.sources] for row in range(len(ROWS))])
    )


def _deferred(work: Work) -> Any:
    with held():
        return tdcopier.start_copy(work.sources, work.target)


def _gather(work: Work) -> Any:
    if work.written:
        return tdcopier.start_gather(work.sources, work.rows, out=[*work.written])
    return tdcopier.start_gather(work.sources, work.rows, work.target)


def _scatter(work: Work) -> Any:
    return tdcopier.start_scatter(work.sources, [*work.written], work.rows)


def _named(leaves: Leaves) -> TensorDict:
    return TensorDict({f"{number}": leaf for number, leaf in enumerate(leaves)}, [len(leaves[0])])


def _gather_tensordict(work: Work) -> Any:
    return tdcopier.start_gather(_named(work.sources), work.rows, work.target)


def _scatter_tensordict(work: Work) -> Any:
    return tdcopier.start_scatter(_named(work.sources), _named(work.written), work.rows)


def _packed(work: Work) -> tdcopier.Parcel:
    """Returns the sources as a parcel in the memory that the row says."""
    kind = work.call.packed
    if kind == "given":
        memory = bytearray(tdcopier.pack(work.sources).nbytes)
        return tdcopier.pack(work.sources, out=memory)
    parcel = tdcopier.pack(work.sources)
    if kind == "pinned":
        return parcel.pin_memory()
    if kind == "read-only":
        return tdcopier.Parcel.from_buffer(_aligned_bytes(parcel))
    if kind == "mapped":
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "parcel")
            parcel.save(path)
            return tdcopier.Parcel.load(path)
    return parcel


def _aligned_bytes(parcel: tdcopier.Parcel) -> Any:
    """Returns bytes that cannot be written, at an address where they are not copied."""
    memory = np.frombuffer(bytearray(parcel), np.uint8)
    memory.flags.writeable = False
    return memory


def _copy_of_parcel(work: Work) -> Any:
    try:
        parcel = _packed(work)
    except RuntimeError as error:
        if "capturing" in str(error):
            raise  # in the call, as every call does
        return Failed(error)
    return tdcopier.start_copy(parcel, work.target)


def _parcel_into(work: Work) -> Any:
    return tdcopier.start_copy_into(_packed(work), [*work.written])


def _into_parcel(work: Work) -> Any:
    parcel = tdcopier.Parcel.from_buffer(work.parcel_memory())
    return tdcopier.start_copy_into(work.sources, parcel)


def _pack(work: Work) -> Any:
    try:
        tree = _packed(work).tree()
    except RuntimeError as error:
        return Failed(error)
    return Done(tree) if work.source == "cpu" else Enqueued(tree, work.source)


def _stacked(work: Work) -> Any:
    batch = TensorDict({str(i): leaf for i, leaf in enumerate(work.sources)}, [])
    return Done([*tdcopier.packed()(batch).tree().values()])


HELD = {"held": "the host waits for the device, which reads or writes its memory where it is"}
BUSY = {**HELD, "busy": "the host waits for the work before on the memory that it writes"}
OF_TORCH = {"busy": "torch copies on the streams that are current at the call"}
UNASKED = {"unasked": "its consumer sends it"}
PAGEABLE = {"pinned": "it makes pageable memory"}
NO_DEVICE = {"held": "no device takes part"}
PACKS = {"told": "what is packed on a device first raises its failures in the call"}
OF_STREAM = dict.fromkeys(
    ("told", "others", "busy", "held"), "it returns a tree, which the current stream makes"
)
FILES = {"interrupted": "Python leaves a file open that is interrupted before its `with` begins"}
VIEWS = {"itself": "it fills a parcel, of which each tree has views of its own"}

CALLS: dict[str, Call] = {
    "copy to device": Call(_copy(), "host", "device"),
    "copy to host": Call(_copy(), "device", "host"),
    "copy between devices": Call(_copy(), "device", "other"),
    "pageable copy to device": Call(
        _copy(use_pinned_staging=False), "host", "device", never=HELD
    ),
    "pageable copy to host": Call(
        _copy(use_pinned_staging=False), "device", "host", never={**HELD, **PAGEABLE}
    ),
    "copy to pinned results": Call(
        _copy(require_pinned_results=True), "device", "host", requires_pinned=True
    ),
    "copy in many chunks": Call(_copy(max_packed_chunk_bytes=512), "host", "device"),
    "copy at wide addresses": Call(_copy(min_packed_alignment_bytes=4096), "device", "host"),
    "copy without threads": Call(_copy(use_background_thread=False), "device", "host"),
    "copy between devices without threads": Call(
        _copy(use_background_thread=False), "device", "other"
    ),
    "copy of pinned": Call(_copy(), "host", "device", pinned="by torch", never=HELD),
    "copy that is deferred": Call(_deferred, "host", "device", never=UNASKED),
    "copy of gradients": Call(
        _copy(), "host", "device", delegated="gradient", never={**HELD, **OF_TORCH}
    ),
    "copy of gradients between devices": Call(
        _copy(), "device", "other", delegated="gradient", never=OF_TORCH
    ),
    "copy of wrappers": Call(
        _copy(), "host", "device", delegated="wrapper", never={**HELD, **OF_TORCH}
    ),
    "async_to device": Call(_async_to, "host", "device"),
    "async_to host": Call(_async_to, "device", "host"),
    "planned to device": Call(_planned, "host", "device", plan="plain"),
    "planned to host": Call(_planned, "device", "host", plan="plain"),
    "planned between devices": Call(_planned, "device", "other", plan="plain"),
    "planned, reusing": Call(_planned, "host", "device", plan="reusing"),
    "planned to host, reusing": Call(_planned, "device", "host", plan="reusing"),
    "collate": Call(_collated, "host", "host", tables="neither", never={**NO_DEVICE, **PAGEABLE}),
    "parcel to device": Call(_copy_of_parcel, "host", "device", packed="pageable"),
    "pinned parcel to device": Call(
        _copy_of_parcel, "host", "device", packed="pinned", never=HELD
    ),
    "read-only parcel to device": Call(_copy_of_parcel, "host", "device", packed="read-only"),
    "mapped parcel to device": Call(
        _copy_of_parcel, "host", "device", packed="mapped", never=FILES
    ),
    "parcel to host": Call(_copy_of_parcel, "device", "host", packed="device", never=PACKS),
    "parcel between devices": Call(
        _copy_of_parcel, "device", "other", packed="device", never=PACKS
    ),
    "pack on host": Call(
        _pack, "host", "host", packed="given", never={**NO_DEVICE, **PAGEABLE}
    ),
    "pack of read-only": Call(
        _pack, "host", "host", packed="read-only", never={**NO_DEVICE, **PAGEABLE}
    ),
    "packed samples": Call(
        _stacked, "host", "host", packed="given", never={**NO_DEVICE, **PAGEABLE}
    ),
    "pack on device": Call(_pack, "device", "device", packed="device", never=OF_STREAM),
    "into device": Call(_into(), "host", "device", fills=True),
    "into host": Call(_into(), "device", "host", fills=True),
    "into pinned": Call(_into(), "device", "host", fills=True, pinned="by torch"),
    "into the same device": Call(_into(), "device", "device", fills=True),
    "into another device": Call(_into(), "device", "other", fills=True),
    "into host from host": Call(_into(), "host", "host", fills=True, never=NO_DEVICE),
    "parcel into device": Call(_parcel_into, "host", "device", fills=True, packed="pageable"),
    "parcel on a device into host": Call(
        _parcel_into, "device", "host", fills=True, packed="device", never=PACKS
    ),
    "into parcel": Call(
        _into_parcel, "device", "host", fills=True, packed="destination", never=VIEWS
    ),
    "into parcel from host": Call(
        _into_parcel, "host", "host", fills=True, packed="destination",
        never={**NO_DEVICE, **VIEWS},
    ),
    "pageable into device": Call(
        _into(use_pinned_staging=False), "host", "device", fills=True, never=BUSY
    ),
    "pageable into host": Call(
        _into(use_pinned_staging=False), "device", "host", fills=True, never=HELD
    ),
    "gather to host": Call(_gather, "host", "host", tables="source", never=NO_DEVICE),
    "gather to device": Call(_gather, "host", "device", tables="source"),
    "gather of pinned": Call(
        _gather, "host", "device", pinned="by torch", tables="source", never=HELD
    ),
    "gather of memory pinned in place": Call(
        _gather, "host", "device", pinned="in place", tables="source", never=HELD
    ),
    "gather of numbers on the device": Call(
        _gather, "host", "device", pinned="by torch", tables="source", numbers_on_device=True,
        never=HELD,
    ),
    "gather of a TensorDict": Call(_gather_tensordict, "host", "device", tables="source"),
    "gather of a TensorDict to host": Call(
        _gather_tensordict, "host", "host", tables="source", never=NO_DEVICE
    ),
    "gather into device": Call(_gather, "host", "device", fills=True, tables="source"),
    "gather into host": Call(
        _gather, "host", "host", fills=True, tables="source", never=NO_DEVICE
    ),
    "gather into device, of numbers on it": Call(
        _gather, "host", "device", fills=True, pinned="by torch", tables="source",
        numbers_on_device=True, never=HELD,
    ),
    "scatter": Call(_scatter, "device", "host", fills=True, tables="target"),
    "scatter from host": Call(
        _scatter, "host", "host", fills=True, tables="target", never=NO_DEVICE
    ),
    "scatter to pinned": Call(
        _scatter, "device", "host", fills=True, pinned="by torch", tables="target"
    ),
    "scatter to memory pinned in place": Call(
        _scatter, "device", "host", fills=True, pinned="in place", tables="target"
    ),
    "scatter to numbers on the device": Call(
        _scatter, "device", "host", fills=True, pinned="by torch", tables="target",
        numbers_on_device=True,
    ),
    "scatter of a TensorDict": Call(
        _scatter_tensordict, "device", "host", fills=True, tables="target"
    ),
}  # fmt: skip


def each_call(holds: Callable[[Call], bool] = lambda _: True, *promises: str) -> Any:
    """Parametrizes a test over the calls for which this holds and to which the promises apply."""
    names = [
        name
        for name, call in CALLS.items()
        if holds(call) and call.never.keys().isdisjoint(promises)
    ]
    return pytest.mark.parametrize("call", names)


def goes_on_alone(call: Call) -> bool:
    """Returns whether the copy goes on whatever its caller does next.

    Not so if torch copies the leaves in the call, or the call waits for earlier work on its memory,
    or its consumer sends it.
    """
    return not call.delegated and call.never.keys().isdisjoint(["busy", "unasked"])


def each_call_that_goes_on(holds: Callable[[Call], bool] = lambda _: True, *promises: str) -> Any:
    """Parametrizes a test over those of `each_call` whose copies go on alone."""
    return each_call(lambda call: goes_on_alone(call) and holds(call), *promises)


def calls_for(devices: int) -> list[str]:
    """Returns the calls that can be made with this number of devices, and go on alone."""
    return [
        name
        for name, row in CALLS.items()
        if goes_on_alone(row) and (devices > 1 or "other" not in (row.source, row.target))
    ]


def work_of(
    call: str,
    device: str,
    value: float = 0,
    elements: list[int] = FEW,
    leaves: Leaves | None = None,
) -> Work:
    """Prepares the call with these leaves, or with leaves of a value and numbers of elements."""
    row = CALLS[call]
    if leaves is None:
        leaves = filled(value, elements, "cpu")
        if row.tables:
            n_rows = len(ROWS)
            leaves = [leaf[: len(leaf) // n_rows * n_rows].view(n_rows, -1) for leaf in leaves]
    return Work(row, device, leaves)


def works_at_once(make: Callable[[], Work], count: int) -> list[Work]:
    """Prepares works whose copies may run at once: one again and again, unless it fills a tree."""
    first = make()
    return [first, *(make() if first.call.fills else first for _ in range(count - 1))]
