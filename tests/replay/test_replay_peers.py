"""Clients and servers in other processes that come, go, are killed or stopped."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist
from replay_peers import ReplayPeer, client_of, server_of
from replay_support import TIMEOUT_S, RowBuffer, checked_rows, count_torn

from tdcopier import distributed
from tdcopier.replay import ReplayServer, ReplayStats

pytestmark = pytest.mark.timeout(60)
ENDS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
NOTICED_S = 2 * TIMEOUT_S


@pytest.fixture
def store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]


@pytest.fixture
def peers() -> Iterator[list[ReplayPeer]]:
    made: list[ReplayPeer] = []
    yield made
    for peer in made:
        peer.end()


def rows_by_source(server: ReplayServer) -> dict[int, list[int]]:
    """Returns the numbers of the rows in the buffer of each source, and checks each row."""
    buffer = server._limited.buffer
    rows = {key: column[: len(buffer)] for key, column in buffer.columns.items()}
    assert count_torn(rows) == 0
    found: dict[int, list[int]] = {}
    for source, number in zip(rows["source"].tolist(), rows["number"].tolist(), strict=True):
        found.setdefault(source, []).append(number)
    return found


@pytest.mark.parametrize("where", ["this process", "another"])
def test_a_second_server_of_a_name_is_refused_at_once(store, peers, where):
    refused = pytest.raises(RuntimeError, match="another replay server with the name 'replay' is")
    if where == "another":
        peers.append(ReplayPeer("serve", store.port, 100, None, {}))
        peers[0].says("serves")
        first = None
    else:
        first = server_of(store, 100)
    with client_of(store) as client:
        client.extend(checked_rows(1, 0, 5))
        begin = time.monotonic()
        with refused:
            server_of(store, 100)
        assert time.monotonic() - begin < TIMEOUT_S
        assert len(client) == 5
        with server_of(store, 100, name="other"):
            pass
        if first is None:
            peers[0].pipe.send("close")
            peers[0].says("closed")
        else:
            first.close()
    server_of(store, 100).close()


def test_rows_of_several_clients_arrive_whole_and_once(store, peers):
    with server_of(store, 10_000) as server:
        peers += [ReplayPeer("act", store.port, source, 7, 60) for source in (1, 2)]
        peers.append(ReplayPeer("learn", store.port, 60, 33))
        for peer in peers:
            peer.says("connected")
        torn = sum(count_torn(server.sample(50)) for _ in range(50))
        for peer in peers[:2]:
            source, done, reconnects = peer.told()
            assert (done, reconnects) == (60, 0)
            assert rows_by_source(server)[source] == list(range(7 * 60))
        assert peers[2].told() == (0, 60, 0)
        assert torn == 0
        for peer in peers:
            peer.pipe.send("end")
        while server.stats.closed_clients < 3:
            time.sleep(0.01)
        assert server.problems == []


@pytest.mark.parametrize("how", ENDS)
def test_a_client_that_ends_is_noticed_and_the_others_go_on(store, peers, how):
    with server_of(store, 200_000) as server:
        peers += [ReplayPeer("act on", store.port, source, 5) for source in (1, 2)]
        for peer in peers:
            peer.says("connected")
            peer.told()
        peers[0].signal(ENDS[how])
        begin = time.monotonic()
        while server.stats.lost_clients == 0:
            assert time.monotonic() - begin < NOTICED_S
            time.sleep(0.01)
        assert any("has ended" in text or "has not answered" in text for text in server.problems)
        before = server.stats.inserted
        while server.stats.inserted < before + 50:
            time.sleep(0.01)
        assert server.stats.clients == 1
        with server._limited.lock:
            for numbers in rows_by_source(server).values():
                assert numbers == list(range(len(numbers)))
                assert len(numbers) % 5 == 0


def test_a_client_that_takes_no_answers_holds_up_no_other(store, peers):
    with server_of(store, 1000) as server, client_of(store) as client:
        client.extend(checked_rows(1, 0, 100, width=20_000))
        peers.append(ReplayPeer("ask ahead", store.port))
        peers[0].says("connected")
        begin = time.monotonic()
        assert sum(count_torn(client.sample(1)) for _ in range(10)) == 0
        peers[0].signal(signal.SIGSTOP)
        assert sum(count_torn(client.sample(1)) for _ in range(10)) == 0
        assert time.monotonic() - begin < 10
        while server.stats.lost_clients == 0:
            time.sleep(0.01)


@pytest.mark.parametrize("how", ENDS)
def test_a_client_that_waits_for_samples_and_ends_leaves_no_part(store, peers, how):
    with server_of(store, 1000, samples_per_insert=1.0, tolerance=0) as server:
        peers.append(ReplayPeer("act on", store.port, 1, 5))
        peers[0].says("connected")
        peers[0].told()
        while not any(server._limited._queues.values()):  # the next one waits
            time.sleep(0.01)
        peers[0].signal(ENDS[how])
        while server.stats.lost_clients == 0:
            time.sleep(0.01)
        assert rows_by_source(server)[1] == list(range(5))
        server.sample(5)
        assert len(server) == 5
        with client_of(store) as client:  # its turn has come
            client.extend(checked_rows(2, 0, 5))
        assert rows_by_source(server)[2] == list(range(5))


@pytest.mark.parametrize("how", ENDS)
def test_clients_find_the_next_server_with_the_state_of_the_one_before(store, peers, how):
    peers.append(ReplayPeer("serve", store.port, 100_000, None, {}))
    peers[0].says("serves")
    peers += [ReplayPeer("act", store.port, source, 3, 1000) for source in (1, 2)]
    peers.append(ReplayPeer("learn", store.port, 1000, 10))
    for peer in peers[1:]:
        peer.says("connected")
    while ReplayStats(*_asked(peers[0], "stats")).inserted < 60:
        time.sleep(0.01)
    state = _asked(peers[0], "state")
    inserted = state["limiter"]["inserted"]
    peers[0].signal(ENDS[how])
    with server_of(store, 100_000, state=state) as server:
        for peer in peers[1:3]:
            source, done, reconnects = peer.told()
            assert (done, reconnects) == (1000, 1)
            numbers = rows_by_source(server)[source]
            assert len(set(numbers)) == len(numbers)  # none twice
            assert numbers[-1] == 2999
        torn, done, reconnects = peers[3].told()
        assert (torn, done, reconnects) == (0, 1000, 1)
        assert server.stats.inserted >= inserted


def _asked(peer: ReplayPeer, what: str) -> Any:
    peer.pipe.send(what)
    return peer.told()


def test_a_server_that_closes_ends_its_clients_at_once(store, peers):
    peers.append(ReplayPeer("serve", store.port, 1000, None, {"samples_per_insert": 1.0}))
    peers[0].says("serves")
    peers += [ReplayPeer("act", store.port, 1, 5, 10_000)]
    peers[1].says("connected")
    peers[0].pipe.send("close")
    peers[0].says("closed")
    begin = time.monotonic()
    _, _, reconnects = peers[1].told()
    assert reconnects == 0
    assert time.monotonic() - begin < TIMEOUT_S


def test_a_batch_without_an_acknowledgement_is_not_written_twice(store, monkeypatch):
    """The server writes it, and the answer is lost with the connection."""
    first = server_of(store, 1000)
    client = client_of(store)
    client.extend(checked_rows(1, 0, 5))
    answers: list[Any] = []
    served = next(iter(first._clients._clients.values()))
    monkeypatch.setattr(served, "answer", lambda answer, **_: answers.append(answer))

    def restart() -> ReplayServer:
        while not answers:
            time.sleep(0.01)
        state = first.state_dict()
        first.close(restarts=True)
        return server_of(store, 1000, state=state)

    with ThreadPoolExecutor() as pool:
        restarting = pool.submit(restart)
        assert client.extend(checked_rows(1, 5, 5)).tolist() == [5, 6, 7, 8, 9]
        second = restarting.result()
    with second, client:
        assert rows_by_source(second) == {1: list(range(10))}
        assert second.stats.repeats == 1
        assert second.stats.inserted == 10
        assert client.reconnects == 1
        client.extend(checked_rows(1, 10, 5))
        assert second.state_dict()["written"][client._connection.client].keys() == {2}


def test_no_client_comes_before_the_state_is_loaded(store):
    """What it had written would be gone with the rows that the state replaces."""
    first = server_of(store, 1000)
    with client_of(store) as client:
        client.extend(checked_rows(1, 0, 15))
        first.close(restarts=True)
        state = first.state_dict()
        buffer = RowBuffer(1000)
        load = buffer.load_state_dict

        def load_late(given: Any) -> None:
            time.sleep(0.5)  # the client looks for a server meanwhile
            load(given)

        buffer.load_state_dict = load_late  # type: ignore[method-assign]
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(client.extend, checked_rows(1, 15, 5))
            options = {"host": "127.0.0.1", "peer_timeout_s": TIMEOUT_S}
            with ReplayServer(buffer, store=store, state=state, **options) as second:
                assert writing.result(20).tolist() == [15, 16, 17, 18, 19]
                assert len(client) == len(second) == 20


def test_batches_without_a_wait_are_written_once_by_the_next_server(store):
    first = server_of(store, 1000)
    with client_of(store) as client:
        for step in range(20):
            client.extend(checked_rows(1, 5 * step, 5), wait=False)
        first.close(restarts=True)
        state = first.state_dict()
        with server_of(store, 1000, state=state) as second:
            client.flush()
            assert rows_by_source(second) == {1: list(range(100))}
            assert client.reconnects <= 1  # none, if all answers were there


def test_a_client_gives_up_when_no_server_comes(store):
    server = server_of(store, 100)
    client = client_of(store)
    client._connection._reconnect_s = 0.5
    server.close(restarts=True)
    for _ in range(2):
        with pytest.raises(
            distributed.PeerLostError, match=r"none has come in its place in 0\.5 s"
        ):
            len(client)
    client.close()


def test_a_stopped_client_that_goes_on_is_taken_again(store, peers):
    with server_of(store, 200_000) as server:
        peers.append(ReplayPeer("act", store.port, 1, 2, 300))
        peers[0].says("connected")
        while server.stats.inserted < 10:
            time.sleep(0.01)
        peers[0].signal(signal.SIGSTOP)
        while server.stats.lost_clients == 0:
            time.sleep(0.01)
        peers[0].signal(signal.SIGCONT)
        assert peers[0].told() == (1, 300, 1)
        assert rows_by_source(server)[1] == list(range(600))
