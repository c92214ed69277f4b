"""Finds tensors in attributes beside the fields or items of containers, which stay where they are.

`csrc/python/walk/unknown_values.cpp` asks here for `on_unknown`, and `explain` for its notes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tdcopier import _C
from tdcopier._containers import unknown
from tdcopier._containers.registry import rule_of
from tdcopier._containers.rule import Rule

_ITEM, _ATTRIBUTE = "[{!r}]", ".{}"


def tensors_beside(data: Any, target: torch.device) -> Iterator[tuple[str, Any]]:
    """Yield the path of each attribute with tensors in it that a copy leaves, and its container.

    Looks into the containers that the walk of a copy takes apart, except TensorDicts, which have
    no such attributes. A walk has ended before: the data contains no cycle.
    """
    left = [("data", data)]
    while left:
        path, value = left.pop()
        flat = _taken_apart(value, target)
        if flat is None:
            continue
        children, names, step, attributes = flat
        for name, attribute in attributes.items():
            if unknown.has_tensors(attribute):
                yield f"{path}.{name}", value
        steps = [path + step.format(name) for name in names]
        left += reversed(list(zip(steps, children, strict=True)))


def _taken_apart(
    value: Any, target: torch.device
) -> tuple[list[Any], list[Any], str, dict[str, Any]] | None:
    """Return children, their names, the form of a step, and the attributes of a container."""
    cls = type(value)
    if cls is list or cls is tuple:
        return list(value), list(range(len(value))), _ITEM, {}
    if cls is dict:
        return list(value.values()), list(value), _ITEM, {}
    if issubclass(cls, torch.Tensor):
        return None
    rule = rule_of(cls)
    if not isinstance(rule, Rule) or rule.wraps or (rule.by_target and not rule.own_to):
        return None
    flat = rule.flatten(value, target, True) if rule.by_target else rule.flatten(value)
    if flat is None:
        return None  # its own `.to` moves it
    children, context, names = flat
    attributes = {} if rule.beside is None else rule.beside(value, context)
    if names is None:
        return children, list(range(len(children))), _ITEM, attributes
    return children, names, _ATTRIBUTE if rule.step is _C.Step.ATTRIBUTE else _ITEM, attributes


def refuse_or_warn(data: Any, target: torch.device, only_warn: bool) -> None:
    """Report such attributes, as `on_unknown` says.

    Raises:
        TypeError: there is one; the message names the path of the first.
    """
    for path, container in tensors_beside(data, target):
        name = unknown.class_name(type(container))
        text = (
            f"{path} has tensors in it, and is an attribute beside the fields or items of the "
            f"{name}: {{}}. Make it a field or an item, or register the class with "
            "tdcopier.register_container."
        )
        if not only_warn:
            raise TypeError(
                text.format("they would not be copied")
                + ' With on_unknown="ignore" it is passed through unchanged'
            )
        unknown.warn_once(type(container), text.format("they stay on their device"))
