"""What the walk needs to know of a container class, and how a rule refuses a value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

Flat = tuple[list[Any], Any, "list[Any] | None"]
"""Children, what else it takes to put the container together, and the children's names."""


class Refused(TypeError):
    """What is wrong with a container; the walk puts its path in front."""


class Rule(NamedTuple):
    """How values of a class are taken apart and put together again."""

    flatten: Callable[..., Flat | None]
    unflatten: Callable[[list[Any], Any], Any]
    names: Literal["index", "key", "attribute"] = "index"
    """How children are reached, for messages."""
    by_target: bool = False
    """`flatten` takes the target and whether names are wanted too; None leaves it to its `.to`."""
