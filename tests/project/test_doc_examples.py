"""Every Python block of the Markdown pages runs, and prints what its page says.

The blocks of a page run one after the other, in one namespace, on the device of the test run. Names
that a page supposes, such as a model, are made here in `SET_UPS`. Two things are compared with what
a block prints: a ```text block that follows it, and a comment after a `print()`. A comment after an
expression, up to a colon, is its value.
"""

from __future__ import annotations

import ast
import contextlib
import io
import linecache
import re
import textwrap
import tokenize
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from libraries import library
from prefetch_support import StatefulLoader
from recipe_support import RECIPES

import tdcopier

ROOT = Path(__file__).resolve().parents[2]
GENERATED = {"docs/_build", "docs/tutorials"}
PAGES = {
    str(path.relative_to(ROOT)): path
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")]
    if not any(path.is_relative_to(ROOT / folder) for folder in GENERATED)
}
LANGUAGES = {"python", "text", "sh"}  # and directives: {include}, {toctree}
Names = dict[str, Any]


# ---- blocks of a page ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    first_line: int  # of the text, in the page
    follows: bool  # the block before, with nothing in between


def blocks_of(path: Path) -> list[Block]:
    """Returns the fenced blocks of a page; those in lists are indented."""
    page = path.read_text("utf-8")
    found = []
    end = 0
    for fence in re.finditer(r"^( *)```(\S*).*\n((?:.*\n)*?)\1```$", page, re.MULTILINE):
        follows = not page[end : fence.start()].strip()
        line = page.count("\n", 0, fence.start(3)) + 1
        found.append(Block(fence[2], textwrap.dedent(fence[3]), line, follows))
        end = fence.end()
    return found


def on_the_device(text: str, device: str) -> str:
    """Names the device of the test run in place of "cuda"."""
    kind = device.partition(":")[0]
    return re.sub(r'"cuda(:\d)?"', lambda found: f'"{kind}{found[1] or ":0"}"', text)


def statements(block: Block, device: str) -> Iterator[tuple[ast.stmt, str | None]]:
    """Yields the statements of a block, and the comment at the end of each."""
    text = on_the_device(block.text, device)
    comments = {
        token.start[0]: token.string.removeprefix("# ")
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    }
    for statement in ast.parse(text).body:
        assert statement.end_lineno is not None
        comment = comments.get(statement.end_lineno)
        yield ast.increment_lineno(statement, block.first_line - 1), comment


def stated(statement: ast.stmt, comment: str | None) -> str | None:
    """Returns the output that the comment after a `print()` states."""
    is_print = (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and isinstance(statement.value.func, ast.Name)
        and statement.value.func.id == "print"
    )
    return comment if is_print else None


def run_block(block: Block, names: Names, path: Path, device: str) -> str:
    """Runs a block, compares values and output with its comments, and returns what it printed."""
    printed = []
    for statement, comment in statements(block, device):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Attribute):
                value = eval(compile(ast.Expression(statement.value), str(path), "eval"), names)
                assert comment is None or comment.partition(":")[0] == repr(value)
            else:
                exec(compile(ast.Module([statement], []), str(path), "exec"), names)
        printed.append(output.getvalue().replace(device, "cuda:0"))
        if (told := stated(statement, comment)) is not None:
            assert printed[-1] == told.replace(device, "cuda:0") + "\n"
    return "".join(printed)


def run_page(path: Path, names: Names, device: str) -> None:
    linecache.checkcache(str(path))  # a failure shows the line of the page
    printed = ""
    for block in blocks_of(path):
        if block.language == "python":
            printed = run_block(block, names, path, device)
        elif block.language == "text" and block.follows:
            assert printed.rstrip() == block.text.rstrip()


# ---- what the pages suppose ----------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One run of a page."""

    device: str
    folder: Path
    monkeypatch: pytest.MonkeyPatch


SET_UPS: dict[str, Callable[[Run], Names]] = {}


def set_up(page: str) -> Callable[[Callable[[Run], Names]], Callable[[Run], Names]]:
    """Registers a function that makes the names that a page supposes."""

    def register(make: Callable[[Run], Names]) -> Callable[[Run], Names]:
        SET_UPS[page] = make
        return make

    return register


def nothing(*_: Any) -> None:
    """Stands for work of the reader's own."""


def trained(device: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Returns a model, and an optimizer that has a state."""
    model = torch.nn.Linear(4, 2).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    device = next(model.parameters()).device
    model(torch.ones(3, 4, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def boxes(count: int = 12) -> dict[str, Any]:
    return {"boxes": [torch.rand(count, 4), torch.rand(count + 1, 4)], "ids": torch.arange(count)}


@set_up("README.md")
def _(run: Run) -> Names:
    return {"dataset": torch.rand(256, 4), "model": nothing}


@set_up("docs/concepts/memory.md")
def _(run: Run) -> Names:
    return {"dataset": [torch.rand(300, 300) for _ in range(3)], "learn": nothing}


@set_up("docs/guide/between_processes.md")
def _(run: Run) -> Names:
    images = [{"image": torch.rand(4), "label": number} for number in range(64)]
    return {"dataset": images, "model": torch.nn.Linear(4, 2).to(run.device)}


@set_up("docs/guide/coming_from_multi_tensor_copier.md")
def _(run: Run) -> Names:
    return {"batch": boxes()}


@set_up("docs/guide/existing_memory.md")
def _(run: Run) -> Names:
    _, optimizer = trained(run.device)
    host = tdcopier.snapshot(optimizer).get()
    optimizer.param_groups[0]["lr"] *= 0.1
    return {
        "first_batch": boxes(),
        "batches": [boxes(), boxes()],
        "graph": SimpleNamespace(replay=nothing),
        "optimizer": optimizer,
        "host": host,
    }


@set_up("docs/guide/from_a_dataloader.md")
def _(run: Run) -> Names:
    images = [{"image": torch.rand(3, 16, 16), "label": number} for number in range(256)]
    return {"dataset": images, "model": nothing}


@set_up("docs/guide/park.md")
def _(run: Run) -> Names:
    model, optimizer = trained(run.device)
    return {
        "model": model,
        "optimizer": optimizer,
        "generate": nothing,
        "rollout_engine": None,
        "train": step,
        "train_one_step": step,
        "epoch": 1,
        "path": run.folder / "state.pt",
        "folder": run.folder / "checkpoint",
    }


@set_up("docs/guide/pipelines.md")
def _(run: Run) -> Names:
    if run.device.startswith("cuda"):
        warnings.simplefilter("ignore")  # the compiler's own; the test restores the filters
    else:  # the default backend does not compile for the simulated device

        def compiled(model: torch.nn.Module, mode: str, fullgraph: bool) -> Any:
            return compile_(model, backend="eager", fullgraph=fullgraph)

        compile_ = torch.compile
        run.monkeypatch.setattr(torch, "compile", compiled)
    row = torch.zeros(64, 4, 84, 84, dtype=torch.uint8, device=run.device)
    environment = SimpleNamespace(collect=lambda: {"reward": torch.ones(4)})
    return {
        "dataset": torch.rand(256, 4),
        "model": torch.nn.Linear(4, 2).to(run.device),
        "open_environment": lambda: contextlib.nullcontext(environment),
        "learn": nothing,
        "stateful_loader": StatefulLoader(),
        "new_stateful_loader": StatefulLoader,
        "rollout": {"observation": row},
        "collect_the_next": nothing,
    }


@set_up("docs/guide/prepared_copies.md")
def _(run: Run) -> Names:
    def batch(last: int) -> dict[str, Any]:
        return {"boxes": [torch.rand(count, 4) for count in (3, 1, 4, last)]}

    return {"first_batch": batch(7), "batches": [batch(7), batch(7)], "other_batch": batch(5)}


@set_up("docs/guide/recipes.md")
def _(run: Run) -> Names:
    env = library("gymnasium").make("CartPole-v1")
    library("stable_baselines3")
    run.monkeypatch.syspath_prepend(RECIPES)
    model, optimizer = trained(run.device)
    return {
        "env": env,
        "optimizer": optimizer,
        "train_one_step": nothing,
        "train_one_epoch": lambda: step(model, optimizer),
        "epochs": 2,
        "path": run.folder / "state.pt",
    }


@set_up("docs/guide/scale_out.md")
def _(run: Run) -> Names:
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return {
        "batch": boxes(),
        "model": torch.nn.Linear(4, 2).to(run.device),
        "copy_of_model": torch.nn.Linear(4, 2),
        "batches": [boxes()],
        "learn": lambda model, batch: model.bias.data.add_(1),
        "act": lambda model: model(torch.ones(4)),
        "steps": 3,
        "rank": 0,
        "settings": {"rate": torch.tensor(0.1)},
        "parts": [boxes()],
    }


@set_up("docs/guide/testing_without_a_gpu.md")
def _(run: Run) -> Names:
    if not run.device.startswith("sim"):
        pytest.skip("enables the simulated device, which excludes CUDA from the process")
    run.monkeypatch.syspath_prepend(ROOT / "docs" / "examples")
    from prefetcher import Prefetcher

    def pipeline(device: str) -> None:
        Prefetcher(4, device).send(torch.ones(4))

    return {
        "my_pipeline": pipeline,
        "prefetcher": Prefetcher(4, "sim"),
        "first": torch.ones(4),
        "second": torch.zeros(4),
    }


@set_up("docs/guide/torchrl.md")
def _(run: Run) -> Names:
    pytest.importorskip("torchrl")
    from priority_trees import use_trees_in_python
    from tensordict import TensorDict
    from torchrl.data.replay_buffers.samplers import prioritized

    if prioritized.SumSegmentTreeFp32 is None:  # torchrl's compiled part does not load
        use_trees_in_python(run.monkeypatch)
    data = {"observation": torch.rand(512, 4), "reward": torch.rand(512, 1)}
    return {
        "rollout": TensorDict(data, [512], device="cpu"),
        "learn": lambda batch: batch["reward"].abs().squeeze(-1),
    }


@set_up("docs/guide/replay_service.md")
def _(run: Run) -> Names:
    pytest.importorskip("torchrl")
    from tensordict import TensorDict

    data = {"observation": torch.rand(512, 4), "reward": torch.rand(512, 1)}
    return {"rollout": TensorDict(data, [512], device="cpu"), "learn": nothing, "steps": 3}


@set_up("docs/guide/from_torchrls_script.md")
def _(run: Run) -> Names:
    pytest.importorskip("torchrl")
    from tensordict import TensorDict

    data = {"observation": torch.rand(512, 4), "reward": torch.rand(512, 1)}
    return {
        "rollout": TensorDict(data, [512], device="cpu"),
        "learn": lambda batch: batch["reward"].mean(),
    }


# ---- tests ---------------------------------------------------------------------------------------


def pages_with_examples() -> list[Any]:
    """Returns all pages that have Python blocks; those that look for hazards do so alone."""
    found = []
    for page, path in sorted(PAGES.items()):
        if any(block.language == "python" for block in blocks_of(path)):
            detects = "sim.detect(" in path.read_text("utf-8")
            found.append(pytest.param(page, marks=[pytest.mark.hazardous] if detects else []))
    return found


@pytest.fixture
def no_process_group() -> Iterator[None]:
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def forked_workers() -> Iterator[None]:
    """What a block defines cannot be pickled, as "spawn" asks, which torchrl 0.14 chooses."""
    before = torch.multiprocessing.get_start_method()
    torch.multiprocessing.set_start_method("fork", force=True)
    yield
    torch.multiprocessing.set_start_method(before, force=True)


@pytest.mark.filterwarnings(
    "ignore:This DataLoader will create:UserWarning",  # more workers than processors
    "ignore:.*multi-threaded.*:DeprecationWarning",
    "ignore:torch.distributed is disabled:UserWarning",  # so a checkpoint has one process
    "ignore:`torch.jit.script_method` is deprecated",  # where torch.compile is imported
)
@pytest.mark.parametrize("page", pages_with_examples())
def test_the_blocks_of_a_page_run_and_print_what_it_says(
    page, registry, device, monkeypatch, tmp_path, no_process_group, forked_workers
):
    monkeypatch.chdir(tmp_path)  # some write files there
    make = SET_UPS.get(page)
    names = {} if make is None else make(Run(device, tmp_path, monkeypatch))
    run_page(PAGES[page], {"__name__": "__main__", **names}, device)


def test_a_set_up_belongs_to_a_page():
    assert SET_UPS.keys() <= PAGES.keys()


@pytest.mark.parametrize("page", sorted(PAGES))
def test_every_block_of_a_page_has_a_language_that_is_known(page):
    found = {block.language for block in blocks_of(PAGES[page])}
    assert {name for name in found if not name.startswith("{")} <= LANGUAGES
    fences = re.findall(r"^ *```", PAGES[page].read_text("utf-8"), re.MULTILINE)
    assert len(fences) == 2 * len(blocks_of(PAGES[page]))


@pytest.mark.parametrize(
    ("block", "is_right"),
    [
        ("```python\nprint(1 + 1)  # 2\n```\n", True),
        ("```python\nprint(1 + 1)  # 3\n```\n", False),
        ("```python\nx = [1]\nprint(x)\n```\n\n```text\n[1]\n```\n", True),
        ("- so:\n\n  ```python\n  print(1)\n  ```\n\n  ```text\n  2\n  ```\n", False),
        ("```python\nclass A:\n    x = 1\n\n\nA.x  # 1: because\n```\n", True),
        ("```python\nclass A:\n    x = 1\n\n\nA.x  # 2: because\n```\n", False),
        ('```python\nprint("cuda")  # cuda:0\n```\n', True),
    ],
)
def test_a_page_that_states_another_output_is_found(block, is_right, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(block)
    raised = contextlib.nullcontext() if is_right else pytest.raises(AssertionError)
    with raised:
        run_page(page, {}, "sim:0")
