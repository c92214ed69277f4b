"""Tests sources in memory-mapped files.

Workers read them in pieces, and not in the caller's thread if that would wait for a disk.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from staged_windows import windows_of
from support import assert_same

import tdcopier

PIECE_BYTES = 1024 * 1024


def _by_tensordict(path: Path, elements: int) -> Any:
    from tensordict import MemoryMappedTensor

    return MemoryMappedTensor.from_filename(path, dtype=torch.int32, shape=(elements,))


def _by_torch(path: Path, elements: int) -> Any:
    return torch.from_file(str(path), shared=True, size=elements, dtype=torch.int32)


def _by_numpy(path: Path, elements: int) -> Any:
    return np.memmap(path, dtype=np.int32, mode="r", shape=(elements,))


WAYS: dict[str, Callable[[Path, int], Any]] = {
    "MemoryMappedTensor": _by_tensordict,
    "torch.from_file": _by_torch,
    "np.memmap": _by_numpy,
}


@pytest.fixture(params=WAYS)
def map_file(request: pytest.FixtureRequest) -> Callable[[Path, int], Any]:
    return WAYS[request.param]


def written(path: Path, elements: int) -> torch.Tensor:
    """Writes the file to disk, and returns its values."""
    values = torch.arange(elements, dtype=torch.int32)
    path.write_bytes(values.numpy().tobytes())
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.close(file)
    return values


def is_cold(path: Path) -> bool:
    """Whether the file could be evicted from the page cache: not all file systems allow that.

    The kernel may keep a page that is in use, so this retries.
    """
    return any(_is_thrown_out(path) for _ in range(100))


def _is_thrown_out(path: Path) -> bool:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    size = path.stat().st_size
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        anchor = ctypes.c_char.from_buffer(mapped)
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(anchor)), size, pages)
        del anchor
        assert failed == 0, os.strerror(ctypes.get_errno())
        return not any(flags & 1 for flags in pages)


def test_a_small_source_on_disk_is_read_by_workers_and_one_in_memory_within_the_call(
    device, tmp_path, map_file
):
    values = written(tmp_path / "leaf", 1000)
    if not is_cold(tmp_path / "leaf"):
        pytest.skip("this file system keeps its files in memory")
    source = map_file(tmp_path / "leaf", 1000)
    handle = tdcopier.start_copy([source], device)
    assert_same(handle.get(), [values.to(device)])
    assert handle.stats.background
    again = tdcopier.start_copy([source], device)
    assert_same(again.get(), [values.to(device)])
    assert not again.stats.background
    inline = tdcopier.start_copy([source], device, use_background_thread=False)
    assert not inline.stats.background


VIEWS: dict[str, Callable[[Any], Any]] = {
    "every 1000th": lambda leaf: leaf[::1000],
    "the ends": lambda leaf: leaf[:: len(leaf) - 1],
    "backwards": lambda leaf: leaf[::-1],  # only numpy has it
}


def read_at(path: Path, offset: int) -> None:
    """Brings one page into memory, and none after it."""
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        file.seek(offset)
        file.read(1)


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_with_gaps_is_read_by_workers_where_only_its_first_bytes_are_in_memory(
    device, tmp_path, map_file, view
):
    elements = 100_000
    written(tmp_path / "leaf", elements)
    if view == "backwards" and map_file is not _by_numpy:
        pytest.skip("torch has no such views")
    source = VIEWS[view](map_file(tmp_path / "leaf", elements))
    if not is_cold(tmp_path / "leaf"):
        pytest.skip("this file system keeps its files in memory")
    read_at(tmp_path / "leaf", 4 * (elements - 1) if view == "backwards" else 0)
    handle = tdcopier.start_copy([source], device)
    values = torch.arange(elements, dtype=torch.int32).numpy()
    expected = torch.from_numpy(VIEWS[view](values).copy())
    assert_same(handle.get(), [expected.to(device)])
    assert handle.stats.background


def test_any_of_the_first_leaves_on_disk_calls_for_workers(device, tmp_path, map_file):
    values = [written(tmp_path / name, 100) for name in "abc"]
    if not is_cold(tmp_path / "c"):
        pytest.skip("this file system keeps its files in memory")
    sources = [map_file(tmp_path / name, 100) for name in "abc"]
    handle = tdcopier.start_copy(sources, device)
    assert_same(handle.get(), [each.to(device) for each in values])
    assert handle.stats.background


def test_a_large_source_is_shared_out_in_pieces(device, tmp_path, map_file):
    elements = (5 * PIECE_BYTES) // 4 + 3
    values = written(tmp_path / "leaf", elements)
    source = {"x": map_file(tmp_path / "leaf", elements)}
    handle = tdcopier.start_copy(source, device, use_background_thread=False)
    assert_same(handle.get(), {"x": values.to(device)})
    assert (handle.stats.alone_leaves, handle.stats.transfers) == (1, 6)


def test_memory_that_is_no_file_is_not_shared_out_in_such_pieces(device):
    shared = torch.zeros(5 * PIECE_BYTES, dtype=torch.uint8).share_memory_()
    plain = torch.zeros(5 * PIECE_BYTES, dtype=torch.uint8)
    for source in (shared, plain):
        handle = tdcopier.start_copy(source, device, use_background_thread=False)
        handle.get()
        assert handle.stats.transfers == len(windows_of(5 * PIECE_BYTES))


def test_a_mapped_tensor_arrives_as_a_plain_one_and_stays_itself_on_the_host(device, tmp_path):
    values = written(tmp_path / "leaf", 100)
    source = _by_tensordict(tmp_path / "leaf", 100)
    handle = tdcopier.start_copy([source, source[10:20]], device)
    assert_same(handle.get(), [values.to(device), values[10:20].to(device)])
    assert handle.stats.packed_leaves == 2
    there = tdcopier.start_copy(source, "cpu")
    assert there.get() is source
    assert there.stats.reused_leaves == 1


def test_the_file_may_be_forgotten_as_soon_as_the_call_returns(device, tmp_path, map_file):
    elements = (3 * PIECE_BYTES) // 4
    values = written(tmp_path / "leaf", elements)
    handle = tdcopier.start_copy(map_file(tmp_path / "leaf", elements), device)
    (tmp_path / "leaf").unlink()
    assert_same(handle.get(), values.to(device))


@pytest.mark.parametrize("size", [1_000, 300_000])
@pytest.mark.parametrize("call", ["wait", "get", "wait_staged"])
def test_a_mapped_source_may_be_refilled_as_soon_as_the_call_has_returned(
    device, size, call, tmp_path, slow_link
):
    """As in a loop that fills one buffer again and again."""
    path = str(tmp_path / "leaf")
    source = torch.from_file(path, shared=True, size=size, dtype=torch.float32)
    results = []
    with slow_link:
        for step in range(4):
            source.fill_(step)
            handle = tdcopier.start_copy({"batch": source}, device)
            getattr(handle, call)()
            source.fill_(-1)
            results.append(handle.wait()["batch"])
    assert [set(result.tolist()) for result in results] == [{0.0}, {1.0}, {2.0}, {3.0}]
