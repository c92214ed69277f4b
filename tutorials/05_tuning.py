"""
Tuning: where a copy spends its time, and how to reduce it
==========================================================

We print the time of each phase of a copy, measure copies between other work,
prepare the copies of batches that repeat, copy a batch that does not fit its plan,
and look at how large batches travel.

The printed times are those of the machine that runs the script, with everything else on it.
On the simulated device, the times of transfers say nothing about a GPU.
The picture shows medians from the benchmarks on an NVIDIA H200.
"""

import statistics
import time

import torch

import tdcopier
from tdcopier import workloads

if torch.cuda.is_available():
    device = torch.device("cuda", torch.cuda.current_device())
    print(f"target: {device}, {torch.cuda.get_device_name(device)}")
else:
    from tdcopier import sim

    sim.enable()
    device = torch.device("sim", 0)
    print(f"target: {device}, the simulated device (no CUDA device here)")

batch = workloads.flat_dict()
print(f"a batch of {len(batch)} leaves, {workloads.total_bytes(batch):,} bytes")

# %%
# The phases
# ----------
# Within :func:`tdcopier.stats.time_steps`, ``stats.steps`` of each handle has the time of every
# phase, on all threads.
# :mod:`torch.profiler` always shows the phases as ranges.


def phases_of(start, rounds=50):
    """Median of each phase over some copies, in microseconds."""
    taken = []
    with tdcopier.stats.time_steps():
        for _ in range(rounds):
            handle = start()
            handle.get()
            taken.append(handle.stats.steps)
    names = [name.removesuffix("_us") for name in taken[0]._fields]
    return dict(zip(names, map(statistics.median, zip(*taken, strict=True)), strict=True))


plain = phases_of(lambda: tdcopier.start_copy(batch, device))
for phase, us in plain.items():
    print(f"{phase:>9}: {us:6.1f} us")
assert plain["flatten"] > 0
assert plain["outputs"] > 0

# %%
# Three phases depend on the number of leaves and not on their bytes:
# ``flatten`` walks the tree, ``outputs`` makes the tensors of the result,
# and ``unflatten`` makes its containers.
#
# Between other work
# ------------------
# A loop that only copies finds everything in the processor's caches.
# A training step uses them for other things, so measure your own copies between other work.
# Here it writes 96 MB before each copy; both ways are then slower.

other_work = torch.zeros(24 << 20)


def median_us(copy, between, rounds=20):
    """Median time of a copy, with a call before each, in microseconds."""
    taken = []
    for _ in range(rounds):
        between()
        begin = time.perf_counter()
        copy()
        torch.get_device_module(device).synchronize()
        taken.append(1e6 * (time.perf_counter() - begin))
    return statistics.median(taken)


ways = {
    "tdcopier": lambda: tdcopier.copy(batch, device),
    ".to() per leaf": lambda: {name: leaf.to(device) for name, leaf in batch.items()},
}
for way, copy in ways.items():
    alone, between = median_us(copy, lambda: None), median_us(copy, lambda: other_work.fill_(1.0))
    print(f"{way:>14}: {alone:8.1f} us alone, {between:8.1f} us between other work")
results = [copy() for copy in ways.values()]
assert all(torch.equal(results[0][name], results[1][name]) for name in batch)

# %%
# Most of the difference is not in the leaves, but in what all copies use: the code, and the tables
# of allocators. So the first of several copies pays for the others.
#
# Prepared copies
# ---------------
# :func:`tdcopier.prepare` analyses an example once.
# With ``reuse_outputs=True``, the plan also reuses the tensors of results that you have dropped.

plan = tdcopier.prepare(batch, device)
reusing = tdcopier.prepare(batch, device, reuse_outputs=True)
for prepared in (plan, reusing):
    for _ in range(50):
        prepared.start_copy(batch).get()
    print(prepared)
    assert prepared.misfits == 0

# %%
# The picture shows the whole copy, from the call until the device is done.

try:
    import pictures

    h2d = pictures.results("h2d")
except (ImportError, FileNotFoundError) as missing:
    print(f"skipped: the picture ({missing})")
else:
    contenders = h2d["workloads"]["flat_dict"]["contenders"]
    ways = ["tdcopier", "tdcopier, prepared", "tdcopier, prepared, outputs reused"]
    times = {way: contenders[way] for way in ways}
    pictures.bars(f"Copy of {len(batch)} leaves to the device", h2d, times)

# %%
# The result is the same in every respect.
# If outputs are reused, the memory of a dropped result is freed when a later copy takes it,
# or with the plan.
#
# A batch that does not fit
# -------------------------
# tdcopier copies such a batch as ``start_copy`` does, and counts a misfit.
# ``why_not`` names the difference.

other = {**batch, next(iter(batch)): torch.zeros(3, 5)}
moved = plan.start_copy(other).get()
print("fits:", plan.fits, "misfits:", plan.misfits)
print("why not:", plan.why_not(other))
assert plan.misfits == 1
assert plan.why_not(batch) is None
assert tuple(next(iter(moved.values())).shape) == (3, 5)

# %%
# Large batches
# -------------
# Worker threads stage batches of more than 512 KiB.
# If a copy is slow, look at its ``stats``:
# ``delegated_leaves`` are copied by their own ``.to``, for example because they require gradients,
# and ``fallbacks`` counts operations that used a slower path.
#
# tdcopier does not stage pinned memory.
# A pinned buffer whose rows are the leaves of the batch is one transfer.

large = [torch.zeros(1 << 20) for _ in range(4)]
buffer = torch.zeros(1000, 256).pin_memory()
for name, tree in {"pageable": large, "rows of a pinned tensor": list(buffer.unbind())}.items():
    handle = tdcopier.start_copy(tree, device)
    handle.get()
    stats = handle.stats
    print(f"{name}: {stats.transfer_bytes:,} bytes, transfers: {stats.transfers}")
    assert stats.fallbacks == 0
assert stats.transfers == 1

# %%
# :func:`tdcopier.limits.set_staging_bytes` bounds the memory for staging.
# ``python -m tdcopier info`` prints the limits in force,
# and the fast paths that a device lacks.
