"""`prefetch` of sources that training loops have: a `DataLoader`, and TensorDicts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import assert_same
from torch.utils.data import DataLoader, Dataset

import tdcopier


class Squares(Dataset[Any]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return {"index": torch.tensor(index), "row": torch.full((4,), float(index * index))}


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_gives_its_epochs_on_the_device(device, workers, persistent):
    loader = DataLoader(
        Squares(),
        batch_size=4,
        num_workers=workers,
        persistent_workers=persistent and workers > 0,
        multiprocessing_context="fork" if workers else None,
    )
    expected = [{name: leaf.to(device) for name, leaf in batch.items()} for batch in loader]
    with tdcopier.prefetch(loader, device) as prefetcher:
        assert len(prefetcher) == 5
        for _ in prefetcher:
            break  # abandons the epoch
        for _ in range(2):
            assert_same(list(prefetcher), expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_failure_in_a_data_loaders_dataset_comes_out_of_the_loop(device, workers):
    class Failing(Squares):
        def __getitem__(self, index: int) -> Any:
            if index == 13:
                raise KeyError("row 13 is lost")
            return super().__getitem__(index)

    loader = DataLoader(
        Failing(),
        batch_size=4,
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
    )
    seen = []
    with pytest.raises(KeyError, match="row 13 is lost") as caught:
        seen.extend(int(batch["index"][0]) for batch in tdcopier.prefetch(loader, device))
    assert seen == [0, 4, 8]
    # In a cycle, the loader's iterator would later wait 5 s for each of its workers.
    caught.value.__traceback__ = None
    del caught


def test_tensordicts_arrive_as_such_with_their_device(device):
    tensordict = pytest.importorskip("tensordict")
    batches = [
        tensordict.TensorDict(
            {"obs": torch.rand(6, 3), "next": {"reward": torch.full((6,), float(i))}}, [6]
        )
        for i in range(4)
    ]
    for got, source in zip(tdcopier.prefetch(batches, device), batches, strict=True):
        assert_same(got, source.to(device))


def test_a_data_loader_of_tensordicts_gives_them_on_the_device(device):
    tensordict = pytest.importorskip("tensordict")
    rows = tensordict.TensorDict({"x": torch.arange(12.0), "deep": {"y": torch.rand(12, 2)}}, [12])
    loader = DataLoader(rows, batch_size=4, collate_fn=torch.stack)
    got = torch.cat(list(tdcopier.prefetch(loader, device)))
    assert_same(got, rows.to(device))


def test_a_source_may_begin_the_copies_itself(device):
    """For example rows of a storage: the reader only waits until they have been read."""
    storage = {"x": torch.randn(50, 300), "row": torch.arange(50)}
    indices = iter([torch.tensor([3, 3, 1]), torch.arange(50).repeat(200), torch.tensor([49])])
    expected = [storage["row"][index] for index in [[3, 3, 1], list(range(50)) * 200, [49]]]
    prefetcher = tdcopier.prefetch(
        lambda: tdcopier.start_gather(storage, next(indices), device), device
    )
    rows = [batch["row"] for batch in prefetcher]
    assert [row.device for row in rows] == [torch.device(device)] * 3
    assert all(torch.equal(row.cpu(), wanted) for row, wanted in zip(rows, expected, strict=True))


def test_a_storage_may_be_written_when_the_source_is_asked_for_more(device):
    storage = torch.zeros(50, 300)
    index = torch.arange(50).repeat(100)

    def source():
        for value in range(6):
            storage.fill_(value)
            yield tdcopier.start_gather(storage, index, device)

    for value, rows in enumerate(tdcopier.prefetch(source(), device)):
        assert (rows == value).all()
