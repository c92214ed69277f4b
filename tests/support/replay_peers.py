"""Processes with a replay server or a client, for tests that kill or stop them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from channel_peers import Peer
from replay_support import TIMEOUT_S, RowBuffer, checked_rows, count_torn, size_of

from tdcopier.replay import ChannelClosedError, ReplayClient, ReplayServer


class ReplayPeer(Peer):
    """A process that runs a function of this module with a connection to the store."""

    def _functions(self) -> dict[str, Any]:
        return ROLES

    def told(self) -> Any:
        assert self.pipe.poll(40), "the peer said nothing"
        found = self.pipe.recv()
        assert not isinstance(found, str), found
        return found

    def asked(self, what: str = "tally") -> Any:
        self.pipe.send(what)
        return self.told()


def client_of(store: Any, **options: Any) -> ReplayClient:
    return ReplayClient(
        store=store, host="127.0.0.1", peer_timeout_s=TIMEOUT_S, reconnect_timeout_s=30, **options
    )


def server_of(store: Any, capacity: int, **options: Any) -> ReplayServer:
    buffer = RowBuffer(capacity)
    return ReplayServer(buffer, store=store, host="127.0.0.1", peer_timeout_s=TIMEOUT_S, **options)


def _act(store: Any, pipe: Any, source: int, count: int, batches: int) -> None:
    """Write batches, tell how many were acknowledged, and wait for the test."""
    with client_of(store) as client:
        pipe.send("connected")
        done = 0
        try:
            while done < batches:
                client.extend(checked_rows(source, count * done, count))
                done += 1
        except ChannelClosedError:
            pass
        pipe.send((source, done, client.reconnects))
        pipe.recv()


def _act_on(store: Any, pipe: Any, source: int, count: int) -> None:
    """Write batches until the test ends it; tell of the first that is acknowledged."""
    with client_of(store) as client:
        pipe.send("connected")
        done = 0
        while True:
            client.extend(checked_rows(source, count * done, count))
            done += 1
            if done == 1:
                pipe.send(done)


def _learn(store: Any, pipe: Any, batches: int, size: int) -> None:
    """Take samples, and tell how many rows were torn."""
    with client_of(store, batch_size=size) as client:
        pipe.send("connected")
        torn = done = 0
        try:
            while done < batches:
                torn += count_torn(client.sample())
                done += 1
        except ChannelClosedError:
            pass
        pipe.send((torn, done, client.reconnects))
        pipe.recv()


def _ask_ahead(store: Any, pipe: Any) -> None:
    """Ask for samples, and take none."""
    client = client_of(store, prefetch=8)
    client.sample()
    pipe.send("connected")
    pipe.recv()


def _serve(store: Any, pipe: Any, capacity: int, state: Any, options: dict[str, Any]) -> None:
    """Serve; answer with stats, rows or the state, until the test says "close"."""
    server = server_of(store, capacity, state=state, **options)
    pipe.send("serves")
    while (asked := pipe.recv()) != "close":
        if asked == "state":
            pipe.send(server.state_dict())
        else:
            pipe.send(tuple(server.stats))
    server.close()
    pipe.send("closed")


def _serve_next(store: Any, pipe: Any, capacity: int) -> None:
    """Wait for the state of the server before, and serve."""
    pipe.send("waits")
    _serve(store, pipe, capacity, pipe.recv(), {})


@dataclass
class Tally:
    """The calls of a client until now."""

    done: int = 0
    torn: int = 0
    longest_s: float = 0.0
    """Of the calls since it was asked before."""
    found: list[int] = field(default_factory=list)
    """Numbers of the calls in which it has found the next server."""


def _act_asked(store: Any, pipe: Any, source: int, width: int = 8, pause_s: float = 0.0) -> None:
    """Write batches, with a pause before each."""
    count = size_of(source)

    def write(client: ReplayClient, number: int) -> int:
        client.extend(checked_rows(source, count * number, count, width))
        return 0

    _go_on(store, pipe, write, pause_s)


def _learn_asked(store: Any, pipe: Any, size: int, pause_s: float = 0.0) -> None:
    """Take samples, with a pause before each."""
    _go_on(store, pipe, lambda client, _: count_torn(client.sample(size)), pause_s)


def _go_on(store: Any, pipe: Any, call: Callable[[ReplayClient, int], int], pause_s: float) -> None:
    """Make calls, and tell how they go when asked, until that is "end" or the server closes."""
    tally = Tally()
    with client_of(store) as client:
        pipe.send("connected")
        try:
            while not pipe.poll(pause_s) or _tell(pipe, tally) != "end":
                before, begin = client.reconnects, time.monotonic()
                tally.torn += call(client, tally.done)
                tally.longest_s = max(tally.longest_s, time.monotonic() - begin)
                tally.found += [tally.done] * (client.reconnects - before)
                tally.done += 1
        except ChannelClosedError:
            _tell(pipe, tally)


def _tell(pipe: Any, tally: Tally) -> str:
    asked: str = pipe.recv()
    pipe.send(tally)
    tally.longest_s = 0.0
    return asked


ROLES = {
    "act": _act,
    "act on": _act_on,
    "learn": _learn,
    "ask ahead": _ask_ahead,
    "serve": _serve,
    "serve next": _serve_next,
    "act asked": _act_asked,
    "learn asked": _learn_asked,
}
