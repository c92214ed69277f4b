"""Processes at the other end of a channel, for tests that kill or stop them."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

import torch
import torch.distributed as dist

from tdcopier import distributed

TIMEOUT_S = 2.5
"""Of the channels, so that tests are short."""


class Peer:
    """A process that runs a function of this module with a connection to the store."""

    def __init__(self, role: str, port: int, *arguments: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        self.pipe, there = context.Pipe()
        function = self._functions()[role]
        self.process = context.Process(
            target=_run, args=(function, port, there, *arguments), daemon=True
        )
        self.process.start()
        there.close()

    def _functions(self) -> dict[str, Any]:
        return ROLES

    def says(self, wanted: str) -> None:
        assert self.pipe.poll(30), f"the peer did not say {wanted!r}"
        found = self.pipe.recv()
        assert found.startswith(wanted), found

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def store_of(port: int) -> Any:
    return dist.TCPStore("127.0.0.1", port, is_master=False)


def _run(function: Any, port: int, pipe: Any, *arguments: Any) -> None:
    torch.set_num_threads(1)
    try:
        function(store_of(port), pipe, *arguments)
    except BaseException as error:
        pipe.send(f"{type(error).__name__}: {error}")


def batch_of(sender: str, number: int, size: int) -> dict[str, Any]:
    return {"sender": sender, "number": number, "a": torch.full((size,), number)}


def _send(store: Any, pipe: Any, name: str, count: int, size: int) -> None:
    tx = distributed.sender(store=store, peer_timeout_s=TIMEOUT_S)
    for number in range(count):
        tx.start(batch_of(name, number, size))
    tx.flush()
    pipe.send("sent")
    pipe.recv()  # until the test ends it
    tx.close()
    pipe.send("closed")


def _receive(store: Any, pipe: Any, count: int) -> None:
    rx = distributed.receiver(store=store, peer_timeout_s=TIMEOUT_S)
    pipe.send("listens")
    for _ in range(count):
        rx.next(timeout_s=60).get()
    pipe.send("received")
    pipe.recv()
    rx.close()
    pipe.send("closed")


def _send_on(store: Any, pipe: Any, name: str, size: int) -> None:
    tx = distributed.sender(store=store, peer_timeout_s=TIMEOUT_S)
    number = 0
    while True:
        tx.start(batch_of(name, number, size))
        number += 1


def _send_as_rank_1(store: Any, pipe: Any, count: int) -> None:
    dist.init_process_group("gloo", store=store, rank=1, world_size=2)
    tx = distributed.sender(0, peer_timeout_s=TIMEOUT_S)
    for number in range(count):
        tx.start(batch_of("rank 1", number, 10))
    tx.flush()
    pipe.send("sent")
    pipe.recv()


ROLES = {"send": _send, "send on": _send_on, "send as rank 1": _send_as_rank_1, "receive": _receive}
