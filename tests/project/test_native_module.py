"""The import refuses a native module that is missing or built for another torch, and says why."""

from __future__ import annotations

import json
import runpy
import shutil
import site
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from support import run_python

import tdcopier
from tdcopier import _C

PACKAGE = Path(tdcopier.__file__).parent
MODULE = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
MINOR = ".".join(torch.__version__.split(".")[:2])
BUILD = "run `pip install .` in its source folder"


def imports(versions: list[str], folder: Path | None = None) -> list[str]:
    """Returns what `import tdcopier` says under each version of torch, or "imported".

    Args:
        versions: what torch says of itself, each in a process of its own.
        folder: where to find the package, before an editable installation too.
    """
    printed = run_python(f"""
        import json, os, sys, warnings
        import torch
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks, from Python 3.12 on
        folder = {None if folder is None else str(folder)!r}
        if folder is not None:
            sys.meta_path[:] = [each for each in sys.meta_path if isinstance(each, type)]
            sys.path.insert(0, folder)
        for version in {versions!r}:
            child = os.fork()
            if child == 0:
                torch.__version__, said = version, "imported"
                try:
                    import tdcopier
                except ImportError as error:
                    assert error.name == "tdcopier._C", error.name
                    assert error.__suppress_context__
                    said = str(error)
                print(json.dumps(said), flush=True)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
    """)
    return [json.loads(line) for line in printed.splitlines()]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Returns a folder with the package but without its native modules."""
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "tdcopier", ignore=ignored)
    return tmp_path


def test_a_module_that_is_built_for_another_torch_is_refused_at_import():
    versions = ["2.99.0", f"{MINOR}9.0", "3.0.0a0+git12345", "2.1"]
    assert imports(versions) == [
        f"tdcopier was built for torch {MINOR}, but torch {version} is installed: to build it "
        f"again, {BUILD}"
        for version in versions
    ]


def test_patches_and_builds_of_the_same_minor_version_of_torch_are_taken():
    rests = ["", ".0", ".7+cpu", ".0.dev20261101+cu130", ".0a0+gitabc"]
    assert imports([MINOR + rest for rest in rests]) == ["imported"] * len(rests)


def test_a_module_that_cannot_be_loaded_says_which_torch_it_is_built_for(checkout):
    """Like one that the loader refuses because a name is not in torch's libraries."""
    module = checkout / "tdcopier" / MODULE
    module.write_bytes(b"\0tdcopier is built for torch 1.9\0" + bytes(1000))
    assert imports([torch.__version__], checkout) == [
        f"tdcopier was built for torch 1.9, but torch {torch.__version__} is installed: to build "
        f"it again, {BUILD}"
    ]


def test_a_module_that_cannot_be_loaded_for_another_reason_says_the_reason(checkout):
    module = checkout / "tdcopier" / MODULE
    module.write_bytes(f"tdcopier is built for torch {MINOR}".encode() + bytes(1000))
    [said] = imports([torch.__version__], checkout)
    assert said.startswith(f"tdcopier's native module {module} cannot be loaded: ")
    assert "invalid ELF header" in said


def test_the_file_of_the_module_says_which_torch_it_is_built_for():
    assert f"tdcopier is built for torch {MINOR}".encode() in Path(_C.__file__).read_bytes()


@pytest.mark.parametrize("other", [None, "_C.cpython-39-x86_64-linux-gnu.so"])
def test_a_checkout_without_a_build_says_how_to_build_it(checkout, other):
    folder, only = checkout / "tdcopier", ""
    if other is not None:
        (folder / other).touch()
        only = f" (only {other})"
    assert imports([torch.__version__], checkout) == [
        f"tdcopier has no native module {MODULE} in {folder}{only}: {BUILD}, or start Python in "
        "another folder if tdcopier is installed already"
    ]


def test_the_module_of_a_wheel_that_fits_the_torch_is_taken(checkout):
    for minor in ("1.9", MINOR):
        (checkout / "tdcopier" / f"for_torch_{minor}").mkdir()
    shutil.copy(_C.__file__, checkout / "tdcopier" / f"for_torch_{MINOR}")
    assert imports([torch.__version__], checkout) == ["imported"]


def test_a_wheel_without_a_module_for_the_torch_says_which_ones_it_has(checkout):
    for minor in ("1.10", "1.9"):
        folder = checkout / "tdcopier" / f"for_torch_{minor}"
        folder.mkdir()
        (folder / MODULE).touch()
    assert imports([torch.__version__], checkout) == [
        f"tdcopier was built for torch 1.9, 1.10, but torch {torch.__version__} is installed: "
        f"install one of these, or build tdcopier for this one: {BUILD}"
    ]


def test_a_wheel_for_another_python_says_so(checkout):
    folder = checkout / "tdcopier" / f"for_torch_{MINOR}"
    folder.mkdir()
    (folder / "_C.cpython-39-x86_64-linux-gnu.so").touch()
    [said] = imports([torch.__version__], checkout)
    assert "(only _C.cpython-39-x86_64-linux-gnu.so)" in said


@pytest.mark.parametrize("sees_the_system", [True, False])
def test_a_build_finds_the_torch_that_its_environment_imports(
    tmp_path, monkeypatch, sees_the_system
):
    environment, system = tmp_path / "environment", tmp_path / "system"
    environment.mkdir()
    setting = f"include-system-site-packages = {str(sees_the_system).lower()}"
    (environment / "pyvenv.cfg").write_text(f"home = /usr/bin\n{setting}\n")
    [packages] = site.getsitepackages([str(system)])[:1]
    torch_there = Path(packages) / "torch"
    torch_there.mkdir(parents=True)
    (torch_there / "__init__.py").touch()
    monkeypatch.setenv("VIRTUAL_ENV", str(environment))
    monkeypatch.setattr(sys, "base_prefix", str(system))
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(environment))
    monkeypatch.setattr(site, "getusersitepackages", lambda: str(environment))
    found = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "find_torch.py"))
    assert found["torch_folder"]() == (torch_there if sees_the_system else None)


def test_a_missing_torch_is_named_in_one_sentence(checkout):
    run_python(f"""
        import sys
        sys.modules["torch"] = None  # its import raises ModuleNotFoundError
        sys.meta_path[:] = [each for each in sys.meta_path if isinstance(each, type)]
        sys.path.insert(0, {str(checkout)!r})
        try:
            import tdcopier
        except ImportError as error:
            assert error.__suppress_context__
            assert str(error) == (
                "tdcopier needs torch 2.11 or newer, and there is none: run `pip install torch`"
            ), error
        else:
            raise AssertionError("imported")
    """)
