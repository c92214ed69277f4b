"""Mistakes of new users: what `prefetch` and a prefetcher say to each of them."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import AsyncIterator, Iterator
from functools import partial, wraps
from typing import Any

import numpy as np
import pytest
import torch
from prefetch_support import Counted, batch, value_of, values_of
from support import run_python
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import tdcopier

# ---- options -------------------------------------------------------------------------------------

OF_THE_LOADER = [
    "num_workers",
    "batch_size",
    "shuffle",
    "collate_fn",
    "drop_last",
    "sampler",
    "batch_sampler",
    "persistent_workers",
]


@pytest.mark.parametrize("name", OF_THE_LOADER)
def test_an_option_of_the_data_loader_is_sent_there(prefetch, name):
    with pytest.raises(
        TypeError,
        match=rf"^prefetch\(\) takes no {name}, which is an option of DataLoader: .*"
        rf"DataLoader\(dataset, {name}=\.\.\.\)",
    ):
        prefetch([batch(0)], **{name: 2})


def test_options_that_have_another_way_in_prefetch_say_which(prefetch):
    with pytest.raises(
        TypeError, match=r"^prefetch\(\) takes no pin_memory, .*: leave it off there"
    ):
        prefetch([batch(0)], pin_memory=True)
    with pytest.raises(TypeError, match=r"^prefetch\(\) takes no prefetch_factor, .* are depth="):
        prefetch([batch(0)], prefetch_factor=2)


def test_an_unknown_option_names_prefetch_and_what_it_takes(prefetch):
    with pytest.raises(
        TypeError,
        match=r"^prefetch\(\) got .* 'pinned': .* depth, threaded, pack_in_workers, .*on_unknown$",
    ):
        prefetch([batch(0)], pinned=True)
    with pytest.raises(TypeError, match=r"^prefetch\(\) takes no non_blocking"):
        prefetch([batch(0)], non_blocking=True)
    with pytest.raises(TypeError, match=r"^prefetch\(\) keeps dtypes"):
        prefetch([batch(0)], dtype=torch.float16)


# ---- sources ------------------------------------------------------------------------------------


class OverDict:
    """A callable whose other attributes are the keys of a dict."""

    def __init__(self) -> None:
        self.__dict__["values"] = {}

    def __getattr__(self, name: str) -> Any:
        return self.values[name]  # a KeyError

    def __call__(self) -> Any:
        return batch(1)


def with_arguments() -> Any:
    def inner(number: int) -> Any:
        return batch(number)

    inner.__signature__ = inspect.signature(inner)  # type: ignore[attr-defined]

    @wraps(inner)  # which copies the signature
    def gives(*_: Any) -> Any:
        return inner(1)

    return gives


def array_of_batches() -> Any:
    made = np.empty(2, object)
    made[:] = [batch(1), batch(1)]
    return made


@pytest.mark.parametrize("made", [OverDict, with_arguments, array_of_batches])
def test_what_only_looks_like_a_mistake_is_read(prefetch, made):
    assert value_of(next(prefetch(made()))) == 1


class Failing:
    """A source whose property fails."""

    def __iter__(self) -> Iterator[Any]:
        return iter([batch(0)])

    @property
    def dataset(self) -> Any:
        raise AttributeError("of the property")


@pytest.mark.parametrize("name", ["state_dict", "load_state_dict"])
def test_a_source_without_a_state_gives_none(prefetch, name):
    prefetcher = prefetch([batch(0)])
    assert not hasattr(prefetcher, name)
    with pytest.raises(AttributeError, match=rf"no attribute '{name}': its source has none"):
        getattr(prefetcher, name)


def test_an_error_in_a_property_of_the_source_is_told_as_it_is(prefetch):
    with pytest.raises(AttributeError, match=r"^of the property$"):
        prefetch(Failing()).dataset  # noqa: B018


Pair = namedtuple("Pair", ["first", "second"])
ONE_BATCH = (
    r"^source is one batch \({}\).*start_copy\(batch, device\).*prefetch\(\[batch\], device\)"
)
ROWS = r".*iter\(batch\)$"


class Samples(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return batch(index)


class Yields:
    def __call__(self) -> Iterator[Any]:
        yield batch(0)


def generates() -> Iterator[Any]:
    yield batch(0)


def needs(index: int) -> Any:
    return batch(index)


def needs_by_name(*, index: int) -> Any:
    return batch(index)


async def awaits() -> Any:
    return batch(0)


async def yields_later() -> AsyncIterator[Any]:
    yield batch(0)


NO_SOURCES: dict[str, tuple[Any, str]] = {
    "dict": (batch(0), ONE_BATCH.format("dict")),
    "OrderedDict": (OrderedDict(x=torch.ones(2)), ONE_BATCH.format("OrderedDict")),
    "UserDict": (UserDict(x=torch.ones(2)), ONE_BATCH.format("UserDict")),
    "named tuple": (Pair(torch.ones(2), 1), ONE_BATCH.format("Pair")),
    "tensor": (torch.ones(2, 3), ONE_BATCH.format("Tensor") + ROWS),
    "tensor without rows": (torch.tensor(1.0), ONE_BATCH.format("Tensor")),
    "array": (np.ones((2, 3)), ONE_BATCH.format("ndarray") + ROWS),
    "str": ("cuda", r"got the str 'cuda': the order is prefetch\(source, device\)"),
    "bytes": (b"rows", "an iterable of batches.*got the bytes b'rows'"),
    "set": ({1, 2}, "^source is a set, which has no order: pass a list"),
    "frozenset": (frozenset([1]), "^source is a frozenset, which has no order"),
    "handle": (tdcopier.start_copy([], "cpu"), r"handle of one copy.*wait\(\) or get\(\)"),
    "module": (nn.Linear(2, 2), r"^source is a module \(Linear\).* pass an iterable of batches"),
    "modules": (nn.Sequential(nn.ReLU()), r"^source is a module \(Sequential\)"),
    "class": (Counted, "^source is the class Counted: pass an instance"),
    "dataset": (Samples(), r"^source is a dataset \(Samples\).* DataLoader\(dataset, batch_size="),
    "generator function": (
        generates,
        r"^source is a generator function.* call it, as in prefetch\(generates\(\), device\)",
    ),
    "generator method": (Yields(), "^source is a generator function"),
    "arguments": (needs, r"needs\(\) is missing .*'index'.* prefetch\(lambda: needs\(\.\.\.\)"),
    "arguments by name": (needs_by_name, r"needs_by_name\(\) is missing .*'index'"),
    "coroutine function": (awaits, "got an asynchronous one"),
    "asynchronous generator function": (yields_later, "got an asynchronous one"),
    "asynchronous generator": (yields_later(), r"an asynchronous one \(async_generator\)"),
    "None": (None, "must be an iterable of batches, or a callable .* got None$"),
    "int": (3, "must be an iterable of batches, or a callable .* got int$"),
}


@pytest.mark.parametrize(("source", "message"), NO_SOURCES.values(), ids=NO_SOURCES)
def test_what_is_no_source_of_batches_is_refused_with_what_to_do(prefetch, source, message):
    with pytest.raises(TypeError, match=message) as caught:
        prefetch(source)
    assert "\n" not in str(caught.value)


def test_a_tensordict_is_one_batch(prefetch):
    tensordict = pytest.importorskip("tensordict")
    rows = tensordict.TensorDict({"x": torch.arange(4.0)}, [4])
    with pytest.raises(TypeError, match=ONE_BATCH.format("TensorDict") + ROWS):
        prefetch(rows)
    assert [row["x"].item() for row in prefetch(iter(rows))] == [0, 1, 2, 3]


def test_tensordict_is_not_imported_to_check_a_source():
    code = """
import sys, tdcopier
batches = tdcopier.prefetch([1], "cpu")
assert list(batches) == [1]
assert "tensordict" not in sys.modules
"""
    run_python(code)


def test_sources_that_look_like_mistakes_but_are_none_are_taken(prefetch):
    @wraps(needs)
    def with_its_argument() -> Any:
        return needs(1)

    class Tables(Samples):  # a dataset that is iterated as a whole
        def __iter__(self) -> Iterator[Any]:
            return map(batch, range(2))

    class Shards:  # the older protocol of iteration
        def __getitem__(self, index: int) -> Any:
            if index == 2:
                raise IndexError
            return batch(index)

    assert value_of(next(prefetch(partial(needs, 5)))) == 5
    assert value_of(next(prefetch(partial(needs_by_name, index=6)))) == 6
    assert value_of(next(prefetch(with_its_argument))) == 1
    assert value_of(next(prefetch(lambda index=3: batch(index)))) == 3
    for source in (
        Tables(),
        Shards(),
        (batch(0), batch(1)),
        {"a": batch(0), "b": batch(1)}.values(),
    ):
        assert values_of(prefetch(source)) == [0, 1]
    for rows in (torch.arange(6.0).view(3, 2), np.arange(6.0).reshape(3, 2)):
        assert [row.tolist() for row in prefetch(iter(rows))] == [[0, 1], [2, 3], [4, 5]]
    assert list(prefetch(iter(()))) == []


# ---- a prefetcher --------------------------------------------------------------------------------


def test_the_older_of_two_loops_is_told_to_use_a_second_prefetcher(prefetch):
    prefetcher = prefetch([batch(i) for i in range(9)])
    with pytest.raises(RuntimeError, match="has begun; make a second prefetcher for a second loop"):
        list(zip(prefetcher, prefetcher, strict=True))


def test_a_prefetcher_has_the_attributes_of_its_loader(prefetch):
    dataset = TensorDataset(torch.arange(8.0))
    loader = DataLoader(dataset, batch_size=4, drop_last=True)
    with prefetch(loader) as prefetcher:
        for name in {*OF_THE_LOADER, "dataset", "generator", "timeout"} - {"shuffle"}:
            assert getattr(prefetcher, name) is getattr(loader, name)
        assert prefetcher.stats.batches == 0  # its own
        with pytest.raises(AttributeError):
            prefetcher.batch_size = 8
    assert loader.batch_size == 4


def test_a_method_of_the_source_can_be_called_through_the_prefetcher(prefetch):
    class Epochs:
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[Any]:
            yield batch(self.epoch)

    prefetcher = prefetch(Epochs())
    prefetcher.set_epoch(7)
    assert values_of(prefetcher) == [7]


def test_a_name_that_neither_has_is_refused_with_both_classes(prefetch):
    prefetcher = prefetch([batch(0)])
    for name in ("dataset", "batch_size", "clos"):
        assert not hasattr(prefetcher, name)
        with pytest.raises(
            AttributeError, match=rf"'Prefetcher'.* '{name}'.* its source, a 'list'"
        ):
            getattr(prefetcher, name)


def test_private_names_are_not_those_of_the_source(prefetch):
    class Private(Counted):
        _secret = 1

        def __array__(self) -> Any:
            raise AssertionError("asked the source")

    prefetcher = prefetch(Private())
    for name in ("_secret", "__array__", "__wrapped__"):
        with pytest.raises(AttributeError, match=f"'Prefetcher' object has no attribute '{name}'$"):
            getattr(prefetcher, name)


def test_an_object_that_is_not_initialised_has_no_attributes_and_does_not_recurse():
    bare = tdcopier.Prefetcher.__new__(tdcopier.Prefetcher)
    assert not hasattr(bare, "dataset")
    assert not hasattr(bare, "anything")


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_prefetcher_refuses_to_be_copied(prefetch, duplicate):
    prefetcher = prefetch([batch(i) for i in range(3)])
    assert value_of(next(prefetcher)) == 0
    with pytest.raises(TypeError, match="cannot be copied or pickled: make another one over the"):
        duplicate(prefetcher)
    assert value_of(next(prefetcher)) == 1


def test_the_repr_tells_source_target_and_progress(prefetch, device):
    prefetcher = prefetch([batch(i) for i in range(3)], depth=4)
    of = f"<tdcopier.Prefetcher: list to {device}, depth 4, batches so far: "
    assert repr(prefetcher) == f"{of}0, open>"
    next(prefetcher)
    assert repr(prefetcher) == f"{of}1, open>"
    prefetcher.close()
    assert repr(prefetcher) == f"{of}1, closed>"


def test_an_index_is_refused_with_how_to_get_batches(prefetch):
    prefetcher = prefetch([batch(0)])
    with pytest.raises(TypeError, match=r"has no items: loop over it, or call next\(prefetcher\)"):
        prefetcher[0]
    assert values_of(prefetcher) == [0]


# ---- None for a batch ----------------------------------------------------------------------------


@pytest.mark.parametrize("threaded", [True, False])
def test_the_first_none_of_a_callable_ends_the_pass_with_a_sentence(device, threaded):
    left = [batch(0), batch(1)]

    def read() -> Any:
        if left:
            return left.pop(0)
        return None

    message = (
        "read() returned None in place of a batch, as a function without `return` does: let it "
        "return the next batch, and raise StopIteration at the end"
    )
    prefetcher = tdcopier.prefetch(read, device, threaded=threaded)
    taken = []
    with pytest.raises(TypeError) as caught:
        taken.extend(prefetcher)
    assert str(caught.value) == message
    assert len(taken) == 2
    with pytest.raises(StopIteration):
        next(prefetcher)
    with pytest.raises(TypeError, match=r"^source\(\) returned None"):
        next(tdcopier.prefetch(lambda: None, device, threaded=threaded))


def test_none_in_an_iterable_of_batches_is_a_value(device):
    assert list(tdcopier.prefetch([None, 3], device)) == [None, 3]
