"""
Any batch, in any direction
===========================

Real batches are not lists of dicts of dense tensors. This one has a frozen dataclass, named
tuples, an ``OrderedDict``, numpy arrays in the byte order of the sensor that wrote them, a camera
image that is a crop of a larger one, and strings. We copy it to the device, back, and on to a
second device, and hold every leaf against what one would write by hand with ``Tensor.to``. Then we
use one host buffer for several copies, and let check mode find the place where that goes wrong.

The picture at the end shows what became of every leaf. Like the first tutorial, this one runs on a
CUDA device, or else on the one that tdcopier simulates in host memory.
"""

import dataclasses
import os
import subprocess
import sys
import tempfile
import textwrap
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import tdcopier

if torch.cuda.is_available():
    device = torch.device("cuda", torch.cuda.current_device())
    devices = torch.cuda.device_count()
    print(f"target: {device}, {torch.cuda.get_device_name(device)}; {devices} device(s)")
else:
    from tdcopier import sim

    sim.enable(devices=2)
    device = torch.device("sim", 0)
    devices = torch.sim.device_count()
    print(f"target: {device}, the simulated device (no CUDA device here); {devices} devices")

# %%
# The batch
# ---------
# Two classes of this batch are named tuples, one is a frozen dataclass. Their code knows nothing of
# tdcopier.


class Camera(NamedTuple):
    image: torch.Tensor
    """(3, 192, 512) uint8, the middle of a larger image"""
    projection: torch.Tensor
    """(3, 4) float32, from the vehicle's frame to pixels"""


class Sweep(NamedTuple):
    points: np.ndarray
    """(N, 4) big-endian float32, as the sensor writes them"""
    rings: np.ndarray
    """(N,) uint8, the laser of each point"""


@dataclasses.dataclass(frozen=True)
class Frame:
    cameras: OrderedDict
    """Camera by name, front first"""
    lidar: Sweep
    track: np.ndarray
    """(10, 3) float32, where the vehicle was, the latest first: a reversed view"""
    scene: str
    weather: str | None


# %%
# Boxes are different in number from frame to frame. Somebody has wrapped them in a class of their
# own. The walk passes objects of a class that it does not know through unchanged, so it has to be
# told how to take this one apart and how to put it together:
# :func:`tdcopier.register_container`.


class Ragged:
    """Rows of several lengths in one tensor."""

    def __init__(self, values, ends):
        self.values = values  # (total, ...)
        self.ends = ends  # (rows,) int64, where each row ends


tdcopier.register_container(
    Ragged,
    flatten=lambda ragged: ((ragged.values, ragged.ends), None),  # children, context
    unflatten=lambda children, _context: Ragged(*children),
)


def make_frame(index):
    """One moment in time. Values differ from frame to frame."""
    generator = torch.Generator().manual_seed(index)
    full = torch.randint(0, 256, (2, 3, 256, 704), dtype=torch.uint8, generator=generator)
    crop = full[:, :, 32:224, 96:608]  # not contiguous, and never made so
    points = 300 + 50 * index
    path = np.arange(30, dtype=np.float32).reshape(10, 3) + index
    return Frame(
        cameras=OrderedDict(
            front=Camera(crop[0], torch.rand(3, 4, generator=generator)),
            back=Camera(crop[1], torch.rand(3, 4, generator=generator)),
        ),
        lidar=Sweep(
            points=np.linspace(-60, 60, 4 * points).reshape(points, 4).astype(">f4"),
            rings=(np.arange(points) % 32).astype(np.uint8),
        ),
        track=path[::-1],
        scene=f"scene-{index:04}",
        weather=None if index else "rain",
    )


batch = {
    "frames": [make_frame(index) for index in range(3)],
    "boxes": Ragged(torch.rand(17, 7), torch.tensor([5, 5, 17])),
    # A leaf that is on the target already, and one that gradients must reach.
    "class_weights": torch.linspace(0.5, 1.0, 10).to(device),
    "temperature": torch.nn.Parameter(torch.tensor(1.5)),
    "split": "train",
}

# %%
# Copy it
# -------

handle = tdcopier.start_copy(batch, device)
result = handle.wait()

front = result["frames"][0].cameras["front"]
print("classes:", *(type(part).__name__ for part in (result["frames"][0], front, result["boxes"])))
print("front image:", tuple(front.image.shape), front.image.dtype, front.image.device)
stats = handle.stats
print(
    f"leaves: {stats.packed_leaves} packed, {stats.alone_leaves} alone, "
    f"{stats.delegated_leaves} delegated, {stats.reused_leaves} reused; "
    f"{stats.opaque_leaves} opaque values; {stats.transfers} transfers"
)
# The images are more than 256 KiB each, so they travel alone. The parameter is delegated.
assert (stats.packed_leaves, stats.alone_leaves) == (17, 6)
assert (stats.delegated_leaves, stats.reused_leaves, stats.opaque_leaves) == (1, 1, 7)

# %%
# Every leaf against ``.to()``
# ----------------------------
# This is what one writes by hand: a function that knows every class in the batch, and calls ``.to``
# once per leaf.


def by_hand(value, target):
    """The plain way: each container through its own constructor."""
    match value:
        case torch.Tensor():
            return value.to(target)
        case np.ndarray():  # torch takes neither another byte order nor a negative stride
            native = np.ascontiguousarray(value, dtype=value.dtype.newbyteorder("="))
            return torch.from_numpy(native).to(target)
        case Camera() | Sweep():
            return type(value)(*(by_hand(child, target) for child in value))
        case Frame():
            names = [field.name for field in dataclasses.fields(value)]
            return Frame(*(by_hand(getattr(value, name), target) for name in names))
        case Ragged():
            return Ragged(by_hand(value.values, target), by_hand(value.ends, target))
        case dict():  # an OrderedDict too
            return type(value)((key, by_hand(child, target)) for key, child in value.items())
        case list():
            return [by_hand(child, target) for child in value]
    return value


def children(value):
    """(how it is reached, child) for every child of a container; None for anything else."""
    match value:
        case dict():
            return [(f"[{key!r}]", child) for key, child in value.items()]
        case list():
            return [(f"[{index}]", child) for index, child in enumerate(value)]
        case Camera() | Sweep():
            return [(f".{name}", getattr(value, name)) for name in value._fields]
        case Frame() | Ragged():
            return [(f".{name}", child) for name, child in vars(value).items()]
    return None


def nodes(tree, path=""):
    """(path, value) for every container, leaf and opaque value, parents first."""
    found = [(path, tree)]
    for step, child in children(tree) or []:
        found += nodes(child, path + step)
    return found


def difference(got, want):
    """What is wrong with one value, or None."""
    if type(got) is not type(want):
        return f"is a {type(got).__name__}, not a {type(want).__name__}"
    if children(want) is not None:
        return None  # its children are compared by themselves
    if not isinstance(want, torch.Tensor):
        return None if got is want else "is another object"
    for name in ("device", "dtype", "shape", "requires_grad"):
        if getattr(got, name) != getattr(want, name):
            return f"has {name} {getattr(got, name)}, not {getattr(want, name)}"
    if got.stride() != want.stride():
        return f"has strides {got.stride()}, not {want.stride()}"
    return None if torch.equal(got.cpu(), want.cpu()) else "has other values"


def check(got, want):
    """Raises on the first difference; else the number of tensors that were compared."""
    pairs = zip(nodes(got), nodes(want), strict=True)
    for (got_path, got_value), (want_path, want_value) in pairs:
        if got_path != want_path:
            raise AssertionError(f"the result has {got_path} where .to() has {want_path}")
        if (found := difference(got_value, want_value)) is not None:
            raise AssertionError(f"result{got_path} {found}")
    return sum(isinstance(value, torch.Tensor) for _, value in nodes(want))


print(f"{check(result, by_hand(batch, device))} leaves equal what .to() gives")
assert result["class_weights"] is batch["class_weights"]  # reused: the same object
assert result["temperature"].grad_fn is not None  # delegated: gradients flow back

# %%
# Back to the host
# ----------------
# The device gathers the packed leaves of each dtype into a chunk, and one transfer brings it to
# pinned memory. For the host as the target, ``wait()`` blocks as ``get()`` does: the bytes are
# there when either returns. What ``.to`` has brought back itself, here the parameter, is in
# pageable memory.

if device.type == "sim":
    sim.reset_counts()
back = tdcopier.start_copy(result, "cpu")
on_host = back.get()
if device.type == "sim":
    counted = sim.counts().d2h.transfers
    print(f"the device counted {counted} transfers, one of them by the .to of the parameter")
    assert counted == back.stats.transfers + back.stats.delegated_leaves
check(on_host, by_hand(result, "cpu"))

tensors = [value for _, value in nodes(on_host) if isinstance(value, torch.Tensor)]
pinned = sum(tensor.is_pinned() for tensor in tensors)
print(f"{len(tensors)} leaves in {back.stats.transfers} transfers; {pinned} are in pinned memory")
assert pinned == back.stats.packed_leaves + back.stats.alone_leaves == len(tensors) - 1

# %%
# To a second device, from several places at once
# -----------------------------------------------
# The leaves of one tree may lie on the host and on several devices. Here one frame is on the host
# still, one is on the first device, and the box list is on the second, where all of it goes.

other = torch.device(device.type, (device.index + 1) % devices)
if other == device:
    print("skipped: device to device, which takes two devices")
else:
    mixed = {
        "from the host": batch["frames"][0],
        "from the first device": result["frames"][1],
        "there already": by_hand(result["boxes"], other),
    }
    between = tdcopier.start_copy(mixed, other)
    gathered = between.wait()  # the current stream of the second device waits
    print(f"{check(gathered, by_hand(mixed, other))} leaves on {other}:", between.stats)
    assert gathered["there already"].values is mixed["there already"].values

# %%
# A host buffer that is used again
# --------------------------------
# A source must not change before the copy has read it.
# :meth:`~tdcopier.AsyncCopyHandle.wait_staged` holds the host until then. That is earlier than
# ``get()``: the bytes are in staging buffers, and may have yet to travel. So one host buffer is
# enough for a loop that keeps several copies in flight. (For sources on a device it makes their
# current stream wait, and the host goes on.)

buffer = torch.empty(2 * 1024 * 1024)  # 8 MiB, which workers stage while the host goes on
handles = []
for step in range(6):
    buffer.fill_(step)  # where a driver or a decoder would write
    handle = tdcopier.start_copy({"scan": buffer}, device)
    handle.wait_staged()
    handles.append(handle)

scans = [handle.wait()["scan"] for handle in handles]
ranges = [(scan.min().item(), scan.max().item()) for scan in scans]
print("least and largest value of each scan:", ranges)
assert ranges == [(step, step) for step in range(6)]

# %%
# Check mode: when a source changes too early
# -------------------------------------------
# Without the ``wait_staged()``, a scan could hold what was written for a later one. With the
# environment variable ``TDCOPIER_CHECK=1``, which is read at import, a handle looks at the sources
# again when it hands over, and names the one that was modified. Each copy then reads its sources
# twice more, so this is for a test run. Here is one, in a process of its own.

late_write = f"""
    import torch
    import tdcopier
    {"from tdcopier import sim; sim.enable()" if device.type == "sim" else ""}

    batch = {{"frames": [torch.zeros(8), torch.zeros(500_000)], "split": "train"}}
    handle = tdcopier.start_copy(batch, "{device}")
    batch["frames"][1].add_(1)  # too early
    try:
        handle.get()
    except tdcopier.SourceModifiedError as error:
        print(error)
"""
with tempfile.TemporaryDirectory() as folder:
    script = Path(folder, "late_write.py")
    script.write_text(textwrap.dedent(late_write))
    run = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "TDCOPIER_CHECK": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
assert run.returncode == 0, run.stderr
message = run.stdout.strip().replace(folder + os.sep, "")
print(textwrap.fill(message, 90))
assert message.startswith("data['frames'][1] was modified before its copy was done.")
assert "late_write.py:7" in message  # where the copy was started

# %%
# What became of every leaf
# -------------------------
# On the left the tree, in the order of the walk. On the right what the device has got. The order of
# the slots in the chunk is read from the outputs' own addresses; heights are not to scale.

COLOURS = {
    "packed": "#2a9d63",
    "alone": "#2b6cb0",
    "delegated": "#d97706",
    "reused": "#8b5cf6",
    "opaque": "#9aa3ad",
}


def memory_of(tensor):
    """Where the memory begins that the tensor is in, with whoever shares it."""
    return tensor.untyped_storage().data_ptr()


def what_became():
    """(path, bytes, fate, address) for every leaf and opaque value of the copy to the device."""
    sources, moved = dict(nodes(batch)), dict(nodes(result))
    rows = []
    for path, value in moved.items():
        if children(value) is not None:
            continue
        if not isinstance(value, torch.Tensor):
            rows.append((path, 0, "opaque", 0))
            continue
        if value is sources[path]:
            fate = "reused"
        elif value.requires_grad:
            fate = "delegated"
        else:
            fate = "packed" if value.nbytes <= 256 * 1024 else "alone"
        rows.append((path, value.numel() * value.element_size(), fate, value.data_ptr()))
    return rows


rows = what_became()
fates = [fate for _, _, fate, _ in rows]
assert [fates.count(fate) for fate in COLOURS] == list(stats[:5])  # the handle says the same
assert stats.chunks > fates.count("alone")  # and a chunk for each dtype of the packed ones


def draw():
    """Leaves on the left, memory on the right, a band from each leaf to its place."""
    import matplotlib

    if "matplotlib.pyplot" not in sys.modules:
        matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import PathPatch, Rectangle
    from matplotlib.path import Path as Outline

    figure, axes = plt.subplots(figsize=(11, 8.5))
    packed = sorted((row for row in rows if row[2] == "packed"), key=lambda row: row[3])
    alone = sorted((row for row in rows if row[2] == "alone"), key=lambda row: row[3])
    rest = [row for fate in ("delegated", "reused", "opaque") for row in rows if row[2] == fate]

    # On the right: blocks of places, one below the other, with gaps between the blocks.
    chunks = f"{stats.chunks - len(alone)} chunks, one for each dtype:"
    shared = f"{chunks}\n{len(packed)} leaves, {sum(row[1] for row in packed):,} B"
    blocks = [(shared, packed)]
    blocks += [(f"a chunk of its own, {row[1]:,} B", [row]) for row in alone]
    labels = {"delegated": "by Tensor.to", "reused": "the same tensor", "opaque": "the same object"}
    blocks += [
        (text, [row for row in rest if row[2] == fate])
        for fate, text in labels.items()
        if fate in fates
    ]
    gap = (len(rows) * 1.25 - len(rows)) / (len(blocks) - 1)
    place, top = {}, 0.0
    for text, members in blocks:
        for row in members:
            place[row[0]] = top
            axes.add_patch(Rectangle((6, top), 0.35, 0.9, facecolor=COLOURS[row[2]]))
            top += 1
        middle = top - len(members) / 2 - 0.05
        axes.text(6.45, middle, text, va="center", fontsize=8)
        if len(members) > 1:
            outline = (5.96, top - len(members) - 0.1), 0.43, len(members) + 0.1
            axes.add_patch(Rectangle(*outline, fill=False, edgecolor="#444c56", linewidth=1))
        top += gap

    # On the left: the leaves. A band is bounded by two curves.
    for index, (path, _, fate, _) in enumerate(rows):
        left, right = index * 1.25, place[path]
        axes.text(-0.1, left + 0.45, path, ha="right", va="center", fontsize=7, family="monospace")
        axes.add_patch(Rectangle((0, left), 0.25, 0.9, facecolor=COLOURS[fate]))
        corners = [(0.25, left), (3, left), (3, right), (6, right)]
        corners += [(6, right + 0.9), (3, right + 0.9), (3, left + 0.9), (0.25, left + 0.9)]
        codes = [Outline.MOVETO, *[Outline.CURVE4] * 3, Outline.LINETO, *[Outline.CURVE4] * 3]
        band = PathPatch(Outline(corners, codes), facecolor=COLOURS[fate], alpha=0.3, linewidth=0)
        axes.add_patch(band)

    for column, (name, colour) in enumerate(COLOURS.items()):
        axes.text(1.5 * column, -1.6, f"{fates.count(name)} {name}", color=colour, weight="bold")
    axes.set_xlim(-3.6, 9)
    axes.set_ylim(len(rows) * 1.25 + 0.5, -2.5)
    axes.axis("off")
    axes.set_title(f"{len(rows)} values of one batch, and where they arrived", loc="left")
    figure.tight_layout()
    return figure


try:
    figure = draw()
except ImportError as missing:
    print(f"skipped: the picture ({missing})")
else:
    if "__file__" in globals():  # a gallery has none, and takes the figure itself
        picture = Path(__file__).resolve().parents[1] / "build" / "04_every_batch.png"
        picture.parent.mkdir(exist_ok=True)
        figure.savefig(picture, dpi=120)
        print(f"picture: {picture.relative_to(picture.parents[1])}")
