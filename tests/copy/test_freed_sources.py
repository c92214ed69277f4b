"""The memory of dropped sources: freed once it has been read, but only if nothing else sees it."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scenario_world import held
from torch.multiprocessing.reductions import StorageWeakRef

import tdcopier
from tdcopier import _C

LARGE = 1 << 20
"""4 MiB of floats: workers stage them, and free their memory."""
sendings = pytest.mark.parametrize("sending", list(_C.Sending.__members__.values()))

See = Callable[[], Any]


def values() -> torch.Tensor:
    return torch.arange(LARGE, dtype=torch.float32)


def shared() -> torch.Tensor:
    return values().share_memory_()


def over(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0).set_(storage, 0, (LARGE,))


class ReadsAtItsEnd(torch.Tensor):
    """Notes its values when it is deleted."""

    seen: list[Any]

    def __del__(self) -> None:
        if hasattr(self, "seen"):  # not a result
            self.seen.append(self.as_subclass(torch.Tensor).clone())


# ---- ways in which other code sees the memory of a source ----------------------------------------
# Each takes a source, and returns a function that returns the values that are still to be seen. It
# keeps no other reference to the source.


def sees_by(make: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], See]:
    def make_see(source: torch.Tensor) -> See:
        kept = make(source)
        return lambda: kept

    return make_see


def by_storage(source: torch.Tensor) -> See:
    storage = source.untyped_storage()
    return lambda: over(storage)


def by_weak_storage(source: torch.Tensor) -> See:
    weak = StorageWeakRef(source.untyped_storage())
    storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
    return lambda: over(storage)


def by_capsule(source: torch.Tensor) -> See:
    capsule = source.__dlpack__()
    return lambda: torch.from_dlpack(capsule)


def by_graph(source: torch.Tensor) -> See:
    weight = torch.ones(LARGE, requires_grad=True)
    product = (weight * source).sum()

    def gradient() -> Any:
        product.backward()
        return weight.grad

    return gradient


def by_module(source: torch.Tensor) -> See:
    module = torch.nn.Module()
    module.weight = source
    return lambda: module.weight.detach()


def by_finalizer(source: Any) -> See:
    seen: list[Any] = []
    source.seen = seen
    return lambda: seen[0]


class CallsAtItsEnd:
    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __del__(self) -> None:
        self._call()


def noting(source: torch.Tensor, seen: list[Any]) -> Callable[..., None]:
    """Return a function that notes the values, for code that runs while the source is dropped."""
    weak = StorageWeakRef(source.untyped_storage())

    def note(*_: object) -> None:
        seen.append(over(torch.UntypedStorage._new_with_weak_ptr(weak.cdata)))

    return note


def by_attribute(source: Any) -> See:
    seen: list[Any] = []
    source.note = CallsAtItsEnd(noting(source, seen))
    return lambda: seen[0]


def by_callback(source: torch.Tensor) -> See:
    seen: list[Any] = []
    reference = weakref.ref(source, noting(source, seen))
    return lambda: (reference, seen[0])[1]


def by_second_mapping(source: torch.Tensor) -> See:
    handle, size = source.untyped_storage()._share_fd_cpu_()
    mapped = torch.UntypedStorage._new_shared_fd_cpu(handle, size)
    return lambda: over(mapped)


def by_child(source: torch.Tensor) -> See:
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(told, 1)
        os._exit(0 if np.array_equal(source.numpy(), np.arange(LARGE)) else 1)

    def ask() -> Any:
        os.write(tell, b"x")
        assert os.waitpid(child, 0)[1] == 0
        os.close(told)
        os.close(tell)
        return values()

    return ask


WAYS: dict[str, tuple[Callable[[], torch.Tensor], Callable[[Any], See]]] = {
    "view": (values, sees_by(lambda source: source.view(-1))),
    "shared view": (shared, sees_by(lambda source: source.view(-1))),
    "slices": (values, lambda s: (lambda a, b: lambda: torch.cat([a, b]))(s[:7], s[7:])),
    "detached": (values, sees_by(torch.Tensor.detach)),
    "storage": (values, by_storage),
    "shared storage": (shared, by_storage),
    "storage of a weak reference": (values, by_weak_storage),
    "set_": (values, sees_by(lambda source: torch.empty(0).set_(source))),
    "data": (values, sees_by(lambda source: source.data)),
    "numpy()": (values, sees_by(lambda source: source.numpy())),
    "from_dlpack": (values, sees_by(torch.from_dlpack)),
    "capsule": (values, by_capsule),
    "graph": (values, by_graph),
    "module": (lambda: torch.nn.Parameter(values()), by_module),
    "source": (values, sees_by(lambda source: source)),
    "finalizer": (lambda: values().as_subclass(ReadsAtItsEnd), by_finalizer),
    "finalizer of an attribute": (values, by_attribute),
    "callback of a weak reference": (values, by_callback),
    "array": (lambda: torch.from_numpy(values().numpy()), sees_by(lambda source: source.numpy())),
    "second mapping": (shared, by_second_mapping),
    "child": (shared, by_child),
}


def write_elsewhere() -> None:
    """Allocates memory like that of a source, and writes it, so freed memory is overwritten."""
    _C.testing.settle()
    junk = [torch.full((LARGE,), -1.0) for _ in range(8)]
    assert all(bool((each == -1).all()) for each in junk)


@sendings
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(("make", "make_see"), WAYS.values(), ids=list(WAYS))
def test_what_is_seen_elsewhere_is_kept(device, sending, make, make_see):
    def begin() -> tuple[Any, See]:
        source = make()
        see = make_see(source)
        with held(sending):
            return tdcopier.start_copy([source, torch.ones(3)], device), see

    handle, see = begin()
    handle.wait_staged()
    write_elsewhere()
    assert torch.equal(torch.as_tensor(see()), values())
    assert torch.equal(handle.get()[0].detach().cpu().as_subclass(torch.Tensor), values())


@sendings
@pytest.mark.parametrize("make", [values, shared])
def test_a_source_may_be_several_leaves_and_of_several_copies(device, sending, make):
    def begin() -> list[Any]:
        source = make()
        batch = [source, {"again": source}, source[5:], source.view(2, -1)]
        with held(sending):
            return [tdcopier.start_copy(batch, device) for _ in range(3)]

    handles = begin()
    handles[0].wait_staged()
    write_elsewhere()
    for handle in handles:
        handle.wait_staged()
        write_elsewhere()
        whole, again, part, rows = handle.get()
        for got in (whole, again["again"], rows.view(-1)):
            assert torch.equal(got.cpu(), values())
        assert torch.equal(part.cpu(), values()[5:])


# ---- freed ---------------------------------------------------------------------------------------


def is_mapped(address: int) -> bool:
    """Whether shared memory of torch is mapped at the address."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            first, end = (int(each, 16) for each in line.split()[0].split("-"))
            if first <= address < end:
                return "/torch_" in line
    return False


@sendings
@pytest.mark.parametrize("has_storage_object", [False, True])
def test_shared_memory_that_nothing_else_sees_is_unmapped(device, sending, has_storage_object):
    def begin() -> tuple[Any, Any, int]:
        source = values()
        if has_storage_object:
            source.share_memory_()
        else:  # its storage has no Python object any more
            source = over(torch.UntypedStorage._new_using_fd_cpu(4 * LARGE)).copy_(source)
        address = source.data_ptr()
        assert is_mapped(address)
        with held(sending):
            handle = tdcopier.start_copy([source], device)
        return handle, weakref.ref(source), address

    handle, alive, address = begin()
    handle.wait_staged()
    assert alive() is None
    _C.testing.settle()
    assert not is_mapped(address)
    assert torch.equal(handle.get()[0].cpu(), values())


@sendings
def test_memory_of_an_array_is_dropped_by_the_thread_that_waits(device, sending):
    """That runs Python code, so a worker would have to wait for the GIL."""
    threads: list[int] = []

    def begin() -> Any:
        array = values().numpy().copy()
        weakref.finalize(array, lambda: threads.append(threading.get_native_id()))
        source = torch.from_numpy(array)
        with held(sending):
            return tdcopier.start_copy([source], device)

    handle = begin()
    handle.wait_staged()
    _C.testing.settle()
    assert threads == [threading.get_native_id()]
    assert torch.equal(handle.get()[0].cpu(), values())


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@sendings
@pytest.mark.parametrize("make", [values, shared])
def test_resident_memory_does_not_grow(device, sending, make):
    def copy_some(batches: int) -> None:
        for _ in range(batches):
            with held(sending):
                handle = tdcopier.start_copy([make(), make()], device)
            handle.wait_staged()
            handle.get()
        del handle
        _C.testing.settle()

    copy_some(25)  # the allocator of the C library keeps some of what other threads free
    before = resident_bytes()
    copy_some(25)  # of 8 MiB
    assert resident_bytes() - before < 10 * 8 * LARGE
