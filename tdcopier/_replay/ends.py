"""The ends of the channels between a replay server and its clients."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tdcopier import distributed
from tdcopier._distributed.messages import Arrived
from tdcopier._distributed.receiver import Receiver
from tdcopier._distributed.rendezvous import Options
from tdcopier._distributed.sender import Sender
from tdcopier._pack import Parcel
from tdcopier._replay.messages import Answer

LOST = (distributed.ChannelClosedError, distributed.PeerLostError)
"""Errors of ends if the other one is gone, or they are closed."""


class Place(NamedTuple):
    """Where a server and its clients find each other, and how they watch each other."""

    store: Any
    name: str
    peer_timeout_s: float
    host: str | None
    interface: str | None

    def options(
        self, name: str, connect_timeout_s: float | None, slots: int | None, *, sends: bool
    ) -> Options:
        """Return the checked options of an end.

        Raises:
            RuntimeError, ValueError, TypeError: as `sender`.
        """
        options: Options = distributed._channel(
            None,
            self.store,
            name,
            slots,
            self.peer_timeout_s,
            connect_timeout_s,
            self.host,
            self.interface,
            sends,
            self.name,
        )
        return options

    def requests(self) -> str:
        """Return the name of the channel to the server."""
        return f"replay/{self.name}"

    def answers(self, client: str, attempt: int) -> str:
        """Return the name of the channel to a client."""
        return f"replay/{self.name}/{client}/{attempt}"


class PlainSender(Sender):
    """A sender that refuses what the other end would refuse: pickled values."""

    def __init__(self, options: Options, slots: int, *, to: str, may_pickle: bool) -> None:
        self._peer_is = to
        super().__init__(options, slots, checksum=False)
        self.may_pickle = may_pickle

    def check_there(self) -> None:
        """Raise what `start` does if the other end is gone."""
        self._may_send()

    def _check(self, parcel: Parcel) -> None:
        if not self.may_pickle and parcel.needs_pickle:
            Parcel.from_buffer(parcel._bytes, allow_pickle=False)  # raises a ValueError


class RequestReceiver(Receiver):
    """A receiver of what clients ask for."""

    _what = "replay server"

    def leave_place(self, timeout_s: float) -> None:
        """Let no further client come, and another server take the name."""
        self._listener.close(timeout_s)


class Arriving(NamedTuple):
    """An answer that has come, whose copy to the device is under way."""

    number: int
    handle: Any

    def result(self) -> Any:
        """Return the value on the device, ordered on the current stream; or raise the error."""
        return Answer(**self.handle.wait()).result()


class AnswerReceiver(Receiver):
    """A receiver of the answers to one client. `next` returns them as `Arriving`."""

    def __init__(self, options: Options, device: Any, slots: int, *, allow_pickle: bool) -> None:
        super().__init__(options, device, slots, is_for_one=True, allow_pickle=allow_pickle)

    def _start_copy(self, peer: str, arrived: Arrived) -> Any:
        handle = super()._start_copy(peer, arrived)
        # On the host: asking the handle would make the caller's stream wait for the copy.
        is_here = torch.device(self._device).type == "cpu"
        tree = handle.get() if is_here else arrived.parcel(allow_pickle=self._allow_pickle).tree()
        return Arriving(Answer(**tree).number, handle)
