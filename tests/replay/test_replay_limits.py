"""The rows that are sampled for each that is inserted, and who waits for whom."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from each_case import together
from replay_support import RowBuffer, rows_of

from tdcopier._replay.limiter import Limiter
from tdcopier.replay import ChannelClosedError

pytestmark = pytest.mark.timeout(60)
WANTED, WITHIN = 4.0, 0.05


@together(("rows", "size"), [(1, 1), (1, 1000), (7, 32), (100, 1)])
@pytest.mark.parametrize("wanted", [0.1, 4.0, 50.0])
@pytest.mark.parametrize("tolerance", [None, 0, 10])
@pytest.mark.parametrize("eager", ["insert", "sample"])
def test_either_side_may_always_go_on_and_the_ratio_is_kept(rows, size, wanted, tolerance, eager):
    limiter = Limiter(wanted, 10, tolerance, 0)
    for _ in range(2000):
        may = {
            "insert": limiter.may_insert(limiter.inserted),
            "sample": limiter.may_sample(limiter.inserted),
        }
        assert any(may.values())
        other = "sample" if eager == "insert" else "insert"
        if may[eager] and (eager == "insert" or limiter.inserted >= 10):
            side = eager
        else:
            side = other if may[other] else eager
        if side == "insert":
            limiter.note_inserted(rows)
        else:
            limiter.note_sampled(size)
    largest = max(rows * wanted, size)
    over = largest if tolerance is None else tolerance
    due = (limiter.inserted - 10) * wanted - limiter.sampled
    assert abs(due) <= max(over, 0.1 * 10 * wanted) + largest


def test_a_buffer_that_has_rows_is_sampled_at_once():
    limiter = Limiter(1.0, 10, 0, 10)
    assert not limiter.may_sample(10)  # none were inserted since
    limiter.note_inserted(1)
    assert limiter.may_sample(11)
    assert not limiter.may_insert(11)


def test_without_a_ratio_samples_wait_for_the_first_rows_alone():
    limiter = Limiter(None, 3, None, 0)
    assert not limiter.may_sample(2)
    assert limiter.may_sample(3)
    assert limiter.may_insert(10**9)


@pytest.mark.parametrize("slow", ["actors", "learner"])
@pytest.mark.parametrize("is_local", [False, True])
def test_the_ratio_is_kept_where_one_side_is_ten_times_too_slow(serve, connect, slow, is_local):
    server = serve(RowBuffer(10_000), samples_per_insert=WANTED)
    actors = [connect() for _ in range(2)]
    learner = server if is_local else connect()
    pause_s = 0.01

    def act(client: Any) -> int:
        done = 0
        try:
            while True:
                client.extend(rows_of(0, 5))
                done += 5
                if slow == "actors":
                    time.sleep(pause_s)
        except ChannelClosedError:
            return done

    with ThreadPoolExecutor() as pool:
        acting = [pool.submit(act, client) for client in actors]
        for _ in range(200):
            assert len(learner.sample(8)["number"]) == 8
            if slow == "learner":
                time.sleep(pause_s)
        stats = server.stats
        server.close()
        done = sum(each.result(20) for each in acting)
    assert abs(stats.samples_per_insert - WANTED) <= WITHIN * WANTED
    assert done >= stats.inserted - 10
    waits = (stats.insert_waits, stats.sample_waits)
    waited_s = (stats.insert_wait_s, stats.sample_wait_s)
    assert max(waits) == waits[slow == "actors"] > 10
    assert max(waited_s) == waited_s[slow == "actors"] > 0.1


@pytest.mark.parametrize("is_local", [False, True])
def test_a_call_waits_for_the_other_side_no_longer_than_it_may(serve, connect, threads, is_local):
    server = serve(samples_per_insert=1.0, min_size=5, tolerance=1, wait_timeout_s=0.3)
    client = server if is_local else connect(prefetch=0)
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=r"to sample has come in 0\.3 s: too few rows are inser"):
        client.sample(4)
    client.extend(rows_of(0, 5))
    client.extend(rows_of(5, 3))
    with pytest.raises(
        TimeoutError, match=r"to insert has come in 0\.3 s: too few rows are sampled"
    ):
        client.extend(rows_of(8, 3))
    assert 0.6 <= time.monotonic() - begin < 5
    assert server.stats.inserted == 8  # the rows that were late are not written
    assert server.stats.insert_waits == server.stats.sample_waits == 1
    writing = threads.submit(client.extend, rows_of(8, 3))
    assert len((server if is_local else connect(prefetch=0)).sample(4)["number"]) == 4
    assert len(writing.result(10)) == 3
    for wrong in (0, -1.0):
        with pytest.raises(ValueError, match="wait_timeout_s must be positive"):
            serve(wait_timeout_s=wrong)


def test_the_first_sample_waits_for_enough_rows(serve, connect, threads):
    server, client, other = serve(min_size=10), connect(), connect()
    sampling = threads.submit(client.sample)
    for number in range(9):
        other.add({key: row[0] for key, row in rows_of(number, 1).items()})
    assert server.stats.sampled == 0
    assert not sampling.done()
    other.extend(rows_of(9, 1))
    assert len(sampling.result(10)["number"]) == 4
    assert server.stats.sample_waits == 3  # with those that were asked for ahead
    assert server.stats.sample_wait_s > 0


def test_a_size_that_the_buffer_never_has_is_refused(serve):
    buffer = RowBuffer()
    buffer.storage = SimpleNamespace(max_size=5)
    with pytest.raises(ValueError, match="holds 5 rows, and never has min_size=6"):
        serve(buffer, min_size=6)
