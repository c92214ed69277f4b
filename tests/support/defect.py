"""A defect that an engine might have: an entry of `defects.py`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Defect:
    promise: str  # its name in docs/concepts/promises.md
    file: str  # under csrc/
    code: str  # the correct code
    broken: str  # the code of the test build; {defect} tests whether this defect is selected
    scenario: str  # the scenario that detects it
    error: str  # the class of the exception that it causes
    hazard: str | None = None  # the kind of hazard that the detectors report, if any
