"""Runs the stress program, then tests, on a build whose modules have a sanitizer; see the Makefile.

    python run.py thread|address SITE

SITE holds the built package. Python and torch have no sanitizer of their own, so its library is
loaded before them. What stays unseen then: accesses by torch's and Python's own code, except by
what the sanitizer intercepts (memcpy, malloc, free, locks, threads), which it sees everywhere.
The tests run without the search for leaks, which makes each of their many processes take minutes.
What is suppressed, and why, is in tsan.supp and lsan.supp.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIBRARIES = {
    "thread": ["libtsan.so"],
    "address": ["libasan.so", "libubsan.so", "libstdc++.so"],  # the last: asan looks for its throw
}
TESTS = ["threads", "lifetime", "wait_staged", "order", "faults", "bounds", "device_sources"]
FOUND = 66  # the exit code where something was found; pytest would swallow what is printed


def library(name: str) -> str:
    compiler = os.environ.get("CXX", "c++")
    command = [compiler, f"-print-file-name={name}"]
    path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not os.path.isabs(path):
        raise SystemExit(f"{compiler} has no {name}")
    return path


def environment_of(kind: str, site: Path, leaks: bool) -> dict[str, str]:
    log = f"exitcode={FOUND}:log_path={site.with_name('report')}"
    # Python keeps no frame pointers, and a suppressed function may be far up the stack.
    leaking = "detect_leaks=1:fast_unwind_on_malloc=0:malloc_context_size=40"
    return {
        **os.environ,
        "LD_PRELOAD": ":".join(library(name) for name in LIBRARIES[kind]),
        "PYTHONPATH": str(site),
        "PYTHONMALLOC": "malloc",  # else what a Python object refers to is taken for lost
        "OMP_NUM_THREADS": "1",  # how OpenMP waits is not seen
        "CUDA_VISIBLE_DEVICES": "",
        "TDCOPIER_TEST_DEVICE": "sim",
        # A forked child ends by itself, and may start threads.
        "TSAN_OPTIONS": f"{log}:die_after_fork=0:suppressions={HERE / 'tsan.supp'}",
        "ASAN_OPTIONS": f"{log}:{leaking if leaks else 'detect_leaks=0'}",
        "LSAN_OPTIONS": f"suppressions={HERE / 'lsan.supp'}:print_suppressions=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def bare_python(site: Path) -> str:
    """A Python that has this one's packages, but does not look for tdcopier in the source tree.

    An editable installation would come before anything on the path.
    """
    folder = site.with_name("python")
    venv.create(folder, with_pip=False, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (packages / "packages.pth").write_text("\n".join(filter(os.path.isdir, sys.path)) + "\n")
    return str(folder / "bin" / "python")


def main() -> None:
    kind, site = sys.argv[1], Path(sys.argv[2]).resolve()
    python = bare_python(site)
    tests = [str(ROOT / "tests" / f"test_{name}.py") for name in TESTS]
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    for arguments, leaks in (
        ([str(HERE / "stress.py"), "32", "100"], True),
        ([*pytest, "--rootdir", str(ROOT), "-o", "timeout=600", *tests], False),
    ):
        began = time.monotonic()
        environment = environment_of(kind, site, leaks)
        # Not from the root: the package without its native module would be found there.
        ended = subprocess.run([python, *arguments], cwd=site, env=environment, check=False)
        for report in site.parent.glob("report.*"):
            print(report.read_text(), flush=True)
            report.unlink()
        print(f"{kind}: {time.monotonic() - began:.0f} s, exit {ended.returncode}", flush=True)
        if ended.returncode:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
