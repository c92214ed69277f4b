"""Promises that the engine does not keep yet, by the scenario that shows it.

A scenario in this list must fail, so that one which passes is taken out of it. The state machine
leaves out what they are about.
"""

from __future__ import annotations

NOT_YET: dict[str, str] = {
    "a_signal_arrives_while_the_host_waits": "under a schedule waits block: test_signals.py has it",
}

NOT_YET_WITHOUT_THREADS: dict[str, str] = {}
"""The same of the calls of `test_without_threads.py`."""
