"""Runs the stress program, then tests, on a build with a sanitizer; see the Makefile.

    python run.py thread|address SITE [PROGRAM ARGUMENT ...]

SITE contains the built package. Python and torch are built without a sanitizer, so its library is
preloaded. It therefore does not see memory accesses of torch's and Python's own code, except in
functions that the sanitizer intercepts everywhere (memcpy, malloc, free, locks, threads).
The tests run without leak checks, which would make each of their many processes take minutes; so
does a program of yours, in the place of both, for example `tests/support/play_parcels.py`, in which
an allocation of more than `MOST_ALLOCATED_MB` is a finding, too.
The suppressions and their reasons are in tsan.supp and lsan.supp.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.append(str(ROOT / "tests/support"))

from bare_python import bare_python  # noqa: E402

LIBRARIES = {
    "thread": ["libtsan.so"],
    "address": ["libasan.so", "libubsan.so", "libstdc++.so"],  # last: asan looks up its throw
}
TESTS = [
    *(f"copy/test_{name}.py" for name in ("threads", "lifetime", "wait_staged", "faults")),
    *(f"copy/test_{name}.py" for name in ("bounds", "device_sources", "pin_memory", "prepared")),
    *(
        f"copy/test_{name}.py"
        for name in ("pinned_memory_changes", "small_pinned_leaves", "pinned_pool")
    ),
    *(f"containers/test_{name}.py" for name in ("parcels", "foreign_parcels", "random_parcels")),
    *(f"distributed/test_{name}.py" for name in ("channels", "channel_ends", "weights")),
    "promises",
    "rows",
    "park",
]
MOST_ALLOCATED_MB = 8
FOUND = 66  # the exit code for a finding; pytest would swallow the output


def library(name: str) -> str:
    compiler = os.environ.get("CXX", "c++")
    command = [compiler, f"-print-file-name={name}"]
    path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not os.path.isabs(path):
        raise SystemExit(f"{compiler} has no {name}")
    return path


# Python has no frame pointers, and a suppressed function may be far up the stack.
WITH_LEAKS = "detect_leaks=1:fast_unwind_on_malloc=0:malloc_context_size=40"
WITHOUT_LEAKS = "detect_leaks=0"
# In tests that limit the memory, malloc returns null, as without a sanitizer. Operator new still
# ends the process.
MAY_FAIL = "allocator_may_return_null=1"
OF_TESTS = f"{WITHOUT_LEAKS}:{MAY_FAIL}"


def environment_of(kind: str, site: Path, asan: str) -> dict[str, str]:
    log = f"exitcode={FOUND}:log_path={site.with_name('report')}"
    return {
        **os.environ,
        "LD_PRELOAD": ":".join(library(name) for name in LIBRARIES[kind]),
        "PYTHONPATH": str(site),
        "PYTHONMALLOC": "malloc",  # otherwise memory that Python objects refer to counts as leaked
        "OMP_NUM_THREADS": "1",  # OpenMP's waits are invisible
        "CUDA_VISIBLE_DEVICES": "",
        "TDCOPIER_TEST_DEVICE": "sim",
        "TDCOPIER_TEST_LONGEST_S": "600",  # interrupts at hundreds of places take minutes
        # A forked child ends by itself, and may start threads.
        "TSAN_OPTIONS": f"{log}:{MAY_FAIL}:die_after_fork=0:suppressions={HERE / 'tsan.supp'}",
        "ASAN_OPTIONS": f"{log}:{asan}",
        "LSAN_OPTIONS": f"suppressions={HERE / 'lsan.supp'}:print_suppressions=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def main() -> None:
    kind, site = sys.argv[1], Path(sys.argv[2]).resolve()
    python = bare_python(site.with_name("python"))
    tests = [str(ROOT / "tests" / name) for name in TESTS]
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    pytest.append(f"--ignore-glob={ROOT}/tests/*/test_checking_*")  # they race on purpose
    if kind == "thread":  # in a forked child it takes threads for the parent's, or waits for ever
        pytest.append("-knot fork")
    runs = [
        ([str(HERE / "stress.py"), "32", "100"], WITH_LEAKS),
        ([*pytest, "--rootdir", str(ROOT), "-o", "timeout=600", *tests], OF_TESTS),
    ]
    if sys.argv[3:]:
        asan = f"{WITHOUT_LEAKS}:max_allocation_size_mb={MOST_ALLOCATED_MB}"
        runs = [([str(Path(sys.argv[3]).resolve()), *sys.argv[4:]], asan)]
    for arguments, asan in runs:
        began = time.monotonic()
        environment = environment_of(kind, site, asan)
        # Not from the root: the package there has no native module.
        ended = subprocess.run([python, *arguments], cwd=site, env=environment, check=False)
        for report in site.parent.glob("report.*"):
            print(report.read_text(), flush=True)
            report.unlink()
        print(f"{kind}: {time.monotonic() - began:.0f} s, exit {ended.returncode}", flush=True)
        if ended.returncode:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
