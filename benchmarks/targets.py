"""The forms of targets in result files: each says what is wanted and whether it is hit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Target = dict[str, Any]


def none(what: str, found: int) -> Target:
    return {"what": what, "wanted": "0", "found": found, "hit": found == 0}


def at_least(what: str, found: float | str, least: float) -> Target:
    """Return a target for a ratio; an error message instead of the ratio is no hit."""
    if isinstance(found, str):
        return {"what": what, "wanted": f">= {least:g}", "found": found, "hit": False}
    return {
        "what": what,
        "wanted": f">= {least:g}",
        "found": round(found, 2),
        "hit": found >= least,
    }


def at_most(what: str, found: float, most: float, unit: str = "") -> Target:
    return {
        "what": what,
        "wanted": f"<= {most:.10g}{unit and f' {unit}'}",
        "found": round(found, 4),
        "hit": found <= most,
    }


def counts(what: str, found: Mapping[str, Any], memcpys: str, packed: int, most: int) -> Target:
    """Return a target for the counters of our own copy, and for the count from outside.

    Args:
        what: The copy, and the name of the outside count.
        found: The part of a result that has the counts.
        memcpys: The key of the outside count.
        packed: The wanted number of packed leaves.
        most: The largest number of transfers: one per dtype, or one kernel for all.

    """
    stats = found["stats"]
    seen = [stats["packed_leaves"], stats["transfers"], found[memcpys]]
    return {
        "what": what,
        "wanted": f"[{packed}, n, n], n <= {most}",
        "found": seen,
        "hit": seen[0] == packed and 1 <= seen[1] == seen[2] <= most,
    }


def count_wrong(parts: Iterable[Mapping[str, Any]]) -> int:
    """Return the number of wrong results in parts that have them by way."""
    return sum(sum(part["wrong"].values()) for part in parts)
