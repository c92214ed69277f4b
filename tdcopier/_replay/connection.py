"""A client's two channels to the server, which find the next server when this one is gone."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from typing import Any

from tdcopier import distributed
from tdcopier._replay.ends import LOST, AnswerReceiver, Arriving, Place, PlainSender
from tdcopier._replay.messages import FAILED, OVER, UNANSWERED, Kind, Request, name_as_given

_LEAST_S, _MOST_S, _NAP_S = 0.5, 5.0, 0.1
"""For an attempt to connect again, and before the next one."""
_LOOKS_S = 0.5
"""Between two looks at a server that has not answered yet."""


class Connection:
    """Sends requests, and gives each its answer. Threads may share it."""

    def __init__(
        self,
        place: Place,
        device: Any,
        slots: int,
        *,
        connect_timeout_s: float,
        reconnect_timeout_s: float,
        allow_pickle: bool,
    ) -> None:
        """Find the server."""
        self.client = uuid.uuid4().hex
        self.about: dict[str, Any] = {}
        """What the server has said of itself."""
        self.reconnects = 0
        self._place, self._device, self._slots = place, device, slots
        self._reconnect_s, self._allow_pickle = reconnect_timeout_s, allow_pickle
        self._sending = threading.RLock()
        """Of the ends, and of what was sent."""
        self._attempt = self._number = 0
        self._unanswered: dict[int, Request] = {}
        self._came = threading.Condition()
        """Of the answers, and of the thread that reads them for all."""
        self._answers: dict[int, Arriving] = {}
        self._is_read = False
        self._failed: list[Exception] = []
        """Of requests that have no answer otherwise."""
        self._over: Exception | None = None
        """Why there are no answers any more."""
        self._is_in_doubt = False
        """An interrupt may have lost an answer."""
        end = time.monotonic() + connect_timeout_s
        with self._sending:
            while True:
                try:
                    self._connect(max(end - time.monotonic(), _LEAST_S))
                    return
                except LOST as error:  # a server that closes; the next one may come
                    if time.monotonic() > end:
                        raise ConnectionError(f"no replay server stays: {error}") from None
                    time.sleep(_NAP_S)

    @property
    def peer(self) -> str:
        """The server's host, process and rank."""
        return self._tx.peer

    # ---- requests --------------------------------------------------------------------------------

    def ask(self, kind: Kind, value: Any = None) -> int:
        """Send a request; return its number. One without an answer may be lost with a server.

        Raises:
            ChannelClosedError: this client, or the server, was closed.
            PeerLostError: the server is gone, and none has come in its place.
            Exception: what `pack` raises; the request is not sent.
        """
        with self._sending:
            self._check_open()
            if self._is_in_doubt:
                self._clear_doubt()
            number, self._number = self._number, self._number + 1
            answered = min(self._unanswered, default=number)
            request = Request(kind, self.client, self._attempt, number, answered, value)
            if kind not in UNANSWERED:
                self._unanswered[number] = request
            try:
                self._tx.start(request.message())
            except LOST as error:
                self._reconnect(self._attempt, error)  # sends again what has an answer
            except BaseException as error:
                self._unanswered.pop(number, None)
                if isinstance(error, (TypeError, ValueError)):
                    name_as_given(error, kind)
                raise
            return number

    def answer(self, number: int) -> Any:
        """Wait for the answer to a request; return its value on the device.

        Raises:
            ChannelClosedError, PeerLostError: as `ask`.
            Exception: what the server has raised.
        """
        while True:
            if self._is_in_doubt:
                self._clear_doubt()
            with self._came:
                found = self._answers.pop(number, None)
                if found is None:
                    self._check_open()
                    if self._is_read:
                        self._came.wait()
                        continue
                    self._is_read = True
            if found is not None:
                return found.result()
            try:
                self._read_one()
            finally:
                with self._came:
                    self._is_read = False
                    self._came.notify_all()

    def read_what_has_come(self) -> None:
        """Start the copies of answers that are here, without a wait."""
        with self._came:
            if self._is_read:  # another thread does
                return
            self._is_read = True
        try:
            with contextlib.suppress(TimeoutError, *LOST):  # the next call finds that out
                while True:
                    self._note(self._rx.next(timeout_s=0))
        except BaseException:
            self._is_in_doubt = True
            raise
        finally:
            with self._came:
                self._is_read = False
                self._came.notify_all()

    def forget(self, number: int) -> None:
        """Drop the answer to a request, if it is here, or when it comes."""
        with self._came:
            self._unanswered.pop(number, None)
            self._answers.pop(number, None)

    def raise_failed(self) -> None:
        """Raise the error of a request that has no answer otherwise."""
        if self._failed:
            raise self._failed.pop(0)

    def _read_one(self) -> None:
        attempt = self._attempt
        try:
            self._note(self._rx.next())
        except LOST as error:
            self._reconnect(attempt, error)
        except BaseException:
            self._is_in_doubt = True
            raise

    def _note(self, found: Any) -> None:
        if found.number == OVER:
            self._over = distributed.ChannelClosedError("the replay server has closed")
        elif found.number == FAILED:
            try:
                found.result()
            except Exception as error:
                self._failed.append(error)
        else:
            with self._came:
                if found.number in self._unanswered:  # or it came twice, or is forgotten
                    self._answers[found.number] = found
                    del self._unanswered[found.number]

    # ---- the server ------------------------------------------------------------------------------

    def _connect(self, timeout_s: float) -> None:
        """Make both channels, and wait for the first answer.

        Raises:
            ConnectionError: no server has answered in time.
        """
        self._attempt += 1
        place, end = self._place, time.monotonic() + timeout_s
        name = place.answers(self.client, self._attempt)
        rx = AnswerReceiver(
            place.options(name, None, self._slots, sends=False),
            self._device,
            self._slots,
            allow_pickle=self._allow_pickle,
        )
        tx: PlainSender | None = None
        try:
            options = place.options(place.requests(), timeout_s, None, sends=True)
            tx = PlainSender(options, 2, to="replay server", may_pickle=False)
            hello = Request(Kind.HELLO, self.client, self._attempt, value=self._allow_pickle)
            tx.start(hello.message())
            self.about = self._first_answer(tx, rx, end).result()
            tx.may_pickle = bool(self.about["allow_pickle"])
            for number, request in sorted(self._unanswered.items()):
                request = request._replace(attempt=self._attempt)
                self._unanswered[number] = request
                tx.start(request.message())
        except BaseException:
            self._leave(tx, rx)
            raise
        self._tx, self._rx = tx, rx

    def _clear_doubt(self) -> None:
        """Ask again for all answers, by another connection."""
        with self._sending:
            if self._is_in_doubt:
                self._reconnect(self._attempt, InterruptedError("a call was interrupted"))

    def _first_answer(self, tx: PlainSender, rx: AnswerReceiver, end: float) -> Any:
        while True:
            with contextlib.suppress(TimeoutError):
                return rx.next(timeout_s=min(max(end - time.monotonic(), 0.0), _LOOKS_S))
            tx.check_there()
            if time.monotonic() > end:
                raise ConnectionError(f"the replay server, {tx.peer}, has not answered in time")

    def _reconnect(self, attempt: int, reason: BaseException) -> None:
        """Find a server in place of one that is gone, and send again what has no answer."""
        with self._sending:
            self._check_open()
            if attempt != self._attempt:  # another thread has done so
                return
            with contextlib.suppress(TimeoutError, *LOST):
                while True:  # the last word of the server may be here
                    self._note(self._rx.next(timeout_s=0))
            self._check_open()
            self._leave(self._tx, self._rx)
            end = time.monotonic() + self._reconnect_s
            while True:
                left_s = end - time.monotonic()
                if left_s <= 0:
                    self._over = distributed.PeerLostError(
                        f"the replay server is lost ({reason}), and none has come in its place in "
                        f"{self._reconnect_s:g} s"
                    )
                    self._check_open()
                try:
                    self._connect(min(max(left_s, _LEAST_S), _MOST_S))
                except (RuntimeError, TimeoutError, *LOST, ConnectionError):
                    self._check_open()
                    time.sleep(_NAP_S)
                else:
                    self.reconnects += 1
                    self._is_in_doubt = False
                    return

    def _check_open(self) -> None:
        if self._over is not None:
            raise type(self._over)(*self._over.args)

    # ---- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Say that this client goes, and end. Calls that wait in other threads end too."""
        is_open, self._over = (
            self._over is None,
            distributed.ChannelClosedError("this client is closed"),
        )
        with self._came:
            self._came.notify_all()
        if self._sending.acquire(timeout=self._place.peer_timeout_s):
            try:
                if is_open:
                    bye = Request(Kind.BYE, self.client, self._attempt, self._number, self._number)
                    with contextlib.suppress(TimeoutError, *LOST):
                        self._tx.start(bye.message(), timeout_s=self._place.peer_timeout_s)
            finally:
                self._sending.release()
        self._leave(self._tx, self._rx)

    def _leave(self, tx: PlainSender | None, rx: AnswerReceiver) -> None:
        """Close both ends; a server that does not answer is left."""
        for end in (tx, rx):
            if end is not None:
                with contextlib.suppress(TimeoutError, *LOST):
                    end.close(timeout_s=self._place.peer_timeout_s)
