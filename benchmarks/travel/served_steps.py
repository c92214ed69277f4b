"""Times a learner's steps with samples of a replay buffer in another process, or in this one.

A block is a number of steps, until the device is done; the blocks of all ways take turns. Each step
takes a sample to the device, reads all of its leaves there, and enqueues the same large kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from loops.learner import Work
from tool.measure import Bench, summaries
from tool.tables import OURS
from tool.target_forms import Target, at_most, count_wrong, none

from tdcopier.replay import ReplayClient, ReplayServer
from travel.two_ranks import THERE, Other, two_ranks

SERVED, LOCAL, STAYS = f"{OURS}, from a server", f"{OURS}, from this process", "a batch that stays"
STEP_MS, STEPS = 3.4, 40
"""Of the kernels of a step; of a block."""
MOST_OVER_LOCAL = 1.03


class Case(NamedTuple):
    leaves: int
    floats: int
    """Of each leaf, in each row."""
    rows: int
    device: str
    """Of the learner."""


def run(bench: Bench) -> dict[str, Any]:
    cases = {
        "200 leaves, 1.6 MB": Case(200, 125, 16, str(bench.device)),
        "13 leaves, 0.85 MB": Case(13, 64, 256, str(bench.device)),
    }
    found = {}
    with two_ranks("gloo", Ends) as other:
        for name, case in cases.items():
            found[name] = _timed(bench, name, case, other)
    return {
        "what": "Steps of a learner with samples of a replay buffer in another process",
        "settings": {"steps of a block": STEPS, "kernels of a step, ms": STEP_MS},
        "cases": found,
    }


def _timed(bench: Bench, name: str, case: Case, other: Other) -> dict[str, Any]:
    with other.end(name, case) as end:
        times = other.times(bench, name, end)
        wrong = {OURS: end.wrong.item()}
    return {
        "leaves": case.leaves,
        "bytes": 4 * case.leaves * case.floats * case.rows,
        "wall_us": summaries(times.wall_us),
        "process_us": summaries(times.process_us),
        "wrong": wrong,
    }


class Ends:
    """One process: rank 0 has the buffer, rank 1 learns."""

    def __init__(self, rank: int, name: str, case: Case) -> None:
        from tdcopier.torchrl import PackedLazyTensorStorage, PackedTensorDictReplayBuffer

        self.rank, self.case = rank, case
        name = name.replace(" ", "-").replace(",", "")
        is_served = rank == THERE
        pinning = {} if is_served else {"sample_device": case.device, "pinned": True}
        self.buffer = PackedTensorDictReplayBuffer(
            storage=PackedLazyTensorStorage(32 * case.rows, **pinning), batch_size=case.rows
        )
        for number in range(32):
            self.buffer.extend(_rows(case, number))
        if is_served:
            self.server = ReplayServer(self.buffer, name=name, host="127.0.0.1")
            return
        self.client = ReplayClient(name=name, host="127.0.0.1", device=case.device)
        self.work = Work(torch.device(case.device), STEP_MS)
        self.wrong = torch.zeros((), device=case.device)
        self.kept = self.client.sample()

    @property
    def ways(self) -> dict[str, Any]:
        return {SERVED: self.served, LOCAL: self.local, STAYS: self.stays}

    def batches_of(self, way: str) -> int:
        return STEPS

    def served(self, count: int) -> None:
        self._steps(count, lambda: self.client.sample())

    def local(self, count: int) -> None:
        self._steps(count, lambda: self.buffer.sample())

    def stays(self, count: int) -> None:
        self._steps(count, lambda: self.kept)

    def _steps(self, count: int, sample: Any) -> None:
        if self.rank == THERE:  # its server's thread answers
            return
        for _ in range(count):
            batch = sample()
            first, *others = (leaf for key, leaf in batch.items() if key.startswith("leaf"))
            differences = torch._foreach_sub(others, [first] * len(others))
            self.wrong += torch.stack(torch._foreach_norm(differences)).sum()
            self.work.enqueue()
        torch.accelerator.synchronize(self.case.device)

    def close(self) -> None:
        if self.rank == THERE:
            self.server.close()
        else:
            self.client.close()


def _rows(case: Case, number: int) -> Any:
    """Return rows, with the same numbers in each leaf of a row."""
    from tensordict import TensorDict

    rows = torch.arange(float(case.rows)).unsqueeze(1) + case.rows * number
    leaves = {f"leaf {each}": rows + torch.zeros(case.floats) for each in range(case.leaves)}
    return TensorDict(leaves, [case.rows])


# ---- targets -------------------------------------------------------------------------------------


def value_targets(result: dict[str, Any]) -> Iterator[Target]:
    yield none("rows of samples with leaves of other rows", count_wrong(result["cases"].values()))


def speed_targets(result: dict[str, Any]) -> Iterator[Target]:
    for name, found in result["cases"].items():
        medians = {way: each["median_us"] for way, each in found["wall_us"].items()}
        over = medians[SERVED] / medians[LOCAL]
        yield at_most(f"{name}: step with a server, over one without", over, MOST_OVER_LOCAL)
