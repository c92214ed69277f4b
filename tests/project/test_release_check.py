"""The check of a release names each thing that is missing."""

from __future__ import annotations

import importlib.util
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

import tdcopier

ROOT = Path(__file__).resolve().parents[2]
PAIRS = (("3.10", "2.11"), ("3.10", "2.15"), ("3.11", "2.11"), ("3.11", "2.15"), ("3.12", "2.11"))


@pytest.fixture
def release_check(monkeypatch) -> ModuleType:
    path = ROOT / "tools" / "release_check.py"
    spec = importlib.util.spec_from_file_location("release_check", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "release_check", module)
    spec.loader.exec_module(module)
    return module


def test_the_version_is_that_of_the_package(release_check):
    assert release_check.version() == tdcopier.__version__


def test_the_notes_of_a_version_are_its_section(release_check):
    changelog = """# Changelog

## Unreleased

- later

## 0.2.0 - 2026-12-01

### Added

- this

## 0.2.0rc1

- before
"""
    assert release_check.notes(changelog, "0.2.0") == "### Added\n\n- this"
    assert release_check.notes(changelog, "0.2") == ""
    assert release_check.notes(changelog, "0.2.0rc1") == "- before"


def test_links_that_lead_nowhere_are_found(release_check, tmp_path):
    (tmp_path / "there.md").touch()
    page = tmp_path / "page.md"
    page.write_text(
        "[a](there.md#part) [b](gone.md) [c](https://example.org/gone) [d](#part) ![e](gone.svg)"
    )
    assert release_check.dead_links(page) == ["gone.md", "gone.svg"]


def test_everything_that_is_missing_is_told(release_check, monkeypatch, tmp_path):
    monkeypatch.setattr(release_check, "DIST", tmp_path)
    monkeypatch.setattr(release_check, "version", lambda: "9.9.9")
    found = " ".join(release_check.missing())
    for each in ("no section", "CITATION.cff", "dist lacks modules", "no sdist"):
        assert each in found
    (tmp_path / "tdcopier-9.9.9-cp311-cp311-linux_x86_64.whl").touch()
    found = " ".join(release_check.missing())
    assert "not for all of Linux" in found
    assert "twine" in found  # it refuses an empty file, or is not installed


def test_pairs_without_modules_are_told(release_check, monkeypatch, tmp_path):
    for python, torches in {"310": ("2.11", "2.15"), "311": ("2.11",)}.items():
        name = f"tdcopier-0.1.0-cp{python}-cp{python}-manylinux_2_35_x86_64.whl"
        with zipfile.ZipFile(tmp_path / name, "w") as wheel:
            for torch in torches:
                wheel.writestr(f"tdcopier/for_torch_{torch}/_C.cpython-{python}.so", "")
    names = [f"Python {python}, torch {torch}.0" for python, torch in PAIRS]
    monkeypatch.setattr(release_check, "read", lambda _: str(dict.fromkeys(names)))
    found = release_check.pairs_without_modules(sorted(tmp_path.glob("*.whl")))
    assert found == ["Python 3.11, torch 2.15", "Python 3.12, torch 2.11"]


def test_a_tag_at_another_commit_is_told(release_check, monkeypatch):
    told = {"--list": "v0.1.0", "--points-at": "", "--porcelain": ""}
    monkeypatch.setattr(release_check, "version", lambda: "0.1.0")
    monkeypatch.setattr(release_check, "git", lambda *words: told[words[1]])
    assert "The tag v0.1.0 is at another commit." in release_check.missing()
    told["--points-at"] = "v0.1.0"
    assert not [each for each in release_check.missing() if "tag" in each]


def test_a_complete_release_says_how_to_publish_it(release_check, monkeypatch, capsys):
    monkeypatch.setattr(release_check, "missing", list)
    monkeypatch.setattr(sys, "argv", ["release_check.py"])
    release_check.main()
    said = capsys.readouterr().out
    stated = tdcopier.__version__
    assert f"\ngit tag --annotate v{stated} " in said
    assert f"\npython -m twine upload dist/tdcopier-{stated}-*.whl " in said


def test_the_changelog_has_the_version(release_check):
    assert not [each for each in release_check.missing() if "no section" in each]


def test_the_citation_names_the_version(release_check):
    assert not [each for each in release_check.missing() if "CITATION" in each]


def test_no_page_of_the_repository_has_a_dead_link(release_check):
    assert not [each for each in release_check.missing() if "links to" in each]
