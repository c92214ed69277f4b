"""
Tuning: where a copy's time goes, and what to do about it
=========================================================

A copy of many small tensors costs the host a few steps per leaf. We look at each of them, prepare
the copies of batches that repeat, look at what a batch that does not fit does, and see what decides
how large batches travel.

Times are measured on whatever is here. On the simulated device they say where the host's time
goes, which is the same code; its link says nothing on a real one.
"""

import statistics
import sys
import time
from pathlib import Path

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

batch = workloads.flat_dict()
print(f"a batch of {len(batch)} leaves, {workloads.total_bytes(batch):,} bytes")

# %%
# The steps
# ---------
# Within :func:`tdcopier.time_steps` each handle's ``stats.steps`` has the time of every step, on
# whatever thread it was done. Outside it costs nothing, and :mod:`torch.profiler` shows the steps
# as ranges in any case.


def steps_of(start, rounds=50):
    """Medians over some copies, by step, in microseconds."""
    taken = []
    with tdcopier.time_steps():
        for _ in range(rounds):
            handle = start()
            handle.get()
            taken.append(handle.stats.steps)
    names = [name.removesuffix("_us") for name in taken[0]._fields]
    return dict(zip(names, map(statistics.median, zip(*taken, strict=True)), strict=True))


plain = steps_of(lambda: tdcopier.start_copy(batch, device))
print({step: round(us, 1) for step, us in plain.items()})
assert plain["flatten"] > 0
assert plain["outputs"] > 0

# %%
# Most of it is not the copy: the walk that finds the leaves, the tensors that are made for the
# result, and the containers that they go to. That is what remains to be saved where batches repeat.
#
# Prepared copies
# ---------------
# :func:`tdcopier.prepare` looks at an example once. Its plan knows shapes, slots and the size of
# everything, and with ``reuse_outputs=True`` it gives the tensors of results that you have dropped
# to the next ones, instead of making new ones.

plan = tdcopier.prepare(batch, device)
reusing = tdcopier.prepare(batch, device, reuse_outputs=True)
ways = {
    "start_copy": lambda: tdcopier.start_copy(batch, device),
    "prepared": lambda: plan.start_copy(batch),
    "prepared,\noutputs reused": lambda: reusing.start_copy(batch),
}
found = {name: steps_of(start) for name, start in ways.items()}
print(plan)
print(reusing)
assert plan.misfits == reusing.misfits == 0


def whole(start, rounds=200):
    """The median of a copy from the call to the result, dropped again, in microseconds."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        start().get()
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times)


for name, start in ways.items():
    print(f"{name.replace(chr(10), ' '):28s} {whole(start):7.1f} us")

# %%
# The result is the same in every respect. Only its end differs where outputs are reused: what you
# drop is freed when a later copy takes it, or with the plan.
#
# A batch that does not fit
# -------------------------
# It is copied all the same, as by ``start_copy``, and counted. ``why_not`` names what differs: a
# plan that never fits is worth nothing, and nobody should have to guess why.

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
# Beyond 512 KiB workers stage the bytes, in windows that begin small so that the link has something
# to do at once. ``stats`` says how a batch went: a high ``delegated_leaves`` means leaves that are
# left to their own ``.to`` (do they need a gradient?), and ``fallbacks`` other than zero that a
# fast way of the device was not to be had. Memory that is pinned already is not staged at all: a
# pinned buffer whose rows are the leaves of the batch is one transfer.

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
# How much may be staged at a time is :func:`tdcopier.set_staging_limit_bytes`. What is in force,
# and what a device lacks, is printed by ``python -m tdcopier.info``.


def draw():
    """One bar for each way, from the steps that it takes."""
    if "__file__" in globals():
        import matplotlib

        matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 3.6))
    left = dict.fromkeys(found, 0.0)
    for step in plain:
        widths = [found[name][step] for name in found]
        axes.barh(list(found), widths, left=list(left.values()), label=step)
        left = {name: left[name] + width for name, width in zip(found, widths, strict=True)}
    axes.invert_yaxis()
    axes.set_xlabel("microseconds of the host, medians")
    axes.set_title(f"Where the time of a copy of {len(batch)} leaves goes", loc="left")
    axes.legend(ncols=len(plain), loc="upper center", bbox_to_anchor=(0.5, -0.2), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    return figure


try:
    figure = draw()
except ImportError as missing:
    print(f"skipped: the picture ({missing})", file=sys.stderr)
else:
    if "__file__" in globals():  # a gallery has none, and takes the figure itself
        picture = Path(__file__).resolve().parents[1] / "build" / "05_tuning.png"
        picture.parent.mkdir(exist_ok=True)
        figure.savefig(picture, dpi=120)
        print(f"picture: {picture.relative_to(picture.parents[1])}")
