"""The built-in PTX equals the compiler's output for its source."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools/make_ptx.py"


def load_tool():
    spec = importlib.util.spec_from_file_location("make_ptx", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_header_is_what_the_source_compiles_to(monkeypatch, tmp_path):
    tool = load_tool()
    try:
        header = tool.compiled()
    except tool.WrongCompiler as error:
        pytest.skip(str(error))
    assert tool.HEADER.read_text() == header
    assert tool.main(["--check"]) == 0
    changed = tmp_path / "move_segments.cu"
    changed.write_text(tool.SOURCE.read_text().replace("blockDim.x", "32"))
    monkeypatch.setattr(tool, "SOURCE", changed)
    assert tool.main(["--check"]) == 1


def test_another_compiler_is_refused(monkeypatch, capsys):
    tool = load_tool()
    monkeypatch.setattr(tool, "VERSION", "0.0")
    assert tool.main(["--check"]) == 2
    assert "0.0" in capsys.readouterr().err
