"""Says where a value of a state is, and what it is, for errors."""

from __future__ import annotations

from typing import Any, TypeAlias

Place: TypeAlias = "str | tuple[Place, str, Any]"
"""Where a value is: the name of the state, or a place, a format, and what it is given. It becomes
text for an error only: a state has thousands of tensors."""

ITEM, ATTRIBUTE = "[{!r}]", ".{}"


def text_of(place: Place) -> str:
    """Return a place as text."""
    if isinstance(place, str):
        return place
    parent, form, step = place
    return text_of(parent) + form.format(step)


def named(value: Any) -> str:
    """Return the name of the class of a value, with its article, for errors."""
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    name = type(value).__qualname__
    return f"{'an' if name[0] in 'aeiouAEIO' else 'a'} {name}"
