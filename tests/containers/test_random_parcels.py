"""Mutated layouts of parcels: refused, or trees that are read and copied."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext

import parcel_parts
import play_parcels
import pytest
import torch
from parcel_parts import joined
from play_parcels import KINDS, MUTATIONS, judge, limited_memory, play, play_seeds

from tdcopier import Parcel, pack

# A longer run: TDCOPIER_TEST_PARCELS=100000 make test-py, or
# python tests/support/play_parcels.py --mutations 1000000 --jobs 2.
PARTS = 4
SEEDS = -(-int(os.environ.get("TDCOPIER_TEST_PARCELS", "2000")) // (MUTATIONS * PARTS))
FIRST_SEED = int(os.environ.get("TDCOPIER_TEST_FIRST_SEED", "0"))


@pytest.fixture(autouse=True)
def one_thread(device: str) -> Iterator[None]:
    """Keeps torch's thread teams out: they take longer than these small tensors."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("part", range(PARTS))
def test_mutated_layouts_are_refused_or_are_trees(part):
    first = FIRST_SEED + part * SEEDS
    played = play_seeds(range(first, first + SEEDS))
    assert played.wrong == []
    assert played.mutations == SEEDS * MUTATIONS
    assert played.trees.total() > played.mutations / 10  # not refused for a simple reason
    assert len(played.refusals) > len(KINDS)


def test_a_seed_is_one_game():
    one, other = (play(7) for _ in range(2))
    assert (one.trees, one.refusals) == (other.trees, other.refusals)


def test_wrong_leaves_are_counted_with_their_seed(monkeypatch):
    monkeypatch.setattr(play_parcels, "same_bytes", lambda *_: False)
    played = play_seeds(range(2))
    assert played.wrong
    assert all(text.startswith(("seed 0", "seed 1")) for text in played.wrong)


def test_memory_that_the_bytes_do_not_pay_for_is_seen(monkeypatch):
    from_buffer = Parcel.from_buffer

    def wasteful(memory, **options):
        kept.append(make())
        return from_buffer(memory, **options)

    monkeypatch.setattr(play_parcels, "Parcel", type("", (), {"from_buffer": wasteful}))
    data = joined(bytes([0, 0, 9, 10]), b"")
    kept: list[object] = []
    make = lambda: bytes(1 << 20)  # noqa: E731
    with limited_memory(), pytest.raises(AssertionError, match="bytes for"):
        judge(data)
    if "libasan" in os.environ.get("LD_PRELOAD", ""):
        return  # its shadow needs the address space
    make = lambda: torch.empty(1 << 32, dtype=torch.uint8)  # noqa: E731
    with limited_memory(), pytest.raises(RuntimeError, match="allocate"):
        judge(data)


def test_a_layout_that_is_taken_apart_is_the_same_when_it_is_put_together():
    for layout in play_parcels.layouts().values():
        assert parcel_parts.Layout.read(layout.written()) == layout


def test_an_unsound_tensordict_is_wrong():
    made = KINDS["TensorDict"]()
    assert play_parcels.is_sound(made)
    made._tensordict["x"] = torch.ones(3, 3)
    assert not play_parcels.is_sound(made)
    frames = KINDS["tensorclass"]()[0]._tensordict
    frames.set_non_tensor("note", "pickled")
    frames._tensordict["note"].batch_size = []
    assert play_parcels.is_sound(frames)


@pytest.mark.parametrize("kind", ["TensorDict", "tensorclass"])
@pytest.mark.parametrize("change", ["none", "batch size", "names"])
def test_a_tensordict_that_is_another_one_on_the_device_is_wrong(monkeypatch, kind, change):
    copy = play_parcels.tdcopier.copy

    def changed(parcel, *arguments, **options):
        there = copy(parcel, *arguments, **options)
        made = play_parcels.tensordicts_of(there)[0]
        if change == "batch size":
            made._batch_size = torch.Size([9])
        elif change == "names":
            made.names = ["other"]
        return there

    monkeypatch.setattr(play_parcels.tdcopier, "copy", changed)
    with nullcontext() if change == "none" else pytest.raises(AssertionError):
        assert judge(bytes(pack(KINDS[kind]()))) is None
