"""Writes the weights that another process publishes to a module."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from tdcopier._distributed.ends import ChannelClosedError, End, PeerLostError
from tdcopier._distributed.link import Link
from tdcopier._distributed.messages import Arrived
from tdcopier._distributed.rendezvous import Options, join
from tdcopier._distributed.weights import Weights, named
from tdcopier._into import copy_into

_SLOTS = 2
"""Messages that there is memory for."""


class Follower(End):
    """Gets a publisher's weights. Made by `follow`. `with` closes it.

    For example::

        follower = tdcopier.distributed.follow(actor, store=store)
        while follower.update(timeout_s=1) < 1000:
            play(actor)
        follower.close()
    """

    _what = "follower"

    def __init__(self, weights: Weights, options: Options) -> None:
        """Find the publisher."""
        super().__init__(options.peer_timeout_s)
        self._weights, self._names = weights, list[str]()
        pinned = any(tensor.device.type not in ("cpu", "meta") for tensor in self._own().values())
        torch.empty(1, pin_memory=pinned)  # raises here, and not of the publisher
        self._link = Link(
            join(options, "publisher"),
            self._bell,
            self._peer_timeout_s,
            "publisher",
            receives=True,
            slots=_SLOTS,
            pinned=pinned,
        )
        self._arrived: list[Any] = []
        """Messages that were taken, and are not written yet."""
        self._updating = threading.RLock()
        self._version = 0
        self._opened()

    @property
    def peer(self) -> str:
        """The publisher's host, process and rank."""
        return self._link.peer

    @property
    def version(self) -> int:
        """The version that the weights have, or 0 if none was there yet."""
        return self._version

    def update(self, *, timeout_s: float | None = 0.0) -> int:
        """Write the newest version that has come to the weights, and return its number.

        Call it between two steps: nothing else writes them. They are written in place, on their
        device in the order of its current stream.

        Args:
            timeout_s: how long to wait for a version that is newer than the weights'; by default,
                not at all. None: without limit. If none comes, the number is that of before.

        Raises:
            ChannelClosedError: the publisher has closed, and all that it has sent is written.
            PeerLostError: the publisher has ended, or does not answer; the weights stay as they
                are.
            ValueError: its weights have other names, shapes or dtypes, or a message cannot be read;
                the weights stay as they are.
        """
        self._check_process()
        self._wait(self._has_news, timeout_s)
        with self._updating:
            while not self._is_closed and (self._arrived or self._link.take_into(self._arrived)):
                self._version = self._write(Arrived(*self._arrived[0]))
                self._arrived.clear()  # if one of these raises, the next call repeats it
        return self._version

    def close(self, *, timeout_s: float | None = None) -> None:
        """Follow no more. The weights stay as they are. May be repeated.

        Args:
            timeout_s: how long to wait for the publisher; None: until it has answered, or is lost.

        Raises:
            TimeoutError: the publisher has not answered in time.
        """
        if self._is_forked():  # it has no end of it
            return
        self._is_closed = True
        self._link.close()
        self._bell.ring()  # a call of another thread that waits ends
        if not self._wait(lambda: self._link.has_ended, timeout_s):
            raise TimeoutError(f"the publisher, {self.peer}, has not answered in {timeout_s:g} s")
        self._end()

    def _state(self) -> str:
        state = "closed" if self._is_closed else "lost" if self._link.lost is not None else "open"
        return f"of {self.peer}, {state}, version {self._version}"

    # ---- versions --------------------------------------------------------------------------------

    def _has_news(self) -> bool:
        if self._is_closed:
            raise ChannelClosedError("this follower is closed")
        if self._arrived or self._link.waiting:
            return True
        if self._link.peer_closes:
            raise ChannelClosedError(f"the publisher, {self.peer}, has closed")
        if (lost := self._link.why_lost) is not None:
            raise PeerLostError(lost)
        return False

    def _write(self, message: Arrived) -> int:
        """Write the weights that a message has, and return its version."""
        try:
            tree: Any = message.parcel(allow_pickle=False).tree()
            version, *places = map(int, tree["index"].tolist())
            targets = self._targets(tree["names"], version, places, tree["values"])
        except ValueError as error:
            raise ValueError(f"weights of {self.peer}: {error}") from None
        with torch.no_grad():
            copy_into(tree["values"], targets)
        return version

    def _own(self) -> dict[str, torch.Tensor]:
        return named(self._weights)

    def _targets(
        self,
        names: list[str] | None,
        version: int,
        places: Sequence[int],
        values: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Return where the values go, of a message with all weights or with a part of them."""
        own = self._own()
        if names is not None:
            if missing := sorted(set(own) ^ set(names)):
                raise ValueError(f"only one of the two has {', '.join(missing[:5])}")
            self._names = names
        elif version != self._version + 1:
            raise ValueError(f"version {version} has only what has changed since the one before")
        found = [self._names[place] for place in places]
        for name, value in zip(found, values, strict=True):
            if (own[name].shape, own[name].dtype) != (value.shape, value.dtype):
                theirs, mine = (f"{t.dtype} {list(t.shape)}" for t in (value, own[name]))
                raise ValueError(f"{name} is {theirs} there, and {mine} here")
        return [own[name] for name in found]

    def _all_links(self) -> Sequence[Link]:
        return [self._link]
