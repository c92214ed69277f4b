"""
Any batch, in any direction
===========================

Real batches are more than lists of dicts of dense tensors.
We copy one with dataclasses, named tuples, numpy arrays, a cropped image and strings
to the device, back to the host, and on to a second device,
and compare every leaf with a copy that is written by hand with ``Tensor.to``.
Then we reuse a host buffer, and check mode finds a write to a source that comes too early.
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
# Two classes of this batch are named tuples, and one is a frozen dataclass.


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
    """(10, 3) float32, past positions, the latest first: a reversed view"""
    scene: str
    weather: str | None


# %%
# The number of boxes differs from frame to frame, so a class of their own holds them.
# tdcopier passes objects of an unknown class through unchanged,
# so we register it with :func:`tdcopier.containers.register`.


class Ragged:
    """Rows of several lengths in one tensor."""

    def __init__(self, values, ends):
        self.values = values  # (total, ...)
        self.ends = ends  # (rows,) int64, where each row ends


tdcopier.containers.register(
    Ragged,
    # (children, context)
    flatten=lambda ragged: ((ragged.values, ragged.ends), None),
    unflatten=lambda children, _context: Ragged(*children),
)


def make_frame(index):
    """One moment in time, with random values."""
    generator = torch.Generator().manual_seed(index)
    full = torch.randint(0, 256, (2, 3, 256, 704), dtype=torch.uint8, generator=generator)
    crop = full[:, :, 32:224, 96:608]  # not contiguous
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
    # One leaf is on the target already. Gradients must flow to the other.
    "class_weights": torch.linspace(0.5, 1.0, 10).to(device),
    "temperature": torch.nn.Parameter(torch.tensor(1.5)),
    "split": "train",
}

# %%
# The copy to the device
# ----------------------

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
# Each image is larger than 256 KiB and has a chunk of its own.
# The parameter is delegated to its own .to.
assert (stats.packed_leaves, stats.alone_leaves) == (17, 6)
assert (stats.delegated_leaves, stats.reused_leaves, stats.opaque_leaves) == (1, 1, 7)

# %%
# Compare every leaf with ``.to()``
# ---------------------------------
# A copy that is written by hand needs a function that knows every class in the batch.


def by_hand(value, target):
    """Copy leaf by leaf; make each container by its own constructor."""
    match value:
        case torch.Tensor():
            return value.to(target)
        case np.ndarray():
            # torch supports neither another byte order nor negative strides
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
    """(path step, child) for every child of a container, else None."""
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
    """(path, value) for every container, leaf and opaque value."""
    found = [(path, tree)]
    for step, child in children(tree) or []:
        found += nodes(child, path + step)
    return found


def difference(got, want):
    """How one value differs from the expected one, or None."""
    if type(got) is not type(want):
        return f"is a {type(got).__name__}, not a {type(want).__name__}"
    if children(want) is not None:
        return None  # the caller compares its children
    if not isinstance(want, torch.Tensor):
        return None if got is want else "is another object"
    for name in ("device", "dtype", "shape", "requires_grad"):
        if getattr(got, name) != getattr(want, name):
            return f"has {name} {getattr(got, name)}, not {getattr(want, name)}"
    if got.stride() != want.stride():
        return f"has strides {got.stride()}, not {want.stride()}"
    return None if torch.equal(got.cpu(), want.cpu()) else "has other values"


def check(got, want):
    """Compare two trees; return the number of tensors."""
    pairs = zip(nodes(got), nodes(want), strict=True)
    for (got_path, got_value), (want_path, want_value) in pairs:
        if got_path != want_path:
            raise AssertionError(f"the result has {got_path} where .to() has {want_path}")
        if (found := difference(got_value, want_value)) is not None:
            raise AssertionError(f"result{got_path} {found}")
    return sum(isinstance(value, torch.Tensor) for _, value in nodes(want))


print(f"{check(result, by_hand(batch, device))} leaves equal those of .to()")
# A reused leaf is the same object. Gradients flow to a delegated leaf.
assert result["class_weights"] is batch["class_weights"]
assert result["temperature"].grad_fn is not None

# %%
# Back to the host
# ----------------
# One transfer copies each chunk to pinned memory.
# If the host is the target, ``wait()`` blocks as ``get()`` does.
# A delegated leaf, here the parameter, arrives in pageable memory.

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
# To a second device, from several sources
# ----------------------------------------
# One frame is on the host, one is on the first device,
# and the boxes are on the second device, which is the target.

other = torch.device(device.type, (device.index + 1) % devices)
if other == device:
    print("skipped: device to device, which needs two devices")
else:
    mixed = {
        "from the host": batch["frames"][0],
        "from the first device": result["frames"][1],
        "on the target already": by_hand(result["boxes"], other),
    }
    between = tdcopier.start_copy(mixed, other)
    gathered = between.wait()  # on the second device's current stream
    print(f"{check(gathered, by_hand(mixed, other))} leaves on {other}:", between.stats)
    assert gathered["on the target already"].values is mixed["on the target already"].values

# %%
# Reuse a host buffer
# -------------------
# :meth:`~tdcopier.AsyncCopyHandle.wait_staged` blocks the host until the source has been read.
# The transfers may still be pending,
# so one host buffer is enough for a loop with several copies in flight.

buffer = torch.empty(2 * 1024 * 1024)  # 8 MiB: worker threads stage it
handles = []
for step in range(6):
    buffer.fill_(step)  # as a driver or a decoder does
    handle = tdcopier.start_copy({"scan": buffer}, device)
    handle.wait_staged()
    handles.append(handle)

scans = [handle.wait()["scan"] for handle in handles]
ranges = [(scan.min().item(), scan.max().item()) for scan in scans]
print("least and largest value of each scan:", ranges)
assert ranges == [(step, step) for step in range(6)]

# %%
# Check mode finds sources that change too early
# ----------------------------------------------
# Without ``wait_staged()``, a scan could contain values of a later one.
# With the environment variable ``TDCOPIER_CHECK=1``, which is read at import,
# a handle names a source that was modified.
# Each copy then reads its sources twice more, so use check mode for a test run.
# This one runs in a process of its own.

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
# The treatment of each leaf
# --------------------------
# The left side shows the leaves and opaque values in the order of the tree.
# The right side shows the chunks and other results on the device, in the order of addresses.
# Heights are not to scale.

COLOURS = {
    "packed": "#2a9d63",
    "alone": "#2b6cb0",
    "delegated": "#d97706",
    "reused": "#8b5cf6",
    "opaque": "#9aa3ad",
}
OWN_BLOCKS = {
    "delegated": "by Tensor.to",
    "reused": "the same tensor",
    "opaque": "the same object",
}


def treatment(source, value):
    """How tdcopier has copied one leaf or opaque value."""
    if not isinstance(value, torch.Tensor):
        return "opaque"
    if value is source:
        return "reused"
    if value.requires_grad:
        return "delegated"
    return "packed" if value.nbytes <= 256 * 1024 else "alone"


sources = dict(nodes(batch))
rows = [
    (path, treatment(sources[path], value), value)
    for path, value in nodes(result)
    if children(value) is None
]
treatments = [kind for _, kind, _ in rows]
# The counts of the handle agree.
assert [treatments.count(kind) for kind in COLOURS] == list(stats[:5])
# Packed leaves have at least one chunk, and leaves alone one each.
assert stats.chunks > treatments.count("alone")

try:
    import pictures
except ImportError as missing:
    print(f"skipped: the picture ({missing})")
else:
    pictures.places(
        f"{len(rows)} values of one batch, and their places on the device",
        rows,
        COLOURS,
        OWN_BLOCKS,
    )
