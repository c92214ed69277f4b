"""The API page, as Sphinx shows it: how to make an object only where callers do, and all fields."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tdcopier

DOCS = Path(__file__).resolve().parent
CONF = """
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "api_page"]
default_role = "py:obj"
autodoc_typehints = "description"
napoleon_numpy_docstring = False
suppress_warnings = ["ref"]
"""
MADE_BY_FUNCTIONS = {
    "AsyncCopyHandle": None,
    "Parcel": None,
    "Parked": None,
    "PreparedCopy": None,
    "Prefetcher": None,
    "Snapshot": None,
    "distributed.Follower": "weights",
    "distributed.Publisher": "weights",
    "distributed.Receiver": "slots",
    "distributed.Sender": "slots",
    "distributed.SenderStats": None,
    "pinned.PinnedMemory": None,
    "replay.ReplayStats": None,
    "sim.Hazard": None,
    "stats.CopyStats": None,
    "workloads.Workload": None,
}
"""Classes of which the page must not show a constructor, and an argument that one has."""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page as text."""
    folder = tmp_path_factory.mktemp("api")
    (folder / "conf.py").write_text(CONF)
    (folder / "index.rst").write_text((DOCS / "reference" / "api.rst").read_text("utf-8"))
    command = [sys.executable, "-m", "sphinx", "-q", "-b", "text", folder, folder / "out"]
    path = {"PYTHONPATH": f"{DOCS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, env={**os.environ, **path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "unknown document" not in line] == []
    return (folder / "out" / "index.txt").read_text("utf-8")


def entry(page: str, name: str) -> str:
    """Returns what the page has of a class."""
    found = re.search(
        rf"^class tdcopier\.{re.escape(name)}\b.*\n(?:(?: .*)?\n)*", page, re.MULTILINE
    )
    assert found is not None, f"{name} is not there"
    return found.group()


def test_no_constructor_is_shown_that_callers_do_not_call(page):
    for name, argument in MADE_BY_FUNCTIONS.items():
        found = entry(page, name)
        assert "(" not in found.splitlines()[0]
        assert argument is None or f"\n      * **{argument}**" not in found


def test_constructors_that_callers_call_are_shown_with_their_arguments(page):
    for name, argument in {
        "checkpoint.SnapshotStager": "on_unknown",
        "replay.ReplayServer": "samples_per_insert",
        "replay.ReplayClient": "prefetch",
        "replay.ShardedReplayClient": "clients",
    }.items():
        found = entry(page, name)
        assert "(" in found.splitlines()[0]
        assert f"* **{argument}** " in found


def test_fields_are_shown_once_with_their_texts(page):
    found = entry(page, "distributed.SenderStats")
    for field in tdcopier.distributed.SenderStats._fields:
        assert len(re.findall(rf"^   {field}$", found, re.MULTILINE)) == 1
    assert "Alias for field number" not in page
