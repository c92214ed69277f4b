"""Messages between the clients of a replay buffer and its server.

Each is a dict: tensors, and numbers and strings, which parcels carry without a pickle.
"""

from __future__ import annotations

import builtins
import enum
import io
import pickle
from typing import Any, NamedTuple

import torch


class Kind(enum.IntEnum):
    """What a client asks for."""

    HELLO = 0
    EXTEND = 1
    ADD = 2
    SAMPLE = 3
    UPDATE_PRIORITY = 4
    UPDATE_TENSORDICT_PRIORITY = 5
    STATS = 6
    STATE_DICT = 7
    LOAD_STATE_DICT = 8
    BYE = 9


_KINDS = {int(kind): kind for kind in Kind}
OVER, FAILED = -1, -2
"""In place of numbers: the server has closed, and none takes its place; a request has failed that
has no answer otherwise."""
UNANSWERED = (Kind.UPDATE_PRIORITY, Kind.UPDATE_TENSORDICT_PRIORITY, Kind.BYE)
"""Requests that have no answer."""


class Request(NamedTuple):
    """A message to the server."""

    kind: Kind
    client: str
    """A word that the client has chosen, and keeps."""
    attempt: int
    """Of this client, to connect to a server."""
    number: int = 0
    """Of this client's requests. One that is sent again has the same."""
    answered: int = 0
    """All requests with a smaller number have been answered."""
    value: Any = None

    def message(self) -> dict[str, Any]:
        """Return it as a tree."""
        return {**self._asdict(), "kind": int(self.kind)}

    @classmethod
    def read(cls, message: Any) -> Request:
        """Read it from a tree that has come.

        Raises:
            ValueError: it is none.
        """
        if not isinstance(message, dict) or message.keys() != set(cls._fields):
            raise ValueError("a message came that is no request to a replay server")
        found = cls(**message)
        numbers = (found.kind, found.attempt, found.number, found.answered)
        is_right = all(type(each) is int for each in numbers) and found.kind in _KINDS
        if not is_right or not isinstance(found.client, str):
            raise ValueError("a request to a replay server is damaged")
        return found._replace(kind=_KINDS[int(found.kind)])


class Answer(NamedTuple):
    """A message to a client."""

    number: int
    """Of its request, or `OVER` or `FAILED`."""
    value: Any = None
    error: str = ""
    """The name of a builtin class; empty: there is none, and the value is the result."""
    text: str = ""

    def message(self) -> dict[str, Any]:
        """Return it as a tree."""
        return self._asdict()

    @classmethod
    def of_error(cls, number: int, error: BaseException) -> Answer:
        """Return an answer that raises an error at the client."""
        try:
            text = str(error) or type(error).__name__
        except Exception:
            text = f"{type(error).__name__}, whose text cannot be had"
        text = text.encode("utf-8", "backslashreplace").decode()  # else it would need a pickle
        return cls(number, error=_nearest_builtin(error), text=text)

    def result(self) -> Any:
        """Return the value, or raise the error."""
        if not self.error:
            return self.value
        raise _error_of(self.error, f"the replay server: {self.text}")


_VALUE = "data['value']"
"""Where a message has what a caller gave."""
_PARTS = {
    Kind.EXTEND: {"[0]": "data"},
    Kind.ADD: {"[0]": "data"},
    Kind.UPDATE_PRIORITY: {"[0]": "index", "[1]": "priority"},
}
"""By kind, the callers' names for parts of it."""


def name_as_given(error: Exception, kind: Kind | None) -> None:
    """Let an error of a message begin with the path of a value as the caller of a method knows it.

    Args:
        error: for example ``data['value'][0]['boxes'] cannot be pickled``.
        kind: of the request; None: the message is an answer.
    """
    text = str(error)
    if not text.startswith(_VALUE):
        return
    rest, name = text[len(_VALUE) :], "the answer" if kind is None else "data"
    parts = {} if kind is None else _PARTS.get(kind, {})
    for part, its_name in parts.items():
        if rest.startswith(part):
            error.args = (its_name + rest[len(part) :],)
            return
    error.args = (name + rest,)


def _nearest_builtin(error: BaseException) -> str:
    """Return the name of its first base that is a builtin exception."""
    for cls in type(error).__mro__:
        if cls.__module__ == "builtins" and issubclass(cls, Exception):
            return cls.__name__
    return "RuntimeError"


def _error_of(name: str, text: str) -> Exception:
    cls = getattr(builtins, name, None)
    if isinstance(cls, type) and issubclass(cls, Exception):
        try:
            return cls(text)
        except TypeError:  # one that is not made of a text alone
            return RuntimeError(text)
    return RuntimeError(text)


# ---- states --------------------------------------------------------------------------------------


def bytes_of_state(state: dict[str, Any]) -> torch.Tensor:
    """Return a state as `torch.save` writes it: containers keep their classes."""
    file = io.BytesIO()
    torch.save(state, file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def state_of_bytes(memory: torch.Tensor, *, allow_pickle: bool) -> dict[str, Any]:
    """Read a state.

    Raises:
        ValueError: these bytes are none, or need a pickle that is not allowed.
    """
    file = io.BytesIO(memory.numpy().data)
    try:
        state: dict[str, Any] = torch.load(file, weights_only=not allow_pickle)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"the state cannot be read: {error}") from None
    return state
