"""Takes the requests of all clients, in a thread, and answers each client in its own."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from tdcopier import distributed
from tdcopier._replay.ends import Place, PlainSender, RequestReceiver
from tdcopier._replay.limited_buffer import LimitedBuffer, Side
from tdcopier._replay.messages import FAILED, OVER, UNANSWERED, Answer, Kind, Request
from tdcopier._replay.served_client import ServedClient
from tdcopier._replay.written import Written

_MOST_PROBLEMS = 1000
"""That are kept; the last ones."""
_SMALL_BYTES = 16 * 1024
"""Of an answer that the system takes at once, even if the client reads nothing."""


class Clients:
    """The clients of a server. Its lock is that of the buffer."""

    def __init__(
        self,
        place: Place,
        limited: LimitedBuffer,
        written: Written,
        do: Callable[[Request], Any],
        *,
        slots: int | None,
        allow_pickle: bool,
    ) -> None:
        """Begin to take requests. `do` is called with the lock, and returns a result."""
        self.closed = self.lost = 0
        self._place, self._limited, self._written, self._do = place, limited, written, do
        self._lock = limited.lock
        self._allow_pickle = allow_pickle
        self._clients: dict[str, ServedClient] = {}
        self._ending: set[ServedClient] = set()
        """Those that have said that they go, or have come again, by another connection."""
        self._problems: list[str] = []
        options = place.options(place.requests(), None, slots, sends=False)
        self._requests = RequestReceiver(
            options, "cpu", slots, is_for_one=False, allow_pickle=allow_pickle
        )
        self._thread = threading.Thread(target=self._take_all, name="tdcopier-replay", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._clients)

    @property
    def peers(self) -> list[str]:
        """Host, process and rank of each."""
        with self._lock:
            return [client.peer for client in self._clients.values() if client.peer]

    @property
    def problems(self) -> list[str]:
        """Why some were lost, or could not join, and messages not be read, in words."""
        with self._lock:
            return [*self._problems, *self._requests.problems]

    def close(self, *, is_over: bool) -> None:
        """Take no requests any more. Clients that do not answer are left after the timeout."""
        timeout_s = self._place.peer_timeout_s
        self._requests.leave_place(timeout_s)  # to the next server, before clients look for it
        with self._lock:
            clients = [*self._clients.values(), *self._ending]
            self._clients.clear()
        for client in clients:
            client.end(Answer(OVER) if is_over else None)
        end = time.monotonic() + timeout_s
        for client in clients:
            client.join(max(end - time.monotonic(), 0.0))
        with contextlib.suppress(TimeoutError):  # a client that does not answer
            self._requests.close(timeout_s=timeout_s)
        self._thread.join()

    # ---- requests --------------------------------------------------------------------------------

    def _take_all(self) -> None:
        while True:
            try:
                message = self._requests.next(timeout_s=self._limited.end_late()).get()
            except distributed.ChannelClosedError:
                return
            except TimeoutError:
                continue
            except Exception as error:  # a message that cannot be read; others can
                self._note(str(error))
                continue
            try:
                self._take(Request.read(message))
            except Exception as error:
                self._note(str(error))
            del message  # its memory takes the next one

    def _take(self, request: Request) -> None:
        if request.kind is Kind.HELLO:
            self._meet(request)
            return
        with self._lock:
            client = self._clients.get(request.client)
            if client is None or client.attempt != request.attempt:  # it has been given up
                return
            self._written.forget(request.client, request.answered)
            if request.kind is Kind.BYE:
                self._written.end(request.client)
                self.closed += 1
                self._ending.add(self._clients.pop(request.client))
                client.end()
                return

            def run(error: Exception | None = None) -> None:
                self._answer(client, request, error)

            if request.kind in (Kind.EXTEND, Kind.ADD):
                self._limited.later(Side.INSERT, run, client)
            elif request.kind is Kind.SAMPLE:
                self._limited.later(Side.SAMPLE, run, client)
            else:
                run()

    def _answer(self, client: ServedClient, request: Request, error: Exception | None) -> None:
        """Do what a client asks for, with the lock, and answer; or answer with an error."""
        if client.is_gone:
            return
        try:
            if error is not None:
                raise error
            answer = Answer(request.number, self._do(request))
        except BaseException as raised:  # SystemExit of a transform ends no server
            answer = Answer.of_error(request.number, raised)
        if request.kind not in UNANSWERED:
            client.answer(answer, is_small=_is_small(answer.value))
        elif answer.error:
            text = f"an earlier {request.kind.name.lower()}: {answer.text}"
            client.answer(answer._replace(number=FAILED, text=text), is_small=True)

    # ---- clients ---------------------------------------------------------------------------------

    def _meet(self, request: Request) -> None:
        """Take a client, or one that has lost its connection and comes again."""
        may_pickle = bool(request.value)

        def connect() -> PlainSender:
            name = self._place.answers(request.client, request.attempt)
            options = self._place.options(name, self._place.peer_timeout_s, None, sends=True)
            return PlainSender(options, 2, to="replay client", may_pickle=may_pickle)

        with self._lock:
            self._limited.check_open()
            before = self._clients.pop(request.client, None)
            if before is not None:
                self._ending.add(before)
                before.end()
                self._limited.drop(before)
            client = ServedClient(
                request.client, request.attempt, connect, self._ended, self._place.peer_timeout_s
            )
            self._clients[request.client] = client
        key = getattr(self._limited.buffer, "priority_key", None)
        about = {
            "allow_pickle": self._allow_pickle,
            "priority_key": list(key) if isinstance(key, tuple) else key,
        }
        client.answer(Answer(request.number, about))

    def _ended(self, client: ServedClient) -> None:
        with self._lock:
            self._ending.discard(client)
            self._limited.drop(client)
            if self._clients.get(client.name) is not client:  # it is in `_ending`
                return
            del self._clients[client.name]
            self.lost += 1
            self._note(client.problem or "a client has ended")

    def _note(self, problem: str) -> None:
        with self._lock:
            self._problems.append(problem)
            del self._problems[:-_MOST_PROBLEMS]


def _is_small(value: Any) -> bool:
    """Return whether a result is an index, or counts, and no batch."""
    if isinstance(value, torch.Tensor):
        return value.nbytes <= _SMALL_BYTES
    numbers = value if isinstance(value, tuple) else (value,)
    return all(isinstance(each, (int, float, type(None))) for each in numbers)
