"""Chunks come from the allocator that torch currently uses, and every copy is right with it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from support import run_python

SUPPORT = Path(__file__).resolve().parents[1] / "support"
PREAMBLE = f"""
import sys
sys.path.insert(0, {str(SUPPORT)!r})
import torch
import allocator_copies
"""
COUNTED = """
import ctypes

def load(path):
    library = ctypes.CDLL(path)
    library.owns.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    mapped = {line.split()[-1] for line in open("/proc/self/maps") if "libcudart" in line}
    assert mapped, "the CUDA runtime is not a library of its own here"
    assert library.use_runtime(mapped.pop().encode()) == 0
    return library
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns the path of a shared library with an allocator that counts."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    assert compiler, "the tests of pluggable allocators need a C++ compiler, as the build does"
    path = tmp_path_factory.mktemp("allocator") / "allocator.so"
    source = SUPPORT / "counting_allocator.cpp"
    command = [*compiler.split(), "-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Werror"]
    done = subprocess.run(
        [*command, "-o", str(path), str(source), "-ldl"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return str(path)


def test_the_counting_allocator_compiles_and_takes_only_a_runtime_that_is_loaded(library: str):
    printed = run_python(f"""
        import ctypes
        library = ctypes.CDLL({library!r})
        print(library.use_runtime(b"/no/such/libcudart.so"), library.count_allocations())
    """)
    assert printed == "1 0\n"


@pytest.mark.sim
def test_copies_are_right_on_the_simulated_device(sim):
    printed = run_python(
        PREAMBLE
        + """
from tdcopier import sim
sim.enable(devices=2)
leaves = allocator_copies.checked_copies("sim:0")
allocator_copies.check_reuse_of_memory("sim:0")
segments = [{"address": leaf.data_ptr(), "total_size": leaf.nbytes} for leaf in leaves]
assert allocator_copies.outside(leaves, segments) == []
assert allocator_copies.outside(leaves[:2], segments[1:]) == [leaves[0].nbytes]
print(len(leaves))
""",
        CUDA_VISIBLE_DEVICES="",
    )
    assert printed == "13\n"


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("settings", "is_in_force"),
    [
        ("backend:native", "torch.cuda.get_allocator_backend() == 'native'"),
        (
            "expandable_segments:True",
            "all(s['is_expandable'] for s in torch.cuda.memory_snapshot() if s['total_size'])",
        ),
        ("backend:cudaMallocAsync", "torch.cuda.get_allocator_backend() == 'cudaMallocAsync'"),
    ],
)
def test_copies_are_right_with_the_settings_of_torchs_own_allocator(
    settings: str, is_in_force: str
):
    run_python(
        PREAMBLE
        + f"""
leaves = allocator_copies.checked_copies("cuda:0")
allocator_copies.check_reuse_of_memory("cuda:0")
assert {is_in_force}
if torch.cuda.get_allocator_backend() == "native":
    assert allocator_copies.outside(leaves, torch.cuda.memory_snapshot()) == []
""",
        PYTORCH_CUDA_ALLOC_CONF=settings,
    )


@pytest.mark.cuda
def test_chunks_come_from_a_pluggable_allocator_and_go_back_to_it(library: str):
    run_python(
        PREAMBLE
        + COUNTED
        + f"""
from torch.cuda.memory import CUDAPluggableAllocator, change_current_allocator
library = load({library!r})
change_current_allocator(CUDAPluggableAllocator({library!r}, "counted_malloc", "counted_free"))
leaves = allocator_copies.checked_copies("cuda:0")
assert [leaf.nbytes for leaf in leaves if not library.owns(leaf.data_ptr(), leaf.nbytes)] == []
before = library.count_frees()
del leaves
allocator_copies.check_reuse_of_memory("cuda:0")
torch.cuda.synchronize()
assert library.count_frees() > before
assert library.count_allocations() >= library.count_frees()
"""
    )


@pytest.mark.cuda
def test_chunks_come_from_the_memory_pool_that_is_in_use():
    run_python(
        PREAMBLE
        + """
allocator_copies.checked_copies("cuda:0")  # memory outside the pool is free, and not to be taken
pool = torch.cuda.MemPool()
with torch.cuda.use_mem_pool(pool):
    leaves = allocator_copies.checked_copies("cuda:0")
    allocator_copies.check_reuse_of_memory("cuda:0")
assert allocator_copies.outside(leaves, pool.snapshot()) == []
after = allocator_copies.checked_copies("cuda:0")
assert len(allocator_copies.outside(after, pool.snapshot())) == len(after)
del leaves, after
torch.cuda.synchronize()
del pool
"""
    )


@pytest.mark.cuda
def test_chunks_come_from_a_memory_pool_with_an_allocator_of_its_own(library: str):
    run_python(
        PREAMBLE
        + COUNTED
        + f"""
from torch.cuda.memory import CUDAPluggableAllocator
library = load({library!r})
allocator = CUDAPluggableAllocator({library!r}, "counted_malloc", "counted_free")
allocator_copies.checked_copies("cuda:0")
assert library.count_allocations() == 0
pool = torch.cuda.MemPool(allocator.allocator())
with torch.cuda.use_mem_pool(pool):
    leaves = allocator_copies.checked_copies("cuda:0")
assert [leaf.nbytes for leaf in leaves if not library.owns(leaf.data_ptr(), leaf.nbytes)] == []
del leaves
torch.cuda.synchronize()
del pool
"""
    )
