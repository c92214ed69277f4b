"""Defects that an engine might have, each breaking one promise; see `build_broken_engines.py`.

The defects are in `defects_of_*.py`, by the promise that they break.

The tables quote the engine's source literally: when that changes, they must follow.
"""

from __future__ import annotations

from defect import Defect
from defects_of_channels import CHANNELS
from defects_of_memory import MEMORY
from defects_of_order import ORDER
from defects_of_parcels import PARCELS
from defects_of_waits_and_errors import WAITS_AND_ERRORS

DEFECTS: dict[str, Defect] = {**CHANNELS, **MEMORY, **ORDER, **PARCELS, **WAITS_AND_ERRORS}
