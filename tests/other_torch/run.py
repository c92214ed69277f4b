"""Builds tdcopier for another torch, and runs tutorials and tests with it; see the Makefile.

    python run.py VERSION [TEST...]

PyPI's torch for Linux is a CUDA build, so this shows what happens on a machine without a GPU, such
as a laptop or a CI runner. Everything is kept in build/torch-VERSION: `site` has torch with the
CUDA libraries that it loads (4 GB), `package` has tdcopier. Other packages are those of this
Python. No device is used, on a machine with a GPU either.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests/support"))

from bare_python import bare_python  # noqa: E402

TORCHRL = "torchrl>=0.14.1"
TUTORIALS = (["01_first_copy.py"], ["02_tensordict.py"], ["06_replay_pipeline.py", "--short"])
# Without those of schedules, which test the same engine for hours, and of the benchmarks' suites.
TESTS = [
    "tests/project/test_no_device.py",
    "tests/project/test_native_module.py",
    "tests/project/test_info.py",
    "tests/project/test_doc_examples.py",
    "tests/project/test_recipe_batches.py",
    "tests/project/test_recipe_loops.py",
    "tests/project/test_recipe_states.py",
    "tests/project/test_recipes.py",
    "tests/benchmarks/test_bench_command.py",
    "tests/promises",
    "tests/rows",
    "tests/copy",
    "tests/copy_into",
    "tests/containers",
    "tests/prefetch",
    "tests/tensordict",
    "tests/torchrl",
    "tests/distributed",
    "tests/sim",
]


def install(site: Path, *requirements: str, python: str = sys.executable) -> None:
    """Installs packages into the folder, without what they require."""
    pip = [python, "-m", "pip", "install", "-q", "--no-deps", "--upgrade"]
    subprocess.run([*pip, "--target", str(site), *requirements], check=True)


def install_cuda_libraries(site: Path, torch_in: Path) -> None:
    """Installs the CUDA libraries that the torch in a folder loads, but not the compiler triton."""
    [torch] = metadata.distributions(name="torch", path=[str(torch_in)])
    libraries = [
        required.partition(";")[0].strip()
        for required in torch.requires or []
        if required.startswith(("nvidia-", "cuda-toolkit"))
    ]
    pip = [sys.executable, "-m", "pip", "install", "-q", "--target", str(site)]
    subprocess.run([*pip, *libraries], check=True)


def install_torch(version: str, site: Path) -> None:
    if (site / "torchrl").is_dir():  # the last one below
        return
    install(site, f"torch=={version}")
    install_cuda_libraries(site, site)
    install(site, TORCHRL)


def build(folder: Path, environment: dict[str, str]) -> None:
    """Builds tdcopier for that torch, with a build folder of its own."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-build-isolation", "--no-deps"]
    options = ["-C", f"build-dir={folder}/{{wheel_tag}}", "--upgrade", "--target", "package"]
    subprocess.run([*pip, *options, str(ROOT)], cwd=folder, env=environment, check=True)


def main() -> None:
    version, *tests = sys.argv[1:]
    folder = ROOT / "build" / f"torch-{version}"
    site, package = folder / "site", folder / "package"
    folder.mkdir(parents=True, exist_ok=True)
    install_torch(version, site)
    build(folder, {**os.environ, "PYTHONPATH": str(site)})

    python = bare_python(folder / "python")
    environment = {
        **os.environ,
        "PYTHONPATH": f"{package}{os.pathsep}{site}",
        "CUDA_VISIBLE_DEVICES": "",
        "TDCOPIER_TEST_DEVICE": "sim",
    }
    facts = "import torch; print(torch.__version__, 'CUDA', torch.version.cuda, flush=True)"
    programs = [
        ["-W", "error", "-c", f"{facts}; import tdcopier; print(tdcopier.__file__)"],
        *([str(ROOT / "tutorials" / name), *options] for name, *options in TUTORIALS),
    ]
    processes = ["-n", os.environ.get("TEST_PROCESSES", "1"), "--dist", "worksteal"]
    options = ["-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), *processes]
    chosen = [str(ROOT / test) for test in tests or TESTS]
    programs.append(["-m", "pytest", *options, "--rootdir", str(ROOT), *chosen])
    for program in programs:
        # Not from the root: the package there has no native module.
        ended = subprocess.run([python, *program], cwd=folder, env=environment, check=False)
        if ended.returncode:
            raise SystemExit(f"exit {ended.returncode}: {' '.join(program)}")


if __name__ == "__main__":
    main()
