"""Counts of copies and loops, the answers of `explain`, and `time_steps`: the time of each step."""

from tdcopier._explain import ExplainedCounts, ExplainedLeaf, Explanation
from tdcopier._prefetch.stats import PrefetchStats
from tdcopier._stats import CopyStats, StepTimes
from tdcopier._steps import time_steps

__all__ = [
    "CopyStats",
    "ExplainedCounts",
    "ExplainedLeaf",
    "Explanation",
    "PrefetchStats",
    "StepTimes",
    "time_steps",
]
