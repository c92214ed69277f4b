"""
A first copy
============

Sixteen samples of six-camera 3D detection labels, as a data loader yields them: lists of dicts of
528 small tensors, about 150 KB. We start their copy to the accelerator, do something else
meanwhile, use the result on the device, and hold every leaf against ``Tensor.to``.

With a CUDA device the copy goes there. Without one it goes to ``sim``, an accelerator that
tdcopier simulates in host memory: its streams run later, on threads of their own, so order matters
as on a real device. Times mean nothing there, and this script then prints none.
"""

import statistics
import sys
import time
from pathlib import Path

import torch

import tdcopier
from tdcopier import workloads

# %%
# Where to
# --------

if torch.cuda.is_available():
    device = torch.device("cuda", torch.cuda.current_device())
    accelerator = torch.cuda
    print(f"target: {device}, {torch.cuda.get_device_name(device)}")
else:
    from tdcopier import sim

    sim.enable()
    device = torch.device("sim", 0)
    accelerator = torch.sim
    print(f"target: {device}, the simulated device (no CUDA device here)")

# %%
# The batch
# ---------
# Containers are plain ``list`` and ``dict``. The number of objects differs from camera to camera,
# so the tensors cannot simply be stacked.

batch = workloads.detection_batch()
camera = batch[0]["cameras"][0]
print(f"{len(workloads.leaves(batch))} leaves, {workloads.total_bytes(batch):,} bytes")
print("one camera:", {name: tuple(leaf.shape) for name, leaf in camera.items()})

# %%
# Start, work, take
# -----------------
# :func:`tdcopier.start_copy` returns a handle at once. What the host does next overlaps with the
# copy. :meth:`~tdcopier.AsyncCopyHandle.wait` does not hold the host until the copy is done: it
# makes the device's current stream wait, so that all that is enqueued from here on finds the bytes
# in place.

handle = tdcopier.start_copy(batch, device)

next_batch = workloads.detection_batch(seed=1)  # the other work: here, the next batch

result = handle.wait()
print("same containers:", type(result).__name__, "of", type(result[0]).__name__)

# %%
# Use it on the device
# --------------------
# Per sample: how many objects count in the loss, and how far away those are on average.


def statistics_of(sample):
    """(2,): active objects in all cameras, and their mean depth."""
    active = torch.cat([camera["active"] for camera in sample["cameras"]]).float()
    depths = torch.cat([camera["depths"] for camera in sample["cameras"]])
    return torch.stack([active.sum(), (depths * active).sum() / active.sum()])


on_device = torch.stack([statistics_of(sample) for sample in result])
assert on_device.device == device
for index, (active, depth) in enumerate(on_device.cpu().tolist()[:3]):
    print(f"sample {index}: {active:.0f} active objects, {depth:.1f} m away on average")

on_host = torch.stack([statistics_of(sample) for sample in batch])
torch.testing.assert_close(on_device.cpu(), on_host)

# %%
# Every leaf against ``.to()``
# ----------------------------
# The promise is the plain result: same containers, dtypes, shapes, strides and values.

expected = workloads.map_tensors(batch, lambda leaf: leaf.to(device))
pairs = list(
    zip(workloads.leaves_with_paths(result), workloads.leaves_with_paths(expected), strict=True)
)
wrong = [
    path
    for (path, got), (expected_path, want) in pairs
    if path != expected_path
    or got.device != want.device
    or got.dtype != want.dtype
    or got.shape != want.shape
    or got.stride() != want.stride()
    or not torch.equal(got.cpu(), want.cpu())
]
if wrong:
    raise AssertionError(f"{len(wrong)} leaves differ from .to(), the first: batch{wrong[0]}")
print(f"{len(pairs)} of {len(pairs)} leaves equal what .to() gives")

# %%
# What it took
# ------------
# The counters are part of the API: a copy that silently fell back to one transfer per leaf would
# show here.

stats = handle.stats
print(f"leaves: {stats.packed_leaves} packed, {stats.delegated_leaves} left to Tensor.to")
print(f"transfers: {stats.transfers}, {stats.transfer_bytes:,} bytes with alignment")

# %%
# On a GPU: the time
# ------------------
# Both ways in turn, from the call until the device is done, outputs built.


def time_us(copy):
    """Host-synchronised time of one call."""
    accelerator.synchronize()
    begin = time.perf_counter()
    outputs = copy()
    accelerator.synchronize()
    elapsed = time.perf_counter() - begin
    del outputs  # not timed
    return elapsed * 1e6


ways = {
    ".to() per leaf": lambda: workloads.map_tensors(batch, lambda leaf: leaf.to(device)),
    "tdcopier": lambda: tdcopier.copy(batch, device),
}
medians_us = {}
if device.type == "cuda":
    for way in ways.values():  # warm-up
        time_us(way)
    times_us = {name: [] for name in ways}
    for _ in range(50):
        for name, way in ways.items():
            times_us[name].append(time_us(way))
    medians_us = {name: statistics.median(times) for name, times in times_us.items()}
    for name, median in medians_us.items():
        print(f"{name:>15}: {median:8.1f} us, median of 50, interleaved")
    print(f"{'':>15}  {medians_us['.to() per leaf'] / medians_us['tdcopier']:.1f} times faster")
else:
    print("skipped: times, which say nothing on a simulated device")

# %%
# On the simulated device: what a held stream shows
# -------------------------------------------------
# Streams of the simulated device can be held. With the current stream held, as if a long kernel
# ran on it, ``wait()`` still returns, and the copy itself still ends: it travels on a stream of
# its own. Only what the current stream would do with the bytes has to wait.

if device.type == "sim":
    with sim.hold(torch.sim.current_stream()):
        handle = tdcopier.start_copy(next_batch, device)
        held_result = handle.wait()
        deadline = time.monotonic() + 30
        while not handle.ready() and time.monotonic() < deadline:
            time.sleep(0.001)
        print("the current stream is held; wait() has returned; copy done:", handle.ready())
        assert handle.ready()
    boxes = held_result[0]["boxes_3d"].cpu()
    assert torch.equal(boxes, next_batch[0]["boxes_3d"])
else:
    print("skipped: holding a stream, which only the simulated device can do")

# %%
# Where the leaves lie
# --------------------
# All outputs share one allocation on the device, the chunk. Here it is, wrapped into rows of
# 4 KiB: each box is a leaf, coloured by its name. The picture is drawn from the outputs' own
# addresses.

ROW_BYTES = 4096


def draw():
    """The chunk as rows of boxes, and the times as bars where there are any."""
    import matplotlib

    if "matplotlib.pyplot" not in sys.modules:
        matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    figure, axes = plt.subplots(
        1, 2 if medians_us else 1, figsize=(11 if medians_us else 8, 6), squeeze=False
    )
    chunk = axes[0][0]
    named = [
        (path.rpartition("['")[2].rstrip("']"), leaf)
        for path, leaf in workloads.leaves_with_paths(result)
    ]
    first = min(leaf.storage_offset() * leaf.element_size() for _, leaf in named)
    colours = dict(zip(dict.fromkeys(name for name, _ in named), plt.cm.tab10.colors, strict=False))
    for name, leaf in named:
        begin = leaf.storage_offset() * leaf.element_size() - first
        end = begin + leaf.numel() * leaf.element_size()
        while begin < end:
            row, column = divmod(begin, ROW_BYTES)
            length = min(end - begin, ROW_BYTES - column)
            chunk.broken_barh(
                [(column, length)],
                (row - 0.4, 0.8),
                facecolor=colours[name],
                edgecolor="white",
                linewidth=0.4,
            )
            begin += length
    chunk.invert_yaxis()
    chunk.set_xlim(0, ROW_BYTES)
    chunk.set_xlabel("byte in the row")
    chunk.set_ylabel(f"row of {ROW_BYTES} bytes")
    chunk.set_title(f"{len(named)} leaves, {stats.chunks} chunk, {stats.transfers} transfer")
    chunk.legend(
        handles=[Patch(color=colour, label=name) for name, colour in colours.items()],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.1),
        ncols=4,
        fontsize=8,
        frameon=False,
    )
    if medians_us:
        bars = axes[0][1]
        bars.barh(list(medians_us), list(medians_us.values()), color=["#8c96a3", "#2a9d63"])
        bars.set_xlabel("us, median")
        bars.set_title("one copy, host-synchronised")
    figure.tight_layout()
    return figure


try:
    figure = draw()
except ImportError as missing:
    print(f"skipped: the picture ({missing})")
else:
    if "__file__" in globals():  # a gallery has none, and takes the figure itself
        picture = Path(__file__).resolve().parents[1] / "build" / "01_first_copy.png"
        picture.parent.mkdir(exist_ok=True)
        figure.savefig(picture, dpi=120)
        print(f"picture: {picture.relative_to(picture.parents[1])}")
