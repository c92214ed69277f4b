"""Plays a replay service for long: at full rate, with kills and stops, and with a ratio to keep.

    python tests/support/play_replay.py --seconds 60
    python tests/support/play_replay.py --times 50
    python tests/support/play_replay.py --limits

Without an option, a short form of all three. Prints "WRONG: ..." for each wrong outcome.

`--seconds`: 4 actors and a learner at full rate. The buffer is a ring of their last rows. It
looks at each batch that is written: those of an actor must come in order, each once and with all
its values, up to the last one that was acknowledged. Then the rows in the ring are looked at.

`--times`: of each of actor, learner and server, killed and stopped. An actor and a learner go on
meanwhile, the same ones for all ends. A server is followed by one with its state of a few
milliseconds before; then an actor's rows must have gaps only where it has found the next server.

`--limits`: 4 rows sampled for each that is inserted, by actors ten times too fast and too slow.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import random
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from replay_peers import ReplayPeer
from replay_support import TIMEOUT_S, WatchedBuffer, checked_rows, count_torn, size_of
from tqdm import tqdm

from tdcopier.replay import ReplayServer

HOW = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
NOTICED_S, HANGS_S = 5.0, 20.0
CYCLE_S = 0.02
"""Longer than a call: an end comes at a random moment in this time."""
CAPACITY, BATCH = 20_000, 64
ACTOR, LEARNER = ("act asked", 2), ("learn asked", BATCH)
ACTORS, PAIR, WIDTH = (2, 3, 4, 5), (2, 4), 64
WANTED, WITHIN, MIN_SIZE, LIMIT_S = 4.0, 0.05, 100, 5.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, help="of a run at full rate")
    parser.add_argument("--times", type=int, help="of each end and each signal")
    parser.add_argument("--limits", action="store_true", help="samples for each row")
    given = parser.parse_args()
    is_short = not (given.seconds or given.times or given.limits)
    torch.set_num_threads(1)
    multiprocessing.set_forkserver_preload(["torch"])
    wrong: list[str] = []
    if given.seconds or is_short:
        wrong += play_run(given.seconds or 5.0)
    if given.times or is_short:
        wrong += play_ends(given.times or 2)
    if given.limits or is_short:
        wrong += play_limits()
    for each in wrong:
        print(f"WRONG: {each}")
    print(f"{len(wrong)} wrong")
    return bool(wrong)


# ---- processes -----------------------------------------------------------------------------------


class Service:
    """A server in this process, with the clients of other processes."""

    def __init__(self, **options: Any) -> None:
        self.store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.buffer, self.players = WatchedBuffer(CAPACITY, BATCH), list[ReplayPeer]()
        self.server = ReplayServer(
            self.buffer, store=self.store, host="127.0.0.1", peer_timeout_s=TIMEOUT_S, **options
        )

    def join(self, role: str, *arguments: Any) -> ReplayPeer:
        self.players.append(ReplayPeer(role, self.store.port, *arguments))
        self.players[-1].says("connected")
        return self.players[-1]

    def close(self) -> None:
        self.server.close()
        for player in self.players:
            player.end()


def _wait(seconds: float, name: str) -> None:
    for _ in tqdm(range(int(seconds * 10)), name):
        time.sleep(0.1)


# ---- a run ---------------------------------------------------------------------------------------


def play_run(seconds: float) -> list[str]:
    """Lets 4 actors and a learner go on; returns what was wrong."""
    service = Service()
    server, buffer = service.server, service.buffer
    try:
        actors = [service.join("act asked", source, WIDTH) for source in ACTORS]
        learner = service.join(*LEARNER)
        before, begin = server.stats, time.monotonic()
        _wait(seconds, "run")
        after, took_s = server.stats, time.monotonic() - begin
        tallies = dict(zip(ACTORS, [actor.asked("end") for actor in actors], strict=True))
        learned = learner.asked("end")
        while server.stats.closed_clients + server.stats.lost_clients < len(service.players):
            assert time.monotonic() - begin < seconds + HANGS_S, "clients do not end"
            time.sleep(0.01)
        wrong = [*buffer.wrong, *server.problems, *_wrong_rows(server.state_dict(), {})]
        acknowledged = {source: tally.done * size_of(source) for source, tally in tallies.items()}
        if buffer.written != acknowledged:
            wrong.append(f"written {buffer.written}, acknowledged {acknowledged}")
        if learned.torn or any(tally.found for tally in (learned, *tallies.values())):
            wrong.append(f"{learned.torn} rows of samples were torn, or a client lost the server")
        if not sum(acknowledged.values()) == server.stats.inserted == server.write_count:
            wrong.append(f"{acknowledged} acknowledged, counted {server.stats}")
    finally:
        service.close()
    row = (3 + WIDTH) * 8
    rows, drawn = after.inserted - before.inserted, after.sampled - before.sampled
    print(
        f"{took_s:.0f} s: {rows / took_s:.0f} rows/s written in batches of "
        f"{size_of(2)} and {size_of(3)}, "
        f"{drawn / BATCH / took_s:.0f} batches/s of {BATCH} rows sampled, "
        f"{(rows + drawn) * row / took_s / 1e6:.1f} MB/s; {after.inserted} rows, "
        f"{learned.done} batches looked at"
    )
    return wrong


# ---- kills and stops -----------------------------------------------------------------------------


class ClientEnds(Service):
    """Ends of clients, of which the server learns."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.learner = self.join(*ACTOR), self.join(*LEARNER)
        self.number = 0

    def play(self, end: str, how: int, dice: random.Random) -> float:
        """Ends a client; returns after how many seconds the server knows."""
        self.number += 1
        victim = self.join(*(("act asked", 10 + self.number) if end == "actor" else LEARNER))
        lost = self.server.stats.lost_clients
        while not victim.asked().done:
            pass
        time.sleep(dice.random() * CYCLE_S)
        victim.signal(how)
        begin = time.monotonic()
        while self.server.stats.lost_clients == lost:
            assert time.monotonic() - begin < HANGS_S, "never noticed"
            time.sleep(0.005)
        took_s = time.monotonic() - begin
        self.players.pop().end()
        _check_others(self.actor, self.learner, 0)
        stats = self.server.stats
        assert (stats.lost_clients, stats.clients) == (lost + 1, 2), self.server.problems
        wrong = self.buffer.wrong + _wrong_rows(self.server.state_dict(), {})
        assert not wrong, wrong
        return took_s


class ServerEnds:
    """Ends of servers, after each of which the clients find the next one."""

    def __init__(self) -> None:
        self.store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.players = [ReplayPeer("serve next", self.store.port, CAPACITY)]
        self._begin(self.players[0], None)
        for role, argument in (ACTOR, LEARNER):
            self.players.append(ReplayPeer(role, self.store.port, argument))
            self.players[-1].says("connected")
        self.number = 0

    def play(self, _end: str, how: int, dice: random.Random) -> float:
        """Ends the server; returns after how many seconds both clients have found the next."""
        heir = ReplayPeer("serve next", self.store.port, CAPACITY)
        self.players.append(heir)
        heir.says("waits")
        server, actor, learner = self.players[:3]
        time.sleep(dice.random() * CYCLE_S)
        state = server.asked("state")
        time.sleep(dice.random() * CYCLE_S)
        server.signal(how)
        begin = time.monotonic()
        self.number += 1
        self._begin(heir, state)
        for client in (actor, learner):
            while len(client.asked().found) < self.number:
                assert time.monotonic() - begin < HANGS_S, "never noticed"
        took_s = time.monotonic() - begin
        server.end()
        self.players[:] = [heir, actor, learner]
        found = _check_others(actor, learner, self.number)
        wrong = _wrong_rows(heir.asked("state"), {ACTOR[1]: found})
        assert not wrong, wrong
        return took_s

    def _begin(self, server: ReplayPeer, state: Any) -> None:
        if state is None:
            server.says("waits")
        server.pipe.send(state)
        server.says("serves")

    def close(self) -> None:
        for player in self.players:
            player.end()


def play_ends(times: int) -> list[str]:
    """Ends clients and servers; returns what was wrong."""
    dice, wrong, longest_s = random.Random(times), list[str](), dict[str, float]()
    played: Any = None
    cases = list(itertools.product(("actor", "learner", "server"), HOW, range(times)))
    for end, how, number in tqdm(cases, "ends"):
        key = f"{end} {how}"
        make: Any = ServerEnds if end == "server" else ClientEnds
        if type(played) is not make:
            if played is not None:
                played.close()
            played = make()
        try:
            took_s = played.play(end, HOW[how], dice)
        except Exception as error:
            wrong.append(f"{key}, {number}: {type(error).__name__}: {error}")
            played.close()
            played = None
            continue
        longest_s[key] = max(longest_s.get(key, 0.0), took_s)
        if took_s > NOTICED_S:
            wrong.append(f"{key}, {number}: noticed after {took_s:.1f} s")
    if played is not None:
        played.close()
    noticed = ", ".join(f"{key} {took_s:.2f} s" for key, took_s in longest_s.items())
    print(f"{len(cases)} ends, noticed at the latest after: {noticed}; {len(wrong)} wrong")
    return wrong


def _check_others(actor: ReplayPeer, learner: ReplayPeer, servers: int) -> list[int]:
    """Checks that the others go on; returns in which of its calls the actor found servers."""
    for client in (actor, learner):
        first = last = client.asked()
        begin = time.monotonic()
        while last.done < first.done + 5:
            assert time.monotonic() - begin < HANGS_S, "the others do not go on"
            last = client.asked()
        assert first.longest_s < NOTICED_S, f"a call of another took {first.longest_s:.1f} s"
        assert not last.torn, f"{last.torn} rows of samples were torn"
        assert len(last.found) == servers, f"{servers} servers ended, {last.found} were found"
    found: list[int] = actor.asked().found
    return found


def _wrong_rows(state: dict[str, Any], found: dict[int, list[int]]) -> list[str]:
    """Returns where batches are torn, or not in order, but for those that ended with a server.

    The call in which a client has found the next server may have been answered by the one before.
    """
    wrong = []
    for source, rows in _rows_by_source(state["buffer"]).items():
        numbers, size = rows["number"], size_of(source)
        after_gaps = set(numbers[1:][numbers.diff() != 1].tolist())
        may_be = {size * (call + late) for call in found.get(source, []) for late in (0, 1)}
        if not after_gaps <= may_be:
            wrong.append(f"rows of {source} have gaps before {after_gaps - may_be}, not {may_be}")
        if (int(numbers[-1]) + 1) % size or count_torn(rows):
            wrong.append(f"rows of {source} are torn")
    return wrong


def _rows_by_source(state: dict[str, Any]) -> dict[int, dict[str, torch.Tensor]]:
    """Returns the rows in a buffer of each source, the oldest first."""
    count, columns = state["write_count"], state["columns"]
    order = torch.arange(max(count - CAPACITY, 0), count) % CAPACITY
    rows = {key: column[order] for key, column in columns.items()}
    return {
        source: {key: column[rows["source"] == source] for key, column in rows.items()}
        for source in rows["source"].unique().tolist()
    }


# ---- samples for each row ------------------------------------------------------------------------


def play_limits() -> list[str]:
    """Keeps a ratio with actors ten times too fast and too slow; returns what was wrong."""
    actors, learner = _rate("inserted", actors=0.0), _rate("sampled", learner=0.0)
    print(f"alone: actors write {actors:.0f} rows/s, a learner draws {learner:.0f} rows/s")
    learner_s = BATCH * max(10 / (WANTED * actors) - 1 / learner, 0.0)
    actor_s = len(PAIR) * size_of(PAIR[0]) * max(10 * WANTED / learner - 1 / actors, 0.0)
    return _limited("fast", 0.0, learner_s) + _limited("slow", actor_s, 0.0)


def _rate(counted: str, **pauses_s: float) -> float:
    """Returns how many rows one side writes or draws in a second."""
    service = Service()
    try:
        service.server.extend(checked_rows(0, 0, size_of(0)))
        _join(service, **pauses_s)
        before, begin = service.server.stats, time.monotonic()
        _wait(LIMIT_S, f"{counted} alone")
        rows = getattr(service.server.stats, counted) - getattr(before, counted)
        return float(rows / (time.monotonic() - begin))
    finally:
        service.close()


def _limited(name: str, actor_s: float, learner_s: float) -> list[str]:
    """Keeps the ratio with pauses of either side; returns what was wrong."""
    service = Service(samples_per_insert=WANTED, min_size=MIN_SIZE)
    try:
        players = _join(service, actors=actor_s, learner=learner_s)
        _wait(LIMIT_S, f"actors too {name}")
        service.server.close()
        tallies = [player.asked() for player in players]
        stats = service.server.stats
    finally:
        service.close()
    ratio = stats.sampled / (stats.inserted - MIN_SIZE)
    print(
        f"actors ten times too {name}: {stats.inserted} rows written, {stats.sampled} drawn, "
        f"{ratio:.3f} for each after the first {MIN_SIZE}; {stats.insert_waits} calls have waited "
        f"{stats.insert_wait_s:.2f} s to write, {stats.sample_waits} {stats.sample_wait_s:.2f} s "
        f"to draw; pauses of {actor_s * 1e3:.1f} ms and {learner_s * 1e3:.1f} ms"
    )
    wrong = []
    if abs(ratio - WANTED) > WITHIN * WANTED:
        wrong.append(f"actors too {name}: {ratio:.3f} rows drawn for each, not {WANTED}")
    if (stats.insert_wait_s > stats.sample_wait_s) != (name == "fast"):
        wrong.append(f"actors too {name}: the slower side has waited longer")
    if sum(tally.done for tally in tallies[:-1]) * size_of(PAIR[0]) != stats.inserted:
        wrong.append(f"actors too {name}: {tallies} of {stats}")
    return [*wrong, *service.buffer.wrong, *service.server.problems]


def _join(service: Service, **pauses_s: float) -> list[ReplayPeer]:
    """Starts actors and a learner, those that have a pause."""
    players = []
    if "actors" in pauses_s:
        players += [service.join("act asked", source, 8, pauses_s["actors"]) for source in PAIR]
    if "learner" in pauses_s:
        players.append(service.join(*LEARNER, pauses_s["learner"]))
    return players


if __name__ == "__main__":
    sys.exit(main())
