"""An end that other processes join, each with a link of its own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from tdcopier._distributed.ends import End
from tdcopier._distributed.link import Link
from tdcopier._distributed.rendezvous import MOST_PROBLEMS, Listener


class Hub(End):
    """An end that listens. What it is made of sets `_listener`."""

    _listener: Listener

    def __init__(self, peer_timeout_s: float) -> None:
        super().__init__(peer_timeout_s)
        self._lock = threading.RLock()
        """Of the links."""
        self._links: list[Link] = []
        """Of the processes that have joined."""
        self._closed_peers = self._lost_peers = 0
        self._lost: deque[str] = deque(maxlen=MOST_PROBLEMS)

    @property
    def peers(self) -> list[str]:
        """Host, process and rank of each process that has joined."""
        self._check_process()
        return [link.peer for link in self._open_links()]

    @property
    def problems(self) -> list[str]:
        """The last reasons, in words, why processes were lost or could not join."""
        self._check_process()
        self._open_links()
        with self._lock:
            return [*self._lost, *self._listener.failures]

    def _all_links(self) -> Sequence[Link]:
        with self._lock:
            return list(self._links)

    def _open_links(self) -> Sequence[Link]:
        """Remove the links that have ended, and of which nothing is left; return the others."""
        with self._lock:
            for link in [each for each in self._links if each.has_ended]:
                if self._is_left(link):
                    continue
                self._links.remove(link)
                self._note_removed(link)
                link.abandon()
                if (lost := link.why_lost) is None:
                    self._closed_peers += 1
                else:
                    self._lost_peers += 1
                    self._lost.append(lost)
            return [link for link in self._links if not link.has_ended]

    def _is_left(self, link: Link) -> bool:
        """Return whether a link that has ended is still needed."""
        return False

    def _note_removed(self, link: Link) -> None:
        """Do what is due when a link is removed."""

    def _is_alone(self) -> bool:
        return not self._open_links()
