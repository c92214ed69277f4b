"""What a plan keeps and reports, which threads may share it, and code that runs during a walk."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from container_classes import Box, Sample, flatten_box, unflatten_box
from prepared_example import example
from support import assert_same, oracle
from thread_support import at_once, switch_interval

import tdcopier
from tdcopier.workloads import detection_batch

# ---- the plan ------------------------------------------------------------------------------------


def test_a_plan_says_what_it_is(device):
    plan = tdcopier.prepare(detection_batch(), device)
    plan.start_copy(detection_batch(seed=1)).get()
    plan.start_copy([torch.ones(2)]).get()
    assert plan.device == torch.device(device)
    assert repr(plan) == (
        f"<PreparedCopy of 528 leaves, {plan._native.bytes} bytes, to {device}: "
        f"{plan.fits} fits, {plan.misfits} misfits>"
    )


def test_a_plan_keeps_nothing_of_its_example(device):
    batch = [torch.ones(3), Sample(torch.ones(2)), {"key": np.ones(2)}]
    gone = [weakref.ref(batch[0]), weakref.ref(batch[1]), weakref.ref(batch[2]["key"])]
    plan = tdcopier.prepare(batch, device)
    del batch
    assert [reference() for reference in gone] == [None, None, None]
    assert plan.start_copy([torch.ones(3), torch.ones(2), np.ones(2)]).get()[0].tolist() == [1] * 3


def test_mistakes_in_the_call_are_those_of_start_copy():
    for options in (
        {"device": "nonsense"},
        {"device": "cpu", "min_packed_alignment_bytes": 0},
        {"device": "cpu", "max_packed_chunk_bytes": 1.5},
    ):
        with pytest.raises(Exception, match=r".") as expected:
            tdcopier.start_copy([torch.ones(1)], **options)
        with pytest.raises(expected.type) as caught:
            tdcopier.prepare([torch.ones(1)], **options)
        assert str(caught.value) == str(expected.value)


@pytest.mark.parametrize("reuse_outputs", [False, True])
def test_many_threads_share_a_plan(device, reuse_outputs):
    plan = tdcopier.prepare(example(), device, reuse_outputs=reuse_outputs)

    def work(thread: int) -> None:
        kept = []
        for i in range(6):
            batch = example(100 * thread + i)
            if i % 4 == 3:
                batch["large"] = torch.ones(thread + 1)
            kept.append((plan.start_copy(batch), batch))
            if i % 3 == 2:
                for handle, source in kept:
                    assert_same(handle.get(), oracle(source, device))
                kept.clear()

    with switch_interval(1e-5):
        at_once(32, work)
    assert plan.fits == 32 * 5
    assert plan.misfits == 32


def test_a_checked_copy_names_a_source_that_is_modified_too_early(
    device, stall, copy_stream, monkeypatch
):
    monkeypatch.setattr("tdcopier._checking.enabled", True)
    batch = {"a": torch.ones(3)}
    plan = tdcopier.prepare(batch, device)
    with stall(copy_stream):
        handle = plan.start_copy(batch)
        batch["a"].add_(1)
    with pytest.raises(tdcopier.SourceModifiedError, match=r"^data\['a'\] was modified"):
        handle.get()


# ---- foreign code in the walk --------------------------------------------------------------------


def test_what_a_containers_code_raises_is_raised_once_and_nothing_is_counted(device, registry):
    calls = []

    class Fussy:
        def __init__(self, leaf: torch.Tensor) -> None:
            self.leaf = leaf

    def flatten(value: Fussy) -> tuple[list[torch.Tensor], None]:
        calls.append(value)
        if len(value.leaf) == 3:
            raise LookupError("three")
        return [value.leaf], None

    tdcopier.containers.register(Fussy, flatten, lambda children, _: Fussy(*children))
    plan = tdcopier.prepare([torch.ones(1), Fussy(torch.ones(2))], device)
    calls.clear()
    with pytest.raises(LookupError, match="three"):
        plan.start_copy([torch.ones(1), Fussy(torch.ones(3))])
    assert len(calls) == 1
    assert (plan.fits, plan.misfits) == (0, 0)
    assert plan.start_copy([torch.ones(1), Fussy(torch.ones(2))]).get()[1].leaf.tolist() == [1, 1]
    assert len(calls) == 2
    plan.start_copy([torch.ones(9), Fussy(torch.ones(4))]).get()
    assert len(calls) == 3  # a misfit is not walked again
    assert (plan.fits, plan.misfits) == (1, 1)


@pytest.mark.parametrize("change", ["drop", "replace", "shrink"])
def test_a_batch_that_changes_while_it_is_walked_is_copied_as_start_copy_would(
    device, registry, change
):
    class Meddler(Box):
        def meddle(self) -> None:
            if change == "drop":
                self.others["a"] = None
            elif change == "replace":
                self.others["b"] = torch.zeros(5)
            else:
                self.others["a"].resize_(1)

    def batch() -> dict[str, Any]:
        others = {"a": torch.ones(3), "b": torch.ones(4)}
        meddler = Meddler(torch.ones(2))
        meddler.others = others
        return {"others": others, "meddler": meddler}

    def flatten(box: Meddler) -> tuple[tuple[Any, ...], str]:
        box.meddle()
        return flatten_box(box)

    tdcopier.containers.register(Meddler, flatten, unflatten_box)
    plan = tdcopier.prepare([torch.ones(3), torch.ones(4), torch.ones(2)], device)
    got = plan.start_copy(batch()).get()["others"]
    expected = tdcopier.start_copy(batch(), device).get()["others"]
    assert_same(got, expected)
