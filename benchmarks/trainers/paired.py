"""Ratios of two ways, paired by round, with intervals.

Both ways of a pair were measured within seconds of each other, so a slower spell of the machine
concerns both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

import numpy as np

from trainers.rounds import Block

RESAMPLES = 4000
SEED = 1
Figure = Callable[[Block], float]


def step_of(block: Block) -> float:
    """Return the mean step, which says what a loop takes even if batches come in bursts."""
    return fmean(block.step_us)


def used(name: str) -> Figure:
    """Return a function that gives what a block has used per step."""
    return lambda block: block.per_step[name]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median, by resampling the rounds."""
    drawn = np.random.default_rng(SEED).choice(np.asarray(values), (RESAMPLES, len(values)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return float(low), float(high)


def ratio(ours: Sequence[Block], others: Sequence[Block], figure: Figure) -> dict[str, Any]:
    """Return the median over the rounds of the ratio of one way's block to the other's, and its
    interval.

    A round in which the other's figure is 0 has no ratio; ``rounds`` says how many have one.
    """
    pairs = [(figure(a), figure(b)) for a, b in zip(ours, others, strict=True)]
    found = [mine / other for mine, other in pairs if other]
    if not found:
        return {"ratio": None, "low": None, "high": None, "rounds": 0}
    low, high = interval(found)
    return {"ratio": median(found), "low": low, "high": high, "rounds": len(found)}


def ratios(
    blocks: Mapping[str, Sequence[Block]], reference: str, figure: Figure = step_of
) -> dict[str, dict[str, Any]]:
    """Return the ratio of each way to the reference, by way; none if the reference did not run."""
    if reference not in blocks:
        return {}
    return {name: ratio(found, blocks[reference], figure) for name, found in blocks.items()}


def summary(blocks: Sequence[Block]) -> dict[str, float]:
    """Return mean, median, quartiles and 90th percentile of all timed steps, in microseconds."""
    steps = [us for block in blocks for us in block.step_us]
    names = {"median_us": 50, "q1_us": 25, "q3_us": 75, "p90_us": 90, "max_us": 100}
    found = dict(zip(names, np.percentile(steps, list(names.values())).tolist(), strict=True))
    return {**found, "mean_us": fmean(steps), "repeats": len(steps)}


def medians(blocks: Sequence[Block]) -> dict[str, float]:
    """Return the median over the rounds of each figure per step."""
    return {name: median(b.per_step[name] for b in blocks) for name in blocks[0].per_step}
