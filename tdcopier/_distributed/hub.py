"""An end that other processes join, each with a link of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tdcopier._distributed.ends import End
from tdcopier._distributed.link import Link
from tdcopier._distributed.rendezvous import Listener


class Hub(End):
    """An end that listens. What it is made of sets `_listener`."""

    _listener: Listener

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self._links: list[Any] = []
        """Of the processes that have joined, of a class of each hub."""
        self._closed_peers = 0
        self._lost: list[str] = []

    @property
    def peers(self) -> list[str]:
        """The processes that have joined: host, process and rank."""
        self._check_process()
        with self._lock:
            return [link.peer for link in self._links]

    @property
    def problems(self) -> list[str]:
        """Why processes were lost, or could not join, in words."""
        self._check_process()
        with self._lock:
            return [*self._lost, *self._listener.failures]

    def _all_links(self) -> Sequence[Link]:
        return list(self._links)

    def _is_alone(self) -> bool:
        self._turn()
        return not self._links

    def _removed(self, link: Link) -> bool:
        """Remove a link that has ended, and count it."""
        if not self._has_ended(link):
            return False
        self._links.remove(link)
        if link.lost is None:
            self._closed_peers += 1
        else:
            self._lost.append(link.lost)
        return True
