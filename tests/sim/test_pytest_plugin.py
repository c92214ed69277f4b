"""Runs the pytest plugin as users do: in a process of its own, with the example of the docs."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from fork_server import run_forked

pytestmark = pytest.mark.sim

CI_VARIABLES = ("CI", "BUILD_NUMBER")
EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"


def ordinary_environment() -> dict[str, str]:
    """Returns the environment without the CI variables that make pytest's reports longer.

    Other plugins, which are no part of the example, are not loaded: hypothesis' takes a second.
    """
    kept = {name: value for name, value in os.environ.items() if name not in CI_VARIABLES}
    return {**kept, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def run_pytest(folder: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    options = ["-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(folder), "-q"]
    options += ["--import-mode=prepend", *arguments, str(folder)]
    done = run_forked(
        f"import sys, pytest\nsys.exit(pytest.main({options!r}))",
        100,
        {**ordinary_environment(), "CUDA_VISIBLE_DEVICES": "", **environment},
    )
    return done.returncode, done.stdout + done.stderr


def told_of_the_careless_one(output: str) -> str:
    """Returns pytest's lines on what happened, without its hints about the values."""
    lines = [line for line in output.splitlines() if line.startswith("E ") or "--sim-seed" in line]
    ours = [line for line in lines if not re.match(r"E +(At index|Use -v|$)", line)]
    return "\n".join(re.sub(r"^E +", "", line) for line in ours)


def without_values(told: str) -> str:
    """Removes the batches' values, which depend on the order of events in each copy."""
    return re.sub(r"^assert \[\[.*\]\] ==", "assert [[...]] ==", told)


def make(folder: Path, *bodies: str) -> Path:
    """Makes a folder with one test file per body, because each process costs seconds."""
    (folder / "conftest.py").write_text((EXAMPLES / "conftest.py").read_text())
    for number, body in enumerate(bodies):
        (folder / f"test_{number}.py").write_text("import torch, pytest\n" + body)
    return folder


@pytest.fixture(scope="module")
def careless() -> str:
    """Returns pytest's output for the careless example."""
    code, output = run_pytest(EXAMPLES, CARELESS="1", TDCOPIER_WORKERS="2")  # as documented
    assert code == 1, output
    return output


def test_the_example_of_the_docs_is_right():
    code, output = run_pytest(EXAMPLES)
    assert (code, "1 passed" in output) == (0, True), output


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes there")
def test_the_careless_one_is_found_as_the_docs_show(careless):
    documented = (EXAMPLES / "careless.txt").read_text().rstrip("\n")
    assert without_values(told_of_the_careless_one(careless)) == without_values(documented)


def test_a_seed_alone_shows_it_again(careless):
    (seed,) = set(re.findall(r"--sim-seed=(\d+)", careless))
    code, again = run_pytest(EXAMPLES, f"--sim-seed={seed}", CARELESS="1", TDCOPIER_WORKERS="2")
    assert code == 1
    assert told_of_the_careless_one(again) == told_of_the_careless_one(careless)


def test_the_number_of_seeds_can_be_chosen(tmp_path):
    folder = make(
        tmp_path,
        """
runs = []

@pytest.mark.schedules(3)
def test_runs(sim):
    runs.append(1)

def test_count():
    print("runs:", len(runs))
""",
    )
    for arguments, runs in (((), 3), (("--sim-schedules=7",), 7), (("--sim-seed=5",), 1)):
        code, output = run_pytest(folder, "-s", *arguments)
        assert (code, f"runs: {runs}\n" in output) == (0, True), output


def test_without_the_mark_a_test_runs_once_and_is_watched(tmp_path):
    folder = make(
        tmp_path,
        """
kept = []

def test_leaks(sim):
    kept.append(torch.ones(100, device="sim"))

def test_does_not(sim):
    assert torch.accelerator.current_accelerator().type == "sim"
    assert torch.ones(100, device="sim").sum().item() == 100
""",
    )
    code, output = run_pytest(folder)
    assert code == 1
    assert "HazardError" in output
    assert "1 failed, 1 passed" in output


def test_gradients_flow_after_a_test_that_knows_only_the_host(tmp_path):
    body = """
def gradient(device):
    leaf = torch.ones(2, device=device, requires_grad=True)
    (leaf * 3).sum().backward()
    return leaf.grad.tolist()

gradient("cpu")

def test_host():
    assert gradient("cpu") == [3, 3]

def test_device(sim):
    assert gradient("sim:1") == [3, 3]
"""
    code, output = run_pytest(make(tmp_path, body))
    assert (code, "2 passed" in output) == (0, True), output


def test_devices_can_be_chosen(tmp_path):
    folder = make(tmp_path, "def test_it(sim):\n    assert torch.accelerator.device_count() == 3\n")
    code, output = run_pytest(folder, "--sim-devices=3")
    assert code == 0, output


def test_a_mark_without_a_number_is_refused(tmp_path):
    marks = ["schedules", "schedules(0)", "schedules('all')"]
    bodies = [f"@pytest.mark.{mark}\ndef test_it(sim):\n    pass\n" for mark in marks]
    code, output = run_pytest(make(tmp_path, *bodies))
    assert code != 0
    for got in ("None", "0", "'all'"):
        assert f"schedules wants the number of seeds, which must be positive, got {got}" in output


def test_an_async_test_does_not_pass_and_what_pytest_itself_fails_names_its_seed(tmp_path):
    is_async = "\n@pytest.mark.schedules(2)\nasync def test_it(sim):\n    raise KeyError\n"
    fails = "\n@pytest.mark.schedules(2)\ndef test_it(sim):\n    pytest.fail('so')\n"
    code, output = run_pytest(make(tmp_path, is_async, fails))
    assert (code, "2 failed" in output) == (1, True), output
    assert "cannot be an async function" in output
    assert "failed with --sim-seed=0" in output
