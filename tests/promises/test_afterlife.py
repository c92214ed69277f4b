"""Afterlife, for every call: its results are used later as those of `.to()`.

`tests/tensordict/test_random_later_uses.py` plays random programs of later uses.
"""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import cloudpickle
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from calls import each_call
from catalogue import DTYPES
from each_case import together
from support import same_bytes
from tensordict import TensorDict
from work_of_calls import ROWS, Leaves, Work

SIZE_SLACK_BYTES = 1024

# Torch makes the results of delegated leaves itself.
each_result = each_call(lambda call: call.makes_memory and not call.delegated)
each_host_result = each_call(lambda call: call.makes_host_memory and not call.delegated)


def mixed() -> Leaves:
    """Returns leaves of four dtypes, with odd numbers of bytes, and one in another order."""
    torch.manual_seed(0)
    rows = len(ROWS)
    return [
        torch.rand(rows, 3),
        torch.arange(rows) % 2 == 0,
        torch.rand(rows, 5),
        torch.randint(255, (rows, 3, 3, 7), dtype=torch.uint8).permute(0, 3, 1, 2),
        torch.empty(rows, 0),
        torch.arange(rows),
        torch.ones(rows, dtype=torch.bool),
        torch.rand(rows, 4),
    ]


def result_of(work: Work) -> Leaves:
    """Returns the leaves of a result in which a plan that keeps results has used one again."""
    for _ in range(3):
        result = work.arrived(work.start().get())
    return result


def clones(result: Leaves) -> Leaves:
    """The result of `.to()` has memory of its own for each leaf."""
    return [leaf.clone() for leaf in result]


def assert_same(ours: Leaves, theirs: Leaves) -> None:
    for mine, leaf in zip(ours, theirs, strict=True):
        assert type(mine) is torch.Tensor
        assert (mine.dtype, mine.shape, mine.stride()) == (leaf.dtype, leaf.shape, leaf.stride())
        assert mine.device == leaf.device
        assert same_bytes(mine, leaf)


# ---- saved and loaded ----------------------------------------------------------------------------


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def loaded(data: bytes) -> Any:
    return torch.load(io.BytesIO(data))


def _through_a_module(result: Leaves) -> Leaves:
    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for number, leaf in enumerate(result):
                self.register_buffer(f"{number}", torch.empty_like(leaf))

    module = Holder()
    module.load_state_dict({f"{number}": leaf for number, leaf in enumerate(result)}, assign=True)
    return [*loaded(saved(module.state_dict())).values()]


ROUND_TRIPS: dict[str, Callable[[Leaves], Leaves]] = {
    "torch.save": lambda result: loaded(saved(result)),
    "pickle": lambda result: pickle.loads(pickle.dumps(result)),
    "cloudpickle": lambda result: pickle.loads(cloudpickle.dumps(result)),
    "deepcopy": copy.deepcopy,
    "load_state_dict": _through_a_module,
}


@together("use", ROUND_TRIPS)
@each_result
def test_the_whole_and_each_leaf_alone_come_back_the_same(make, use):
    result = result_of(make(leaves=mixed()))
    for part in (result, *([leaf] for leaf in result)):
        assert_same(ROUND_TRIPS[use](part), part)


@each_host_result
def test_safetensors_and_distributed_checkpoints_keep_the_values(make, tmp_path):
    result = result_of(make(leaves=mixed()))
    named = {f"{number}": leaf.contiguous() for number, leaf in enumerate(result)}
    back = safetensors.torch.load(safetensors.torch.save(named))
    assert_same([back[name] for name in named], [*named.values()])
    read = {f"{number}": torch.empty_like(leaf) for number, leaf in enumerate(result)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        dcp.save(dict(zip(read, result, strict=True)), checkpoint_id=tmp_path)
        dcp.load(read, checkpoint_id=tmp_path)
    assert_same([*read.values()], result)


@together("dump", [saved, pickle.dumps, cloudpickle.dumps])
@each_host_result
def test_it_takes_as_much_room_as_the_result_of_to(make, dump):
    for work in (make(leaves=mixed()), make(1, [50] * 100)):
        result = result_of(work)
        slack_bytes = SIZE_SLACK_BYTES + 16 * len(result)  # a pickle has addresses, as text
        assert len(dump(result)) <= len(dump(clones(result))) + slack_bytes
        for leaf in result[:10]:
            assert len(dump(leaf)) <= len(dump(leaf.clone())) + SIZE_SLACK_BYTES


def _is_saved_by_torch(dtype: torch.dtype) -> bool:
    try:
        saved(torch.empty(0, dtype=dtype))
    except KeyError:  # "dtype torch.int1 is not recognized"
        return False
    return True


@each_result
def test_leaves_of_any_dtypes_are_saved_together_and_alone(make):
    """All at once, and of any two sizes of elements, which could share the end of a chunk."""
    dtypes = [dtype for dtype in DTYPES.values() if _is_saved_by_torch(dtype)]
    assert len(dtypes) > 20
    of_each_size = {dtype.itemsize: dtype for dtype in dtypes}.values()
    for some in (dtypes, *itertools.product(of_each_size, repeat=2)):
        leaves = [
            torch.ones(len(ROWS), elements * dtype.itemsize, dtype=torch.uint8).view(dtype)
            for dtype, elements in zip(some, itertools.cycle([5, 2]))
        ]
        work = make(leaves=leaves)
        result = work.arrived(work.start().get())
        for part in (result, *([leaf] for leaf in result)):
            assert_same(loaded(saved(part)), part)


# ---- written, grown and shared -------------------------------------------------------------------


@each_result
def test_changes_in_place_stay_in_one_leaf(make):
    result = result_of(make(leaves=mixed()))
    expected, versions = clones(result), [leaf._version for leaf in result[3:]]
    result[0].unsqueeze_(-1).squeeze_(-1).t_().mul_(2)
    result[1].logical_not_()
    result[2].add_(1)
    expected[0] = expected[0].t().mul(2)
    expected[1] = ~expected[1]
    expected[2] += 1
    assert_same(result, expected)
    assert [leaf._version for leaf in result[3:]] == versions


@each_result
def test_the_next_results_versions_are_their_own(make):
    work = make(leaves=mixed())
    result = work.arrived(work.start().get())
    for leaf in result:
        leaf.fill_(1)
    views = [leaf.detach() for leaf in result[3:]]
    versions = [view._version for view in views]
    factors = [torch.ones_like(leaf, requires_grad=True) for leaf in (result[0], result[2])]
    # `mul` keeps the leaf; `exp_` keeps the version of its own result, which is the leaf, alone.
    sums = [(result[0] * factors[0]).sum(), result[2].mul_(factors[1]).exp_().sum()]
    del result, leaf
    after = work.arrived(work.start().get())
    for leaf in after:
        leaf.fill_(2)
    assert [view._version for view in views] == versions
    for each in sums:
        each.backward()  # an error, if a version of what it keeps had changed
    assert (factors[0].grad == 1).all()
    torch.testing.assert_close(factors[1].grad.cpu(), torch.ones(factors[1].shape).exp())
    before = [leaf._version for leaf in after]
    for view in views:
        view.fill_(3)
    assert [leaf._version for leaf in after] == before


@together("elements", [[3], [5, 1 << 17], [2, 7], [4, 0, 9]])
@each_host_result
def test_a_storage_has_the_bytes_of_its_leaf(make, elements):
    for leaf in result_of(make(1, elements)):
        assert leaf.untyped_storage().nbytes() - leaf.nbytes in range(16)
        assert leaf.storage_offset() == 0


GROWN: dict[str, Callable[[torch.Tensor], Any]] = {
    "resize_": lambda leaf: leaf.resize_(4 * leaf.numel() + 64).fill_(1),
    "out=": lambda leaf: torch.ones(
        4 * leaf.numel() + 64, dtype=leaf.dtype, device=leaf.device, out=leaf.resize_(0)
    ),
    "untyped_storage().resize_": lambda leaf: leaf.untyped_storage().resize_(0),
    "set_": lambda leaf: leaf.set_(),
}


@together("how", GROWN)
@each_result
def test_a_leaf_changes_size_without_its_neighbours(make, how):
    """On a device, where leaves share the memory of a chunk, one without elements."""
    work = make(leaves=mixed())
    result = result_of(work)
    for number, leaf in enumerate(result):
        others = result[:number] + result[number + 1 :]
        before = clones(others)
        if leaf.numel() == 0 or not work.call.is_to_device:
            GROWN[how](leaf)
        assert_same(others, before)
        result[number] = torch.zeros(1)  # it is compared no more, and may have no memory


@each_host_result
def test_a_leaf_that_grows_keeps_its_values(make):
    result = result_of(make(leaves=mixed()))
    for leaf in (result[number] for number in (0, 1, 2, 5)):
        before = leaf.clone()
        leaf.resize_(10 * len(before), *leaf.shape[1:])
        assert torch.equal(leaf[: len(before)], before)


@each_host_result
def test_memory_that_is_shared_with_other_processes_is_the_leaf_alone(make):
    result = result_of(make(leaves=mixed()))
    before = clones(result)
    result[2].share_memory_()
    assert [leaf.is_shared() for leaf in result] == [number == 2 for number in range(len(result))]
    assert_same(result, before)


def _sums(queue: Any, back: Any) -> None:
    back.put([leaf.sum().item() for leaf in queue.get()])


@each_host_result
def test_a_queue_takes_it_to_another_process(make):
    result = result_of(make(leaves=mixed()))
    processes = torch.multiprocessing.get_context("fork")
    queue, back = processes.SimpleQueue(), processes.SimpleQueue()
    queue.put(result)
    child = processes.Process(target=_sums, args=(queue, back))
    child.start()
    assert back.get() == [leaf.sum().item() for leaf in result]
    child.join()


@together("number", [0, 1, 6])
@each_host_result
def test_a_lazy_clone_keeps_its_values_when_all_else_is_dropped(make, number):
    result = result_of(make(leaves=mixed()))
    kept = result[number].clone()
    with suppress(RuntimeError):  # torch makes lazy clones of its own allocators' memory only
        kept = torch._lazy_clone(result[number])
    values = kept.tolist()
    del result
    overwriting = [torch.full((1000,), 7.0) for _ in range(50)]
    assert kept.tolist() == values
    del overwriting


@pytest.mark.sim
@each_host_result
def test_a_transfer_from_one_leaf_keeps_the_memory_of_all(sim, device, make):
    """The block of pinned memory is found by any leaf that a transfer reads, not by the first."""
    result = result_of(make(leaves=mixed()))
    if not result[-1].is_pinned():
        pytest.skip("this call gives pageable memory")
    expected = result[-1].clone()
    stream = torch.Stream(device)
    with sim.poison(), sim.hold(stream), torch.get_device_module(device).stream(stream):
        moved = result[-1].to(device, non_blocking=True)
        del result
        torch.empty(1 << 10, pin_memory=True).fill_(7)
    stream.synchronize()
    assert torch.equal(moved.cpu(), expected)


# ---- memory that was given -----------------------------------------------------------------------


@each_call(lambda call: call.fills, "itself")
def test_what_is_filled_is_the_memory_that_was_given_and_only_its_versions_move(make):
    work = make(3, [99, 30])
    view = work.written[0][:1]
    weight = torch.ones_like(work.written[1], requires_grad=True)
    loss = (weight * work.written[1]).sum()
    both = (*work.written, view, *work.sources)
    before = [leaf._version for leaf in both]
    addresses = [leaf.data_ptr() for leaf in work.written]
    result = work.start().get()
    given = [*result.values()] if isinstance(result, TensorDict) else result
    assert all(leaf is its for leaf, its in zip(given, work.written, strict=True))
    assert [leaf.data_ptr() for leaf in work.written] == addresses
    moved = [leaf._version - version for leaf, version in zip(both, before, strict=True)]
    assert moved == [1, 1, 1, 0, 0]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- the next result -----------------------------------------------------------------------------


class Subclass(torch.Tensor):
    pass


def _done(change: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], None]:
    """Wraps a change so that its return value is dropped."""

    def touch(leaf: torch.Tensor) -> None:
        change(leaf)

    return touch


def _set(name: str, value: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], None]:
    return _done(lambda leaf: setattr(leaf, name, value(leaf)))


TOUCHED: dict[str, Callable[[torch.Tensor], Any]] = {
    "a reference": lambda leaf: leaf,
    "a weak reference": weakref.ref,
    "a weak reference of torch's own": torch._C._WeakTensorRef,
    "an attribute": _set("note", lambda _: "mine"),
    "its attributes": vars,
    "a gradient": _done(lambda leaf: leaf.requires_grad_()),
    "a gradient, no more": _done(lambda leaf: leaf.requires_grad_().requires_grad_(False)),
    "a gradient that was given": _set("grad", torch.zeros_like),
    "another shape": _done(lambda leaf: leaf.resize_(2)),
    "another shape, with a class": _done(lambda leaf: leaf.unsqueeze_(0)),
    "another shape, the same strides": _done(lambda leaf: leaf.as_strided_((2, 2), (2, 1))),
    "the same shape, other strides": _done(lambda leaf: leaf.as_strided_((3, 2), (1, 3))),
    "other strides": _done(lambda leaf: leaf.t_()),
    "other data": _set("data", lambda leaf: torch.zeros(3, 2, device=leaf.device)),
    "another dtype": _set("data", lambda leaf: torch.zeros(3, 2, device=leaf.device).int()),
    "another class": _set("__class__", lambda _: Subclass),
    "a swap": _done(lambda leaf: torch.utils.swap_tensors(leaf, torch.zeros(7))),
    "a value": _done(lambda leaf: leaf.add_(1)),
    "a view": lambda leaf: leaf.view(-1),
    "a detached one": lambda leaf: leaf.detach(),
    "its data": lambda leaf: leaf.data,
    "its storage": lambda leaf: leaf.untyped_storage(),
    "the storage's size": _done(lambda leaf: leaf.untyped_storage().resize_(0)),
}


def pair(value: float) -> Leaves:
    return [torch.full((3,), value + 1.0), torch.full((3, 2), float(value))]


@pytest.mark.filterwarnings("ignore:.*resize:UserWarning")
@together("touch", TOUCHED)
@each_result
def test_whatever_was_done_to_a_leaf_the_next_result_is_as_new(make, touch):
    work, others = make(leaves=pair(1)), make(leaves=pair(5))
    got = result_of(work)
    version = got[1]._version
    held = TOUCHED[touch](got[1])  # the first leaf decides whether a result is in use
    kept = (held.clone(), held._version) if isinstance(held, torch.Tensor) else None
    del got
    after = others.arrived(others.start().get())
    assert_same([leaf.cpu() for leaf in after], pair(5))
    if isinstance(held, dict):
        held["note"] = "of another owner"
    for leaf in after:
        assert not vars(leaf)
        assert leaf.grad is None
        assert leaf.grad_fn is None
        assert leaf._version == version
        assert not leaf._is_view()
    after[1].add_(1)
    if isinstance(held, weakref.ref):
        assert held() is None
    if isinstance(held, torch._C._WeakTensorRef):
        assert held.expired()
    if kept:  # with its values, and a version of its own
        assert torch.equal(held, kept[0])
        assert held._version == kept[1]
        held.sub_(3)
        assert after[1]._version == version + 1
    assert torch.equal(after[1].cpu(), pair(6)[1])
