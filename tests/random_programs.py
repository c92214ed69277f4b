"""What the random programs of the state machine are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from copy_model import DEVICES, LANES, WRAPPINGS, CopyPlan, LeafPlan
from hypothesis import strategies as st

DTYPES = [
    torch.int32, torch.uint8, torch.int16, torch.float64, torch.bfloat16, torch.complex64,
]  # fmt: skip
SHAPES = [(), (7,), (40,), (60,), (3, 5), (17, 2), (2, 3, 4), (1,), (0,), (3, 0)]
ROUTES = [
    ("cpu", "sim:0"), ("cpu", "sim:1"), ("sim:0", "cpu"), ("sim:1", "cpu"), ("sim:0", "sim:1"),
    ("sim:1", "sim:0"), ("sim:0", "sim:0"), ("cpu", "cpu"),
]  # fmt: skip
rarely = st.integers(0, 7).map(lambda number: number == 7)
leaves = st.builds(
    LeafPlan,
    kind=st.sampled_from(["tensor"] * 8 + ["array"] * 2 + ["delegated", "opaque"]),
    shape=st.sampled_from(SHAPES),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["dense"] * 3 + ["transposed", "sliced", "expanded"]),
    elsewhere=rarely,
)
options = st.fixed_dictionaries(
    {},
    optional={
        "use_pinned_staging": st.sampled_from([True, True, False]),
        "use_background_thread": st.sampled_from([True, True, False]),
        "pack_cpu_tensors": st.sampled_from([True, False]),
        "max_packed_chunk_bytes": st.sampled_from([1, 100, 300]),
        "min_packed_alignment_bytes": st.sampled_from([1, 24, 512]),
    },
)
plans = st.builds(
    lambda route, leaves, wrapping, options: CopyPlan(
        *route, tuple(leaves), wrapping, tuple(options.items())
    ),
    st.sampled_from(ROUTES),
    st.lists(leaves, max_size=5),
    st.sampled_from(list(WRAPPINGS)),
    options,
)
lanes = st.integers(0, LANES - 1)
devices = st.sampled_from(DEVICES)
sizes = st.sampled_from([64, 160, 512, 1000])


class Step(NamedTuple):
    """One copy of a thread's program."""

    plan: CopyPlan
    lane: int
    how: str


programs = st.lists(
    st.builds(Step, plans, lanes, st.sampled_from(["get", "wait", "poll", "drop"])),
    min_size=1,
    max_size=3,
)


class Failing(NamedTuple):
    arm: Callable[[Any, int], Any]
    error: type[Exception]
    lasts: bool = False  # what its stream has been given does not run


FAULTS = {
    "device memory": Failing(lambda sim, n: sim.fail_device_allocation(n), torch.OutOfMemoryError),
    "pinned memory": Failing(lambda sim, n: sim.fail_pinned_allocation(n), torch.AcceleratorError),
    "enqueue": Failing(lambda sim, n: sim.fail_transfer(n), torch.AcceleratorError),
    "execution": Failing(
        lambda sim, n: sim.fail_transfer(n, when="execution"), torch.AcceleratorError, lasts=True
    ),
}
