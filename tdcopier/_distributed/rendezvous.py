"""Brings two processes together: one listens, and says where in a store; others connect.

A listener has a token, which only readers of its store know: a process that connects says it first,
or is refused. One that was killed leaves its place in the store, which the next listener of its
name writes anew; a process that finds no one there looks again.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from tdcopier import _C

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_LOOKS_S = 0.05
"""Between two looks at the store, and whether the listener is to end."""
_MARK, _LENGTH = b"tdcopier 3\n", struct.Struct("<I")
"""The first bytes of a connection, and the size of what follows."""
_MOST_BYTES = 4096
"""Of what a process says of itself."""
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux


class Address(NamedTuple):
    """Where a process can be reached by others; by default, by the name of its host."""

    host: str | None = None
    interface: str | None = None

    def resolve(self) -> str:
        """Return the address of this host.

        Raises:
            ValueError: this host has none like that.
        """
        try:
            if self.interface is not None:
                return _address_of(self.interface)
            if self.host is not None:
                return _own_address(self.host)
        except OSError as error:
            raise ValueError(f"host or interface: {error}") from None
        with contextlib.suppress(OSError):  # the host's name may be that of no address
            return _own_address(socket.gethostname())
        return _own_address("localhost")


class Options(NamedTuple):
    """How ends of channels find and watch each other."""

    store: Store
    name: str
    address: str
    """Of this process."""
    timeout_s: float
    connect_timeout_s: float

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

    connection: _C.Connection
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
        if store.check([key]):
            told = json.loads(store.get(key))
            try:
                return _connect(told, options, max(end - time.monotonic(), _LOOKS_S))
            except OSError as error:
                found = f"is in the store, and cannot be reached ({error}),"
        if time.monotonic() > end:
            raise ConnectionError(
                f"{'no' if found == 'is in the store' else 'the'} {what} with the name "
                f"{options.name!r} {found} after {options.connect_timeout_s:g} s"
            )
        time.sleep(_LOOKS_S)


class Listener:
    """Takes connections of processes that join, in threads of its own."""

    def __init__(self, options: Options, came: Callable[[Found], None]) -> None:
        """Begin to listen. `came` is called in another thread for each process.

        Raises:
            OSError: the address cannot be listened at.
        """
        self._options, self._came = options, came
        self._key = _key(options.name)
        self._ended, self._closing, self._is_closed = threading.Event(), threading.Lock(), False
        self.failures: list[str] = []
        """Why processes that have connected could not join."""
        family = socket.AF_INET6 if ":" in options.address else socket.AF_INET
        self._socket = socket.create_server((options.address, 0), family=family, backlog=128)
        self._socket.settimeout(_LOOKS_S)
        self._about = {
            "token": uuid.uuid4().hex,
            "address": options.address,
            "port": self._socket.getsockname()[1],
            **_about(options),
        }
        options.store.set(self._key, json.dumps(self._about))
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
        self._socket.close()
        # In a thread: a store whose process is stopped does not answer.
        removing = threading.Thread(target=self._remove_key, name="tdcopier-store", daemon=True)
        removing.start()
        removing.join(timeout_s)

    def _remove_key(self) -> None:
        store = self._options.store
        try:
            is_there = store.check([self._key])  # or `get` would wait for it
            if is_there and json.loads(store.get(self._key))["token"] == self._about["token"]:
                store.delete_key(self._key)
        except RuntimeError as error:  # the store is gone
            self.failures.append(str(error))

    def _listen(self) -> None:
        while not self._ended.is_set():
            try:
                connected, address = self._socket.accept()
            except TimeoutError:
                continue
            except OSError as error:  # for example, too many files are open
                self.failures.append(str(error))
                self._ended.wait(_LOOKS_S)
                continue
            arguments = (connected, address[0])
            threading.Thread(
                target=self._meet, args=arguments, name="tdcopier-meet", daemon=True
            ).start()

    def _meet(self, connected: socket.socket, address: str) -> None:
        with connected:
            try:
                connected.settimeout(self._options.connect_timeout_s)
                about = _read(connected)
                if about.get("token") != self._about["token"]:
                    raise ValueError("it knows another token")
                peer, timeout_s = str(about["peer"]), float(about["timeout_s"])
                _write(connected, self._about)
                connection = _connection_of(connected)
            except (OSError, ValueError, KeyError) as error:  # for example, it has ended meanwhile
                self.failures.append(f"a process at {address} could not join: {error}")
                return
        try:
            self._came(Found(connection, peer, timeout_s))
        except Exception as error:
            self.failures.append(f"{peer} could not join: {error}")


def _connect(told: dict[str, Any], options: Options, timeout_s: float) -> Found:
    """Connect to a process that has told where it listens.

    Raises:
        OSError: it does not listen there, or it is another one.
    """
    is_near = options.address in ("127.0.0.1", "::1")
    source = None if is_near else (options.address, 0)
    where = (told["address"], told["port"])
    with socket.create_connection(where, timeout=timeout_s, source_address=source) as connected:
        _write(connected, {"token": told["token"], **_about(options)})
        try:
            about = _read(connected)
        except ValueError as error:
            raise ConnectionError(str(error)) from None
        return Found(_connection_of(connected), about["peer"], about["timeout_s"])


def _connection_of(connected: socket.socket) -> _C.Connection:
    connected.settimeout(None)
    return _C.Connection.of_socket(connected.detach())


def _write(connected: socket.socket, about: dict[str, Any]) -> None:
    said = json.dumps(about).encode()
    connected.sendall(_MARK + _LENGTH.pack(len(said)) + said)


def _read(connected: socket.socket) -> dict[str, Any]:
    """Read what the other process says of itself.

    Raises:
        OSError: it says nothing.
        ValueError: it is another program.
    """
    mark = _read_bytes(connected, len(_MARK))
    if mark != _MARK:
        raise ValueError("it is no process of a channel, or of another version")
    (size,) = _LENGTH.unpack(_read_bytes(connected, _LENGTH.size))
    if size > _MOST_BYTES:
        raise ValueError("it says too much")
    about = json.loads(_read_bytes(connected, size))
    if not isinstance(about, dict):
        raise ValueError("it says something else")
    return about


def _read_bytes(connected: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = connected.recv(size - len(found))
        if not part:
            raise ConnectionError("it has closed the connection")
        found += part
    return found


def _own_address(host: str) -> str:
    """Return an address of this host by its name.

    Raises:
        OSError: it is none.
    """
    for family, _, _, _, where in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as tried:
            tried.bind(where)
            return str(where[0])
    raise OSError(f"this host has no address {host!r}")


def _address_of(interface: str) -> str:
    """Return the address of a network interface.

    Raises:
        OSError: there is no such interface, or it has no IPv4 address.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), _GET_ADDRESS, asked)[20:24])


def _key(name: str) -> str:
    return f"tdcopier/channels/{name}"


def _about(options: Options) -> dict[str, Any]:
    peer = f"{socket.gethostname()}:{os.getpid()}"
    if dist.is_available() and dist.is_initialized():
        peer += f" (rank {dist.get_rank()})"
    return {"peer": peer, "timeout_s": options.timeout_s}
