"""The process that has the replay buffer."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.utils._pytree import tree_leaves
from typing_extensions import Self

from tdcopier._distributed.rendezvous import seconds
from tdcopier._replay.clients import Clients
from tdcopier._replay.ends import Place
from tdcopier._replay.limited_buffer import LimitedBuffer, Side
from tdcopier._replay.limiter import Limiter
from tdcopier._replay.messages import Kind, Request, bytes_of_state, state_of_bytes
from tdcopier._replay.stats import ReplayStats
from tdcopier._replay.written import Written

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class ReplayServer:
    """A replay buffer that processes on this host and others use, each by a `ReplayClient`.

    For example, in the process that learns, and in those that act::

        server = ReplayServer(buffer, store=store, samples_per_insert=8)
        for _ in range(steps):
            learn(server.sample())

        client = ReplayClient(store=store)
        while True:
            client.extend(rollout())

    It has the methods of its clients, which threads of its process call without messages. A thread
    answers the clients; transforms, samplers and writers of the buffer work there. `with` closes
    it.
    """

    def __init__(
        self,
        buffer: Any,
        *,
        store: Store | None = None,
        name: str = "replay",
        samples_per_insert: float | None = None,
        min_size: int = 1,
        tolerance: float | None = None,
        wait_timeout_s: float | None = None,
        state: dict[str, Any] | None = None,
        slots: int | None = None,
        peer_timeout_s: float = 5.0,
        allow_pickle: bool = False,
        host: str | None = None,
        interface: str | None = None,
    ) -> None:
        """Begin to serve a buffer, which must not be used in another way from now on.

        Args:
            buffer: any object with the methods of torchrl's buffers: `extend`, `sample` and
                `__len__`, and for calls that need them `add`, `update_priority`,
                `update_tensordict_priority`, `state_dict`, `load_state_dict`. The batches that its
                `sample` returns must not be views of its storage; those of torchrl are not.
            store: where clients find the server, for example a `torch.distributed.TCPStore`. By
                default that of `torch.distributed`, if it has been initialised.
            name: of the buffer in the store.
            samples_per_insert: rows that are sampled for each row that is inserted: `extend` waits
                while fewer were sampled, and `sample` while more were. None: neither waits.
            min_size: rows that the buffer has before `sample` goes on.
            tolerance: how many rows more or less than that may have been sampled when a call
                goes on. By default as many as stand for the largest batch so far, and at least a
                tenth of those that stand for `min_size`.
            wait_timeout_s: how long `extend` and `sample` wait for the other side, here and of
                clients, before they raise a TimeoutError with nothing written or drawn; None:
                without limit. It is the server's, where all calls wait: a client could not tell
                whether a call that it gives up is made after all.
            state: of the server whose place this one takes, from its `state_dict`: no client comes
                before it is loaded.
            slots: batches of each client that may be here, as for `tdcopier.distributed.receiver`.
            peer_timeout_s: within this time, in seconds, a client that has died or stopped is
                noticed.
            allow_pickle: take batches with pickled values, whose code then runs here.
            host: the name or address of this host, by which clients reach it.
            interface: in place of `host`, the network interface, such as "eth0".

        Raises:
            RuntimeError: as `tdcopier.distributed.receiver`; or a server of this name is open, in
                this process or another. One that has ended or does not answer is no hindrance.
            ValueError, TypeError: as `tdcopier.distributed.receiver`; or a number is out of range.
        """
        _check(buffer, samples_per_insert, min_size, tolerance)
        if wait_timeout_s is not None:
            seconds("wait_timeout_s", wait_timeout_s)
        self._process, self._name, self._allow_pickle = os.getpid(), name, allow_pickle
        self._limited = LimitedBuffer(
            buffer, Limiter(samples_per_insert, min_size, tolerance, len(buffer)), wait_timeout_s
        )
        self._written = Written()
        self._closing, self._closed = threading.Lock(), threading.Event()
        if state is not None:
            self.load_state_dict(state)
        self._clients = Clients(
            Place(store, name, peer_timeout_s, host, interface),
            self._limited,
            self._written,
            self._do,
            slots=slots,
            allow_pickle=allow_pickle,
        )
        _open_servers.add(self)

    # ---- the methods of buffers ------------------------------------------------------------------

    def extend(self, data: Any, *, update_priority: bool | None = None) -> Any:
        """Write rows, and return their index, as the buffer does.

        Args:
            data: as for the buffer.
            update_priority: as for the buffer.

        Raises:
            ChannelClosedError: the server was closed.
            TimeoutError: too few rows were sampled for `wait_timeout_s`.
            Exception: what the buffer raises.
        """
        self._check_process()
        with self._limited.turn(Side.INSERT):
            return self._limited.insert("extend", data, **_given(update_priority))

    def add(self, data: Any) -> Any:
        """Write one row, and return its index, as the buffer does."""
        self._check_process()
        with self._limited.turn(Side.INSERT):
            return self._limited.insert("add", data)

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """Return a batch, as the buffer does.

        Args:
            batch_size: number of rows; by default the buffer's.
            return_info: return a pair of the batch and its info.

        Raises:
            ChannelClosedError: the server was closed.
            TimeoutError: too few rows were inserted for `wait_timeout_s`.
            Exception: what the buffer raises.
        """
        self._check_process()
        with self._limited.turn(Side.SAMPLE):
            return self._limited.sample(batch_size, return_info)

    def update_priority(self, index: Any, priority: Any) -> None:
        """Give rows another priority, as the buffer does."""
        with self._use() as buffer:
            buffer.update_priority(index, priority)

    def update_tensordict_priority(self, data: Any) -> None:
        """Give the rows of a sample another priority, as the buffer does."""
        with self._use() as buffer:
            buffer.update_tensordict_priority(data)

    def __len__(self) -> int:
        return self.stats.size

    @property
    def write_count(self) -> int:
        """How many rows were written, by the buffer's count if it has one."""
        return self.stats.write_count

    @property
    def stats(self) -> ReplayStats:
        """Counts since it was made, or of the state that was loaded."""
        self._check_process()
        with self._limited.lock:
            limiter = self._limited.limiter
            return ReplayStats(
                self._limited.size(),
                limiter.inserted,
                limiter.sampled,
                limiter.sampled / limiter.inserted if limiter.inserted else 0.0,
                limiter.insert_waits.count,
                limiter.insert_waits.seconds,
                limiter.sample_waits.count,
                limiter.sample_waits.seconds,
                self._written.repeats,
                int(getattr(self._limited.buffer, "write_count", limiter.inserted)),
                len(self._clients),
                self._clients.closed,
                self._clients.lost,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the buffer, of the limiter, and of what clients may send again.

        After `close(restarts=True)` it has all that clients were told is written.
        """
        self._check_process()
        with self._limited.lock:
            return {
                "buffer": self._limited.buffer.state_dict(),
                "limiter": self._limited.limiter.state_dict(),
                "written": self._written.state_dict(),
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that `state_dict` has returned, in place of all that was written here.

        A server that takes another one's place gets it as `state` when it is made.
        """
        with self._use() as buffer:
            buffer.load_state_dict(state["buffer"])
            self._limited.limiter.load_state_dict(state["limiter"])
            self._written.load_state_dict(state["written"])
            self._limited.go_on()

    # ---- the server ------------------------------------------------------------------------------

    @property
    def peers(self) -> list[str]:
        """Host, process and rank of each client that is connected."""
        self._check_process()
        return self._clients.peers

    @property
    def problems(self) -> list[str]:
        """Why clients were lost, or could not join, and messages not be read, in words."""
        self._check_process()
        return self._clients.problems

    def serve(self) -> None:
        """Wait until another thread closes the server, or Ctrl-C interrupts."""
        self._check_process()
        with contextlib.suppress(KeyboardInterrupt):
            self._closed.wait()

    def close(self, *, restarts: bool = False) -> None:
        """Serve no more: calls that wait raise ChannelClosedError, here and at the clients.

        May be repeated. Clients that do not answer are left after `peer_timeout_s`.

        Args:
            restarts: another server will take this one's place, with its state: clients wait for
                it, and send again what has had no answer.
        """
        if self._process != os.getpid():  # it has no server
            return
        with self._closing:
            self._limited.close()
            self._clients.close(is_over=not restarts)
            self._closed.set()
            _open_servers.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._closed.is_set():
            return f"<ReplayServer {self._name!r}, closed>"
        stats = self.stats
        return (
            f"<ReplayServer {self._name!r}, {stats.size} rows, {stats.clients} clients, "
            f"{stats.inserted} rows inserted, {stats.sampled} sampled>"
        )

    def __reduce__(self) -> Any:
        raise TypeError("a ReplayServer belongs to its process: make a ReplayClient in others")

    @contextlib.contextmanager
    def _use(self) -> Iterator[Any]:
        """Hold the lock of the buffer, in a call that does not wait for a turn."""
        self._check_process()
        with self._limited.lock:
            self._limited.check_open()
            yield self._limited.buffer

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise RuntimeError("this replay server belongs to the process that forked this one")

    # ---- requests of clients ---------------------------------------------------------------------

    def _do(self, request: Request) -> Any:
        """Do what a client asks for, with the lock; return the result."""
        return self._DO[request.kind](self, request)

    def _insert(self, request: Request) -> Any:
        if self._written.has(request.client, request.number):
            return self._written.again(request.client, request.number)
        is_one = request.kind is Kind.ADD
        data, update_priority = request.value
        options = _given(update_priority)
        index = self._limited.insert("add" if is_one else "extend", data, **options)
        self._written.note(request.client, request.number, index)
        return index

    def _sample(self, request: Request) -> Any:
        sampled = self._limited.sample(*request.value)
        _wait_for_device(sampled)
        return sampled

    def _update_priority(self, request: Request) -> None:
        self.update_priority(*request.value)

    def _update_tensordict_priority(self, request: Request) -> None:
        self.update_tensordict_priority(request.value)

    def _stats(self, request: Request) -> Any:
        return tuple(self.stats)

    def _state_dict(self, request: Request) -> Any:
        return bytes_of_state(self.state_dict())

    def _load_state_dict(self, request: Request) -> None:
        self.load_state_dict(state_of_bytes(request.value, allow_pickle=self._allow_pickle))

    _DO: ClassVar = {
        Kind.EXTEND: _insert,
        Kind.ADD: _insert,
        Kind.SAMPLE: _sample,
        Kind.UPDATE_PRIORITY: _update_priority,
        Kind.UPDATE_TENSORDICT_PRIORITY: _update_tensordict_priority,
        Kind.STATS: _stats,
        Kind.STATE_DICT: _state_dict,
        Kind.LOAD_STATE_DICT: _load_state_dict,
    }


def _check(
    buffer: Any, samples_per_insert: float | None, min_size: int, tolerance: float | None
) -> None:
    for method in ("extend", "sample", "__len__"):
        if not callable(getattr(buffer, method, None)):
            raise TypeError(f"a {type(buffer).__name__} is no replay buffer: it has no {method}")
    if not isinstance(min_size, int) or isinstance(min_size, bool):
        raise TypeError(f"min_size is an int, got {min_size!r}")
    if min_size < 0:
        raise ValueError(f"min_size must not be negative, got {min_size}")
    if samples_per_insert is not None and not samples_per_insert > 0:
        raise ValueError(f"samples_per_insert must be positive, got {samples_per_insert}")
    if tolerance is not None:
        if samples_per_insert is None:
            raise ValueError("tolerance is one of samples_per_insert: give both")
        if not tolerance >= 0:
            raise ValueError(f"tolerance must not be negative, got {tolerance}")
    capacity = getattr(getattr(buffer, "storage", None), "max_size", None)
    if isinstance(capacity, int) and capacity < min_size:
        raise ValueError(f"the buffer holds {capacity} rows, and never has min_size={min_size}")


def _wait_for_device(batch: Any) -> None:
    """Wait for a batch that a device still writes: another thread, with its streams, packs it."""
    if not torch.accelerator.is_available():
        return
    device = getattr(batch, "device", None)  # a TensorDict's: looking at all leaves takes long
    devices = [device] if device is not None else _devices_of(batch)
    for each in devices:
        if each.type not in ("cpu", "meta"):
            torch.accelerator.current_stream(each).synchronize()


def _devices_of(batch: Any) -> set[torch.device]:
    return {leaf.device for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)}


def _given(update_priority: bool | None) -> dict[str, Any]:
    return {} if update_priority is None else {"update_priority": update_priority}


_open_servers: weakref.WeakSet[ReplayServer] = weakref.WeakSet()


@atexit.register
def _close_at_exit() -> None:
    for server in list(_open_servers):
        server.close(restarts=True)  # it has not been said that this is the end
