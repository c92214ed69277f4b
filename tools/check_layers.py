"""Check that each C++ file includes only what its layer may know, and has nothing that it lacks.

The build sees to the outer layers: torch's and Python's headers are not on the path of those that
must not know them. This check is for the groups within the engine and the Python side too, for what
each folder promises not to have, and for names of Python code, which only the hooks know.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

LAYERS = (
    "base",
    "kernels",
    "engine/device",
    "engine/leaves",
    "engine/moves",
    "engine/jobs",
    "engine/channels",
    "python/runtime",
    "python/walk",
    "python/handle",
    "python/calls",
    "python",
)
"""From the lowest to the highest. The simulated device, ``sim``, stands beside the engine."""
SIM_MAY_SEE = {"base", "sim"}

LACKS = {
    "base": ("torch, and no Python", r"\b(at|c10|torch|py)::|\bPy[A-Z_]"),
    "engine": ("Python", r"\bpy::|\bPy[A-Z_]"),
    "engine/leaves": ("events: leaves are described, nothing is enqueued", r"\bEventRef\b"),
    "engine/moves": ("events: jobs make the order of streams", r"\bEventRef\b"),
    "engine/channels": ("leaves and jobs: a message is bytes", r"\bLeaf|Job\b|\bat::Tensor\b"),
    "engine/jobs": ("tensors, which Python may see: jobs run without the GIL", r"\bat::Tensor\b"),
    "python": ("names of Python code: hooks.h has what is called", r'"tdcopier\._(?!testing)'),
    "python/runtime": ("trees", r"\bTreeSpec\b"),
    "python/walk": ("jobs: a walk starts nothing", r"_shared<\w*Job\b|->run\("),
    "python/handle": ("new jobs: calls make them", r"make_shared<\w*Job\b"),
}
"""By folder, and for those within it: what its code does not have, and how that would look."""


def layer_of(path: str) -> str:
    """Return the layer of a file or header, by its path under ``csrc``."""
    folder = path.rpartition("/")[0]
    if folder not in (*LAYERS, "sim"):
        raise SystemExit(f"csrc/{path} is in no layer of tools/check_layers.py")
    return folder


def may_see(own: str, other: str) -> bool:
    """Return whether a file of a layer may include a header of another one, or of its own."""
    if own == "sim" or other == "sim":
        return own == "sim" and other in SIM_MAY_SEE
    return LAYERS.index(other) <= LAYERS.index(own)


def code_of(text: str) -> Iterator[tuple[int, str]]:
    """Yield the number and the code of each line, without comments."""
    for number, line in enumerate(text.splitlines(), 1):
        yield number, line.partition("//")[0]


def main() -> int:
    """Check all files under ``csrc``, and print how its folders know each other."""
    root = Path(__file__).resolve().parents[1] / "csrc"
    wrong = 0
    arrows: set[tuple[str, str]] = set()
    for file in sorted(root.rglob("*")):
        if file.suffix not in (".h", ".cpp"):
            continue
        path = str(file.relative_to(root))
        own = layer_of(path)
        text = file.read_text()
        for included in re.findall(r'^#include "([^"]+)"', text, re.MULTILINE):
            other = layer_of(included)
            arrows.add((own, other))
            if not may_see(own, other):
                print(f"csrc/{path}: {own} must not include {included}")
                wrong += 1
        lacking = [LACKS[each] for each in LACKS if f"{own}/".startswith(f"{each}/")]
        for number, code in code_of(text):
            for what, pattern in lacking:
                if re.search(pattern, code):
                    print(f"csrc/{path}:{number}: {own} has no {what}")
                    wrong += 1
    between = sorted((own, other) for own, other in arrows if own != other)
    back = sum(not may_see(own, other) for own, other in between)
    print(f"csrc: {len(LAYERS)} layers and sim, {len(between)} arrows, {back} back up")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
