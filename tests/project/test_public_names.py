"""The public names: which calls block, what their errors say, their types, docstrings, examples."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import run_module, run_python

import tdcopier

ROOT = Path(tdcopier.__file__).parent
NAMESPACES = {
    "checkpoint",
    "containers",
    "distributed",
    "limits",
    "pinned",
    "replay",
    "sim",
    "stats",
    "tensordict",
    "workloads",
}
BLOCKING = ["copy", "copy_into", "gather", "scatter"]


# ---- which calls block ---------------------------------------------------------------------------


def test_copy_into_blocks_and_returns_the_destination(device):
    for target in ("cpu", device):
        source = {"a": torch.arange(6.0), "b": [np.ones(2, np.int64)]}
        static = {"a": torch.zeros(6, device=target), "b": [torch.zeros(2, dtype=torch.int64)]}
        assert tdcopier.copy_into(source, static) is static
        source["a"].fill_(-1)  # the sources have been read
        assert static["a"].tolist() == [0, 1, 2, 3, 4, 5]
        assert static["b"][0].tolist() == [1, 1]


def test_gather_and_scatter_block(device):
    storage = {"obs": torch.arange(12.0).reshape(6, 2)}
    batch = tdcopier.gather(storage, [4, 1], device)
    assert batch["obs"].device == torch.device(device)
    assert batch["obs"].tolist() == [[8, 9], [2, 3]]
    assert tdcopier.scatter(batch, storage, torch.tensor([0, 5])) is storage
    assert storage["obs"][0].tolist() == [8, 9]
    assert storage["obs"][5].tolist() == [2, 3]


def test_the_blocking_calls_pass_every_option_on(device, monkeypatch):
    seen = []
    monkeypatch.setattr("tdcopier._into._start", _noting(seen))
    monkeypatch.setattr("tdcopier._rows.scatter.start_scatter", _noting(seen))
    monkeypatch.setattr("tdcopier._rows.gather.start_gather", _noting(seen))
    monkeypatch.setattr("tdcopier._copy.start_copy", _noting(seen))
    options = {"use_pinned_staging": False, "use_background_thread": False}
    tdcopier.copy_into([], [], **options, copy_opaque=True)
    tdcopier.scatter([], [], [0], **options)
    tdcopier.gather([], [0], device, **options)
    tdcopier.copy([], device, **options)
    tdcopier.to([], device, **options)
    assert seen == [
        {**options, "copy_opaque": True, "in_place": True},
        options,
        {**options, "out": None},
        *[options] * 2,
    ]


class _Done:
    def get(self) -> None: ...

    def ready(self) -> bool:
        return True


def _noting(seen):
    def call(*args, **options):
        seen.append(options)
        return _Done()

    return call


@pytest.mark.parametrize("name", BLOCKING)
def test_each_blocking_call_has_a_start_call_with_the_same_parameters(name):
    def parameters(function):
        found = inspect.signature(function).parameters.values()
        return [each.name for each in found if each.kind is not each.VAR_KEYWORD]

    blocking, start = (getattr(tdcopier, each) for each in (name, f"start_{name}"))
    given = parameters(blocking)
    assert parameters(start)[: len(given)] == given


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["to", "copy", "async_to"])
def test_options_of_torch_that_a_copy_has_not_are_refused_with_a_sentence(device, name):
    call = getattr(tdcopier, name)
    with pytest.raises(TypeError, match=rf"^{name}\(\) takes no non_blocking: it "):
        call([], device, non_blocking=True)
    with pytest.raises(TypeError, match=rf"^{name}\(\) keeps dtypes: convert the result"):
        call([], device, dtype=torch.float16)
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument 'pin'"):
        call([], device, pin=True)


def test_gather_refuses_unknown_options_under_its_own_name(device):
    with pytest.raises(TypeError, match=r"^gather\(\) got an unexpected keyword argument 'rows'"):
        tdcopier.gather([torch.ones(2)], [0], device, rows=1)


# ---- names ---------------------------------------------------------------------------------------


def test_a_batch_needs_few_names_and_the_rest_is_in_namespaces():
    found = {name for name in dir(tdcopier) if not name.startswith("_")}
    assert found >= NAMESPACES
    assert len(found - NAMESPACES) <= 30


def test_dir_lists_every_public_name_and_each_can_be_reached():
    assert set(tdcopier.__all__) <= set(dir(tdcopier))
    assert not [name for name in dir(tdcopier) if name.startswith("_") and name[1] != "_"]
    code = f"""
import sys, tdcopier
names = {sorted(NAMESPACES)}
early = [name for name in names if f"tdcopier.{{name}}" in sys.modules]
assert not early, early
assert set(names) <= set(dir(tdcopier))
for name in names:
    namespace = getattr(tdcopier, name)
    assert namespace.__name__ == f"tdcopier.{{name}}"
    assert all(hasattr(namespace, each) for each in namespace.__all__)
    assert set(namespace.__all__) <= set(dir(namespace))
try:
    tdcopier.nothing
except AttributeError as error:
    assert "nothing" in str(error)
else:
    raise SystemExit("no error")
"""
    run_python(code)


@pytest.mark.parametrize("name", sorted(NAMESPACES))
def test_a_namespace_lists_its_public_names_alone(name):
    module = getattr(tdcopier, name)
    shown = {each for each in dir(module) if not each.startswith("_")}
    parts = {"device_module", "pytest_plugin"}  # modules of `sim`
    assert shown - parts == set(module.__all__)


def test_errors_and_warnings_name_a_public_module():
    for name in ("", "containers", "distributed", "replay", "sim"):
        module = getattr(tdcopier, name) if name else tdcopier
        for each in map(lambda name: getattr(module, name), module.__all__):  # noqa: C417
            if isinstance(each, type) and issubclass(each, Exception):
                assert "._" not in f"{each.__module__}.{each.__name__}"
                assert getattr(sys.modules[each.__module__], each.__name__) is each


def test_a_part_that_needs_a_package_says_to_import_it():
    program = """
    import tdcopier
    try:
        tdcopier.torchrl
    except AttributeError as error:
        print(error)
    """
    assert run_python(program) == "import tdcopier.torchrl first: it needs torchrl\n"


@pytest.mark.sim
def test_the_controls_of_the_simulation_tell_their_state(sim):
    held = sim.hold()
    assert repr(held) == "<tdcopier.sim.Hold: active>"
    held.release()
    assert repr(held) == "<tdcopier.sim.Hold: ended>"
    detector = sim.detect()
    assert repr(detector) == "<tdcopier.sim.Detector: not begun>"
    with detector:
        pass
    assert repr(detector) == "<tdcopier.sim.Detector: 0 hazards>"
    assert repr(sim.schedule(3)) == "<tdcopier.sim.Schedule 3: not active>"


def test_the_command_tells_the_version():
    told = run_module("tdcopier", "--version")
    assert (told.returncode, told.stdout) == (0, f"tdcopier {tdcopier.__version__}\n")


def test_the_import_loads_little_beside_torch():
    """In milliseconds it varies with the machine; the modules do not."""
    code = """
import sys, torch
before = set(sys.modules)
import tdcopier
print(*sorted(set(sys.modules) - before))
"""
    command = [sys.executable, "-c", code]
    loaded = subprocess.run(command, check=True, capture_output=True, text=True, cwd="/").stdout
    others = {name for name in loaded.split() if name.partition(".")[0] != "tdcopier"}
    assert not [name for name in others if not name.startswith("_editable_")]
    ours = {name.removeprefix("tdcopier.") for name in loaded.split()}
    assert not ours & {
        "_collate",
        "_commands",
        "_explain",
        "_prefetch",
        "_prepared",
        "_rows",
        "_sim",
        "distributed",
        "sim",
        "tensordict",
        "torchrl",
        "workloads",
    }


# ---- types and docstrings ------------------------------------------------------------------------


def test_without_torchrl_its_part_says_how_to_get_it():
    program = """
        import sys
        sys.modules["torchrl"] = None
        try:
            import tdcopier.torchrl
        except ModuleNotFoundError as error:
            print(error)
        """
    assert (
        run_python(program) == "tdcopier.torchrl needs torchrl: pip install 'tdcopier[torchrl]'\n"
    )


def test_the_handle_can_be_subscripted_where_annotations_run():
    assert tdcopier.AsyncCopyHandle[dict].__origin__ is tdcopier.AsyncCopyHandle
    assert tdcopier.Prefetcher[dict].__origin__ is tdcopier.Prefetcher


def test_the_stub_has_the_docstrings_of_the_module():
    """An editor shows those of the stub, `help` those of the module: no signatures of pybind11."""
    stub = ast.parse((ROOT / "_C.pyi").read_text("utf-8"))
    (handle,) = (node for node in stub.body if getattr(node, "name", "") == "AsyncCopyHandle")
    nodes = [handle, *(each for each in handle.body if isinstance(each, ast.FunctionDef))]
    public = [node for node in nodes if not node.name.startswith("_")]
    assert len(public) >= 7
    for node in public:
        of_module = (
            tdcopier.AsyncCopyHandle if node is handle
            else getattr(tdcopier.AsyncCopyHandle, node.name)
        )  # fmt: skip
        said = inspect.getdoc(of_module) or ""
        assert said.split() == (ast.get_docstring(node) or "").split(), node.name


# ---- examples ------------------------------------------------------------------------------------


@pytest.mark.parametrize("namespace", ["", *sorted(NAMESPACES), "ray", "torchrl"])
def test_every_public_function_and_class_has_an_example_that_fits_the_names(namespace):
    if namespace in ("ray", "torchrl"):
        pytest.importorskip(namespace)
    module = importlib.import_module(f"tdcopier.{namespace}".rstrip("."))
    meant = {"sim": tdcopier.sim} if namespace == "sim" else {}
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isroutine(value):
            examples = _examples(value)
            assert examples, f"{module.__name__}.{name} has no example"
            wrong = [each for text in examples for each in _wrong_in(text, meant)]
            assert not wrong, f"{module.__name__}.{name}: {wrong}"


def test_an_example_with_a_wrong_name_or_keyword_is_found():
    assert _wrong_in("tdcopier.copy(data, 'sim', pin=True)", {}) == ["tdcopier.copy has no pin="]
    assert _wrong_in("from tdcopier import stats\nstats.Times", {}) == ["stats has no Times"]
    assert not _wrong_in("tdcopier.copy([], 'sim', on_unknown='warn').x; stats.y(out=1)", {})


def _examples(value: Any) -> list[str]:
    """Return the blocks of code in the docstring of a function or class itself."""
    said = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    blocks = re.findall(r"::\n\n((?: +\S.*\n|\n)+)", inspect.cleandoc(said or "") + "\n")
    return [textwrap.dedent(block) for block in blocks]


def _wrong_in(text: str, meant: dict[str, Any]) -> list[str]:
    """Return the names and keywords of tdcopier in an example that do not exist."""
    tree, names, wrong = ast.parse(text), {"tdcopier": tdcopier, **meant}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tdcopier"):
            module = importlib.import_module(node.module or "")
            names |= {each.asname or each.name: getattr(module, each.name) for each in node.names}

    def found(node: ast.expr) -> Any:
        if isinstance(node, ast.Attribute):
            return getattr(found(node.value), node.attr, None)
        return names.get(node.id) if isinstance(node, ast.Name) else None

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (owner := found(node.value)) is not None:
            if not hasattr(owner, node.attr):
                wrong.append(f"{ast.unparse(node.value)} has no {node.attr}")
        elif isinstance(node, ast.Call) and (called := found(node.func)) is not None:
            given = [each.arg for each in node.keywords if each.arg]  # None: of `**options`
            unknown = set(given) - _keywords(called) if given else set()
            wrong += [f"{ast.unparse(node.func)} has no {each}=" for each in sorted(unknown)]
    return wrong


def _keywords(called: Any) -> set[str]:
    """Return what a function takes by keyword, or a class, which passes the rest to its base."""
    keywords: set[str] = set()
    for each in [cls.__init__ for cls in called.__mro__] if inspect.isclass(called) else [called]:
        parameters = inspect.signature(each).parameters.values()
        keywords |= {parameter.name for parameter in parameters}
        rest = [each for each in parameters if each.kind is each.VAR_KEYWORD]
        if any("CopyOptions" in str(each.annotation) for each in rest):
            return keywords | set(tdcopier.CopyOptions.__annotations__)
        if not rest:
            break
    return keywords


def test_each_field_of_a_named_tuple_is_described_in_the_docstring_of_its_class():
    modules = [tdcopier, *(getattr(tdcopier, name) for name in sorted(NAMESPACES))]
    if importlib.util.find_spec("torchrl") is not None:
        modules.append(importlib.import_module("tdcopier.torchrl"))
    found = {
        value
        for module in modules
        for value in (getattr(module, name) for name in module.__all__)
        if inspect.isclass(value) and issubclass(value, tuple) and hasattr(value, "_fields")
    } - BATCHES
    assert len(found) >= 14
    for cls in found:
        fields = inspect.getdoc(cls).partition("\nAttributes:\n")[2]
        described = re.findall(r"^    (\w+): \S", fields, re.MULTILINE)
        assert described == list(cls._fields), cls


BATCHES = {value for value in vars(tdcopier.workloads).values() if inspect.isclass(value)} - {
    tdcopier.workloads.Workload
}
"""Named tuples that are examples of what users have."""
