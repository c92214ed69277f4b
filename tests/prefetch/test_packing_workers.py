"""A loader's workers pack the batches of `prefetch`; its user sees no parcel, and no difference."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from collate_support import CONTEXTS, Boxes, Nested, Ragged, Tensordicts, as_boxes, assert_like
from tensordict import TensorDict
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

import tdcopier
from tdcopier import Parcel


def with_its_worker(samples: list[Any]) -> Any:
    info = torch.utils.data.get_worker_info()
    return {"process": torch.tensor(os.getpid()), "worker": -1 if info is None else info.id}


class Fussy:
    """Can be pickled, but not the first time."""

    is_met = False

    def __reduce__(self) -> Any:
        if not self.is_met:
            self.is_met = True
            raise ValueError("not yet")
        return Fussy, ()


def as_fussy(samples: list[Any]) -> Any:
    return [torch.ones(3), Fussy()]


def packed_by_hand(samples: list[Any]) -> Parcel:
    return tdcopier.pack(default_collate(samples))


def loader_of(dataset: Any, collate_fn: Any = None, size: int | None = 4, **options: Any) -> Any:
    options = {"num_workers": 2, "multiprocessing_context": "fork", **options}
    return DataLoader(dataset, size, collate_fn=collate_fn, **options)


def loaded(loader: Any, device: str, packed: int | None = None, **options: Any) -> list[Any]:
    """Return the batches of a pass, all or `packed` of which workers must have packed."""
    with tdcopier.prefetch(loader, device, **options) as batches:
        found = list(batches)
        assert batches.stats.packed_batches == (len(found) if packed is None else packed)
        assert (batches.stats.why_unpacked is None) == (packed is None)
    return found


NAMES = ["torch's", "collate", "as_boxes"]


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("collate_fn", [None, tdcopier.collate, as_boxes], ids=NAMES)
def test_batches_are_those_of_the_loader(device, context, collate_fn):
    loader = loader_of(Nested(30, 10), collate_fn, multiprocessing_context=context)
    expected = list(loader)
    assert len(expected) == 3
    assert_like(loaded(loader, device), tdcopier.copy(expected, device))
    assert_like(list(loader), expected)  # no parcels
    assert loader.collate_fn is (collate_fn or default_collate)


def test_tensordicts_arrive_as_tensordicts(device):
    loader = loader_of(Tensordicts(5, 10), tdcopier.collate)
    for got, expected in zip(loaded(loader, device), loader, strict=True):
        assert type(got["td"]) is TensorDict
        assert got["td"].device == torch.device(device)
        assert_like(got["td"].to_dict(), tdcopier.copy(expected["td"].to_dict(), device))


class Stream(IterableDataset[Any]):
    """Numbers, of which each worker gives its own."""

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        yield from (torch.tensor([n, worker]) for n in range(worker, 21, workers))


@pytest.mark.parametrize("size", [4, None])
def test_iterable_datasets_and_single_samples(device, size):
    loader = loader_of(Stream(), size=size)
    assert_like(loaded(loader, device), tdcopier.copy(list(loader), device))


def test_one_seed_gives_the_batches_that_the_loader_gives(device):
    class Noisy(Nested):
        def __getitem__(self, index: int) -> Any:
            return torch.rand(3)

    generator = torch.Generator()
    loader = loader_of(Noisy(0), shuffle=True, generator=generator)
    generator.manual_seed(3)
    expected = list(loader)
    assert not torch.equal(expected[0], next(iter(loader)))
    generator.manual_seed(3)
    assert_like(loaded(loader, device), tdcopier.copy(expected, device))


@pytest.mark.parametrize("collate_fn", [tdcopier.packed(), packed_by_hand], ids=["packed", "pack"])
def test_a_collate_function_that_packs_is_left_alone(device, collate_fn):
    loader = loader_of(Nested(5), collate_fn)
    assert_like(loaded(loader, device), tdcopier.copy(list(loader_of(Nested(5))), device))
    assert type(next(iter(loader))) is Parcel


# ---- the loader's other attributes ---------------------------------------------------------------


def test_persistent_workers_stay_for_later_prefetchers_and_are_not_the_users(device):
    loader = loader_of(Nested(5), with_its_worker, persistent_workers=True)
    [first, second, again] = [
        {int(batch["process"]) for batch in loaded(loader, device)} for _ in range(3)
    ]
    assert first == second == again
    own = {int(batch["process"]) for batch in loader}
    assert len(own) == len(first) == 2
    assert not own & first
    assert own == {int(batch["process"]) for batch in loader}


def test_what_is_changed_between_passes_holds_for_the_next(device):
    loader = loader_of(Nested(5))
    with tdcopier.prefetch(loader, device) as batches:
        assert sorted(next(iter(batches))) == sorted(next(iter(loader)))
        loader.collate_fn = as_boxes
        assert type(next(iter(batches))) is Boxes
        loader.collate_fn = tdcopier.packed(as_boxes)
        assert type(next(iter(batches))) is Boxes


def test_memory_is_not_pinned_by_the_loaders_thread(device, monkeypatch):
    pinning, begun = torch.utils.data._utils.pin_memory, []
    monkeypatch.setattr(pinning, "_pin_memory_loop", lambda *_: begun.append(1))
    loader = loader_of(Nested(5), pin_memory=True, timeout=5)
    assert_like(loaded(loader, device), tdcopier.copy(list(loader_of(Nested(5))), device))
    assert loader.pin_memory
    assert not begun


def test_two_passes_over_one_loader_at_once(device):
    loader = loader_of(Nested(5, 12))
    expected = tdcopier.copy(list(loader), device)
    with tdcopier.prefetch(loader, device) as one, tdcopier.prefetch(loader, device) as other:
        pairs = list(zip(one, other, strict=True))
    assert_like([list(each) for each in zip(*pairs, strict=True)], [expected, expected])


def test_a_pass_that_is_left_is_begun_anew(device):
    loader = loader_of(Nested(5, 24))
    expected = tdcopier.copy(list(loader), device)
    with tdcopier.prefetch(loader, device) as batches:
        for _ in range(3):
            assert_like(next(iter(batches)), expected[0])
        assert_like(list(batches), expected)


# ---- not packed ----------------------------------------------------------------------------------


def test_a_batch_that_cannot_be_packed_comes_as_torch_sends_it(device):
    loader = loader_of(Nested(5), as_fussy)
    with tdcopier.prefetch(loader, device) as batches:
        found = list(batches)
        assert batches.stats.packed_batches == 0
        assert "not yet" in (batches.stats.why_unpacked or "")
    assert_like([leaf for leaf, _ in found], [torch.ones(3, device=device)] * 2)
    assert [type(each) for _, each in found] == [Fussy] * 2


def with_a_pipe(samples: list[Any]) -> Any:
    reader, writer = multiprocessing.Pipe(duplex=False)
    writer.send("from the worker")
    return [torch.ones(3), reader]


def test_what_only_torch_can_send_arrives(device):
    with tdcopier.prefetch(loader_of(Nested(5), with_a_pipe), device) as batches:
        for _, reader in batches:
            with reader:
                assert reader.recv() == "from the worker"
        assert "cannot be pickled" in (batches.stats.why_unpacked or "")


class OneEndsFirst(IterableDataset[Any]):
    """The second worker has one sample, and ends before the first one has made any."""

    def __iter__(self) -> Iterator[Any]:
        info: Any = torch.utils.data.get_worker_info()
        yield from [10] if info.id == 1 else self._slowly()

    def _slowly(self) -> Iterator[Any]:
        for number in range(3):
            time.sleep(1 if number == 0 else 0)
            yield number


def with_a_tensor_and_a_pipe(samples: list[Any]) -> Any:
    reader, _ = multiprocessing.Pipe(duplex=False)
    return [torch.tensor(samples[0]), reader]


@pytest.mark.parametrize("strategy", ["file_descriptor", "file_system"])
def test_batches_that_only_torch_can_send_outlive_their_worker(device, strategy):
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy(strategy)
    try:
        loader = loader_of(OneEndsFirst(), with_a_tensor_and_a_pipe, size=1)
        with tdcopier.prefetch(loader, device) as batches:
            assert [number.item() for number, _ in batches] == [0, 10, 1, 2]
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


def with_a_lock(samples: list[Any]) -> Any:
    return {"x": torch.ones(3), "lock": threading.Lock()}


def test_a_batch_that_no_way_can_send_is_an_error_in_the_loop(device):
    loader = loader_of(Nested(5), with_a_lock, num_workers=1)
    with (
        tdcopier.prefetch(loader, device) as batches,
        pytest.raises(TypeError, match=r"data\['lock'\] cannot be pickled"),
    ):
        next(iter(batches))


class OwnIteration(DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return (batch["index"] for batch in super().__iter__())


class WithState(DataLoader[Any]):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Indices(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return {"index": index}


def forking(cls: type[DataLoader[Any]]) -> DataLoader[Any]:
    return cls(Indices(), 4, num_workers=1, multiprocessing_context="fork")


@pytest.mark.parametrize(
    ("make", "options", "why"),
    [
        (
            lambda: list(loader_of(Indices())),
            {},
            "the source is no DataLoader of torch, but a list",
        ),
        (lambda: DataLoader(Indices(), 4), {}, "the loader has no workers"),
        (lambda: loader_of(Indices()), {"pack_in_workers": False}, "pack_in_workers is False"),
        (lambda: loader_of(Indices()), {"on_unknown": "raise"}, "on_unknown looks for values"),
        (lambda: forking(OwnIteration), {}, "has its own __iter__"),
        (lambda: forking(WithState), {}, "has a state"),
    ],
)
def test_why_workers_do_not_pack_is_told(device, make, options, why):
    source = make()
    with tdcopier.prefetch(source, device, **options) as batches:
        assert why in (batches.stats.why_unpacked or "")
        found = list(batches)
        assert why in (batches.stats.why_unpacked or "")
        assert batches.stats.packed_batches == 0
    assert_like(found, tdcopier.copy(list(source), device))


def test_batches_for_the_host_are_not_packed(device):
    assert_like(loaded(loader_of(Nested(5)), "cpu", packed=0), list(loader_of(Nested(5))))


def test_the_option_is_a_bool(device):
    with pytest.raises(TypeError, match="pack_in_workers"):
        tdcopier.prefetch([], device, pack_in_workers="no")  # type: ignore[call-overload]


# ---- errors --------------------------------------------------------------------------------------


class Failing(Nested):
    def __getitem__(self, index: int) -> Any:
        if index == 6:
            raise LookupError("row 6 is lost")
        return super().__getitem__(index)


def failing_collate(samples: list[Any]) -> Any:
    raise ZeroDivisionError("no batch")


@pytest.mark.parametrize(
    ("dataset", "collate_fn"),
    [
        (Failing(5), None),
        (Nested(5), failing_collate),
        (Ragged(0), None),
        (Ragged(0), tdcopier.collate),
    ],
    ids=["dataset", "collate function", "torch's", "ours"],
)
def test_errors_are_those_of_the_loader(device, dataset, collate_fn):
    loader = loader_of(dataset, collate_fn)
    assert error_of(loaded, loader, device) == error_of(list, loader)


def error_of(call: Any, *args: Any) -> Any:
    try:
        call(*args)
    except (LookupError, ZeroDivisionError, RuntimeError) as error:
        error.__traceback__ = None  # in a cycle, where torch's iterator takes 10 s to end
        return type(error), str(error).splitlines()[-1]
    raise AssertionError("there was no error")


class Dying(Nested):
    def __getitem__(self, index: int) -> Any:
        if index == 9:
            os._exit(3)
        return super().__getitem__(index)


def test_a_worker_that_dies_is_told_as_by_torch(device):
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        loaded(loader_of(Dying(5, 16)), device)


class Slow(Nested):
    def __getitem__(self, index: int) -> Any:
        time.sleep(5 if index == 5 else 0)
        return super().__getitem__(index)


def test_the_loaders_timeout_holds(device):
    with pytest.raises(RuntimeError, match="timed out after 1 s"):
        loaded(loader_of(Slow(5), timeout=1), device)


def test_pack_itself_as_the_collate_function_packs_into_slabs(device):
    samples = [{"x": torch.full((3_000 + i,), float(i))} for i in range(8)]
    with tdcopier.prefetch(loader_of(samples, tdcopier.pack, 4), device) as batches:
        found = list(batches)
        assert batches.stats.slab_batches == 2
    for i, sample in enumerate(sample for batch in found for sample in batch):
        assert torch.equal(sample["x"].cpu(), samples[i]["x"])


@pytest.mark.parametrize(
    ("workers", "told"),
    [(1, "with prefetch, its workers pack"), (0, "no packing: the loader has no workers")],
)
def test_explain_says_whether_workers_pack(workers, told, device):
    options = {"multiprocessing_context": None} if workers == 0 else {}
    (row,) = tdcopier.explain(loader_of(Nested(3), num_workers=workers, **options), device)
    assert row.treatment == "opaque"
    assert told in row.reason
