"""The state of a source that is read ahead: a run that resumes loses and repeats nothing."""

from __future__ import annotations

import asyncio
import copy
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from each_case import together
from prefetch_support import StatefulLoader, value_of, values_of
from torch.utils.data import DataLoader, Dataset

import tdcopier

BATCHES = StatefulLoader.BATCHES


class Numbers(Dataset):
    def __len__(self) -> int:
        return 4 * BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


def of_torchdata(workers: int) -> Any:
    module = pytest.importorskip("torchdata.stateful_dataloader", exc_type=ImportError)
    options = {"multiprocessing_context": "forkserver"} if workers else {}
    return module.StatefulDataLoader(Numbers(), batch_size=4, num_workers=workers, **options)


LOADERS = {
    "its stand-in": StatefulLoader,
    "torchdata": lambda: of_torchdata(0),
    "torchdata, workers": lambda: of_torchdata(2),
}


def number_of(one: Any) -> int:
    return int(one[0]) // 4 if isinstance(one, torch.Tensor) else value_of(one)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@together("taken", [0, 1, 3, BATCHES - 1])
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
    begin = prefetcher.state_dict()
    next(prefetcher)
    assert begin == {"epoch": 0, "next": 0}
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


# ---- seeds ---------------------------------------------------------------------------------------


class Noisy(Numbers):
    """Draws from torch's global generator, as transforms of images do."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.stack([torch.tensor(float(index)), torch.rand(())])


def epochs(device: str, pause_s: float, **options: Any) -> list[list[float]]:
    """Returns the batches of two epochs, the first of which ends early."""
    torch.manual_seed(3)
    loader: DataLoader[Any] = DataLoader(Noisy(), batch_size=4, shuffle=True)
    batches: tdcopier.Prefetcher[torch.Tensor] = tdcopier.prefetch(loader, device, **options)
    got = []
    for taken in (4, BATCHES):
        for one in itertools.islice(batches, taken):
            got.append(one.flatten().tolist())
            time.sleep(pause_s)
            torch.rand(2)  # dropout on the host, say
    return got


@pytest.mark.parametrize("options", [{}, {"depth": 1}, {"depth": 4}, {"threaded": False}], ids=str)
def test_the_same_seed_gives_the_same_batches_however_fast_the_loop_is(device, options):
    first = epochs(device, 0, **options)
    assert epochs(device, 0.005, **options) == first
    assert epochs(device, 0, **options) == first
    assert sorted(row for one in first[4:] for row in one[::2]) == list(range(4 * BATCHES))


def test_a_loader_without_workers_is_read_in_the_loop_unless_it_is_said_otherwise(device):
    class Where(Numbers):
        def __getitem__(self, index: int) -> torch.Tensor:
            readers.add(threading.current_thread().name)
            return torch.tensor(index)

    for threaded, in_loop in ((None, True), (False, True), (True, False)):
        readers: set[str] = set()
        list(tdcopier.prefetch(DataLoader(Where()), device, threaded=threaded))
        assert readers == {threading.current_thread().name if in_loop else "tdcopier-prefetch"}


def test_an_event_loop_has_a_loader_without_workers_read_by_a_thread(device):
    async def read() -> list[int]:
        batches: tdcopier.Prefetcher[torch.Tensor] = tdcopier.prefetch(
            DataLoader(Numbers()), device
        )
        got = [int(one) async for one in batches]
        next(iter(batches))
        with pytest.raises(TypeError, match="this pass is read by the loop that began it"):
            await anext(batches)
        batches.close()
        return got

    assert asyncio.run(read()) == list(range(4 * BATCHES))
