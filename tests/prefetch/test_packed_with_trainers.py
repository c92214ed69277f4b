"""`packed` as a loader's collate function: trainers that move batches themselves get the same."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from libraries import library
from torch.utils.data import DataLoader, Dataset

import tdcopier

COUNT, SIZE = 8, 4


class Boxes(Dataset[Any]):
    def __len__(self) -> int:
        return COUNT * SIZE

    def __getitem__(self, index: int) -> Any:
        pixels = torch.full((4_000,), float(index))
        return {"pixels": pixels, "boxes": [torch.full((1 + index // SIZE, 4), index)], "id": index}


def loader_of(**options: Any) -> DataLoader[Any]:
    collate = tdcopier.packed(options.pop("collate_fn", torch.utils.data.default_collate))
    options = {"num_workers": 2, "multiprocessing_context": "fork", "pin_memory": True, **options}
    return DataLoader(Boxes(), SIZE, collate_fn=collate, **options)


def assert_are_the_batches(found: list[Any], device: str) -> None:
    assert len(found) == COUNT
    for number, batch in enumerate(found):
        ids = torch.arange(SIZE) + number * SIZE
        assert batch["pixels"].device == torch.device(device)
        assert torch.equal(batch["pixels"].cpu(), ids.float()[:, None].expand(-1, 4_000))
        assert batch["boxes"][0].shape == (SIZE, 1 + number, 4)
        assert torch.equal(batch["boxes"][0][:, 0, 3].cpu(), ids)
        assert torch.equal(batch["id"].cpu(), ids)


def test_the_pin_thread_of_a_loader_pins_slabs_in_place(device):
    found, most = [], 0
    for parcel in loader_of():
        assert isinstance(parcel, tdcopier.Parcel)
        assert parcel.is_pinned()
        assert tdcopier._C.Slab.of(parcel) is not None
        most = max(most, tdcopier.pinned.usage().slab_bytes)
        found.append(parcel.to(device, non_blocking=True))
    assert most > 0
    assert_are_the_batches(found, device)


@pytest.mark.parametrize("prefetches", [False, True])
def test_accelerate(prefetches, device, monkeypatch):
    state = library("accelerate.state")
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", device)
    state.AcceleratorState._reset_state(reset_partial_state=True)
    try:
        accelerator = library("accelerate").Accelerator()
        loader = accelerator.prepare_data_loader(loader_of(), device_placement=not prefetches)
        if prefetches:
            with tdcopier.prefetch(loader, accelerator.device) as batches:
                found = list(batches)
                assert batches.stats.packed_batches == batches.stats.slab_batches == COUNT
                assert batches.stats.why_unpacked is None
        else:
            found = list(loader)
        assert_are_the_batches(found, device)
    finally:
        state.AcceleratorState._reset_state(reset_partial_state=True)


def test_lightning(device):
    move = library("lightning.fabric.utilities").move_data_to_device
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [move(parcel, torch.device(device)) for parcel in loader_of()]
    assert_are_the_batches(found, device)


def test_a_trainer_that_calls_to(device):
    found = [parcel.to(device) for parcel in loader_of(pin_memory=False)]
    assert_are_the_batches(found, device)


class Closed(DataLoader[Any]):
    """A loader whose own pass ends with an error when it is closed."""

    def __iter__(self) -> Any:
        try:
            yield from super().__iter__()
        finally:
            raise KeyError("closed")


@pytest.mark.parametrize("collate_fn", [None, tdcopier.packed()])
def test_an_error_of_a_generator_that_is_closed_is_raised(collate_fn, device):
    options = {"num_workers": 1, "multiprocessing_context": "fork", "collate_fn": collate_fn}
    batches = tdcopier.prefetch(Closed(Boxes(), 1, **options), device)
    next(batches)
    with pytest.raises(KeyError, match="closed"):
        batches.close()


def test_without_workers_nothing_is_said_to_be_packed(device):
    loader = DataLoader(Boxes(), SIZE, collate_fn=tdcopier.packed())
    (row,) = tdcopier.explain(loader, device)
    assert "the loader has no workers" in row.reason
    with tdcopier.prefetch(loader, device) as batches:
        pixels = [batch["pixels"][0, 0].item() for batch in batches]
        assert pixels == [SIZE * i for i in range(COUNT)]
        assert batches.stats.why_unpacked == "the loader has no workers"
