"""Sends a module's weights to the processes that follow it, each by a connection of its own."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch

from tdcopier._copy import start_copy
from tdcopier._distributed.ends import ChannelClosedError, Deadline
from tdcopier._distributed.hub import Hub
from tdcopier._distributed.link import Link
from tdcopier._distributed.messages import Packer
from tdcopier._distributed.rendezvous import Found, Listener, Options
from tdcopier._distributed.weights import Weights, batch_of, bits_of, bytes_of, named
from tdcopier._into import copy_into
from tdcopier._pack import Parcel, pack

_MESSAGES = 4
"""Whose memory is kept."""
_MOST_OF_PART = 0.5
"""Share of the bytes that a message may have which is not all weights."""


class PublisherStats(NamedTuple):
    """Counts of one publisher.

    For example::

        weights = tdcopier.distributed.publish(model, store=store)
        if weights.stats.lost_peers:
            restart_actors()

    Attributes:
        messages: To all followers together.
        nbytes: Of their parcels.
        parts: Messages that had the changed weights alone.
        open_peers: Followers now.
        closed_peers: Followers that have closed their end.
        lost_peers: Followers that have ended without it, or did not answer.
    """

    messages: int
    nbytes: int
    parts: int
    open_peers: int
    closed_peers: int
    lost_peers: int


class _Follower(Link):
    """The link with a follower, and which version it has been sent."""

    version = 0


class Publisher(Hub):
    """Sends weights to processes that follow. Made by `publish`. `with` closes it.

    For example::

        with tdcopier.distributed.publish(model, store=store) as publisher:
            for batch in batches:
                learn(batch)
                print(f"version {publisher.publish()}")
    """

    _what = "publisher"

    def __init__(self, weights: Weights, options: Options) -> None:
        """Begin to listen for followers, and publish the first version."""
        super().__init__(options.peer_timeout_s)
        self._weights = weights
        self._publishing = threading.Lock()
        self._packer = Packer(_MESSAGES)
        self._whole = pack([])
        """The last version, and its tree, whose tensors are views of it."""
        self._tree: Any = None
        self._layout: list[Any] = []
        self._is_ready = False
        """The whole message may be sent: nothing writes it."""
        self._version = self._messages = self._nbytes = self._parts = 0
        self.publish()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="tdcopier-weights", daemon=True)
        self._listener = Listener(options, self._meet, self._what)
        self._thread.start()
        self._opened()

    @property
    def version(self) -> int:
        """The number of the last version, from 1."""
        return self._version

    @property
    def stats(self) -> PublisherStats:
        """Counts since it was made."""
        self._check_process()
        with self._lock:
            open_peers = len(self._open_links())
            counts = (self._messages, self._nbytes, self._parts)
            return PublisherStats(*counts, open_peers, self._closed_peers, self._lost_peers)

    def publish(self) -> int:
        """Copy the weights, start to send those that have changed, and return the new version.

        The weights may be changed as soon as the call returns. A follower that has not read the
        messages before gets all weights when it has; no call waits for it. One that dies or stops
        while a message is half sent can hold one call for `peer_timeout_s`. If neither a value nor
        a name has changed, there is no new version.

        Raises:
            ChannelClosedError: it is closed.
        """
        self._check_process()
        with self._publishing:
            if self._is_closed:
                raise ChannelClosedError("this publisher is closed")
            weights = named(self._weights)  # a parameter may have been replaced
            with torch.inference_mode(False):  # the messages are used in other modes too
                tensors = [each.detach().resolve_conj().resolve_neg() for each in weights.values()]
                if any(not tensor.is_cpu for tensor in tensors):
                    tensors = start_copy(tensors, "cpu").wait()
                layout = [
                    (name, t.dtype, t.shape) for name, t in zip(weights, tensors, strict=True)
                ]
                changed = self._changed(layout, tensors)
                if changed or not self._version:
                    self._take(changed, layout, tensors)
            return self._version

    def close(self, *, timeout_s: float | None = None) -> None:
        """Tell the followers that no version follows. May be repeated.

        Followers that read on get the last version before. Those that do not are waited for as long
        as for one that does not answer.

        Args:
            timeout_s: how long to wait; None: until each follower has answered, or is lost.

        Raises:
            TimeoutError: a follower has not answered in time.
        """
        if self._is_forked():  # it has no end of it
            return
        deadline = Deadline(timeout_s)
        self._listener.close(timeout_s)
        with self._publishing:
            self._is_closed = True
        left_s = deadline.left_s
        most_s = self._peer_timeout_s
        self._wait(self._all_are_told, most_s if left_s is None else min(left_s, most_s))
        with self._lock:
            for link in self._links:
                link.close()
        if not self._wait(self._is_alone, deadline.left_s):
            raise TimeoutError(f"a follower has not answered in {timeout_s:g} s")
        self._end()

    def _end(self) -> None:
        self._stopped = True
        self._bell.ring()
        self._thread.join()
        super()._end()

    def _state(self) -> str:
        state = "closed" if self._is_closed else f"to {len(self._open_links())} followers"
        return f"{state}, version {self._version}"

    # ---- versions --------------------------------------------------------------------------------

    def _changed(self, layout: list[Any], tensors: Sequence[torch.Tensor]) -> list[int]:
        """Return the places of the tensors that have other bits than in the version before.

        Their version counters would not tell: writes by `.data` or a CUDA graph do not count.
        """
        if not self._is_ready or layout != self._layout:  # or a call was interrupted
            return list(range(len(tensors)))
        before = self._tree["values"]
        return [
            place
            for place, (old, new) in enumerate(zip(before, tensors, strict=True))
            if not torch.equal(bits_of(old), bits_of(new))
        ]

    def _take(
        self, changed: Sequence[int], layout: list[Any], tensors: Sequence[torch.Tensor]
    ) -> None:
        """Write messages of a new version, and send them to those that have memory."""
        some = [tensors[place] for place in changed]
        version, share = self._version + 1, bytes_of(some) / max(bytes_of(tensors), 1)
        is_part = self._is_ready and share <= _MOST_OF_PART and layout == self._layout
        if is_part:
            sent = self._packer.pack(batch_of(version, None, changed, some))
            with self._lock:
                self._is_ready = False
            self._wait(self._is_written, None)
            self._tree["index"][0] = version
            copy_into(some, [self._tree["values"][place] for place in changed])
        else:
            names = [name for name, *_ in layout]
            sent = self._packer.pack(batch_of(version, names, range(len(tensors)), tensors))
            self._tree = sent.tree()
        with self._lock:
            if not is_part:
                self._whole = sent
            before, self._version, self._is_ready = self._version, version, True
            self._layout = layout
            for link in self._followers():
                if is_part and link.version == before and self._send(sent, link):
                    self._parts += 1
                else:
                    self._send_whole(link)

    def _send_whole(self, link: _Follower) -> None:
        if link.version < self._version and self._is_ready:
            self._send(self._whole, link)

    def _send(self, parcel: Parcel, link: _Follower) -> bool:
        """Start to send a message; return False if the follower takes none."""
        if not link.send(parcel, 0):
            return False
        link.version = self._version
        self._messages += 1
        self._nbytes += parcel.nbytes
        return True

    def _is_written(self) -> bool:
        return not any(link.is_sending(self._whole) for link in self._all_links())

    # ---- followers -------------------------------------------------------------------------------

    def _meet(self, found: Found) -> None:
        link = _Follower(found, self._bell, self._peer_timeout_s, "follower")
        with self._lock:
            self._links.append(link)
            if self._is_closed:
                link.close()
        self._bell.ring()

    def _followers(self) -> list[_Follower]:
        return cast("list[_Follower]", self._open_links())

    def _send_to_all(self) -> bool:
        """Send the last version to those that have read the ones before; return whether to end."""
        with self._lock:
            for link in self._followers():
                self._send_whole(link)
        return self._stopped

    def _run(self) -> None:
        self._wait(self._send_to_all, None)

    def _all_are_told(self) -> bool:
        self._send_to_all()
        return all(link.version == self._version for link in self._followers())
