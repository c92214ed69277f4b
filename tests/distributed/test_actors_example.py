"""The example with actors: one command on this host, and the same with a process for each role."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "actors.py"


def run(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(EXAMPLE), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def assert_learned(printed: str) -> None:
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", printed)]
    assert len(losses) == 4, printed
    assert losses[-1] < 0.5 < 0.69, printed
    assert re.search("from [12] actors", printed), printed
    assert re.search("weights to [12]", printed), printed


def test_one_command_runs_a_learner_and_two_actors():
    printed, _ = run("--steps", "60").communicate(timeout=100)
    assert_learned(printed)


def test_each_role_may_be_a_command_of_its_own():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    learner = run("learn", "--port", port, "--steps", "60")
    actor = run("act", "--port", port, "--seed", "0")
    printed, _ = learner.communicate(timeout=100)
    assert_learned(printed)
    said, _ = actor.communicate(timeout=20)
    assert actor.returncode == 0, said
