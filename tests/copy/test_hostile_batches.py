"""Mistaken and malicious batches: no crash, no endless call, no wrong tensor."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from catalogue import ramp
from container_classes import Box, flatten_box, unflatten_box
from sim_support import becomes
from support import raises_exactly, run_python

import tdcopier
from tdcopier import _C
from tdcopier._containers import registry

REPEATED = {
    "more bytes than 64 bits count": lambda: torch.zeros(1, dtype=torch.float64).expand(2**61),
    "a little more than that": lambda: torch.zeros(1, dtype=torch.float64).expand(2**61 + 1),
    "more bytes than any memory has": lambda: torch.zeros(1).expand(10**13),
}


@pytest.mark.parametrize("kind", REPEATED)
def test_what_repeats_its_elements_beyond_all_memory_fails_as_through_to(device, kind):
    leaf = REPEATED[kind]()
    with pytest.raises(RuntimeError) as expected:
        leaf.to(device)
    handle = tdcopier.start_copy([leaf], device)
    assert handle.stats.chunks == 0  # not even planned
    with pytest.raises(type(expected.value)):
        handle.get()


def test_an_array_that_repeats_its_elements_beyond_all_memory_fails(device):
    handle = tdcopier.start_copy([np.broadcast_to(np.int8(1), (2**62,))], device)
    with pytest.raises(RuntimeError):
        handle.get()


@pytest.mark.usefixtures("registry")
def test_a_flatten_function_may_change_the_class_of_its_value(device):
    class Other:
        pass

    class Changing:
        pass

    def flatten(value: Any) -> Any:
        value.__class__ = Other
        return [ramp("cpu", 3)], "context"

    tdcopier.containers.register(Changing, flatten, lambda children, context: (context, *children))
    context, moved = tdcopier.copy([Changing()], device)[0]
    assert context == "context"
    assert moved.tolist() == [0, 1, 2]


@pytest.mark.usefixtures("registry")
def test_a_flatten_function_may_resize_an_array_that_was_met_before(device):
    array = np.arange(1 << 20, dtype=np.float32)

    def flatten(box: Any) -> Any:
        array.resize(2, refcheck=False)
        return [], None

    tdcopier.containers.register(Box, flatten, lambda children, context: Box())
    assert tdcopier.copy([array, Box()], device)[0].tolist() == [0, 1]


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    "children", [torch.ones(2, 3), np.ones(2), {"a": 1}, OrderedDict(a=1), "text", b"text"]
)
def test_one_child_in_place_of_children_is_refused(device, children):
    tdcopier.containers.register(Box, lambda box: (children, None), unflatten_box)
    with raises_exactly(
        TypeError,
        "data[0] is a Box, whose flatten function must return a pair (children, context); it "
        f"returned {(children, None)!r}",
    ):
        tdcopier.start_copy([Box()], device)


def test_a_class_without_a_hash_is_opaque(device):
    class Meta(type):
        __hash__ = None

    class Unhashable(metaclass=Meta):
        pass

    value = Unhashable()
    assert tdcopier.copy([value], device)[0] is value


def test_asking_about_a_class_makes_no_value_of_it(device):
    made = []

    class Loud(tuple):
        def __del__(self):
            made.append(self)

    value = Loud((1, 2))
    moved = tdcopier.copy([value], device)[0]
    assert moved == value
    assert made == []


class FailingKey:
    """A key that fails when it is looked at for the second time: by the dict of the result."""

    def __init__(self, fails: bool) -> None:
        self.looks_until_failure = 1 if fails else -1

    def __hash__(self) -> int:
        if self.looks_until_failure == 0:
            raise LookupError("no hash")
        self.looks_until_failure -= 1
        return id(self)


@pytest.mark.parametrize("place", [0, 700, 2999])
def test_a_key_that_fails_leaves_no_tensor_of_its_dict_alive(device, place):
    keys = [FailingKey(i == place) for i in range(3000)]
    tree: dict[Any, Any] = dict.fromkeys(keys, torch.ones(2))
    tree[keys[1]] = {i: torch.ones(2) for i in range(1500)}
    before = tensors_alive()
    handle = tdcopier.start_copy(tree, device)
    with pytest.raises(LookupError, match="no hash"):
        handle.get()
    del handle
    assert tensors_alive() == before


def tensors_alive() -> int:
    gc.collect()  # earlier tests leave cycles
    return sum(type(value) is torch.Tensor for value in gc.get_objects())


@pytest.mark.usefixtures("registry")
def test_classes_are_looked_up_while_others_are_registered(device):
    stop = threading.Event()
    failures = []

    def register() -> None:
        while not stop.is_set():
            with registry._lock:
                registry._found.clear()

    thread = threading.Thread(target=register)
    thread.start()
    try:
        for _ in range(3000):
            tdcopier.copy([OrderedDict(a=1), Box()], device)
    except KeyError as error:
        failures.append(error)
    finally:
        stop.set()
        thread.join()
    assert failures == []


@pytest.mark.sim
def test_while_a_copy_is_at_work_it_is_not_ready_whatever_leaf_has_failed(sim, device, copy_stream):
    with sim.hold(copy_stream):
        handle = tdcopier.start_copy([ramp("cpu", 3), torch.empty(2, device="meta")], device)
        with pytest.raises(NotImplementedError):
            handle.get()
        assert not handle.ready()
    assert becomes(handle.ready)


@pytest.mark.sim
def test_a_packed_sequence_is_ordered_like_any_leaf(sim, device, accelerator, other_device):
    sequence = torch.nn.utils.rnn.pack_sequence([torch.full((3, 4), 5.0)]).to(other_device)
    starter, consumer = (accelerator.Stream(device=device) for _ in range(2))
    with sim.hold(starter):
        with accelerator.stream(starter):
            handle = tdcopier.start_copy([sequence], device)
        assert not handle.ready()
        with accelerator.stream(consumer):
            (moved,) = handle.wait()
            late = torch.empty(3, 4, device=device)
            late.copy_(moved.data, non_blocking=True)
        assert not consumer.query()
    consumer.synchronize()
    assert late.tolist() == [[5.0] * 4] * 3
    assert moved.batch_sizes.device.type == "cpu"


@pytest.mark.sim
def test_wait_staged_waits_for_the_reads_of_a_packed_sequence(
    sim, device, accelerator, other_device
):
    sequence = torch.nn.utils.rnn.pack_sequence([torch.full((3, 4), 5.0)]).to(other_device)
    starter, writer = (accelerator.Stream(device=other_device) for _ in range(2))
    with sim.hold(starter):
        with accelerator.stream(starter):
            handle = tdcopier.start_copy([sequence], device)
        with accelerator.stream(writer):
            handle.wait_staged()
        assert not writer.query()
    assert handle.get()[0].data.tolist() == [[5.0] * 4] * 3


@pytest.mark.sim
@pytest.mark.usefixtures("registry")
def test_a_result_that_one_thread_has_stands_though_another_ones_build_failed(
    sim, device, copy_stream
):
    inside, go_on = threading.Event(), threading.Event()
    calls = []

    def unflatten(children: list[Any], context: Any) -> Any:
        calls.append(threading.get_ident())
        if len(calls) == 1:
            inside.set()
            go_on.wait(30)
            raise KeyError("late")
        return Box(*children)

    tdcopier.containers.register(Box, flatten_box, unflatten)
    tdcopier.limits.set_staging_bytes(_C.STAGING_BUFFER_BYTES)
    with sim.hold(copy_stream):  # one of four buffers: not built in the call
        handle = tdcopier.start_copy([Box(torch.ones(1 << 22))], device)
    results = []
    thread = threading.Thread(target=lambda: results.append(handle.get()))
    thread.start()
    assert inside.wait(30)
    result = handle.get()
    go_on.set()
    thread.join()
    assert results == [result]
    assert handle.get() is result


def test_the_traceback_of_a_failure_does_not_grow(device):
    handle = tdcopier.start_copy([torch.empty(2, device="meta")], device)

    def length() -> int:
        with pytest.raises(NotImplementedError) as caught:
            handle.get()
        traceback, frames = caught.value.__traceback__, 0
        while traceback is not None:
            traceback, frames = traceback.tb_next, frames + 1
        return frames

    assert len({length() for _ in range(3)}) == 1


def test_a_cycle_through_a_delegated_leaf_is_collected(device):
    source = ramp("cpu", 3).requires_grad_()
    handle = tdcopier.start_copy([source], device)
    (moved,) = handle.get()
    moved.handle = handle
    alive = weakref.ref(moved)
    del moved, handle
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("kind", ["global", "cycle", "failed"])
def test_a_checked_handle_that_nobody_asked_does_not_disturb_the_end_of_the_process(kind):
    program = """
        import sys, torch, tdcopier
        handle = tdcopier.start_copy({"x": torch.ones(4)}, "meta")
        if sys.argv[1:] == [] and KIND == "cycle":
            holder = []
            holder.append((holder, handle))
            del holder, handle
        elif KIND == "failed":
            handle = tdcopier.start_copy([torch.ones(2), torch.empty(2, device="meta")], "cpu")
        print("end")
    """.replace("KIND", repr(kind))
    assert run_python(program, TDCOPIER_CHECK="1") == "end\n"


def test_memory_of_a_lazy_stack_is_found_in_its_members():
    tensordict = pytest.importorskip("tensordict")

    from tdcopier._containers.delegated_parts import plain_parts

    members = [tensordict.TensorDict(a=torch.full((3,), float(i))) for i in range(2)]
    parts = plain_parts(tensordict.LazyStackedTensorDict(*members))
    assert [part.data_ptr() for part in parts] == [m["a"].data_ptr() for m in members]


def test_the_handle_of_a_copy_is_not_a_leaf(device):
    handle = tdcopier.start_copy([1], device)
    with pytest.raises(TypeError, match=r"^data\[0\] is the handle of a copy"):
        tdcopier.copy([handle], device)
    assert isinstance(handle, _C.AsyncCopyHandle)
