"""One end of the connection with another process."""

from __future__ import annotations

from tdcopier import _C
from tdcopier._distributed.rendezvous import Found


class Link(_C.Link):
    """The connection with a process, in which threads of its own carry messages."""

    def __init__(
        self,
        found: Found,
        bell: _C.Bell,
        timeout_s: float,
        what: str,
        *,
        receives: bool = False,
        slots: int | None = None,
        pinned: bool = False,
    ) -> None:
        """Begin to send and receive.

        Args:
            found: the connection.
            bell: it rings whenever something has changed.
            timeout_s: the process is lost if nothing has come for so long.
            what: the process is, for messages.
            receives: whether it may send messages.
            slots: messages that may be here, and not be taken; None: a number by their size.
            pinned: whether their memory is.
        """
        super().__init__(
            found.connection,
            bell,
            timeout_s=timeout_s,
            their_timeout_s=found.timeout_s,
            receives=receives,
            slots=slots or 0,
            pinned=pinned,
        )
        self.peer, self._what = found.peer, what

    @property
    def all_have_arrived(self) -> bool:
        """Whether the other end has said that it has all messages. `ask` lets it say so."""
        return self.arrived >= self.sent

    @property
    def why_lost(self) -> str | None:
        """Why the other end is no longer there, in words; None: it is there, or has closed."""
        how = self.lost
        return None if how is None else f"the {self._what}, {self.peer}, {how}"
