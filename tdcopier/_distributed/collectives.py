"""Trees between the ranks of a group: sizes, and then parcels."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch
import torch.distributed as dist

from tdcopier._copy import start_copy
from tdcopier._options import Device
from tdcopier._pack import Parcel, pack

Group: TypeAlias = "dist.ProcessGroup"


def broadcast(
    tree: Any, src: int, *, group: Group | None = None, device: Device | None = None
) -> Any:
    """Send a tree from one rank to every rank of a group, in two messages.

    For example, on every rank::

        tree = tdcopier.distributed.broadcast(tree if rank == 0 else None, src=0)

    The first message contains a size, the second a parcel, as `pack` makes it: the leaves and the
    structure. As with every collective of `torch.distributed`, all ranks of the group must make the
    call, in the same order. The host waits until the structure has arrived; the rest is enqueued on
    the current stream.

    The tree arrives as from `start_copy`: numpy arrays as tensors, leaves without gaps, TensorDicts
    with `device` set on every node. Each rank needs the classes of values that `pack` pickles.
    Tensors that need a gradient arrive as leaves of a graph. On the host, a leaf that is alive
    keeps the whole parcel alive.

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
    ranks = _Ranks.of(group, src)
    ranks.check_given(tree, "tree")
    outgoing = ranks.prepare(lambda: [ranks.packed(tree)])
    (size,) = ranks.share_sizes(outgoing, 1)
    if outgoing is None:
        return _arrived(ranks.broadcast(ranks.new_message(size)), device)
    ((moved, message),) = outgoing.parcels
    ranks.broadcast(message)
    return ranks.own(tree, moved, device)


def scatter(
    trees: Sequence[Any] | None,
    src: int,
    *,
    group: Group | None = None,
    device: Device | None = None,
) -> Any:
    """Send each rank of a group a tree of its own, from one rank that has all of them.

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
    ranks = _Ranks.of(group, src)
    ranks.check_given(trees, "trees")

    def pack_all() -> list[torch.Tensor | None]:
        return [
            None if member == ranks.rank else ranks.packed(tree)[1]
            for member, tree in zip(ranks.members, _checked(trees, ranks), strict=True)
        ]

    outgoing = ranks.prepare(pack_all)
    sizes = ranks.share_sizes(outgoing, len(ranks.members))
    mine = ranks.members.index(ranks.rank)
    if outgoing is None:
        message = ranks.new_message(sizes[mine])
        ranks.exchange([dist.P2POp(dist.irecv, message, src, group)])
        return _arrived(message, device)
    ranks.exchange(
        [
            dist.P2POp(dist.isend, message, member, group)
            for member, message in zip(ranks.members, outgoing.parcels, strict=True)
            if message is not None
        ]
    )
    own = _checked(trees, ranks)[mine]
    return start_copy(own, ranks.device if device is None else device).wait()


def gather(
    tree: Any, dst: int, *, group: Group | None = None, device: Device | None = None
) -> list[Any] | None:
    """Send each rank's tree to one rank, which gets all of them.

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
    ranks = _Ranks.of(group, dst, "dst")
    moved, message, sizes = ranks.collect(tree)
    if ranks.rank != dst:
        ranks.exchange([dist.P2POp(dist.isend, message, dst, group)])
        return None
    messages = {
        member: ranks.new_message(size)
        for member, size in zip(ranks.members, sizes, strict=True)
        if member != dst
    }
    ranks.exchange([dist.P2POp(dist.irecv, each, of, group) for of, each in messages.items()])
    return [
        ranks.own(tree, moved, device) if of == dst else _arrived(messages[of], device)
        for of in ranks.members
    ]


def all_gather(tree: Any, *, group: Group | None = None, device: Device | None = None) -> list[Any]:
    """Send each rank's tree to every rank of a group.

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
    ranks = _Ranks.of(group, None)
    moved, message, sizes = ranks.collect(tree)
    messages = ranks.all_gather(message, max(sizes))
    return [
        ranks.own(tree, moved, device) if member == ranks.rank else _arrived(whole[:size], device)
        for member, whole, size in zip(ranks.members, messages, sizes, strict=True)
    ]


@dataclasses.dataclass
class _Outgoing:
    """Parcels that the source sends, or the error that prevents it."""

    parcels: list[Any]
    error: Exception | None = None


class _Ranks(NamedTuple):
    """The ranks that take part, and the device of their messages."""

    group: Group | None
    src: int
    rank: int
    members: list[int]
    """Global ranks, in the order of the group."""
    device: torch.device

    @classmethod
    def of(cls, group: Group | None, src: int | None, name: str = "src") -> _Ranks:
        """Return the ranks of this call; without `src`, none has more to do than the others.

        Raises:
            RuntimeError, TypeError, ValueError: as documented for `broadcast`.
        """
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "torch.distributed has not been initialised: call init_process_group() first"
            )
        rank = dist.get_rank()
        src = rank if src is None else src
        if not isinstance(src, int) or isinstance(src, bool):
            raise TypeError(f"{name} must be a rank, which is an int; got {src!r}")
        members = (
            list(range(dist.get_world_size()))
            if group is None
            else list(dist.get_process_group_ranks(group))
        )
        for what, each in (("this rank", rank), (name, src)):
            if each not in members:
                raise ValueError(f"{what} is {each}, which is not a rank of the group: {members}")
        return cls(group, src, rank, members, _device_of(group))

    def check_given(self, given: Any, name: str) -> None:
        """Raise unless this rank is the source or has passed None."""
        if self.rank != self.src and given is not None:
            raise ValueError(
                f"rank {self.rank} was given {name}, and is not the source, which is rank "
                f"{self.src}: give None"
            )

    def prepare(self, pack_all: Callable[[], list[Any]]) -> _Outgoing | None:
        """Do everything that may fail on the source before other ranks wait for its messages."""
        if self.rank != self.src:
            return None
        try:
            return _Outgoing(pack_all())
        except Exception as error:
            return _Outgoing([], error)

    def packed(self, tree: Any) -> tuple[Any, torch.Tensor]:
        """Return the tree on the device of the messages, and its parcel as a message."""
        moved = start_copy(tree, self.device).wait()
        return moved, pack(moved)._bytes.to(self.device)  # a tree without tensors is on the host

    def share_sizes(self, outgoing: _Outgoing | None, count: int) -> list[int]:
        """Return the size of each parcel, in bytes, on every rank.

        Raises:
            Exception: the error that occurred on the source.
        """
        sizes = [0] * count
        failure = b""
        if outgoing is not None and outgoing.error is not None:
            failure = pickle.dumps(_told(outgoing.error))
            sizes[0] = -len(failure)  # which no parcel has
        elif outgoing is not None:
            sent = [each[1] if isinstance(each, tuple) else each for each in outgoing.parcels]
            sizes = [0 if message is None else message.nbytes for message in sent]
        message = torch.tensor(sizes, dtype=torch.int64, device="cpu").to(self.device)
        sizes = self.broadcast(message).tolist()
        if sizes[0] < 0:
            self._raise_failure(outgoing, failure, -sizes[0])
        return sizes

    def _raise_failure(self, outgoing: _Outgoing | None, failure: bytes, size: int) -> None:
        body = torch.zeros(size, dtype=torch.uint8, device="cpu")
        if failure:
            body.copy_(torch.frombuffer(bytearray(failure), dtype=torch.uint8))
        body = self.broadcast(body.to(self.device)).cpu()
        if outgoing is not None and outgoing.error is not None:
            error, outgoing.error = outgoing.error, None
            try:
                raise error
            finally:
                del error  # avoids a reference cycle with its traceback, which keeps the tree
        self.raise_told(body, self.src)

    def raise_told(self, body: torch.Tensor, rank: int) -> NoReturn:
        """Raise what another rank has told of its error."""
        name, text = pickle.loads(body.numpy().tobytes())
        raise _SENT_AS_SUCH[name](f"rank {rank} could not send: {text}")

    def own(self, tree: Any, moved: Any, device: Device | None) -> Any:
        """Return this rank's tree on the device that was asked for."""
        if device is None or str(device) in (str(self.device), self.device.type):
            return moved
        return start_copy(tree, device).wait()

    def collect(self, tree: Any) -> tuple[Any, torch.Tensor, list[int]]:
        """Return this rank's tree and parcel on the messages' device, and all parcels' sizes.

        Raises:
            Exception: the error of this rank, or else of the first that has one.
        """
        moved, message, failure = None, self.new_message(0), None
        try:
            moved, message = self.packed(tree)
        except Exception as error:
            failure = error
        told = b"" if failure is None else pickle.dumps(_told(failure))
        size = torch.tensor(
            [-len(told) if told else message.nbytes], dtype=torch.int64, device="cpu"
        )
        sizes = [int(each) for each in torch.cat(self.all_gather(size.to(self.device), 1)).tolist()]
        if any(size < 0 for size in sizes):
            body = torch.frombuffer(bytearray(told or b"-"), dtype=torch.uint8).to(self.device)
            bodies = self.all_gather(body, -min(sizes))
            self._raise_first(failure, sizes, bodies)
        return moved, message, sizes

    def _raise_first(
        self, own: Exception | None, sizes: list[int], bodies: list[torch.Tensor]
    ) -> NoReturn:
        if own is not None:
            try:
                raise own
            finally:
                del own  # avoids a reference cycle with its traceback
        first = next(place for place, size in enumerate(sizes) if size < 0)
        self.raise_told(bodies[first].cpu()[: -sizes[first]], self.members[first])

    def all_gather(self, message: torch.Tensor, longest: int) -> list[torch.Tensor]:
        """Return the messages of all ranks, each with room for the longest."""
        if message.numel() < longest:
            whole = torch.zeros(longest, dtype=message.dtype, device=message.device)
            whole[: message.numel()] = message
            message = whole
        found = [torch.empty_like(message) for _ in self.members]
        dist.all_gather(found, message, group=self.group)
        return found

    def new_message(self, size: int) -> torch.Tensor:
        """Allocate memory for a parcel."""
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def broadcast(self, message: torch.Tensor) -> torch.Tensor:
        """Fill the message on every rank with that of the source."""
        dist.broadcast(message, self.src, group=self.group)
        return message

    def exchange(self, operations: list[dist.P2POp]) -> None:
        """Send and receive messages between pairs of ranks."""
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()


_SENT_AS_SUCH: dict[str, type[Exception]] = {
    cls.__name__: cls for cls in (TypeError, ValueError, RecursionError, RuntimeError)
}


def _told(error: Exception) -> tuple[str, str]:
    """Return what other ranks receive of an error: the name of the class to raise, and the text."""
    as_such = (cls.__name__ for cls in type(error).__mro__ if cls.__name__ in _SENT_AS_SUCH)
    name = next(as_such, RuntimeError.__name__)
    try:
        text = str(error)
    except Exception:
        text = "its text cannot be had"
    own = type(error).__name__
    return name, text if own == name else f"{own}: {text}"


def _device_of(group: Group | None) -> torch.device:
    """Return the device of a group's messages: the accelerator of its backend, or else the host."""
    for part in dist.get_backend_config(group).split(","):
        kind, backend = part.split(":")
        if kind == "cpu" or backend == "gloo":  # gloo sends all memory through the host
            continue
        module = torch.get_device_module(kind)
        if module.is_available():
            return torch.device(kind, module.current_device())
    return torch.device("cpu")


def _checked(trees: Any, ranks: _Ranks) -> Sequence[Any]:
    if not isinstance(trees, (list, tuple)):
        raise TypeError(
            f"trees must be a list or tuple of one tree for each rank; got a {type(trees).__name__}"
        )
    if len(trees) != len(ranks.members):
        raise ValueError(
            f"trees must have one tree for each of the {len(ranks.members)} ranks; got {len(trees)}"
        )
    return trees


def _arrived(message: torch.Tensor, device: Device | None) -> Any:
    parcel = Parcel.from_buffer(message, allow_pickle=True)
    return parcel.tree() if device is None else start_copy(parcel, device).wait()
