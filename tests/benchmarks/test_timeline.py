"""The timeline of a copy: what each thread did, from the call to the arrival."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmark_support import load

timeline = load("timeline")


@pytest.mark.sim
@pytest.mark.parametrize("cold", [False, True], ids=["warm", "cold"])
def test_it_has_the_phases_of_all_threads_within_the_call(
    sim: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], cold: bool
) -> None:
    picture = tmp_path / "timeline.svg"
    options = ["--device", "sim", "--batch", "detection batch with images", "--repeats", "1"]
    timeline.main([*options, "--picture", str(picture), *(["--cold"] if cold else [])])
    first, *lines = capsys.readouterr().out.splitlines()
    end_us = float(first.rsplit(maxsplit=1)[1])
    spans = [line.split() for line in lines]
    phases = {phase for _, phase, *_ in spans}
    assert {"flatten", "plan", "stage", "enqueue", "outputs", "unflatten"} <= phases
    assert len({thread for thread, *_ in spans}) > 1  # workers stage
    assert all(0 <= float(begin) <= float(end) for _, _, begin, end, _ in spans)
    assert all(float(end) <= end_us + 1 for _, phase, _, end, _ in spans if phase == "enqueue")
    assert "<svg" in picture.read_text()
