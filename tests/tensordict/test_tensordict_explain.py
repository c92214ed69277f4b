"""`explain` of every kind of TensorDict agrees with the copy."""

from __future__ import annotations

import pytest
import torch
from each_case import together
from tensordict import TensorDict
from tensordict_cases import COPIED, kind_and_ends

import tdcopier

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning"),
]


@together(("name", "direction"), COPIED, by="direction")
def test_the_counts_are_those_of_the_copy(device, name, direction):
    kind, source, target = kind_and_ends(name, direction, device)
    for wrap in (lambda td: td, lambda td: {"batch": ([td],)}):
        with kind.within():
            td = kind.make(target if kind.on_target else source)
            explanation = tdcopier.explain(wrap(td), target)
            handle = tdcopier.start_copy(wrap(td), target)
            handle.get()
        assert explanation.counts == handle.stats[:8]
        assert explanation.counts[:5] == kind.counts(direction)
        assert all(row.reason for row in explanation)
        paths = [row.path for row in explanation]
        assert len(set(paths)) == len(paths)


def test_the_rows_are_named_by_their_keys(device):
    td = TensorDict(
        {"obs": torch.ones(2, 3), "next": {"obs": torch.ones(2, 3)}, "text": "words"}, [2]
    )
    rows = tdcopier.explain({"td": td}, device).rows
    assert [(row.path, row.kind, row.treatment) for row in rows] == [
        ("data['td']['obs']", "torch.Tensor", "packed"),
        ("data['td']['next']['obs']", "torch.Tensor", "packed"),
        ("data['td']['text']", "tensordict.tensorclass.NonTensorData", "opaque"),
    ]


def test_a_part_that_is_delegated_says_so(device):
    td = TensorDict({"a": torch.ones(2)}, [2]).consolidate()
    (row,) = tdcopier.explain([td], device)
    assert row.treatment == "delegated"
    assert row.shape == (2,)
    assert "TensorDict" in row.reason
    (row,) = tdcopier.explain([TensorDict({"a": torch.ones(2)}, [2], device="cpu")], "cpu")
    assert (row.treatment, row.reason) == ("reused", "on the target already")
