"""Runs programs in processes forked from one that has imported torch and pytest, nothing of ours.

Importing these takes most of the time of a small program. A program runs as with ``python -c``, and
its process ends as any other does.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

# Its loop is not in a function: a program takes the place of `__main__`, whose code then ends.
# All objects are frozen before the fork, so that no collection at a program's end looks at them.
_SERVER = """
import gc, json, os, sys
import pytest, torch

gc.collect()
gc.freeze()
while True:
    line = sys.stdin.readline()
    if not line:
        os._exit(0)
    child = os.fork()
    if child == 0:
        break
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
request = json.loads(line)
for number, path in enumerate((os.devnull, request["stdout"], request["stderr"])):
    opened = os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_APPEND)
    os.dup2(opened, number)
    os.close(opened)
os.chdir(request["folder"])
os.environ.clear()
os.environ.update(request["environment"])
code = compile(request["code"], "<string>", "exec")
for name in [name for name in globals() if not name.startswith("__") and name != "code"]:
    del globals()[name]
del globals()["name"]
exec(globals().pop("code"))
"""

_lock = threading.Lock()


@functools.cache
def _server() -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-W", "error", "-c", _SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(_stop, server)
    return server


def _stop(server: subprocess.Popen[str]) -> None:
    with server:
        server.kill()


def run_forked(
    code: str, timeout_s: float, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Runs the program. Raises `subprocess.TimeoutExpired` after killing it, if it takes longer."""
    with _lock:
        server = _server()
        try:
            return _run(server, code, timeout_s, environment)
        except subprocess.TimeoutExpired:
            raise
        except BaseException:  # what it answers now would be taken for the next program's answer
            _server.cache_clear()
            _stop(server)
            raise


def _run(
    server: subprocess.Popen[str], code: str, timeout_s: float, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as folder:
        streams = {name: Path(folder) / name for name in ("stdout", "stderr")}
        for path in streams.values():
            path.touch()
        assert server.stdin is not None
        assert server.stdout is not None
        request = {"code": code, "environment": environment, "folder": os.getcwd()}
        request |= {name: str(path) for name, path in streams.items()}
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        child = int(server.stdout.readline())
        killed = threading.Event()

        def kill() -> None:
            killed.set()
            os.kill(child, signal.SIGKILL)

        timer = threading.Timer(timeout_s, kill)
        timer.start()
        try:
            status = int(server.stdout.readline())
        except BaseException:
            kill()
            raise
        finally:
            timer.cancel()
            timer.join()
        out, err = (path.read_text() for path in streams.values())
        if killed.is_set():
            raise subprocess.TimeoutExpired(code, timeout_s, out, err)
        return subprocess.CompletedProcess(code, status, out, err)
