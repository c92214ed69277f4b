"""Long work shows its progress on a terminal, and there only."""

from __future__ import annotations

import io
import itertools
import re
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from park_support import is_resident
from pinned_pool_support import MIB
from support import run_python

import tdcopier
from tdcopier import _C, _limits, _pinned_pool, _progress
from tdcopier._park import transfers


class Terminal(io.StringIO):
    """Notes what is written, and sets `written` once something was."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.written.set()
        return super().write(text)


ELEMENTS = 250_000
"""Of a float tensor of 1 MB."""
TENSORS = 12


@pytest.fixture
def terminal(monkeypatch):
    """A terminal on stderr, and a clock by which each step of work takes 0.4 s."""
    made = Terminal()
    clock = itertools.count()
    monkeypatch.setattr(_progress, "sys", SimpleNamespace(stderr=made))
    monkeypatch.setattr(_progress, "time", SimpleNamespace(monotonic=lambda: next(clock) * 0.4))
    monkeypatch.setattr(transfers, "GROUP_BYTES", 4 * ELEMENTS)  # a step for each tensor
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return made


@pytest.fixture
def no_tqdm(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)


def large_tensors(device: str) -> list[torch.Tensor]:
    return [torch.full((ELEMENTS,), float(i), device=device) for i in range(TENSORS)]


def megabytes(terminal: Terminal, label: str) -> list[int]:
    """Returns what the lines with this label say is done."""
    found = re.findall(rf"^tdcopier: {label}: (\d+) of {TENSORS} MB$", terminal.getvalue(), re.M)
    return [int(each) for each in found]


def assert_values(state: list[torch.Tensor]) -> None:
    assert all(bool(tensor.eq(i).all()) for i, tensor in enumerate(state))


# ---- where it is shown ---------------------------------------------------------------------------


@pytest.mark.usefixtures("no_tqdm")
def test_without_tqdm_there_is_a_line_a_second_from_the_first_second_on(device, terminal):
    state = large_tensors(device)
    parked = tdcopier.park(state)
    parking = megabytes(terminal, "parking")
    assert parking == sorted(set(parking))
    assert 2 <= parking[0] <= 3
    assert 2 <= len(parking) <= TENSORS // 2
    parked.wait_parked()
    assert len(megabytes(terminal, "waiting for the host's copy")) == len(parking)
    parked.resume()
    assert_values(state)
    lines = terminal.getvalue().splitlines()
    assert all(line.startswith("tdcopier: ") for line in lines)


def test_with_tqdm_there_is_a_bar_that_vanishes(device, terminal):
    pytest.importorskip("tqdm")
    state = large_tensors(device)
    parked = tdcopier.park(state)
    shown = terminal.getvalue()
    assert re.search(r"tdcopier: parking:\s+\d+%\|.*M/12\.0M \[", shown)
    assert re.search(r"\r +\r$", shown)
    assert "\n" not in shown
    parked.resume()
    assert_values(state)


def test_quick_work_shows_nothing(device, terminal, monkeypatch):
    monkeypatch.setattr(_progress, "time", SimpleNamespace(monotonic=lambda: 7.0))
    with tdcopier.parked(large_tensors(device)):
        pass
    tdcopier.snapshot(large_tensors(device)).get()
    tdcopier.pinned.reserve(20 * MIB)
    assert terminal.getvalue() == ""


def all_calls(device: str) -> None:
    with tdcopier.parked(large_tensors(device)):
        pass
    tdcopier.snapshot(large_tensors(device)).get()


@pytest.mark.usefixtures("no_tqdm")
def test_nothing_is_shown_where_stderr_is_no_terminal(device, terminal, monkeypatch):
    monkeypatch.setattr(terminal, "isatty", lambda: False)
    all_calls(device)
    assert terminal.getvalue() == ""
    for stream in (None, object()):
        monkeypatch.setattr(_progress, "sys", SimpleNamespace(stderr=stream))
        all_calls(device)


@pytest.mark.usefixtures("no_tqdm")
def test_only_the_first_process_of_torchrun_shows_something(device, terminal, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    all_calls(device)
    assert terminal.getvalue() == ""
    monkeypatch.setenv("LOCAL_RANK", "0")
    all_calls(device)
    assert terminal.getvalue() != ""


@pytest.mark.usefixtures("no_tqdm")
def test_another_thread_shows_nothing(device, terminal):
    thread = threading.Thread(target=all_calls, args=(device,))
    thread.start()
    thread.join()
    assert terminal.getvalue() == ""


@pytest.mark.usefixtures("no_tqdm")
@pytest.mark.parametrize("wrong", ["2", "no"])
def test_a_variable_switches_it_off(device, terminal, monkeypatch, wrong):
    monkeypatch.setenv("TDCOPIER_PROGRESS", "0")
    monkeypatch.setattr(_limits, "shows_progress", _limits.is_on("TDCOPIER_PROGRESS", "1"))
    all_calls(device)
    assert list(_progress.show_rounds("label")(range(3))) == [0, 1, 2]
    assert terminal.getvalue() == ""
    code = """
        try:
            import tdcopier
        except ValueError as error:
            print(error)
    """
    told = run_python(code, TDCOPIER_PROGRESS=wrong)
    assert told.strip() == f"TDCOPIER_PROGRESS must be 0 or 1; got {wrong!r}"


# ---- what it says --------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_tqdm")
@pytest.mark.parametrize("device_copy", [False, True])
@pytest.mark.parametrize("elements", [ELEMENTS, 12 * ELEMENTS], ids=["gathered", "large"])
def test_a_snapshot_shows_what_has_arrived_while_get_waits(
    device, terminal, monkeypatch, device_copy, elements
):
    monkeypatch.setattr("tdcopier._park.gathered.SCRATCH_BYTES", 4 * ELEMENTS + (1 << 18))
    monkeypatch.setattr("tdcopier._park.gathered._MOST_PADDING_BYTES", 0)
    monkeypatch.setattr("tdcopier._park.gathered.GROUP_BYTES", 4 * ELEMENTS)
    state = [torch.full((elements,), float(i), device=device) for i in range(TENSORS)]
    total = 4 * elements * TENSORS // 1_000_000
    taken = tdcopier.snapshot(state, device_copy=device_copy)
    before = terminal.getvalue()
    assert f" of {total} MB" in before
    assert "waiting" not in before
    assert_values(taken.get())
    waiting = terminal.getvalue()[len(before) :]
    found = [
        int(each) for each in re.findall(rf"waiting for a snapshot: (\d+) of {total} ", waiting)
    ]
    assert found == sorted(set(found))
    assert found[0] < found[-1] <= total
    taken.get()
    assert terminal.getvalue() == before + waiting


@pytest.mark.usefixtures("no_tqdm")
def test_small_tensors_count_too(device, terminal, monkeypatch):
    monkeypatch.setattr(transfers, "SCRATCH_BYTES", 200_000)
    state = [torch.full((50_000,), float(i), device=device) for i in range(60)]
    parked = tdcopier.park(state)
    parked.wait_parked()
    before = len(terminal.getvalue())
    parked.resume()
    assert_values(state)
    assert re.fullmatch(r"(tdcopier: resuming: \d+ of 12 MB\n)+", terminal.getvalue()[before:])


@pytest.mark.usefixtures("no_tqdm")
def test_a_reservation_shows_the_pages_that_are_made(device, terminal, monkeypatch):
    made = itertools.count(step=MIB)
    monkeypatch.setattr(_pinned_pool, "_resident_bytes", lambda: next(made))
    monkeypatch.setattr(_progress, "_BAR_S", 0.001)

    def reserve(n_bytes: int, device: torch.device) -> int:
        assert terminal.written.wait(60)
        return n_bytes

    monkeypatch.setattr(_C, "reserve_pinned", reserve)
    assert tdcopier.pinned.reserve(10_000 * MIB) == 10_010 * MIB
    lines = terminal.getvalue().splitlines()
    assert re.fullmatch(r"tdcopier: making pages of pinned memory: \d+ of 10,496 MB", lines[0])
    assert "tdc-progress" not in {thread.name for thread in threading.enumerate()}


def test_the_memory_of_the_process_grows_by_what_is_reserved(device):
    tdcopier.pinned.trim()
    before = _pinned_pool._resident_bytes()
    tdcopier.pinned.reserve(64 * MIB)
    assert _pinned_pool._resident_bytes() - before > 48 * MIB
    tdcopier.pinned.trim()


@pytest.mark.usefixtures("no_tqdm")
def test_a_second_one_in_a_signal_handler_is_not_shown(terminal):
    with _progress.Progress("outer", TENSORS * 1_000_000) as outer:
        for _ in range(6):
            outer.add(1_000_000)
        with _progress.Progress("inner", TENSORS * 1_000_000) as inner:
            for _ in range(12):
                inner.add(1_000_000)
        for _ in range(6):
            outer.add(1_000_000)
    assert megabytes(terminal, "inner") == []
    assert max(megabytes(terminal, "outer")) > 6


# ---- errors and interrupts -----------------------------------------------------------------------


@pytest.mark.parametrize("with_tqdm", [False, True])
@pytest.mark.parametrize("error", [OSError, ValueError])
def test_a_terminal_that_is_gone_fails_no_work(device, terminal, monkeypatch, with_tqdm, error):
    if not with_tqdm:
        monkeypatch.setitem(sys.modules, "tqdm", None)

    def write(text: str) -> int:
        raise error("gone")

    monkeypatch.setattr(terminal, "write", write)
    state = large_tensors(device)
    with tdcopier.parked(state):
        pass
    assert_values(state)
    assert_values(tdcopier.snapshot(state).get())


@pytest.mark.parametrize("call", ["park", "wait_parked", "resume"])
def test_an_interrupt_leaves_a_clean_terminal_and_the_state_as_before(
    device, terminal, monkeypatch, call
):
    pytest.importorskip("tqdm")
    monkeypatch.setattr(transfers, "SCRATCH_BYTES", 200_000)
    small = [torch.ones(50_000, device=device) for _ in range(20)]
    state = large_tensors(device)
    parked = None if call == "park" else tdcopier.park([state, small])
    if call == "resume":
        parked.wait_parked()
    add, calls = _progress.Progress.add, []

    def interrupted(self, n_bytes: int) -> None:
        add(self, n_bytes)
        calls.append(self)
        if len(calls) == 8:
            raise KeyboardInterrupt

    monkeypatch.setattr(_progress.Progress, "add", interrupted)
    before = len(terminal.getvalue())
    interrupted_call = getattr(parked, call) if parked else lambda: tdcopier.park([state, small])
    with pytest.raises(KeyboardInterrupt):
        interrupted_call()
    assert re.search(r"%\|.*\r +\r$", terminal.getvalue()[before:])
    if parked is None:
        assert is_resident(state)
    else:
        assert parked.is_parked
        parked.resume()
    assert_values(state)
    assert all(bool(each.eq(1).all()) for each in small)
