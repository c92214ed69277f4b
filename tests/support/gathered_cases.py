"""The functions that every rank runs in the tests of `gather` and `all_gather`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_cases import as_it_arrives, assert_equal, tree_of

from tdcopier import distributed


def _of_rank(rank: int) -> Any:
    trees = [tree_of(1), {"other": [torch.arange(4), "text"]}, "no leaves"]
    return trees[rank]


def gathered(rank: int, dst: int, device: str | None) -> None:
    got = distributed.gather(_of_rank(rank), dst, device=device)
    if rank != dst:
        assert got is None
        return
    assert got is not None
    assert len(got) == dist.get_world_size()
    for of, tree in enumerate(got):
        assert_equal(tree, as_it_arrives(_of_rank(of), device, at_src=of == rank))


def all_gathered(rank: int, device: str | None) -> None:
    for _ in range(2):  # a layout that was seen before
        got = distributed.all_gather(_of_rank(rank), device=device)
        assert len(got) == dist.get_world_size()
        for of, tree in enumerate(got):
            assert_equal(tree, as_it_arrives(_of_rank(of), device, at_src=of == rank))


def gathered_by_a_part(rank: int) -> None:
    group = dist.new_group([0, 2])
    if rank == 1:
        with pytest.raises(ValueError, match="this rank is 1, which is not a rank of the group"):
            distributed.all_gather(rank, group=group)
        return
    assert distributed.all_gather({"a": torch.full((2,), rank)}, group=group)[1]["a"][0] == 2
    got = distributed.gather([rank], 2, group=group)
    assert got == ([[0], [2]] if rank == 2 else None)


def gather_mistake(rank: int, name: str) -> tuple[str, str]:
    """Returns class and text of this rank's error; checks that a gather works afterwards."""
    bad = {"a": [torch.ones(2), (lambda: 0)]}
    calls = {
        "one cannot send": lambda: distributed.gather(bad if rank == 1 else [1], 0),
        "none can send": lambda: distributed.all_gather(bad),
        "one of all cannot": lambda: distributed.all_gather(bad if rank == 0 else [1]),
        "no such destination": lambda: distributed.gather([1], 9),
        "destination that is no rank": lambda: distributed.gather([1], "0"),  # type: ignore[arg-type]
    }
    try:
        calls[name]()
        found = ("", "")
    except Exception as error:
        found = (type(error).__name__, str(error))
    assert distributed.all_gather(rank) == list(range(dist.get_world_size()))
    return found
