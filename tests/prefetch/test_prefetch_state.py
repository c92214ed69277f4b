"""The state of a source that is read ahead: a run that resumes loses and repeats nothing."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from prefetch_support import StatefulLoader, value_of, values_of
from torch.utils.data import Dataset

import tdcopier

BATCHES = StatefulLoader.BATCHES


class Numbers(Dataset):
    def __len__(self) -> int:
        return 4 * BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


def of_torchdata(workers: int) -> Any:
    module = pytest.importorskip("torchdata.stateful_dataloader", exc_type=ImportError)
    options = {"multiprocessing_context": "spawn"} if workers else {}
    return module.StatefulDataLoader(Numbers(), batch_size=4, num_workers=workers, **options)


LOADERS = {
    "its stand-in": StatefulLoader,
    "torchdata": lambda: of_torchdata(0),
    "torchdata, workers": lambda: of_torchdata(2),
}


def number_of(one: Any) -> int:
    return int(one[0]) // 4 if isinstance(one, torch.Tensor) else value_of(one)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("taken", [0, 1, 3, BATCHES - 1])
@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("kind", LOADERS)
def test_a_resumed_run_goes_on_after_the_last_batch_that_was_yielded(prefetch, kind, depth, taken):
    if "workers" in kind and (depth, taken) != (2, 3):
        pytest.skip("each run starts processes: one is enough")
    prefetcher = prefetch(LOADERS[kind](), depth=depth)
    passed = [number_of(one) for one in itertools.islice(prefetcher, taken)]
    state = copy.deepcopy(prefetcher.state_dict())
    prefetcher.close()
    resumed = prefetch(LOADERS[kind](), depth=depth)
    resumed.load_state_dict(state)
    assert passed + [number_of(one) for one in resumed] == list(range(BATCHES))


def test_the_same_prefetcher_goes_back_to_a_state(prefetch):
    prefetcher = prefetch(StatefulLoader(), depth=3)
    assert values_of(itertools.islice(prefetcher, 2)) == [0, 1]
    state = prefetcher.state_dict()
    assert values_of(itertools.islice(prefetcher, 1)) != []
    prefetcher.load_state_dict(state)
    assert values_of(prefetcher) == list(range(2, BATCHES))


def test_a_state_between_epochs_is_that_of_the_next_one(prefetch):
    prefetcher = prefetch(StatefulLoader())
    assert values_of(prefetcher) == list(range(BATCHES))
    assert prefetcher.state_dict() == {"epoch": 1, "next": 0}
    assert number_of(next(iter(prefetcher))) == BATCHES
    assert prefetcher.state_dict() == {"epoch": 1, "next": 1}


def test_a_state_is_a_copy_and_stays_after_the_end(prefetch):
    source = StatefulLoader()
    prefetcher = prefetch(source)
    assert prefetcher.state_dict() == {"epoch": 0, "next": 0}
    next(prefetcher)
    first = prefetcher.state_dict()
    next(prefetcher)
    assert first == {"epoch": 0, "next": 1}
    prefetcher.close()
    assert prefetcher.state_dict() == {"epoch": 0, "next": 2}
    with pytest.raises(RuntimeError, match="this prefetcher is closed"):
        prefetcher.load_state_dict(first)
    assert source.position != first


class Refusing(StatefulLoader):
    def state_dict(self) -> dict[str, int]:
        raise ValueError("not now")


def test_an_error_of_state_dict_is_raised_where_it_is_asked_for(prefetch):
    prefetcher = prefetch(Refusing())
    assert values_of(itertools.islice(prefetcher, 3)) == [0, 1, 2]
    with pytest.raises(RuntimeError, match=r"state_dict\(\) of the source failed: .*: not now"):
        prefetcher.state_dict()
    assert number_of(next(prefetcher)) == 3


def test_a_batch_whose_copy_fails_counts_as_yielded(prefetch, device):
    class Broken(StatefulLoader):
        def __iter__(self) -> Iterator[Any]:
            for one in super().__iter__():
                yield object() if self.position["next"] == 2 else one

    prefetcher = prefetch(Broken(), on_unknown="raise")
    next(prefetcher)
    with pytest.raises(TypeError, match="data is"):
        next(prefetcher)
    assert prefetcher.state_dict() == {"epoch": 0, "next": 2}
    assert number_of(next(prefetcher)) == 2


def test_a_replay_buffer_of_torchrl_is_not_copied_for_each_batch():
    class Buffer(StatefulLoader):
        __module__ = "torchrl.data.replay_buffers"

    assert not hasattr(tdcopier.prefetch(Buffer(), "cpu"), "state_dict")
