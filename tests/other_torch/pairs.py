"""Installs wheels as a user does, for each Python and torch, and runs the demo and some tests.

    python pairs.py --dist dist --torch 2.11.0 2.15.0 --python 3.10 3.12 --json pairs.json

Each pair gets torch, the CUDA libraries that it loads, and no compiler on its path; no device is
used. The JSON file gets an entry for each pair, which is printed too.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(Path(__file__).parent)]

import build_wheels  # noqa: E402
from run import TUTORIALS, install, install_cuda_libraries  # noqa: E402

WORK = ROOT / "build" / "pairs"
BESIDE = ["numpy", "tensordict", "typing-extensions", "filelock", "sympy", "networkx", "jinja2"]
BESIDE += ["fsspec", "setuptools"]
TO_TEST = ["pytest", "pytest-timeout", "hypothesis", "ml-dtypes", "h5py", "safetensors", "tqdm"]
TESTS = [  # the rest of the package does not depend on the pair
    "tests/copy/test_oracle.py",
    "tests/promises/test_afterlife.py",
    "tests/copy/test_lifetime.py",
    "tests/copy_into/test_copy_into.py",
    "tests/rows/test_gather.py",
    "tests/tensordict/test_tensordict_walk.py",
]


def environment(minor: str) -> Path:
    """Returns the Python of a fresh environment with all but torch and tdcopier."""
    python = build_wheels.python_in(WORK / f"python-{minor}", minor)
    if python is None:
        raise SystemExit(f"found no Python {minor}")
    pip = [python, "-m", "pip", "install", "-q", "--upgrade", "pip"]
    build_wheels.run(*pip, *(name for name in BESIDE if name != "tensordict"), *TO_TEST)
    install(WORK / f"site-{minor}", "tensordict", "pyvers", "cloudpickle", python=str(python))
    return python


def played(python: Path, path: list[Path], dist: Path) -> dict[str, Any]:
    """Installs the wheel, and returns how long that took and what ended well."""
    folder = python.parents[1]
    told = {**os.environ, "PATH": str(python.parent), "CUDA_VISIBLE_DEVICES": ""}
    told["PYTHONPATH"] = os.pathsep.join(map(str, path))
    pip = [python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--force-reinstall"]
    began = time.monotonic()
    subprocess.run([*pip, "--find-links", dist, "tdcopier"], check=True, env=told)
    found: dict[str, Any] = {"install_s": round(time.monotonic() - began, 1)}

    def ends_well(*program: str, **more: str) -> bool:
        log = folder / "log.txt"
        with log.open("w") as file:
            ended = subprocess.run(
                [python, *program], cwd=folder, env={**told, **more}, stdout=file, stderr=file
            )
        if ended.returncode:
            print(log.read_text()[-3000:])
        return ended.returncode == 0

    found["import"] = ends_well("-W", "error", "-c", "import torch, tdcopier, tdcopier.sim")
    found["demo"] = all(
        ends_well(str(ROOT / "tutorials" / name), *options) for name, *options in TUTORIALS
    )
    options = ["-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    tests = [str(ROOT / test) for test in TESTS]
    found["tests"] = ends_well(
        "-m", "pytest", *options, "--rootdir", str(ROOT), *tests, TDCOPIER_TEST_DEVICE="sim"
    )
    if found["tests"]:
        found["tests"] = (folder / "log.txt").read_text().rstrip().splitlines()[-1]
    return found


def main() -> None:
    """Plays the pairs that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    parser.add_argument("--torch", nargs="+", default=build_wheels.TORCHES)
    parser.add_argument("--python", nargs="+", default=build_wheels.PYTHONS)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()

    pairs = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    WORK.mkdir(parents=True, exist_ok=True)
    pythons = {minor: environment(minor) for minor in arguments.python}
    failed = []
    for version in arguments.torch:
        libraries = WORK / f"cuda-of-{version}"
        for minor, python in pythons.items():
            torch = WORK / f"torch-{version}-python-{minor}"
            try:
                install(torch, f"torch=={version}", python=str(python))
            except subprocess.CalledProcessError:
                print(f"Python {minor}, torch {version}: there is no such torch", flush=True)
                continue
            if not libraries.exists():
                install_cuda_libraries(libraries, torch)
            path = [WORK / f"site-{minor}", torch, libraries]
            found = played(python, path, arguments.dist.resolve())
            found["date"] = datetime.date.today().isoformat()
            pairs[f"Python {minor}, torch {version}"] = found
            print(f"Python {minor}, torch {version}: {found}", flush=True)
            failed += [key for key in ("import", "demo", "tests") if not found[key]]
            arguments.json.write_text(json.dumps(dict(sorted(pairs.items())), indent=1) + "\n")
            shutil.rmtree(torch)
        shutil.rmtree(libraries, ignore_errors=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
