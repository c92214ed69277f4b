"""
TensorDicts
===========

A ``TensorDict`` is a dict of tensors that knows its device. Here we see what that means for its
entries, and move TensorDicts to the accelerator and back while the host does something else: flat
ones, ones with all that may be nested in them, and one that lies in a folder of memory-mapped
files. We fill tensors that are there already, as a CUDA graph wants it, and let TensorDict's own
``.to`` use the engine.

Like the other tutorials, this one runs on a CUDA device, or else on the one that tdcopier
simulates in host memory. The picture shows where every leaf of a nested TensorDict has arrived.
"""

import contextlib
import sys
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
# Where a TensorDict lives
# ------------------------
# That is up to the constructor. With ``device=`` it moves there whatever it is given, then and
# later. Without, its ``.device`` is None: it takes entries as they come, from several devices if
# need be. ``clear_device_()`` goes back to that. It moves nothing, and takes away only the promise.


def where(name, td):
    """What the TensorDict says, and where each entry is."""
    places = {key: str(leaf.device) for key, leaf in td.items()}
    print(f"{name:>12}: device={td.device!s:6} {places}")


anywhere = TensorDict({"depth": torch.rand(4)}, batch_size=[4])
anywhere["mask"] = torch.ones(4, device=device)
where("no device", anywhere)

there = TensorDict({"depth": torch.rand(4)}, batch_size=[4], device=device)
there["mask"] = torch.ones(4)  # from the host: it is moved
where("a device", there)

cleared = there.clone(recurse=False).clear_device_()  # the same tensors in a TensorDict of its own
cleared["label"] = torch.zeros(4)  # stays where it is
where("cleared", cleared)

assert anywhere.device is None
assert cleared.device is None
assert there["mask"].device == cleared["mask"].device == device
assert cleared["label"].device.type == "cpu"

# %%
# All of it, there and back, in the background
# --------------------------------------------
# ``.to`` moves one tensor after the other. :func:`tdcopier.async_to` packs them, starts their copy
# and returns. :meth:`~tdcopier.AsyncCopyHandle.wait` gives the TensorDict on the device, ordered on
# the current stream: it does not hold the host until the bytes are there. What is on the device
# already stays where it is, so this is also how a TensorDict without a device gets one.

handle = tdcopier.async_to(cleared, device)
squares = [number**2 for number in range(1000)]  # the host does something else
moved = handle.wait()
where("moved", moved)
print("leaves:", handle.stats.packed_leaves, "packed,", handle.stats.reused_leaves, "there already")
assert moved.device == device
assert moved["mask"] is cleared["mask"]

# %%
# The result is a TensorDict of that device in every respect: an entry that is set later moves too.

moved["reward"] = torch.zeros(4)
where("set later", moved)
assert moved["reward"].device == device

# %%
# And back. The device collects the leaves of each dtype into a chunk, and one transfer brings it to
# pinned memory on the host. ``get()`` returns when the bytes have arrived.

handle = tdcopier.async_to(moved, "cpu")
squares.reverse()  # meanwhile
back = handle.get()
where("back", back)
print("pinned:", back["depth"].is_pinned(), "- transfers:", handle.stats.transfers)
assert 1 <= handle.stats.transfers <= 3  # one for each dtype at most
torch.testing.assert_close(back["depth"], there["depth"].cpu())

# %%
# Whatever is nested in it
# ------------------------
# Eight moments of a drive: a nested TensorDict, a tensorclass with text in one of its fields, a
# lazy stack whose members have different numbers of objects, and the name of the scene, which
# TensorDict wraps as ``NonTensorData``.


class Frames(TensorClass):
    pixels: torch.Tensor
    """(8, 8, 8) uint8"""
    exposure: torch.Tensor
    """(8,) float32"""
    camera: str = "front"


OBJECTS = [3, 1, 4, 1, 5, 2, 6, 2]


def make_drive(seed):
    """A TensorDict of eight moments, on the host. Values differ from seed to seed."""
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
# What became of it is in ``handle.stats``. Every tensor counts once, wherever it is nested:
#
# - *packed*: it shares a chunk, here one allocation and one transfer for all of its dtype;
# - *alone*: larger than 256 KiB, so that it has a chunk of its own;
# - *delegated*: left to its own ``.to``, for example because gradients must flow through it;
# - *reused*: on the device already.
#
# *Opaque* are values that are no tensors, here the two texts: the same objects, in new wrappers.

stats = handle.stats
print(
    f"leaves: {stats.packed_leaves} packed, {stats.alone_leaves} alone, "
    f"{stats.delegated_leaves} delegated, {stats.reused_leaves} reused; "
    f"{stats.opaque_leaves} opaque values; {stats.transfers} transfer in {stats.chunks} chunk"
)
assert stats[:5] == (5 + 2 * len(OBJECTS), 0, 0, 0, 2)
assert stats.chunks == stats.transfers == 3  # a chunk and a transfer for each dtype

# %%
# Every node and every leaf against ``.to()``
# -------------------------------------------
# The promise is the result of TensorDict's own ``.to``: the same classes, batch sizes, names and
# locks of all nodes, with the device set on each, and the same tensors.


def children(value):
    """(key, child) of a node, a member of a lazy stack by its number; nothing of a leaf."""
    if isinstance(value, LazyStackedTensorDict):
        return [(str(index), member) for index, member in enumerate(value.tensordicts)]
    return list(value.items()) if is_tensor_collection(value) else []


def parts(value, path=()):
    """(path, value) of every node and every leaf, parents first."""
    found = [(path, value)]
    for key, child in children(value):
        found += parts(child, (*path, key))
    return found


def difference(got, want):
    """Which of its properties is another, or None."""
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
        return None  # its children are compared by themselves
    if got.stride() != want.stride():
        return "strides"
    return None if torch.equal(got.cpu(), want.cpu()) else "values"


def check(got, want):
    """Raises where two differ; else the numbers of nodes and of leaves that were compared."""
    leaves = 0
    pairs = list(zip(parts(got), parts(want), strict=True))
    for (path, got_value), (want_path, want_value) in pairs:
        if path != want_path:
            raise AssertionError(f"the result has {path} where .to() has {want_path}")
        if (found := difference(got_value, want_value)) is not None:
            raise AssertionError(f"{path} is not what .to() gives: other {found}")
        leaves += isinstance(want_value, torch.Tensor)
    return len(pairs) - leaves, leaves


compared = check(on_device, drive.to(device))
print("{} nodes and {} leaves equal what .to() gives".format(*compared))
assert compared[1] == stats.packed_leaves
back = tdcopier.to(on_device, "cpu")  # the blocking form
print("{} nodes and {} leaves equal what .to() brings back".format(*check(back, drive)))

# %%
# From a folder of files
# ----------------------
# ``memmap_()`` moves a TensorDict's tensors into files, one each, below a folder that looks like
# the TensorDict. Whoever has the folder can load it: that maps the files, and reads no more than
# what is asked for.

folder = tempfile.TemporaryDirectory()
motion = make_drive(seed=2).select("motion", "steering", "scene")
motion.memmap_(prefix=Path(folder.name, "drive"))


def show(top):
    """The files below a folder, with their sizes, as a tree."""
    print(f"{top.name}/")
    for path in sorted(top.rglob("*")):
        depth = len(path.relative_to(top).parts)
        size = "/" if path.is_dir() else f"  {path.stat().st_size} bytes"
        print("    " * depth + path.name + size)


show(Path(folder.name, "drive"))

# %%
# On its way to the device, the bytes of the files go straight into the staging buffers. What
# arrives are ordinary tensors.

loaded = TensorDict.load_memmap(Path(folder.name, "drive"))
handle = tdcopier.async_to(loaded, device)
replayed = handle.wait()
for each in (loaded, replayed):
    leaf = each["motion", "position"]
    print(f"{leaf.device!s:>6}: a {type(leaf).__name__} of shape {tuple(leaf.shape)}")
check(replayed, loaded.to(device))
assert handle.stats.packed_leaves == 3

# %%
# And back: ``memmap_like`` makes files like a TensorDict, with nothing in them yet.
# :func:`tdcopier.copy_into` fills tensors that are there, wherever they are, and here these are the
# files. Nothing else is made on the host.

speeds = TensorDict({"speed": replayed["motion", "velocity"].norm(dim=1)}, [8], device=device)
on_disk = speeds.memmap_like(prefix=Path(folder.name, "speeds"))
handle = tdcopier.copy_into(speeds, on_disk)
assert handle.get() is on_disk
show(Path(folder.name, "speeds"))
read_again = TensorDict.load_memmap(Path(folder.name, "speeds"))
torch.testing.assert_close(read_again["speed"], motion["motion", "velocity"].norm(dim=1))

# %%
# A batch that stays where it is
# ------------------------------
# A CUDA graph reads the addresses that it was captured with. So its batch is made once, and
# refreshed with ``copy_into``. That writes behind what the current stream has been given: a replay
# that is under way reads the batch before, and the next replay reads the new one. The host need not
# wait in between. The simulated device has no graphs; there, a copy on the current stream stands
# for the replay, and the stream is held until the host is through.

static = tdcopier.to(make_drive(seed=3), device)
seen = torch.empty_like(static["steering"])


def addresses(td):
    """Where the leaves are."""
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
        handle = tdcopier.copy_into(each, static)
        handle.wait()
        replay()
        replayed.append(seen.clone())
    print(f"{len(drives)} batches and replays are enqueued")
for each, got in zip(drives, replayed, strict=True):
    assert torch.equal(got.cpu(), each["steering"])
assert addresses(static) == before
print(f"each replay has read its batch; {len(before)} leaves are where they were")
print("transfers for one batch:", handle.stats.transfers)
assert 1 <= handle.stats.transfers <= 3  # one for each dtype at most

# %%
# TensorDict's own calls
# ----------------------
# Code that calls ``.to`` need not change: within :func:`tdcopier.tensordict_backend`, the engine
# serves ``.to``, ``.cuda()``, ``.cpu()`` and the constructor's ``device=``, with the same results.
# What it does not know, such as a change of the dtype, it leaves to TensorDict.
# :func:`tdcopier.install_tensordict_backend` does that for all threads.

if device.type == "sim":
    sim.reset_counts()
    drive.to(device)
    print("without the engine:", sim.counts().h2d.transfers, "transfers to the device")
    sim.reset_counts()
with tdcopier.tensordict_backend() as use:
    by_engine = drive.to(device)
    if device.type == "sim":
        print("with the engine:", sim.counts().h2d.transfers, "transfer to the device")
        assert 1 <= sim.counts().h2d.transfers <= 3  # one for each dtype at most
    made = TensorDict({"depth": torch.rand(4), "mask": torch.ones(4)}, [4], device=device)
    halved = drive.select("motion").to(torch.float16)
print(use)
assert (use.by_engine, use.by_tensordict) == (2, 1)
assert made["depth"].device == device
assert halved["motion", "velocity"].dtype == torch.float16
check(by_engine, on_device)

# %%
# Where the leaves are
# --------------------
# On the left the TensorDict, node by node. On the right the chunks that its leaves share on the
# device, one for each dtype, and each leaf at its own address. A node's own tensors come first,
# then those of the nodes in it.

COLOURS = {"": "#2a9d63", "motion": "#2b6cb0", "frames": "#d97706", "objects": "#8b5cf6"}
GREY = "#6b7480"


def draw():
    """A row for each node, leaf and opaque value; for each leaf a bar where its bytes are."""
    import matplotlib

    if "matplotlib.pyplot" not in sys.modules:
        matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = parts(on_device)
    tensors = [value for _, value in rows if isinstance(value, torch.Tensor)]
    chunks = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    assert len(chunks) == len({tensor.dtype for tensor in tensors})  # a chunk for each dtype
    first = min(tensor.data_ptr() for tensor in tensors)
    end = max(tensor.data_ptr() + tensor.nbytes for tensor in tensors) - first

    figure, axes = plt.subplots(figsize=(11, 9))
    for row, (path, value) in enumerate(rows):
        name = path[-1] if path else "drive"
        colour = COLOURS[path[0] if len(path) > 1 else ""]
        if isinstance(value, torch.Tensor):
            begin = value.data_ptr() - first
            axes.barh([row, len(rows) + 1], value.nbytes, left=begin, color=colour, edgecolor="w")
            axes.plot([0, begin], [row, row], color=colour, linewidth=0.6, alpha=0.5)
            label, shade = f"{name} {tuple(value.shape)}", colour
        else:
            label, shade = f"{name}: {type(value).__name__}", "black"
            if isinstance(value, NonTensorData):
                axes.text(0, row, f" {value.data!r}, the same object", color=GREY, va="center")
        indent = "    " * len(path)
        axes.text(-0.42 * end, row, indent + label, color=shade, va="center", family="monospace")
    axes.text(-0.42 * end, len(rows) + 1, "the chunk", va="center", family="monospace")
    axes.set_xlim(-0.43 * end, end * 1.01)
    axes.set_ylim(len(rows) + 2, -1)
    axes.set_yticks([])
    axes.set_xticks(range(0, end, 256))
    axes.set_xlabel("byte in the chunk")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(f"{len(tensors)} leaves, {stats.chunks} chunk, {stats.transfers} transfer")
    axes.spines["bottom"].set_bounds(0, end)
    figure.tight_layout()
    return figure


try:
    figure = draw()
except ImportError as missing:
    print(f"skipped: the picture ({missing})")
else:
    if "__file__" in globals():  # a gallery has none, and takes the figure itself
        picture = Path(__file__).resolve().parents[1] / "build" / "02_tensordict.png"
        picture.parent.mkdir(exist_ok=True)
        figure.savefig(picture, dpi=120)
        print(f"picture: {picture.relative_to(picture.parents[1])}")
folder.cleanup()
