"""Times parcels from one process to another, beside the same bytes, one tensor, and the leaves.

What is sent is made anew for each call, as in use: memory that torch has shared once is not copied
again. Making it does not count, except in the way from `pack()` to `tree()`.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from tool.measure import Bench, shuffled, summaries
from tool.tables import OURS
from tool.target_forms import Target, at_most, count_wrong, none
from tool.way import same

import tdcopier
from tdcopier.workloads import WORKLOADS
from travel import threshold
from travel.transports import (
    BYTES,
    LEAVES,
    PARCEL,
    TENSOR,
    UNPICKLED,
    WHOLE,
    Made,
    importable,
    opened,
)

SMALL, LARGE = "detection batch", "16 leaves"
LARGE_BYTES = 64 << 20
SHRINK_OF_SIM = 32
MOST_OVER_BEST = 1.3
WARM_UP = 3


class Form(NamedTuple):
    prepare: Made
    """Not timed."""
    make: Made = same
    """Timed, with sending."""


def _new_tensor(tree: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(tdcopier.pack(tree)), dtype=torch.uint8)


FORMS = {
    PARCEL: Form(tdcopier.pack),
    BYTES: Form(lambda tree: bytes(tdcopier.pack(tree))),
    TENSOR: Form(_new_tensor),
    LEAVES: Form(copy.deepcopy),
    WHOLE: Form(same, tdcopier.pack),
}
NAMES = {PARCEL: OURS}
"""Of the ways in results, where they differ from the forms."""


def run(bench: Bench) -> dict[str, Any]:
    shrink = 1 if bench.is_real else SHRINK_OF_SIM
    batches: dict[str, tuple[Callable[[], Any], float]] = {
        SMALL: (lambda: WORKLOADS["detection_batch"].make(0), 0.2),
        LARGE: (lambda: _large(LARGE_BYTES // shrink), 0.04),
    }
    sent: dict[str, dict[str, Any]] = {name: {} for name in batches}
    for transport in importable():
        with opened(transport) as send:
            for name, (make, share) in batches.items():
                label = f"{name}, {transport}"
                rounds = bench.rounds(share, least=4)
                forms = forms_of(transport)
                sent[name][transport] = _timed(bench, label, forms, make(), send, rounds)
    return {
        "what": "Parcels to another process: from sending until every page has been read",
        "bytes": {name: tdcopier.pack(make()).nbytes for name, (make, _) in batches.items()},
        "sent": sent,
        "threshold": threshold.run(bench),
    }


def _large(nbytes: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(nbytes // 64, generator=generator) for _ in range(16)]


def forms_of(transport: str) -> dict[str, Form]:
    return FORMS if transport != "pipe" else {**FORMS, UNPICKLED: Form(tdcopier.pack)}


def _timed(
    bench: Bench, label: str, forms: dict[str, Form], tree: Any, send: Any, rounds: int
) -> dict[str, Any]:
    times_us: dict[str, list[float]] = {NAMES.get(form, form): [] for form in forms}
    wrong = dict.fromkeys(times_us, 0)
    expected = zlib.crc32(tdcopier.pack(tree))
    with bench.quiet(bound=False) as begin_round:
        for index, form in shuffled(
            forms, bench.progress(label), rounds=rounds, warm_up=WARM_UP, before_round=begin_round
        ):
            way, (prepare, make) = NAMES.get(form, form), forms[form]
            us, checksum = send(form, make, prepare(tree), index < 0)
            if index < 0:
                wrong[way] += checksum != expected
            else:
                times_us[way].append(us)
    found = summaries(times_us)
    return {"contenders": found, "wrong": wrong}


def value_targets(result: dict[str, Any]) -> Iterator[Target]:
    parts = [each for batch in result["sent"].values() for each in batch.values()]
    yield none("parcels that travel: other bytes there, all ways", count_wrong(parts))


def _over_best(found: dict[str, Any]) -> float:
    """Return how long a parcel takes, in the way that suits its size, over the better other one."""

    def quickest(*ways: str) -> float:
        return min(found["contenders"][way]["median_us"] for way in ways if way in found["wrong"])

    return quickest(OURS, UNPICKLED) / quickest(BYTES, TENSOR)


def speed_targets(result: dict[str, Any]) -> Iterator[Target]:
    for name, transports in result["sent"].items():
        for transport, found in transports.items():
            what = f"{name}, {transport}: parcel over the better of its bytes and one tensor"
            yield at_most(what, _over_best(found), MOST_OVER_BEST)
