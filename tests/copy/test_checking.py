"""With `TDCOPIER_CHECK=1`, a source that is modified too early is found and named."""

from __future__ import annotations

import gc
import re

import numpy as np
import pytest
import torch
from support import assert_same, oracle, run_python

import tdcopier
from tdcopier._checking import CheckedHandle, SourceCheck


@pytest.fixture
def checking(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr("tdcopier._checking.enabled", True)


def sentence(path: str) -> str:
    """Returns the whole message, except for the line of the call."""
    return (
        rf"^{re.escape(path)} was modified before its copy was done\. The copy was started at "
        rf"{re.escape(__file__)}:\d+ in test_\w+\. Before writing to a source, call "
        r"wait_staged\(\) or get\(\) on its handle\.$"
    )


SOURCES = {
    "tensor": lambda: torch.arange(6.0),
    "array": lambda: np.arange(6.0),
    "strided tensor": lambda: torch.arange(12.0)[::2],
    "reversed array": lambda: np.arange(6.0)[::-1],
    "0-dim": lambda: torch.tensor(3.0),
    "one element with an odd stride": lambda: torch.arange(9.0)[2::7][:1],
    "bfloat16": lambda: torch.arange(6).to(torch.bfloat16),
    "inference tensor": lambda: _inference_tensor(),
    "large": lambda: torch.zeros(1 << 20),
}


def _inference_tensor() -> torch.Tensor:
    with torch.inference_mode():
        return torch.arange(6.0)


def increment(leaf: torch.Tensor | np.ndarray) -> None:
    with torch.inference_mode(isinstance(leaf, torch.Tensor) and leaf.is_inference()):
        leaf += 1


@pytest.mark.parametrize("hand_over", ["get", "wait", "wait_staged"])
@pytest.mark.parametrize("kind", SOURCES)
def test_a_host_source_modified_before_the_hand_over_is_named_every_time(
    checking, device, kind, hand_over
):
    leaf = SOURCES[kind]()
    handle = tdcopier.start_copy({"ok": torch.ones(3), "bad": [0, leaf]}, device)
    increment(leaf)
    for _ in range(2):
        with pytest.raises(tdcopier.SourceModifiedError, match=sentence("data['bad'][1]")):
            getattr(handle, hand_over)()
    handle.ready()


@pytest.mark.parametrize("hand_over", ["get", "wait", "wait_staged"])
@pytest.mark.parametrize("kind", SOURCES)
def test_a_host_source_may_be_modified_after_the_hand_over(checking, device, kind, hand_over):
    leaf = SOURCES[kind]()
    expected = oracle([leaf], device)
    handle = tdcopier.start_copy([leaf], device)
    getattr(handle, hand_over)()
    increment(leaf)
    assert_same(handle.get(), expected)


def test_a_source_may_be_modified_once_the_handle_is_ready(checking, device):
    leaf = torch.ones(4)
    handle = tdcopier.start_copy([leaf], device)
    while not handle.ready():
        pass
    leaf += 1
    assert handle.get()[0].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("hand_over", ["get", "wait", "wait_staged"])
def test_a_device_source_modified_before_the_hand_over_is_named(checking, device, hand_over):
    leaf = torch.ones(4, device=device)
    handle = tdcopier.start_copy([leaf], "cpu")
    leaf.add_(1)
    with pytest.raises(tdcopier.SourceModifiedError, match=sentence("data[0]")):
        getattr(handle, hand_over)()


def test_a_device_source_may_be_modified_after_wait_staged(checking, device):
    leaf = torch.ones(4, device=device)
    handle = tdcopier.start_copy([leaf], "cpu")
    handle.wait_staged()
    leaf.add_(1)
    assert handle.get()[0].tolist() == [1, 1, 1, 1]


def test_between_devices_a_source_is_watched_beyond_wait_until_the_copy_is_done(
    checking, device, accelerator
):
    if accelerator.device_count() < 2:
        pytest.skip("needs two devices")
    leaf = torch.ones(4, device=device)
    handle = tdcopier.start_copy([leaf], device[:-1] + "1")
    handle.wait()
    leaf.add_(1)
    with pytest.raises(tdcopier.SourceModifiedError, match=sentence("data[0]")):
        handle.get()


def test_a_write_to_a_neighbour_in_the_same_storage_is_no_modification(checking, device):
    """The two views share one version counter."""
    for buffer, target in ((torch.zeros(8), device), (torch.zeros(8, device=device), "cpu")):
        handle = tdcopier.start_copy([buffer[:4]], target)
        buffer[4:] += 1
        assert handle.get()[0].tolist() == [0, 0, 0, 0]


def test_leaves_on_the_target_and_opaque_values_are_not_watched(checking, device):
    there = torch.ones(4, device=device)
    texts = ["a"]
    handle = tdcopier.start_copy({"there": there, "texts": texts}, device)
    there.add_(1)
    texts.append("b")
    assert handle.get()["there"] is there


def test_a_dropped_handle_reports_what_nobody_heard_of(checking, device, monkeypatch):
    seen = []
    monkeypatch.setattr("sys.unraisablehook", lambda report: seen.append(report.exc_value))
    leaf = torch.ones(4)
    handle = tdcopier.start_copy([leaf], device)
    leaf += 1
    del handle
    gc.collect()
    assert [type(error) for error in seen] == [tdcopier.SourceModifiedError]


def test_a_dropped_handle_does_not_repeat_what_was_raised(checking, device, monkeypatch):
    seen = []
    monkeypatch.setattr("sys.unraisablehook", lambda report: seen.append(report.exc_value))
    leaf = torch.ones(4)
    handle = tdcopier.start_copy([leaf], device)
    leaf += 1
    with pytest.raises(tdcopier.SourceModifiedError):
        handle.get()
    del handle
    gc.collect()
    assert seen == []


def test_a_checked_handle_is_a_handle(checking, device):
    handle = tdcopier.start_copy([torch.ones(2)], device)
    assert isinstance(handle, tdcopier.AsyncCopyHandle)
    assert handle.stats.packed_leaves == 1
    assert tdcopier.copy([torch.ones(2)], device)[0].tolist() == [1, 1]


def test_a_failed_copy_raises_its_own_error(checking, device):
    class Broken(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is torch.Tensor.to:
                raise KeyError("cannot move")
            return super().__torch_function__(func, types, args, kwargs or {})

    handle = tdcopier.start_copy([torch.ones(2).as_subclass(Broken)], device)
    with pytest.raises(KeyError, match="cannot move"):
        handle.get()


def test_inside_a_transform_nothing_is_watched_and_all_works(checking, device):
    def body(x):
        return tdcopier.copy([x], device)[0] + 1

    assert torch.vmap(body)(torch.zeros(2, 3)).tolist() == [[1, 1, 1], [1, 1, 1]]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch._efficientzerotensor((3,)),
        lambda: torch.zeros(1).expand(10**13),
        lambda: np.broadcast_to(np.float32(1), (10**13,)),
    ],
    ids=["nested", "sparse", "zero tensor", "tensor beyond all memory", "array beyond all memory"],
)
def test_a_leaf_of_which_no_checksum_can_be_taken_is_not_watched(checking, device, make):
    check = SourceCheck.of_copy({"a": make(), "b": (watched := torch.ones(2))}, device)
    check.look()
    check.raise_failure()
    check = SourceCheck.of_copy({"a": make(), "b": watched}, device)
    watched += 1
    check.look()
    with pytest.raises(tdcopier.SourceModifiedError, match=r"^data\['b'\] was modified"):
        check.raise_failure()


def test_what_is_left_to_its_own_to_as_a_whole_is_not_watched_and_arrives(checking, device):
    tensordict = pytest.importorskip("tensordict")
    from torch.nn.utils import rnn

    class Camera(tensordict.TensorClass["shadow"]):
        device: torch.Tensor

        def __post_init__(self) -> None:
            pass

    weights = tensordict.TensorDictParams(tensordict.TensorDict({"w": torch.ones(2)}))
    source = {
        "a module within": tensordict.TensorDict({"weights": weights, "x": torch.ones(2)}),
        "a module": weights,
        "sequences": rnn.pack_sequence([torch.ones(3), torch.ones(2)]),
        "a field that shadows": Camera(device=torch.ones(2)),
        "watched": (watched := torch.ones(2)),
    }
    moved = tdcopier.copy(source, device)
    assert moved["a module within"]["weights", "w"].device == torch.device(device)
    assert moved["sequences"].data.device == torch.device(device)
    handle = tdcopier.start_copy(source, device)
    watched += 1
    with pytest.raises(tdcopier.SourceModifiedError, match=r"^data\['watched'\] was modified"):
        handle.get()


def test_a_checked_handle_has_all_that_a_handle_has():
    def public(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith(("__", "_pybind11"))}

    assert public(tdcopier.AsyncCopyHandle) <= public(CheckedHandle)


@pytest.mark.parametrize("threaded", [True, False])
@pytest.mark.usefixtures("checking")
def test_prefetched_batches_are_checked_too(device, threaded):
    batches = [{"x": torch.full((3,), i), "on": torch.ones(1, device=device)} for i in range(4)]
    got = tdcopier.prefetch(batches, device, threaded=threaded, depth=3)
    assert [batch["x"].tolist() for batch in got] == [[i] * 3 for i in range(4)]


PROGRAM = """
    import torch, tdcopier
    handle = tdcopier.start_copy([leaf := torch.ones(3)], "meta")
    leaf += 1
    try:
        handle.get()
    except tdcopier.SourceModifiedError:
        print("found")
    else:
        print("nothing found")
"""


@pytest.mark.parametrize(("value", "answer"), [("1", "found"), ("0", "nothing found")])
def test_the_environment_variable_turns_it_on(value, answer):
    assert run_python(PROGRAM, TDCOPIER_CHECK=value) == answer + "\n"


@pytest.mark.parametrize("variable", ["TDCOPIER_CHECK", "TDCOPIER_TIME_STEPS"])
def test_another_value_of_the_variable_is_refused(variable):
    program = """
        try:
            import tdcopier
        except ValueError as error:
            print(error)
    """
    assert run_python(program, **{variable: "yes"}) == f"{variable} must be 0 or 1; got 'yes'\n"
