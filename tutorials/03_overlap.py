"""
Copies beside the work: a training loop as a timeline
=====================================================

The same training loop three times: with ``.to()`` on every leaf, with a copy that is taken as soon
as it is started, and with the next batch's copy started before the step. We measure when the host
calls, when a batch arrives, and when the device works, and draw the three loops one above the
other.

On a CUDA device the link and the work are real. Without one, the device that tdcopier simulates
stands in: the link gets its pace from :func:`tdcopier.sim.pace` and the work is
:func:`tdcopier.sim.busy`. The times are measured all the same, but they are those of the
simulation: what they show is the order of events.
"""

import contextlib
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

compute = accelerator.current_stream(device)


def link(latency_us, bandwidth_bytes_per_s):
    """The simulated link's pace, for a ``with``; a real link has its own."""
    if device.type == "cuda":
        return contextlib.nullcontext()
    return sim.pace("h2d", latency_us=latency_us, bandwidth_bytes_per_s=bandwidth_bytes_per_s)


# %%
# What the four calls wait for
# ----------------------------
# :meth:`~tdcopier.AsyncCopyHandle.ready` asks, and waits for nothing.
# :meth:`~tdcopier.AsyncCopyHandle.wait_staged` holds the host until the sources have been read:
# from then on you may write to them. :meth:`~tdcopier.AsyncCopyHandle.wait` makes the current
# stream wait for the bytes, and :meth:`~tdcopier.AsyncCopyHandle.get` the host as well. The
# simulated link takes 20 ms here, so that the difference shows; a real one may be done before the
# host asks.

buffer = torch.full((4,), 1.0)
with link(latency_us=20_000, bandwidth_bytes_per_s=1e9):
    handle = tdcopier.start_copy({"depths": buffer}, device)
    handle.wait_staged()
    buffer.fill_(2.0)  # the next batch, for example
    print("after wait_staged(), source overwritten; copy done:", handle.ready())
    on_device = handle.wait()
    print("after wait(); copy done:", handle.ready())
    assert handle.get() is on_device  # the same tree
    print("after get(); copy done:", handle.ready())
    assert handle.ready()
print("arrived:", on_device["depths"].tolist())
assert on_device["depths"].tolist() == [1.0] * 4

# %%
# What is enqueued has not run
# ----------------------------
# A stream of the simulated device can be held, as if a long kernel ran on it. Here that is the
# stream of the consumer. The copy is done all the same, since it travels on a stream of its own,
# and even ``get()`` returns. The step behind it has been enqueued and has not run: its event is not
# done before the stream is let go.

if device.type == "sim":
    finished = accelerator.Event()
    with sim.hold(compute):
        handle = tdcopier.start_copy({"depths": buffer}, device)
        handle.get()
        sim.busy(0.001, compute)  # the step
        finished.record(compute)
        print(f"held:   copy done: {handle.ready()}, step done: {finished.query()}")
        assert handle.ready()
        assert not finished.query()
    finished.synchronize()
    print(f"let go: copy done: {handle.ready()}, step done: {finished.query()}")
else:
    print("skipped: holding a stream, which only the simulated device can do")

# %%
# The loop
# --------
# A step is a few milliseconds of work on the compute stream, which is the current stream here. Then
# the host reads the loss, for a log. When it goes on, the compute stream is idle, and stays so
# until the next step is enqueued and its batch is there. (In a loop that reads nothing back, the
# host runs ahead, and even a copy that is taken at once travels while earlier steps work.)

STEPS = 5
WORK_MS = 5.0

# The simulated link is slow: two samples take long enough to be seen.
samples = 16 if device.type == "cuda" else 2
batches = [workloads.detection_batch(samples=samples, seed=seed) for seed in range(STEPS)]
print(f"{STEPS} batches of {len(workloads.leaves(batches[0]))} leaves")


def mark(stream=None):
    """The host's time; or an event that will hold the time at which ``stream`` got here."""
    if stream is None:
        return time.perf_counter()
    event = accelerator.Event(enable_timing=True)
    event.record(stream)
    return event


def enqueue_work(products):
    """On CUDA so many products of matrices; else the stream is busy."""
    if device.type == "sim":
        sim.busy(WORK_MS / 1000, compute)
        return
    for _ in range(products):
        torch.mm(left, left, out=product)


products = 20
if device.type == "cuda":  # find out how many take WORK_MS
    left, product = torch.rand(2, 2048, 2048, device=device)
    enqueue_work(products)  # warm-up
    begin = mark(compute)
    enqueue_work(products)
    end = mark(compute)
    end.synchronize()
    products = max(1, round(products * WORK_MS / begin.elapsed_time(end)))


# %%
# A timeline is a list of bars. On the host, a bar is between two readings of the clock; on a
# stream, between two timed events. Both clocks have the same zero: an event that an idle stream
# reaches between two readings of the host's clock. Of a few such events we take the one whose
# readings are closest together.


class Timeline:
    """What happened when, in one run of the loop."""

    def __init__(self):
        accelerator.synchronize()
        _, self.host_zero, self.zero = min(
            (self.meet() for _ in range(10)), key=lambda meeting: meeting[0]
        )
        self.marked = []

    def meet(self):
        """Seconds between the two readings, the middle of them, and the event."""
        before, event = mark(), mark(compute)
        event.synchronize()
        after = mark()
        return after - before, (before + after) / 2, event

    @contextlib.contextmanager
    def bar(self, what, batch, stream=None):
        """From here to the end of the ``with``, on the host or on a stream."""
        begin = mark(stream)
        yield
        lane = {None: "host", compute: "compute stream", arrivals: "copy stream"}[stream]
        self.marked.append((lane, what, batch, begin, mark(stream)))

    def ms(self, moment):
        """Since zero."""
        if isinstance(moment, float):
            return (moment - self.host_zero) * 1000
        return self.zero.elapsed_time(moment)

    def bars(self):
        """(lane, what, batch, begin, end) of all of them, in ms since the host began the first."""
        accelerator.synchronize()
        bars = [(*which, self.ms(begin), self.ms(end)) for *which, begin, end in self.marked]
        first = min(begin for lane, *_, begin, _ in bars if lane == "host")
        return [(*which, begin - first, end - first) for *which, begin, end in bars]


# %%
# The copy stream is tdcopier's own. When a batch arrives can be seen all the same: a second stream,
# ``arrivals``, waits for each handle, and an event is recorded there. So in the lane of the copy
# stream, a bar begins with the call, or when the batch before has arrived if that is later, and it
# ends with the arrival. It is staging and transfer together.

arrivals = accelerator.Stream(device)


def start(timeline, index):
    """Start the copy of one batch, and note when it arrives."""
    with timeline.bar("copy", index), timeline.bar("copy", index, arrivals):
        handle = tdcopier.start_copy(batches[index], device)
        handle.wait(arrivals)  # the host goes on: a batch this small is staged in the call
    return handle


def step(timeline, index, on_device):
    """Enqueue the work on one batch, and read what stands for its loss."""
    with timeline.bar("step", index), timeline.bar("step", index, compute):
        enqueue_work(products)
    with timeline.bar("loss", index):
        on_device[0]["boxes_3d"].sum().item()


# %%
# Three ways to write the loop
# ----------------------------
# The first copies on the compute stream, leaf by leaf. The second takes each copy as soon as it is
# started. The third starts the next copy before it enqueues a step, and only then takes this step's
# batch, with ``wait()``. So a copy has all of the step before to travel. Each loop runs four times,
# and the fastest run is kept: the others were warm-ups, or shared the machine.


def leaf_by_leaf(timeline):
    for index, batch in enumerate(batches):
        with timeline.bar("copy", index), timeline.bar("copy", index, compute):
            on_device = workloads.map_tensors(batch, lambda leaf: leaf.to(device))
        step(timeline, index, on_device)
        yield on_device


def taken_at_once(timeline):
    for index in range(STEPS):
        handle = start(timeline, index)
        with timeline.bar("copy", index):
            on_device = handle.get()
        step(timeline, index, on_device)
        yield on_device


def one_step_ahead(timeline):
    following = start(timeline, 0)
    for index in range(STEPS):
        handle = following
        if index + 1 < STEPS:
            following = start(timeline, index + 1)
        with timeline.bar("copy", index):
            on_device = handle.wait()
        step(timeline, index, on_device)
        yield on_device


ways = {
    ".to() leaf by leaf": leaf_by_leaf,
    "start_copy().get() at once": taken_at_once,
    "start_copy() one step ahead": one_step_ahead,
}
results, bars = {}, {}
with link(latency_us=10, bandwidth_bytes_per_s=10e6):
    for name, way in ways.items():
        runs = []
        for _ in range(4):
            timeline = Timeline()
            runs.append((list(way(timeline)), timeline.bars()))
        results[name], bars[name] = min(runs, key=lambda run: run[1][-1][-1])

# %%
# First the values: every leaf of every step equals what ``.to()`` gives, which is the source.

expected = results[".to() leaf by leaf"]
for name, trees in results.items():
    trios = list(zip(*map(workloads.leaves, (trees, expected, batches)), strict=True))
    for got, want, source in trios:
        assert (got.device, got.dtype, got.stride()) == (device, want.dtype, want.stride())
        assert torch.equal(got.cpu(), want.cpu())
        assert torch.equal(got.cpu(), source)
    print(f"{name:>28}: {len(trios)} leaves are right")

# %%
# Then the times, as means over the loop: from the end of one step's work to the end of the next,
# and how long the calls that copy have held the host.


def step_ms(name):
    ends = [end for lane, what, *_, end in bars[name] if (lane, what) == ("compute stream", "step")]
    return (ends[-1] - ends[0]) / (STEPS - 1)


def copy_calls_ms(name):
    calls = [bar for bar in bars[name] if bar[:2] == ("host", "copy")]
    return sum(end - begin for *_, begin, end in calls) / STEPS


print(f"{'ms per step':>28}  {'all':>6}  {'host in copy calls':>18}")
for name in ways:
    print(f"{name:>28}  {step_ms(name):6.2f}  {copy_calls_ms(name):18.2f}")
if device.type == "sim":
    print("These are times of a simulated link and simulated work: only the order means something.")

# %%
# The picture
# -----------
# A batch has its colour and its number in every lane. (a) ``.to()`` pays for the link once per
# leaf, and the compute stream does nothing else meanwhile. (b) One packed transfer takes less, but
# the step waits for it. (c) Started one step ahead, it travels while the step before works. Only
# the first step waits for its batch.

COLOURS = ["#2a9d63", "#2b6cb0", "#d97706", "#8b5cf6", "#c2416b"]
LANES = ["host", "copy stream", "compute stream"]
LEGEND = {
    "copy": "copy: the host in a call; a batch on its way",
    "step": "step: the host enqueues it; the stream works on it",
    "loss": "the host waits for the loss",
}


def look(what, colour):
    """How a bar is drawn."""
    if what == "loss":
        return {"facecolor": "#e3e6ea", "zorder": 0.5}  # below its neighbours' edges
    if what == "step":
        return {"facecolor": colour}
    return {"facecolor": "white", "edgecolor": colour, "hatch": "////", "linewidth": 0.8}


def draw():
    """One panel for each way, with one lane for the host and one for each of two streams."""
    import matplotlib

    if "matplotlib.pyplot" not in sys.modules:
        matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    figure, panels = plt.subplots(len(bars), 1, figsize=(11, 7.2), sharex=True)
    duration = max(end for way in bars.values() for *_, end in way)
    for letter, panel, (name, way) in zip("abc", panels, bars.items(), strict=True):
        for lane, what, batch, begin, end in way:
            row, colour = LANES.index(lane), COLOURS[batch]
            panel.broken_barh([(begin, end - begin)], (row - 0.38, 0.76), **look(what, colour))
            if what != "loss" and end - begin > duration / 60:  # else there is no room
                label = panel.text((begin + end) / 2, row, batch, ha="center", va="center")
                label.set(color="white" if what == "step" else colour, weight="bold")
                if what == "copy":
                    label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1.5})
        for row in set(range(len(LANES))) - {LANES.index(bar[0]) for bar in way}:
            panel.text(0, row, "not used", color="#6b7480", va="center", style="italic")
        panel.set_title(f"({letter}) {name}: {step_ms(name):.1f} ms per step", loc="left")
        panel.set_yticks(range(len(LANES)), LANES)
        panel.set_ylim(len(LANES) - 0.5, -0.5)
        panel.set_xlim(-duration / 100, duration * 1.01)
        panel.tick_params(axis="y", length=0)
        panel.spines[["top", "right", "left"]].set_visible(False)
    simulated = " (simulated link and work)" if device.type == "sim" else ""
    panels[-1].set_xlabel(f"ms since the loop began{simulated}")
    handles = [Patch(label=text, **look(what, "#555555")) for what, text in LEGEND.items()]
    figure.legend(handles=handles, loc="lower center", ncols=3, frameon=False)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    return figure


try:
    figure = draw()
except ImportError as missing:
    print(f"skipped: the picture ({missing})")
else:
    if "__file__" in globals():  # a gallery has none, and takes the figure itself
        picture = Path(__file__).resolve().parents[1] / "build" / "03_overlap.png"
        picture.parent.mkdir(exist_ok=True)
        figure.savefig(picture, dpi=120)
        print(f"picture: {picture.relative_to(picture.parents[1])}")
