"""`torch.compile`: copies outside a compiled function cost it nothing, inside they break the graph.

The backends here need no C++ compiler. The compiler itself is torch's own, so its counters tell
what it has done.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import pytest
import torch
from support import oracle, run_python

import tdcopier

# Torch 2.11 warns when it imports its compiler.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")

BACKENDS = pytest.mark.parametrize("backend", ["eager", "aot_eager"])
VALUES = (0.0, 1.0, 2.0, 3.0)
Tree = dict[str, Any]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def compiled_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def compiled_frames() -> int:
    """Returns how many frames were compiled, first times and again."""
    return torch._dynamo.utils.counters["frames"]["total"]


def reasons() -> list[str]:
    """Returns the reason of each graph break."""
    return list(torch._dynamo.utils.counters["graph_break"].elements())


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, tree: Tree) -> torch.Tensor:
        return self.layer(tree["x"]).sum(1) + tree["small"][0] * tree["small"][1].sum()


def tree(value: float = 1.0, rows: int = 4) -> Tree:
    return {
        "x": torch.full((rows, 3), value),
        "small": [torch.full((rows,), value), torch.arange(5.0)],
        "name": "batch",
    }


# ---- outside -------------------------------------------------------------------------------------


def by_start_copy(batches: list[Tree], device: str) -> Iterator[Tree]:
    for batch in batches:
        yield tdcopier.start_copy(batch, device).wait()


def by_prefetch(batches: list[Tree], device: str) -> Iterator[Tree]:
    with tdcopier.prefetch(batches, device) as moved:
        yield from moved


def by_prefetch_in_loop(batches: list[Tree], device: str) -> Iterator[Tree]:
    with tdcopier.prefetch(batches, device, threaded=False) as moved:
        yield from moved


def by_to(batches: list[Tree], device: str) -> Iterator[Tree]:
    return (oracle(batch, device) for batch in batches)


OURS = (by_start_copy, by_prefetch, by_prefetch_in_loop)


@BACKENDS
@pytest.mark.parametrize("move", OURS)
def test_batches_that_were_copied_outside_cost_no_break_and_no_recompile(device, move, backend):
    model = Model().to(device)
    compiled = torch.compile(model, backend=backend)
    batches = [tree(value) for value in VALUES]
    for batch, moved in zip(batches, move(batches, device), strict=True):
        assert torch.equal(compiled(moved), model(oracle(batch, device)))
        assert (compiled_graphs(), compiled_frames()) == (1, 1)
    assert reasons() == []


@pytest.mark.parametrize("move", OURS)
def test_batches_of_other_sizes_are_compiled_as_often_as_with_to(device, move):
    batches = [tree(1.0, rows) for rows in (4, 7, 4, 9, 1, 12)]
    seen = []
    for way in (by_to, move):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compiled = torch.compile(Model().to(device), backend="aot_eager")
        counts = []
        for moved in way(batches, device):
            compiled(moved)
            counts.append((compiled_graphs(), compiled_frames()))
        seen.append(counts)
    assert seen[0] == seen[1]
    assert 1 < seen[1][-1][0] < len(batches)


def test_a_compiled_model_is_ordered_after_a_copy_that_is_late(device, slow_link):
    model = Model().to(device)
    compiled = torch.compile(model, backend="aot_eager")
    compiled(oracle(tree(), device))
    with slow_link:
        batch = tree(3.0)
        handle = tdcopier.start_copy(batch, device)
        moved = handle.wait()
        batch["x"].zero_()
        result = compiled(moved)
    assert torch.equal(result, model(oracle(tree(3.0), device)))


# ---- inside --------------------------------------------------------------------------------------


class CopiesInside(Model):
    """Copies between two parts that are compiled."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.register_buffer("offset", torch.ones(()))

    def forward(self, tree: Tree) -> torch.Tensor:
        before = self.offset * 2
        moved = tdcopier.start_copy(tree, self.device).wait()
        return super().forward(moved) + before


SAYS = re.compile(
    r"tdcopier works between graphs: call (.*) before the compiled function and pass in (.*), or, "
    r"without fullgraph=True, accept a graph break here"
)


@BACKENDS
def test_inside_a_copy_splits_the_function_in_two_graphs_and_is_not_compiled(device, backend):
    model = CopiesInside(device).to(device)
    compiled = torch.compile(model, backend=backend)
    for value in VALUES:
        batch = tree(value)
        assert torch.equal(compiled(batch), model(batch))
        # The function, and its rests after start_copy() and after wait(); none of this package.
        assert (compiled_graphs(), compiled_frames()) == (2, 3)
    assert [SAYS.search(reason).group(1) for reason in reasons()] == ["start_copy()", "wait()"]


def test_a_function_of_the_users_own_makes_one_break_of_both_calls(device):
    class MovesInside(CopiesInside):
        @torch.compiler.disable
        def move(self, tree: Tree) -> Tree:
            return tdcopier.start_copy(tree, self.device).wait()

        def forward(self, tree: Tree) -> torch.Tensor:
            before = self.offset * 2
            moved = self.move(tree)
            return Model.forward(self, moved) + before

    model = MovesInside(device).to(device)
    compiled = torch.compile(model, backend="aot_eager")
    for value in VALUES:
        assert torch.equal(compiled(tree(value)), model(tree(value)))
        assert (compiled_graphs(), compiled_frames()) == (2, 2)
    assert len(reasons()) == 1


def test_a_handle_that_is_passed_in_costs_one_break_and_no_graph_of_its_own(device):
    class Waits(Model):
        def forward(self, handle: tdcopier.AsyncCopyHandle) -> torch.Tensor:
            return super().forward(handle.wait())

    model = Waits().to(device)
    compiled = torch.compile(model, backend="aot_eager")
    for value in VALUES:
        result = compiled(tdcopier.start_copy(tree(value), device))
        assert torch.equal(result, Model().to(device)(oracle(tree(value), device)))
        assert (compiled_graphs(), compiled_frames()) == (1, 2)
    (reason,) = reasons()
    assert SAYS.search(reason).groups() == ("wait()", "the tree")


def _gather(batch: Tree, device: str) -> Any:
    return tdcopier.start_gather({"x": batch["x"]}, [0], device)


def _next(batch: Tree, device: str) -> Any:
    return next(PREFETCHERS[-1])


CALLS: dict[str, Callable[[Tree, str], Any]] = {
    "start_copy()": tdcopier.start_copy,
    "copy()": tdcopier.copy,
    "async_to()": tdcopier.async_to,
    "to()": tdcopier.to,
    "copy_into()": lambda batch, device: tdcopier.copy_into(batch["x"], batch["x"].clone()),
    "start_gather()": _gather,
    "prefetch()": lambda batch, device: tdcopier.prefetch([batch], device),
    "next() on the prefetcher": _next,
    "prepare()": lambda batch, device: tdcopier.prepare(batch, device),
    "explain()": tdcopier.explain,
    "collate()": lambda batch, device: tdcopier.collate([batch["x"]]),
    "wait()": lambda batch, device: HANDLES[-1].wait(),
    "get()": lambda batch, device: HANDLES[-1].get(),
}
HANDLES: list[tdcopier.AsyncCopyHandle] = []
PREFETCHERS: list[tdcopier.Prefetcher] = []


@pytest.fixture
def with_objects(device: str) -> Iterator[None]:
    """Makes the objects whose methods are called."""
    with tdcopier.prefetch([tree()] * 9, device) as prefetcher:
        PREFETCHERS.append(prefetcher)
        HANDLES.append(tdcopier.start_copy(tree(), device))
        yield
        PREFETCHERS.clear()
        HANDLES.clear()


@pytest.mark.parametrize("call", CALLS)
def test_with_fullgraph_the_error_says_what_to_do_and_without_it_the_call_works(
    with_objects, device, call
):
    function = CALLS[call]

    def uses(batch: Tree) -> tuple[torch.Tensor, Any]:
        return torch.sin(batch["x"]), function(batch, device)

    with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
        torch.compile(uses, backend="eager", fullgraph=True)(tree())
    assert SAYS.search(str(caught.value)).group(1) == call
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert torch.compile(uses, backend="eager")(tree())[1] is not None
    # The compiler counts it again for the function in between.
    assert {SAYS.search(reason).group(1) for reason in reasons()} == {call}
    assert compiled_frames() <= 4


def test_a_loop_over_a_prefetcher_gives_right_values_and_with_fullgraph_the_error(device):
    def uses(batches: tdcopier.Prefetcher) -> torch.Tensor:
        return sum(torch.sin(batch["x"]).sum() for batch in [*batches])

    batches = [tree(value) for value in VALUES]
    expected = sum(torch.sin(batch["x"].to(device)).sum() for batch in batches)
    with tdcopier.prefetch(batches, device) as prefetcher:
        assert torch.equal(torch.compile(uses, backend="eager")(prefetcher), expected)
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="tdcopier works between graphs"):
            torch.compile(uses, backend="eager", fullgraph=True)(prefetcher)


def test_a_prepared_and_a_checked_copy_say_the_same(device, monkeypatch):
    plan = tdcopier.prepare(tree(), device)
    monkeypatch.setattr("tdcopier._checking.enabled", True)
    checked = tdcopier.start_copy(tree(), device)
    for call in (lambda batch: plan.start_copy(batch), lambda batch: checked.wait()):
        with pytest.raises(torch._dynamo.exc.Unsupported, match="tdcopier works between graphs"):
            torch.compile(call, backend="eager", fullgraph=True)(tree())


def test_every_public_function_is_kept_out_of_graphs():
    functions = {name: getattr(tdcopier, name) for name in tdcopier.__all__}
    functions = {n: f for n, f in functions.items() if isinstance(f, FunctionType)}
    assert len(functions) > 15
    unmarked = {n for n, f in functions.items() if not hasattr(f, "_torchdynamo_disable")}
    assert unmarked == {n for n in functions if n == "info" or n.endswith("_backend")}


def test_code_of_a_container_is_not_compiled_where_a_graph_is_broken(device, registry):
    class Pair:
        def __init__(self, one: torch.Tensor, other: torch.Tensor) -> None:
            self.both = (one, other)

    tdcopier.containers.register(
        Pair, lambda pair: (pair.both, None), lambda children, context: Pair(*children)
    )

    def uses(x: torch.Tensor) -> torch.Tensor:
        moved = tdcopier.copy(Pair(x, torch.ones(3)), device)
        return torch.sin(moved.both[0]) + moved.both[1]

    result = torch.compile(uses, backend="aot_eager")(torch.zeros(3))
    assert result.tolist() == [1, 1, 1]
    assert compiled_frames() <= 3  # the function, `Pair` in it, and the rest; nothing in the copy


def test_the_package_does_not_import_the_compiler():
    program = """
        import sys, tdcopier
        print([name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules])
    """
    assert run_python(program) == "[]\n"


# ---- CUDA graphs ---------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")  # the compiler's own, for example on TensorFloat32
@pytest.mark.parametrize("move", [*OURS, "inside"])
def test_values_are_right_where_the_compiler_replays_cuda_graphs(device, stall, copy_stream, move):
    """Sources change as soon as they may, and some copies are late."""
    rounds = 12
    model = Model().to(device)
    inside = CopiesInside(device).to(device)
    compiled = torch.compile(inside if move == "inside" else model, mode="reduce-overhead")
    batch = tree()

    def overwritten() -> Iterator[Tree]:
        for value in range(rounds):
            batch["x"].fill_(value)
            batch["small"][0].fill_(value)
            yield batch

    results, expected = [], []
    moving = overwritten() if move == "inside" else move(overwritten(), device)
    with torch.no_grad():  # with gradients, graphs are not replayed until backward() has run
        for value in range(rounds):
            torch.compiler.cudagraph_mark_step_begin()
            with stall(copy_stream):  # work that is ahead of the copy
                pass
            results.append(compiled(next(moving)).clone())
            right = model(oracle(tree(float(value)), device))
            expected.append(right + 2 if move == "inside" else right)
    for result, right in zip(results, expected, strict=True):
        torch.testing.assert_close(result, right)
