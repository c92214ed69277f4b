"""Remembers what clients have written, so that a request that is sent again is not done again."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

_MOST_CLIENTS = 1024
"""That are remembered; those that have asked last."""


class Written:
    """Results by client and number, until the client has them."""

    def __init__(self) -> None:
        self._results: OrderedDict[str, dict[int, Any]] = OrderedDict()
        self.repeats = 0
        """Requests that had been done already."""

    def forget(self, client: str, answered: int) -> None:
        """Forget the requests of a client that were answered: those with a smaller number."""
        results = self._results.get(client, {})
        for number in [each for each in results if each < answered]:
            del results[number]

    def note(self, client: str, number: int, result: Any) -> None:
        """Remember a result."""
        self._results.setdefault(client, {})[number] = result
        self._results.move_to_end(client)
        while len(self._results) > _MOST_CLIENTS:
            self._results.popitem(last=False)

    def has(self, client: str, number: int) -> bool:
        """Return whether a request was done."""
        return number in self._results.get(client, {})

    def again(self, client: str, number: int) -> Any:
        """Return the result of a request that was done."""
        self.repeats += 1
        return self._results[client][number]

    def end(self, client: str) -> None:
        """Forget a client that asks for nothing any more."""
        self._results.pop(client, None)

    def state_dict(self) -> dict[str, Any]:
        """Return what is remembered."""
        return {client: dict(results) for client, results in self._results.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Remember that instead."""
        self._results = OrderedDict((client, dict(results)) for client, results in state.items())
