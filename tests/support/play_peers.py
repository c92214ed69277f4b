"""Kills and stops either end of a channel at each of its messages, beside one that goes on.

    python tests/support/play_peers.py --times 50

Batches of some sizes are sent, the first of which makes the receiver's memory grow. After each kill
it must be noticed in time, the batches of the other channel must come on in their order with their
values, and the next process must be able to join.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from channel_peers import TIMEOUT_S, Peer, batch_of
from tqdm import tqdm

from tdcopier import distributed

NOTICED_S = 5.0
SIZES = (10, 1_000_000)
MESSAGES = 4
HOW = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=10, help="of each end and each signal")
    times = parser.parse_args().times
    torch.set_num_threads(1)
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    wrong: list[str] = []
    longest_s: dict[str, float] = {}
    cases = list(itertools.product(("sender", "receiver"), HOW, range(times)))
    for end, how, number in tqdm(cases, "peers"):
        message, size = number % MESSAGES, SIZES[number // MESSAGES % len(SIZES)]
        name = f"{end} {how} at message {message}, {size} numbers"
        play = _sender_ends if end == "sender" else _receiver_ends
        try:
            took_s = play(store, HOW[how], message, size)
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}: {error}")
            continue
        key = f"{end} {how}"
        longest_s[key] = max(longest_s.get(key, 0.0), took_s)
        if took_s > NOTICED_S:
            wrong.append(f"{name}: noticed after {took_s:.1f} s")
    for each in wrong:
        print(f"WRONG: {each}")
    noticed = ", ".join(f"{key} {took_s:.2f} s" for key, took_s in longest_s.items())
    print(f"{len(cases)} ends, noticed at the latest after: {noticed}; {len(wrong)} wrong")
    return bool(wrong)


def _sender_ends(store: Any, number: int, message: int, size: int) -> float:
    """Ends one of two senders; returns after how many seconds the receiver knows."""
    seen: dict[str, int] = {}

    def take(wanted: str) -> None:
        sender = None
        while sender != wanted:
            batch = rx.next(timeout_s=20).get()
            sender, number = batch["sender"], batch["number"]
            assert number == seen.get(sender, 0), f"{sender}: {number} after {seen}"
            assert batch["a"].eq(number).all(), f"{sender}: other values"
            seen[sender] = number + 1

    with distributed.receiver(store=store, peer_timeout_s=TIMEOUT_S) as rx:
        victim = Peer("send on", store.port, "victim", size)
        other = Peer("send on", store.port, "other", size)
        try:
            for _ in range(message + 1):
                take("victim")
                take("other")
            victim.signal(number)
            begin = time.monotonic()
            while rx.stats.lost_peers == 0:
                assert time.monotonic() - begin < 20, "never noticed"
                take("other")
            took_s = time.monotonic() - begin
            for _ in range(5):
                take("other")
            late = Peer("send on", store.port, "late", size)
            try:
                take("late")
            finally:
                late.end()
        finally:
            victim.end()
            other.end()
    return took_s


def _receiver_ends(store: Any, number: int, message: int, size: int) -> float:
    """Ends a receiver; returns after how many seconds its sender knows. Then there is another."""
    victim = Peer("receive", store.port, message)
    try:
        victim.says("listens")
        tx = distributed.sender(store=store, peer_timeout_s=TIMEOUT_S)
        for sent in range(message):
            tx.start(batch_of("this", sent, size))
        victim.says("received")
        victim.signal(number)
        begin = time.monotonic()
        try:
            while time.monotonic() - begin < 20:
                tx.start(batch_of("this", message, size))
            raise AssertionError("never noticed")
        except distributed.PeerLostError:
            took_s = time.monotonic() - begin
    finally:
        victim.end()
    heir = Peer("receive", store.port, 2)
    try:
        heir.says("listens")
        tx = distributed.sender(store=store, peer_timeout_s=TIMEOUT_S)
        for sent in range(2):
            tx.start(batch_of("this", sent, size))
        heir.says("received")
        heir.pipe.send("end")
        heir.says("closed")
        tx.close()
    finally:
        heir.end()
    return took_s


if __name__ == "__main__":
    sys.exit(main())
