"""A replay server, actors, and SAC that learns to hold a pendulum up, on this host or on several.

    python docs/examples/replay.py --picture replay.svg   # all of them, on this host

    python docs/examples/replay.py serve --port 29500     # on one host
    python docs/examples/replay.py learn --host SERVER --port 29500
    python docs/examples/replay.py act --host SERVER --port 29500 --seed 1   # as many as you like

It needs torchrl, gymnasium and, for a picture, matplotlib. The server has the rows; it lets actors
and learner wait for each other, so that each row is learned from as often as it should be. The
learner publishes its weights, and the actors follow them. Ctrl-C ends it.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import gymnasium
import numpy as np
import torch
import torch.distributed as dist
from learners import sac
from tensordict import TensorDict
from torchrl.envs.utils import ExplorationType, set_exploration_type

from tdcopier import distributed
from tdcopier.replay import ChannelClosedError, PeerLostError, ReplayClient, ReplayServer
from tdcopier.torchrl import PackedLazyTensorStorage, PackedTensorDictReplayBuffer

CAPACITY, BATCH, WIDTH = 100_000, 128, 128
ROWS = 20
"""Of a message of an actor; 200 are an episode."""
SAMPLES_PER_INSERT = 64.0
"""So the learner makes a step for each two rows: 128 / 64."""
PUBLISH, REPORT_S = 10, 5.0
"""Steps, and seconds, of the learner."""
OVER = "the learner has ended"


def serve(store: dist.Store, random_rows: int) -> None:
    """Have the buffer, until the learner ends."""
    storage = PackedLazyTensorStorage(CAPACITY)
    buffer = PackedTensorDictReplayBuffer(storage=storage, batch_size=BATCH)
    with ReplayServer(
        buffer, store=store, samples_per_insert=SAMPLES_PER_INSERT, min_size=random_rows
    ) as server:
        while not store.check([OVER]):
            time.sleep(0.2)
        print(server)


def learn(store: dist.Store, steps: int) -> list[tuple[float, float]]:
    """Learn, and return the episodes of all actors: the time of its end, and its return."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    agent = sac(3, 1, device, width=WIDTH)
    episodes: list[tuple[float, float]] = []
    with contextlib.suppress(ChannelClosedError), contextlib.ExitStack() as opened:
        weights = opened.enter_context(distributed.publish(agent.policy, store=store))
        returns = opened.enter_context(distributed.receiver(store=store, name="returns"))
        buffer = opened.enter_context(ReplayClient(store=store, device=device))
        begin = last = time.perf_counter()
        last_step = last_rows = 0
        for step in range(1, steps + 1):
            batch = buffer.sample()
            with uninterrupted():
                agent.update(batch)
            if step % PUBLISH == 0 or step == steps:
                weights.publish()
                while returns.stats.waiting:
                    found = float(returns.next().get())
                    episodes.append((time.perf_counter() - begin, found))
            now = time.perf_counter()
            if now - last > REPORT_S or step == steps:
                stats, mean = buffer.stats, np.mean([found for _, found in episodes[-10:]] or [0])
                print(
                    f"step {step}, {now - begin:.0f} s: return {mean:.0f}, "
                    f"{(step - last_step) / (now - last):.0f} batches/s learned, "
                    f"{(stats.inserted - last_rows) / (now - last):.0f} rows/s written, "
                    f"{stats.samples_per_insert:.1f} samples per insert, "
                    f"{len(weights.peers)} actors",
                    flush=True,
                )
                last_step, last, last_rows = step, now, stats.inserted
    return episodes


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C wait: `TensorDict.to_module`, in torchrl's losses, makes it a RuntimeError."""
    seen = False

    def note(*_: object) -> None:
        nonlocal seen
        seen = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if seen:
        raise KeyboardInterrupt


def act(store: dist.Store, seed: int) -> None:
    """Write rows, until the server or the learner ends."""
    torch.manual_seed(seed)
    policy = sac(3, 1, "cpu", width=WIDTH).policy
    random = torch.distributions.Uniform(-torch.ones(1), torch.ones(1))
    env = gymnasium.make("Pendulum-v1")
    now, total, rows = env.reset(seed=seed)[0], 0.0, []
    with contextlib.ExitStack() as opened:
        opened.enter_context(torch.no_grad())
        opened.enter_context(set_exploration_type(ExplorationType.RANDOM))
        followed = opened.enter_context(distributed.follow(policy, store=store))
        returns = opened.enter_context(distributed.sender(store=store, name="returns"))
        buffer = opened.enter_context(ReplayClient(store=store))
        while True:
            if followed.version <= 1:  # the learner has made no step yet
                action = random.sample()
            else:
                seen = TensorDict({"observation": torch.from_numpy(now)[None]}, [1])
                action = policy(seen)["action"][0]
            later, reward, _, is_over, _ = env.step(2.0 * action.numpy())
            rows.append(row(now, action, later, float(reward)))
            now, total = later, total + float(reward)
            if is_over:
                returns.start(torch.tensor(total))
                now, total = env.reset()[0], 0.0
            if len(rows) == ROWS:
                buffer.extend(torch.stack(rows))
                followed.update()
                rows.clear()


def row(now: np.ndarray, action: torch.Tensor, later: np.ndarray, reward: float) -> TensorDict:
    """Return a row of the buffer. An episode only ends for lack of time, so none is "done"."""
    never = torch.zeros(1, dtype=torch.bool)
    after = {"observation": torch.from_numpy(later), "reward": torch.tensor([reward / 10.0])}
    after |= {"done": never, "terminated": never}
    return TensorDict({"observation": torch.from_numpy(now), "action": action, "next": after})


def draw(episodes: list[tuple[float, float]], picture: Path) -> None:
    """Draw the return of each episode over time, and the mean of ten."""
    from matplotlib.figure import Figure

    minutes, found = np.array(episodes).T / [[60.0], [1.0]]
    count = min(10, len(found))
    means = np.convolve(found, np.full(count, 1 / count), "valid")
    figure = Figure(figsize=(7.0, 4.0), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(minutes, found, ".", alpha=0.4, label="an episode")
    axes.plot(minutes[count - 1 :], means, label="mean of the last ten")
    axes.set(xlabel="minutes", ylabel="sum of the rewards of an episode")
    axes.legend()
    figure.savefig(picture)


def connect(options: argparse.Namespace, *, is_master: bool) -> dist.TCPStore:
    host = "0.0.0.0" if options.role == "serve" else options.host
    return dist.TCPStore(host, options.port, is_master=is_master, wait_for_workers=False)


def take_part(role: str, seed: int, options: argparse.Namespace) -> None:
    """Be the server or an actor."""
    torch.set_num_threads(1)
    store = connect(options, is_master=options.role == "serve")
    try:
        serve(store, options.random) if role == "serve" else act(store, seed)
    except (KeyboardInterrupt, ChannelClosedError, PeerLostError) as error:
        print(f"{role} {seed} ends: {str(error) or 'interrupted'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("role", nargs="?", choices=["all", "serve", "learn", "act"], default="all")
    parser.add_argument("--host", default="127.0.0.1", help="of the server")
    parser.add_argument("--port", type=int, default=0, help="of the server's store; 0: any")
    parser.add_argument("--steps", type=int, default=10_000, help="of the learner")
    parser.add_argument("--random", type=int, default=1_000, help="rows before its first step")
    parser.add_argument("--actors", type=int, default=4, help="on this host, without a role")
    parser.add_argument("--seed", type=int, default=0, help="of an actor or the learner")
    parser.add_argument("--picture", type=Path, help="file for the learner's picture")
    options = parser.parse_args()
    if options.role in ("serve", "act"):
        take_part(options.role, options.seed, options)
        return
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    store, others = connect(options, is_master=options.role == "all"), []
    try:
        if options.role == "all":
            options.port = store.port
            context = multiprocessing.get_context("spawn")
            for role, seed in [("serve", 0), *(("act", each) for each in range(options.actors))]:
                others.append(context.Process(target=take_part, args=(role, seed, options)))
                others[-1].start()
        episodes = learn(store, options.steps)
        if options.picture and episodes:
            draw(episodes, options.picture)
            print(f"wrote {options.picture}")
    except (
        KeyboardInterrupt,
        ChannelClosedError,
        PeerLostError,
    ) as error:  # Ctrl-C ends the server too
        print(str(error) or "interrupted")
    finally:
        with contextlib.suppress(RuntimeError):  # the server is gone, and its store
            store.set(OVER, "")
        for other in others:
            other.join()


if __name__ == "__main__":
    main()
