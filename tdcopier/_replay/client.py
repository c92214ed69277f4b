"""A replay buffer of another process, with the methods of torchrl's buffers."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from tdcopier._copy import copy
from tdcopier._distributed.ends import ChannelClosedError
from tdcopier._distributed.rendezvous import seconds
from tdcopier._options import Device
from tdcopier._replay.connection import Connection
from tdcopier._replay.ends import Place
from tdcopier._replay.messages import Kind, bytes_of_state, state_of_bytes
from tdcopier._replay.stats import ReplayStats

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_OF_PRIORITIES = ("index", "anchor_index", "validity_mask")
"""Keys that torchrl's buffers read to give the rows of a sample another priority."""
_MOST_KINDS = 4
"""Of samples, by size, that are asked for ahead: those asked for last."""
_MOST_UNWRITTEN = 4
"""Batches that are on their way without a wait."""
_SPARE_SLOTS, _FEWEST_SLOTS = 2, 4


class ReplayClient:
    """The replay buffer of a `ReplayServer`, for a process on this host or another.

    For example, in a process that acts, and in one that learns::

        with ReplayClient(store=store) as buffer:
            while True:
                buffer.extend(rollout())

        with ReplayClient(store=store, device="cuda", batch_size=256) as buffer:
            for batch in buffer:
                learn(batch)

    Methods have the names and the meanings of torchrl's buffers, and torchrl's collectors take it
    as one. A server that dies is waited for: the next one of its name, with its state, goes on.
    Threads may share a client. `with` closes it.
    """

    def __init__(
        self,
        *,
        store: Store | None = None,
        name: str = "replay",
        device: Device = "cpu",
        batch_size: int | None = None,
        prefetch: int = 2,
        peer_timeout_s: float = 5.0,
        connect_timeout_s: float = 60.0,
        reconnect_timeout_s: float = 60.0,
        allow_pickle: bool = False,
        host: str | None = None,
        interface: str | None = None,
    ) -> None:
        """Find the server, and wait for it.

        Args:
            store: where the server is found, for example a `torch.distributed.TCPStore`. By
                default that of `torch.distributed`, if it has been initialised.
            name: of the buffer in the store.
            device: where samples arrive.
            batch_size: of samples; by default that of the server's buffer.
            prefetch: samples that are asked for ahead. They were drawn before what is written
                after the call that has asked for them.
            peer_timeout_s: within this time, in seconds, a server that has died or stopped is
                noticed.
            connect_timeout_s: how long to wait for the server.
            reconnect_timeout_s: how long to wait for another server when this one is lost; 0: not
                at all.
            allow_pickle: take samples with pickled values, whose code then runs here.
            host: the name or address of this host, by which the server reaches it.
            interface: in place of `host`, the network interface, such as "eth0".

        Raises:
            ConnectionError: no server has come in time.
            RuntimeError, ValueError, TypeError: as `tdcopier.distributed.sender`; or a number is
                out of range.
        """
        if not isinstance(prefetch, int) or isinstance(prefetch, bool) or prefetch < 0:
            raise ValueError(f"prefetch is a number of samples, got {prefetch!r}")
        seconds("reconnect_timeout_s", reconnect_timeout_s, zero=True)
        self._process, self._name, self._device = os.getpid(), name, device
        self._batch_size, self._prefetch = batch_size, prefetch
        self._allow_pickle = allow_pickle
        self._asking = threading.Lock()
        self._ahead: dict[tuple[int | None, bool], deque[int]] = {}
        """Numbers of the requests for samples that were sent, by what they ask for."""
        self._extending = threading.Lock()
        self._unwritten: deque[int] = deque()
        """Numbers of the requests of `extend` without a wait."""
        self._is_closed = False
        self._connection = Connection(
            Place(store, name, peer_timeout_s, host, interface),
            device,
            max(prefetch + _SPARE_SLOTS, _FEWEST_SLOTS),
            connect_timeout_s=connect_timeout_s,
            reconnect_timeout_s=reconnect_timeout_s,
            allow_pickle=allow_pickle,
        )
        _open_clients.add(self)

    # ---- rows ------------------------------------------------------------------------------------

    def extend(self, data: Any, *, update_priority: bool | None = None, wait: bool = True) -> Any:
        """Write rows to the buffer, and return their index, on the host.

        The call waits until the rows are in the buffer, all of them or none, and while the server
        wants samples first. It leaves `data` as it is: torchrl's buffers set its "index".

        Args:
            data: as for the server's buffer: for those of torchrl a TensorDict, or a list of rows.
            update_priority: as for the buffer.
            wait: False: return None when the rows are on their way, and wait only for the batch
                that is four calls older. `data` must stay as it is until `flush` returns: it is
                sent again if the server is lost. Errors are raised by later calls and by `flush`.

        Raises:
            ChannelClosedError: this client, or the server, was closed.
            PeerLostError: the server is gone, and none has come in its place.
            TimeoutError: too few rows were sampled for the server's `wait_timeout_s`.
            ValueError: a value needs a pickle, and the server does not allow that.
            Exception: what the buffer raises, as the nearest builtin class.
        """
        value = (_stacked(data), update_priority)
        if wait:
            return self._ask(Kind.EXTEND, value)
        with self._extending:
            while len(self._unwritten) >= _MOST_UNWRITTEN:
                self._wait_for_oldest()
            self._check_process()
            self._unwritten.append(self._connection.ask(Kind.EXTEND, value))
        return None

    def flush(self) -> None:
        """Wait until all rows are in the buffer that `extend` was called for without a wait.

        It raises the error of one batch at a time: the next call goes on with the next batch.

        Raises:
            Exception: as `extend`.
        """
        self._check_process()
        with self._extending:
            while self._unwritten:
                self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        """Wait for a batch that is on its way, again if an interrupt has ended that."""
        number = self._unwritten[0]
        try:
            self._connection.answer(number)
        except Exception:
            self._unwritten.popleft()
            raise
        self._unwritten.popleft()

    def add(self, data: Any) -> Any:
        """Write one row to the buffer, and return its index. It raises what `extend` does."""
        return self._ask(Kind.ADD, (_stacked(data), None))

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """Return a batch on the device, ordered on the current stream.

        The call waits while the buffer has fewer rows than the server's `min_size`, and while the
        server wants rows first.

        Args:
            batch_size: number of rows; by default the client's, or that of the server's buffer.
            return_info: return a pair of the batch and its info, also on the device.

        Raises:
            ChannelClosedError, PeerLostError: as `extend`.
            TimeoutError: too few rows were inserted for the server's `wait_timeout_s`.
            Exception: what the buffer raises, as the nearest builtin class.
        """
        return self._take_sample(self._ask_for_samples(batch_size, return_info))

    def __iter__(self) -> Iterator[Any]:
        """Yield samples, until the client or the server is closed."""
        while True:
            try:
                sampled = self.sample()
            except ChannelClosedError:
                return
            yield sampled

    # ---- priorities ------------------------------------------------------------------------------

    def update_priority(self, index: Any, priority: Any) -> None:
        """Give rows another priority. It does not wait: what the buffer raises, a later call does.

        Args:
            index: of the rows, as in a sample: a tensor on any device, a number, or a tuple.
            priority: of each row.

        Raises:
            ChannelClosedError, PeerLostError: as `extend`.
        """
        self._tell(Kind.UPDATE_PRIORITY, copy((index, priority), "cpu"))

    def update_tensordict_priority(self, data: Any) -> None:
        """Give the rows of a sample the priorities in it. It does not wait, as `update_priority`.

        Args:
            data: a sample, with its "index" and the buffer's `priority_key`.

        Raises:
            ChannelClosedError, PeerLostError: as `extend`.
        """
        key = self._connection.about["priority_key"]
        keys = (tuple(key) if isinstance(key, list) else key, *_OF_PRIORITIES)
        if key is not None and hasattr(data, "select"):  # the other leaves need not cross
            data = data.select(*keys, strict=False)
        self._tell(Kind.UPDATE_TENSORDICT_PRIORITY, copy(data, "cpu"))

    # ---- the buffer ------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.stats.size

    @property
    def batch_size(self) -> int | None:
        """The size of samples, or None for that of the server's buffer."""
        return self._batch_size

    @property
    def write_count(self) -> int:
        """How many rows were written, by the buffer's count if it has one."""
        return self.stats.write_count

    @property
    def stats(self) -> ReplayStats:
        """The server's counts."""
        return ReplayStats(*self._ask(Kind.STATS))

    def state_dict(self) -> dict[str, Any]:
        """Return the server's state: of the buffer, the limiter, and what may be sent again.

        It crosses as one message: save a large buffer at the server.
        """
        memory = self._ask(Kind.STATE_DICT)
        return state_of_bytes(memory, allow_pickle=self._allow_pickle)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that `state_dict`, or that of the server, has returned."""
        self._ask(Kind.LOAD_STATE_DICT, bytes_of_state(state))

    # ---- the client ------------------------------------------------------------------------------

    @property
    def peer(self) -> str:
        """The server's host, process and rank."""
        return self._connection.peer

    @property
    def reconnects(self) -> int:
        """How many times another server, or the same one, was found again."""
        return self._connection.reconnects

    def close(self) -> None:
        """Tell the server that this client goes. Calls that wait raise ChannelClosedError.

        May be repeated. Samples that were asked for ahead are dropped, and so may be rows that
        `flush` was not called for.
        """
        if self._process != os.getpid():  # it has no client
            return
        if not self._is_closed:
            self._is_closed = True
            self._connection.close()
            _open_clients.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"of {self.peer}"
        return f"<ReplayClient {self._name!r}, {state}>"

    def __reduce__(self) -> Any:
        raise TypeError("a ReplayClient belongs to its process: make one in each")

    def _ask(self, kind: Kind, value: Any = None) -> Any:
        self._check_process()
        self._connection.raise_failed()
        result = self._connection.answer(self._connection.ask(kind, value))
        return copy(result, "cpu")

    def _ask_for_samples(self, batch_size: int | None, return_info: bool) -> int:
        """Ask for a sample, unless that was done, and for others ahead; return its number."""
        self._check_process()
        self._connection.raise_failed()
        size = self._batch_size if batch_size is None else batch_size
        with self._asking:
            ahead = self._ahead.pop((size, return_info), deque())
            self._ahead[size, return_info] = ahead  # the last one that was asked for
            while len(self._ahead) > _MOST_KINDS:
                self._forget(next(iter(self._ahead)))
            while len(ahead) <= self._prefetch:
                ahead.append(self._connection.ask(Kind.SAMPLE, (size, return_info)))
            return ahead.popleft()

    def _forget(self, kind: tuple[int | None, bool]) -> None:
        """Drop the samples of a kind that were asked for ahead."""
        for number in self._ahead.pop(kind):
            self._connection.forget(number)

    def _take_sample(self, number: int) -> Any:
        try:
            sampled = self._connection.answer(number)
        except Exception:  # those asked for ahead would raise it again, whatever is there by then
            with self._asking:
                for kind in list(self._ahead):
                    self._forget(kind)
            raise
        if self._prefetch:
            self._connection.read_what_has_come()
        return sampled

    def _tell(self, kind: Kind, value: Any) -> None:
        self._check_process()
        self._connection.raise_failed()
        self._connection.ask(kind, value)

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise RuntimeError("this replay client belongs to the process that forked this one")


def _stacked(data: Any) -> Any:
    """Return rows with one leaf for each key: collectors give a lazy stack, with one for each row.

    Such a stack cannot cross without a pickle.
    """
    return data.contiguous() if hasattr(data, "stack_dim") else data


_open_clients: weakref.WeakSet[ReplayClient] = weakref.WeakSet()


@atexit.register
def _close_at_exit() -> None:
    for client in list(_open_clients):
        client.close()
