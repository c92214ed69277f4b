"""The ends of channels: closing, in whatever order, and what ends one of them alone."""

from __future__ import annotations

import gc
import os
import pickle
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import run_python

from tdcopier import distributed
from tdcopier._distributed import incoming
from tdcopier._distributed import pair as pairs

TIMEOUT_S = 2.5


def test_closing_ends_a_start_that_waits_in_another_thread(channel):
    tx, rx = channel(slots=4)
    ended: list[BaseException] = []

    def start_many() -> None:
        try:
            while True:
                tx.start(torch.zeros(10))
        except distributed.ChannelClosed as error:
            ended.append(error)

    thread = threading.Thread(target=start_many)
    thread.start()
    while tx.stats.batches < 4:  # all slots of the receiver
        time.sleep(0.01)
    tx.close(timeout_s=5)
    thread.join(5)
    assert "this sender is closed" in str(ended[0])
    assert [rx.next(10).get().numel() for _ in range(tx.stats.batches)] == [10] * 4
    assert rx.stats.closed_peers == 1


def test_an_end_that_is_closed_is_of_no_use(channel):
    tx, rx = channel()
    assert repr(tx) == f"<Sender to {tx.peer}, open, 0 batches>"
    with tx:
        tx.start(1)
        assert rx.next(10).get() == 1
        assert rx.peers == [tx.peer]  # both ends are in this process
    with pytest.raises(distributed.ChannelClosed, match="this sender is closed"):
        tx.start(1)
    rx.close()
    assert repr(rx) == "<Receiver on cpu, closed, 1 batches>"
    with pytest.raises(distributed.ChannelClosed, match="this receiver is closed"):
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
    assert [rx.next(10).get()[0].item() for _ in range(4)] == [0, 1, 2, 3]
    closing.join(5)
    assert not closing.is_alive()
    with pytest.raises(TimeoutError, match=r"no batch has come in 0\.2 s"):
        rx.next(0.2)  # other senders may come
    assert rx.stats.closed_peers == 1
    assert rx.peers == []


def test_a_receiver_that_closes_tells_its_senders(channel):
    tx, rx = channel()
    tx.start(torch.zeros(3))
    rx.close(timeout_s=5)

    def start_many() -> None:
        for _ in range(20):
            tx.start(torch.zeros(3))
            time.sleep(0.05)

    with pytest.raises(distributed.ChannelClosed, match="has closed the channel"):
        start_many()
    with pytest.raises(distributed.ChannelClosed, match="this receiver is closed"):
        rx.next()
    assert list(rx) == []
    tx.close()


def test_the_next_receiver_of_a_name_gets_the_next_senders(channel):
    tx, rx = channel()
    rx.close(timeout_s=5)
    again, other = channel()
    again.start(torch.ones(2))
    assert other.next(10).get().tolist() == [1, 1]
    tx.close()


@pytest.mark.parametrize("wrong", [{"kind": 9}, {"nbytes": 1 << 40}], ids=["kind", "nbytes"])
def test_a_damaged_message_ends_its_sender_alone(store, monkeypatch, wrong):
    options = {"store": store, "timeout_s": TIMEOUT_S}
    with distributed.receiver(**options) as rx, distributed.sender(**options) as other:
        tx = distributed.sender(**options)
        for number, sender in enumerate((tx, other)):
            sender.start(number)
            assert rx.next(10).get() == number
        write = pairs.Header.write

        def damaged(self: Any, memory: memoryview) -> None:
            write(self._replace(**wrong) if self.kind is pairs.Kind.BATCH else self, memory)

        monkeypatch.setattr(pairs.Header, "write", damaged)
        tx.start(2)
        monkeypatch.undo()
        while rx.stats.lost_peers == 0:
            time.sleep(0.01)
        (problem,) = rx.problems
        assert "is given up: " in problem
        other.start(3)
        assert rx.next(10).get() == 3
        with pytest.raises(distributed.PeerLost):
            tx.close(timeout_s=10)


def test_results_outlive_the_channel(channel, device):
    tx, rx = channel(device)
    kept = []
    for number in range(6):
        tx.start({"a": torch.full((3000,), number)})
        kept.append(rx.next(10).wait())
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
    assert rx.next(10).get() == 1


def test_an_open_channel_needs_no_store():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    other = dist.TCPStore("127.0.0.1", store.port, is_master=False)  # type: ignore[attr-defined]
    rx = distributed.receiver(store=other, timeout_s=TIMEOUT_S)
    with distributed.sender(store=other, timeout_s=TIMEOUT_S) as tx:
        tx.start(1)
        assert rx.next(10).get() == 1
        del store
        gc.collect()
        while not rx.problems:
            time.sleep(0.01)
        assert "no process can join any more" in rx.problems[0]
        tx.start(2)
        assert rx.next(10).get() == 2
    rx.close(timeout_s=10)


def test_a_sender_that_waits_for_a_receiver_that_was_killed_finds_the_next(store):
    key = "tdcopier/channels/channel"
    store.set(key, '{"token": "of one that is gone", "peer": "gone", "timeout_s": 5}')
    options = {"store": store, "timeout_s": TIMEOUT_S, "connect_timeout_s": 10}
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(distributed.sender, **options)
        time.sleep(0.3)
        with distributed.receiver(**options) as rx, joining.result() as tx:
            tx.start(1)
            assert rx.next(10).get() == 1


def test_a_call_waits_for_another_threads_no_longer_than_it_may(channel):
    tx, rx = channel(slots=1)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: [tx.start(n) for n in range(4)])
        while not tx.stats.waits:
            time.sleep(0.01)
        for call in (lambda: tx.start(5, timeout_s=0.2), lambda: tx.flush(timeout_s=0.2)):
            with pytest.raises(TimeoutError, match=r"in 0\.2 s"):
                call()
        assert [rx.next(10).get() for _ in range(4)] == [0, 1, 2, 3]
        other.result()


INTERRUPTED = """
import signal, threading, torch.distributed as dist
from tdcopier import distributed
from tdcopier._distributed import pair

store = dist.HashStore()
rx = distributed.receiver(store=store, slots=2)
tx = distributed.sender(store=store)
calls = {"send": 0, "receive": 0}

def interrupting(name):
    method = getattr(pair.Pair, name)

    def call(self, memory, tag):
        work = method(self, memory, tag)
        if tag == 0 and threading.current_thread() is threading.main_thread():
            calls[name] += 1
            if calls[name] == 2:
                signal.raise_signal(signal.SIGINT)  # memory was given, and that is noted nowhere
        return work

    setattr(pair.Pair, name, call)

for name in calls:
    interrupting(name)
seen, interrupts = [], 0
for number in range(20):
    for call in (lambda: tx.start(number), lambda: seen.append(rx.next(5).get())):
        try:
            call()
        except KeyboardInterrupt:
            interrupts += 1
assert interrupts == 2, interrupts
assert seen == sorted(seen) and len(seen) >= 18 and seen[-1] >= 18, seen
tx.close()
rx.close()
print("closed")
"""


def test_an_interrupt_ends_a_call_and_not_the_channel():
    assert run_python(INTERRUPTED).strip() == "closed"


def test_options_that_cannot_work_are_refused_by_the_call(store):
    for call in (distributed.sender, distributed.receiver):
        with pytest.raises(TypeError, match="slots is an int"):
            call(store=store, slots=2.5)
        with pytest.raises(ValueError, match="timeout_s must be positive, and less than"):
            call(store=store, timeout_s=float("inf"))
        with pytest.raises(ValueError, match="host or interface: "):
            call(store=store, interface="none0")


def test_ends_close_at_the_same_time_or_one_after_the_other(store):
    choose = random.Random(1)
    for number in range(12):
        options = {"store": store, "timeout_s": TIMEOUT_S, "name": str(number)}
        rx = distributed.receiver(**options)
        tx = distributed.sender(**options)
        for _ in range(choose.randrange(4)):
            tx.start(torch.zeros(choose.choice([10, 100_000])), timeout_s=5)
        ends = [tx, rx] if choose.random() < 0.5 else [rx, tx]
        with ThreadPoolExecutor(2) as pool:
            begin = time.monotonic()
            closing = [pool.submit(ends[0].close, 5)]
            time.sleep(choose.choice([0, 0, 0.01, 0.06]))
            closing.append(pool.submit(ends[1].close, 5))
            for each in closing:
                each.result()
        assert time.monotonic() - begin < 1.0
        assert rx.problems == []
        assert rx.stats.closed_peers == 1


def test_an_end_that_nobody_joins_says_so(store):
    options = {"store": store, "timeout_s": TIMEOUT_S, "connect_timeout_s": 0.3}
    with pytest.raises(ConnectionError, match="no receiver with the name 'channel'"):
        distributed.sender(**options)
    with distributed.receiver(**options) as rx, pytest.raises(TimeoutError, match="no batch"):
        rx.next(0.1)


EXITS = """
import torch, torch.distributed as dist, threading
from tdcopier import distributed
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
rx = distributed.receiver(store=store)
tx = distributed.sender(store=store)
tx.start(torch.ones(2))
print(rx.next(10).get().tolist())
"""


def test_a_process_may_exit_with_open_ends():
    assert run_python(EXITS).strip() == "[1.0, 1.0]"


def test_the_end_of_an_older_message_is_not_taken_for_that_of_the_next():
    """Memory comes back with what it had, and each channel numbers its messages from 0."""
    header = pairs.Header(pairs.Kind.BATCH, 0, 1000)
    for _ in range(20):
        older = torch.zeros(pairs.message_bytes(1000), dtype=torch.uint8)
        pairs.write_stamp(older.numpy().data, header)
        del older
        slot = incoming._Slot()
        slot.resize(1000, pinned=False)
        header.write(slot.view)
        assert not pairs.has_come(slot.view)
        pairs.write_stamp(slot.view, header)
        assert pairs.has_come(slot.view)
