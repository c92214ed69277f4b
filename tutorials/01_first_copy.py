"""
A first copy
============

We start the copy of a batch to the accelerator, and let the host do other work meanwhile.
Then we use the result on the device, and compare every leaf with the one that ``Tensor.to`` gives.

The copy goes to a CUDA device if the machine has one.
Otherwise it goes to ``sim``, an accelerator that tdcopier simulates in host memory.
Its streams run asynchronously, so the order of operations matters as on a real device;
its speed says nothing about a GPU.
"""

import statistics
import time

import torch

import tdcopier
from tdcopier import workloads

# %%
# The device
# ----------

if torch.cuda.is_available():
    device = torch.device("cuda", torch.cuda.current_device())
    print(f"target: {device}, {torch.cuda.get_device_name(device)}")
else:
    from tdcopier import sim

    sim.enable()
    device = torch.device("sim", 0)
    print(f"target: {device}, the simulated device (no CUDA device here)")

# %%
# The batch
# ---------
# Sixteen samples of labels for 3D detection with six cameras, as lists of dicts:
# 528 small tensors, about 150 KB in all.
# The number of objects differs from camera to camera, so the tensors cannot be stacked.

batch = workloads.detection_batch()
camera = batch[0]["cameras"][0]
print(f"{len(workloads.leaves(batch))} leaves, {workloads.total_bytes(batch):,} bytes")
print("one camera:", {name: tuple(leaf.shape) for name, leaf in camera.items()})

# %%
# Start the copy, do other work, take the result
# ----------------------------------------------
# :func:`tdcopier.start_copy` returns a handle immediately, and the host continues.
# :meth:`~tdcopier.AsyncCopyHandle.wait` gives the result and makes the current stream wait:
# operations that you enqueue after it run when the bytes have arrived.

handle = tdcopier.start_copy(batch, device)

next_batch = workloads.detection_batch(seed=1)  # the other work

result = handle.wait()
print("same containers:", type(result).__name__, "of", type(result[0]).__name__)

# %%
# Use the result on the device
# ----------------------------
# For each sample we compute how many objects count in the loss, and their mean distance.


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
# Compare every leaf with ``.to()``
# ---------------------------------
# The result has the same containers, dtypes, shapes, strides and values.

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
print(f"{len(pairs)} of {len(pairs)} leaves equal those of .to()")

# %%
# Count the transfers
# -------------------
# ``handle.stats`` counts the leaves and transfers, also leaves that could not be packed.

stats = handle.stats
print(f"leaves: {stats.packed_leaves} packed, {stats.delegated_leaves} delegated to Tensor.to")
print(f"transfers: {stats.transfers}, {stats.transfer_bytes:,} bytes with alignment")

# %%
# Look into the chunks
# --------------------
# All leaves of one dtype share one allocation on the device, a chunk.
# The picture shows each chunk as rows of 4 KiB.
# Each box is a leaf at the address of its tensor, coloured by the leaf's name.

try:
    import pictures
except ImportError as missing:
    print(f"skipped: the pictures ({missing})")
    pictures = None
else:
    named = [
        (path.rpartition("['")[2].rstrip("']"), leaf)
        for path, leaf in workloads.leaves_with_paths(result)
    ]
    pictures.chunks(f"{len(named)} leaves in {stats.chunks} chunks", named)

# %%
# How long a copy takes
# ---------------------
# Times of this batch's copy on an NVIDIA H200, from the benchmarks:
# from the call until the device is done and all result tensors exist.
# The last bar is a lower limit: one transfer of the same bytes from pinned memory.

if pictures is not None:
    h2d = pictures.results("h2d")
    times = h2d["workloads"]["detection_batch"]["contenders"]
    pictures.bars("Copy of the detection batch to the device", h2d, times)

# %%
# If this machine has a GPU, we measure two ways here, in turn.
# ``python -m tdcopier bench`` measures more of them.


def time_us(copy):
    """Time of one call until the device is done."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    outputs = copy()
    torch.cuda.synchronize()
    elapsed = time.perf_counter() - begin
    del outputs  # not timed
    return elapsed * 1e6


ways = {
    ".to() per leaf": lambda: workloads.map_tensors(batch, lambda leaf: leaf.to(device)),
    "tdcopier": lambda: tdcopier.copy(batch, device),
}
if device.type == "cuda":
    for way in ways.values():  # warm-up
        time_us(way)
    times_us = {name: [] for name in ways}
    for _ in range(50):
        for name, way in ways.items():
            times_us[name].append(time_us(way))
    for name, times in times_us.items():
        print(f"{name:>15}: {statistics.median(times):8.1f} us, median of 50, interleaved")
else:
    print("skipped: times on this machine, which has no GPU")

# %%
# Hold a stream of the simulated device
# -------------------------------------
# We hold the current stream of the simulated device, as if a long kernel ran on it.
# ``wait()`` returns all the same, and the copy finishes, because it runs on a stream of its own.

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
