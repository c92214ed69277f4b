"""`explain`: its rows and counts are those of the copy, over every kind of leaf; and its tables."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest
import torch
from catalogue import KINDS, Labelled, ramp
from catalogue_cases import ARRIVING, OPTIONS, REFUSED, SOME_WRAPS, WRAPS, kind_and_ends
from each_case import together

import tdcopier
from tdcopier.workloads import detection_batch

WITHOUT_TREATMENT = {"use_background_thread"}
"""Options that `explain` does not take."""


def is_dense(leaf: Any) -> bool:
    """Returns whether it is a tensor whose elements fill its memory, in any order."""
    if type(leaf) is not torch.Tensor or leaf.layout is not torch.strided or leaf.is_nested:
        return False
    return leaf.numel() == 0 or torch.empty_like(leaf).stride() == leaf.stride()


def explained(
    tree: Any, target: str, *, falls_back: bool = False, **options: Any
) -> tdcopier.stats.Explanation:
    """Explains and then copies; asserts that the counts agree."""
    shown = {name: value for name, value in options.items() if name not in WITHOUT_TREATMENT}
    explanation = tdcopier.explain(tree, target, **shown)
    handle = tdcopier.start_copy(tree, target, **options)
    handle.get()
    assert explanation.counts == handle.stats[:8]
    if not falls_back:
        assert handle.stats.fallbacks == 0
    return explanation


def only(tree: Any, target: str, **options: Any) -> tdcopier.stats.ExplainedLeaf:
    (row,) = explained(tree, target, **options)
    return row


# ---- the catalogue -------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS)
@together(("name", "direction"), ARRIVING, by="direction")
def test_the_counts_are_those_of_the_copy(device, registered_box, name, direction, options):
    kind, source, target = kind_and_ends(name, direction, device)
    # Options decide how leaves travel, after the walk through the containers.
    for container in SOME_WRAPS if options == "default" else ["list"]:
        _, wrap, opaque = WRAPS[container]
        with kind.within():
            leaf = kind.make(target if kind.on_target else source)
            tree = wrap(leaf)
            gathered_by_torch = not is_dense(leaf) and source.startswith("cuda")
            try:
                explanation = explained(
                    tree, target, falls_back=gathered_by_torch, **OPTIONS[options]
                )
            except AssertionError as error:
                raise AssertionError(f"in the container {container!r}: {error}") from error
        expected = kind.outcome(direction)
        if expected == "packed" and options in ("no packing", "tiny chunks"):
            continue  # then the copy decides by size
        assert explanation.totals[expected].leaves == kind.leaves + opaque * (expected == "opaque")


@together(("name", "direction"), ARRIVING, by="direction")
def test_the_row_says_what_the_leaf_is(device, name, direction):
    kind, source, target = kind_and_ends(name, direction, device)
    with kind.within():
        leaf = kind.make(target if kind.on_target else source)
        rows = tdcopier.explain([leaf], target).rows
        one = [leaf] if not isinstance(leaf, list) else leaf
        if len(rows) != len(one):  # a jagged one, in its parts
            one = kind.parts(leaf)
        for row, each in zip(rows, one, strict=True):
            assert row.path.startswith("data[0]")
            assert row.kind.endswith(type(each).__qualname__)
            assert row.reason
            assert (row.chunk is None) == (row.treatment not in ("packed", "alone"))
            if isinstance(each, (torch.Tensor, np.ndarray)):
                assert row.dtype == str(each.dtype).removeprefix("torch.")
                if row.treatment in ("packed", "alone"):
                    assert row.shape == tuple(each.shape)
                    assert row.nbytes == each.nbytes


@together(("name", "direction"), REFUSED, by="direction")
def test_a_leaf_that_the_copy_refuses_is_refused_in_the_same_words(device, name, direction):
    kind, source, target = kind_and_ends(name, direction, device)
    tree = [kind.make(source)]
    with pytest.raises(kind.outcome(direction)) as expected:
        tdcopier.start_copy(tree, target)
    with pytest.raises(kind.outcome(direction)) as caught:
        tdcopier.explain(tree, target)
    assert str(caught.value) == str(expected.value)


@pytest.mark.parametrize("within_host", [True, False])
def test_leaves_that_stay_on_the_host_are_reused(device, within_host):
    tree = [
        ramp("cpu", 3), np.arange(3.0), np.arange(3, dtype=">i4"), ramp("cpu", 3).requires_grad_(),
        torch.nn.Parameter(ramp("cpu", 2)), ramp("cpu", 3).as_subclass(Labelled), "text",
        torch.nn.utils.rnn.pack_sequence([ramp("cpu", 2), ramp("cpu", 1)]),
    ]  # fmt: skip
    target = "cpu" if within_host else device
    explanation = explained(tree, target)
    assert (explanation.counts.reused_leaves == 7) == within_host


# ---- reasons -------------------------------------------------------------------------------------


def test_a_delegated_leaf_has_its_reason(device):
    parameters = dict(torch.nn.Linear(2, 3).named_parameters())
    rows = explained(parameters, device).rows
    assert [(row.path, row.treatment, row.kind) for row in rows] == [
        ("data['weight']", "delegated", "torch.nn.Parameter"),
        ("data['bias']", "delegated", "torch.nn.Parameter"),
    ]
    for row in rows:
        assert "requires a gradient and grad mode is on" in row.reason
        assert "torch.no_grad()" in row.reason
        assert ".detach()" in row.reason
    with torch.no_grad():
        assert explained(parameters, device).counts[:3] == (2, 0, 0)


REASONS = {
    "conjugate view": "conjugate view",
    "negative view": "negative view",
    "zero tensor of autograd": "zero tensor of autograd",
    "tensor subclass": "torch.Tensor subclass catalogue.Labelled",
    "forward gradient": "forward gradient",
    "result of an operation with a gradient": "requires a gradient and grad mode is on",
    "nested, jagged, that requires grad": "jagged, and requires a gradient",
    "any tensor, under a dispatch mode": "torch mode or transform is active",
    "any tensor, inside `vmap`": "torch mode or transform is active",
}


@pytest.mark.parametrize("name", REASONS)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_the_reason_names_the_property(device, name):
    kind, source, target = kind_and_ends(name, "H2D", device)
    with kind.within():
        (row,) = tdcopier.explain([kind.make(source)], target)
    assert REASONS[name] in row.reason


ONLY_TORCH = {
    "sparse COO": ("sparse layout", 2 * 3 * 8 + 3 * 4),
    "sparse CSR": ("sparse compressed layout", 4 * 8 + 3 * 8 + 3 * 4),
    "sparse BSC": ("sparse compressed layout", 3 * 8 + 2 * 8 + 2 * 4 * 4),
    "quantized": ("quantized", 3),
    "quantized per channel": ("quantized", 6),
    "nested, strided": ("nested, in strided layout", 5 * 4),
    "named": ("its dimensions have names", 12),
}
"""Reasons and sizes of leaves that a simulated device cannot have: `explain` never moves them."""


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
@pytest.mark.filterwarnings("ignore:Named tensors and all their associated APIs:UserWarning")
@pytest.mark.parametrize("name", ONLY_TORCH)
def test_a_leaf_of_another_layout_has_its_reason_and_its_size(device, name):
    kind = KINDS[name]
    if kind.needs and kind.why_missing(device):
        pytest.skip(kind.why_missing(device))
    (row,) = tdcopier.explain({"leaf": kind.make("cpu")}, device)
    reason, size = ONLY_TORCH[name]
    assert (row.treatment, row.reason, row.nbytes) == ("delegated", reason, size)
    assert (row.shape is None) == (name == "nested, strided")


def test_the_size_decides_between_packed_and_alone(device):
    small, large = ramp("cpu", 100), ramp("cpu", 100_000)
    rows = explained([small, large, small], device).rows
    assert [row.treatment for row in rows] == ["packed", "alone", "packed"]
    assert [row.chunk for row in rows] == [0, 1, 0]
    assert [row.offset_bytes for row in rows] == [0, 0, 400]
    assert rows[0].reason == "at most 256 KiB: 2 leaves of float32 share chunk 0"
    assert rows[1].reason == "larger than 256 KiB"
    assert only([small], device, pack_cpu_tensors=False).reason == "pack_cpu_tensors is False"
    tight = only([small], device, max_packed_chunk_bytes=399)
    assert tight.reason == "larger than max_packed_chunk_bytes"


def test_alignment_is_that_of_the_copy(device):
    rows = explained([ramp("cpu", 1)] * 3, device, min_packed_alignment_bytes=512).rows
    assert [row.offset_bytes for row in rows] == [0, 512, 1024]


@pytest.mark.parametrize("staged", [True, False])
def test_pinned_leaves_are_read_in_place_unless_nothing_is_to_be_pinned(device, staged):
    rows = ramp("cpu", 100, 1024).pin_memory()
    tree = [rows[0].clone(), *rows.unbind(), ramp("cpu", 100_000).pin_memory()]
    explanation = explained(tree, device, use_pinned_staging=staged)
    in_place = [row.in_place for row in explanation]
    assert in_place == [False, *[staged] * 101]
    if staged:
        assert explanation.counts.transfers == 3
        assert "pinned and adjacent" in explanation.rows[1].reason
        assert "pinned: the device reads it in place" in explanation.rows[-1].reason


def test_nothing_is_read_in_place_on_the_way_to_the_host(device):
    assert not only([ramp(device, 100_000)], "cpu").in_place


def test_opaque_values_are_plain_or_unknown(device):
    rows = explained(["text", {1, 2}, object(), np.array(["a"])], device)
    assert [row.treatment for row in rows] == ["opaque"] * 4
    reasons = [row.reason for row in rows]
    assert reasons[0] == reasons[3] == "plain data: the same object"
    assert "a set, whose values have no order" in reasons[1]
    assert "an object, a class that tdcopier does not know" in reasons[2]


def test_an_object_with_a_to_of_its_own_is_delegated_wherever_it_is(device):
    for target in (device, "cpu"):
        row = only([torch.nn.Linear(1, 1)], target)
        assert row.treatment == "delegated"
        assert row.reason == "torch.nn.modules.linear.Linear has a .to of its own"


# ---- nothing is done -----------------------------------------------------------------------------


class Untouched(torch.Tensor):
    """Its `.to` must not be called."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was called")


def test_no_code_of_a_leaf_is_called(device):
    leaf = torch.Tensor._make_subclass(Untouched, ramp("cpu", 3))
    (row,) = tdcopier.explain([leaf], device)
    assert (row.treatment, row.dtype, row.shape, row.nbytes) == ("delegated", "float32", (3,), 12)


@pytest.mark.sim
def test_no_transfer_is_made_and_nothing_is_allocated(sim, device):
    tree = [detection_batch(), ramp("cpu", 100_000).requires_grad_()]
    tdcopier.copy(tree, device)
    sim.reset_counts()
    before = sim.memory_stats(device), sim.pinned_bytes()
    tdcopier.explain(tree, device)
    assert sim.counts().h2d == (0, 0)
    assert (sim.memory_stats(device), sim.pinned_bytes()) == before


def test_an_explanation_keeps_nothing_of_the_batch(device):
    import weakref

    leaf = ramp("cpu", 3)
    alive = weakref.ref(leaf)
    explanation = tdcopier.explain([leaf], device)
    del leaf
    assert alive() is None
    assert len(explanation) == 1


# ---- trees ---------------------------------------------------------------------------------------


def test_a_leaf_in_two_places_has_two_rows(device):
    leaf = ramp("cpu", 3)
    rows = explained({"a": leaf, "b": [leaf]}, device).rows
    assert [row.path for row in rows] == ["data['a']", "data['b'][0]"]
    assert rows[0].offset_bytes != rows[1].offset_bytes


def test_a_container_that_contains_itself_raises_as_the_copy_does(device):
    tree: list[Any] = []
    tree.append(tree)
    with pytest.raises(RecursionError) as expected:
        tdcopier.start_copy(tree, device)
    with pytest.raises(RecursionError) as caught:
        tdcopier.explain(tree, device)
    assert str(caught.value) == str(expected.value)


def test_leaves_of_several_devices_have_chunks_of_their_own(device, other_device):
    rows = explained([ramp("cpu", 2), ramp(other_device, 2), ramp(device, 2)], device).rows
    assert [row.treatment for row in rows] == ["packed", "packed", "reused"]
    assert sorted(row.chunk for row in rows[:2]) == [0, 1]
    assert [row.device for row in rows] == ["cpu", other_device, device]


@pytest.mark.parametrize(
    "root", [ramp("cpu", 2), None, object(), {1}], ids=lambda root: type(root).__name__
)
def test_the_root_may_be_any_value(device, root):
    (row,) = tdcopier.explain(root, device)
    assert row.path == "data"


def test_the_detection_batch_is_three_chunks(device):
    explanation = explained(detection_batch(), device)
    assert explanation.counts[:7] == (528, 0, 0, 0, 0, 3, 3)
    assert explanation.totals["packed"].leaves == 528


def test_a_hundred_thousand_leaves_take_seconds_at_most(device):
    leaf = ramp("cpu", 2)
    tree = [leaf] * 100_000
    began = time.perf_counter()
    explanation = tdcopier.explain(tree, device)
    assert time.perf_counter() - began < 30  # 1.5 s on an idle machine
    assert explanation.counts.packed_leaves == 100_000
    assert len(str(explanation).splitlines()) == 63


# ---- tables --------------------------------------------------------------------------------------


def test_it_prints_as_a_table(device):
    shown = str(tdcopier.explain({"boxes": ramp("cpu", 2, 4), "name": "<front>"}, device))
    assert shown.splitlines() == [
        f"a copy to {device}: 1 packed, 1 opaque; 1 chunk, 1 transfer of 32 bytes",
        "path           kind          dtype    shape   bytes  from  treatment  chunk  reason",
        "data['boxes']  torch.Tensor  float32  (2, 4)  32     cpu   packed     0      "
        "at most 256 KiB: in the chunk for float32",
        "data['name']   str                            0            opaque            "
        "plain data: the same object",
    ]


def test_a_notebook_shows_the_same_table_escaped(device):
    page = tdcopier.explain({"<b>": ramp("cpu", 2)}, device)._repr_html_()
    assert "data[&#x27;&lt;b&gt;&#x27;]" in page
    assert "<b>" not in page
    assert page.count("<tr>") == 2


def test_leaves_that_are_not_packed_are_shown_first_in_a_long_table(device):
    tree = [ramp("cpu", 2)] * 100 + [ramp("cpu", 2).requires_grad_()]
    lines = str(tdcopier.explain(tree, device)).splitlines()
    assert any(line.startswith("data[100] ") for line in lines)
    assert lines[-1] == "and 41 more in .rows"


def test_it_converts_to_json(device):
    explanation = explained([ramp("cpu", 2, 3), "x"], device)
    read = json.loads(json.dumps(explanation.to_dict()))
    assert read["device"] == device
    assert read["counts"] == explanation.counts._asdict()
    assert read["rows"][0]["shape"] == [2, 3]
    assert read["totals"]["packed"] == {"leaves": 1, "nbytes": 24}
    assert repr(explanation) == (
        f"<Explanation of a copy to {device}: 1 packed, 1 opaque; 1 chunk, 1 transfer of 24 bytes>"
    )


def test_a_mistake_in_the_call_is_that_of_start_copy(device):
    wrong: list[dict[str, Any]] = [
        {"min_packed_alignment_bytes": 0},
        {"max_packed_chunk_bytes": "1"},
        {"use_background_thread": 2.0},
        {"require_pinned_results": True, "use_pinned_staging": False},
        {"on_unknown": "no"},
    ]
    for options in wrong:
        with pytest.raises((TypeError, ValueError)) as expected:
            tdcopier.start_copy([], device, **options)
        with pytest.raises(type(expected.value)) as caught:
            tdcopier.explain([], device, **options)
        assert str(caught.value) == str(expected.value)
    with pytest.raises(ValueError, match="nonsense"):
        tdcopier.explain([], "nonsense")


def test_it_takes_every_option_of_the_copy(device):
    options: Any = {
        "pack_cpu_tensors": False,
        "use_background_thread": False,
        "require_pinned_results": True,
        "on_unknown": "raise",
    }
    batch = [ramp("cpu", 2), object()]
    with pytest.raises(TypeError, match=r"data\[1\]"):
        tdcopier.start_copy(batch, device, **options)
    alone, unknown = tdcopier.explain(batch, device, **options)
    assert (alone.treatment, unknown.treatment) == ("alone", "opaque")
