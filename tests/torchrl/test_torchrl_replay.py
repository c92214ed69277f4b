"""Each operation of a replay buffer with our classes does what it does with torchrl's own.

For each storage, number of dimensions and kind of data, an operation runs with each sampler and
writer that it concerns.
"""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("torchrl")

from replay_cases import (
    CAPACITY,
    CASES,
    SAMPLERS,
    WRITERS,
    Case,
    Notes,
    assert_same_outcomes,
)
from torch.utils._pytree import tree_map
from torchrl import torchrl_logger

ALL = list(itertools.product(SAMPLERS, WRITERS))
EACH_SAMPLER = [(sampler, "round robin") for sampler in SAMPLERS]
EACH_WRITER = [("random", writer) for writer in WRITERS]
ONE = [("random", "round robin")]


def state(buffer: Any) -> dict[str, Any]:
    """Returns what a buffer shows of itself."""
    return {
        "len": len(buffer),
        "shape": buffer.storage.shape,
        "max_size": buffer.storage.max_size,
        "stats": buffer.stats(),
        "cursor": getattr(buffer.writer, "_cursor", None),
    }


def look(buffer: Any, notes: Notes) -> None:
    """Notes the state and all rows."""
    notes.step("state", lambda: state(buffer))
    notes.step("all rows", lambda: buffer[:])


def draw(buffer: Any, notes: Notes, times: int = 2, **options: Any) -> None:
    for _ in range(times):
        notes.step(f"sample({options})", buffer.sample, **options)
        buffer.synchronize()


def only(notes: Notes, name: str, action: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """Returns what `action` makes, without noting it; None after an error, which is noted."""
    made: list[Any] = []
    notes.step(name, lambda: made.append(action(*given, **options)))
    return made[0] if made else None


def filled(case: Case, ours: bool, notes: Notes, rows: int = 45, **parts: Any) -> Any:
    return only(notes, f"fill with {rows}", case.filled, ours, rows, **parts)


def extend(buffer: Any, notes: Notes, data: Any) -> bool:
    """Notes the index of the new rows; returns False if torchrl wrote only a part of them."""
    buffer.synchronize()  # a sample that is drawn ahead may come before or after
    notes.step("extend", buffer.extend, data)
    return notes[-1].error is None


# ---- operations ----------------------------------------------------------------------------------


def add(case: Case, ours: bool, notes: Notes, **parts: str) -> None:
    buffer = only(notes, "make", case.buffer, ours, **parts)
    if buffer is None:
        return
    for number in range(0, 15, 3):
        notes.step("add", buffer.add, case.item(number))
    look(buffer, notes)
    draw(buffer, notes)


def extend_past_capacity(case: Case, ours: bool, notes: Notes, **parts: str) -> None:
    buffer = only(notes, "make", case.buffer, ours, **parts)
    if buffer is None:
        return
    for rows, start in ((24, 0), (30, 24), (12, 54), (CAPACITY + 15, 100)):
        if not extend(buffer, notes, case.data(rows, start)):
            return
        look(buffer, notes)
        draw(buffer, notes, 1)


def sample(case: Case, ours: bool, notes: Notes, **parts: str) -> None:
    for rows in (45, CAPACITY + 18):
        buffer = filled(case, ours, notes, rows, **parts)
        if buffer is None:
            continue
        draw(buffer, notes)
        draw(buffer, notes, 1, batch_size=8)
        draw(buffer, notes, 1, return_info=True)


def sample_with_include_info(case: Case, ours: bool, notes: Notes, **parts: str) -> None:
    buffer = filled(case, ours, notes, prefetch=1, **parts)
    if buffer is None:
        return
    for value in (True, None, False):
        draw(buffer, notes, 1, include_info=value)
        draw(buffer, notes, 1, include_info=value, return_info=True)


def iterate(case: Case, ours: bool, notes: Notes, **parts: str) -> None:
    buffer = filled(case, ours, notes, **parts)
    if buffer is not None:
        for _ in range(2):
            notes.step("epoch", lambda: list(itertools.islice(buffer, 6)))
        notes.step("items", lambda: [buffer.storage[i] for i in range(3)])


def sample_ahead(case: Case, ours: bool, notes: Notes, **parts: str) -> None:
    buffer = filled(case, ours, notes, prefetch=1, **parts)
    if buffer is None:
        return
    draw(buffer, notes)
    if extend(buffer, notes, case.data(12, 45)):
        draw(buffer, notes)
    draw(buffer, notes, 1, return_info=True)


def sample_transformed(case: Case, ours: bool, notes: Notes, **parts: str) -> None:
    def double(rows: Any) -> Any:
        return tree_map(lambda leaf: leaf + leaf, rows)

    buffer = filled(case, ours, notes, **parts)
    if buffer is None:
        return
    buffer.append_transform(double)
    draw(buffer, notes)
    notes.step("rows", lambda: buffer[torch.tensor([3, 1])])
    buffer.append_transform(double, invert=True)
    if extend(buffer, notes, case.data(6, 45)):
        draw(buffer, notes, 1, return_info=True)
    notes.step("stored", lambda: buffer.storage[:])


INDICES: dict[str, Any] = {
    "one": 3,
    "last": -1,
    "numpy's integer": np.int64(2),
    "scalar": torch.tensor(3),
    "slice": slice(2, 7),
    "all": slice(None),
    "steps": slice(None, None, 3),
    "tensor": torch.tensor([3, 0, 3]),
    "int32": torch.tensor([3, 0], dtype=torch.int32),
    "from the end": torch.tensor([-1, 2, -3]),
    "matrix": torch.tensor([[1, 0], [2, 2]]),
    "list": [1, 2],
    "booleans": [True, False, True],
    "range": range(1, 7, 2),
    "array": np.array([2, 0]),
    "mask": torch.arange(45) % 4 == 0,
    "mask of 15": torch.arange(15) % 4 == 0,
    "array of booleans": np.arange(45) % 4 == 0,
    "in a tuple": (torch.tensor([1, 2]),),
    "pair": (torch.tensor([1, 2]), torch.tensor([0, -1])),
    "pair of lists": ([1, 2], [0, 1]),
    "pair that broadcasts": (torch.tensor([[1], [2]]), torch.tensor([0, 1])),
    "pair that does not": (torch.tensor([1, 2, 0]), torch.tensor([0, 1])),
    "row and column": (2, 1),
    "rows of a column": (slice(None), torch.tensor([1])),
    "too large": torch.tensor([0, 1000]),
    "too small": -1000,
    "key": "episode",
    "path": ("next", "done"),
    "new dimension": None,
    "ellipsis": ...,
    "three": (0, 0, torch.tensor([0])),
    "float": 0.5,
}


def get_by_index(case: Case, ours: bool, notes: Notes, **parts: str) -> None:
    for rows in (45, CAPACITY):
        buffer = filled(case, ours, notes, rows, **parts)
        for name, index in INDICES.items():
            notes.step(f"buffer[{name}]", lambda: buffer[index])  # noqa: B023
            notes.step(f"storage[{name}]", lambda: buffer.storage[index])  # noqa: B023
            notes.step(f"storage.get({name})", buffer.storage.get, index)
        none = torch.tensor([], dtype=torch.int64)
        notes.step("no row", lambda: tree_map(lambda leaf: leaf.shape, buffer.storage[none]))  # noqa: B023


def set_by_index(case: Case, ours: bool, notes: Notes, **parts: str) -> None:
    buffer = filled(case, ours, notes, **parts)
    if buffer is None:
        return
    for name, index in INDICES.items():
        for place in (buffer, buffer.storage):
            kind = "buffer" if place is buffer else "storage"
            try:
                value = tree_map(lambda leaf: leaf.flip(-1) * 2, place[index])
            except Exception:  # get_by_index compares these errors
                value = torch.zeros(1)
            notes.step(f"{kind}[{name}] =", place.__setitem__, index, value)
            notes.step("rows", lambda: buffer.storage[:])


def read_and_write_all(case: Case, ours: bool, notes: Notes, **parts: str) -> None:
    buffer = filled(case, ours, notes, **parts)
    if buffer is None:
        return
    notes.step("read", buffer.read_all_in_order)
    notes.step("read some", buffer.read_all_in_order, 7)
    notes.step("write some", buffer.write_all, case.data(6, 90))
    rows = 15 if case.ndim == 2 else 45
    zeros = torch.zeros(5, dtype=torch.int64)
    notes.step("set_at_", lambda: buffer.set_at_("episode", zeros, torch.arange(5)) is buffer)
    notes.step("set_", lambda: buffer.set_("rank", torch.ones(rows)) is buffer)
    notes.step("update_", lambda: buffer.update_({"rank": torch.zeros(rows)}) is buffer)
    notes.step("contains", lambda: [item in buffer.storage for item in (0, 44, 60, -1)])
    notes.step("trajectories", lambda: [len(each) for each in buffer.query(None)])
    notes.step("flat", lambda: buffer.storage.flatten()[:])
    look(buffer, notes)


def use_empty(case: Case, ours: bool, notes: Notes, **parts: str) -> None:
    buffer = only(notes, "make", case.buffer, ours, **parts)
    if buffer is None:
        return

    def use() -> None:
        draw(buffer, notes, 1)
        notes.step("one", lambda: buffer[0])
        notes.step("rows", lambda: buffer[torch.tensor([0])])
        notes.step("iterate", lambda: next(iter(buffer)))
        notes.step("len", lambda: len(buffer))
        notes.step("state", lambda: list(buffer.state_dict()))

    use()
    for rows in (30, 12):
        if extend(buffer, notes, case.data(rows)):
            draw(buffer, notes, 1)
        notes.step("empty", buffer.empty)
        use()


def no_batch_size(case: Case, ours: bool, notes: Notes, **parts: str) -> None:
    buffer = filled(case, ours, notes, batch_size=None, **parts)
    if buffer is not None:
        draw(buffer, notes, 1)
        draw(buffer, notes, 1, batch_size=8)
        notes.step("iterate", lambda: next(iter(buffer)))


def restored(buffer: Any, fresh: Any, case: Case, notes: Notes) -> None:
    """Notes that a restored buffer goes on like the one that was saved."""
    for each in (buffer, fresh):
        draw(each, notes)
        if extend(each, notes, case.data(24, 60)):
            look(each, notes)
            draw(each, notes, 1)


def state_dict(case: Case, ours: bool, notes: Notes, **parts: str) -> None:
    for ahead in (0, 1) if parts["sampler"] == "random" else (1,):
        buffer = filled(case, ours, notes, prefetch=ahead, **parts)
        fresh = filled(case, ours, notes, 9, prefetch=ahead, **parts)
        if buffer is None or fresh is None:
            return
        draw(buffer, notes)
        notes.step("restore", lambda: fresh.load_state_dict(buffer.state_dict()))  # noqa: B023
        restored(buffer, fresh, case, notes)


def copies(case: Case, ours: bool, notes: Notes, **parts: str) -> None:
    for ahead in (0, 1):
        for duplicate in (copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))):
            buffer = filled(case, ours, notes, prefetch=ahead, **parts)
            if buffer is None:
                return
            draw(buffer, notes)
            fresh = only(notes, "copy", duplicate, buffer)
            if fresh is not None:
                for each in (buffer, fresh):  # a copied storage has no generator
                    each.set_rng(torch.Generator().manual_seed(1))
                restored(buffer, fresh, case, notes)


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    """Keeps torchrl from logging each storage, which takes a tenth of the time."""
    level = torchrl_logger.level
    torchrl_logger.setLevel("WARNING")
    yield
    torchrl_logger.setLevel(level)


OPERATIONS: dict[Callable[..., None], list[tuple[str, str]]] = {
    add: EACH_WRITER + EACH_SAMPLER[1:],
    extend_past_capacity: EACH_WRITER + EACH_SAMPLER[1:],
    sample: ALL,
    sample_with_include_info: EACH_SAMPLER + EACH_WRITER[1:],
    iterate: EACH_SAMPLER + EACH_WRITER[1:],
    sample_ahead: EACH_SAMPLER + EACH_WRITER[1:],
    sample_transformed: EACH_SAMPLER + EACH_WRITER[1:],
    get_by_index: ONE,
    set_by_index: ONE,
    read_and_write_all: ONE,
    use_empty: EACH_SAMPLER + EACH_WRITER[1:],
    no_batch_size: EACH_SAMPLER,
    state_dict: EACH_SAMPLER,
    copies: ONE,
}


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda each: each.__name__)
def test_an_operation_does_what_it_does_with_torchrls_classes(operation, case):
    values = 0
    for sampler, writer in OPERATIONS[operation]:
        notes = Notes(), Notes()
        for ours in (False, True):
            operation(case, bool(ours), notes[ours], sampler=sampler, writer=writer)
        where = f"{operation.__name__}, {case}, {sampler}, {writer}"
        values += assert_same_outcomes(notes[1], notes[0], where)
    assert values > 0, "every step is an error"
