"""Actors on this host or on others send batches to one learner, and follow its weights.

    python docs/examples/actors.py                      # a learner and two actors, on this host

    python docs/examples/actors.py learn --port 29500   # on one host
    python docs/examples/actors.py act --host LEARNER --port 29500   # on each of the others

The task is a toy: actors draw points, score them by the policy that they follow, and the learner
fits the policy to the sign of a fixed direction. The parts around it are those of real training.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time

import torch
import torch.distributed as dist
from torch import nn

from tdcopier import distributed

POINTS, WIDTH = 256, 16


def make_policy() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 1))


def learn(store: dist.Store, steps: int) -> float:
    """Take batches, make a step with each, and publish the weights; return the last loss."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = make_policy().to(device)
    optimizer = torch.optim.Adam(policy.parameters(), 0.01)
    with (
        distributed.publish(policy, store=store) as weights,
        distributed.receiver(device=device, store=store) as receiver,
    ):
        begin, loss = time.perf_counter(), torch.zeros(())
        for step in range(1, steps + 1):
            batch = receiver.next().wait()
            scores = policy(batch["points"]).squeeze(1)
            loss = nn.functional.soft_margin_loss(scores, batch["signs"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            weights.publish()
            if step % (steps // 4 or 1) == 0:
                rate = step / (time.perf_counter() - begin)
                seen, actors = receiver.stats, len(receiver.peers)
                print(
                    f"step {step}: loss {loss.item():.3f}, {rate:,.0f} batches/s from {actors} "
                    f"actors, {seen.nbytes / 1e6:.1f} MB, weights to {len(weights.peers)}"
                )
    return loss.item()


def act(store: dist.Store, seed: int) -> int:
    """Send batches until the learner closes; return the last version of the weights."""
    policy = make_policy()
    generator = torch.Generator().manual_seed(seed)
    direction = torch.linspace(-1, 1, WIDTH)
    followed = distributed.follow(policy, store=store)
    sender = distributed.sender(store=store)
    try:
        followed.update(timeout_s=None)
        while True:
            points = torch.randn(POINTS, WIDTH, generator=generator)
            with torch.no_grad():
                scores = policy(points).squeeze(1)
            signs = torch.where(points @ direction > 0, 1.0, -1.0)
            sender.start({"points": points, "scores": scores, "signs": signs})
            followed.update()
    except distributed.ChannelClosedError:
        return followed.version
    finally:
        sender.close()
        followed.close()


def act_at(host: str, port: int, seed: int) -> None:
    torch.set_num_threads(1)
    act(dist.TCPStore(host, port, is_master=False), seed)


def main(arguments: list[str] | None = None) -> float | None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("role", nargs="?", choices=["all", "learn", "act"], default="all")
    parser.add_argument("--host", default="127.0.0.1", help="of the learner")
    parser.add_argument("--port", type=int, default=0, help="of the learner's store; 0: any")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--actors", type=int, default=2, help="on this host, without a role")
    parser.add_argument("--seed", type=int, default=0, help="of an actor")
    options = parser.parse_args(arguments)
    if options.role == "act":
        act_at(options.host, options.port, options.seed)
        return None
    listen = "0.0.0.0" if options.role == "learn" else options.host
    store = dist.TCPStore(listen, options.port, is_master=True, wait_for_workers=False)
    print(f"the store listens at port {store.port}")
    actors = []
    if options.role == "all":
        context = multiprocessing.get_context("spawn")
        for seed in range(options.actors):
            actor = context.Process(target=act_at, args=(options.host, store.port, seed))
            actor.start()
            actors.append(actor)
    loss = learn(store, options.steps)
    for actor in actors:
        actor.join()
    return loss


if __name__ == "__main__":
    main()
