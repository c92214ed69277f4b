"""A client as its server sees it: a queue of answers, and the thread that sends them."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

from tdcopier._replay.ends import LOST, PlainSender
from tdcopier._replay.messages import Answer, name_as_given

_LOOKS = 10
"""In the timeout, whether the client is there while it gets no answers."""


class ServedClient:
    """A client of a server. Its answers wait here, and hold up no other client."""

    def __init__(
        self,
        name: str,
        attempt: int,
        connect: Callable[[], PlainSender],
        ended: Callable[[ServedClient], None],
        timeout_s: float,
    ) -> None:
        """Connect, in a thread. `ended` is called there when the client is gone."""
        self.name, self.attempt = name, attempt
        self.peer = ""
        """Its host and process, as soon as it is connected."""
        self.is_gone = False
        self.problem: str | None = None
        """Why it was lost; None: it has said that it goes, or is there."""
        self._connect, self._ended, self._timeout_s = connect, ended, timeout_s
        self._answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        self._is_idle = False
        """The thread waits for answers, and all that it has sent has left."""
        self._sender: PlainSender | None = None
        self._thread = threading.Thread(target=self._run, name="tdcopier-answers", daemon=True)
        self._thread.start()

    def answer(self, answer: Answer, *, is_small: bool = False) -> None:
        """Send an answer, as soon as the client takes it.

        A small one goes at once, if there is memory for it: handing it over takes longer.
        """
        if is_small and self._is_idle and self._sender is not None:
            with contextlib.suppress(Exception):  # then the thread tries, or tells of the error
                self._sender.start(answer.message(), timeout_s=0)
                return
        self._answers.put(answer)

    def end(self, last: Answer | None = None) -> None:
        """Send what is here, and end."""
        self.is_gone = True
        if last is not None:
            self._answers.put(last)
        self._answers.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the end; break off if that is late."""
        self._thread.join(timeout_s)
        if self._thread.is_alive() and self._sender is not None:
            try:
                self._sender.close(timeout_s=timeout_s)
            except (*LOST, TimeoutError) as error:
                self.problem = str(error)
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._sender = self._connect()
            self.peer = self._sender.peer
            while (answer := self._next(self._sender)) is not None:
                self._send(self._sender, answer)
            self._sender.close(timeout_s=self._timeout_s)
        except Exception as error:
            if not self.is_gone:
                self.problem = str(error)
            if self._sender is not None:
                self._break_off(self._sender)
        self.is_gone = True
        self._ended(self)

    def _next(self, sender: PlainSender) -> Answer | None:
        with contextlib.suppress(queue.Empty):
            return self._answers.get_nowait()
        sender.flush()  # or a small answer would wait for a large one
        self._is_idle = True
        try:
            while True:
                try:
                    return self._answers.get(timeout=self._timeout_s / _LOOKS)
                except queue.Empty:
                    sender.check_there()
        finally:
            self._is_idle = False

    def _send(self, sender: PlainSender, answer: Answer) -> None:
        try:
            sender.start(answer.message())
        except LOST:
            raise
        except Exception as error:  # a value that cannot be packed, or is refused
            name_as_given(error, None)
            sender.start(Answer.of_error(answer.number, error).message())

    def _break_off(self, sender: PlainSender) -> None:
        try:
            sender.close(timeout_s=self._timeout_s)
        except (*LOST, TimeoutError) as error:
            self.problem = self.problem or str(error)
