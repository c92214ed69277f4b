"""The base class of the simulation's controls, which last until they are ended."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


class Scope:
    """A setting that lasts until :meth:`_end_once` or the end of a ``with``."""

    def __init__(self) -> None:
        """Begin the scope; the subclass has already made the setting that :meth:`_end` undoes."""
        self._lock = threading.Lock()
        self._lasts = True

    def _end(self) -> None:
        raise NotImplementedError

    def _end_once(self) -> None:
        with self._lock:
            if self._lasts:
                self._lasts = False
                self._end()

    def __repr__(self) -> str:
        """Return the class, and whether it lasts."""
        return f"<tdcopier.sim.{type(self).__name__}: {'active' if self._lasts else 'ended'}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end_once()
