"""
A batch from another process
============================

A worker process makes batches of many small tensors, and the main process copies them to a device.
Sent as it is, a batch crosses leaf by leaf, each in shared memory with its own file descriptor.
:func:`tdcopier.pack` makes one run of bytes of it, a parcel, which is one thing up to the device.
"""

import multiprocessing
import os
import tempfile
import time

import torch

import tdcopier
from tdcopier import workloads

if torch.cuda.is_available():
    device = torch.device("cuda", torch.cuda.current_device())
    print(f"device: {device}, {torch.cuda.get_device_name(device)}")
else:
    from tdcopier import sim

    sim.enable()
    device = torch.device("sim", 0)
    print(f"device: {device}, the simulated device (no CUDA device here)")

# %%
# The worker
# ----------
# It packs each batch before it puts it into the queue, or sends it as it is, to compare.
# This script forks its worker; a program whose functions are in a module can spawn it too.

BATCHES = 10


def work(queue, wanted):
    """Send a batch for each text that is wanted."""
    for way in iter(wanted.get, "no more"):
        batch = workloads.detection_batch(seed=0)
        queue.put(tdcopier.pack(batch) if way == "packed" else batch)


context = multiprocessing.get_context("fork")
queue, wanted = context.Queue(), context.Queue()
worker = context.Process(target=work, args=(queue, wanted), daemon=True)
worker.start()

# %%
# The loop
# --------
# :func:`tdcopier.start_copy` takes a parcel in the place of its batch, and gives the batch.

times_ms = {"as it is": [], "packed": []}
for way, times in times_ms.items():
    for _ in range(BATCHES):
        begin = time.perf_counter()
        wanted.put(way)
        received = queue.get()
        batch = tdcopier.start_copy(received, device).wait()
        times.append((time.perf_counter() - begin) * 1e3)
wanted.put("no more")
worker.join()

leaves = list(workloads.leaves(batch))
print(f"received: {received!r}, with {len(leaves)} leaves")
for way, times in times_ms.items():
    print(f"{way}: {sorted(times)[BATCHES // 2]:.1f} ms, making the batch included")

expected = workloads.detection_batch(seed=0)
for arrived, leaf in zip(leaves, workloads.leaves(expected), strict=True):
    assert arrived.device == device
    assert torch.equal(arrived.cpu(), leaf)

# %%
# The tree on the host
# --------------------
# ``tree()`` builds the batch over the parcel's memory, without a copy.

parcel = tdcopier.pack({"boxes": torch.rand(12, 4), "name": "front"})
tree = parcel.tree()
tree["boxes"][0] = 0  # written to the parcel
print("the first box in the parcel:", parcel.tree()["boxes"][0].tolist())
print("needs pickle:", parcel.needs_pickle)

# %%
# Bytes
# -----
# A parcel has the buffer protocol, so files, pipes and sockets take it as bytes.
# Bytes are checked when they are read, so they may come from anywhere.

data = bytes(parcel)
print(data[:8], f"and {len(data) - 8} bytes more")
assert torch.equal(tdcopier.Parcel.from_buffer(data).tree()["boxes"], tree["boxes"])
try:
    tdcopier.Parcel.from_buffer(data[:-1])
except ValueError as error:
    print("one byte short:", error)

with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "batch.parcel")
    parcel.save(path)
    on_device = tdcopier.copy(tdcopier.Parcel.load(path), device)
print("from the file:", on_device["name"], tuple(on_device["boxes"].shape))

# %%
# Objects of other classes are pickled in the parcel.
# Unpickling runs code, so reading the bytes of such a parcel needs ``allow_pickle=True``.

parcel = tdcopier.pack([torch.ones(2), {"a", "set"}])
try:
    tdcopier.Parcel.from_buffer(bytes(parcel))
except ValueError as error:
    print("refused:", error)
trusted = tdcopier.Parcel.from_buffer(bytes(parcel), allow_pickle=True)
print("trusted:", trusted.tree()[1] == {"a", "set"})
