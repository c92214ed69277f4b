"""The ends of channels: closing, in whatever order, and what ends one of them alone."""

from __future__ import annotations

import gc
import json
import os
import pickle
import random
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import comes_true, run_python

from tdcopier import distributed
from tdcopier._distributed import rendezvous

TIMEOUT_S = 2.5
KEY = "tdcopier/channels/channel"


def test_closing_ends_a_start_that_waits_in_another_thread(channel):
    tx, rx = channel(slots=4)
    ended: list[BaseException] = []

    def start_many() -> None:
        try:
            while True:
                tx.start(torch.zeros(10))
        except distributed.ChannelClosedError as error:
            ended.append(error)

    thread = threading.Thread(target=start_many)
    thread.start()
    while tx.stats.batches < 4:  # all slots of the receiver
        time.sleep(0.01)
    tx.close(timeout_s=5)
    thread.join(5)
    assert "this sender is closed" in str(ended[0])
    assert [rx.next(timeout_s=10).get().numel() for _ in range(tx.stats.batches)] == [10] * 4
    assert comes_true(lambda: rx.stats.closed_peers == 1)


def test_a_start_waits_no_longer_than_it_may_for_threads_and_receiver_together(channel, threads):
    tx, _ = channel(slots=1)
    tx.start(torch.zeros(10))
    while tx.stats.waits < 1:  # the only slot is full
        with pytest.raises(TimeoutError):
            tx.start(torch.zeros(10), timeout_s=0.05)
    waits = tx.stats.waits
    other = threads.submit(tx.start, torch.zeros(10), timeout_s=1.0)
    while tx.stats.waits == waits:
        time.sleep(0.01)
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=r"took no batch in 1\.2 s"):
        tx.start(torch.zeros(10), timeout_s=1.2)  # the other has the first second of it
    assert 1.1 < time.monotonic() - begin < 1.9
    with pytest.raises(TimeoutError):
        other.result(5)


def test_an_end_that_is_closed_is_of_no_use(channel):
    tx, rx = channel()
    assert repr(tx) == f"<Sender to {tx.peer}, open, 0 batches>"
    with tx:
        tx.start(1)
        assert rx.next(timeout_s=10).get() == 1
        assert rx.peers == [tx.peer]  # both ends are in this process
    with pytest.raises(distributed.ChannelClosedError, match="this sender is closed"):
        tx.start(1)
    rx.close()
    assert repr(rx) == "<Receiver on cpu, closed, 1 batches>"
    with pytest.raises(distributed.ChannelClosedError, match="this receiver is closed"):
        rx.next()
    for end in (tx, rx):
        with pytest.raises(TypeError, match="make one in each"):
            pickle.dumps(end)


def test_what_was_started_arrives_before_the_end(channel):
    tx, rx = channel()
    for number in range(4):
        tx.start(torch.full((3,), number))
    closing = threading.Thread(target=tx.close)
    closing.start()
    assert [rx.next(timeout_s=10).get()[0].item() for _ in range(4)] == [0, 1, 2, 3]
    closing.join(5)
    assert not closing.is_alive()
    with pytest.raises(TimeoutError, match=r"no batch has come in 0\.2 s"):
        rx.next(timeout_s=0.2)  # other senders may come
    assert comes_true(lambda: rx.stats.closed_peers == 1)
    assert rx.peers == []


def test_a_receiver_that_closes_tells_its_senders(channel):
    tx, rx = channel()
    tx.start(torch.zeros(3))
    rx.close(timeout_s=5)

    def start_many() -> None:
        for _ in range(20):
            tx.start(torch.zeros(3))
            time.sleep(0.05)

    with pytest.raises(distributed.ChannelClosedError, match="has closed the channel"):
        start_many()
    with pytest.raises(distributed.ChannelClosedError, match="this receiver is closed"):
        rx.next()
    assert list(rx) == []
    tx.close()


def test_the_next_receiver_of_a_name_gets_the_next_senders(channel):
    tx, rx = channel()
    rx.close(timeout_s=5)
    again, other = channel()
    again.start(torch.ones(2))
    assert other.next(timeout_s=10).get().tolist() == [1, 1]
    tx.close()


HEADER = struct.Struct("<4sBBHIIQQ")
WRONG = {
    "another kind": HEADER.pack(b"tdch", 3, 9, 0, 0, 0, 0, 0),
    "more memory than there is": HEADER.pack(b"tdch", 3, 1, 0, 0, 0, 0, 1 << 60),
    "another number": HEADER.pack(b"tdch", 3, 1, 0, 0, 0, 2, 10),
    "another version": HEADER.pack(b"tdch", 4, 1, 0, 0, 0, 0, 10),
    "another mark": bytes(HEADER.size),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_damaged_message_ends_its_sender_alone(store, wrong):
    options = {"store": store, "peer_timeout_s": TIMEOUT_S, "host": "127.0.0.1"}
    with distributed.receiver(**options) as rx, distributed.sender(**options) as other:
        with connected(store) as tx:
            tx.sendall(WRONG[wrong])
            while rx.stats.lost_peers == 0:
                time.sleep(0.01)
        (problem,) = rx.problems
        assert "is given up: " in problem
        other.start(3)
        assert rx.next(timeout_s=10).get() == 3


def connected(store: Any) -> socket.socket:
    """Returns a connection to a receiver, as a sender makes it."""
    told = json.loads(store.get(KEY))
    made = socket.create_connection((told["address"], told["port"]), timeout=5)
    rendezvous._write(made, {"token": told["token"], "peer": "a test", "timeout_s": TIMEOUT_S})
    rendezvous._read(made, 5.0)
    return made


def test_results_outlive_the_channel(channel, device):
    tx, rx = channel(device)
    kept = []
    for number in range(6):
        tx.start({"a": torch.full((3000,), number)})
        kept.append(rx.next(timeout_s=10).wait())
    tx.close(timeout_s=5)
    rx.close(timeout_s=5)
    del tx, rx
    gc.collect()
    torch.full((100_000,), -1)  # memory of the ends would be taken again
    for number, batch in enumerate(kept):
        assert batch["a"].eq(number).all()


def test_a_forked_child_cannot_use_an_end(channel):
    tx, rx = channel()
    child = os.fork()
    if child == 0:
        try:
            tx.close()
            rx.close()
            for call in (rx.next, lambda: tx.start(1), tx.flush):
                with pytest.raises(RuntimeError, match="the process that forked this one"):
                    call()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    tx.start(1)
    assert rx.next(timeout_s=10).get() == 1


def test_threads_close_an_end_at_once(channel):
    for _ in range(20):
        tx, rx = channel()
        tx.start(torch.zeros(10))
        with ThreadPoolExecutor(4) as pool:
            for each in [pool.submit(end.close, timeout_s=5) for end in (tx, rx, tx, rx)]:
                each.result(10)


FORKED = """
import gc, os, sys, time, torch.distributed as dist
from tdcopier import distributed

store = dist.HashStore()
rx = distributed.receiver(store=store, host="127.0.0.1")
tx = distributed.sender(store=store, host="127.0.0.1")
tx.start(1)
assert rx.next(timeout_s=5).get() == 1
child = os.fork()
if child == 0:
    assert repr(tx) == "<Sender of the process that forked this one>"
    assert repr(rx) == "<Receiver of the process that forked this one>"
    if sys.argv[1:] == ["drops"]:
        del tx, rx
        gc.collect()
    sys.exit(0)
end = time.monotonic() + 20
while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
    assert time.monotonic() < end, "the child does not end"
    time.sleep(0.01)
assert ended[1] == 0
tx.start(2)
assert rx.next(timeout_s=5).get() == 2
tx.close(timeout_s=5)
rx.close(timeout_s=5)
print("closed")
"""


@pytest.mark.parametrize("drops", [["drops"], []])
def test_a_forked_child_ends_with_the_ends_of_its_parent(drops):
    code = f"import sys\nsys.argv[1:] = {drops}\n{FORKED}"
    assert run_python(code).strip() == "closed"


def test_a_receiver_that_only_takes_batches_lets_go_of_its_senders(channel, store):
    first, rx = channel()
    for number in range(10):
        with distributed.sender(store=store, peer_timeout_s=TIMEOUT_S, host="127.0.0.1") as tx:
            tx.start(number)
            assert rx.next(timeout_s=10).get() == number
    first.start(10)
    assert rx.next(timeout_s=10).get() == 10
    with pytest.raises(TimeoutError):
        rx.next(timeout_s=0.1)
    assert len(rx._links) == 1


def test_flush_says_that_the_receiver_has_dropped_batches(channel, monkeypatch):
    tx, rx = channel()
    tx.start(1)
    rx.close(timeout_s=10)
    monkeypatch.setattr(type(tx._link), "all_have_arrived", False)  # as of those that were not sent
    with pytest.raises(distributed.ChannelClosedError, match="has closed the channel"):
        tx.flush(timeout_s=10)


ENDS_AS_A_CHILD = """
import multiprocessing, torch, torch.distributed as dist
from tdcopier import distributed

def send():
    global tx
    own = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    tx = distributed.sender(store=own, host="127.0.0.1")
    for number in range(4):
        tx.start(torch.full((1_000_000,), number))

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
rx = distributed.receiver(store=store, host="127.0.0.1")
child = multiprocessing.get_context("fork").Process(target=send)
child.start()
print([rx.next(timeout_s=10).get()[-1].item() for _ in range(4)])
child.join()
while rx.stats.open_peers:
    rx._bell.wait(rx._bell.count, 0.1)
print(rx.stats.lost_peers, rx.problems)
"""


@pytest.mark.parametrize("kept", [True, False])
def test_a_process_of_multiprocessing_closes_its_ends(kept):
    code = ENDS_AS_A_CHILD if kept else ENDS_AS_A_CHILD.replace("    global tx\n", "")
    assert run_python(code).split("\n")[:2] == ["[0, 1, 2, 3]", "0 []"]


EXITS_AFTER_A_FAILURE = """
import atexit
atexit.register(lambda: print(repr(rx), tx._is_closed))  # after the ends were closed
import torch.distributed as dist
from tdcopier import distributed
store = dist.HashStore()
rx = distributed.receiver(store=store, host="127.0.0.1")
tx = distributed.sender(store=store, host="127.0.0.1")
try:
    distributed.sender(store=store, name="another", connect_timeout_s=0.1)
except ConnectionError as error:
    kept = error
tx.start(1)
"""


def test_an_end_that_could_not_be_made_keeps_no_other_from_closing():
    assert run_python(EXITS_AFTER_A_FAILURE).strip() == "<Receiver on cpu, closed, 0 batches> True"


def test_an_open_channel_needs_no_store():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    other = dist.TCPStore("127.0.0.1", store.port, is_master=False)  # type: ignore[attr-defined]
    rx = distributed.receiver(store=other, peer_timeout_s=TIMEOUT_S)
    with distributed.sender(store=other, peer_timeout_s=TIMEOUT_S) as tx:
        tx.start(1)
        assert rx.next(timeout_s=10).get() == 1
        del store
        gc.collect()
        tx.start(2)
        assert rx.next(timeout_s=10).get() == 2
    rx.close(timeout_s=10)


def test_a_call_waits_for_another_threads_no_longer_than_it_may(channel):
    tx, rx = channel(slots=1)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: [tx.start(n) for n in range(4)])
        while not tx.stats.waits:
            time.sleep(0.01)
        with pytest.raises(TimeoutError, match=r"in 0\.2 s"):
            tx.start(5, timeout_s=0.2)
        tx.flush(timeout_s=5)  # what the other one has started is there
        assert [rx.next(timeout_s=10).get() for _ in range(4)] == [0, 1, 2, 3]
        other.result()


INTERRUPTED = """
import itertools, os, random, signal, threading, torch, torch.distributed as dist
from tdcopier import distributed

store = dist.HashStore()
rx = distributed.receiver(store=store, slots=2, host="127.0.0.1")
tx = distributed.sender(store=store, host="127.0.0.1")
seen, interrupts, has_ended, choose = [], 0, threading.Event(), random.Random(1)
is_inside = False

def raises(*_):
    if is_inside:
        raise KeyboardInterrupt

def interrupt():
    while not has_ended.wait(choose.random() * 2e-3):
        os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, raises)
thread = threading.Thread(target=interrupt)
thread.start()
for number in itertools.count():
    if interrupts > 300:
        break
    size = choose.choice([3, 30_000])
    for call in (
        lambda: tx.start((number, torch.full((size,), number)), timeout_s=0.01),
        lambda: seen.append(rx.next(timeout_s=0.01).get()),
    ):
        try:
            is_inside = True
            call()
            is_inside = False
        except KeyboardInterrupt:
            is_inside = False
            interrupts += 1
        except TimeoutError:
            is_inside = False
has_ended.set()
thread.join()
while not seen or seen[-1][0] != number:
    try:
        tx.start((number, torch.full((3,), number)), timeout_s=0.1)
    except TimeoutError:
        pass  # interrupted calls have left both slots full
    seen.append(rx.next(timeout_s=5).get())
numbers = [each[0] for each in seen]
assert numbers == sorted(numbers), numbers
assert len(set(numbers[:-20])) == len(numbers[:-20]), numbers
assert all(each[1].eq(each[0]).all() for each in seen)
tx.close(timeout_s=5)
rx.close(timeout_s=5)
assert rx.stats.lost_peers == 0, rx.problems
print("closed")
"""


def test_an_interrupt_ends_a_call_and_not_the_channel():
    assert run_python(INTERRUPTED).strip() == "closed"


def test_ends_close_at_the_same_time_or_one_after_the_other(store):
    choose = random.Random(1)
    for number in range(12):
        options = {"store": store, "peer_timeout_s": TIMEOUT_S, "name": str(number)}
        rx = distributed.receiver(**options)
        tx = distributed.sender(**options)
        for _ in range(choose.randrange(4)):
            tx.start(torch.zeros(choose.choice([10, 100_000])), timeout_s=5)
        ends = [tx, rx] if choose.random() < 0.5 else [rx, tx]
        with ThreadPoolExecutor(2) as pool:
            begin = time.monotonic()
            closing = [pool.submit(ends[0].close, timeout_s=5)]
            time.sleep(choose.choice([0, 0, 0.01, 0.06]))
            closing.append(pool.submit(ends[1].close, timeout_s=5))
            for each in closing:
                each.result()
        assert time.monotonic() - begin < 1.0
        assert rx.problems == []
        assert comes_true(lambda rx=rx: rx.stats.closed_peers == 1)


EXITS = """
import torch, torch.distributed as dist, threading
from tdcopier import distributed
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
rx = distributed.receiver(store=store)
tx = distributed.sender(store=store)
tx.start(torch.ones(2))
print(rx.next(timeout_s=10).get().tolist())
"""


def test_a_process_may_exit_with_open_ends():
    assert run_python(EXITS).strip() == "[1.0, 1.0]"
