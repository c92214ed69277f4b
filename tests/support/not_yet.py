"""Promises that the engine does not keep yet, by the scenario that shows the failure.

A scenario in this list must fail, so one that passes has to be removed. The state machine does not
generate programs that depend on these promises.
"""

from __future__ import annotations

NOT_YET: dict[str, str] = {
    "a_signal_arrives_while_the_host_waits": "under a schedule waits block: test_signals.py has it",
}
