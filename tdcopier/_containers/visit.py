"""Takes one container apart, for the walks in Python.

The engine walks the batches that it copies. In Python walk `park` and `snapshot`, whose states are
more than containers, and `beside`, which looks for what a container hides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from tdcopier import _C
from tdcopier._containers.registry import rule_of
from tdcopier._containers.rule import Flat, Rule

ITEM, ATTRIBUTE = "[{!r}]", ".{}"
"""The forms of a step to a child, as a user would write it."""


class Level(NamedTuple):
    """The outermost level of a container."""

    children: Sequence[Any]
    names: Sequence[Any]
    """A key, an index, or an attribute's name for each child."""
    form: str
    """Of the step to each child: `ITEM` or `ATTRIBUTE`."""
    rebuild: Callable[[list[Any]], Any]
    """Makes a container of the same class with other children."""
    beside: Callable[[], dict[str, Any]]
    """Returns attributes that are not children, and that `rebuild` carries over as they are."""
    is_plain: bool
    """Whether it is exactly a list, a tuple or a dict."""

    def steps(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield form, name and child of each step."""
        for name, child in zip(self.names, self.children, strict=True):
            yield self.form, name, child


def level_of(value: Any, target: torch.device | None = None) -> Level | None:
    """Take a container apart as a copy to `target` does, or wherever its leaves are.

    Returns:
        The level. None for tensors, collections of tensors, and what is no container or is left to
        its own ``.to``.

    Raises:
        Refused: the container cannot be taken apart.
    """
    cls: Any = type(value)
    if cls is list or cls is tuple:
        return Level(value, range(len(value)), ITEM, cls, dict, is_plain=True)
    if cls is dict:
        names = list(value)
        return Level(
            list(value.values()),
            names,
            ITEM,
            lambda made: dict(zip(names, made, strict=True)),
            dict,
            is_plain=True,
        )
    rule = None if issubclass(cls, torch.Tensor) else rule_of(cls)
    if not isinstance(rule, Rule) or rule.wraps or (rule.by_target and not rule.own_to):
        return None
    flat: Flat | None = rule.flatten(value, target, True) if rule.by_target else rule.flatten(value)
    return None if flat is None else _by_rule(value, rule, flat)


def _by_rule(value: Any, rule: Rule, flat: Flat) -> Level:
    children, context, names = flat
    beside = rule.beside
    by_attribute = names is not None and rule.step is _C.Step.ATTRIBUTE
    return Level(
        children,
        range(len(children)) if names is None else names,
        ATTRIBUTE if by_attribute else ITEM,
        lambda made: rule.unflatten(made, context),
        dict if beside is None else lambda: beside(value, context),
        is_plain=False,
    )
