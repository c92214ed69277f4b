"""`make demo` says what it showed, and is an error where it could have shown more."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "demo.py"


@pytest.fixture
def demo(monkeypatch):
    """The module, with the tutorials replaced by the lines that the test gives them."""
    spec = importlib.util.spec_from_file_location("demo_of_the_project", TOOL)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tutorial(demo, monkeypatch, tmp_path):
    """Makes the demo run one script with this text."""
    monkeypatch.setattr(demo, "ROOT", tmp_path)
    monkeypatch.setattr(demo, "SHOWN", ("01_shown",))

    def write(text):
        (tmp_path / "tutorials").mkdir()
        (tmp_path / "tutorials" / "01_shown.py").write_text(f'"""\nA title\n=======\n"""\n{text}')

    return write


def test_the_end_names_what_was_shown_the_pictures_and_what_was_not(
    demo, tutorial, tmp_path, capfd
):
    tutorial("print('picture: build/a.png')\nprint('skipped: times (no GPU)')")
    assert demo.main(["--complete"]) == 0
    out = capfd.readouterr().out
    end = out[out.index("Shown:") :].splitlines()
    assert end[1].startswith("  A title (")
    assert f"  {tmp_path / 'build/a.png'}" in end
    assert "  times (no GPU)" in end


def test_a_part_that_a_package_could_provide_is_an_error_only_if_all_was_installed(
    demo, tutorial, capfd
):
    tutorial("print(\"skipped: the pictures (No module named 'matplotlib')\")")
    assert demo.main([]) == 0
    assert demo.main(["--complete"]) == 1
    assert "No module named 'matplotlib'" in capfd.readouterr().err


def test_a_tutorial_that_fails_ends_the_demo(demo, tutorial):
    tutorial("raise SystemExit(3)")
    with pytest.raises(SystemExit, match=r"tutorials/01_shown.py failed with exit code 3"):
        demo.main([])


def test_the_tutorials_of_the_demo_exist(demo):
    for name in demo.SHOWN:
        assert (demo.ROOT / "tutorials" / f"{name}.py").is_file()


def test_an_unknown_argument_is_refused(demo):
    with pytest.raises(SystemExit, match="known is --complete"):
        demo.main(["--short"])
