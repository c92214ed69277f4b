"""Channels: what is sent arrives in order, slots limit what is under way, and every end is told."""

from __future__ import annotations

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from distributed_cases import assert_equal
from tensordict import TensorDict
from tensordict_same import assert_same_tensordict

import tdcopier
from tdcopier import distributed
from tdcopier._distributed import sender as senders

TIMEOUT_S = 2.5


def trees() -> list[Any]:
    """Returns batches of several layouts and sizes."""
    return [
        {"a": torch.arange(4), "b": [torch.rand(3, 2), (torch.ones(2, dtype=torch.bool), 5, "x")]},
        [torch.full((1000,), number) for number in range(20)],
        {"a": torch.rand(200_000)},
        torch.zeros(0),
        {"empty": {}, "a": torch.rand(300_000), "n": None},
        {"a": torch.arange(4), "b": [torch.rand(3, 2), (torch.ones(2, dtype=torch.bool), 5, "x")]},
    ]


def test_batches_of_any_layout_arrive_in_order(channel, device):
    tx, rx = channel(device)
    sent = trees() * 3
    thread = threading.Thread(target=lambda: [tx.start(tree) for tree in sent])
    thread.start()
    for tree in sent:
        assert_equal(rx.next(timeout_s=10).get(), tdcopier.copy(tree, device))
    thread.join()
    assert tx.stats.batches == rx.stats.batches == len(sent)
    assert tx.stats.nbytes == rx.stats.nbytes == sum(tdcopier.pack(tree).nbytes for tree in sent)


@pytest.mark.parametrize("makes", [lambda tree: tree, tdcopier.pack])
def test_a_batch_may_be_changed_as_soon_as_it_is_started(channel, device, makes):
    tx, rx = channel(device)
    source = {"a": torch.zeros(1000)}
    for number in range(10):
        source["a"].fill_(number)
        tx.start(makes(source))
        source["a"].fill_(-1)
        assert rx.next(timeout_s=10).get()["a"].eq(number).all()


def test_batches_on_a_device_are_sent_from_there(channel, device):
    tx, rx = channel()
    for number in range(6):
        tx.start({"a": torch.full((1000 * number,), number, device=device), "b": number})
        found = rx.next(timeout_s=10).get()
        assert found["a"].tolist() == [number] * (1000 * number)
        assert found["a"].is_cpu


def test_tensordicts_and_arrays_are_batches(channel, device):
    tx, rx = channel(device)
    batch = TensorDict({"a": torch.rand(3, 2), "b": {"c": torch.arange(3)}}, [3])
    tx.start(batch)
    assert_same_tensordict(rx.next(timeout_s=10).get(), tdcopier.copy(batch, device))
    tx.start(np.arange(3.0))
    assert rx.next(timeout_s=10).get().tolist() == [0, 1, 2]


def test_batches_that_are_kept_stay_as_they_are(channel, device):
    tx, rx = channel(device)
    thread = threading.Thread(
        target=lambda: [tx.start({"a": torch.full((5000,), n), "n": n}) for n in range(40)]
    )
    thread.start()
    kept = [rx.next(timeout_s=10).wait() for _ in range(40)]
    thread.join()
    for number, batch in enumerate(kept):
        assert batch["n"] == number
        assert batch["a"].eq(number).all()


def test_memory_is_used_again(channel, device):
    tx, rx = channel(device)
    for number in range(60):
        tx.start({"a": torch.full((30_000,), float(number))})
        assert rx.next(timeout_s=10).get()["a"][-1].item() == number
    assert tx.stats.allocations <= 2  # its slots
    assert rx.stats.allocations <= 2 * 16  # its slots, before it knew the size, and then


def test_a_slot_is_not_written_while_the_device_reads_it(channel, device, slow_link):
    tx, rx = channel(device, slots=2)
    batches = [{"a": torch.full((400_000,), float(number))} for number in range(12)]
    thread = threading.Thread(target=lambda: [tx.start(batch) for batch in batches])
    with slow_link:
        thread.start()
        handles = [rx.next(timeout_s=20) for _ in batches]
        thread.join()
        found = [handle.get()["a"] for handle in handles]
    for number, leaf in enumerate(found):
        assert leaf.eq(number).all()


def test_slots_limit_what_is_under_way(channel):
    tx, rx = channel(slots=3)

    def start_many() -> None:
        for _ in range(30):
            tx.start(torch.zeros(10), timeout_s=0.5)

    with pytest.raises(TimeoutError, match=r"took no batch in 0\.5 s"):
        start_many()
    started = tx.stats.batches
    assert started == 3
    assert tx.stats.waits >= 1
    for _ in range(started):
        rx.next(timeout_s=10)
    tx.start(torch.ones(10), timeout_s=5)
    assert rx.next(timeout_s=10).get().eq(1).all()


def test_a_slow_receiver_is_not_taken_for_lost(channel):
    tx, rx = channel()
    thread = threading.Thread(target=lambda: [tx.start(torch.full((10,), n)) for n in range(12)])
    thread.start()
    time.sleep(1.3 * TIMEOUT_S)
    assert [rx.next(timeout_s=10).get()[0].item() for _ in range(12)] == list(range(12))
    thread.join()
    time.sleep(1.3 * TIMEOUT_S)  # nothing but beats
    tx.start(torch.zeros(1))
    assert rx.next(timeout_s=10).get() == 0


def test_several_senders_come_and_go(channel, store):
    first, rx = channel()
    others = [distributed.sender(store=store, peer_timeout_s=TIMEOUT_S) for _ in range(3)]
    seen: dict[int, list[int]] = {}
    for number in range(5):
        for sender, tx in enumerate([first, *others]):
            tx.start({"sender": sender, "number": number})
        for _ in range(4):
            batch = rx.next(timeout_s=10).get()
            seen.setdefault(batch["sender"], []).append(batch["number"])
    assert seen == {sender: list(range(5)) for sender in range(4)}
    assert rx.stats.open_peers == 4
    for tx in others:
        tx.close()
    with distributed.sender(store=store, peer_timeout_s=TIMEOUT_S) as late:
        late.start("late")
        assert rx.next(timeout_s=10).get() == "late"
    first.start("first")
    assert rx.next(timeout_s=10).get() == "first"
    assert rx.stats.lost_peers == 0


def test_values_that_need_a_pickle_are_refused_and_the_next_batch_comes(channel):
    tx, rx = channel()
    tx.start({"a": torch.zeros(2), "b": slice(1, 2)})
    tx.start({"a": torch.ones(2)})
    with pytest.raises(ValueError, match=r"^batch 0 of \S+: data\['b'\] has .*allow_pickle"):
        rx.next(timeout_s=10)
    assert rx.next(timeout_s=10).get()["a"].tolist() == [1, 1]
    assert rx.stats.refused == 1


def test_values_that_need_a_pickle_come_from_senders_that_are_trusted(channel):
    tx, rx = channel(allow_pickle=True)
    tx.start({"a": torch.zeros(2), "b": slice(1, 2)})
    assert rx.next(timeout_s=10).get()["b"] == slice(1, 2)


def test_what_cannot_be_packed_is_raised_and_the_next_batch_is_sent(channel):
    tx, rx = channel()
    for _ in range(5):  # more than there are slots
        with pytest.raises(TypeError, match="cannot be pickled"):
            tx.start({"a": threading.Lock()})
    tx.start(torch.ones(2))
    assert rx.next(timeout_s=10).get().tolist() == [1, 1]


def test_a_checksum_finds_changed_bytes(channel, monkeypatch):
    tx, rx = channel(of=("checksum",), checksum=True)
    tx.start(torch.arange(100))
    assert rx.next(timeout_s=10).get().tolist() == list(range(100))
    checksum_of = senders.checksum_of
    monkeypatch.setattr(senders, "checksum_of", lambda memory: checksum_of(memory) ^ 1)
    tx.start(torch.arange(100))
    monkeypatch.undo()
    tx.start(torch.ones(1))
    with pytest.raises(ValueError, match="their checksum differs"):
        rx.next(timeout_s=10)
    assert rx.next(timeout_s=10).get() == 1


def test_threads_share_both_ends(channel):
    tx, rx = channel(slots=2)
    with ThreadPoolExecutor(8) as pool:
        for thread in range(4):
            pool.submit(lambda of: [tx.start((of, n)) for n in range(50)], thread)
        found = [
            pool.submit(lambda: [rx.next(timeout_s=20).get() for _ in range(50)]) for _ in range(4)
        ]
        taken = [each.result() for each in found]
    assert sorted(each for one in taken for each in one) == [
        (of, n) for of in range(4) for n in range(50)
    ]
    for one in taken:  # in the order of each sender's thread
        for of in range(4):
            numbers = [number for which, number in one if which == of]
            assert numbers == sorted(numbers)


def test_a_receiver_for_a_wrong_device_is_refused_when_it_is_made(store):
    for device in ("gpu", "sim:9"):
        with pytest.raises(ValueError, match=device):
            distributed.receiver(device=device, store=store)


def test_an_end_that_was_not_made_is_dropped_in_silence():
    with pytest.raises(TypeError, match="missing"):
        distributed.Sender()
    gc.collect()  # a warning of what __del__ raises would be an error


def test_wrong_options_are_refused(store):
    for call in (distributed.sender, distributed.receiver):
        names = ["slots", "peer_timeout_s"]
        if call is distributed.sender:
            names.append("connect_timeout_s")
        for name in names:
            with pytest.raises(ValueError, match=f"{name} must be positive"):
                call(store=store, **{name: 0})
        with pytest.raises(ValueError, match="host or interface"):
            call(store=store, host="a", interface="b")
        with pytest.raises(TypeError, match="a rank is an int"):
            call("0", store=store)
        with pytest.raises(TypeError, match="peer_timeout_s must be a number of seconds; got 'x'"):
            call(store=store, peer_timeout_s="x")
        with pytest.raises(TypeError, match=r"store must be a store of torch\.distributed"):
            call(store="tcp://here")
        with pytest.raises(RuntimeError, match="has not been initialised"):
            call()
