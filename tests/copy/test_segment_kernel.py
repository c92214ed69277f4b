"""The CUDA kernel that gathers and scatters, compared with the portable path and the source."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from support import run_python

import tdcopier
from tdcopier import _C

pytestmark = pytest.mark.cuda

WIDTHS = [torch.uint8, torch.int16, torch.float32, torch.float64, torch.complex128]


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    yield
    _C.use_segment_kernel(True)
    _C.testing.set_max_straight_bytes(_C.MAX_STRAIGHT_BYTES)


def leaves_of(
    lengths: list[int], dtypes: list[torch.dtype], device: str, shift: int = 0
) -> list[torch.Tensor]:
    """Makes leaves of random bytes, each beginning `shift` elements into its memory."""
    found = []
    for index, length in enumerate(lengths):
        dtype = dtypes[index % len(dtypes)]
        count = (length + shift) * dtype.itemsize
        raw = torch.randint(0, 256, (count,), dtype=torch.uint8, device=device)
        found.append(raw.view(dtype)[shift:])
    return found


def assert_equal_bytes(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for got, leaf in zip(found, wanted, strict=True):
        assert got.dtype == leaf.dtype
        assert got.shape == leaf.shape
        assert torch.equal(got.view(torch.uint8).cpu(), leaf.view(torch.uint8).cpu())


def test_every_cuda_device_has_the_kernel(device):
    for index in range(torch.cuda.device_count()):
        assert _C.why_no_segment_kernel(f"cuda:{index}") == ""
    assert _C.why_no_segment_kernel("cpu") != ""
    _C.use_segment_kernel(False)
    assert _C.why_no_segment_kernel(device) == "it is switched off"


LENGTHS = {
    "small": [*range(1, 70)],
    "around a block's work": [16_383, 16_384, 16_385, 1, 32_768, 4],
    "more than one launch holds": [3] * 5_000,
    "exactly what the parameters hold": [5] * 254 + [6] * 512 + [7] * 1280,
    "large": [260_000, 7, 130_001, 65_536],
    "more than 32 MiB": [3_000_001, 65_536, 7, 65_537, *[400_000] * 90],
}


@pytest.mark.parametrize("straight", [True, False], ids=["straight", "by a chunk"])
@pytest.mark.parametrize("shift", [0, 1, 3])
@pytest.mark.parametrize("kind", LENGTHS)
def test_leaves_of_every_width_arrive_on_the_host(device, kind, shift, straight):
    _C.testing.set_max_straight_bytes(1 << 30 if straight else 0)
    for dtypes in ([torch.uint8], WIDTHS):
        source = leaves_of(
            [max(1, n // max(t.itemsize for t in dtypes)) for n in LENGTHS[kind]],
            dtypes,
            device,
            shift,
        )
        assert_equal_bytes(tdcopier.copy(source, "cpu"), source)
        unaligned = tdcopier.copy(source, "cpu", min_packed_alignment_bytes=1)
        assert_equal_bytes(unaligned, source)


@pytest.mark.parametrize("source_on", ["cpu", "cuda"])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("kind", LENGTHS)
def test_existing_leaves_of_every_width_are_filled(device, kind, shift, source_on):
    for dtypes in ([torch.uint8], WIDTHS):
        lengths = [max(1, n // max(t.itemsize for t in dtypes)) for n in LENGTHS[kind]]
        source = leaves_of(lengths, dtypes, source_on)
        destination = leaves_of(lengths, dtypes, device, shift)
        tdcopier.start_copy_into(source, destination).get()
        assert_equal_bytes(destination, source)


def test_what_lies_around_destinations_stays(device):
    rows = torch.zeros(100, 3, 7, dtype=torch.uint8, device=device)
    source = [torch.full((7,), 9, dtype=torch.uint8) for _ in range(100)]
    tdcopier.start_copy_into(source, [row[1] for row in rows]).get()
    assert rows[:, 1].eq(9).all()
    assert rows[:, ::2].eq(0).all()


def test_leaves_with_gaps_and_empty_ones_go_beside_it(device):
    base = torch.arange(4_000.0, device=device).reshape(40, 100)
    source = [base[:, ::2], torch.ones(5, device=device), base[:0], base.t()[3:9], base[7]]
    moved = tdcopier.copy(source, "cpu")
    for got, leaf in zip(moved, source, strict=True):
        assert torch.equal(got, leaf.cpu())


@pytest.mark.parametrize("kind", LENGTHS)
def test_leaves_of_every_width_arrive_on_another_device(device, other_device, kind):
    for straight in (0, 1 << 30):
        _C.testing.set_max_straight_bytes(straight)
        for shift in (0, 1, 3):
            source = leaves_of(LENGTHS[kind], WIDTHS[:3], other_device, shift)
            assert_equal_bytes(tdcopier.copy(source, device), source)
            destination = leaves_of(LENGTHS[kind], WIDTHS[:3], device)
            tdcopier.start_copy_into(source, destination).get()
            assert_equal_bytes(destination, source)


def test_the_other_device_is_written_straight_after_the_first_copy(device, other_device):
    source = leaves_of(LENGTHS["small"], [torch.uint8], other_device)
    tdcopier.copy(source, device)
    torch.cuda.synchronize(device)
    with torch.profiler.profile(acc_events=True) as profiler:
        handle = tdcopier.start_copy(source, device)
        assert_equal_bytes(handle.get(), source)
        torch.cuda.synchronize(device)
    names = [e.name for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert sum("move_segments" in name for name in names) == 1
    assert not any("Memcpy" in name and "DtoH" not in name for name in names)
    assert (handle.stats.transfers, handle.stats.fallbacks) == (1, 0)
    assert tdcopier.explain(source, device).counts.transfers == 1


@pytest.mark.parametrize("count", [200, 3])
def test_another_device_is_written_behind_the_kernels_of_both(device, other_device, count):
    source = [torch.zeros(70_000, device=other_device) for _ in range(count)]
    for turn in range(20):
        for leaf in source:
            leaf.fill_(turn)
        with torch.cuda.device(device):  # what it frees is written by the next copy
            freed = [torch.full((70_000,), -1.0, device=device) for _ in range(count)]
            del freed
        result = tdcopier.start_copy(source, device).wait()
        for leaf in source:
            leaf.fill_(-2)
        assert all(leaf.eq(turn).all() for leaf in result)


def test_destinations_far_apart_on_the_device_are_filled(device):
    """In more parts of 2 GiB than a launch knows."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("it needs 20 GiB of device memory")
    apart = [torch.empty(2 << 30, dtype=torch.uint8, device=device) for _ in range(10)]
    destination = [piece[at : at + 70_001] for at in (5, (2 << 30) - 70_001) for piece in apart]
    source = leaves_of([70_001] * len(destination), [torch.uint8], device)
    tdcopier.start_copy_into(source, destination).get()
    assert_equal_bytes(destination, source)


def test_leaves_with_gaps_within_a_device_go_beside_it(device):
    base = torch.arange(4_000.0, device=device).reshape(40, 100)
    there = torch.zeros(40, 100, device=device)
    tdcopier.start_copy_into(
        [base[:, ::2], base[0, 1::2], base[:0]], [there[:, ::2], there[0, 1::2], there[:0]]
    ).get()
    assert torch.equal(there[:, ::2], base[:, ::2])
    assert torch.equal(there[0], base[0])
    assert there[1:, 1::2].eq(0).all()


def test_a_copy_within_a_device_is_one_kernel_and_nothing_else(device):
    source = [torch.ones(20, device=device) for _ in range(500)]
    there = [torch.empty_like(each) for each in source]
    seen = kernels_during(lambda: tdcopier.start_copy_into(source, there).get())
    assert seen == Counter({"move_segments_766": 1})


def test_without_the_kernel_a_copy_within_a_device_is_a_fallback(device):
    source = [torch.ones(20, device=device) for _ in range(5)]
    there = [torch.zeros_like(each) for each in source]
    for use, fallbacks in ((True, 0), (False, 1)):
        _C.use_segment_kernel(use)
        handle = tdcopier.start_copy_into(source, there)
        handle.get()
        assert handle.stats.fallbacks == fallbacks
    assert_equal_bytes(there, source)


def kernels_during(copy) -> Counter[str]:
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    copy()  # loads modules
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        copy()
        torch.cuda.synchronize()
    return Counter(e.name for e in profiler.events() if e.device_type == DeviceType.CUDA)


def test_a_batch_of_small_leaves_is_one_kernel_and_nothing_else(device):
    source = [torch.ones(20, device=device) for _ in range(500)]
    seen = kernels_during(lambda: tdcopier.copy(source, "cpu"))
    assert seen == Counter({"move_segments_766": 1})
    _C.testing.set_max_straight_bytes(0)
    seen = kernels_during(lambda: tdcopier.copy(source, "cpu"))
    assert seen.pop("move_segments_766") == 1
    assert [name.startswith("Memcpy DtoH") for name in seen.elements()] == [True]
    _C.use_segment_kernel(False)
    seen = kernels_during(lambda: tdcopier.copy(source, "cpu"))
    assert not any(name.startswith("move_segments") for name in seen)


def test_without_it_the_portable_way_gives_the_same(device):
    source = leaves_of(LENGTHS["small"], WIDTHS, device)
    _C.use_segment_kernel(False)
    assert_equal_bytes(tdcopier.copy(source, "cpu"), source)


@pytest.mark.parametrize("straight", [True, False], ids=["straight", "by a chunk"])
def test_copies_without_it_count_what_torch_did_instead(device, straight):
    _C.testing.set_max_straight_bytes(_C.MAX_STRAIGHT_BYTES if straight else 0)
    source = leaves_of(LENGTHS["small"], WIDTHS, device)
    strided = torch.ones(40, 50, device=device)[:, ::2]  # never straight, torch gathers it
    batch = source if straight else [*source, strided]
    host = [leaf.cpu() for leaf in source]
    apart = [torch.zeros(leaf.numel() + 9, dtype=leaf.dtype, device=device) for leaf in source]
    destination = [room[: leaf.numel()] for room, leaf in zip(apart, source, strict=True)]

    def fallbacks() -> list[int]:
        gathered = tdcopier.start_copy(batch, "cpu")
        scattered = tdcopier.start_copy_into(host, destination)
        for handle in (gathered, scattered):
            handle.get()
        return [gathered.stats.fallbacks, scattered.stats.fallbacks]

    fallbacks()  # this thread's first use of the device
    by_torch = 0 if straight else 1  # the leaf with gaps
    assert fallbacks() == [by_torch, 0]
    _C.use_segment_kernel(False)
    assert fallbacks() == [by_torch + 1, 1]
    _C.use_segment_kernel(True)
    assert fallbacks() == [by_torch, 0]


def test_a_thread_that_has_not_used_cuda_yet_gathers_too(device):
    source = leaves_of(LENGTHS["small"], WIDTHS, device)
    found: list[list[torch.Tensor]] = []
    thread = threading.Thread(target=lambda: found.append(tdcopier.copy(source, "cpu")))
    thread.start()
    thread.join()
    assert_equal_bytes(found[0], source)


def test_a_result_that_is_dropped_at_once_is_not_given_out_before_it_was_written(stall, device):
    source = [torch.full((50,), 7.0, device=device) for _ in range(40)]
    tdcopier.copy(source, "cpu")
    with stall(_C.copy_stream(device, "from_device")):
        tdcopier.start_copy(source, "cpu")
        others = [torch.full((2_000,), 1.0).pin_memory() for _ in range(20)]
    torch.cuda.synchronize()
    assert all(leaf.eq(1).all() for leaf in others)


def test_the_environment_leaves_it_out(device):
    code = "import tdcopier; print(tdcopier._C.why_no_segment_kernel('cuda:0'))"
    assert run_python(code, TDCOPIER_GATHER="portable").strip() == "it is switched off"
    assert run_python(code, TDCOPIER_GATHER="kernel").strip() == ""
