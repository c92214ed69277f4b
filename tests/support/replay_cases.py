"""Replay buffers in torchrl's classes and in ours: data of each kind, and comparison of operations.

An operation is run on torchrl's buffer and on ours. It notes the outcome of each of its steps: a
value, or the error, with the warnings. The two lists of outcomes must be the same.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, is_tensor_collection, tensorclass
from tensordict_same import assert_same_tensordict
from torch.utils._pytree import tree_map
from torchrl.data import (
    ImmutableDatasetWriter,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from torchrl_support import STORAGES

from tdcopier.torchrl import PackedTensorDictReplayBuffer

CAPACITY, BATCH, COLUMNS, EPISODE = 60, 12, 3, 10


class Pair(NamedTuple):
    observation: Any
    episode: Any


@tensorclass
class Steps:
    observation: torch.Tensor
    pixels: torch.Tensor
    episode: torch.Tensor
    rank: torch.Tensor


# ---- data ----------------------------------------------------------------------------------------


def _numbers(rows: int, ndim: int, start: int) -> torch.Tensor:
    """Returns the numbers of steps: [rows], or [columns, rows / columns]."""
    numbers = torch.arange(start, start + rows)
    return numbers if ndim == 1 else numbers.view(COLUMNS, -1)


def _observation(numbers: torch.Tensor) -> torch.Tensor:
    return numbers[..., None] + torch.arange(5) / 10


def _pixels(numbers: torch.Tensor) -> torch.Tensor:
    return (numbers[..., None, None] + torch.arange(12).view(3, 4)).to(torch.uint8)


def _done(numbers: torch.Tensor) -> torch.Tensor:
    return (numbers % EPISODE == EPISODE - 1).unsqueeze(-1)


def _tensordict(numbers: torch.Tensor) -> TensorDict:
    done = _done(numbers)
    return TensorDict(
        {
            "observation": _observation(numbers),
            "pixels": _pixels(numbers),
            "episode": numbers // EPISODE,
            "rank": (numbers * 7 % 41).float(),
            "next": {
                "reward": numbers.unsqueeze(-1) / 7,
                "done": done,
                "terminated": done & (numbers % 20 > 9).unsqueeze(-1),
                "truncated": torch.zeros_like(done),
            },
        },
        numbers.shape,
    )


def _tensorclass(numbers: torch.Tensor) -> Steps:
    rank = (numbers * 7 % 41).float()
    leaves = (_observation(numbers), _pixels(numbers), numbers // EPISODE, rank)
    return Steps(*leaves, batch_size=numbers.shape)


def _dict(numbers: torch.Tensor) -> dict[str, Any]:
    return {
        "observation": _observation(numbers),
        "episode": numbers // EPISODE,
        "next": {"done": _done(numbers), "pixels": _pixels(numbers)},
    }


def _tuple(numbers: torch.Tensor) -> tuple[Any, ...]:
    return _observation(numbers), (numbers // EPISODE, _pixels(numbers))


def _lists(numbers: torch.Tensor) -> dict[str, Any]:
    return {"both": [numbers // EPISODE, [_pixels(numbers), _observation(numbers)]]}


def _pair(numbers: torch.Tensor) -> Pair:
    return Pair(_observation(numbers), numbers // EPISODE)


def _items(numbers: torch.Tensor) -> list[Any]:
    return [_dict(number) for number in numbers]


CONTAINERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "TensorDict": _tensordict,
    "tensorclass": _tensorclass,
    "dict": _dict,
    "tuple": _tuple,
    "list": _lists,
    "named tuple": _pair,
    "list of items": _items,
    "tensor": _observation,
}


# ---- parts of a buffer ---------------------------------------------------------------------------


def _prioritized_loads() -> bool:
    try:
        PrioritizedSampler(4, 0.7, 0.5)
    except RuntimeError:
        return False
    return True


SAMPLERS: dict[str, Callable[[], Any]] = {
    "random": RandomSampler,
    "without replacement": SamplerWithoutReplacement,
    "slices": lambda: SliceSampler(num_slices=4, traj_key="episode", strict_length=False),
    "slices without replacement": lambda: SliceSamplerWithoutReplacement(
        num_slices=4, traj_key="episode", strict_length=False
    ),
}
if _prioritized_loads():  # torchrl's compiled part fits this torch
    SAMPLERS["prioritized"] = lambda: PrioritizedSampler(CAPACITY, 0.7, 0.5)
WRITERS: dict[str, Callable[[], Any]] = {
    "round robin": RoundRobinWriter,
    "max value": lambda: TensorDictMaxValueWriter(rank_key="rank"),
    "immutable": ImmutableDatasetWriter,
}


class Case(NamedTuple):
    """A storage, the data in it, and the class of the buffer."""

    storage: str
    ndim: int
    container: str
    is_tensordict_buffer: bool

    def __str__(self) -> str:
        buffer = "TensorDictReplayBuffer" if self.is_tensordict_buffer else "ReplayBuffer"
        return f"{self.storage}-{self.ndim}d-{self.container}-{buffer}"

    def data(self, rows: int, start: int = 0) -> Any:
        """Makes steps whose values count up from `start`."""
        return CONTAINERS[self.container](_numbers(rows, self.ndim, start))

    def item(self, start: int) -> Any:
        """Makes one step, or with two dimensions one step of each column."""
        rows = self.data(COLUMNS if self.ndim == 2 else 1, start)
        if isinstance(rows, list):
            return rows[0]
        if is_tensor_collection(rows) or isinstance(rows, torch.Tensor):
            return rows[0] if self.ndim == 1 else rows[:, 0]
        return tree_map(lambda leaf: leaf.select(self.ndim - 1, 0), rows)

    def storage_class(self, ours: bool) -> Any:
        return STORAGES[self.storage][ours]

    def buffer(
        self,
        ours: bool,
        sampler: str = "random",
        writer: str = "round robin",
        storage: dict[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        """Makes an empty buffer, of torchrl's classes or of ours."""
        buffer_class = ReplayBuffer
        if self.is_tensordict_buffer:
            buffer_class = PackedTensorDictReplayBuffer if ours else TensorDictReplayBuffer
        made = WRITERS[writer]
        if self.is_tensordict_buffer and made is RoundRobinWriter:
            made = TensorDictRoundRobinWriter
        options = {"batch_size": BATCH, **options}
        return buffer_class(
            storage=self.storage_class(ours)(CAPACITY, ndim=self.ndim, **(storage or {})),
            sampler=SAMPLERS[sampler](),
            writer=made(),
            generator=torch.Generator().manual_seed(5),
            **options,
        )

    def filled(
        self, ours: bool, rows: int = 45, writer: str = "round robin", **options: Any
    ) -> Any:
        """Makes a buffer with rows, which a writer that refuses them finds there already."""
        if writer != "immutable":
            buffer = self.buffer(ours, writer=writer, **options)
            buffer.extend(self.data(rows))
            return buffer
        buffer = self.buffer(ours, **options)
        buffer.extend(self.data(rows))
        buffer.set_writer(ImmutableDatasetWriter())
        return buffer


_REFUSED = {("memmap", "named tuple"), (2, "list of items")}
"""Data that torchrl does not store, in files or in two dimensions."""
KINDS = [(container, False) for container in CONTAINERS] + [("TensorDict", True)]
CASES = [
    Case(storage, ndim, container, is_tensordict_buffer)
    for storage, ndim, (container, is_tensordict_buffer) in itertools.product(
        STORAGES, (1, 2), KINDS
    )
    # torchrl keeps no named tuples in files, and takes no lists of items in two dimensions
    if (storage, container) != ("memmap", "named tuple")
    and (ndim, container) != (2, "list of items")
]


# ---- comparison ----------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """The value of one step of an operation, or its error, and the warnings."""

    step: str
    value: Any
    error: type | None
    warned: list[type]
    text: str
    """Of the error and the warnings, for messages."""


class Notes(list[Outcome]):
    """Outcomes of the steps of one operation on one buffer."""

    def step(self, name: str, action: Callable[..., Any], *given: Any, **options: Any) -> Any:
        """Runs a step and notes its outcome; returns the value, or None after an error."""
        value, error, text = None, None, ""
        torch.default_generator.manual_seed(0)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            # Python 3.12 says so where garbage with semaphores is collected, at any time.
            warnings.filterwarnings("ignore", "ResourceTracker called reentrantly", UserWarning)
            try:
                value = action(*given, **options)
            except Exception as raised:
                error, text = type(raised), str(raised)
        text = "; ".join([text, *(str(each.message) for each in seen)])
        self.append(Outcome(name, value, error, [each.category for each in seen], text))
        return value


def assert_same_outcomes(got: Notes, expected: Notes, where: str) -> int:
    """Asserts equal outcomes of our buffer and of torchrl's; returns the number of values."""
    assert [each.step for each in got] == [each.step for each in expected], where
    for ours, theirs in zip(got, expected, strict=True):
        path = f"{where}: {theirs.step}"
        texts = f"ours: {ours.text!r}; torchrl's: {theirs.text!r}"
        assert ours.error is theirs.error, f"{path}: {ours.error} for {theirs.error}; {texts}"
        assert ours.warned == theirs.warned, f"{path}: warned {ours.warned}; {texts}"
        assert_same_value(ours.value, theirs.value, path)
    return sum(each.error is None for each in expected)


def assert_same_value(got: Any, expected: Any, path: str) -> None:
    """Asserts same classes and values in nested containers, TensorDicts and tensors."""
    if isinstance(expected, torch.Tensor) or is_tensor_collection(expected):
        assert_same_tensordict(got, expected, path)
        return
    assert type(got) is type(expected), f"{path}: {type(got)} is not {type(expected)}"
    if isinstance(expected, dict):
        assert list(got) == list(expected), f"{path}: keys {list(got)}, not {list(expected)}"
        for key in expected:
            assert_same_value(got[key], expected[key], f"{path}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected), f"{path}: {len(got)} items, not {len(expected)}"
        for i, (a, b) in enumerate(zip(got, expected, strict=True)):
            assert_same_value(a, b, f"{path}[{i}]")
    elif isinstance(expected, np.ndarray):
        assert got.dtype == expected.dtype, path
        assert np.array_equal(got, expected), path
    else:
        assert got == expected, f"{path}: {got!r} is not {expected!r}"
