"""The check of a release names each thing that is missing."""

from __future__ import annotations

import importlib.util
import io
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

import tdcopier

ROOT = Path(__file__).resolve().parents[2]
COMMIT_TIME_S = 1796000001  # odd: an archive can say even seconds only
IN_AN_ARCHIVE = (2026, 11, 30, 0, 53, 20)
SEEN = {"import": True, "demo": True, "tests": "591 passed, 6 skipped in 48.39s"}
FILES = {
    "README.md": b"what it is",
    "pyproject.toml": b"",
    "tdcopier/__init__.py": b"name = 1",
    "tdcopier/deep/_C.pyi": b"",
    "benchmarks/results/h2d.json": b"{}",
}


@pytest.fixture
def release_check(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "tools")
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
    name = release_check.wheel_name("9.9.9", "3.11")
    (tmp_path / name).touch()
    (tmp_path / "tdcopier-9.9.9.tar.gz").touch()
    found = " ".join(release_check.missing())
    assert f"{name} is not of this commit: `make wheels`" in found
    assert "tdcopier-9.9.9.tar.gz is not of this commit: `python -m build" in found
    assert "twine" in found  # it refuses an empty file, or is not installed


@pytest.mark.parametrize(
    "name",
    [
        "tdcopier-9.9.9-cp311-cp311-linux_x86_64.whl",
        "tdcopier-9.9.9-cp311-cp311-manylinux_2_34_x86_64.whl",
        "tdcopier-9.9.9-1-cp311-cp311-manylinux_2_35_x86_64.whl",
        "tdcopier-9.9.9-cp39-cp39-manylinux_2_35_x86_64.whl",
        "tdcopier-9.9.8-cp311-cp311-manylinux_2_35_x86_64.whl",
        "tdcopier-9.9.8.tar.gz",
        "notes.md",
    ],
)
def test_dist_has_only_files_of_the_release(release_check, monkeypatch, tmp_path, name):
    """All that is in it is published."""
    monkeypatch.setattr(release_check, "DIST", tmp_path)
    (tmp_path / name).touch()
    found = " ".join(release_check.wrong_in_dist("9.9.9", ["Python 3.11, torch 2.11.0"]))
    assert f"{name} is not of this release: remove it." in found


def test_the_name_of_a_wheel_says_which_libraries_it_needs(release_check):
    page = (ROOT / "docs/reference/compatibility.md").read_text()
    glibc = release_check.build_wheels.PLATFORM.split("_")[1:3]
    assert f"Wheels are for x86-64 and glibc {'.'.join(glibc)} or newer" in page


def test_pairs_without_modules_are_told(release_check, monkeypatch, tmp_path):
    monkeypatch.setattr(release_check, "DIST", tmp_path)
    for python, torches in {"3.10": ("2.11", "2.15"), "3.11": ("2.11",)}.items():
        with zipfile.ZipFile(tmp_path / release_check.wheel_name("0.1.0", python), "w") as wheel:
            for torch in torches:
                wheel.writestr(f"tdcopier/for_torch_{torch}/_C.cpython.so", "")
    pairs = [f"Python 3.{p}, torch 2.{t}.0" for p in (10, 11) for t in (11, 15)]
    pairs.append("Python 3.12, torch 2.11.0")
    found = release_check.pairs_without_modules("0.1.0", pairs)
    assert found == ["Python 3.11, torch 2.15.0", "Python 3.12, torch 2.11.0"]


def test_pairs_that_were_not_seen_to_work_are_told(release_check):
    pairs = {
        "works": SEEN,
        "skips none": {**SEEN, "tests": "591 passed in 63.42s (0:01:03)"},
        "no import": {**SEEN, "import": False},
        "no demo": {**SEEN, "demo": False},
        "no tests": {**SEEN, "tests": False},
        "some fail": {**SEEN, "tests": "2 failed, 589 passed in 48.39s"},
        "some end late": {**SEEN, "tests": "589 passed, 1 error in 48.39s"},
        "never tried": {},
    }
    assert release_check.failures(pairs) == [
        "no import (import)",
        "no demo (demo)",
        "no tests (tests)",
        "some fail (tests)",
        "some end late (tests)",
        "never tried (import, demo, tests)",
    ]


def wheel_of(path: Path, files: dict[str, bytes], when: Sequence[int]) -> Path:
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in files.items():
            wheel.writestr(zipfile.ZipInfo(name, tuple(when)), content)
    return path


def test_a_wheel_of_another_commit_is_found(release_check, tmp_path):
    """By its Python files; and if only C++ has changed, by the time at which it was committed."""
    committed = {name: release_check.hash_of(content) for name, content in FILES.items()}
    package = {name: content for name, content in FILES.items() if name.startswith("tdcopier/")}
    built = {**package, "tdcopier/for_torch_2.11/_C.so": b"code", "tdcopier-0.1.dist-info/R": b""}
    path = tmp_path / "tdcopier.whl"

    def is_of_commit(files: dict[str, bytes], when: Sequence[int] = IN_AN_ARCHIVE) -> bool:
        wheel = wheel_of(path, files, when)
        return release_check.wheel_is_of(committed, COMMIT_TIME_S, wheel)

    assert is_of_commit(built)
    assert is_of_commit({**built, "tdcopier/deep/": b""})
    assert not is_of_commit({**built, "tdcopier/__init__.py": b"name = 2"})
    assert not is_of_commit({**built, "tdcopier/removed.py": b""})
    assert not is_of_commit({"tdcopier/__init__.py": FILES["tdcopier/__init__.py"]})
    assert not is_of_commit(built, (*IN_AN_ARCHIVE[:5], IN_AN_ARCHIVE[5] - 2))


def test_an_sdist_of_another_commit_is_found(release_check, tmp_path):
    committed = {name: release_check.hash_of(content) for name, content in FILES.items()}
    sources = {name: content for name, content in FILES.items() if "results" not in name}
    path = tmp_path / "tdcopier-0.1.0.tar.gz"

    def is_of_commit(files: dict[str, bytes]) -> bool:
        with tarfile.open(path, "w:gz") as sdist:
            for name, content in files.items():
                member = tarfile.TarInfo(f"tdcopier-0.1.0/{name}")
                member.size = len(content)
                sdist.addfile(member, io.BytesIO(content))
        return release_check.sdist_is_of(committed, ["benchmarks/results"], path)

    assert is_of_commit({**sources, "PKG-INFO": b"Name: tdcopier"})
    assert not is_of_commit({**sources, "README.md": b"what it was"})
    assert not is_of_commit({**sources, "removed.md": b""})
    assert not is_of_commit({"README.md": FILES["README.md"]})


def test_git_has_the_same_hash_of_a_file(release_check):
    page = (ROOT / "LICENSE").read_bytes()
    assert release_check.committed_files()["LICENSE"] == release_check.hash_of(page)


@pytest.mark.parametrize("changelog", ["## 0.1.0 - 2026-12-01\n\n- it", "## 0.1.0\n\n- it"])
@pytest.mark.parametrize("citation", ["date-released: 2026-12-01\n", "version: 0.1.0\n"])
def test_changelog_and_citation_have_the_same_date(release_check, monkeypatch, changelog, citation):
    pages = {"CHANGELOG.md": changelog, "CITATION.cff": citation}
    monkeypatch.setattr(
        release_check, "read", lambda name: pages.get(name) or (ROOT / name).read_text()
    )
    monkeypatch.setattr(release_check, "version", lambda: "0.1.0")
    told = [each for each in release_check.missing() if each.startswith("CHANGELOG.md has")]
    assert bool(told) == ("2026" not in changelog or "2026" not in citation)


def test_a_tag_of_another_version_is_told(release_check):
    stated = tdcopier.__version__
    told = f"The tag is v9.9.9, but tdcopier/__init__.py states {stated}."
    assert told in release_check.missing("v9.9.9")
    assert not [each for each in release_check.missing(f"v{stated}") if "The tag is" in each]


def test_a_tag_at_another_commit_is_told(release_check, monkeypatch):
    told = {"--list": "v0.1.0", "--points-at": "", "--porcelain": "", "-r": "", "-1": "0"}
    monkeypatch.setattr(release_check, "version", lambda: "0.1.0")
    monkeypatch.setattr(release_check, "git", lambda *words: told[words[1]])
    assert "The tag v0.1.0 is at another commit." in release_check.missing()
    told["--points-at"] = "v0.1.0"
    assert not [each for each in release_check.missing() if "tag" in each]


def test_a_complete_release_says_how_to_publish_it(release_check, monkeypatch, capsys):
    monkeypatch.setattr(release_check, "missing", lambda tag: [])
    monkeypatch.setattr(sys, "argv", ["release_check.py"])
    release_check.main()
    said = capsys.readouterr().out
    stated = tdcopier.__version__
    assert f"\ngit tag --annotate v{stated} " in said
    assert f"\npython -m twine upload dist/tdcopier-{stated}-*.whl " in said


def test_the_changelog_has_the_version(release_check):
    assert not [each for each in release_check.missing() if "no section" in each]


def test_the_citation_names_the_version_and_the_date_of_the_changelog(release_check):
    assert not [each for each in release_check.missing() if "CITATION" in each]


def test_all_pairs_were_seen_to_work(release_check):
    assert not [each for each in release_check.missing() if "not seen to work" in each]


def test_no_page_of_the_repository_has_a_dead_link(release_check):
    assert not [each for each in release_check.missing() if "links to" in each]
