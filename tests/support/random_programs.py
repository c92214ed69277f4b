"""Hypothesis strategies for the random programs of the state machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from call_model import CALLS, STORAGE_ROWS
from copy_model import LANES, WRAPPINGS, CopyPlan, LeafPlan
from hypothesis import strategies as st
from model_memory import DEVICES
from not_yet import NOT_YET
from prefetch_model import PassPlan
from scenario_world import READ_IN_PLACE

DTYPES = [
    torch.int32, torch.uint8, torch.int16, torch.float64, torch.bfloat16, torch.complex64,
]  # fmt: skip
SHAPES = [(), (7,), (40,), (60,), (3, 5), (17, 2), (2, 3, 4), (1,), (0,), (3, 0)]
ROUTES = [
    ("cpu", "sim:0"), ("cpu", "sim:1"), ("sim:0", "cpu"), ("sim:1", "cpu"), ("sim:0", "sim:1"),
    ("sim:1", "sim:0"), ("sim:0", "sim:0"), ("cpu", "cpu"),
]  # fmt: skip
rarely = st.integers(0, 7).map(lambda number: number == 7)
LARGE = (READ_IN_PLACE,)
memory = st.sampled_from(["pageable"] * 3 + ["pinned"] * 2 + ["mapped"])
leaves = st.builds(
    LeafPlan,
    kind=st.sampled_from(["tensor"] * 8 + ["array"] * 2 + ["delegated", "opaque"]),
    shape=st.sampled_from(SHAPES),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["dense"] * 3 + ["transposed", "sliced", "expanded"]),
    elsewhere=rarely,
    memory=memory,
)
large_leaves = st.builds(
    LeafPlan,
    shape=st.just(LARGE),
    elsewhere=rarely,
    memory=st.sampled_from(["pinned"] * 3 + ["pageable", "mapped"]),
)
trees = st.builds(
    lambda small, large: (*small, *large),
    rarely.flatmap(lambda may_be_none: st.lists(leaves, min_size=not may_be_none, max_size=5)),
    st.integers(0, 3).flatmap(lambda i: st.just(()) if i else st.tuples(large_leaves)),
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


def plans_of(
    calls: list[str],
    routes: list[tuple[str, str]] = ROUTES,
    trees: st.SearchStrategy[tuple[LeafPlan, ...]] = trees,
) -> st.SearchStrategy[CopyPlan]:
    """Returns a strategy for copies by these calls, in every direction that they support."""
    return st.builds(
        lambda call, route, leaves, wrapping, options, into, into_memory, rows: CopyPlan(
            *route, leaves, wrapping, tuple(options.items()), call, into, into_memory, tuple(rows)
        ),
        st.sampled_from(calls),
        st.sampled_from(routes),
        trees,
        st.sampled_from(list(WRAPPINGS)),
        options,
        st.sampled_from(["alone", "together", "a chunk", "with gaps"]),
        memory,
        st.lists(st.integers(0, STORAGE_ROWS - 1), min_size=1, max_size=4),
    ).map(_without_what_the_call_does_not_take)


def _without_what_the_call_does_not_take(plan: CopyPlan) -> CopyPlan:
    if plan.call.startswith(("start_copy", "prepare")):
        return plan
    kinds = ("tensor", "array", "opaque") if plan.call == "copy_into" else ("tensor", "opaque")
    leaves = tuple(
        leaf if leaf.kind in kinds else dataclasses.replace(leaf, kind="tensor")
        for leaf in plan.leaves
    )
    if plan.call != "copy_into":
        leaves = tuple(dataclasses.replace(leaf, layout="dense") for leaf in leaves)
    return dataclasses.replace(plan, leaves=leaves)


_plans_of_all = plans_of(["start_copy"] * 4 + ["copy_into"] * 3 + list(CALLS))
_plans_from_where_it_is = plans_of(
    ["start_copy", "prepare"],
    ROUTES[:2],
    st.builds(
        lambda small, large: (*small, large),
        st.lists(leaves, max_size=2),
        st.just(LeafPlan(shape=LARGE, memory="pinned")),
    ),
)
plans = st.one_of(*[_plans_of_all] * 7, _plans_from_where_it_is)
pairs_of_plans = st.lists(plans, min_size=2, max_size=3, unique_by=lambda plan: plan.feature)
"""Plans of different features, so that every program has two in flight at once."""
pass_plans = st.builds(
    PassPlan,
    plans_of(["start_copy"]),
    batches=st.integers(1, 4),
    depth=st.integers(1, 2),
    threaded=st.booleans(),
)
lanes = st.integers(0, LANES - 1)
devices = st.sampled_from(DEVICES)
sizes = st.sampled_from([64, 160, 512, 1000])


class Step(NamedTuple):
    """One copy in a thread's program."""

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
    error: type[Exception] | None  # None: no copy may fail because of it
    lasts: bool = False  # work enqueued before on its stream does not run
    may_recover: bool = False  # the next call for the result may succeed
    shown_by: str = ""  # the scenario that an engine must pass first


_ALL_FAULTS = {
    "device memory": Failing(lambda sim, n: sim.fail_device_allocation(n), torch.OutOfMemoryError),
    "pinned memory": Failing(lambda sim, n: sim.fail_pinned_allocation(n), torch.AcceleratorError),
    "enqueue": Failing(lambda sim, n: sim.fail_transfer(n), torch.AcceleratorError),
    "execution": Failing(
        lambda sim, n: sim.fail_transfer(n, when="execution"), torch.AcceleratorError, lasts=True
    ),
    "recording": Failing(
        lambda sim, n: sim.fail_event_record(n),
        torch.AcceleratorError,
        may_recover=True,
        shown_by="recordings_fail_while_a_device_is_filled",
    ),
    "query": Failing(
        lambda sim, n: sim.fail_event_query(n, times=n),
        None,
        shown_by="queries_fail_while_staging_buffers_turn",
    ),
}
FAULTS = {name: fault for name, fault in _ALL_FAULTS.items() if fault.shown_by not in NOT_YET}
