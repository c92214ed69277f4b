"""Says where a value of a state is, and what it is, for errors."""

from __future__ import annotations

from typing import Any, TypeAlias

Place: TypeAlias = "str | tuple[Place, str, Any]"
"""Where a value is: the name of the state, or a place, a format, and what it is given. It becomes
text for an error only: a state has thousands of tensors."""

# No expression that a user would write leads there, so words do. The step is a name for the value.
CAPTURED = "the variable {} that the function {of} captured"
BOUND_TO = "the object that the method {of} is bound to"


class Depth:
    """Counts the containers that a walk is in, and refuses more than the engine's walks do."""

    MOST = 1000

    def __init__(self) -> None:
        """Start outside of the state."""
        self._depth = 0

    def __enter__(self) -> None:
        """Enter a container, or raise a RecursionError."""
        if self._depth == self.MOST:
            raise RecursionError
        self._depth += 1

    def __exit__(self, cls: type[BaseException] | None, error: Any, trace: Any) -> None:
        """Leave it; the outermost one says what is wrong, also if the interpreter has refused."""
        self._depth -= 1
        if self._depth == 0 and cls is RecursionError:
            raise RecursionError("the state is nested too deep: does it contain itself?") from error


def text_of(place: Place) -> str:
    """Return a place as text: `state['x'].model`, or in words where it is reached in no such way.

    What is below a place in words is `model.weight (model is the variable model that ...)`.
    """
    path, name, words = _parts_of(place)
    if not words:
        return path
    return words if path == name else f"{path} ({name} is {words})"


def _parts_of(place: Place) -> tuple[str, str, str]:
    """Return a path, the name that it begins with, and what this is in words, or ""."""
    if isinstance(place, str):
        return place, place, ""
    parent, form, step = place
    if "{of}" in form:
        return str(step), str(step), form.format(step, of=text_of(parent))
    path, name, words = _parts_of(parent)
    return path + form.format(step), name, words


def named(value: Any) -> str:
    """Return the name of the class of a value, with its article, for errors."""
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    name = type(value).__qualname__
    return f"{'an' if name[0] in 'aeiouAEIO' else 'a'} {name}"
