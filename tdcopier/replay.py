"""A replay buffer for actors in many processes or on many hosts, and for those that learn.

`ReplayServer` has the buffer: any with the methods of torchrl's, with its samplers, transforms and
storages. `ReplayClient` is that buffer in another process, and `ShardedReplayClient` those of
several servers as one. Each batch is one message, and arrives on the learner's device before
it is asked for.
"""

from __future__ import annotations

from tdcopier._distributed.ends import ChannelClosedError, PeerLostError
from tdcopier._replay.client import ReplayClient
from tdcopier._replay.server import ReplayServer
from tdcopier._replay.sharded import ShardedReplayClient
from tdcopier._replay.stats import ReplayStats

__all__ = [
    "ChannelClosedError",
    "PeerLostError",
    "ReplayClient",
    "ReplayServer",
    "ReplayStats",
    "ShardedReplayClient",
]


def __dir__() -> list[str]:
    return __all__
