"""Finds tensors in attributes beside the fields or items of containers, which stay where they are.

`csrc/python/walk/unknown_values.cpp` asks here for `on_unknown`, and `explain` for its notes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tdcopier import _C
from tdcopier._containers import unknown
from tdcopier._containers.visit import level_of


def tensors_beside(data: Any, target: torch.device) -> Iterator[tuple[str, Any]]:
    """Yield the path of each attribute with tensors in it that a copy leaves, and its container.

    Looks into the containers that the walk of a copy takes apart, except TensorDicts, which have
    no such attributes. A walk has ended before: the data contains no cycle.
    """
    left = [("data", data)]
    while left:
        path, value = left.pop()
        if isinstance(value, _C.Parcel):
            value = value.tree()
        level = level_of(value, target)
        if level is None:
            continue
        for name, attribute in level.beside().items():
            if unknown.has_tensors(attribute):
                yield f"{path}.{name}", value
        steps = [(path + form.format(name), child) for form, name, child in level.steps()]
        left += reversed(steps)


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
            "tdcopier.containers.register."
        )
        if not only_warn:
            raise TypeError(
                text.format("they would not be copied")
                + ' With on_unknown="ignore" it is passed through unchanged'
            )
        unknown.warn_once(type(container), text.format("they stay on their device"))
