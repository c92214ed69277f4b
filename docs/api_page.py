"""A Sphinx extension for the API page: it shows how to make only the objects that callers make."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

MADE_BY_CALLERS = {
    "tdcopier.CopyOptions",
    "tdcopier.checkpoint.SnapshotStager",
    "tdcopier.replay.ReplayClient",
    "tdcopier.replay.ReplayServer",
    "tdcopier.replay.ShardedReplayClient",
}
"""Classes. Functions make the objects of all others."""
_FIELD = type(namedtuple("_Any", "field").field)


def setup(app: Any) -> dict[str, bool]:
    """Register the changes."""
    # Of constructors whose docstrings are not shown, the list of types would have the arguments.
    app.config.autodoc_typehints_description_target = "documented_params"
    app.connect("autodoc-process-signature", _hide_signature)
    app.connect("autodoc-skip-member", _skip_field)
    return {"parallel_read_safe": True}


def _hide_signature(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: str
) -> tuple[str, str] | None:
    """Show no signature of a class whose objects a function makes."""
    if what not in ("class", "exception") or name in MADE_BY_CALLERS or not signature:
        return None
    return "", ""


def _skip_field(app: Any, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Leave out fields of named tuples: the docstring of the class describes them."""
    return True if isinstance(obj, _FIELD) else None
