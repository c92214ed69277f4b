"""How the two ends of a channel find each other, and who is refused."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tdcopier import distributed
from tdcopier._distributed import rendezvous

TIMEOUT_S = 2.5
KEY = "tdcopier/channels/channel"


STRANGERS: dict[str, Any] = {
    "says nothing": b"",
    "another program": b"GET / HTTP/1.1\r\n\r\n" * 9,
    "too much": b"tdcopier 3\n\xff\xff\xff\xff",
    "nested without end": b"tdcopier 3\n" + struct.pack("<I", 4000) + b"[" * 4000,
    "another token": {"token": "another"},
    "no timeout": {"timeout_s": None},
    "a timeout that is none": {"timeout_s": -1},
}


@pytest.mark.parametrize("said", STRANGERS.values(), ids=STRANGERS)
def test_strangers_are_refused_and_hold_up_no_one(store, said):
    options = {"store": store, "peer_timeout_s": TIMEOUT_S, "host": "127.0.0.1"}
    with distributed.receiver(**options) as rx:
        told = json.loads(store.get(KEY))
        with socket.create_connection((told["address"], told["port"])) as stranger:
            if isinstance(said, dict):
                rendezvous._write(stranger, {**told, **said})
            else:
                stranger.sendall(said)
            with distributed.sender(**options) as tx:
                tx.start(1)
                assert rx.next(timeout_s=10).get() == 1
            while not rx.problems:
                time.sleep(0.01)
        assert "could not join" in rx.problems[0]
        assert rx.stats.lost_peers == 0


def test_a_listener_that_can_start_no_thread_goes_on(store, monkeypatch):
    start, failed = threading.Thread.start, []

    def fail_once(self: threading.Thread) -> None:
        if self.name == "tdcopier-meet" and not failed:
            failed.append(self)
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", fail_once)
    options = {"store": store, "peer_timeout_s": TIMEOUT_S, "host": "127.0.0.1"}
    with distributed.receiver(**options) as rx, distributed.sender(**options) as tx:
        tx.start(1)
        assert rx.next(timeout_s=10).get() == 1
        assert rx.problems == ["a process could not join: can't start new thread"]


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_sender_finds_the_receiver_that_comes_after_one_that_is_gone(store, how):
    with socket.create_server(("127.0.0.1", 0)) as gone:  # it takes connections, and is silent
        about = {"token": "its", "address": "127.0.0.1", "port": gone.getsockname()[1]}
        store.set(KEY, json.dumps(about))
        if how == "killed":
            gone.close()
        options = {"store": store, "peer_timeout_s": 0.5}
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(distributed.sender, connect_timeout_s=20, **options)
            time.sleep(0.3)
            with distributed.receiver(**options) as rx, joining.result() as tx:
                tx.start(1)
                assert rx.next(timeout_s=10).get() == 1


def test_options_that_cannot_work_are_refused_by_the_call(store):
    for call in (distributed.sender, distributed.receiver):
        with pytest.raises(TypeError, match="slots must be an int"):
            call(store=store, slots=2.5)
        with pytest.raises(ValueError, match="timeout_s must be positive, and less than"):
            call(store=store, peer_timeout_s=float("inf"))
        with pytest.raises(ValueError, match=r"(host|interface) '.*': "):
            call(store=store, interface="none0")


def test_an_end_that_nobody_joins_says_so(store):
    options = {"store": store, "peer_timeout_s": TIMEOUT_S}
    with pytest.raises(ConnectionError, match="no receiver with the name 'channel'"):
        distributed.sender(connect_timeout_s=0.3, **options)
    with distributed.receiver(**options) as rx, pytest.raises(TimeoutError, match="no batch"):
        rx.next(timeout_s=0.1)


LISTENERS = {
    "receiver": lambda **options: distributed.receiver(**options),
    "publisher": lambda **options: distributed.publish({"a": torch.zeros(1)}, **options),
}


@pytest.mark.parametrize("what", LISTENERS)
def test_a_second_listener_of_a_name_is_refused_at_once(store, what):
    options = {"store": store, "peer_timeout_s": TIMEOUT_S, "host": "127.0.0.1", "name": "mine"}
    begin = time.monotonic()
    with LISTENERS[what](**options) as first:
        with pytest.raises(RuntimeError, match=f"another {what} with the name 'mine' is open, in "):
            LISTENERS[what](**options)
        assert time.monotonic() - begin < TIMEOUT_S
        with LISTENERS[what](**{**options, "name": "other"}):
            pass
        assert first.peers == first.problems == []
    with LISTENERS[what](**options):  # as soon as the first is closed
        pass


def test_of_two_listeners_that_come_at_a_time_one_is_refused(store):
    options = {"store": store, "peer_timeout_s": TIMEOUT_S, "host": "127.0.0.1"}

    def listen(_: int) -> distributed.Receiver | None:
        try:
            return distributed.receiver(**options)
        except RuntimeError:
            return None

    with ThreadPoolExecutor(8) as pool:
        (one,) = [each for each in pool.map(listen, range(8)) if each is not None]
    one.close()


def test_a_receiver_takes_no_connect_timeout_since_it_connects_to_none(store):
    for call in (distributed.receiver, LISTENERS["publisher"]):
        with pytest.raises(TypeError, match="connect_timeout_s"):
            call(store=store, connect_timeout_s=1.0)


class OwnStore(dist.Store):
    """Has the methods that channels need, and no `compare_set`."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def delete_key(self, key: str) -> bool:
        return self.values.pop(key, None) is not None

    def clone(self) -> OwnStore:
        return self

    def set_timeout(self, timeout: object) -> None: ...


def test_a_store_that_compares_no_values_brings_ends_together_too():
    options = {"store": OwnStore(), "peer_timeout_s": TIMEOUT_S, "host": "127.0.0.1"}
    with distributed.receiver(**options) as rx, distributed.sender(**options) as tx:
        tx.start(1)
        assert rx.next(timeout_s=10).get() == 1
        with pytest.raises(RuntimeError, match="another receiver with the name 'channel' is open"):
            distributed.receiver(**options)
    distributed.receiver(**options).close()


@pytest.mark.parametrize("told", ["hello", "{}", "[]"])
def test_a_receiver_whose_key_another_program_has_written_closes_and_leaves_it(told):
    store = OwnStore()
    rx = distributed.receiver(store=store, peer_timeout_s=TIMEOUT_S, host="127.0.0.1")
    (key,) = store.values
    store.set(key, told)
    rx.close()
    assert store.get(key).decode() == told


def test_a_receiver_closes_when_a_store_of_ones_own_is_gone(monkeypatch):
    """It raises what it likes, in a thread of the receiver."""

    def check(keys: list[str]) -> bool:
        raise ConnectionError("the store is gone")

    store = OwnStore()
    rx = distributed.receiver(store=store, peer_timeout_s=TIMEOUT_S, host="127.0.0.1")
    monkeypatch.setattr(store, "check", check)
    rx.close()
    assert "the store is gone" in rx.problems
