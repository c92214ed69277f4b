"""A client's calls give what the same calls of the buffer give, and raise what they raise."""

from __future__ import annotations

import os
import pickle
import time
from typing import Any

import pytest
import replay_support
import torch
from replay_support import RowBuffer, rows_of
from support import comes_true, run_python

import tdcopier
from tdcopier import distributed
from tdcopier.replay import ReplayClient, ReplayServer

pytestmark = pytest.mark.timeout(60)


def same(found: Any, wanted: Any) -> None:
    if isinstance(wanted, (tuple, list)):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            same(one, other)
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key, value in wanted.items():
            same(found[key], value)
    else:
        assert found.dtype == wanted.dtype
        assert torch.equal(found.cpu(), wanted)


def play(buffer: Any) -> list[Any]:
    """Makes calls, and returns their results."""
    found = [buffer.extend(rows_of(0, 20)), buffer.sample(), buffer.sample(7)]
    found.append(buffer.sample(return_info=True))
    buffer.update_priority(torch.arange(10), torch.zeros(10))
    found.append(buffer.sample(16))
    found.append(torch.tensor(buffer.add({key: row[0] for key, row in rows_of(20, 1).items()})))
    sampled = buffer.sample(6)
    sampled["error"] = torch.linspace(1, 100, 6)
    buffer.update_tensordict_priority(sampled)
    found += [sampled, buffer.sample(16), torch.tensor(len(buffer))]
    buffer.extend(rows_of(21, 200), update_priority=False)
    found += [buffer.sample(), torch.tensor(buffer.write_count)]
    state = buffer.state_dict()
    found += [buffer.sample(), buffer.sample(3, return_info=True)]
    buffer.load_state_dict(state)
    found += [buffer.sample(), buffer.sample(3, return_info=True)]
    same(found[-2:], found[-4:-2])
    return found


def test_a_clients_calls_are_those_of_the_buffer(serve, connect):
    server = serve()
    same(play(connect(prefetch=0)), play(RowBuffer()))
    assert server.problems == []


def test_a_servers_own_calls_are_those_of_the_buffer(serve):
    same(play(serve()), play(RowBuffer()))


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_samples_arrive_on_the_device_in_their_order(serve, connect, device, prefetch):
    serve()
    local = RowBuffer()
    client = connect(device=device, prefetch=prefetch, batch_size=9)
    for buffer in (client, local):
        index = buffer.extend(rows_of(0, 50))
        assert index.device.type == "cpu"
    for _ in range(20):
        found = client.sample()
        assert {leaf.device.type for leaf in found.values()} == {torch.device(device).type}
        same(found, local.sample(9))
    assert client.stats.sampled == 9 * (20 + prefetch)


def test_a_buffer_may_have_its_samples_on_a_device(serve, connect, device):
    class OnDevice(RowBuffer):
        def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
            return tdcopier.copy(super().sample(batch_size, return_info), device)

    serve(OnDevice())
    client, local = connect(), RowBuffer()
    for buffer in (client, local):
        buffer.extend(rows_of(0, 50))
    for _ in range(5):
        same(client.sample(9), local.sample(9))


def test_priorities_may_be_on_the_device(serve, connect, device):
    serve()
    client = connect(device=device, prefetch=0)
    client.extend(rows_of(0, 4))
    sampled = client.sample()
    client.update_priority(torch.tensor([0, 1, 2]), torch.zeros(3, device=device))
    assert client.sample()["number"].cpu().tolist() == [3] * 4
    sampled["index"] = torch.arange(4, device=device)
    sampled["error"] = torch.tensor([1.0, 0, 0, 0], device=device)
    client.update_tensordict_priority(sampled)
    assert client.sample()["number"].cpu().tolist() == [0] * 4


def test_rows_may_be_written_without_a_wait(serve, connect):
    server, client = serve(RowBuffer(1000)), connect()
    for step in range(50):
        assert client.extend(rows_of(3 * step, 3), wait=False) is None
    client.flush()
    assert server._limited.buffer.columns["number"][:150].tolist() == list(range(150))
    client.extend({"other": torch.zeros(3)}, wait=False)
    client.extend(rows_of(0, 1), wait=False)
    with pytest.raises(KeyError, match=r"the replay server: .*the buffer has"):
        client.flush()
    client.flush()
    assert len(server) == 151


def test_iterating_gives_samples_until_the_server_closes(serve, connect):
    server, client = serve(), connect()
    client.extend(rows_of(0, 10))
    count = 0
    for batch in client:
        assert len(batch["number"]) == 4
        count += 1
        if count == 5:
            server.close()
    assert count >= 5
    with pytest.raises(distributed.ChannelClosedError, match="the replay server has closed"):
        client.extend(rows_of(0, 1))


# ---- errors --------------------------------------------------------------------------------------


def test_what_the_buffer_raises_is_raised_at_the_client_and_nothing_else_breaks(serve, connect):
    serve(min_size=0)
    client = connect(prefetch=0)
    with pytest.raises(RuntimeError, match=r"^the replay server: the buffer is empty$"):
        client.sample()
    client.extend(rows_of(0, 10))
    with pytest.raises(KeyError, match=r"the replay server: .*the buffer has"):
        client.extend({"other": torch.zeros(3)})
    with pytest.raises(RuntimeError, match=r"^the replay server: "):
        client.sample(-1)
    with pytest.raises(AttributeError, match=r"^the replay server: 'tuple' object"):
        client.extend((torch.zeros(3),))
    assert len(client) == 10
    assert len(client.sample()["number"]) == 4


class OddError(ZeroDivisionError):
    def __init__(self) -> None:
        super().__init__("odd")


class Odd(RowBuffer):
    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        if batch_size == 1:
            raise OddError
        if batch_size == 2:
            raise UnicodeDecodeError("utf-8", b"", 0, 1, "odd")
        if batch_size == 3:
            return {"pickled": RowBuffer()}
        return super().sample(batch_size, return_info)


def test_errors_of_other_classes_are_raised_as_the_nearest_builtin_one(serve, connect):
    serve(Odd())
    client = connect(prefetch=0)
    client.extend(rows_of(0, 10))
    with pytest.raises(ZeroDivisionError, match=r"^the replay server: odd$"):
        client.sample(1)
    with pytest.raises(RuntimeError, match="the replay server: 'utf-8'"):
        client.sample(2)
    with pytest.raises(ValueError, match=r"server: the answer\['pickled'\] has a pickle"):
        client.sample(3)
    assert len(client.sample()["number"]) == 4


def test_an_error_of_a_call_without_an_answer_is_raised_by_a_later_one(serve, connect):
    serve()
    client = connect()
    client.extend(rows_of(0, 10))
    client.update_priority(torch.tensor([1000]), torch.ones(1))
    len(client)  # its answer comes after
    with pytest.raises(IndexError, match="the replay server: an earlier update_priority: index"):
        len(client)
    assert len(client) == 10


def test_pickles_are_refused_where_they_are_not_allowed(serve, connect):
    serve()
    client = connect()
    with pytest.raises(ValueError, match=r"^data\['number'\] has a pickle \(it names .*RowBuffer"):
        client.extend({"number": RowBuffer()})
    with pytest.raises(ValueError, match=r"^priority has a pickle \(it names builtins\.slice\)"):
        client.update_priority(0, slice(1))
    client.extend(rows_of(0, 4))
    assert len(client) == 4


def test_mistaken_arguments_are_refused(store):
    with pytest.raises(TypeError, match="a dict is no replay buffer: it has no extend"):
        ReplayServer({}, store=store)
    for options, error, text in (
        ({"min_size": 0.5}, TypeError, "min_size"),
        ({"min_size": -1}, ValueError, "min_size"),
        ({"samples_per_insert": 0}, ValueError, "samples_per_insert"),
        ({"tolerance": 1}, ValueError, "give both"),
        ({"tolerance": -1, "samples_per_insert": 1}, ValueError, "tolerance"),
        ({"peer_timeout_s": 0}, ValueError, "peer_timeout_s"),
        ({"host": "a", "interface": "b"}, ValueError, "not both"),
    ):
        with pytest.raises(error, match=text):
            ReplayServer(RowBuffer(), store=store, **options)
    for options in (
        {"prefetch": -1},
        {"prefetch": 0.5},
        {"reconnect_timeout_s": -1},
        {"peer_timeout_s": 0},
    ):
        with pytest.raises(ValueError, match=next(iter(options))):
            ReplayClient(store=store, **options)
    with pytest.raises(ConnectionError, match="no replay server with the name 'replay' is"):
        ReplayClient(store=store, connect_timeout_s=0.3)


def test_messages_of_strangers_break_nothing(serve, connect, store):
    server, client = serve(), connect()
    with distributed.sender(store=store, name="replay/replay", host="127.0.0.1") as tx:
        for message in (1, {"kind": 1}, torch.ones(1), RowBuffer()):
            tx.start(message)
        damaged = {"kind": 77, "client": "a", "attempt": 1, "number": 0, "answered": 0}
        tx.start({**damaged, "value": None})
        while len(server.problems) < 5:
            time.sleep(0.01)
    assert sum("no request to a replay server" in text for text in server.problems) == 3
    assert sum("damaged" in text for text in server.problems) == 1
    client.extend(rows_of(0, 4))
    assert len(client) == 4


# ---- the ends ------------------------------------------------------------------------------------


def test_with_closes_both_ends(store):
    with ReplayServer(RowBuffer(), store=store, host="127.0.0.1") as server:
        with ReplayClient(store=store, host="127.0.0.1") as client:
            client.extend(rows_of(0, 5))
            assert repr(client) == f"<ReplayClient 'replay', of {client.peer}>"
            assert server.peers == [client.peer]
            shown = "<ReplayServer 'replay', 5 rows, 1 clients, 5 rows inserted, 0 sampled>"
            assert repr(server) == shown
            for end in (server, client):
                with pytest.raises(TypeError, match="belongs to its process"):
                    pickle.dumps(end)
        assert repr(client) == "<ReplayClient 'replay', closed>"
        for _ in range(2):
            with pytest.raises(distributed.ChannelClosedError, match="this client is closed"):
                len(client)
            client.close()
        while server.stats.closed_clients < 1:
            time.sleep(0.01)
        assert server.stats.lost_clients == server.stats.clients == 0
    assert repr(server) == "<ReplayServer 'replay', closed>"
    with pytest.raises(distributed.ChannelClosedError, match="this replay server is closed"):
        server.sample()


def test_clients_count_as_closed_that_have_said_so_before_the_server_closed(serve, connect):
    server = serve()
    server._clients._ended = lambda client: None  # as if their threads ended late
    first, second = connect(), connect()
    assert len(first) == len(second) == 0
    first.close()
    assert comes_true(lambda: server.stats.closed_clients == server.stats.clients == 1)
    server.close()
    with pytest.raises(distributed.ChannelClosedError, match="the replay server has closed"):
        len(second)
    second.close()
    found = server.stats
    assert (found.clients, found.closed_clients, found.lost_clients) == (0, 1, 0)


@pytest.mark.parametrize("closed", ["client", "server"])
def test_closing_ends_calls_that_wait(serve, connect, threads, closed):
    server, client = serve(samples_per_insert=1, tolerance=0), connect()
    waiting = [threads.submit(client.sample)]
    if closed == "server":
        waiting.append(threads.submit(server.sample))
        serving = threads.submit(server.serve)
    while client.stats.sample_waits + len(server._limited._queues) < 2:
        time.sleep(0.01)
    (server if closed == "server" else client).close()
    for each in waiting:
        with pytest.raises(distributed.ChannelClosedError):
            each.result(5)
    if closed == "server":
        serving.result(5)


def test_threads_may_share_a_client(serve, connect, threads):
    serve(RowBuffer(capacity=10_000))
    client = connect()

    def work(source: int) -> int:
        for step in range(30):
            client.extend(rows_of(100 * source + step, 1))
            assert len(client.sample()["number"]) == 4
        return 30

    assert sum(threads.map(work, range(4))) == 120
    assert len(client) == 120


def test_a_forked_child_has_no_end(serve, connect):
    server, client = serve(), connect()
    client.extend(rows_of(0, 3))
    child = os.fork()
    if child == 0:
        seen = 0
        for end in (server, client):
            try:
                len(end)
            except RuntimeError as error:
                seen += "belongs to the process" in str(error)
            end.close()
        os._exit(seen)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert len(client) == 3


EXIT = f"""
import sys
sys.path.insert(0, {os.path.dirname(replay_support.__file__)!r})
import torch.distributed as dist
from replay_support import RowBuffer, rows_of
from tdcopier.replay import ReplayClient, ReplayServer

store = dist.HashStore()
server = ReplayServer(RowBuffer(), store=store)
client = ReplayClient(store=store)
client.extend(rows_of(0, 10))
client.sample()
print("open")
"""


def test_the_interpreter_exits_with_open_ends():
    begin = time.monotonic()
    assert run_python(EXIT).split() == ["open"]
    assert time.monotonic() - begin < 20


def test_a_client_needs_no_torchrl():
    text = "import sys; import tdcopier.replay; print([x for x in sys.modules if 'torchrl' in x])"
    assert run_python(text).strip() == "[]"
