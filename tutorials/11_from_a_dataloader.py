"""
From a DataLoader to the device
===============================

A ``DataLoader`` with two workers reads a dataset as detectors have it: images and boxes.
We read it in torch's way, leaf by leaf, and then with :func:`tdcopier.prefetch`,
compare all batches of both ways, and measure where the time of a batch goes.

On a machine without a CUDA device the target is the simulated device.
Its transfers are copies in host memory, so their times say nothing about a GPU;
the part of the host is real: receiving batches from the workers, and the calls of the loop.
"""

import time

import torch
from torch.utils.data import DataLoader, Dataset

import tdcopier
from tdcopier import workloads

if torch.cuda.is_available():
    device = torch.device("cuda", torch.cuda.current_device())
    name = torch.cuda.get_device_name(device)
else:
    from tdcopier import sim

    sim.enable()
    device = torch.device("sim", 0)
    name = "the simulated device (no CUDA device here)"
print(f"target: {device}, {name}")

# %%
# The dataset
# -----------
# Each image has its own number of boxes, so samples cannot be stacked:
# ``collate_fn=list`` gives a batch as a list of samples, with six small or medium leaves for each.
# A step is a pause in which the host has nothing to do, as while a GPU computes.

SAMPLES, BATCH, STEP_SECONDS = 640, 16, 0.02


class Detections(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        count = int(torch.randint(1, 20, (1,), generator=generator))
        return {
            "image": torch.full((3, 96, 96), index % 256, dtype=torch.uint8),
            "boxes": torch.rand(count, 4, generator=generator),
            "labels": torch.randint(90, (count,), generator=generator),
            "area": torch.rand(count, generator=generator),
            "iscrowd": torch.zeros(count, dtype=torch.bool),
            "image_id": torch.tensor(index),
        }


def loader():
    # This script forks its workers; a dataset in a module can be sent to spawned ones too.
    return DataLoader(
        Detections(), BATCH, num_workers=2, collate_fn=list, multiprocessing_context="fork"
    )


def step(batch):
    """Stand for the work on a batch."""
    time.sleep(STEP_SECONDS)


# %%
# Torch's way
# -----------
# ``next()`` receives each leaf from the worker, with a file descriptor of its own,
# and ``.to()`` sends each leaf. Both hold up the loop.

WARM_UP = 4  # the first batches, for which workers start: not in the means


def milliseconds(times):
    return sum(times[WARM_UP:]) / len(times[WARM_UP:]) * 1e3


def torchs_way():
    reading, copying, got = [], [], []
    batches = iter(loader())
    while True:
        begin = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            break
        received = time.perf_counter()
        on_device = workloads.map_tensors(batch, lambda leaf: leaf.to(device, non_blocking=True))
        copying.append(time.perf_counter() - received)
        reading.append(received - begin)
        step(on_device)
        got.append(on_device)
    return got, {"reading": milliseconds(reading), "copying": milliseconds(copying)}


expected, torchs = torchs_way()
leaves = workloads.leaves(expected[0])
print(f"{len(expected)} batches; the first has {len(leaves)} leaves")

# %%
# prefetch
# --------
# The same loader, in one more call.
# Its workers pack each batch into one of their slabs, memory that is used again and again,
# and the process that trains receives one message.
# A thread receives it and starts the copy during the step, and the device reads the slab.
# The loop only waits if a batch is late.


def with_prefetch():
    waiting, got = [], []
    with tdcopier.prefetch(loader(), device) as batches:
        begin = time.perf_counter()
        for batch in batches:
            waiting.append(time.perf_counter() - begin)
            step(batch)
            got.append(batch)
            if len(got) == WARM_UP:
                first = batches.stats
            begin = time.perf_counter()
        stats = batches.stats
    counted = stats.batches - first.batches
    beside = {
        "reading": (stats.read_us - first.read_us) / counted / 1e3,
        "copying": (stats.copy_us - first.copy_us) / counted / 1e3,
    }
    return got, milliseconds(waiting), beside, stats


arrived, waiting_ms, beside, stats = with_prefetch()
print(f"packed by workers: {stats.packed_batches}, read from slabs: {stats.slab_batches}")
print(f"why not packed: {stats.why_unpacked}; why not in place: {stats.why_not_in_place}")
print(f"late: {stats.late_batches} of {stats.batches}")
assert stats.packed_batches == len(expected)

# %%
# Both ways give the same batches.

pairs = zip(workloads.leaves(arrived), workloads.leaves(expected), strict=True)
for leaf, other in pairs:
    assert (leaf.device, leaf.dtype) == (device, other.dtype)
    assert torch.equal(leaf.cpu(), other.cpu())
print(f"{len(workloads.leaves(arrived))} leaves are equal")

# %%
# The time of a batch
# -------------------
# "Reading" is the time until the loader has returned the batch, a wait for its worker included:
# leaves that are sent one by one cost the worker time too.
# Full bars hold up the loop; pale bars are work of the reader thread beside the step.
# The step itself, which takes 20 ms here, is not in the picture.
# These are times of the machine that ran the script; "copying" to the simulated device is not
# that to a GPU.

ways = {
    "the loader and .to()": {"loop": torchs, "beside": {}},
    "prefetch": {"loop": {"waiting": waiting_ms}, "beside": beside},
}
for way, parts in ways.items():
    for where, times in parts.items():
        text = ", ".join(f"{part} {took:.2f} ms" for part, took in times.items())
        print(f"{way}, {where}: {text or 'nothing'}")

try:
    import pictures
except ImportError as missing:
    print(f"skipped: the picture ({missing})")
else:
    kind = "the simulated device" if device.type == "sim" else name
    pictures.parts("Where the time of a batch goes", ways, f"ms per batch on this machine; {kind}")
