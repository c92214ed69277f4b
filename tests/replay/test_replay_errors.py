"""Errors of the buffer, and interrupts, leave no call that waits for an answer that never comes."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from replay_support import RowBuffer, rows_of

from tdcopier.replay import ReplayClient, ReplayServer, ShardedReplayClient

pytestmark = pytest.mark.timeout(60)


class Untold(Exception):
    def __str__(self) -> str:
        raise LookupError("never")


class Refusing(RowBuffer):
    """Raises an error once."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error: BaseException | None = error

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        error, self.error = self.error, None
        if error is not None:
            raise error
        return super().sample(batch_size, return_info)


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (SystemExit(3), RuntimeError, "3"),
        (GeneratorExit(), RuntimeError, "GeneratorExit"),
        (Untold(), RuntimeError, "Untold, whose text cannot be had"),
        (FileNotFoundError("no \udcff"), FileNotFoundError, r"no \\udcff"),
    ],
    ids=["SystemExit", "GeneratorExit", "no text", "no UTF-8"],
)
def test_what_the_buffer_raises_the_client_raises_and_goes_on(serve, connect, error, kind, text):
    server = serve(Refusing(error))
    client, other = connect(prefetch=0), connect(prefetch=0)
    client.extend(rows_of(0, 20))
    with pytest.raises(Exception, match=text) as raised:
        client.sample()
    assert raised.type in (kind, Exception)
    assert len(client.sample()["index"]) == len(other.sample()["index"]) == 4
    assert len(server) == 20


def test_an_error_of_a_sample_is_raised_once(serve, connect):
    serve(min_size=0)
    client = connect(prefetch=3, batch_size=4)
    with pytest.raises(RuntimeError, match="the buffer is empty"):
        client.sample()
    client.extend(rows_of(0, 20))
    for _ in range(6):
        assert len(client.sample()["index"]) == 4


def test_samples_of_many_sizes_leave_few_batches(serve, connect):
    serve()
    client = connect(prefetch=2)
    client.extend(rows_of(0, 50))
    for size in range(1, 30):
        assert len(client.sample(size)["index"]) == size
    assert sum(map(len, client._ahead.values())) <= 8
    assert len(client.sample(1)["index"]) == 1


@pytest.mark.parametrize("prefetch", [0, 2], ids=["while it waits", "while it looks for others"])
def test_a_sample_after_an_interrupt_has_an_answer(serve, connect, prefetch):
    serve()
    client = connect(batch_size=8, prefetch=prefetch)
    client.extend(rows_of(0, 50))
    client.sample()
    number, connection = client._ask_for_samples(None, False), client._connection
    receiver = connection._rx
    own = receiver._start_copy

    def interrupted(peer: str, arrived: Any) -> Any:
        receiver._start_copy = own
        own(peer, arrived)
        raise KeyboardInterrupt

    if prefetch:
        connection.answer(number)
        time.sleep(0.2)  # the next has come
    receiver._start_copy = interrupted
    with pytest.raises(KeyboardInterrupt):
        connection.read_what_has_come() if prefetch else connection.answer(number)
    for _ in range(5):
        assert len(client.sample()["index"]) == 8
    assert client.reconnects == 1


def test_a_flush_that_was_interrupted_waits_again(serve, connect, threads):
    server = serve(samples_per_insert=1.0, min_size=1, tolerance=1)
    client = connect()
    for number in range(3):
        client.extend(rows_of(4 * number, 4), wait=False)
    own, connection = client._connection.answer, client._connection

    def interrupted(number: int) -> Any:
        connection.answer = own
        raise KeyboardInterrupt

    connection.answer = interrupted
    with pytest.raises(KeyboardInterrupt):
        client.flush()
    flushed = threads.submit(client.flush)
    time.sleep(0.3)
    assert not flushed.done()
    while len(server) < 12:
        server.sample(2)
    flushed.result(20)


def test_a_sharded_sample_does_not_wait_for_a_shard_without_rows(store, opened, threads):
    options = {"store": store, "peer_timeout_s": 2.5, "host": "127.0.0.1"}
    for name in ("one", "two"):
        opened.append(ReplayServer(RowBuffer(), name=name, **options))
    clients = [ReplayClient(name=name, **options) for name in ("one", "two")]
    opened.append(sharded := ShardedReplayClient(clients, batch_size=6))
    waits = threads.submit(sharded.sample)
    time.sleep(0.2)
    clients[1].extend(rows_of(0, 20))
    index = waits.result(20)["index"]
    assert index.tolist() == [each | 1 for each in index.tolist()]
    with pytest.raises(RuntimeError, match="the replay server: cannot sample"):
        sharded.sample(0)
    sharded.update_priority(int(index[0]), 7.0)
    sharded.update_priority([int(index[0]), int(index[1])], torch.tensor([1.0, 2.0]))
    assert len(sharded) == 20


def test_a_sharded_sample_that_waits_holds_up_no_extend(store, opened, threads):
    options = {"store": store, "peer_timeout_s": 2.5, "host": "127.0.0.1"}
    for name in ("one", "two"):
        opened.append(ReplayServer(RowBuffer(), name=name, **options))
    clients = [ReplayClient(name=name, **options) for name in ("one", "two")]
    opened.append(sharded := ShardedReplayClient(clients, batch_size=6))
    waits = threads.submit(sharded.sample)
    time.sleep(0.2)
    threads.submit(sharded.extend, rows_of(0, 20)).result(20)
    assert len(waits.result(20)["index"]) == 6


def test_a_client_waits_for_the_server_that_comes_after_one_that_closes(store, opened):
    options = {"store": store, "peer_timeout_s": 2.5, "host": "127.0.0.1"}
    servers = [ReplayServer(RowBuffer(), **options)]
    found: list[Any] = []

    def make() -> None:
        for _ in range(6):
            with ReplayClient(**options, connect_timeout_s=15) as client:
                found.append(len(client))

    thread = threading.Thread(target=make)
    thread.start()
    for _ in range(3):
        time.sleep(0.1)
        servers[-1].close(restarts=True)
        servers.append(ReplayServer(RowBuffer(), **options))
    opened.append(servers[-1])
    thread.join(50)
    assert found == [0] * 6
