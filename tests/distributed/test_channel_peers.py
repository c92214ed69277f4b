"""Channels whose other end is killed or stopped: it is noticed in time, and the others go on."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from channel_peers import TIMEOUT_S, Peer, batch_of
from support import run_python

from tdcopier import distributed

ENDS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
NOTICED_S = 2 * TIMEOUT_S


@pytest.fixture
def store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]


@pytest.fixture
def peers() -> Iterator[list[Peer]]:
    made: list[Peer] = []
    yield made
    for peer in made:
        peer.end()


@pytest.mark.parametrize("how", ENDS)
def test_a_sender_that_ends_is_noticed_and_the_others_go_on(store, peers, how):
    with distributed.receiver(store=store, peer_timeout_s=TIMEOUT_S) as rx:
        peers += [Peer("send", store.port, name, 3, 1000) for name in ("one", "other")]
        found = [rx.next(timeout_s=30).get() for _ in range(6)]
        for peer in peers:
            peer.says("sent")
        for name in ("one", "other"):
            assert [each["number"] for each in found if each["sender"] == name] == [0, 1, 2]
        peers[0].signal(ENDS[how])
        begin = time.monotonic()
        while rx.stats.lost_peers == 0:
            assert time.monotonic() - begin < NOTICED_S
            time.sleep(0.01)
        (problem,) = rx.problems
        assert problem.endswith("has ended") or "has not answered for 2.5 s" in problem
        with pytest.raises(TimeoutError):
            rx.next(timeout_s=TIMEOUT_S)  # the other one beats
        assert rx.stats.open_peers == 1
        peers[1].pipe.send("end")
        peers[1].says("closed")
        late = Peer("send", store.port, "late", 1, 10)
        peers.append(late)
        assert rx.next(timeout_s=30).get()["sender"] == "late"
        late.says("sent")
        late.pipe.send("end")
        late.says("closed")


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("size", [10, 4_000_000])
def test_a_receiver_that_ends_is_noticed(store, peers, how, size):
    peers.append(Peer("receive", store.port, 2))
    peers[0].says("listens")
    tx = distributed.sender(store=store, peer_timeout_s=TIMEOUT_S)
    for number in range(2):
        tx.start(batch_of("test", number, size))
    peers[0].says("received")
    peers[0].signal(ENDS[how])
    begin = time.monotonic()

    def start_many() -> None:
        for number in range(1000):
            tx.start(batch_of("test", number, size))
            time.sleep(0.01)

    with pytest.raises(distributed.PeerLostError, match=r"has ended|has not answered"):
        start_many()
    assert time.monotonic() - begin < NOTICED_S
    with pytest.raises(distributed.PeerLostError):
        tx.flush()
    begin = time.monotonic()
    with pytest.raises(distributed.PeerLostError):
        tx.close()
    assert time.monotonic() - begin < 1.0


@pytest.mark.parametrize("how", ENDS)
def test_the_only_sender_that_ends_ends_the_receiver(store, peers, how):
    """As ranks of one group."""
    peers.append(Peer("send as rank 1", store.port, 2))
    dist.init_process_group("gloo", store=store, rank=0, world_size=2)
    try:
        rx = distributed.receiver(1, peer_timeout_s=TIMEOUT_S)
        assert [rx.next(timeout_s=30).get()["number"] for _ in range(2)] == [0, 1]
        peers[0].says("sent")
        peers[0].signal(ENDS[how])
        begin = time.monotonic()
        with pytest.raises(distributed.PeerLostError, match="rank 1"):
            rx.next()
        assert time.monotonic() - begin < NOTICED_S
        rx.close()
    finally:
        dist.destroy_process_group()


def test_a_stopped_sender_that_goes_on_learns_that_it_is_lost(store, peers):
    with distributed.receiver(store=store, peer_timeout_s=TIMEOUT_S) as rx:
        peers.append(Peer("send", store.port, "one", 1, 10))
        rx.next(timeout_s=30).get()
        peers[0].says("sent")
        peers[0].signal(signal.SIGSTOP)
        while rx.stats.lost_peers == 0:
            time.sleep(0.01)
        peers[0].signal(signal.SIGCONT)
        peers[0].pipe.send("end")
        peers[0].says("PeerLostError")


def test_a_sender_that_dies_while_it_joins_holds_up_nobody(store):
    """The receiver waits for it beside the others."""
    with distributed.receiver(store=store, peer_timeout_s=TIMEOUT_S) as rx:
        told = json.loads(store.get("tdcopier/channels/channel"))
        gone = socket.create_connection((told["address"], told["port"]))
        with distributed.sender(store=store, peer_timeout_s=TIMEOUT_S) as tx:
            tx.start(torch.ones(1))
            assert rx.next(timeout_s=10).get() == 1
        while not rx.problems:
            time.sleep(0.01)
        gone.close()


INTERRUPTED = """
import os, signal, threading, torch.distributed as dist
from tdcopier import distributed

store = dist.HashStore()
rx = distributed.receiver(store=store, slots=1)
tx = distributed.sender(store=store, slots=1)

def start_many():
    while True:
        tx.start(1)

for wait in (rx.next, start_many):
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        wait()
    except KeyboardInterrupt:
        print("interrupted")
while rx.stats.waiting:
    assert rx.next().get() == 1
rx.close()
tx.close()
print("closed")
"""


def test_waits_can_be_interrupted():
    assert run_python(INTERRUPTED).split() == ["interrupted", "interrupted", "closed"]
