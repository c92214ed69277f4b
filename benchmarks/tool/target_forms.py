"""The forms of targets in result files: each says what is wanted and whether it is hit.

The pass marks are constants of each benchmark's own module, for example `WANTED` in
copies/trees.py and rows/replay.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Target = dict[str, Any]


def _target(what: str, wanted: str, found: Any, hit: bool) -> Target:
    return {"what": what, "wanted": wanted, "found": found, "hit": hit}


def none(what: str, found: int) -> Target:
    return _target(what, "0", found, found == 0)


def at_least(what: str, found: float | str, least: float) -> Target:
    """Return a target for a ratio; an error message instead of the ratio is no hit."""
    wanted = f">= {least:g}"
    if isinstance(found, str):
        return _target(what, wanted, found, False)
    return _target(what, wanted, round(found, 2), found >= least)


def at_most(what: str, found: float, most: float, unit: str = "") -> Target:
    wanted = f"<= {most:.10g}{unit and f' {unit}'}"
    return _target(what, wanted, round(found, 4), found <= most)


def counts(what: str, found: Mapping[str, Any], packed: int, most: int) -> Target:
    """Return a target for the counters of our own copy, and for the count from outside.

    ``packed`` leaves are wanted, and at
    most ``most`` transfers: one per dtype, or one kernel for all.
    """
    stats = found["stats"]
    seen = [stats["packed_leaves"], stats["transfers"], found["memcpys"]]
    hit = seen[0] == packed and 1 <= seen[1] == seen[2] <= most
    return _target(what, f"[{packed}, n, n], n <= {most}", seen, hit)


def count_wrong(parts: Iterable[Mapping[str, Any]]) -> int:
    """Return the number of wrong results in parts that have them by way."""
    return sum(sum(part["wrong"].values()) for part in parts)
