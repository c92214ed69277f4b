"""`collate` in a DataLoader: each batch is passed on in one chunk of shared memory per dtype."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from collate_support import (
    CONTEXTS,
    RAGGED,
    Mixed,
    Nested,
    Ragged,
    Tensordicts,
    assert_like,
    assert_one_chunk_per_dtype,
    collate_and_tell,
    dtypes_of,
    leaves_of,
    shared_memory_descriptors,
)
from torch.utils.data import DataLoader, default_collate

import tdcopier


def loader(dataset: Nested, collate: Any = tdcopier.collate, workers: int = 2, **options: Any):
    return DataLoader(dataset, 4, num_workers=workers, collate_fn=collate, **options)


@pytest.fixture
def no_garbage():
    """Collects first: descriptors of tensors in dropped cycles must not be counted in the test."""
    gc.collect()


@pytest.mark.parametrize("context", CONTEXTS)
def test_hundreds_of_leaves_come_from_a_worker_in_one_chunk_per_dtype(context, no_garbage):
    dataset = Nested(200)
    before = shared_memory_descriptors()
    batches = list(loader(dataset, multiprocessing_context=context))
    assert shared_memory_descriptors() - before == sum(len(dtypes_of(each)) for each in batches)
    assert len(batches) == 2
    for number, batch in enumerate(batches):
        samples = [dataset[4 * number + i] for i in range(4)]
        assert_like(batch, default_collate(samples))
        assert_one_chunk_per_dtype(leaves_of(batch))
        assert leaves_of(batch)[0].is_shared()


@pytest.mark.parametrize("context", CONTEXTS)
def test_the_chunk_is_made_in_shared_memory(context):
    options = {"collate_fn": collate_and_tell, "multiprocessing_context": context}
    (_, was_shared) = next(iter(DataLoader(Nested(3), 4, num_workers=1, **options)))
    assert was_shared


@pytest.mark.parametrize("context", CONTEXTS)
def test_the_count_of_descriptors_sees_those_of_torchs_own_function(context, no_garbage):
    before = shared_memory_descriptors()
    batch = next(iter(loader(Nested(200), default_collate, multiprocessing_context=context)))
    assert shared_memory_descriptors() - before >= len(leaves_of(batch)) > 200


@pytest.fixture
def shared_by_file_name():
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    yield
    torch.multiprocessing.set_sharing_strategy(before)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_batch_has_one_chunk_per_dtype_where_memory_is_shared_by_file_name(shared_by_file_name):
    dataset = Nested(50)
    batch = None
    for tries_left in (2, 1, 0):
        try:
            batch = next(iter(loader(dataset, multiprocessing_context="fork")))
            break
        except RuntimeError as error:  # torch starts a process for this, and does not wait long
            if "manager connection has timed out" not in str(error) or not tries_left:
                raise
    assert_like(batch, default_collate([dataset[i] for i in range(4)]))
    assert_one_chunk_per_dtype(leaves_of(batch))


def test_without_workers_each_leaf_has_ordinary_memory(no_garbage):
    before = shared_memory_descriptors()
    (batch, _) = loader(Nested(20), workers=0)
    leaves = leaves_of(batch)
    assert len({leaf.untyped_storage().data_ptr() for leaf in leaves}) == len(leaves)
    assert not any(leaf.is_shared() for leaf in leaves)
    assert shared_memory_descriptors() == before


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_one_live_leaf_keeps_the_chunk_and_the_last_one_frees_it(no_garbage):
    before = shared_memory_descriptors()
    batch = next(iter(loader(Nested(200, length=4), multiprocessing_context="fork")))
    kept = batch["many"][123]
    chunk = kept.untyped_storage()
    expected, chunk_bytes = kept.clone(), chunk.nbytes()
    del batch, chunk
    gc.collect()
    assert shared_memory_descriptors() == before + 1
    assert torch.equal(kept, expected)
    assert kept.untyped_storage().nbytes() == chunk_bytes > 200 * 4 * 4
    del kept
    assert shared_memory_descriptors() == before


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_samples_of_two_dtypes_are_promoted_in_a_worker_too(workers):
    context = {"multiprocessing_context": "fork"} if workers else {}
    batch = next(iter(loader(Mixed(1), workers=workers, **context)))
    assert batch.dtype == torch.float64
    assert batch.tolist() == [[0], [1], [2], [3]]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_ragged_samples_are_named_in_a_worker_too(workers):
    context = {"multiprocessing_context": "fork"} if workers else {}
    with pytest.raises(RuntimeError) as caught:
        next(iter(loader(Ragged(1), workers=workers, **context)))
    message = "sample['boxes'][0]: " + RAGGED.replace("entry 1", "entry 3")
    assert message in str(caught.value)
    # In a cycle, the loader's iterator would later wait 5 s for each of its workers.
    caught.value.__traceback__ = None
    del caught


def test_the_thread_of_the_dataloader_pins_leaf_by_leaf(device):
    """So with tdcopier `pin_memory` is better left off."""
    (batch, _) = loader(Nested(5), workers=0, pin_memory=True)
    leaves = leaves_of(batch)
    assert all(leaf.is_pinned() for leaf in leaves)
    assert len({leaf.untyped_storage().data_ptr() for leaf in leaves}) == len(leaves)


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_tensordict_comes_from_a_worker_in_one_chunk_per_dtype(context, no_garbage):
    dataset = Tensordicts(100, length=4)
    before = shared_memory_descriptors()
    (batch,) = loader(dataset, multiprocessing_context=context)
    leaves = [*(batch["td"]["many", f"x{k}"] for k in range(100)), batch["index"]]
    assert shared_memory_descriptors() - before == len(dtypes_of(leaves))
    expected = torch.stack([dataset[i]["td"] for i in range(4)])
    assert (batch["td"] == expected).all()
    assert_one_chunk_per_dtype(leaves)
    assert batch["td"].device == torch.device("cpu")
