"""With `TDCOPIER_CHECK=1`, rows that are modified before a gather has read them are named."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from each_case import together
from support import assert_same
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

import tdcopier

ROWS = 20
NUMBERS = torch.tensor([7, 3, -1, 3])


@pytest.fixture(autouse=True)
def checking(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr("tdcopier._checking.enabled", True)


def sentence(what: str) -> str:
    """Returns the whole message, except for the line of the call."""
    return (
        rf"^{re.escape(what)} was modified before it was gathered\. The gather was started at "
        rf"{re.escape(__file__)}:\d+ in \w+\. Before writing to its rows, call "
        r"wait_gathered\(\) or get\(\) on its handle\.$"
    )


def batch_sentence(what: str) -> str:
    return (
        rf"^{re.escape(what)} was modified before its copy was done\. The copy was started at "
        rf"{re.escape(__file__)}:\d+ in \w+\. Before writing to a source, call "
        r"wait_staged\(\) or get\(\) on its handle\.$"
    )


def table() -> torch.Tensor:
    return torch.arange(ROWS * 3.0).view(ROWS, 3)


def mapped(folder: Path, device: str) -> Any:
    return np.memmap(folder / "rows", np.float32, "w+", shape=(ROWS, 3))


def mapped_by_tensordict(folder: Path, device: str) -> Any:
    tensordict = pytest.importorskip("tensordict")
    return tensordict.MemoryMappedTensor.from_tensor(table(), filename=str(folder / "rows"))


STORAGES: dict[str, Callable[[Path, str], Any]] = {
    "in RAM": lambda folder, device: table(),
    "array": lambda folder, device: table().numpy(),
    "reversed array": lambda folder, device: table().numpy()[::-1],
    "with gaps": lambda folder, device: torch.arange(ROWS * 12.0).view(ROWS, 12)[:, ::4],
    "bfloat16": lambda folder, device: table().to(torch.bfloat16),
    "uint32": lambda folder, device: table().to(torch.uint32),
    "complex": lambda folder, device: table().to(torch.complex64),
    "conjugate": lambda folder, device: table().to(torch.complex64).conj(),
    "negated view": lambda folder, device: table().to(torch.complex64).conj().imag,
    "bool": lambda folder, device: table() < 0,
    "repeated": lambda folder, device: torch.arange(ROWS).view(ROWS, 1).expand(ROWS, 5),
    "mapped": mapped,
    "mapped by tensordict": mapped_by_tensordict,
    "pinned by torch": lambda folder, device: table().pin_memory(),
    "on the device": lambda folder, device: table().to(device),
}
WITH_NUMBERS_ON_THE_DEVICE = ("pinned by torch", "on the device")


def change(leaf: Any, row: int) -> None:
    if isinstance(leaf, np.ndarray):
        leaf[row] = leaf[row] + 1 if leaf.dtype != bool else ~leaf[row]
    elif leaf.dtype == torch.bool:
        leaf[row] = ~leaf[row]
    elif leaf.dtype == torch.uint32:
        leaf.view(torch.int32)[row] += 1
    elif 0 in leaf.stride():
        leaf[row, :1] += 1
    else:
        leaf[row] += 1


def gather(storage: Any, numbers: Any, device: str, to: str) -> Any:
    if to == "new memory":
        return tdcopier.start_gather(storage, numbers, device)
    shape = numbers.shape

    def room(leaf: Any) -> Any:
        dtype = torch.as_tensor(leaf[:0].copy() if isinstance(leaf, np.ndarray) else leaf).dtype
        return torch.zeros((*shape, *leaf.shape[1:]), dtype=dtype, device=device)

    return tdcopier.start_gather(storage, numbers, out=pytree.tree_map(room, storage))


CASES = [
    (kind, where)
    for kind in STORAGES
    for where in ("host", "device")
    if where == "host" or kind in WITH_NUMBERS_ON_THE_DEVICE
]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}, index on the {case[1]}")
def case(request, tmp_path, device) -> tuple[Any, Any, bool]:
    """Returns a table, an index, and whether `wait()` allows to write to the rows."""
    kind, where = request.param
    numbers = NUMBERS if where == "host" else NUMBERS.to(device)
    ends_at_wait = where == "host" or kind == "on the device"
    return STORAGES[kind](tmp_path, device), numbers, ends_at_wait


@together("to", ["new memory", "out"])
@together("call", ["wait_gathered", "wait_staged", "get", "wait"])
def test_rows_modified_before_the_call_that_allows_it_are_named_every_time(case, device, to, call):
    leaf, numbers, ends_at_wait = case
    handle = gather({"ok": [table().pin_memory(), leaf]}, numbers, device, to)
    change(leaf, ROWS - 1)
    if call == "wait" and not ends_at_wait:
        handle.wait()
        call = "get"
    for _ in range(2):
        with pytest.raises(
            tdcopier.SourceModifiedError, match=sentence(f"row {ROWS - 1} of storage['ok'][1]")
        ):
            getattr(handle, call)()


@together("to", ["new memory", "out"])
@together("call", ["wait_gathered", "wait_staged", "get", "wait"])
def test_rows_may_be_modified_after_that_call(case, device, to, call):
    leaf, numbers, ends_at_wait = case
    handle = gather([leaf], numbers, device, to)
    getattr(handle, call)()
    if call == "wait" and not ends_at_wait:
        handle.wait_gathered()
    change(leaf, 3)
    handle.get()


@pytest.mark.parametrize("to", ["new memory", "out"])
def test_rows_that_the_index_does_not_name_may_be_modified(case, device, to):
    leaf, numbers, _ = case
    handle = gather([leaf], numbers, device, to)
    for row in set(range(ROWS)) - {3, 7, ROWS - 1}:
        change(leaf, row)
    handle.get()


@pytest.mark.parametrize("to", ["new memory", "out"])
@pytest.mark.parametrize("where", ["host", "device"])
def test_the_index_may_be_modified_at_once(device, to, where):
    leaf = table().pin_memory()
    numbers = NUMBERS.clone() if where == "host" else NUMBERS.to(device)
    handle = gather([leaf], numbers, device, to)
    if where == "device":
        handle.wait()  # the stream has read the numbers before it writes them
    numbers.fill_(5)
    change(leaf, 5)
    handle.get()


@pytest.mark.parametrize("call", ["wait_gathered", "get"])
def test_rows_that_the_device_has_pinned_are_watched(device, call):
    leaf = table()
    for numbers in (NUMBERS, NUMBERS.to(device)):
        with tdcopier.pin_memory_(leaf, device):
            handle = tdcopier.start_gather(leaf, numbers, device)
            change(leaf, 7)
            with pytest.raises(tdcopier.SourceModifiedError, match=sentence("row 7 of storage")):
                getattr(handle, call)()
            assert handle.stats.rows_in_place == 1


INDICES: dict[str, tuple[Any, str]] = {
    "slice": (slice(2, 9, 5), "row 7"),
    "list": ([0, 7], "row 7"),
    "mask": (torch.arange(ROWS) == 7, "row 7"),
    "one": (7, "row 7"),
    "matrix": (torch.tensor([[1, 2], [7, -1]]), "row 7"),
    "pair": ((torch.tensor([0, 7]), torch.tensor([1, 2])), "row (7, 2)"),
    "mask of two dimensions": (torch.arange(ROWS * 3).view(ROWS, 3) == 23, "row (7, 2)"),
}


@pytest.mark.parametrize(("index", "row"), INDICES.values(), ids=list(INDICES))
def test_rows_are_watched_for_every_kind_of_index(device, index, row):
    leaf = table()
    handle = tdcopier.start_gather([leaf], index, device)
    leaf[7, 2] = -1
    with pytest.raises(tdcopier.SourceModifiedError, match=sentence(f"{row} of storage[0]")):
        handle.get()
    if isinstance(index, tuple) or (getattr(index, "ndim", 1) == 2 and index.dtype == torch.bool):
        handle = tdcopier.start_gather([leaf], index, device)
        leaf[7, 1] = -1  # another row of two dimensions
        handle.get()


@pytest.mark.parametrize("to", ["new memory", "out"])
def test_leaves_in_tensordicts_are_watched(device, to):
    tensordict = pytest.importorskip("tensordict")
    deep = table()
    storage = {
        "data": tensordict.TensorDict(
            {"a": table(), "next": {"obs": deep}, "name": "cart"}, [ROWS], device="cpu"
        )
    }
    if to == "out":
        out = {"data": storage["data"][NUMBERS].clone().to(device)}
        handle = tdcopier.start_gather(storage, NUMBERS, out=out)
    else:
        handle = tdcopier.start_gather(storage, NUMBERS, device)
    storage["data"]["next", "obs"][7] = -1
    keys = "['next']['obs']" if to == "new memory" else "[('next', 'obs')]"
    path = f"row 7 of storage['data']{keys}"
    with pytest.raises(tdcopier.SourceModifiedError, match=sentence(path)):
        handle.get()


def test_members_of_a_lazy_stack_have_no_rows_of_its_own(device):
    tensordict = pytest.importorskip("tensordict")
    members = [tensordict.TensorDict({"x": table()}, [ROWS]) for _ in range(8)]
    stack = tensordict.LazyStackedTensorDict(*members, stack_dim=0)
    beside = torch.arange(8)
    handle = tdcopier.start_gather({"stack": stack, "beside": beside}, torch.tensor([0, 2]), device)
    members[5]["x"][2] += 1  # it is in row 5 of the stack
    assert_same(handle.get()["beside"].cpu(), torch.tensor([0, 2]))
    handle = tdcopier.start_gather({"stack": stack, "beside": beside}, torch.tensor([0, 2]), device)
    beside[2] = 7
    with pytest.raises(tdcopier.SourceModifiedError, match=sentence("row 2 of storage['beside']")):
        handle.get()


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
def test_short_numbers_on_the_device_name_rows_of_a_long_table(device, dtype):
    leaf = torch.zeros(40_000, 2).pin_memory()
    index = torch.tensor([3, -1], dtype=dtype).to(device)
    handle = tdcopier.start_gather(leaf, index, device)
    change(leaf, 39_999)
    with pytest.raises(tdcopier.SourceModifiedError, match=sentence("row 39999 of storage")):
        handle.get()


def test_a_mode_of_the_caller_does_not_change_how_rows_are_compared(device):
    class Refusing(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            assert function is not torch.Tensor.__getitem__
            return function(*args, **(kwargs or {}))

    leaf = table()
    handle = tdcopier.start_gather(leaf, NUMBERS, device)
    change(leaf, 3)
    named = sentence("row 3 of storage")
    with Refusing(), pytest.raises(tdcopier.SourceModifiedError, match=named):
        handle.get()


def test_a_gather_to_the_host_is_checked(device):
    leaf = table()
    handle = tdcopier.start_gather([leaf], NUMBERS, "cpu")
    change(leaf, 3)
    with pytest.raises(tdcopier.SourceModifiedError, match=sentence("row 3 of storage[0]")):
        handle.wait()


def test_leaves_without_rows_or_bytes_are_gathered(device):
    storage = {"empty": torch.empty(ROWS, 0), "x": table(), "text": "a"}
    expected = {"empty": torch.empty(4, 0), "x": storage["x"][NUMBERS], "text": "a"}
    assert_same(tdcopier.gather(storage, NUMBERS, "cpu"), expected)
    none = torch.tensor([], dtype=torch.int64)
    assert tdcopier.gather(storage, none, device)["x"].shape == (0, 3)


@pytest.mark.parametrize("to", ["new memory", "out"])
def test_mistakes_raise_what_they_raise_without_checks(device, to, monkeypatch):
    mistakes = [
        (lambda: gather([table()], torch.tensor([ROWS]), device, to)),
        (lambda: gather([table(), torch.zeros(3, 3)], NUMBERS, device, to)),
        (lambda: gather([table(), torch.zeros(())], NUMBERS, device, to)),
        (lambda: tdcopier.start_gather([table()], NUMBERS, out={"x": table()})),
        (lambda: tdcopier.start_scatter({"x": table()}, [table()], NUMBERS)),
    ]
    for mistake in mistakes:
        with pytest.raises(Exception, match=r"\w") as checked:
            mistake()
        with monkeypatch.context() as patch:
            patch.setattr("tdcopier._checking.enabled", False)
            with pytest.raises(Exception, match=r"\w") as unchecked:
                mistake()
        assert type(checked.value) is type(unchecked.value)
        assert str(checked.value) == str(unchecked.value)


@pytest.mark.parametrize("call", ["wait_gathered", "get"])
def test_a_row_out_of_range_on_the_device_is_what_is_reported(device, call):
    leaf = table().pin_memory()
    handle = tdcopier.start_gather(leaf, torch.tensor([3, ROWS]).to(device), device)
    change(leaf, 3)
    with pytest.raises(IndexError, match="out of bounds"):
        getattr(handle, call)()


@pytest.mark.parametrize("is_early", [False, True])
def test_rows_are_watched_until_a_storage_orders_its_later_writes_itself(device, is_early):
    """As the pinned storages of `tdcopier.torchrl` do, whose samples the host does not wait for."""
    leaf = table().pin_memory()
    handle = gather([leaf], NUMBERS.to(device), device, "new memory")
    handle._hand_over()
    if is_early:
        change(leaf, 3)
        with pytest.raises(tdcopier.SourceModifiedError, match=sentence("row 3 of storage[0]")):
            handle._device_access()
        return
    handle._device_access().wait()
    change(leaf, 3)
    handle.get()


# ---- scatters ------------------------------------------------------------------------------------

BATCHES = {
    "host": lambda device: torch.ones(3, 3),
    "array": lambda device: np.ones((3, 3), np.float32),
    "device": lambda device: torch.ones(3, 3, device=device),
}
TARGETS = ["in RAM", "mapped", "pinned by torch", "on the device"]


@pytest.fixture(
    params=[
        (b, t, w)
        for b in BATCHES
        for t in TARGETS
        for w in ("host", "device")
        if w == "host" or (b, t) == ("device", "pinned by torch")
    ]
)
def scatter(request, tmp_path, device) -> tuple[Any, Any, Any]:
    """Returns the handle, the batch and the storage of a scatter."""
    kind, target, where = request.param
    batch, storage = BATCHES[kind](device), STORAGES[target](tmp_path, device)
    index = torch.tensor([4, 9, 1]).to("cpu" if where == "host" else device)
    handle = tdcopier.start_scatter([{"x": batch}], [{"x": storage}], index)
    return handle, batch, storage


@pytest.mark.parametrize("call", ["get", "wait", "wait_staged"])
def test_a_batch_modified_before_the_call_that_allows_it_is_named(scatter, call):
    handle, batch, _ = scatter
    batch += 1
    for _ in range(2):
        with pytest.raises(tdcopier.SourceModifiedError, match=batch_sentence("batch[0]['x']")):
            getattr(handle, call)()


@pytest.mark.parametrize("call", ["get", "wait", "wait_staged"])
def test_a_batch_may_be_modified_after_that_call(scatter, call):
    handle, batch, storage = scatter
    getattr(handle, call)()
    batch += 1
    handle.get()
    written = storage.cpu() if isinstance(storage, torch.Tensor) else torch.as_tensor(storage)
    assert torch.equal(written[[4, 9, 1]], torch.ones(3, 3))


# ---- off -----------------------------------------------------------------------------------------


def test_without_check_mode_a_gather_and_a_scatter_record_nothing(device, monkeypatch):
    monkeypatch.setattr("tdcopier._checking.enabled", False)

    def refuse(*_: Any) -> None:
        raise AssertionError("recorded")

    monkeypatch.setattr("tdcopier._checking.SourceCheck.__init__", refuse)
    leaf, out = table(), [torch.zeros(4, 3, device=device)]
    for handle in (
        tdcopier.start_gather([leaf], NUMBERS, device),
        tdcopier.start_gather([leaf], NUMBERS, out=out),
        tdcopier.start_scatter([torch.ones(2, 3)], [leaf], [1, 2]),
    ):
        assert type(handle) is tdcopier.AsyncCopyHandle
        handle.get()
