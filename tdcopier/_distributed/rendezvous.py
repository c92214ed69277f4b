"""Brings the two ends of a pair together: one listens by a name in a store, others join.

A listener writes a token under its name. Each process that joins takes the next number of that
token, and both make the pair with this number. A listener that is made anew has another token, and
no process waits for what was left of the one before.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from tdcopier._distributed.pair import Address, Pair

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_LOOKS_S = 0.1
"""Between two looks at the store."""


class Options(NamedTuple):
    """How ends of channels find and watch each other."""

    store: Store
    name: str
    address: Address
    timeout_s: float
    connect_timeout_s: float

    def own_store(self) -> Store:
        """Return the store by a connection of its own: one that waits holds up its other users."""
        store: Any = self.store
        if not hasattr(store, "clone"):
            return self.store
        own: Store = store.clone()
        own.set_timeout(datetime.timedelta(seconds=self.connect_timeout_s))
        return own


class Found(NamedTuple):
    """A pair, and what the other end said of itself."""

    pair: Pair
    peer: str
    timeout_s: float
    """How long the other end waits for a message."""


def join(options: Options, what: str = "receiver") -> Found:
    """Make a pair with the process that listens.

    Raises:
        ConnectionError: none has listened in time.
    """
    store, key, token, place = options.own_store(), _key(options.name), "", ""
    end = time.monotonic() + options.connect_timeout_s
    told: dict[str, Any] = {}
    while not place or not store.check([f"{place}/ready"]):
        if time.monotonic() > end:
            found = "is in the store, and does not answer" if place else "is in the store"
            raise ConnectionError(
                f"{'the' if place else 'no'} {what} with the name {options.name!r} {found} after "
                f"{options.connect_timeout_s:g} s"
            )
        if store.check([key]):
            told = json.loads(store.get(key))
        if told and told["token"] != token:  # also of one that listens in place of another
            token = told["token"]
            place = f"{key}/{token}/{store.add(f'{key}/{token}/arrivals', 1)}"
            store.set(f"{place}/about", json.dumps(_about(options)))
        time.sleep(_LOOKS_S / 2)
    try:
        pair = Pair(store, place, 0, options.address, max(end - time.monotonic(), 1.0))
    except RuntimeError as error:
        raise ConnectionError(
            f"the {what} with the name {options.name!r} is in the store, and cannot be reached: "
            f"{error}"
        ) from None
    return Found(pair, told["peer"], told["timeout_s"])


class Listener:
    """Makes pairs with processes that join, in threads of its own."""

    def __init__(self, options: Options, came: Callable[[Found], None]) -> None:
        """Begin to listen. `came` is called in another thread for each pair."""
        self._options, self._came = options, came
        self._key = _key(options.name)
        self._about = {"token": uuid.uuid4().hex, **_about(options)}
        self._ended, self._closing, self._is_closed = threading.Event(), threading.Lock(), False
        self.failures: list[str] = []
        """Why processes that have joined, or the store, could not be reached."""
        options.store.set(self._key, json.dumps(self._about))
        self._thread = threading.Thread(target=self._listen, name="tdcopier-listen", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float | None = None) -> None:
        """Listen no more. Pairs that were made stay. A store that hangs is left after that time."""
        self._ended.set()
        self._thread.join(timeout_s)  # in the store's code it would end a process that exits
        with self._closing:
            if self._is_closed or self._thread.is_alive():
                return
            self._is_closed = True
        store = self._options.store
        try:
            is_there = store.check([self._key])  # or `get` would wait for it
            if is_there and json.loads(store.get(self._key))["token"] == self._about["token"]:
                store.delete_key(self._key)
        except RuntimeError as error:  # the store is gone
            self.failures.append(str(error))

    def _listen(self) -> None:
        done = 0
        try:
            store = self._options.own_store()
            while not self._ended.wait(_LOOKS_S):
                arrived = store.add(f"{self._key}/{self._about['token']}/arrivals", 0)
                for number in range(done + 1, arrived + 1):
                    arguments = (f"{self._key}/{self._about['token']}/{number}",)
                    threading.Thread(
                        target=self._meet, args=arguments, name="tdcopier-meet", daemon=True
                    ).start()
                done = arrived
        except RuntimeError as error:
            self.failures.append(f"the store is lost, so no process can join any more: {error}")

    def _meet(self, place: str) -> None:
        try:
            store = self._options.own_store()
            about: dict[str, Any] = json.loads(store.get(f"{place}/about"))
            seconds = self._options.connect_timeout_s
            store.set(f"{place}/ready", "")
            pair = Pair(store, place, 1, self._options.address, seconds)
            self._came(Found(pair, about["peer"], about["timeout_s"]))
        except Exception as error:  # for example, it has ended meanwhile
            self.failures.append(str(error))


def _key(name: str) -> str:
    return f"tdcopier/channels/{name}"


def _about(options: Options) -> dict[str, Any]:
    peer = f"{socket.gethostname()}:{os.getpid()}"
    if dist.is_available() and dist.is_initialized():
        peer += f" (rank {dist.get_rank()})"
    return {"peer": peer, "timeout_s": options.timeout_s}
