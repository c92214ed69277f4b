"""Builds engines that each break one promise, and shows that a check detects each of them.

``build()`` makes a test build of the engine, apart from the real one. It holds a broken variant of
each piece of code in ``defects_of_*.py``; the environment variable ``TDCOPIER_DEFECT`` selects
one. The engine's own source knows nothing of this. With `--base`, the program prints where the real
build has the layer without torch, which the C++ tests use, too.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from defects import DEFECTS

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "broken"
SITE = BUILD / "site"

_SWITCH = """
#ifndef TDCOPIER_DEFECT
#define TDCOPIER_DEFECT
#include <cstdlib>
#include <cstring>
#include <optional>
#include <stdexcept>
inline bool tdcopier_defect(const char* name) {{
  const char* const chosen = std::getenv("TDCOPIER_DEFECT");
  return chosen != nullptr && std::strcmp(chosen, name) == 0;
}}
#endif
"""


def _write(path: Path, text: str) -> None:
    """Writes the file only if its text changes: its modification time decides what is compiled."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def broken_sources() -> dict[Path, str]:
    """Returns the files of the test build that differ from the engine's, by path in the tree."""
    changed: dict[Path, str] = {}
    for name, defect in DEFECTS.items():
        path = Path("csrc") / defect.file
        text = changed.get(path) or _SWITCH.format() + (ROOT / path).read_text()
        if text.count(defect.code) != 1:
            raise LookupError(
                f"{path} has {text.count(defect.code)} places for the defect {name!r}, not one: "
                "the code has changed, so tests/support/defects_of_*.py must follow"
            )
        changed[path] = text.replace(
            defect.code, defect.broken.replace("{defect}", f'tdcopier_defect("{name}")')
        )
    return changed


def base_library() -> Path:
    """Returns the layer without torch as the real build has compiled it: no defect is in it."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    found = [*(ROOT / "build").glob(f"{tag}-{tag}-*/csrc/base/libtdcopier_base.a")]
    if len(found) != 1:
        raise SystemExit(f"{len(found)} builds for {tag} are in {ROOT}/build: run `make build`")
    return found[0]


def build() -> None:
    """Makes the test build, or brings it up to date. Requires that the real one is up to date."""
    if any(defect.file.startswith("base/") for defect in DEFECTS.values()):
        raise LookupError("a defect is in csrc/base, which is taken from the real build")
    source = BUILD / "source"
    changed = broken_sources()
    wanted = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "csrc", "cmake", "tdcopier", "tools"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    wanted += ["CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE"]
    for name in wanted:
        path = Path(name)
        if (ROOT / path).exists():
            _write(source / path, changed.get(path) or (ROOT / path).read_text())
    options = ["--no-build-isolation", "--no-deps", "--upgrade", "--target", str(SITE)]
    # Fast to compile and slow to run, and the compiler collects little garbage.
    flags = "-O0 --param=ggc-min-heapsize=1000000"
    options += ["-C", f"cmake.define.CMAKE_CXX_FLAGS_RELEASE={flags}"]
    options += ["-C", "cmake.define.TDCOPIER_SIM=OFF"]
    options += ["-C", f"cmake.define.TDCOPIER_BASE_LIBRARY={base_library()}"]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", *options, str(source)], check=True
    )
    simulation = importlib.util.find_spec("tdcopier._sim")
    assert simulation is not None
    assert simulation.origin is not None
    shutil.copy2(simulation.origin, SITE / "tdcopier")  # the real one: it has no defects


def show(name: str, seeds: int) -> None:
    """Plays the defect's scenario until it fails, and prints how. Needs a process of its own."""
    os.environ["TDCOPIER_PLAY_TIMEOUT_S"] = "1"
    # Use the test build even if an editable install of the real one would be found first.
    sys.meta_path[:] = [f for f in sys.meta_path if "Redirecting" not in type(f).__name__]
    sys.path.insert(0, str(SITE))
    import tdcopier

    assert Path(tdcopier.__file__).is_relative_to(SITE), tdcopier.__file__
    from play_schedules import prepare, run

    from tdcopier import _C, sim

    prepare()
    # Not before: without a schedule, a defect that makes a deadlock hangs.
    _C.testing.settle()
    os.environ["TDCOPIER_DEFECT"] = name
    for seed in range(seeds):
        detector = sim.detect(leaks=True)
        try:
            with sim.poison(), detector:
                run(DEFECTS[name].scenario if name else "two_batches_for_two_streams", seed)
        except BaseException as error:
            told = {
                "seed": seed,
                "error": type(error).__name__,
                "hazards": sorted({hazard.kind for hazard in detector.hazards}),
                "text": " ".join(str(error).split()),
            }
            print(json.dumps(told), flush=True)
            os._exit(0)  # a broken engine may be unable to exit cleanly
    print(json.dumps({"seeds": seeds}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--show"]:
        show(sys.argv[2], seeds=int(sys.argv[3]))
    elif sys.argv[1:] == ["--base"]:
        print(base_library())
    else:
        build()
