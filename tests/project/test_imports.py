"""The imports between modules of the package form no cycles, wherever a module imports."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import tdcopier

ROOT = Path(tdcopier.__file__).parent


def module_name(path: Path) -> str:
    parts = ("tdcopier", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    module_name(path): path for path in ROOT.rglob("*.py*") if path.suffix in (".py", ".pyi")
}


def imported_by(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in MODULES else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_no_module_imports_one_that_imports_it():
    """Leaves out the package itself, which most modules import, for example for its version."""
    modules = {name: path for name, path in MODULES.items() if name != "tdcopier"}
    graph = {
        name: {other for other in imported_by(path) if other in modules and other != name}
        for name, path in modules.items()
    }
    assert "tdcopier._containers.rule" in graph["tdcopier._containers.registry"]
    tuple(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError
