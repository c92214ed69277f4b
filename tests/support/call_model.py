"""Models what each public call does with its leaves in random programs: sources to results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from copy_model import (
    WRAPPINGS,
    Copy,
    CopyPlan,
    Filled,
    LeafPlan,
    Moved,
    Same,
    Source,
    World,
    view,
)
from model_memory import PLACES

import tdcopier

STORAGE_ROWS = 6


class Leaf(NamedTuple):
    """A leaf of the tree that is copied, its destination, and its expected result."""

    value: Any
    expected: Any
    destination: Any = None


def prepare(world: World, plan: CopyPlan, like: Copy | None = None) -> Copy:
    """Makes the sources of a copy. Those on a device are written by work on the current stream.

    Args:
        world: The world that the program runs in.
        plan: What to copy.
        like: An earlier copy of the same plan whose destinations are filled again.
    """
    copy = Copy(plan)
    make = CALLS[plan.call].leaf
    if like is not None and like.destinations:
        copy.destinations = like.destinations
    elif plan.call == "copy_into":
        copy.destinations = _destinations(world, plan)
    elif plan.call == "start_scatter":
        copy.destinations = [_storage(world, plan, leaf) for leaf in plan.leaves]
    leaves = [
        opaque_leaf(copy, i) if leaf.kind == "opaque" else make(world, copy, leaf, i)
        for i, leaf in enumerate(plan.leaves)
    ]
    wrap = WRAPPINGS[plan.wrapping]
    copy.tree = wrap([leaf.value for leaf in leaves])
    copy.expected = wrap([leaf.expected for leaf in leaves])
    copy.destination = wrap([leaf.destination for leaf in leaves])
    return copy


def launch(world: World, copy: Copy) -> None:
    """Starts the copy on the current streams."""
    copy.handle = CALLS[copy.plan.call].start(world, copy)
    copy.tree = None
    world.counted[0] += len(copy.delegated_bytes)
    world.counted[1] += sum(copy.delegated_bytes)


# ---- leaves --------------------------------------------------------------------------------------


def opaque_leaf(copy: Copy, number: int) -> Leaf:
    copy.counts["opaque"] += 1
    value = f"opaque {number}"
    expected = copy.destinations[number] if copy.destinations else value
    return Leaf(value, Same(expected), expected)


def _place(plan: CopyPlan, leaf: LeafPlan) -> str:
    if not leaf.elsewhere:
        return plan.source
    return PLACES[(PLACES.index(plan.source) + 1) % len(PLACES)]


def _source(world: World, copy: Copy, leaf: LeafPlan, place: str) -> tuple[Any, torch.Tensor]:
    """Makes a leaf to copy; returns it with its values."""
    elements = int(np.prod(leaf.shape))
    if leaf.kind == "array":
        array_bytes = np.empty(8 * elements, np.uint8)
        world.fill(torch.from_numpy(array_bytes))
        value: Any = array_bytes.view(">i8").reshape(leaf.shape)
        copy.sources.append(Source("cpu", array_bytes))
        return value, torch.from_numpy(value.astype("=i8"))
    base = world.memory(place, leaf.dtype, elements, leaf.memory)
    on_host = world.fill(base)
    copy.sources.append(Source(place, base, world.is_read_in_place(base, leaf.memory)))
    value = view(base.view(leaf.shape), leaf.layout)
    return value, view(on_host.view(leaf.shape), leaf.layout)


def moved_leaf(world: World, copy: Copy, leaf: LeafPlan, number: int) -> Leaf:
    """Makes a leaf of a copy to new memory."""
    plan, options = copy.plan, dict(copy.plan.options)
    place = "cpu" if leaf.kind == "array" else _place(plan, leaf)
    if leaf.kind == "delegated":
        leaf = LeafPlan("delegated", leaf.shape, torch.float32, memory=leaf.memory)
    value, values = _source(world, copy, leaf, place)
    if leaf.kind == "delegated":
        value = value.detach().requires_grad_()
    if place == plan.target:
        copy.sources.pop()
        copy.counts["reused"] += 1
        if leaf.kind == "array":  # may share the array's memory
            return Leaf(value, Moved(values, "cpu"))
        return Leaf(value, Same(value))
    expected = values.clone()
    size = expected.numel() * expected.element_size()
    if leaf.kind == "delegated":
        copy.counts["delegated"] += 1
        copy.delegated_bytes += [size] if size else []
        return Leaf(value, Moved(expected, plan.target, True))
    copy.counts["moved"] += 1
    copy.payload_bytes += size
    packs = options.get("pack_cpu_tensors", True)
    most = min(options.get("max_packed_chunk_bytes", 1 << 25), _MAX_PACKED_LEAF_BYTES)
    if not packs or size > most:
        copy.counts["alone"] += 1
    return Leaf(value, Moved(expected, plan.target))


_MAX_PACKED_LEAF_BYTES = 1 << 18


def filling_leaf(world: World, copy: Copy, leaf: LeafPlan, number: int) -> Leaf:
    """Makes a leaf of a copy into existing memory."""
    value, values = _source(world, copy, leaf, _place(copy.plan, leaf))
    destination = copy.destinations[number]
    assert destination is not None
    return Leaf(value, Filled(destination, values.clone()), destination)


def gathered_leaf(world: World, copy: Copy, leaf: LeafPlan, number: int) -> Leaf:
    """Makes a leaf of a storage on the host, to gather rows from."""
    elements = STORAGE_ROWS * int(np.prod(leaf.shape))
    base = world.memory("cpu", leaf.dtype, elements, copy.plan.into_memory)
    values = world.fill(base).view(STORAGE_ROWS, *leaf.shape)[list(copy.plan.rows)]
    copy.sources.append(Source("cpu", base))
    return Leaf(base.view(STORAGE_ROWS, *leaf.shape), Moved(values, copy.plan.target))


def scattered_leaf(world: World, copy: Copy, leaf: LeafPlan, number: int) -> Leaf:
    """Makes a leaf of a batch to scatter into a host storage that no other copy uses meanwhile."""
    rows = list(dict.fromkeys(copy.plan.rows))
    storage = copy.destinations[number]
    assert storage is not None
    shape = (len(rows), *leaf.shape)
    batch = LeafPlan("tensor", shape, leaf.dtype, memory=leaf.memory)
    value, values = _source(world, copy, batch, copy.plan.source)
    expected = storage.clone()
    expected[rows] = values
    return Leaf(value, Filled(storage, expected), storage)


# ---- destinations --------------------------------------------------------------------------------


def _extent(leaf: LeafPlan) -> tuple[torch.dtype, tuple[int, ...]]:
    """Returns the dtype and the shape that a destination for the leaf needs."""
    if leaf.kind == "array":
        return torch.int64, leaf.shape
    return leaf.dtype, tuple(view(torch.empty(leaf.shape, device="meta"), leaf.layout).shape)


def _storage(world: World, plan: CopyPlan, leaf: LeafPlan) -> Any:
    if leaf.kind == "opaque":
        return "opaque"
    elements = STORAGE_ROWS * int(np.prod(leaf.shape))
    base = world.memory("cpu", leaf.dtype, elements, plan.into_memory)
    world.fill(base)
    return base.view(STORAGE_ROWS, *leaf.shape)


def _destinations(world: World, plan: CopyPlan) -> list[Any]:
    """Makes one destination per leaf; work enqueued before the call reads their old values."""
    extents = [_extent(leaf) for leaf in plan.leaves if leaf.kind != "opaque"]
    place, kind = plan.target, plan.into_memory
    if plan.into == "a chunk":
        made = _chunk(world, plan, extents)
    elif plan.into == "together":
        made = _together(world, plan, extents)
    else:
        made = []
        for dtype, shape in extents:
            wide = (*shape[:-1], 2 * shape[-1]) if plan.into == "with gaps" and shape else shape
            base = world.memory(place, dtype, int(np.prod(wide)), kind)
            values = world.fill(base).view(wide)
            leaf = base.view(wide)
            if wide != shape:
                leaf, values = leaf[..., ::2], values[..., ::2]
            made.append(leaf)
            if place != "cpu":
                world.read_leaf_late(leaf, values)
    rest = iter(made)
    return ["opaque" if leaf.kind == "opaque" else next(rest) for leaf in plan.leaves]


def _together(
    world: World, plan: CopyPlan, extents: list[tuple[torch.dtype, tuple[int, ...]]]
) -> list[torch.Tensor]:
    """Makes views of one buffer, one after the other."""
    sizes = [-(-int(np.prod(shape)) * dtype.itemsize // 16) * 16 for dtype, shape in extents]
    buffer = world.memory(plan.target, torch.uint8, sum(sizes), plan.into_memory)
    world.overwrite_tensor(buffer)
    made, begin = [], 0
    for (dtype, shape), size in zip(extents, sizes, strict=True):
        used = int(np.prod(shape)) * dtype.itemsize
        made.append(buffer[begin : begin + used].view(dtype).view(shape))
        begin += size
    return made


def _chunk(
    world: World, plan: CopyPlan, extents: list[tuple[torch.dtype, tuple[int, ...]]]
) -> list[torch.Tensor]:
    """Makes destinations in the chunk that an earlier copy delivered."""
    leaves = [torch.zeros(shape, dtype=dtype) for dtype, shape in extents]
    handle = tdcopier.start_copy(leaves, plan.target)
    made: list[torch.Tensor] = handle.wait()
    world.counted[0] += handle.stats.transfers
    world.counted[1] += handle.stats.transfer_bytes
    for leaf, values in zip(made, leaves, strict=True):
        if plan.target != "cpu":
            world.read_leaf_late(leaf, values)
    return made


# ---- calls ---------------------------------------------------------------------------------------


class Call(NamedTuple):
    leaf: Callable[[World, Copy, LeafPlan, int], Leaf]
    start: Callable[[World, Copy], tdcopier.AsyncCopyHandle]


def _start_copy(world: World, copy: Copy) -> tdcopier.AsyncCopyHandle:
    return tdcopier.start_copy(copy.tree, copy.plan.target, **dict(copy.plan.options))


def _prepared(world: World, copy: Copy) -> tdcopier.AsyncCopyHandle:
    plan = copy.plan
    if plan not in world.prepared:
        world.prepared[plan] = tdcopier.prepare(
            copy.tree, plan.target, reuse_outputs=plan.call.endswith("reuse"), **dict(plan.options)
        )
    return world.prepared[plan].start_copy(copy.tree)


def _options_of_filling(plan: CopyPlan) -> dict[str, Any]:
    names = ("use_pinned_staging", "use_background_thread")
    return {name: value for name, value in plan.options if name in names}


def _copy_into(world: World, copy: Copy) -> tdcopier.AsyncCopyHandle:
    return tdcopier.start_copy_into(copy.tree, copy.destination, **_options_of_filling(copy.plan))


def _start_gather(world: World, copy: Copy) -> tdcopier.AsyncCopyHandle:
    rows = torch.tensor(copy.plan.rows, dtype=torch.int64)
    handle = tdcopier.start_gather(copy.tree, rows, copy.plan.target, **dict(copy.plan.options))
    rows.fill_(10**6)  # the caller may write to it again
    return handle


def _start_scatter(world: World, copy: Copy) -> tdcopier.AsyncCopyHandle:
    rows = torch.tensor(list(dict.fromkeys(copy.plan.rows)), dtype=torch.int64)
    options = _options_of_filling(copy.plan)
    return tdcopier.start_scatter(copy.tree, copy.destination, rows, **options)


CALLS = {
    "start_copy": Call(moved_leaf, _start_copy),
    "prepare": Call(moved_leaf, _prepared),
    "prepare with reuse": Call(moved_leaf, _prepared),
    "copy_into": Call(filling_leaf, _copy_into),
    "start_gather": Call(gathered_leaf, _start_gather),
    "start_scatter": Call(scattered_leaf, _start_scatter),
}
