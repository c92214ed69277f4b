"""Where other processes reach this one."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from typing import NamedTuple

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
            given = self.host if self.interface is None else self.interface
            what = "host" if self.interface is None else "interface"
            raise ValueError(f"{what} {given!r}: {error}") from None
        with contextlib.suppress(OSError):  # the host's name may be that of no address
            return _own_address(socket.gethostname())
        return _own_address("localhost")


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
