"""The functions that every rank runs in the tests of `tdcopier.distributed`."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import tdcopier
from tdcopier import distributed
from tdcopier._distributed import ranks

Point = namedtuple("Point", ["x", "y"])


@dataclasses.dataclass(frozen=True)
class Boxes:
    corners: torch.Tensor
    name: str


class Opaque:
    def __init__(self, value: int) -> None:
        self.value = value
        self.inside = torch.full((3,), float(value))


class Unpicklable:
    def __reduce__(self) -> Any:
        raise ValueError("never to be sent")


def tree_of(seed: int) -> Any:
    """Returns leaves of all plain kinds, in containers of all kinds."""
    generator = torch.Generator().manual_seed(seed)
    image = torch.rand(4, 5, 3, generator=generator)
    return {
        "dtypes": [
            torch.full((3,), seed).to(dtype)
            for dtype in (torch.bool, torch.uint8, torch.float16, torch.bfloat16, torch.float32)
        ],
        "complex": (torch.full((2,), seed + 1j), torch.full((1,), 2j, dtype=torch.complex128)),
        "scalar": torch.tensor(seed),
        "empty": torch.empty(0, 3),
        "transposed": image.permute(2, 0, 1),
        "channels last": image[None].permute(0, 3, 1, 2),
        "with gaps": image[::2, 1:3],
        "conjugated": torch.full((2,), 1 + 2j).conj(),
        "array": np.arange(6, dtype=np.int32).reshape(2, 3) + seed,
        "named": Point(torch.ones(2), OrderedDict(a=torch.zeros(3), b="text")),
        "default": defaultdict(list, {1: torch.arange(4)}),
        "dataclass": Boxes(torch.ones(5, 4), f"boxes {seed}"),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "with a gradient": torch.ones(2, requires_grad=True),
        "sparse": torch.eye(3).to_sparse(),
        "compressed": torch.eye(4).to_sparse_csr(),
        "sparse, with a gradient": torch.eye(3).to_sparse().requires_grad_(),
        "large": torch.rand(300_000, generator=generator),
        "opaque": [None, 3, "text", b"bytes", torch.float32, torch.device("meta"), {1, 2}],
    }


def assert_equal(got: Any, expected: Any, path: str = "data") -> None:
    assert type(got) is type(expected), f"{path}: {type(got)} is not {type(expected)}"
    if isinstance(expected, torch.Tensor):
        for name in ("dtype", "shape", "device", "requires_grad", "layout"):
            found, wanted = getattr(got, name), getattr(expected, name)
            assert found == wanted, f"{path}: {name} is {found}, not {wanted}"
        if expected.layout is torch.strided:
            assert torch.empty_like(got).stride() == torch.empty_like(expected).stride(), path
        assert torch.equal(got.to_dense(), expected.to_dense()), path
    elif hasattr(expected, "items"):
        assert list(got) == list(expected), path
        for key in expected:
            assert_equal(got[key], expected[key], f"{path}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected), path
        for index, child in enumerate(expected):
            assert_equal(got[index], child, f"{path}[{index}]")
    elif dataclasses.is_dataclass(expected):
        assert_equal(vars(got), vars(expected), path)
    else:
        assert got == expected, path


def sent(rank: int, tree: Any, src: int = 0, **options: Any) -> Any:
    return distributed.broadcast(tree if rank == src else None, src, **options)


def as_it_arrives(tree: Any, device: str | None, *, at_src: bool) -> Any:
    """Other ranks receive it through the messages' device: a parameter that moves is a tensor."""
    by_way_of = ranks._device_of(None)
    there = tree if at_src else tdcopier.copy(tree, by_way_of)
    return tdcopier.copy(there, torch.device(device or by_way_of))


def whole_tree(rank: int, src: int, device: str | None) -> None:
    got = sent(rank, tree_of(7), src, device=device)
    assert_equal(got, as_it_arrives(tree_of(7), device, at_src=rank == src))
    if rank != src:
        assert got["with gaps"].stride() == (6, 3, 1)
        assert got["transposed"].stride() == (1, 15, 3)


def any_root(rank: int) -> None:
    for tree in (torch.arange(3), None, "text", [], {}, torch.empty(0), (torch.ones(2), 3)):
        assert_equal(sent(rank, tree), tdcopier.copy(tree, ranks._device_of(None)))


class Counted:
    """Counts the messages that pass through this rank in the block."""

    def __enter__(self) -> Counted:
        self.broadcasts = self.exchanged = 0
        self._calls = dist.broadcast, dist.batch_isend_irecv

        def broadcast(*arguments: Any, **options: Any) -> Any:
            self.broadcasts += 1
            return self._calls[0](*arguments, **options)

        def exchange(operations: Any) -> Any:
            self.exchanged += len(operations)
            return self._calls[1](operations)

        dist.broadcast, dist.batch_isend_irecv = broadcast, exchange
        return self

    def __exit__(self, *_: object) -> None:
        dist.broadcast, dist.batch_isend_irecv = self._calls


def messages(rank: int, leaves: int) -> tuple[int, int, int]:
    """Counts broadcast and exchanged messages of a broadcast and of a scatter."""
    tree = [torch.full((5,), float(i)) for i in range(leaves)]
    with Counted() as first:
        sent(rank, tree)
    with Counted() as second:
        distributed.scatter([tree] * dist.get_world_size() if rank == 0 else None, 0)
    assert first.exchanged == 0
    return first.broadcasts, second.broadcasts, second.exchanged


def layouts_that_come_again(rank: int) -> None:
    """Broadcasts trees whose layouts are those of the one before, of the same rank or another."""
    trees = [
        {"a": torch.arange(4.0), "b": torch.ones(2)},
        {"a": torch.arange(3.0), "b": torch.ones(2)},
        [torch.arange(3), torch.ones(2), "text"],
    ]
    for number, (which, src) in enumerate(
        [(0, 0), (0, 0), (1, 1), (0, 0), (1, 0), (1, 1), (0, 1), (2, 0), (2, 0), (2, 1), (0, 0)]
    ):
        tree = trees[which]
        tree[0 if which == 2 else "a"][0] = number
        assert_equal(sent(rank, tree, src), as_it_arrives(tree, None, at_src=rank == src))


def one_chunk_per_dtype(rank: int) -> None:
    got = sent(rank, [torch.ones(3), torch.ones(2, dtype=torch.int64), torch.ones(4)], 1)
    if rank == 0:
        assert got[2].data_ptr() - got[0].data_ptr() == 16
        assert all(leaf._base is None for leaf in got)
        if got[0].device.type == "cpu":
            assert 32 <= got[1].data_ptr() - got[0].data_ptr() < 128  # in one message
            assert [leaf.untyped_storage().nbytes() for leaf in got] == [12, 16, 16]
        else:  # one storage for each dtype, because torch saves a storage as elements of one
            chunks = [leaf.untyped_storage().data_ptr() for leaf in got]
            assert chunks[2] == chunks[0] != chunks[1]


def gradient(rank: int) -> None:
    got = sent(rank, {"w": torch.ones(3, requires_grad=True)}, 1)
    (got["w"] * 2).sum().backward()
    if rank == 0:
        assert got["w"].grad.tolist() == [2, 2, 2]


def opaque(rank: int) -> None:
    got = sent(rank, [Opaque(4), torch.ones(1)])
    assert got[0].value == 4
    assert got[0].inside.tolist() == [4, 4, 4]


def source_is_as_it_was(rank: int) -> None:
    tree = {"x": torch.ones(3), "y": [1, "a"]}
    got = sent(rank, tree)
    if rank == 0:
        assert_equal(tree, {"x": torch.ones(3), "y": [1, "a"]})
        got["y"].append(2)
        assert tree["y"] == [1, "a"]


def to_sim(rank: int) -> None:
    """Sends sources on a simulated device, through the host, to simulated devices of each rank."""
    from tdcopier import sim

    sim.enable(devices=2)
    from tensordict import TensorDict

    tree = {"x": torch.arange(5.0), "td": TensorDict({"y": torch.ones(2)})}
    moved = tdcopier.copy(tree, "sim:0") if rank == 1 else None
    got = distributed.broadcast(moved, 1, device=f"sim:{rank}")
    assert got["x"].device == got["td"].device == torch.device("sim", rank)
    assert got["x"].cpu().tolist() == [0, 1, 2, 3, 4]
    assert got["td"]["y"].device == torch.device("sim", rank)
    for all_of in (distributed.all_gather(tree, device="sim:1"), distributed.gather(tree, 0)):
        for each in all_of or []:
            assert each["td"]["y"].cpu().tolist() == [1, 1]
    assert rank == 1 or all_of[1]["x"].is_cpu


def overwritten_at_once(rank: int, call: str) -> list[float]:
    """Returns the values that arrive if the source refills its pinned memory after the call."""
    from tdcopier import sim

    sim.enable(devices=2)
    pinned = torch.ones(1 << 20).pin_memory()
    tree = {"x": pinned} if rank == 1 else None
    with sim.pace("h2d", latency_us=200_000):
        if call == "broadcast":
            got = distributed.broadcast(tree, 1, device="sim:0")
        else:
            got = distributed.scatter(tree and [tree, tree], 1, device="sim:0")
        pinned.fill_(-1)
    values: list[float] = got["x"].unique().tolist()
    return values


def tensordicts(rank: int, src: int) -> None:
    from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict
    from tensordict_classes import Decorated, Episode, Frames

    nested = TensorDict(
        {"x": torch.ones(2, 3), "n": TensorDict({"y": torch.arange(2)}, [2]), "s": "text"},
        [2],
        names=["time"],
    )
    ragged = LazyStackedTensorDict.lazy_stack(
        [TensorDict({"z": torch.ones(n)}, device="cpu") for n in (2, 3)]
    )
    tree = {
        "nested": nested,
        "locked": TensorDict({"x": torch.ones(3)}).lock_(),
        "ragged": ragged,
        "class": Decorated(torch.ones(4, 2), "rows", batch_size=[4]),
        "based on TensorClass": Frames(torch.ones(4, 2), batch_size=[4]),
        "subclass": Episode({"x": torch.ones(2), "n": {"y": torch.ones(2)}}, [2]),
        "consolidated": TensorDict({"x": torch.ones(3), "y": torch.arange(2)}).consolidate(),
        "device, of the user's": torch.device("cpu"),
        "data": NonTensorData({"k": 1}),
    }
    got = sent(rank, tree, src)
    device = ranks._device_of(None)
    for name, value in tree.items():
        assert type(got[name]) is type(value), name
    assert got["device, of the user's"] == torch.device("cpu")
    assert got["nested"].device == got["nested"]["n"].device == device
    assert got["nested"].names == ["time"]
    assert got["nested"]["s"] == "text"
    assert (got["nested"].select("x", "n") == nested.select("x", "n").to(device)).all()
    assert got["locked"].is_locked
    assert not got["nested"].is_locked
    assert got["ragged"].device == device
    assert [each["z"].shape for each in got["ragged"].tensordicts] == [(2,), (3,)]
    assert got["class"].pixels.tolist() == [[1, 1]] * 4
    assert got["class"].label == "rows"
    assert got["based on TensorClass"].device == device
    assert got["subclass"].device == got["subclass"]["n"].device == device
    assert got["class"].device == device
    assert got["consolidated"]["y"].tolist() == [0, 1]
    assert got["data"].data == {"k": 1}
    got["nested"]["later"] = torch.zeros(2)
    assert got["nested"]["later"].device == device


def scattered(rank: int, src: int, device: str | None) -> None:
    trees = [tree_of(1), {"other": [torch.arange(4), "text"]}, "no leaves"]
    trees = trees[: dist.get_world_size()]
    got = distributed.scatter(trees if rank == src else None, src, device=device)
    assert_equal(got, as_it_arrives(trees[rank], device, at_src=rank == src))


def under_a_default_device(rank: int, where: int) -> None:
    tree = tree_of(3)
    expected = as_it_arrives(tree_of(3), None, at_src=rank == 1)
    if rank == where:
        torch.set_default_device("meta")
    try:
        got = sent(rank, tree, 1)
        part = distributed.scatter([tree] * 2 if rank == 1 else None, 1)
        both = distributed.all_gather(rank)
    finally:
        torch.set_default_device(None)
    assert both == [0, 1]
    assert_equal(got, expected)
    assert_equal(part, expected)


def group_of_one(rank: int) -> None:
    groups = [dist.new_group([0]), dist.new_group([1])]
    got = distributed.broadcast([torch.full((2,), rank)], rank, group=groups[rank])
    assert got[0].tolist() == [rank, rank]
    got = distributed.scatter([{"a": torch.full((2,), rank)}], rank, group=groups[rank])
    assert got["a"].tolist() == [rank, rank]


def mistake(rank: int, name: str) -> tuple[str, str]:
    """Returns class and text of this rank's error; checks that a broadcast works afterwards."""
    deep: list[Any] = []
    deep.append(deep)
    source = rank == 1
    calls = {
        "unpicklable": lambda: sent(rank, {"a": [torch.ones(2), (lambda: 0)]}, 1),
        "unpicklable in an object": lambda: sent(rank, {"a": Point(1, Unpicklable())}, 1),
        "holds itself": lambda: sent(rank, deep, 1),
        "cannot be copied": lambda: sent(rank, [np.ones(2, np.longdouble)], 1),
        "too few trees": lambda: distributed.scatter([1] if source else None, 1),
        "no list of trees": lambda: distributed.scatter({0: 1, 1: 2} if source else None, 1),
        "unpicklable, scattered": lambda: distributed.scatter(
            [{"a": (lambda: 0)}, 2] if source else None, 1
        ),
        "no such source": lambda: sent(rank, [1], 7),
        "source that is no rank": lambda: distributed.broadcast(None, "0"),
        "tree on every rank": lambda: distributed.broadcast([1], 1) if rank == 0 else None,
        "trees on every rank": lambda: distributed.scatter([1, 2], 1) if rank == 0 else None,
        "not in the group": lambda: (
            sent(rank, [1], 0, group=dist.new_group([0])) if rank == 1 else dist.new_group([0])
        ),
    }
    try:
        calls[name]()
        found = ("", "")
    except Exception as error:
        found = (type(error).__name__, str(error))
    assert sent(rank, [torch.ones(2), name])[1] == name
    return found


class NotLikeThis(ValueError):
    """An error class that a program defines."""


class Untold(Exception):
    def __str__(self) -> str:
        raise KeyError("no text")


def other_error(rank: int, name: str) -> tuple[str, str]:
    """Does as `mistake`, for an error whose class is not sent."""
    errors = {
        "no memory": torch.OutOfMemoryError("none left"),
        "subclass": NotLikeThis("never"),
        "no text": Untold(),
    }

    def fail(*_: Any) -> Any:
        raise errors[name]

    packing = ranks.pack
    ranks.pack = fail
    try:
        sent(rank, [1], 1)
    except Untold:
        return "Untold", ""
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        ranks.pack = packing
    return "", ""


def no_such_device(rank: int) -> tuple[str, str]:
    try:
        sent(rank, [torch.ones(2)], 1, device="nowhere")
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def failure_frees_the_tree(rank: int) -> None:
    leaf = torch.ones(3)
    alive = weakref.ref(leaf)
    gc.disable()  # it would free a cycle sooner or later
    try:
        sent(rank, [leaf, (lambda: 0)], 1)
    except TypeError:
        del leaf
    try:
        assert alive() is None
    finally:
        gc.enable()


def scatter_keeps_no_second_copy(rank: int) -> None:
    """Checks that a tree moved to the messages' device is kept only as the message."""
    moved = []

    def packing(tree: Any) -> Any:
        moved.append(weakref.ref(tree[0]))
        return pack(tree)

    def exchange(operations: Any) -> Any:
        assert [each() for each in moved] == [None] * len(moved)
        return exchanging(operations)

    exchanging, dist.batch_isend_irecv = dist.batch_isend_irecv, exchange
    pack, ranks.pack = ranks.pack, packing
    try:
        trees = [[np.arange(3) + each] for each in range(2)]
        got = distributed.scatter(trees if rank == 1 else None, 1)
    finally:
        dist.batch_isend_irecv, ranks.pack = exchanging, pack
    assert got[0].tolist() == [rank, rank + 1, rank + 2]
    assert len(moved) == rank


def some_of_three(rank: int) -> None:
    """Sends within groups of two and three ranks, some in another order of ranks."""
    assert dist.get_world_size() == 3
    every, some = dist.new_group([2, 0, 1]), dist.new_group([1, 2])
    for src in range(3):
        for group in (None, every):
            assert_equal(sent(rank, tree_of(src), src, group=group), whole(rank, src))
    trees = {member: [torch.full((member,), member), f"of {member}"] for member in range(3)}
    if rank > 0:
        for src in (1, 2):
            assert_equal(sent(rank, tree_of(src), src, group=some), whole(rank, src))
            given = [trees[1], trees[2]] if rank == src else None
            assert_equal(distributed.scatter(given, src, group=some), trees[rank])
    ordered = [trees[member] for member in dist.get_process_group_ranks(every)]
    assert_equal(distributed.scatter(ordered if rank == 2 else None, 2, group=every), trees[rank])


def whole(rank: int, src: int) -> Any:
    return as_it_arrives(tree_of(src), None, at_src=rank == src)
