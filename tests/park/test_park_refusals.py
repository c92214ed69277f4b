"""States that cannot be parked are refused with the path, and nothing has changed then."""

from __future__ import annotations

import re
import sys
import types
from typing import Any

import pytest
import torch
from park_support import LARGE, has_memory, is_resident, trained
from support import raises_exactly, run_python
from tensordict import TensorDict

import tdcopier


class OnlyItsOwnTo:
    def to(self, device: Any) -> OnlyItsOwnTo:
        return self


class Dispatched(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def fake(device: str) -> torch.Tensor:
    with torch._subclasses.FakeTensorMode():
        return torch.ones(3)


REFUSED = {
    "opaque root": (
        lambda device: object(),
        TypeError,
        r"^state is an object, a class .*: nothing is parked. Give modules",
    ),
    "number": (lambda device: 3, TypeError, r"^state is an int, in which no tensor"),
    "own .to": (
        lambda device: {"a": OnlyItsOwnTo()},
        TypeError,
        r"^state\['a'\] is an OnlyItsOwnTo, and only its own `.to` knows its tensors: .* Give",
    ),
    "subclass": (
        lambda device: [torch.ones(3, device=device).as_subclass(Dispatched)],
        TypeError,
        r"^state\[0\] is a Dispatched, and only its own `.to` knows its memory: give the plain",
    ),
    "fake": (lambda device: [fake(device)], TypeError, r"^state\[0\] is a FakeTensor, and only"),
    "sparse": (
        lambda device: {"s": torch.eye(3).to_sparse()},
        ValueError,
        r"^state\['s'\] is of layout torch.sparse_coo, and only strided tensors",
    ),
    "lazy": (
        lambda device: torch.nn.LazyLinear(3),
        ValueError,
        r"^state\.weight is not initialized: run the module on a batch",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_parked_is_refused_with_its_path(device, name):
    make, error, message = REFUSED[name]
    before = torch.ones(LARGE, device=device)
    bad = make(device)
    states = [bad] if message.startswith("^state is") else [bad, [before, bad]]
    for state in states:
        with pytest.raises(error, match=re.sub(r"^\^state", r"^state(\\[1\\])?", message)):
            tdcopier.park(state)
    assert before.eq(1).all()


# ---- nothing to park -----------------------------------------------------------------------------


class Trainer:
    """Hides tensors from tdcopier, which does not know the class."""

    def __init__(self, device: str) -> None:
        self.model = torch.nn.Linear(3, 3).to(device)


NOTHING_ON_DEVICES = {
    "module": (lambda: torch.nn.Linear(3, 3), "2 tensors are on cpu"),
    "tensor": (lambda: torch.ones(3), "the tensor in the state is on cpu"),
    "TensorDict": (lambda: TensorDict({"a": torch.ones(3), "b": torch.ones(3)}), "2 tensors"),
    "meta": (lambda: torch.nn.Linear(3, 3, device="meta"), "2 tensors are on meta"),
    "both": (
        lambda: [torch.ones(3, device="meta"), torch.ones(3)],
        "2 tensors are on cpu and meta",
    ),
}


@pytest.mark.parametrize("name", NOTHING_ON_DEVICES)
def test_a_state_on_the_host_is_refused_with_a_remedy(device, name):
    make, found = NOTHING_ON_DEVICES[name]
    state = make()
    message = f"^nothing to park: {found}.*, and none is on a device; move the model to the dev"
    with pytest.raises(ValueError, match=message):
        tdcopier.park(state)
    with pytest.raises(ValueError, match=message), tdcopier.parked(state):
        pass
    with tdcopier.parked(state, torch.ones(3, device=device)):  # nothing to say: some are
        pass


def test_a_state_without_any_tensor_is_parked_as_it_is(device):
    model = torch.nn.Linear(3, 3).to(device)
    adam = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for state in (adam, sgd, [], {"epoch": 3}, torch.nn.ReLU(), torch.empty(0, device=device)):
        with tdcopier.parked(state) as parked:
            assert parked.nbytes == 0
    with tdcopier.parked(model, adam) as parked:
        assert parked.nbytes == 48


@pytest.mark.parametrize("call", [tdcopier.park, tdcopier.snapshot])
@pytest.mark.parametrize(
    ("state_of", "path"),
    [
        (lambda trainer: trainer, "state"),
        (lambda trainer: {"epoch": 3, "trainer": trainer}, r"state\['trainer'\]"),
        (lambda trainer: [None, (trainer, 3)], r"state\[1\]\[0\]"),
    ],
)
def test_an_unknown_object_is_named_where_nothing_else_was_found(device, call, state_of, path):
    with pytest.raises(
        TypeError, match=rf"^{path} is a .*Trainer, a class .*\. Give {path}\.model\."
    ):
        call(state_of(Trainer(device)))


def test_an_unknown_object_beside_tensors_is_left(device):
    trainer = Trainer(device)
    with tdcopier.parked(trainer, torch.ones(3, device=device)):
        assert is_resident(trainer.model)
    with pytest.raises(ValueError, match=r"state\[0\] is a .*Trainer, .* Give state\[0\]\.model$"):
        tdcopier.park([trainer, torch.ones(3)])


@pytest.mark.parametrize("call", [tdcopier.park, tdcopier.snapshot])
@pytest.mark.parametrize(
    ("start", "remedy"),
    [
        (tdcopier.park, r"Parked, .*: give the state itself, after resume\(\)"),
        (tdcopier.snapshot, r"Snapshot, .*: give what its get\(\) returns"),
        (
            lambda state: tdcopier.start_copy(state, "cpu"),
            r".* a copy .*: give what its wait\(\) or get\(\) returns",
        ),
    ],
)
def test_a_handle_is_no_state(device, call, start, remedy):
    state = [torch.ones(LARGE, device=device)]
    handle = start(state)
    with pytest.raises(TypeError, match=rf"^state is (a|the) {remedy}"):
        call(handle)
    with pytest.raises(TypeError, match=rf"^state\['h'\] is (a|the) {remedy}"):
        call({"h": handle})
    if isinstance(handle, tdcopier.Parked):
        handle.resume()


def test_a_tensor_that_is_parked_already_is_refused_in_any_tree(device):
    model, optimizer = trained(device)
    rows = model.table[3:5]
    parked = tdcopier.park(model)
    for state, path in (
        (model, r"state\.large"),
        ({"x": [model.state_dict()]}, r"state\['x'\]\[0\]\['large'\]"),
        ((optimizer, rows), r"state\[1\]"),
    ):
        with pytest.raises(ValueError, match=rf"^{path} has no memory on \w+:0: it is parked"):
            tdcopier.park(state)
    assert is_resident(optimizer)
    parked.resume()
    assert is_resident(model, optimizer)


@pytest.mark.parametrize("limit", [1000, 10**6])
@pytest.mark.parametrize("call", [tdcopier.park, tdcopier.snapshot])
def test_a_container_that_contains_itself_is_refused(device, call, limit):
    state: list[Any] = [torch.ones(2, device=device)]
    state.append(state)
    before = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(limit)
        with raises_exactly(RecursionError, TOO_DEEP):
            call(state)
    finally:
        sys.setrecursionlimit(before)


def test_a_state_too_deep_to_be_copied_is_refused(device):
    state: list[Any] = [torch.ones(2, device=device)]
    for _ in range(sys.getrecursionlimit() - 100):
        state = [state]
    with raises_exactly(RecursionError, TOO_DEEP):
        tdcopier.snapshot(state)


TOO_DEEP = "the state is nested too deep: does it contain itself?"


@pytest.mark.parametrize("call", [tdcopier.park, tdcopier.snapshot])
def test_a_model_or_an_optimizer_without_tensors_yet_may_stand_beside_anything(device, call):
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(2, device=device))])
    args = types.SimpleNamespace(lr=1)
    assert call({"optimizer": optimizer, "args": args})
    assert call([optimizer, {1, 2}, torch.nn.ReLU()])


def test_several_states_are_parked_like_a_list(device):
    tensors = [torch.ones(LARGE, device=device) for _ in range(2)]
    parked = tdcopier.park(*tensors)
    assert not any(map(has_memory, tensors))
    parked.resume()
    with pytest.raises(TypeError, match=r"^park\(\) needs a state"):
        tdcopier.park()


def test_a_torch_mode_is_refused_and_a_device_context_is_not(device):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    tensor = torch.ones(LARGE, device=device)
    with (
        Mode(),
        pytest.raises(RuntimeError, match=r"mode or transform is active.*call park\(\) outside"),
    ):
        tdcopier.park([tensor])
    with torch.device("cpu"), tdcopier.parked(tensor):
        assert not has_memory(tensor)
    with torch.inference_mode(), tdcopier.parked(tensor):
        assert not has_memory(tensor)
    assert tensor.eq(1).all()
    assert not tensor.is_inference()


@pytest.mark.sim
def test_a_forked_child_cannot_resume_and_leaves_the_parents_tensors_alone():
    code = """
        import os, torch, warnings, tdcopier
        from tdcopier import sim
        warnings.simplefilter("ignore")  # that a process with threads forks
        sim.enable()
        tensor = torch.ones(100_000, device="sim")
        parked = tdcopier.park([tensor])
        parked.wait_parked()
        child = os.fork()
        if child == 0:
            try:
                parked.resume()
            except RuntimeError as error:
                assert "only the process that parked" in str(error)
            else:
                os._exit(1)
            del parked
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        parked.resume()
        assert tensor.eq(1).all()
        print("resumed")
    """
    assert run_python(code).strip() == "resumed"


@pytest.mark.sim
@pytest.mark.parametrize("call", ["wait_parked", "resume"])
def test_a_child_that_is_forked_while_another_thread_waits_does_not_hang(call):
    code = f"""
        import faulthandler, os, threading, time, torch, warnings, tdcopier
        from tdcopier import _C, sim
        warnings.simplefilter("ignore")  # that a process with threads forks
        sim.enable()
        tensor = torch.ones(100_000, device="sim")
        with sim.hold(_C.copy_stream("sim:0", "from_device")):
            parked = tdcopier.park([tensor])
            thread = threading.Thread(target=parked.{call})
            thread.start()
            time.sleep(0.2)  # it cannot be seen when the thread waits
            child = os.fork()
            if child == 0:
                faulthandler.dump_traceback_later(20, exit=True)
                try:
                    parked.resume()
                except RuntimeError as error:
                    assert "only the process that parked" in str(error)
                    os._exit(0)
                os._exit(1)
            assert os.waitpid(child, 0)[1] == 0
        thread.join()
        parked.resume()
        assert tensor.eq(1).all()
        print("resumed")
    """
    assert run_python(code).strip() == "resumed"


@pytest.mark.sim
def test_a_process_may_end_while_a_state_is_parked():
    code = """
        import torch, tdcopier
        from tdcopier import sim
        sim.enable()
        tensor = torch.ones(100_000, device="sim")
        parked = tdcopier.park([tensor])
        print("parked")
    """
    assert run_python(code).strip() == "parked"


@pytest.mark.parametrize("call", [tdcopier.park, tdcopier.snapshot])
@pytest.mark.parametrize(
    "make",
    [
        lambda model: model.parameters(),
        lambda model: set(model.parameters()),
        lambda model: model.state_dict().values(),
        lambda model: {"n": dict(model.state_dict()).items()}["n"],
        lambda model: {(1, each) for each in model.parameters()},
        lambda model: iter(list(model.parameters())),
    ],
    ids=["generator", "set", "dict_values", "dict_items", "set of tuples", "iterator"],
)
def test_tensors_that_would_be_left_without_a_word_are_refused(device, call, make):
    model, optimizer = trained(device)
    with pytest.raises(TypeError, match=r"^state\['m'\] is an? .*\. Give a list of it"):
        call({"m": make(model), "o": optimizer})
    assert is_resident(model, optimizer)


def test_sets_and_views_of_other_values_are_left(device):
    state = [{"a", "b"}, {"k": 1}.values(), enumerate([]), torch.full((3,), 2.0, device=device)]
    with tdcopier.parked(state):
        pass
    assert state[3].eq(2).all()


def test_a_block_without_a_state_is_refused():
    with pytest.raises(TypeError, match="needs a state"), tdcopier.parked():
        pass


def test_a_consolidated_tensordict_is_refused_with_a_remedy(device):
    state = TensorDict({"a": torch.ones(3, 3)}, [3]).to(device).consolidate()
    with pytest.raises(TypeError, match=r"^state\['t'\] is a TensorDict .*give its \.clone\(\)"):
        tdcopier.park({"t": state})
    with tdcopier.parked({"t": state.clone()}):
        pass
