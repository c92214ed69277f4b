"""Buffers with our classes that are saved, compiled, shared by threads; what their reads count."""

from __future__ import annotations

import pickle
import threading
import warnings
from typing import Any

import pytest
import torch

pytest.importorskip("torchrl")

from replay_cases import (
    CAPACITY,
    CASES,
    CONTAINERS,
    Case,
    Notes,
    assert_same_outcomes,
    assert_same_value,
)
from tensordict import TensorDict, is_tensor_collection
from thread_support import at_once
from torch.utils._pytree import tree_leaves
from torchrl.data import (
    LazyTensorStorage,
    RoundRobinWriter,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from torchrl.data.replay_buffers.checkpointers import (
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    NestedStorageCheckpointer,
    TensorStorageCheckpointer,
)

from tdcopier.torchrl import (
    PackedLazyTensorStorage,
    PackedTensorDictReplayBuffer,
    ReadStats,
    ToDevice,
)

CASE = pytest.mark.parametrize("case", CASES, ids=str)

# ---- files ---------------------------------------------------------------------------------------

CHECKPOINTERS: dict[str, Any] = {
    "default": lambda: None,
    "tensor": TensorStorageCheckpointer,
    "flat": FlatStorageCheckpointer,
    "nested": NestedStorageCheckpointer,
    "h5": H5StorageCheckpointer,
}
WAYS = [("dumps", "loads"), ("dump", "load"), ("save", "load")]


def keep(case: Case, ours: bool, notes: Notes, folder: Any, checkpointer: Any, names: Any) -> None:
    """Writes a buffer to files, reads them into another one, and notes how both go on."""
    save, load = names
    buffer, fresh = (
        case.filled(ours, checkpointer=checkpointer(), prefetch=ahead) for ahead in (1, 1)
    )
    fresh.empty()
    notes.step("sample", buffer.sample)
    notes.step("save", getattr(buffer, save), folder)
    notes.step("load", getattr(fresh, load), folder)
    notes.step("lengths", lambda: (len(buffer), len(fresh), buffer.batch_size, fresh.batch_size))
    for each in (buffer, fresh):
        notes.step("ahead", each.synchronize)
        notes.step("extend", each.extend, case.data(6, 60))
        if notes[-1].error is not None:
            continue
        for _ in range(3):
            notes.step("sample", each.sample)
            notes.step("ahead", each.synchronize)
        notes.step("all rows", lambda: each.storage[:])  # noqa: B023


DIAGONAL = [case for case in CASES if (case.storage == "tensor") == (case.ndim == 1)]
"""Half of the cases, with each storage, number of dimensions and container."""
KEPT = [
    pytest.param(case, checkpointer, id=f"{case}-{checkpointer}")
    for checkpointer in CHECKPOINTERS
    for case in (CASES if checkpointer == "default" else DIAGONAL)
]


@pytest.mark.parametrize(("case", "checkpointer"), KEPT)
def test_a_buffer_in_files_is_as_torchrls(tmp_path, case, checkpointer):
    values = 0
    for names in WAYS if checkpointer == "default" else WAYS[:1]:
        notes = Notes(), Notes()
        for ours in (False, True):
            folder = tmp_path / f"{names[0]}-{ours}"
            keep(case, ours, notes[ours], folder, CHECKPOINTERS[checkpointer], names)
        values += assert_same_outcomes(notes[1], notes[0], f"{case}, {checkpointer}, {names}")
    assert values > 0


@pytest.mark.parametrize("storage", ["tensor", "memmap"])
@pytest.mark.parametrize("saved_by_ours", [False, True])
def test_files_of_one_class_are_read_by_the_other(tmp_path, storage, saved_by_ours):
    case = Case(storage, 1, "TensorDict", True)
    saved, loaded = case.filled(saved_by_ours), case.filled(not saved_by_ours, 9)
    saved.dumps(tmp_path / "files")
    loaded.loads(tmp_path / "files")
    rows = torch.arange(45)
    assert_same_value(loaded.storage[rows], saved.storage[rows], "rows")
    assert_same_value(loaded.sample(), saved.sample(), "sample")


# ---- info ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["host", "ToDevice", "sample_device"])
@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("include_info", [True, False])
def test_include_info_does_what_it_does_in_torchrl(device, way, prefetch, include_info):
    case = Case("tensor", 1, "TensorDict", True)
    place = {"sample_device": device} if way == "sample_device" else {}
    theirs = case.filled(False, prefetch=prefetch)
    ours = case.filled(True, prefetch=prefetch, storage=place)
    for buffer in (theirs, ours):  # an entry that is stored has the name of an info
        buffer.storage._storage.set("index", torch.full((CAPACITY,), -7))
    if way != "host":
        theirs.append_transform(lambda batch: batch.to(device))
    if way == "ToDevice":
        ours.append_transform(ToDevice(device))
    options = {"include_info": include_info}
    for return_info in (False, True):
        with pytest.warns(UserWarning, match="include_info is going to be deprecated soon"):
            expected = theirs.sample(return_info=return_info, **options)
        with pytest.warns(UserWarning, match="include_info is going to be deprecated soon") as seen:
            got = ours.sample(return_info=return_info, **options)
        assert [each.filename for each in seen] == [__file__]
        assert_same_value(got, expected, "sample")
        batch = got[0] if return_info else got
        assert (batch["index"].cpu() == -7).all().item() is not include_info
        assert_same_value(ours.sample(), theirs.sample(), "the next sample")
    assert_same_value(ours.sample(None, False, None), theirs.sample(None, False, None), "by place")


def test_samples_that_cannot_hold_the_info_come_without_it():
    buffers = []
    for made in (TensorDictReplayBuffer, PackedTensorDictReplayBuffer):
        generator = torch.Generator().manual_seed(5)
        buffer = made(storage=LazyTensorStorage(20), batch_size=4, generator=generator)
        buffer.storage.set(range(20), torch.arange(20))
        with pytest.raises(RuntimeError):
            buffer.sample()
        with pytest.warns(UserWarning, match="include_info"), pytest.raises(RuntimeError):
            buffer.sample(include_info=True)
        buffers.append(buffer)
    with pytest.warns(UserWarning, match="include_info"):
        expected, got = (buffer.sample(include_info=False) for buffer in buffers)
    assert_same_value(got, expected, "sample")


# ---- compilers -----------------------------------------------------------------------------------


@CASE
def test_a_compilable_storage_does_what_torchrls_does(case):
    notes = Notes(), Notes()
    for ours in (False, True):
        buffer = case.buffer(ours, storage={"compilable": True})
        for rows, start in ((24, 0), (12, 24), (24, 36)):
            notes[ours].step("extend", buffer.extend, case.data(rows, start))
            notes[ours].step("sample", buffer.sample)
            notes[ours].step("rows", lambda: buffer[:])  # noqa: B023
            notes[ours].step("length", len, buffer)
    assert assert_same_outcomes(notes[1], notes[0], str(case)) >= 12


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.parametrize("container", ["TensorDict", "dict"])
def test_a_compiled_loop_gathers_and_gives_the_samples_of_an_eager_one(container):
    case = Case("tensor", 1, container, container == "TensorDict")
    writer = TensorDictRoundRobinWriter if container == "TensorDict" else RoundRobinWriter
    theirs, ours = (case.buffer(which, storage={"compilable": which}) for which in (False, True))
    ours.set_writer(writer(compilable=True))

    @torch.compile(backend="eager")
    def step(rows: Any) -> Any:
        if container == "dict":  # of the two, compiling `extend` takes most of the time
            ours.extend(rows)
        return ours.sample()

    torch._dynamo.reset()
    for start in (0, 18, 36):
        theirs.extend(case.data(18, start))
        if container == "TensorDict":
            ours.extend(case.data(18, start))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's own
            got = step(case.data(18, start))
        assert_same_value(got, theirs.sample(), f"sample {start}")
    assert ours.storage.read_stats == ReadStats(3, 0, 0, 0)
    torch._dynamo.reset()


# ---- threads -------------------------------------------------------------------------------------


def assert_whole(case: Case, batch: Any) -> None:
    """Asserts that all leaves of each row are those of one step."""
    find = batch.get if is_tensor_collection(batch) else None
    observation = next(
        leaf
        for leaf in ([find("observation")] if find else tree_leaves(batch))
        if leaf.is_floating_point()
    )
    expected = CONTAINERS[case.container.replace("list of items", "dict")](
        observation[..., 0].long()
    )
    if not is_tensor_collection(batch):
        for got, wanted in zip(tree_leaves(batch), tree_leaves(expected), strict=True):
            assert torch.equal(got, wanted)
        return
    for key in expected.keys(True, True):
        assert torch.equal(batch.get(key), expected.get(key)), key


EXTENDED = [case for case in CASES if case.ndim == 1 or case.container == "TensorDict"]


@pytest.mark.parametrize("case", EXTENDED, ids=str)
def test_threads_draw_whole_rows_while_another_one_extends(case):
    buffer = case.filled(True, prefetch=2)
    stop = threading.Event()
    failures: list[BaseException] = []

    def extend() -> None:
        start = 45
        try:
            while not stop.is_set():
                buffer.extend(case.data(6, start))
                start += 6
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=extend)
    thread.start()
    try:
        for _ in range(8):
            assert_whole(case, buffer.sample())
    finally:
        stop.set()
        thread.join(30)
    buffer.synchronize()
    assert failures == []
    assert buffer.storage.read_stats.gathered + buffer.storage.read_stats.fallbacks >= 8


# ---- counts --------------------------------------------------------------------------------------


def counted(storage: Any, *indices: Any) -> ReadStats:
    """Returns how reads of these indices were counted."""
    before = storage.read_stats
    for index in indices:
        storage.get(index)
    return ReadStats(*(b - a for a, b in zip(before, storage.read_stats, strict=True)))


ROWS = torch.tensor([3, 0, 3])


@pytest.mark.parametrize("kind", ["tensor", "memmap"])
@pytest.mark.parametrize(
    "container", ["TensorDict", "tensorclass", "dict", "tuple", "list", "tensor"]
)
@pytest.mark.parametrize("ndim", [1, 2])
def test_the_engine_gathers_rows_of_each_container(kind, container, ndim):
    storage = Case(kind, ndim, container, False).filled(True).storage
    pair = [(ROWS, torch.tensor([0, 1, -1]))] if ndim == 2 else []
    assert counted(storage, ROWS, *pair) == ReadStats(1 + len(pair), 0, 0, 0)


def test_a_read_is_counted_as_what_it_was():
    storage = Case("tensor", 1, "TensorDict", False).filled(True).storage
    assert counted(storage, ROWS, [1, 2], range(3)) == ReadStats(3, 0, 0, 0)
    views = (3, -1, slice(2, 5), slice(None), torch.tensor(3), "episode", ("next", "done"))
    assert counted(storage, *views) == ReadStats(0, 0, len(views), 0)
    masks = torch.arange(45) % 3 == 0, [True] * 45
    assert counted(storage, *masks) == ReadStats(0, 0, 0, 2)
    with pytest.raises(IndexError):
        storage.get(torch.tensor([45]))
    assert counted(storage) == ReadStats(0, 0, 0, 0)
    again = (torch.tensor([1, 2]),)
    storage[again]
    assert counted(storage, again) == ReadStats(0, 1, 0, 0)


def test_rows_that_only_torchrl_can_read_are_counted_as_fallbacks():
    named = Case("tensor", 1, "named tuple", False).filled(True).storage
    assert counted(named, ROWS) == ReadStats(0, 0, 0, 1)


def test_leaves_with_other_columns_are_read_by_torchrl():
    tree = {"a": torch.arange(12).view(4, 3), "b": torch.arange(20).view(4, 5)}
    theirs, ours = LazyTensorStorage(30, ndim=2), PackedLazyTensorStorage(30, ndim=2)
    for storage in (theirs, ours):
        storage.set(range(4), tree)
    asked = (torch.tensor([1, -1]), torch.tensor([-1, 0]))
    assert_same_value(ours.get(asked), theirs.get(asked), "rows")
    assert ours.read_stats == ReadStats(0, 0, 0, 1)


@pytest.mark.parametrize("rows", [torch.tensor([1, -1]), torch.tensor([[0], [-2]])])
def test_a_full_storage_counts_from_the_end_of_each_leaf(rows):
    """Torchrl gives the first leaf 10 rows here and the second 20."""
    storages = LazyTensorStorage(30, ndim=2), PackedLazyTensorStorage(30, ndim=2)
    for storage in storages:
        storage.set(range(4), {"a": torch.zeros(4, 3, 2), "b": torch.zeros(4, 3)})
        assert [leaf.shape[0] for leaf in storage._storage.values()] == [10, 20]
        for leaf in storage._storage.values():
            leaf.copy_(torch.arange(leaf.numel()).view_as(leaf))
        storage._len = storage.max_size
    theirs, ours = storages
    assert_same_value(ours.get(rows), theirs.get(rows), "rows")
    assert ours.read_stats == ReadStats(0, 0, 0, 1)


def test_counts_are_a_process_own():

    storage = Case("tensor", 1, "TensorDict", False).filled(True).storage
    storage.get(ROWS)
    assert pickle.loads(pickle.dumps(storage)).read_stats == ReadStats(0, 0, 0, 0)


def test_threads_count_every_read():

    storage = PackedLazyTensorStorage(10)
    storage.set(range(10), TensorDict({"x": torch.arange(10)}, [10]))
    at_once(4, lambda _: [storage.get(ROWS) for _ in range(200)])
    assert storage.read_stats == ReadStats(800, 0, 0, 0)
