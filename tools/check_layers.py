"""Check that no C++ file includes a header of a layer above its own.

The build sees to the outer layers: torch's and Python's headers are not on the path of those that
must not know them. This check is for the groups within the engine too.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

LAYERS = (
    "base",
    "kernels",
    "engine/device",
    "engine/leaves",
    "engine/moves",
    "engine/jobs",
    "python/runtime",
    "python/walk",
    "python/handle",
    "python/calls",
    "python",
)
"""From the lowest to the highest. The simulated device, ``sim``, stands beside the engine."""
SIM_MAY_SEE = {"base", "sim"}


def layer_of(path: str) -> str:
    """Return the layer of a file or header, by its path under ``csrc``."""
    folder = path.rpartition("/")[0]
    if folder not in (*LAYERS, "sim"):
        raise SystemExit(f"csrc/{path} is in no layer of tools/check_layers.py")
    return folder


def main() -> int:
    """Check all files under ``csrc``."""
    root = Path(__file__).resolve().parents[1] / "csrc"
    wrong = 0
    for file in sorted(root.rglob("*")):
        if file.suffix not in (".h", ".cpp"):
            continue
        path = str(file.relative_to(root))
        own = layer_of(path)
        for included in re.findall(r'^#include "([^"]+)"', file.read_text(), re.MULTILINE):
            other = layer_of(included)
            if own == "sim" or other == "sim":
                allowed = own == "sim" and other in SIM_MAY_SEE
            else:
                allowed = LAYERS.index(other) <= LAYERS.index(own)
            if not allowed:
                print(f"csrc/{path}: {own} must not include {included}")
                wrong += 1
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
