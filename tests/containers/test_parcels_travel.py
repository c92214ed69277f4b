"""Parcels between processes: pickles, queues, files, loaders, and code that knows only `.to`."""

from __future__ import annotations

import copy
import functools
import gc
import multiprocessing
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
from parcel_support import assert_same, echo, fill_with_sevens
from support import oracle
from torch.utils.data import DataLoader, Dataset, default_collate

import tdcopier
from tdcopier import Parcel, pack
from tdcopier._pack import SHARED_FROM_BYTES

LARGE = SHARED_FROM_BYTES // 8


def _made(count: int) -> Parcel:
    return pack([np.ones(count, np.float32)])


def _send_one(connection: Any) -> None:
    connection.send(_made(1_000_000))
    connection.recv()  # it must be alive until the parcel has been received


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_the_main_thread_of_a_forked_process_sends_a_large_parcel():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    (torch.ones(1_000_000) + 1).sum()  # starts threads of torch, which the child lacks
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    sender = context.Process(target=_send_one, args=(theirs,))
    try:
        sender.start()
        assert ours.poll(60)
        (leaf,) = ours.recv().tree()
        assert leaf.sum() == 1_000_000
    finally:
        torch.set_num_threads(threads)
        sender.kill()
        sender.join()


def tree_of(number: int, size: int = 10) -> dict[str, Any]:
    return {"x": torch.arange(size) + number, "y": [torch.full((2, 3), number).t(), "text"]}


def test_a_pickle_has_one_buffer_out_of_band_and_copies_nothing(device):
    parcel = pack(tree_of(3, LARGE))
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(parcel, 5, buffer_callback=buffers.append)
    assert len(pickled) < 200
    (buffer,) = buffers
    with buffer.raw() as raw:
        assert raw.nbytes == parcel.nbytes
        received = bytearray(raw)
    got = pickle.loads(pickled, buffers=[received])
    assert_same(got.tree(), tree_of(3, LARGE))
    again = got.tree()["x"].fill_(7)
    assert np.frombuffer(received, np.int64, offset=len(received) - 8 * LARGE)[-1] == again[-1] == 7
    assert_same(
        tdcopier.copy(pickle.loads(pickle.dumps(parcel)), device), oracle(tree_of(3, LARGE), device)
    )


PICKLERS = {
    **{f"protocol {n}": functools.partial(pickle.dumps, protocol=n) for n in range(2, 6)},
    "multiprocessing": ForkingPickler.dumps,
}


@pytest.mark.parametrize("dumps", PICKLERS.values(), ids=PICKLERS)
def test_what_is_unpickled_has_memory_of_its_own_that_views_share(dumps):
    sent = dumps(pack(tree_of(1)))
    first, second = pickle.loads(sent), pickle.loads(sent)
    assert_same(first.tree(), tree_of(1))
    first.tree()["x"].fill_(7)
    assert (first.tree()["x"] == 7).all()
    assert_same(second.tree(), tree_of(1))


class Messages:
    """A stream that hands out messages as the objects that they came in."""

    def __init__(self, messages: list[bytes]) -> None:
        self.left = [*messages]

    def read(self, size: int) -> bytes:
        if len(self.left[0]) == size:
            return self.left.pop(0)
        part, self.left[0] = self.left[0][:size], self.left[0][size:]
        return part

    def readline(self) -> bytes:
        return self.read(self.left[0].index(b"\n") + 1)


def test_bytes_that_a_stream_keeps_are_not_written():
    messages: list[bytes] = []
    sink = type("Sink", (), {"write": lambda _, message: messages.append(bytes(message))})()
    pickle.Pickler(sink, 4).dump(pack(torch.zeros(100_000)))
    assert max(map(len, messages)) > 400_000  # the parcel is a message of its own
    # Only the unpickler in Python passes objects of the stream on.
    received = pickle._Unpickler(Messages(messages)).load()  # type: ignore[attr-defined]
    received.tree().fill_(7)
    assert (received.tree() == 7).all()
    assert (pickle.loads(b"".join(messages)).tree() == 0).all()


def test_a_parcel_from_read_only_bytes_gives_leaves_that_may_be_written():
    whole = bytes(pack(tree_of(2)))
    parcel = Parcel.from_buffer(whole)
    first, second = parcel.tree(), parcel.tree()
    first["x"].fill_(-1)
    assert_same(second, tree_of(2))
    assert whole == bytes(pack(tree_of(2)))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_parcels_cross_processes_by_queues_whatever_their_size(method):
    context = multiprocessing.get_context(method)
    there, back = context.Queue(), context.Queue()
    process = context.Process(target=echo, args=(there, back), daemon=True)
    process.start()
    descriptors = len(os.listdir("/proc/self/fd"))
    for number, size in enumerate([10, LARGE, 10, 3 * LARGE] * 5):
        there.put(pack(tree_of(number, size)))
        last, parcel = back.get(timeout=60)
        assert last == size - 1 + number
        assert_same(parcel.tree(), tree_of(number, size))
    del parcel
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 4
    there.put(None)
    process.join(60)
    assert process.exitcode == 0


def test_a_parcel_in_shared_memory_of_the_callers_is_not_copied_again():
    context = multiprocessing.get_context("forkserver")
    there, back = context.Queue(), context.Queue()
    process = context.Process(target=fill_with_sevens, args=(there, back), daemon=True)
    process.start()
    tree = tree_of(1, LARGE)
    size = pack(tree).nbytes
    out = torch.zeros(size // 8 + 100, dtype=torch.int64).share_memory_()
    there.put(pack(tree, out=out))
    assert back.get(timeout=60) == size
    x = Parcel.from_buffer(out.view(torch.uint8)[:size]).tree()["x"]
    assert x.unique().tolist() == [7]
    own = pack(tree)
    there.put(own)
    assert back.get(timeout=60) == size
    assert_same(own.tree(), tree)
    there.put(None)
    process.join(60)
    assert process.exitcode == 0


def test_a_file_is_mapped_and_written_to_by_nobody(tmp_path, device):
    path = tmp_path / "batch.parcel"
    pack(tree_of(1, LARGE)).save(path)
    before = path.read_bytes()
    descriptors = len(os.listdir("/proc/self/fd"))
    parcel = Parcel.load(path)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    parcel.tree()["x"].fill_(0)
    assert path.read_bytes() == before
    assert_same(tdcopier.copy(Parcel.load(path), device), oracle(tree_of(1, LARGE), device))
    pack(tree_of(2)).save(path)  # another file of this name
    assert_same(Parcel.load(str(path)).tree(), tree_of(2))
    assert parcel.tree()["y"][1] == "text"
    assert [each.name for each in tmp_path.iterdir()] == ["batch.parcel"]


def test_a_file_has_the_rights_of_any_new_file(tmp_path):
    before = os.umask(0o027)
    try:
        pack(tree_of(1)).save(tmp_path / "batch")
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(before)
    assert (tmp_path / "batch").stat().st_mode & 0o777 == 0o640


def test_a_file_is_whole_while_threads_replace_it(tmp_path):
    path, parcels = tmp_path / "batch", [pack(tree_of(n, 1000 * (n + 1))) for n in range(4)]
    parcels[0].save(path)
    with ThreadPoolExecutor(4) as pool:
        saved = [pool.submit(parcels[n % 4].save, path) for n in range(200)]
        while not all(each.done() for each in saved):
            assert Parcel.load(path).tree()["y"][1] == "text"
        assert [each.result() for each in saved] == [None] * 200
    assert [each.name for each in tmp_path.iterdir()] == ["batch"]


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))]
)
def test_a_copy_of_a_parcel_may_be_written(copied):
    parcel = pack(tree_of(1))
    other = copied(parcel)
    other.tree()["x"].fill_(7)
    assert other.tree()["x"].tolist() == [7] * 10
    assert_same(parcel.tree(), tree_of(1))


def test_a_file_that_is_none_is_refused(tmp_path):
    path = tmp_path / "none"
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="is empty"):
        Parcel.load(path)
    path.write_bytes(bytes(pack(tree_of(1)))[:-1])
    with pytest.raises(ValueError, match=r"none: .* another size"):
        Parcel.load(path)
    with pytest.raises(OSError, match="No such"):
        Parcel.load(tmp_path / "missing")


class Samples(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.full((3,), index), "n": index, "name": f"sample {index}"}


def packed_batch(samples: list[Any]) -> Parcel:
    return pack(default_collate(samples))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_that_a_loader_packs_arrive_by_every_way(device, workers):
    def loader(collate: Any) -> Any:
        context = "fork" if workers else None  # torchrl 0.14 would make it "spawn" when imported
        return DataLoader(
            Samples(),
            batch_size=4,
            num_workers=workers,
            collate_fn=collate,
            multiprocessing_context=context,
        )

    expected = [oracle(batch, device) for batch in loader(default_collate)]
    ways = {
        "start_copy": [tdcopier.start_copy(each, device).get() for each in loader(packed_batch)],
        "prefetch": list(tdcopier.prefetch(loader(packed_batch), device)),
        "to": [each.to(device, non_blocking=True) for each in loader(packed_batch)],
    }
    for got in ways.values():
        assert_same(got, expected)


def test_pinned_memory_is_read_where_it_is(device):
    tree = tree_of(5, LARGE)
    parcel = pack(tree).pin_memory()
    assert parcel.is_pinned()
    assert parcel.pin_memory() is parcel
    handle = tdcopier.start_copy(parcel, device)
    assert_same(handle.get(), oracle(tree, device))
    assert handle.stats.fallbacks == 0
    del parcel
    gc.collect()
    assert_same(handle.get(), oracle(tree, device))


def test_a_parcel_is_the_source_or_the_destination_of_a_fill(device):
    tree, there = tree_of(6), tdcopier.copy(tree_of(0), device)
    tdcopier.copy_into(pack(tree), there)
    assert_same(there, oracle(tree, device))
    parcel = pack(tree_of(0))
    views = parcel.tree()
    tdcopier.copy_into(there, parcel)
    assert_same(views, tree)
    assert bytes(parcel) == bytes(pack(tree))
    with pytest.raises(TypeError, match=r"destination is a parcel, and not in writable memory"):
        tdcopier.copy_into(tree, Parcel.from_buffer(bytes(parcel)))
    with pytest.raises(TypeError, match="copy_opaque=True"):
        tdcopier.copy_into(tree, parcel, copy_opaque=True)


def test_a_parcel_taken_for_its_tree_says_what_to_do():
    parcel = pack(tree_of(1))
    for use in (lambda: parcel["x"], lambda: list(parcel), lambda: "x" in parcel):
        with pytest.raises(
            TypeError, match=r"it is a packed batch: parcel\.tree\(\) gives the batch"
        ):
            use()
    with pytest.raises(AttributeError, match=r"has no attribute 'shape'.*parcel\.tree\(\)"):
        parcel.shape  # noqa: B018
    for use in (lambda: tdcopier.park(parcel), lambda: tdcopier.snapshot([parcel])):
        with pytest.raises(TypeError, match=r"parcel\.tree\(\)"):
            use()
    with pytest.raises(TypeError, match="Parcel"):
        tdcopier.collate([parcel, parcel])


def test_memory_that_is_none_is_refused():
    with pytest.raises(TypeError, match=r"^out must be a tensor or a buffer: .*'int'"):
        pack([torch.ones(2)], out=5)


def test_out_is_the_memory_of_the_parcel(device):
    tree = tree_of(1)
    size = pack(tree).nbytes
    for out in (
        bytearray(size + 5),
        torch.zeros(size, dtype=torch.uint8),
        np.zeros(size, np.uint8),
    ):
        parcel = pack(tree, out=out)
        assert bytes(out)[: parcel.nbytes] == bytes(parcel) == bytes(pack(tree))
    there = torch.zeros(size, dtype=torch.uint8, device=device)
    parcel = pack(tdcopier.copy(tree, device), out=there)
    assert bytes(there.cpu().numpy()) == bytes(pack(tree))
    there.fill_(7)
    asked = []
    pack(tdcopier.copy(tree, device), out=lambda *wanted: asked.append(wanted) or there)
    assert asked == [(size, there.device)]
    assert bytes(there.cpu().numpy()) == bytes(pack(tree))
    assert_same(tdcopier.copy(parcel, "cpu"), tree)
    for out, why in (
        (bytearray(size - 1), "the parcel needs"),
        (bytes(size), "read-only"),
        (memoryview(bytearray(size + 1))[1:], "multiple of 16"),
    ):
        with pytest.raises(ValueError, match=why):
            pack(tree, out=out)

    def allocate(nbytes: int, where: torch.device) -> bytearray:
        tree["x"].resize_(1 << 20)
        return bytearray(nbytes)

    tree = {"x": torch.ones(1000)}
    with pytest.raises(RuntimeError, match="resized memory of the tree"):
        pack(tree, out=allocate)
    tree = tree_of(1)
    overlapping = torch.arange(400)
    with pytest.raises(ValueError, match="overlaps"):
        pack([overlapping[:100]], out=overlapping.view(torch.uint8)[16:])
    for out in (np.zeros(size, object), pack(tree)):
        with pytest.raises(TypeError, match=r"Python objects|out is a parcel"):
            pack(tree, out=out)
    with pytest.raises(TypeError, match="out must be a tensor on"):
        pack(tdcopier.copy(tree, device), out=bytearray(size))
