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


def test_the_headers_are_what_the_sources_compile_to(monkeypatch, tmp_path):
    tool = load_tool()
    try:
        headers = {name: tool.compiled(name) for name in tool.NAMES}
    except tool.WrongCompiler as error:
        pytest.skip(str(error))
    for name, header in headers.items():
        assert tool.header_of(name).read_text("utf-8") == header
    assert tool.main(["--check"]) == 0
    for file in (*tool.KERNELS.glob("*.cu"), *tool.KERNELS.glob("*_ptx.h")):
        (tmp_path / file.name).write_text(file.read_text("utf-8").replace("blockDim.x", "32"))
    monkeypatch.setattr(tool, "KERNELS", tmp_path)
    assert tool.main(["--check"]) == 1


def test_another_compiler_is_refused(monkeypatch, capsys):
    tool = load_tool()
    monkeypatch.setattr(tool, "VERSION", "0.0")
    assert tool.main(["--check"]) == 2
    assert "0.0" in capsys.readouterr().err
