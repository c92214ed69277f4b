"""The workflow of a release hands files from job to job, and tries the pairs that were tested."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
JOBS = WORKFLOW["jobs"]


def artifacts(kind: str, *jobs: str) -> Iterator[dict[str, Any]]:
    """Returns what the steps of jobs upload or download."""
    for step in itertools.chain.from_iterable(JOBS[job]["steps"] for job in jobs):
        if step.get("uses", "").startswith(f"actions/{kind}-artifact@"):
            yield step["with"]


def commands(job: str) -> str:
    return "\n".join(step.get("run", "") for step in JOBS[job]["steps"])


def test_each_artifact_is_of_one_path_and_is_downloaded_to_a_folder_of_its_own():
    """Of several paths, an artifact has the names below the folder that they share."""
    uploaded = {each["name"]: each["path"].strip() for each in artifacts("upload", "build")}
    assert uploaded == {"dist": "dist", "notes": "${{ runner.temp }}/notes.md"}
    for job, names in {"try": {"dist"}, "publish": {"dist", "notes"}}.items():
        downloaded = {each["name"]: each["path"] for each in artifacts("download", job)}
        assert downloaded == {name: name for name in names}


def test_the_files_of_the_tag_are_checked_tried_and_published():
    assert '\npython tools/release_check.py --tag "$TAG"\n' in commands("build")
    assert '--no-index --no-deps --find-links dist "tdcopier==${TAG#v}"' in commands("try")
    assert "--notes-file notes/notes.md dist/*.whl dist/*.tar.gz" in commands("publish")
    [publish] = [
        step for step in JOBS["publish"]["steps"] if "pypi-publish" in step.get("uses", "")
    ]
    assert publish["with"] == {"packages-dir": "dist"}
    assert (JOBS["try"]["needs"], JOBS["publish"]["needs"]) == ("build", "try")


def test_it_builds_with_a_python_of_each_wheel_and_tries_all_tested_pairs():
    tested = json.loads((ROOT / "docs/design/wheels.json").read_text())
    matrix = JOBS["try"]["strategy"]["matrix"]
    pairs = [
        f"Python {python}, torch {torch}"
        for python, torch in itertools.product(matrix["python"], matrix["torch"])
        if {"python": python, "torch": torch} not in matrix["exclude"]
    ]
    assert pairs == sorted(tested)
    [setup] = [step for step in JOBS["build"]["steps"] if "setup-python" in step.get("uses", "")]
    assert sorted(setup["with"]["python-version"].split()) == matrix["python"]


@pytest.mark.parametrize("name", ["python", "torch"])
def test_make_and_the_tool_build_the_same_wheels(name):
    matrix = JOBS["try"]["strategy"]["matrix"]
    makefile, tool = (ROOT / "Makefile").read_text(), (ROOT / "tools/build_wheels.py").read_text()
    variable = f"{name.upper()}{'E' if name == 'torch' else ''}S"
    [made] = re.findall(rf"^{variable} \?= (.*)$", makefile, re.MULTILINE)
    [built] = re.findall(rf"^{variable} = \((.*)\)$", tool, re.MULTILINE)
    assert made.split() == re.findall(r'"(.*?)"', built) == matrix[name]
