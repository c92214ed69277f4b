"""Programs of tests that are forked from one process: each gets its own answer, and no other's."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import fork_server
import pytest
from fork_server import run_forked


def run(code: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    return run_forked(code, timeout_s, dict(os.environ))


def test_a_program_has_its_own_output_status_and_variables() -> None:
    done = run("import sys; x = 1; print('out'); print('err', file=sys.stderr); sys.exit(3)")
    assert (done.stdout, done.stderr, done.returncode) == ("out\n", "err\n", 3)
    assert run("print('x' in globals())").stdout == "False\n"
    assert run("import os; os.kill(os.getpid(), 9)").returncode == -signal.SIGKILL


def test_a_program_that_takes_too_long_is_killed_and_the_next_one_runs() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run("import time; time.sleep(60)", 0.2)
    assert run("print(2)").stdout == "2\n"


@pytest.fixture
def bare_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes a server that imports nothing, beside that of the other tests: it soon begins anew."""
    begins = fork_server._SERVER.replace("import pytest, torch\n", "")
    assert begins != fork_server._SERVER
    own = functools.cache(fork_server._server.__wrapped__)
    monkeypatch.setattr(fork_server, "_SERVER", begins)
    monkeypatch.setattr(fork_server, "_server", own)
    yield
    fork_server._stop(own())


@pytest.mark.usefixtures("bare_server")
def test_after_an_interrupt_the_next_program_does_not_get_the_answer_of_the_one_before() -> None:
    class Interrupt(Exception):
        pass

    def interrupt(*_: Any) -> None:
        raise Interrupt

    assert run("").returncode == 0  # the server has begun
    before = signal.signal(signal.SIGUSR1, interrupt)
    timer = threading.Timer(0.2, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
    timer.start()
    try:
        with pytest.raises(Interrupt):
            run("import sys, time; time.sleep(1); sys.exit(7)")
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    done = run("print(3)")
    assert (done.stdout, done.returncode) == ("3\n", 0)
