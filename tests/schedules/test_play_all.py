"""The program that plays the others in turn: its turns, its record, and where it ends."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import play_all
import pytest
from play_all import Turn

RIGHT = "import sys; print('much'); print(sys.argv[1:], '0 wrong')"
WRONG = "import sys; print('WRONG: odd'); print('1 wrong'); print('why', file=sys.stderr); exit(1)"
TOLD = 'print(\'{"schedules": 6000, "seconds": 3}\')'


@pytest.fixture
def played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, list[dict]]]:
    """Returns a function that plays such turns until one is wrong, and what it has recorded."""
    record = tmp_path / "record.jsonl"
    for name, code in {"right": RIGHT, "wrong": WRONG, "told": TOLD}.items():
        (tmp_path / f"play_{name}.py").write_text(code)
    monkeypatch.setattr(play_all, "HERE", tmp_path)

    def play(*turns: Turn, hours: float = 1.0, jobs: int = 1) -> tuple[int, list[dict]]:
        monkeypatch.setattr(play_all, "TURNS", turns)
        options = ["--hours", str(hours), "--jobs", str(jobs), "--record", str(record)]
        code = play_all.main(options)
        return code, [json.loads(line) for line in record.read_text().splitlines()]

    return play


def test_turns_are_recorded_until_one_is_wrong_and_that_is_shown(played, capsys):
    right, told = Turn("right", ("--cases", "3")), Turn("told", (), seed=None)
    code, lines = played(right, told, right, Turn("wrong", ()))
    assert code == 1
    assert [line["program"] for line in lines] == ["right", "told", "right", "wrong"]
    assert [line["is_right"] for line in lines] == [True, True, True, False]
    assert lines[1]["printed"] == "6,000 schedules"
    assert lines[3]["printed"] == "1 wrong"
    first, other = (line["arguments"] for line in (lines[0], lines[2]))
    assert first[:3] == other[:3] == ["--cases", "3", "--first-seed"]
    assert int(other[3]) - int(first[3]) == 2_000_000
    assert lines[0]["printed"] == f"{first} 0 wrong"
    printed = capsys.readouterr().out
    assert "WRONG: odd" in printed
    assert "why" in printed
    assert f"--first-seed {lines[3]['arguments'][1]}" in printed


def test_several_turns_at_a_time_share_one_record(played):
    code, lines = played(*[Turn("right", ())] * 6, Turn("wrong", ()), jobs=2)
    assert code == 1
    assert len({tuple(line["arguments"]) for line in lines}) == len(lines) >= 7
    assert [line["program"] for line in lines].count("wrong") == 1


def test_no_turn_begins_after_its_time(monkeypatch):
    monkeypatch.setattr(play_all, "time", SimpleNamespace(monotonic=iter([1.0, 2.0, 3.5]).__next__))
    assert [seed for _, seed in play_all.turns_until(3.0, 7)] == [7, 1_000_007]


STARTS_ANOTHER = """
import subprocess, sys
subprocess.run([sys.executable, "-c", "import time; print('5', flush=True); time.sleep(60)"])
"""


def test_a_program_that_hangs_is_wrong_and_ends_with_what_it_started(tmp_path, monkeypatch):
    (tmp_path / "play_slow.py").write_text(STARTS_ANOTHER)
    monkeypatch.setattr(play_all, "HERE", tmp_path)
    monkeypatch.setattr(play_all, "MOST_S", 0.5)
    began = time.monotonic()
    told, found = play_all.play(Turn("slow", ()), 1)
    assert time.monotonic() - began < 30
    assert not told["is_right"]
    assert "hangs" in found
    assert not play_all.RUNNING


INTERRUPTS = """
import os, pathlib, signal, time
try:
    pathlib.Path(__file__).with_name("claimed").mkdir()
    os.kill(os.getppid(), signal.SIGINT)
except FileExistsError:
    pass  # by the other turn
time.sleep(60)
"""


def test_an_interrupt_ends_the_programs_and_records_none_of_them(played, tmp_path):
    (tmp_path / "record.jsonl").touch()
    (tmp_path / "play_slow.py").write_text(INTERRUPTS)
    began = time.monotonic()
    code, lines = played(Turn("slow", ()), jobs=2)
    assert time.monotonic() - began < 30
    assert (code, lines) == (0, [])
    assert not play_all.RUNNING


def test_the_committed_record_is_right_and_its_programs_are_there():
    lines = [json.loads(line) for line in play_all.RECORD.read_text().splitlines()]
    assert all(line["is_right"] for line in lines)
    programs = {line["program"] for line in lines}
    assert programs <= {turn.program for turn in play_all.TURNS}
    table = play_all.hours_table().splitlines()
    assert len(table) == 2 + len(programs) + 1
    assert table[-1].startswith(f"| all | {len(lines):,} |")
