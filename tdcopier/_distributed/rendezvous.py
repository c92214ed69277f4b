"""Brings two processes together: one listens, and says where in a store; others connect.

A listener has a token, which only readers of its store know: a process that connects says it first,
or is refused. One that was killed leaves its place in the store, which the next listener of its
name writes anew; a process that finds no one there looks again. A listener of a name at which one
answers is refused.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import struct
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from tdcopier import _C

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_LOOKS_S = 0.05
"""Between two looks at the store, and whether the listener is to end."""
_HANDSHAKE_S, _HANDSHAKES = 10.0, 64
"""How long one may take, and how many there are at a time: others wait."""
MOST_PROBLEMS = 1000
"""That are kept; the last ones."""
LONGEST_S = 1e7
"""Of a time limit: about what the system can wait."""
_MARK, _LENGTH = b"tdcopier 3\n", struct.Struct("<I")
"""The first bytes of a connection, and the size of what follows."""
_MOST_BYTES = 4096
"""Of what a process says of itself."""


def seconds(name: str, value: object, *, zero: bool = False) -> float:
    """Return a time limit that the caller gives.

    Raises:
        TypeError: it is no number.
        ValueError: it is negative, or longer than the system can wait; or it is 0, and not `zero`.
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number of seconds; got {value!r}")
    if not 0 <= value < LONGEST_S or (value == 0 and not zero):
        least = "not be negative" if zero else "be positive"
        raise ValueError(f"{name} must {least}, and less than {LONGEST_S:g}; got {value!r}")
    return float(value)


class Options(NamedTuple):
    """How ends of channels find and watch each other."""

    store: Store
    name: str
    """In the store."""
    given_name: str
    """By the caller, for messages."""
    address: str
    """Of this process."""
    peer_timeout_s: float
    connect_timeout_s: float
    """How long a process that connects waits for the one that listens."""

    def own_store(self) -> Store:
        """Return the store by a connection of its own: one that waits holds up its other users."""
        store: Any = self.store
        if not hasattr(store, "clone"):
            return self.store
        own: Store = store.clone()
        own.set_timeout(datetime.timedelta(seconds=self.connect_timeout_s))
        return own


class Found(NamedTuple):
    """A connection, and what the other end said of itself."""

    connection: Any
    """A `_C.Connection`, as soon as it may be used."""
    peer: str
    timeout_s: float
    """How long the other end waits for a sign of life."""


def join(options: Options, what: str = "receiver") -> Found:
    """Connect to the process that listens.

    Raises:
        ConnectionError: none has listened in time.
    """
    store, key = options.own_store(), _key(options.name)
    end = time.monotonic() + options.connect_timeout_s
    found = "is in the store"
    while True:
        try:
            if store.check([key]):
                # One that is stopped takes the connection and says nothing; the next may come.
                left_s = min(end - time.monotonic(), options.peer_timeout_s)
                return _connect(json.loads(store.get(key)), options, max(left_s, _LOOKS_S))
        except (OSError, ValueError) as error:
            found = f"is in the store, and cannot be reached ({error}),"
        except RuntimeError as error:  # of the store, from which it may be gone meanwhile
            found = f"can be read from the store ({error})"
        if time.monotonic() > end:
            raise ConnectionError(
                f"{'no' if found == 'is in the store' else 'the'} {what} with the name "
                f"{options.given_name!r} {found} after {options.connect_timeout_s:.3g} s"
            )
        time.sleep(_LOOKS_S)


class Listener:
    """Takes connections of processes that join, in threads of its own."""

    def __init__(self, options: Options, came: Callable[[Found], None], what: str) -> None:
        """Begin to listen.

        Args:
            options: where.
            came: is called in another thread for each process.
            what: the listener is, for messages.

        Raises:
            OSError: the address cannot be listened at.
            RuntimeError: another process listens, with the same name.
        """
        self._options = options
        self._came = weakref.WeakMethod(came)
        """It ends if the owner is dropped."""
        self._handshakes = threading.BoundedSemaphore(_HANDSHAKES)
        self._key = _key(options.name)
        self._ended, self._closing, self._is_closed = threading.Event(), threading.Lock(), False
        self.failures: deque[str] = deque(maxlen=MOST_PROBLEMS)
        """Why processes that have connected could not join; the last ones."""
        family = socket.AF_INET6 if ":" in options.address else socket.AF_INET
        self._socket = socket.create_server((options.address, 0), family=family, backlog=128)
        self._socket.settimeout(_LOOKS_S)
        self._about = {
            "token": uuid.uuid4().hex,
            "address": options.address,
            "port": self._socket.getsockname()[1],
            **_about(options),
        }
        try:
            self._take_place(what)
        except BaseException:
            self._socket.close()
            raise
        self._thread = threading.Thread(target=self._listen, name="tdcopier-listen", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float | None = None) -> None:
        """Listen no more. Connections that were made stay. A store that hangs is left then."""
        self._ended.set()
        self._thread.join()
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
        self._close_socket()
        # In a thread: a store whose process is stopped does not answer.
        removing = threading.Thread(target=self._remove_key, name="tdcopier-store", daemon=True)
        removing.start()
        removing.join(timeout_s)

    def _take_place(self, what: str) -> None:
        """Write to the store where this one listens, in place of one that is gone.

        Raises:
            RuntimeError: another one answers.
        """
        mine, before = json.dumps(self._about), ""
        while (found := _swap(self._options.store, self._key, before, mine)) != mine:
            if found == before:  # it was removed meanwhile
                before = ""
                continue
            if (peer := _peer_at(found, self._options)) is not None:
                raise RuntimeError(
                    f"another {what} with the name {self._options.given_name!r} is open, in "
                    f"{peer}: close it first, or give this one another name"
                )
            before = found

    def _remove_key(self) -> None:
        store = self._options.store
        try:
            is_there = store.check([self._key])  # or `get` would wait for it
            if is_there and store.get(self._key) == json.dumps(self._about).encode():
                store.delete_key(self._key)
        except Exception as error:  # the store is gone; one of one's own raises what it likes
            self.failures.append(str(error))

    def _close_socket(self) -> None:
        with contextlib.suppress(OSError):  # a forked child may have it too: end it there
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _listen(self) -> None:
        while not self._ended.is_set():
            if self._came() is None:
                self._close_socket()
                return
            if not self._handshakes.acquire(timeout=_LOOKS_S):
                continue
            is_met, connected = False, None
            try:
                connected, (address, *_) = self._socket.accept()
                arguments = (connected, address)
                meet = threading.Thread(
                    target=self._meet, args=arguments, name="tdcopier-meet", daemon=True
                )
                meet.start()
                is_met = True
            except TimeoutError:
                continue
            except (OSError, RuntimeError) as error:  # too many files are open, or threads
                self.failures.append(f"a process could not join: {error}")
                if connected is not None:
                    connected.close()
                self._ended.wait(_LOOKS_S)
            finally:
                if not is_met:
                    self._handshakes.release()

    def _meet(self, connected: socket.socket, address: str) -> None:
        name = f"a process at {address}"
        try:
            with connected:
                about = _read(connected, min(self._options.peer_timeout_s, _HANDSHAKE_S))
                if about.get("token") != self._about["token"]:
                    raise ValueError("it knows another token")
                found = _found(about)
                name = found.peer
                _write(connected, self._about)
                if about.get("asks"):
                    return
                came = self._came()
                if came is not None:
                    came(found._replace(connection=_connection_of(connected)))
        except Exception as error:  # for example, it has ended meanwhile
            self.failures.append(f"{name} could not join: {error}")
        finally:
            self._handshakes.release()


def _connect(told: dict[str, Any], options: Options, timeout_s: float) -> Found:
    """Connect to a process that has told where it listens.

    Raises:
        OSError, ValueError: it does not listen there, or it is another one.
    """
    with _connected(told, options, timeout_s) as connected:
        _write(connected, {"token": told["token"], **_about(options)})
        found = _found(_read(connected, timeout_s))
        return found._replace(connection=_connection_of(connected))


def _peer_at(written: str, options: Options) -> str | None:
    """Return which process listens where the store says that one does; None: none answers."""
    try:
        told = json.loads(written)
        with _connected(told, options, options.peer_timeout_s) as connected:
            _write(connected, {"token": told["token"], "asks": True, **_about(options)})
            return _found(_read(connected, options.peer_timeout_s)).peer
    except (OSError, ValueError):
        return None


def _connected(told: Any, options: Options, timeout_s: float) -> socket.socket:
    """Return a connection to where a process has told that it listens.

    Raises:
        OSError, ValueError: none listens there.
    """
    if not isinstance(told, dict) or not {"address", "port", "token"} <= told.keys():
        raise ValueError("another version has written it")
    is_near = options.address in ("127.0.0.1", "::1")
    source = None if is_near else (options.address, 0)
    where = (told["address"], told["port"])
    return socket.create_connection(where, timeout=timeout_s, source_address=source)


def _swap(store: Any, key: str, before: str, after: str) -> str:
    """Set a key if it has that value, or is not there and that is empty; return what it has."""
    try:
        return str(store.compare_set(key, before, after).decode())
    except (AttributeError, RuntimeError) as error:  # a store of one's own may lack it
        if isinstance(error, RuntimeError) and "Not implemented" not in str(error):
            raise
    found = store.get(key).decode() if store.check([key]) else ""
    if found != before:
        return str(found)
    store.set(key, after)
    return after


def _found(about: dict[str, Any]) -> Found:
    """Return what a process has said of itself, without its connection.

    Raises:
        ValueError: it has said something else.
    """
    peer, timeout_s = about.get("peer"), about.get("timeout_s")
    if not isinstance(peer, str) or not isinstance(timeout_s, (int, float)):
        raise ValueError("it says something else")
    if not 0 < timeout_s < LONGEST_S:
        raise ValueError(f"its timeout is {timeout_s} s")
    return Found(None, peer, timeout_s)


def _connection_of(connected: socket.socket) -> _C.Connection:
    connected.settimeout(None)
    return _C.Connection.of_socket(connected.detach())


def _write(connected: socket.socket, about: dict[str, Any]) -> None:
    said = json.dumps(about).encode()
    connected.sendall(_MARK + _LENGTH.pack(len(said)) + said)


def _read(connected: socket.socket, timeout_s: float) -> dict[str, Any]:
    """Read what the other process says of itself.

    Raises:
        OSError: it says nothing in time.
        ValueError: it is another program.
    """
    end = time.monotonic() + timeout_s
    mark = _read_bytes(connected, len(_MARK), end)
    if mark != _MARK:
        raise ValueError("it is no process of a channel, or of another version")
    (size,) = _LENGTH.unpack(_read_bytes(connected, _LENGTH.size, end))
    if size > _MOST_BYTES:
        raise ValueError("it says too much")
    about = json.loads(_read_bytes(connected, size, end))
    if not isinstance(about, dict):
        raise ValueError("it says something else")
    return about


def _read_bytes(connected: socket.socket, size: int, end: float) -> bytes:
    found = b""
    while len(found) < size:
        connected.settimeout(max(end - time.monotonic(), 1e-3))
        part = connected.recv(size - len(found))
        if not part:
            raise ConnectionError("it has closed the connection")
        found += part
    return found


def _key(name: str) -> str:
    return f"tdcopier/channels/{name}"


def _about(options: Options) -> dict[str, Any]:
    peer = f"{socket.gethostname()}:{os.getpid()}"
    if dist.is_available() and dist.is_initialized():
        peer += f" (rank {dist.get_rank()})"
    return {"peer": peer, "timeout_s": options.peer_timeout_s}
