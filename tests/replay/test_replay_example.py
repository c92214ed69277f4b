"""The example with a replay server: one command, and a command for each role."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torchrl")
pytest.importorskip("gymnasium")

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "replay.py"
Run = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def run() -> Iterator[Run]:
    """Returns a function that starts the example, each in a group of processes of its own."""
    started = []

    def one(*arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, str(EXAMPLE), *map(str, arguments)]
        started.append(
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
        return started[-1]

    yield one
    for each in started:
        if each.poll() is None:
            os.killpg(each.pid, signal.SIGKILL)
            each.communicate()


def assert_learned(printed: str, steps: int, actors: int) -> None:
    pattern = (
        rf"^step {steps}, .* s: return (\S+), (\d+) batches/s learned, (\d+) rows/s written, "
        rf"(\S+) samples per insert, {actors} actors$"
    )
    found = re.search(pattern, printed, re.MULTILINE)
    assert found is not None, printed
    assert -2000 < float(found[1]) < 0, printed
    assert int(found[2]) > 0, printed
    assert int(found[3]) > 0, printed
    assert 0 < float(found[4]) < 64, printed
    assert "Traceback" not in printed


def test_one_command_runs_a_server_a_learner_and_actors(run, tmp_path):
    picture = tmp_path / "picture.svg"
    example = run("--steps", 30, "--random", 900, "--actors", 2, "--picture", picture)
    printed, _ = example.communicate(timeout=100)
    assert example.returncode == 0, printed
    assert_learned(printed, 30, 2)
    assert picture.stat().st_size > 5_000


def test_each_role_may_be_a_command_of_its_own(run):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    learner = run("learn", "--port", port, "--steps", 50)
    actor = run("act", "--port", port, "--seed", 1)
    server = run("serve", "--port", port, "--random", 500)
    printed, _ = learner.communicate(timeout=100)
    assert learner.returncode == 0, printed
    assert_learned(printed, 50, 1)
    for other in (server, actor):
        said, _ = other.communicate(timeout=20)
        assert other.returncode == 0, said
        assert "Traceback" not in said


def test_an_interrupt_ends_all_processes(run):
    example = run("--steps", 100_000, "--random", 100, "--actors", 1)
    assert example.stdout is not None
    next(line for line in example.stdout if line.startswith("step"))
    os.killpg(example.pid, signal.SIGINT)  # as a terminal does
    printed, _ = example.communicate(timeout=30)  # of all that write to the pipe
    assert example.returncode == 0, printed
    assert "interrupted" in printed
    assert "Traceback" not in printed
