"""Trees between the ranks of a group: headers, and then parcels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tdcopier._copy import start_copy
from tdcopier._distributed.ranks import Group, Packed, Ranks, arrived
from tdcopier._options import Device


def broadcast(
    tree: Any, src: int, *, group: Group | None = None, device: Device | None = None
) -> Any:
    """Send a tree from one rank to every rank of a group, in two messages.

    For example, on every rank::

        tree = tdcopier.distributed.broadcast(tree if rank == 0 else None, src=0)

    The first message contains a size, the second a parcel, as `pack` makes it: the leaves and the
    structure. As with every collective of `torch.distributed`, all ranks of the group must make the
    call, in the same order. On a device the parcel is packed, sent and taken apart in the order of
    the current stream, and the host waits for no work there: sizes, and each structure that differs
    from the one before, go by a gloo group of the same ranks, which the first call makes.

    The tree arrives as from `start_copy`: numpy arrays as tensors, leaves without gaps, TensorDicts
    with `device` set on every node. Each rank needs the classes of values that `pack` pickles.
    Tensors that need a gradient arrive as leaves of a graph. A leaf that is alive keeps the whole
    parcel alive, on a device only if all leaves have one dtype.

    Unpickling runs code that the source chooses: use it among ranks that trust one another.

    Args:
        tree: on the source, a leaf or any nesting of containers and leaves; None on other ranks.
        src: the global rank of the source, as for `torch.distributed.broadcast`.
        group: the ranks that take part; by default, all.
        device: where the tree goes on this rank; ranks may differ. The default is the device that
            the group's backend works on: the current CUDA device for NCCL, the host for gloo. Any
            other device takes one more copy.

    Returns:
        The tree on `device`. On the source, the result of `start_copy(tree, device)`.

    Raises:
        RuntimeError: `torch.distributed` has not been initialised.
        TypeError: `src` is not an int.
        ValueError: `src` or this rank is not in the group; a rank that is not the source passed a
            tree. These errors and the two above are raised on the rank that makes the mistake,
            before any message.
        Exception: an error that prevents the source from sending, for example a `TypeError` with
            the path of a value that cannot be pickled. Every rank raises it. Ranks other than the
            source raise the nearest base class among `TypeError`, `ValueError`, `RecursionError`
            and `RuntimeError`, or else a `RuntimeError`.
    """
    ranks = Ranks.of(group, src)
    ranks.check_given(tree, "tree")

    def packed_tree() -> tuple[Packed, list[int]]:
        packed = ranks.packed(tree)
        return packed, [packed.message.nbytes, ranks.news(packed)]

    packed, (size, head_bytes) = ranks.share(packed_tree, 2)
    head = ranks.share_head(packed, head_bytes)
    if packed is None:
        message = ranks.new_message(size)
        ranks.broadcast(message)
        return arrived(message, device, head)
    ranks.broadcast(packed.message)
    return ranks.own(tree, packed.moved, device)


def scatter(
    trees: Sequence[Any] | None,
    src: int,
    *,
    group: Group | None = None,
    device: Device | None = None,
) -> Any:
    """Send each rank of a group a tree of its own, from one rank that has all of them.

    For example::

        shards = split(batch, world_size) if rank == 0 else None
        shard = tdcopier.distributed.scatter(shards, src=0)

    All sizes are broadcast in one message. Then each rank receives one message with its tree, in
    the form that `broadcast` uses. The trees may have nothing in common.

    Args:
        trees: on the source, a list or tuple of one tree for each rank, in the order of the group;
            None on other ranks.
        src: as for `broadcast`.
        group: as for `broadcast`.
        device: as for `broadcast`.

    Returns:
        This rank's tree on `device`.

    Raises:
        TypeError: `trees` is not a list or tuple, on every rank; as `broadcast`.
        ValueError: the number of trees is not the number of ranks, on every rank; as `broadcast`.
        RuntimeError: as `broadcast`.
        Exception: as `broadcast`.
    """
    ranks = Ranks.of(group, src)
    ranks.check_given(trees, "trees")

    def packed_trees() -> tuple[dict[int, torch.Tensor], list[int]]:
        messages = {
            member: ranks.packed(tree).message
            for member, tree in zip(ranks.members, _checked(trees, ranks), strict=True)
            if member != ranks.rank
        }
        return messages, [messages[i].nbytes if i in messages else 0 for i in ranks.members]

    messages, sizes = ranks.share(packed_trees, len(ranks.members))
    mine = ranks.members.index(ranks.rank)
    if messages is None:
        message = ranks.new_message(sizes[mine])
        ranks.exchange([dist.P2POp(dist.irecv, message, src, group)])
        return arrived(message, device)
    ranks.exchange([dist.P2POp(dist.isend, each, to, group) for to, each in messages.items()])
    own = _checked(trees, ranks)[mine]
    return start_copy(own, ranks.device if device is None else device).wait()


def gather(
    tree: Any, dst: int, *, group: Group | None = None, device: Device | None = None
) -> list[Any] | None:
    """Send each rank's tree to one rank, which gets all of them.

    For example::

        rollouts = tdcopier.distributed.gather(rollout, dst=0)
        if rollouts is not None:  # on rank 0
            learn(rollouts)

    All sizes are exchanged in one message of each rank. Then each sends its tree, in the form that
    `broadcast` uses. The trees may have nothing in common.

    Args:
        tree: a leaf or any nesting of containers and leaves, on every rank.
        dst: the global rank of the destination.
        group: as for `broadcast`.
        device: where the trees go on the destination; as for `broadcast`.

    Returns:
        On the destination, a list of the trees in the order of the group, its own as `start_copy`
        gives it; None on other ranks.

    Raises:
        TypeError: `dst` is not an int.
        ValueError: `dst` or this rank is not in the group.
        RuntimeError: as `broadcast`.
        Exception: what prevents a rank from sending. That rank raises it, and the others as
            `broadcast` says.
    """
    ranks = Ranks.of(group, dst, "dst")
    packed, sizes = ranks.collect(tree)
    if ranks.rank != dst:
        ranks.exchange([dist.P2POp(dist.isend, packed.message, dst, group)])
        return None
    messages = {
        member: ranks.new_message(size)
        for member, size in zip(ranks.members, sizes, strict=True)
        if member != dst
    }
    ranks.exchange([dist.P2POp(dist.irecv, each, of, group) for of, each in messages.items()])
    return [
        ranks.own(tree, packed.moved, device) if of == dst else arrived(messages[of], device)
        for of in ranks.members
    ]


def all_gather(tree: Any, *, group: Group | None = None, device: Device | None = None) -> list[Any]:
    """Send each rank's tree to every rank of a group.

    For example::

        found = tdcopier.distributed.all_gather({"loss": loss, "step": step})
        mean = torch.stack([each["loss"] for each in found]).mean()

    As `gather`, to all. Each rank sends as many bytes as the largest tree has.

    Args:
        tree: as for `gather`.
        group: as for `broadcast`.
        device: as for `broadcast`.

    Returns:
        A list of the trees, in the order of the group, on `device`.

    Raises:
        ValueError, RuntimeError, Exception: as `gather`.
    """
    ranks = Ranks.of(group, None)
    packed, sizes = ranks.collect(tree)
    messages = ranks.all_gather(packed.message, max(sizes))
    return [
        ranks.own(tree, packed.moved, device)
        if member == ranks.rank
        else arrived(whole[:size], device)
        for member, whole, size in zip(ranks.members, messages, sizes, strict=True)
    ]


def _checked(trees: Any, ranks: Ranks) -> Sequence[Any]:
    if not isinstance(trees, (list, tuple)):
        raise TypeError(
            f"trees must be a list or tuple of one tree for each rank; got {type(trees).__name__}"
        )
    if len(trees) != len(ranks.members):
        raise ValueError(
            f"trees must have one tree for each of the {len(ranks.members)} ranks; got {len(trees)}"
        )
    return trees
