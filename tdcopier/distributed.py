"""Trees through `torch.distributed`: one message with all leaves, instead of one for each.

`broadcast` sends one rank's tree to every rank. `scatter` sends each rank a tree of its own.
`gather` sends each rank's tree to one, and `all_gather` to all.
`sender` and `receiver` are the ends of a channel, which carries batch after batch between two
processes that need not be in one group; senders may come, go and die. `publish` and `follow` carry
the weights of a module to processes that may do so too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from tdcopier._distributed.address import Address
from tdcopier._distributed.collectives import all_gather, broadcast, gather, scatter
from tdcopier._distributed.ends import ChannelClosedError, PeerLostError
from tdcopier._distributed.follower import Follower
from tdcopier._distributed.publisher import Publisher, PublisherStats
from tdcopier._distributed.receiver import Receiver, ReceiverStats
from tdcopier._distributed.rendezvous import Options, seconds
from tdcopier._distributed.sender import Sender, SenderStats
from tdcopier._distributed.weights import Weights
from tdcopier._options import Device

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = [
    "ChannelClosedError",
    "Follower",
    "PeerLostError",
    "Publisher",
    "PublisherStats",
    "Receiver",
    "ReceiverStats",
    "Sender",
    "SenderStats",
    "all_gather",
    "broadcast",
    "follow",
    "gather",
    "publish",
    "receiver",
    "scatter",
    "sender",
]


def __dir__() -> list[str]:
    return __all__


def sender(
    dst: int | None = None,
    *,
    store: Store | None = None,
    name: str = "channel",
    slots: int = 2,
    peer_timeout_s: float = 5.0,
    connect_timeout_s: float = 60.0,
    host: str | None = None,
    interface: str | None = None,
    checksum: bool = False,
) -> Sender:
    """Open the end of a channel that sends, when its receiver is there.

    For example, in a process that makes batches, and in one that learns::

        with tdcopier.distributed.sender(store=store) as tx:
            for batch in batches:
                tx.start(batch)

        for batch in tdcopier.distributed.receiver(device="cuda", store=store):
            learn(batch)

    `start` packs a batch, and sends it as one message over a TCP connection of the two processes
    alone: other processes may come, go and die meanwhile.

    Args:
        dst: the global rank of the receiver, which calls ``receiver(src=...)`` with this rank; None
            for one that takes batches from any sender.
        store: where the two find each other, for example a `torch.distributed.TCPStore`. By default
            that of `torch.distributed`, if it has been initialised.
        name: of the channel in the store.
        slots: number of batches that may be packed, and not yet be given to the network. `start`
            waits if the receiver has no slot for a batch.
        peer_timeout_s: within this time, in seconds, the channel notices that the receiver has
            died or stopped.
        connect_timeout_s: how long to wait for a receiver.
        host: the name or address of this host, by which the other end reaches it. By default that
            of the host's name.
        interface: in place of `host`, the network interface, such as "eth0".
        checksum: whether the receiver checks the bytes of each batch.

    Raises:
        ConnectionError: no receiver has come in time.
        RuntimeError: `torch.distributed` has not been initialised, and there is no `store`.
        ValueError: `slots` or a time is not positive; both `host` and `interface` are given, or
            this host has no such address.
        TypeError: an argument has another type than is said here.
    """
    options = _channel(
        dst, store, name, slots, peer_timeout_s, connect_timeout_s, host, interface, True
    )
    return Sender(options, slots, checksum=checksum)


def receiver(
    src: int | None = None,
    *,
    device: Device = "cpu",
    store: Store | None = None,
    name: str = "channel",
    slots: int | None = None,
    peer_timeout_s: float = 5.0,
    host: str | None = None,
    interface: str | None = None,
    allow_pickle: bool = False,
) -> Receiver:
    """Open the end of a channel that receives; it returns at once, and senders may come.

    For example::

        for rollout in tdcopier.distributed.receiver(device="cuda", store=store, name="rollouts"):
            learn(rollout)

    ``rx.next().wait()`` is the next batch on the device: a batch arrives in pinned memory, from
    which one copy sends it. A batch whose parcel needs no pickle can come from anyone; others only
    with `allow_pickle`, from senders that you trust.

    Args:
        src: the global rank of the only sender, which calls ``sender(dst=...)`` with this rank;
            None: from all that come, in the order in which their batches do.
        device: where batches go. On the host their leaves are views of the memory in which they
            have arrived; a slot whose batch is kept gets other memory.
        store: as for `sender`, as for `name`, `peer_timeout_s`, `host` and `interface`.
        name: of the channel in the store.
        slots: number of batches of each sender that may be here and not be taken. By default 4,
            and up to 16 while their memory is at most 8 MiB. Those that the device, or a result on
            the host, still reads have memory beside these.
        peer_timeout_s: the time to notice that a sender has died or stopped, or says nothing when
            it joins.
        host: see `sender`.
        interface: see `sender`.
        allow_pickle: take batches with pickled values, whose code then runs here.

    Raises:
        RuntimeError: as `sender`; or a receiver of this name is open, in this process or another.
        ValueError, TypeError: as `sender`.
    """
    options = _channel(src, store, name, slots, peer_timeout_s, None, host, interface, False)
    return Receiver(options, device, slots, is_for_one=src is not None, allow_pickle=allow_pickle)


def publish(
    weights: Weights,
    *,
    store: Store | None = None,
    name: str = "weights",
    peer_timeout_s: float = 5.0,
    host: str | None = None,
    interface: str | None = None,
) -> Publisher:
    """Publish the weights of a module; it returns at once, and followers may come.

    For example, in the process that learns, and in those that act::

        weights = tdcopier.distributed.publish(model, store=store)
        for batch in batches:
            learn(model, batch)
            weights.publish()

        followed = tdcopier.distributed.follow(model, store=store)
        followed.update(timeout_s=None)
        while True:
            act(model)
            followed.update()

    Each follower gets one message with the tensors whose values have changed since the version
    before, over a connection of its own; one that comes later, or reads slowly, gets all.

    Args:
        weights: a module, whose parameters and buffers are sent; or a mapping of names to tensors,
            for example those that are trained. Writes that are under way on a device are waited for
            in the order of its current stream.
        store: where the processes find each other, as for `sender`.
        name: of the weights in the store.
        peer_timeout_s: within this time, in seconds, a follower is noticed that has died or
            stopped, or says nothing when it joins.
        host: see `sender`.
        interface: see `sender`.

    Raises:
        RuntimeError: as `sender`; or a publisher of this name is open, in this process or another.
        ValueError: as `sender`.
        TypeError: the weights are neither, or a value is not a tensor.
    """
    options = _channel(None, store, name, None, peer_timeout_s, None, host, interface, False)
    return Publisher(weights, options)


def follow(
    weights: Weights,
    *,
    store: Store | None = None,
    name: str = "weights",
    peer_timeout_s: float = 5.0,
    connect_timeout_s: float = 60.0,
    host: str | None = None,
    interface: str | None = None,
) -> Follower:
    """Follow the weights that another process publishes: `update` writes the newest to a module.

    For example::

        followed = tdcopier.distributed.follow(policy, store=store, name="policy")
        print(f"begins with version {followed.update(timeout_s=60)}")

    Args:
        weights: as for `publish`, with the same names, shapes and dtypes, on any device.
        store: as for `publish`, as for `name`, `peer_timeout_s`, `host` and `interface`.
        name: of the weights in the store.
        peer_timeout_s: the time to notice that the publisher has died or stopped.
        connect_timeout_s: how long to wait for a publisher.
        host: see `sender`.
        interface: see `sender`.

    Raises:
        ConnectionError: no publisher has come in time.
        RuntimeError, ValueError, TypeError: as `publish`.
    """
    options = _channel(
        None, store, name, None, peer_timeout_s, connect_timeout_s, host, interface, True
    )
    return Follower(weights, options)


def _channel(
    peer: int | None,
    store: Store | None,
    name: str,
    slots: int | None,
    peer_timeout_s: float,
    connect_timeout_s: float | None,
    host: str | None,
    interface: str | None,
    sends: bool,
    given_name: str | None = None,
) -> Options:
    """Return the checked options of one end of a channel.

    `connect_timeout_s` is None for an end that listens. Messages have `given_name`, if the name in
    the store is another.
    """
    peer_timeout_s = seconds("peer_timeout_s", peer_timeout_s)
    if connect_timeout_s is None:
        connect_timeout_s = peer_timeout_s
    connect_timeout_s = seconds("connect_timeout_s", connect_timeout_s)
    if slots is not None:
        if not isinstance(slots, int) or isinstance(slots, bool):
            raise TypeError(f"slots must be an int; got {slots!r}")
        if slots < 1:
            raise ValueError(f"slots must be positive; got {slots}")
    if host is not None and interface is not None:
        raise ValueError("give host or interface, not both")
    if peer is not None and (not isinstance(peer, int) or isinstance(peer, bool)):
        raise TypeError(f"a rank is an int; got {peer!r}")
    if (store is None or peer is not None) and not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "torch.distributed has not been initialised: call init_process_group() first, or give "
            "a store, and no rank"
        )
    if store is None:
        store = dist.distributed_c10d._get_default_store()
    elif not hasattr(store, "check"):
        raise TypeError(f"store must be a store of torch.distributed; got {store!r}")
    if peer is not None:
        ranks = (dist.get_rank(), peer) if sends else (peer, dist.get_rank())
        name = f"{name}, rank {ranks[0]} to {ranks[1]}"
    address = Address(host, interface).resolve()
    return Options(store, name, given_name or name, address, peer_timeout_s, connect_timeout_s)
