"""The ranks of a group: their messages, on the host and a device, and errors that all raise."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from tdcopier import _C
from tdcopier._copy import start_copy
from tdcopier._options import Device
from tdcopier._pack import pack

Group: TypeAlias = "dist.ProcessGroup"
T = TypeVar("T")

_NO_NEWS = -1
_MOST_AHEAD = 16
"""Messages on the host that the source need not have waited for."""

_host_groups: WeakKeyDictionary[Group, Group] = WeakKeyDictionary()
_under_way: WeakKeyDictionary[Group, deque[tuple[Any, torch.Tensor]]] = WeakKeyDictionary()
_heads: WeakKeyDictionary[Group, dict[int, bytes]] = WeakKeyDictionary()
"""For each group that sends on a device, by source: the bytes before the leaves of the last parcel
that was broadcast."""


class Packed(NamedTuple):
    """A tree on the device of the messages, and its parcel."""

    moved: Any
    message: torch.Tensor
    head: bytes
    """The bytes of the parcel before the leaves, if it is on a device."""


class Ranks(NamedTuple):
    """The ranks that take part, and the device of their messages."""

    group: Group | None
    src: int
    rank: int
    members: list[int]
    """Global ranks, in the order of the group."""
    device: torch.device

    @classmethod
    def of(cls, group: Group | None, src: int | None, name: str = "src") -> Ranks:
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

    # ---- trees -----------------------------------------------------------------------------------

    def packed(self, tree: Any) -> Packed:
        """Return the tree on the device of the messages, and its parcel as a message."""
        moved = start_copy(tree, self.device).wait()
        parcel = pack(moved)
        if parcel.device.type == self.device.type:
            return Packed(moved, parcel._bytes, parcel._head)
        return Packed(moved, parcel._bytes.to(self.device), bytes(parcel))  # has no tensors

    def own(self, tree: Any, moved: Any, device: Device | None) -> Any:
        """Return this rank's tree on the device that was asked for."""
        if device is None or str(device) in (str(self.device), self.device.type):
            return moved
        return start_copy(tree, device).wait()

    # ---- numbers that all ranks get, or the error that prevents it -------------------------------

    def share(self, make: Callable[[], tuple[T, list[int]]], count: int) -> tuple[T | None, Any]:
        """Return what the source makes to be sent, there alone, and its numbers, on every rank.

        Raises:
            Exception: the error that occurred on the source, before other ranks wait for more.
        """
        made, numbers, error = None, [0] * count, None
        if self.rank == self.src:
            try:
                made, numbers = make()
            except Exception as caught:
                error = caught
        told = _told(error)
        if told:
            numbers[0] = -len(told)  # which no size is
        message = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        numbers = self._broadcast_on_host(message).tolist()
        if numbers[0] < 0:
            body = torch.frombuffer(bytearray(told or -numbers[0]), dtype=torch.uint8)
            told = bytes(self._broadcast_on_host(body).numpy())
            try:
                _raise(error, told, self.src)
            finally:
                del error  # avoids a reference cycle with its traceback, which keeps the tree
        return made, numbers

    def collect(self, tree: Any) -> tuple[Packed, list[int]]:
        """Return this rank's tree, packed, and the sizes of all parcels.

        Raises:
            Exception: the error of this rank, or else of the first that has one.
        """
        packed, error = Packed(None, self.new_message(0), b""), None
        try:
            packed = self.packed(tree)
        except Exception as caught:
            error = caught
        told = _told(error)
        size = torch.tensor(
            [-len(told) if told else packed.message.nbytes], dtype=torch.int64, device="cpu"
        )
        sizes = [int(each) for each in self.all_gather(size, 1)]
        if min(sizes) < 0:
            body = torch.frombuffer(bytearray(told or b"-"), dtype=torch.uint8)
            bodies = self.all_gather(body, -min(sizes))
            first = next(place for place, size in enumerate(sizes) if size < 0)
            told = bytes(bodies[first].numpy())[: -sizes[first]]
            try:
                _raise(error, told, self.members[first])
            finally:
                del error  # avoids a reference cycle with its traceback, which keeps the tree
        return packed, sizes

    def news(self, packed: Packed) -> int:
        """Return how many bytes `share_head` sends of a parcel of the source."""
        if self.device.type == "cpu":
            return 0
        return _NO_NEWS if self._known_heads().get(self.src) == packed.head else len(packed.head)

    def share_head(self, packed: Packed | None, nbytes: int) -> bytes:
        """Return the bytes before the leaves of the source's parcel; none if it is on the host."""
        if nbytes == 0:
            return b""
        if nbytes != _NO_NEWS:
            head = bytearray(nbytes if packed is None else packed.head)
            memory = self._broadcast_on_host(torch.frombuffer(head, dtype=torch.uint8))
            self._known_heads()[self.src] = bytes(memory.numpy())
        return self._known_heads()[self.src]

    def _known_heads(self) -> dict[int, bytes]:
        return _heads.setdefault(_made(self.group), {})

    # ---- messages --------------------------------------------------------------------------------

    def new_message(self, size: int) -> torch.Tensor:
        """Allocate memory for a parcel."""
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def broadcast(self, message: torch.Tensor) -> None:
        """Fill the message on every rank with that of the source."""
        dist.broadcast(message, self.src, group=self.group)

    def all_gather(self, message: torch.Tensor, longest: int) -> list[torch.Tensor]:
        """Return the messages of all ranks, each with room for the longest."""
        if message.numel() < longest:
            whole = torch.zeros(longest, dtype=message.dtype, device=message.device)
            whole[: message.numel()] = message
            message = whole
        found = [torch.empty_like(message) for _ in self.members]
        dist.all_gather(found, message, group=self._host_group() if message.is_cpu else self.group)
        return found

    def exchange(self, operations: list[dist.P2POp]) -> None:
        """Send and receive messages between pairs of ranks."""
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()

    def _broadcast_on_host(self, message: torch.Tensor) -> torch.Tensor:
        group = self._host_group()
        work = dist.broadcast(message, self.src, group=group, async_op=True)
        if self.rank != self.src:
            work.wait()
            return message
        ahead = _under_way.setdefault(_made(group), deque())
        ahead.append((work, message))
        while len(ahead) > _MOST_AHEAD or (ahead and ahead[0][0].is_completed()):
            ahead.popleft()[0].wait()
        return message

    def _host_group(self) -> Group | None:
        """Return the group for messages on the host; if it is none of these, another is made.

        So the host waits for no work on the device.
        """
        config = dist.get_backend_config(self.group)
        if any(part.startswith("cpu:") for part in config.split(",")):
            return self.group
        key = _made(self.group)
        if key not in _host_groups:
            _host_groups[key] = dist.new_group(
                self.members, backend="gloo", use_local_synchronization=True
            )
        return _host_groups[key]


def arrived(message: torch.Tensor, device: Device | None, head: bytes = b"") -> Any:
    """Return the tree of a message, whose memory no one else has."""
    parcel = _C.parcel_from(message, may_unpickle=True, is_owned=True, head=head)
    return parcel.tree() if device is None else start_copy(parcel, device).wait()


def _made(group: Group | None) -> Group:
    made = dist.group.WORLD if group is None else group
    assert made is not None  # as `Ranks.of` has seen
    return made


_SENT_AS_SUCH: dict[str, type[Exception]] = {
    cls.__name__: cls for cls in (TypeError, ValueError, RecursionError, RuntimeError)
}


def _told(error: Exception | None) -> bytes:
    """Return what other ranks receive of an error: the name of the class to raise, and the text."""
    if error is None:
        return b""
    as_such = (cls.__name__ for cls in type(error).__mro__ if cls.__name__ in _SENT_AS_SUCH)
    name = next(as_such, RuntimeError.__name__)
    try:
        text = str(error)
    except Exception:
        text = "its text cannot be had"
    own = type(error).__name__
    return pickle.dumps((name, text if own == name else f"{own}: {text}"))


def _raise(own: Exception | None, told: bytes, rank: int) -> NoReturn:
    """Raise this rank's own error, or what another rank has told of its error."""
    if own is not None:
        try:
            raise own
        finally:
            del own  # avoids a reference cycle with its traceback
    name, text = pickle.loads(told)
    raise _SENT_AS_SUCH[name](f"rank {rank} could not send: {text}")


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
