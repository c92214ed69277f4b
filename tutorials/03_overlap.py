"""
Overlap copies with work: a training loop as a timeline
=======================================================

We run the same training loop in three ways:
with ``.to()`` on every leaf, with a copy whose result is taken immediately,
and with the copy of the next batch started before the step.

The loops run on a CUDA device if the machine has one, and otherwise on the simulated device.
In the timelines, the order of events comes from these loops,
and the durations are medians that the benchmarks have measured on an NVIDIA H200.
"""

import contextlib

import torch

import tdcopier
from tdcopier import workloads

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

compute = accelerator.current_stream(device)

# %%
# The four calls of a handle
# --------------------------
# Each waits for something else:
#
# - :meth:`~tdcopier.AsyncCopyHandle.ready` asks whether the copy is done, and does not block.
# - :meth:`~tdcopier.AsyncCopyHandle.wait_staged` blocks the host until the sources are free.
# - :meth:`~tdcopier.AsyncCopyHandle.wait` makes the current stream wait for the bytes.
# - :meth:`~tdcopier.AsyncCopyHandle.get` blocks the host until the copy is done.
#
# Each transfer of the simulated device takes 200 ms here, so that you can see the difference.

buffer = torch.full((4,), 1.0)
slow_link = contextlib.nullcontext()
if device.type == "sim":
    slow_link = sim.pace("h2d", latency_us=200_000)
with slow_link:
    handle = tdcopier.start_copy({"depths": buffer}, device)
    handle.wait_staged()
    buffer.fill_(2.0)  # for example, load the next batch
    print("after wait_staged(), source overwritten; copy done:", handle.ready())
    on_device = handle.wait()
    print("after wait(); copy done:", handle.ready())
    assert handle.get() is on_device  # the same tree
    print("after get(); copy done:", handle.ready())
    assert handle.ready()
print("arrived:", on_device["depths"].tolist())
assert on_device["depths"].tolist() == [1.0] * 4

# %%
# A copy during a step
# --------------------
# The step is an operation on the compute stream that ends when a gate opens.
# The host starts the copy of the next batch, and ``get()`` returns while the step still runs.

if device.type == "sim":
    finished = accelerator.Event()
    gate = sim.Gate()
    sim.busy(gate, compute)  # the step
    finished.record(compute)
    gate.wait_until_reached()
    handle = tdcopier.start_copy({"depths": buffer}, device)
    handle.get()
    print(f"gate closed: copy done: {handle.ready()}, step done: {finished.query()}")
    assert handle.ready()
    assert not finished.query()
    gate.open()
    finished.synchronize()
    print(f"gate open:   copy done: {handle.ready()}, step done: {finished.query()}")
else:
    print("skipped: a step with a gate, which only the simulated device has")

# %%
# The loop
# --------
# After each step the host reads the loss, for a log.
# So the compute stream is idle until the host has enqueued the next step and its batch has arrived.
# (In a loop that reads nothing back, the host runs ahead.
# Then even a copy that is taken immediately overlaps with earlier steps.)
#
# The batches are six-camera labels with images, of two samples each.
# Each loop records its calls.

STEPS = 5
batches = [workloads.detection_batch_with_images(samples=2, seed=seed) for seed in range(STEPS)]
print(f"{STEPS} batches of {len(workloads.leaves(batches[0]))} leaves")


def step(calls, index, on_device):
    """Enqueue the work on one batch, then read the value of its loss."""
    calls.append(("step", index))
    loss = on_device[0]["boxes_3d"].sum()  # in place of a model
    loss.item()


# %%
# Three ways to write the loop
# ----------------------------
# The first loop copies on the compute stream, leaf by leaf.
# The second takes the result of each copy immediately.
# The third starts the next copy, enqueues a step, and only then takes its batch with ``wait()``,
# so each copy has the duration of a step to finish.


def leaf_by_leaf(calls):
    for index, batch in enumerate(batches):
        calls.append((".to()", index))
        on_device = workloads.map_tensors(batch, lambda leaf: leaf.to(device))
        step(calls, index, on_device)
        yield on_device


def start(calls, index):
    calls.append(("start_copy", index))
    return tdcopier.start_copy(batches[index], device)


def taken_at_once(calls):
    for index in range(STEPS):
        handle = start(calls, index)
        calls.append(("get", index))
        on_device = handle.get()
        step(calls, index, on_device)
        yield on_device


def one_step_ahead(calls):
    following = start(calls, 0)
    for index in range(STEPS):
        handle = following
        if index + 1 < STEPS:
            following = start(calls, index + 1)
        calls.append(("wait", index))
        on_device = handle.wait()
        step(calls, index, on_device)
        yield on_device


ways = {
    ".to() leaf by leaf": leaf_by_leaf,
    "start_copy().get() at once": taken_at_once,
    "start_copy() one step ahead": one_step_ahead,
}
results, recorded = {}, {}
for name, way in ways.items():
    recorded[name] = []
    results[name] = list(way(recorded[name]))

# %%
# In all three loops, every leaf equals its source.

for name, trees in results.items():
    pairs = list(zip(*map(workloads.leaves, (trees, batches)), strict=True))
    for got, source in pairs:
        assert (got.device, got.dtype) == (device, source.dtype)
        assert torch.equal(got.cpu(), source)
    print(f"{name:>28}: {len(pairs)} leaves equal their sources")

# %%
# From calls to times
# -------------------
# ``timeline`` follows the clocks of the host, the copy stream and the compute stream.
# A stream runs one operation after the other.
# ``wait()`` costs the host almost nothing, but the step of a batch begins when it has arrived.
# ``get()``, and the value of a loss, block the host.


def timeline(calls, ms):
    """Bars (lane, what, batch, begin, end), for durations in ``ms``."""
    host = copying = computing = 0.0  # when each is free
    arrived, bars = {}, []
    for call, batch in calls:
        begin = host
        if call == ".to()":
            host = computing = begin + ms[".to()"]
            bars.append(("host", "copy", batch, begin, host))
            bars.append(("compute stream", "copy", batch, begin, host))
        elif call == "start_copy":
            host = begin + ms["start_copy"]
            copying = arrived[batch] = max(begin, copying) + ms["copy"]
            bars.append(("host", "copy", batch, begin, host))
            bars.append(("copy stream", "copy", batch, copying - ms["copy"], copying))
        elif call == "get":
            host = max(host, arrived[batch])
            bars.append(("host", "copy", batch, begin, host))
        elif call == "step":
            starts = max(host, computing, arrived.get(batch, 0.0))
            host = computing = starts + ms["step"]
            bars.append(("compute stream", "step", batch, starts, computing))
            bars.append(("host", "loss", batch, begin, host))
    return bars


def step_ms(bars):
    """The mean time from the end of one step to the end of the next."""
    ends = [end for lane, what, *_, end in bars if what == "step"]
    return (ends[-1] - ends[0]) / (STEPS - 1)


# %%
# The timelines
# -------------
# A batch has the same colour and number in every lane.
# (a) ``.to()`` has the cost of a copy for each leaf, and the compute stream does no other work.
# (b) The packed copy takes less time, but the step waits for it.
# (c) A copy that is started one step ahead travels during the previous step.

try:
    import pictures

    copies = pictures.results("h2d")["workloads"]["detection_batch_with_images"]
    loops = pictures.results("loop")
except (ImportError, FileNotFoundError) as missing:
    print(f"skipped: the pictures ({missing})")
    loops = None
else:
    loop = loops["loops"]["detection_batch_with_images"]
    steps = loop["step"]
    medians = {
        ".to()": copies["contenders"][".to() per leaf"],
        "copy": copies["contenders"]["tdcopier"],
        "start_copy": loop["copy_calls"]["tdcopier"],
        "step": steps["on the device already"],
    }
    ms = {name: time["median_us"] / 1000 for name, time in medians.items()}
    print("durations in ms:", {name: round(time, 2) for name, time in ms.items()})
    bars = {name: timeline(calls, ms) for name, calls in recorded.items()}
    pictures.timeline(
        {f"{name}: {step_ms(way):.1f} ms per step": way for name, way in bars.items()},
        f"ms, from medians for {copies['leaves']} leaves ({loops['machine']['gpu']})",
    )

# %%
# Measured steps
# --------------
# The benchmarks have also measured whole steps of such a loop on the same GPU.
# There the host reads no loss, and may enqueue one step before the previous one is done.
# "On the device already" is a loop without copies.

if loops is not None:
    pictures.bars("A step of a training loop with images", loops, steps)
