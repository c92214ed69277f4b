"""
TensorDicts
===========

We copy TensorDicts to the accelerator and back while the host does other work:
flat ones, nested ones, and one whose tensors are memory-mapped files.
We also copy into existing tensors, which a CUDA graph needs,
and let TensorDict's own ``.to`` use tdcopier.
"""

import contextlib
import tempfile
from pathlib import Path

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    TensorClass,
    TensorDict,
    is_tensor_collection,
    lazy_stack,
)

import tdcopier

if torch.cuda.is_available():
    device = torch.device("cuda", torch.cuda.current_device())
    print(f"target: {device}, {torch.cuda.get_device_name(device)}")
else:
    from tdcopier import sim

    sim.enable()
    device = torch.device("sim", 0)
    print(f"target: {device}, the simulated device (no CUDA device here)")

# %%
# The device of a TensorDict
# --------------------------
# With ``device=``, a TensorDict moves each entry to that device, also those that are set later.
# Without it, ``.device`` is None, and entries stay on the devices that they come from.
# ``clear_device_()`` sets ``.device`` to None again, and moves no entry.


def where(name, td):
    """Print the device of a TensorDict, and that of each entry."""
    places = {key: str(leaf.device) for key, leaf in td.items()}
    print(f"{name:>12}: device={td.device!s:6} {places}")


anywhere = TensorDict({"depth": torch.rand(4)}, batch_size=[4])
anywhere["mask"] = torch.ones(4, device=device)
where("no device", anywhere)

there = TensorDict({"depth": torch.rand(4)}, batch_size=[4], device=device)
there["mask"] = torch.ones(4)  # moved from the host to the device
where("a device", there)

cleared = there.clone(recurse=False).clear_device_()  # shares the tensors
cleared["label"] = torch.zeros(4)  # stays where it is
where("cleared", cleared)

assert anywhere.device is None
assert cleared.device is None
assert there["mask"].device == cleared["mask"].device == device
assert cleared["label"].device.type == "cpu"

# %%
# To the device and back, in the background
# -----------------------------------------
# :func:`tdcopier.async_to` packs the tensors, starts their copy and returns.
# :meth:`~tdcopier.AsyncCopyHandle.wait` gives the TensorDict on the device.
# Leaves that are on the device already are reused,
# so ``async_to`` also gives a device to a TensorDict without one.

handle = tdcopier.async_to(cleared, device)
squares = [number**2 for number in range(1000)]  # other work of the host
moved = handle.wait()
where("moved", moved)
print("leaves:", handle.stats.packed_leaves, "packed,", handle.stats.reused_leaves, "reused")
assert moved.device == device
assert moved["mask"] is cleared["mask"]

# %%
# The result also moves an entry that is set later.

moved["reward"] = torch.zeros(4)
where("set later", moved)
assert moved["reward"].device == device

# %%
# Back to the host, one transfer copies each chunk to pinned memory.
# ``get()`` returns when the bytes have arrived.

handle = tdcopier.async_to(moved, "cpu")
squares.reverse()  # meanwhile
back = handle.get()
where("back", back)
print("pinned:", back["depth"].is_pinned(), "- transfers:", handle.stats.transfers)
assert 1 <= handle.stats.transfers <= 3  # one for each dtype at most
torch.testing.assert_close(back["depth"], there["depth"].cpu())

# %%
# Nested TensorDicts
# ------------------
# This one holds eight moments of a drive:
# a nested TensorDict, a tensorclass with a text field,
# a lazy stack whose members have different numbers of objects,
# and the name of the scene, which TensorDict wraps as ``NonTensorData``.


class Frames(TensorClass):
    pixels: torch.Tensor
    """(8, 8, 8) uint8"""
    exposure: torch.Tensor
    """(8,) float32"""
    camera: str = "front"


OBJECTS = [3, 1, 4, 1, 5, 2, 6, 2]


def make_drive(seed):
    """A TensorDict of eight moments on the host, with random values."""
    generator = torch.Generator().manual_seed(seed)

    def values(*shape):
        return torch.rand(*shape, generator=generator)

    pixels = torch.randint(0, 256, (8, 8, 8), dtype=torch.uint8, generator=generator)
    objects = [
        TensorDict({"boxes": values(count, 7), "labels": torch.arange(count)}) for count in OBJECTS
    ]
    return TensorDict(
        {
            "motion": {"position": values(8, 3), "velocity": values(8, 3)},
            "frames": Frames(pixels=pixels, exposure=values(8), batch_size=[8]),
            "objects": lazy_stack(objects),
            "steering": values(8, 2),
            "scene": "scene-0007",
        },
        batch_size=[8],
        device="cpu",
    )


drive = make_drive(seed=0)
handle = tdcopier.async_to(drive, device)
next_drive = make_drive(seed=1)  # meanwhile
on_device = handle.wait()
print(on_device)

# %%
# ``handle.stats`` counts each tensor once, at any depth:
# packed, alone (larger than 256 KiB), delegated to its own ``.to``, or reused.
# The two texts are opaque: the result has the same objects, in new wrappers.

stats = handle.stats
print(
    f"leaves: {stats.packed_leaves} packed, {stats.alone_leaves} alone, "
    f"{stats.delegated_leaves} delegated, {stats.reused_leaves} reused; "
    f"{stats.opaque_leaves} opaque values; {stats.transfers} transfers in {stats.chunks} chunks"
)
assert stats[:5] == (5 + 2 * len(OBJECTS), 0, 0, 0, 2)
assert stats.chunks == stats.transfers == 3  # one of each per dtype

# %%
# Compare every node and every leaf with ``.to()``
# ------------------------------------------------
# All nodes have the same classes, batch sizes, names and locks, and the device is set on each.
# All tensors have the same values and strides.


def children(value):
    """(key, child) for each child of a node. A leaf has none."""
    if isinstance(value, LazyStackedTensorDict):
        return [(str(index), member) for index, member in enumerate(value.tensordicts)]
    return list(value.items()) if is_tensor_collection(value) else []


def parts(value, path=()):
    """(path, value) for every node and every leaf, parents first."""
    found = [(path, value)]
    for key, child in children(value):
        found += parts(child, (*path, key))
    return found


def difference(got, want):
    """The name of a property that differs, or None."""
    names = ["__class__", "device"]
    if isinstance(want, torch.Tensor):
        names += ["dtype", "shape", "requires_grad"]
    else:
        names += ["batch_size", "names", "is_locked"]
    if different := [name for name in names if getattr(got, name) != getattr(want, name)]:
        return different[0]
    if isinstance(want, NonTensorData):
        return None if got.data is want.data else "data"
    if not isinstance(want, torch.Tensor):
        return None  # the caller compares its children
    if got.stride() != want.stride():
        return "strides"
    return None if torch.equal(got.cpu(), want.cpu()) else "values"


def check(got, want):
    """Compare two trees; return the numbers of nodes and of leaves."""
    leaves = 0
    pairs = list(zip(parts(got), parts(want), strict=True))
    for (path, got_value), (want_path, want_value) in pairs:
        if path != want_path:
            raise AssertionError(f"the result has {path} where .to() has {want_path}")
        if (found := difference(got_value, want_value)) is not None:
            raise AssertionError(f"{path} differs from the one that .to() gives: {found}")
        leaves += isinstance(want_value, torch.Tensor)
    return len(pairs) - leaves, leaves


compared = check(on_device, drive.to(device))
print("{} nodes and {} leaves equal those of .to()".format(*compared))
assert compared[1] == stats.packed_leaves
back = tdcopier.to(on_device, "cpu")  # the blocking form
print("{} nodes and {} leaves equal those on the host".format(*check(back, drive)))

# %%
# Memory-mapped files
# -------------------
# ``memmap_()`` writes each tensor of a TensorDict to a file.
# ``load_memmap()`` maps the files, and reads only the pages that a program touches.

folder = tempfile.TemporaryDirectory()
motion = make_drive(seed=2).select("motion", "steering", "scene")
motion.memmap_(prefix=Path(folder.name, "drive"))


def show(top):
    """Print the files below a folder as a tree, with their sizes."""
    print(f"{top.name}/")
    for path in sorted(top.rglob("*")):
        depth = len(path.relative_to(top).parts)
        size = "/" if path.is_dir() else f"  {path.stat().st_size} bytes"
        print("    " * depth + path.name + size)


show(Path(folder.name, "drive"))

# %%
# A copy to the device reads the mapped files straight into the staging buffers.
# The result consists of ordinary tensors.

loaded = TensorDict.load_memmap(Path(folder.name, "drive"))
handle = tdcopier.async_to(loaded, device)
replayed = handle.wait()
for each in (loaded, replayed):
    leaf = each["motion", "position"]
    print(f"{leaf.device!s:>6}: a {type(leaf).__name__} of shape {tuple(leaf.shape)}")
check(replayed, loaded.to(device))
assert handle.stats.packed_leaves == 3

# %%
# For the way back, ``memmap_like`` makes empty files with the structure of a TensorDict,
# and :func:`tdcopier.copy_into` fills them.

speeds = TensorDict({"speed": replayed["motion", "velocity"].norm(dim=1)}, [8], device=device)
on_disk = speeds.memmap_like(prefix=Path(folder.name, "speeds"))
assert tdcopier.copy_into(speeds, on_disk) is on_disk
show(Path(folder.name, "speeds"))
read_again = TensorDict.load_memmap(Path(folder.name, "speeds"))
torch.testing.assert_close(read_again["speed"], motion["motion", "velocity"].norm(dim=1))

# %%
# A batch with fixed addresses
# ----------------------------
# A CUDA graph reads the addresses that it was captured with.
# So you allocate its batch once, and refresh it with :func:`tdcopier.start_copy_into`:
# a replay in progress reads the previous batch, and the next replay reads the new one.
# The host does not wait in between.
# The simulated device has no graphs.
# There, a copy on the current stream, which is held, takes the place of the replay.

static = tdcopier.to(make_drive(seed=3), device)
seen = torch.empty_like(static["steering"])


def addresses(td):
    """The address of each leaf."""
    return [leaf.data_ptr() for _, leaf in parts(td) if isinstance(leaf, torch.Tensor)]


def replay():
    if device.type == "cuda":
        graph.replay()
    else:
        seen.copy_(static["steering"])


if device.type == "cuda":
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        seen.copy_(static["steering"])

before = addresses(static)
drives, replayed = [make_drive(seed) for seed in (4, 5, 6)], []
with contextlib.nullcontext() if device.type == "cuda" else sim.hold(torch.sim.current_stream()):
    for each in drives:
        handle = tdcopier.start_copy_into(each, static)
        handle.wait()
        replay()
        replayed.append(seen.clone())
    print(f"{len(drives)} batches and replays are enqueued")
for each, got in zip(drives, replayed, strict=True):
    assert torch.equal(got.cpu(), each["steering"])
assert addresses(static) == before
print(f"each replay has read its batch; {len(before)} leaves have kept their addresses")
print("transfers for one batch:", handle.stats.transfers)
assert 1 <= handle.stats.transfers <= 3  # one for each dtype at most

# %%
# TensorDict's own calls
# ----------------------
# Within :func:`tdcopier.tensordict.backend`, tdcopier serves ``.to``, ``.cuda()``, ``.cpu()``
# and the constructor's ``device=``, with the same results.
# It leaves other calls to TensorDict, for example a change of the dtype.

if device.type == "sim":
    sim.reset_counts()
    drive.to(device)
    print("without the engine:", sim.counts().h2d.transfers, "transfers to the device")
    sim.reset_counts()
with tdcopier.tensordict.backend() as use:
    by_engine = drive.to(device)
    if device.type == "sim":
        print("with the engine:", sim.counts().h2d.transfers, "transfers to the device")
        assert 1 <= sim.counts().h2d.transfers <= 3  # at most one per dtype
    made = TensorDict({"depth": torch.rand(4), "mask": torch.ones(4)}, [4], device=device)
    halved = drive.select("motion").to(torch.float16)
print(use)
assert (use.by_engine, use.by_tensordict) == (2, 1)
assert made["depth"].device == device
assert halved["motion", "velocity"].dtype == torch.float16
check(by_engine, on_device)

# %%
# The leaves in memory
# --------------------
# The left side shows the TensorDict, node by node.
# The right side shows the chunks on the device, one for each dtype, in the order of addresses.

COLOURS = {
    "drive": "#2a9d63",
    "motion": "#2b6cb0",
    "frames": "#d97706",
    "objects": "#8b5cf6",
    "opaque": "#9aa3ad",
}


def row(path, value):
    """Label, kind and value; the kind of a leaf is its top node."""
    label = "    " * len(path) + (path[-1] if path else "drive")
    if isinstance(value, torch.Tensor):
        return f"{label} {tuple(value.shape)}", path[0] if len(path) > 1 else "drive", value
    kind = "opaque" if isinstance(value, NonTensorData) else None
    return f"{label}: {type(value).__name__}", kind, value


try:
    import pictures
except ImportError as missing:
    print(f"skipped: the picture ({missing})")
else:
    rows = [row(path, value) for path, value in parts(on_device)]
    pictures.places(
        f"The leaves of one TensorDict in {stats.chunks} chunks",
        rows,
        COLOURS,
        own_blocks={"opaque": "the same object"},
    )
folder.cleanup()
