"""Mistakes in a call: they raise a helpful message, and break nothing."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from support import assert_same, oracle, raises_exactly, run_python

import tdcopier


def assert_next_copy_works(device: str) -> None:
    assert tdcopier.copy([torch.ones(2)], device)[0].tolist() == [1, 1]


# ---- the device ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["no-such-device", "", "cpu:x"])
def test_what_is_no_device_is_refused_with_what_torch_says_of_it(device, name):
    with pytest.raises(ValueError, match=re.escape(f"unknown device {name!r}: ")) as caught:
        tdcopier.start_copy([torch.ones(2)], name)
    assert str(caught.value).startswith(f"unknown device {name!r}: ")
    assert_next_copy_works(device)


@pytest.mark.parametrize("name", ["mps", "xla", "hpu", "mtia", "vulkan"])
def test_a_device_that_torch_was_built_without_is_refused(device, name):
    reason = f"device {name} is not available: this torch was built without {name}"
    try:
        with raises_exactly(ValueError, reason):
            tdcopier.start_copy([torch.ones(2)], name)
    except (AssertionError, pytest.fail.Exception):
        if torch.zeros(0).to(name).device.type != name:  # it is here
            raise
    assert_next_copy_works(device)


@pytest.mark.sim
def test_the_simulated_device_is_named_before_it_is_enabled():
    program = """
    import torch, tdcopier
    try:
        tdcopier.copy([torch.ones(2)], "sim:1")
    except ValueError as error:
        print(error)
    """
    out = run_python(program)
    assert out.strip() == "unknown device 'sim:1': call tdcopier.sim.enable() before"
    for name in ("similar", "sim:abc"):  # enabled here
        with pytest.raises(ValueError, match="unknown device") as caught:
            tdcopier.copy([torch.ones(2)], name)
        assert "enable" not in str(caught.value)


@pytest.mark.parametrize(("value", "kind"), [(3.5, "float"), (None, "NoneType"), (True, "bool")])
def test_what_cannot_be_a_device_is_refused(device, value, kind):
    message = f"device must be a str, a torch.device or an int, not {kind}"
    with raises_exactly(TypeError, message):
        tdcopier.start_copy([torch.ones(2)], value)
    assert_next_copy_works(device)


def test_a_device_that_does_not_exist_is_refused(device, accelerator):
    kind = device.split(":")[0]
    count = accelerator.device_count()
    if count > 7:
        pytest.skip("this machine has it")
    message = f"device {kind}:7 does not exist: this machine has {count} {kind} device(s)"
    if kind == "sim":
        message += (
            "; ask for more with tdcopier.sim.enable(devices=...) at the start of the program"
        )
    with raises_exactly(ValueError, message):
        tdcopier.start_copy([torch.ones(2)], f"{kind}:7")
    assert_next_copy_works(device)


def test_a_number_that_is_no_device_is_refused(device):
    with pytest.raises(ValueError, match=r"device -1 does not exist: Device index must not be neg"):
        tdcopier.start_copy([torch.ones(2)], -1)
    assert_next_copy_works(device)


@pytest.mark.sim
def test_a_number_is_refused_where_torch_has_no_accelerator():
    """In a process of its own: here, the simulated device is torch's accelerator."""
    program = """
import torch, tdcopier
try:
    tdcopier.copy([torch.ones(2)], 0)
except ValueError as error:
    print(error)
"""
    if torch.version.cuda is not None:
        pytest.skip("torch of CUDA takes 0 for cuda:0")
    assert run_python(program).startswith("device 0 does not exist: ")


@pytest.mark.sim
@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_a_backend_that_torch_lacks_is_refused(sim):
    message = "device cuda is not available: this torch was built without cuda"
    with raises_exactly(ValueError, message):
        tdcopier.start_copy([torch.ones(2)], "cuda")


# ---- the options ---------------------------------------------------------------------------------

SIZE_OPTIONS = {"min_packed_alignment_bytes": 1 << 30, "max_packed_chunk_bytes": 1 << 62}


@pytest.mark.parametrize(("option", "most"), SIZE_OPTIONS.items())
@pytest.mark.parametrize("value", [0, -16, "most and one"])
def test_a_size_out_of_its_range_is_refused(device, option, most, value):
    value = most + 1 if isinstance(value, str) else value
    message = f"{option} must be a positive int of at most {most}; got {value}"
    with raises_exactly(ValueError, message):
        tdcopier.start_copy([torch.ones(2)], device, **{option: value})
    assert_next_copy_works(device)


@pytest.mark.parametrize("option", SIZE_OPTIONS)
@pytest.mark.parametrize("value", [1.5, "16", None, True])
def test_a_size_that_is_not_an_int_is_refused(device, option, value):
    with raises_exactly(TypeError, f"{option} must be a positive int; got {value!r}"):
        tdcopier.start_copy([torch.ones(2)], device, **{option: value})
    assert_next_copy_works(device)


def test_sizes_may_be_numpy_integers(device):
    tdcopier.copy([torch.ones(2)], device, min_packed_alignment_bytes=np.int64(32))


@pytest.mark.parametrize("limit", [0, -1, 2 * 1024 * 1024 - 1])
def test_a_staging_limit_below_one_buffer_is_refused(limit):
    message = f"limit_bytes must be at least 2097152 (one buffer); got {limit}"
    with raises_exactly(ValueError, message):
        tdcopier.limits.set_staging_bytes(limit)


@pytest.mark.parametrize("limit", [0, -3])
def test_a_run_ahead_limit_below_one_is_refused(limit):
    with raises_exactly(ValueError, f"batches must be at least 1; got {limit}"):
        tdcopier.limits.set_run_ahead(limit)


# ---- the structure -------------------------------------------------------------------------------


def test_a_structure_that_contains_itself_raises_recursion_error(device):
    cyclic: list = [torch.ones(2)]
    cyclic.append({"again": cyclic})
    message = (
        "data is nested more than 1000 containers deep, from "
        "data[1]['again'][1]['again'][1]['again'][1]['again']... on: does it contain itself?"
    )
    with raises_exactly(RecursionError, message):
        tdcopier.start_copy(cyclic, device)
    assert_next_copy_works(device)


@pytest.mark.parametrize(
    ("wrap", "step"),
    [(lambda x: [x], "[0]"), (lambda x: (x,), "[0]"), (lambda x: {"k": x}, "['k']")],
    ids=["list", "tuple", "dict"],
)
def test_a_structure_100000_deep_raises_recursion_error(device, wrap, step):
    deep = torch.ones(2)
    for _ in range(100_000):
        deep = wrap(deep)
    message = (
        f"data is nested more than 1000 containers deep, from data{step * 8}... on: "
        "does it contain itself?"
    )
    with raises_exactly(RecursionError, message):
        tdcopier.start_copy(deep, device)
    assert_next_copy_works(device)


def test_a_structure_1000_deep_is_copied(device):
    deep = torch.ones(2)
    for _ in range(1000):
        deep = [deep]
    got = tdcopier.copy(deep, device)
    for _ in range(1000):
        (got,) = got
    assert got.tolist() == [1, 1]


# ---- leaves --------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", "<>")
def test_a_number_type_that_torch_takes_by_another_name_is_copied(device, order):
    array = np.arange(3).astype(np.dtype(np.ulonglong).newbyteorder(order))
    for target in (device, "cpu"):
        moved = tdcopier.copy([array], target)[0]
        assert (moved.dtype, moved.tolist()) == (torch.uint64, [0, 1, 2])
    (row,) = tdcopier.gather([array], torch.tensor([1]), device)
    assert (row.dtype, row.tolist()) == (torch.uint64, [1])


@pytest.mark.parametrize("dtype", [np.longdouble, np.clongdouble])
def test_a_number_type_that_torch_lacks_is_named_with_its_path(device, dtype):
    tree = {"a": [1, {"b": np.zeros(2, dtype)}]}
    message = (
        f"data['a'][1]['b'] is a numpy array of dtype {np.dtype(dtype)}, "
        "which torch cannot take: convert it with .astype(...) first"
    )
    for target in (device, "cpu"):
        with raises_exactly(TypeError, message):
            tdcopier.start_copy(tree, target)
    assert_next_copy_works(device)


def test_a_number_type_of_an_extension_is_named_with_its_path(device):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    message = (
        "data[0] is a numpy array of dtype bfloat16, which torch cannot take: "
        "convert it with .astype(...) first"
    )
    with raises_exactly(TypeError, message):
        tdcopier.start_copy([np.zeros(2, ml_dtypes.bfloat16)], device)
    assert_next_copy_works(device)


STORAGES = {
    "all of it": (lambda base: base, 0),
    "a part": (lambda base: base, 95),
    "behind a view": (lambda base: base[4:8], 16),
    "behind gaps": (lambda base: base[::2], 91),
    "behind an expanded element": (lambda base: base[20:21].expand(3), 83),
}


@pytest.mark.parametrize("kind", STORAGES)
@pytest.mark.parametrize("to_host", [False, True], ids=["H2D", "D2H"])
def test_a_tensor_that_reaches_beyond_its_storage_is_named_with_its_path(device, kind, to_host):
    view, storage_bytes = STORAGES[kind]
    leaf = view(torch.ones(24, device=device if to_host else "cpu"))
    leaf.untyped_storage().resize_(storage_bytes)
    message = (
        f"data['a'][1] reaches beyond its storage, which has only {storage_bytes} bytes "
        "(was it parked, or shrunk with untyped_storage().resize_()?): nothing can read it"
    )
    with raises_exactly(ValueError, message):
        tdcopier.start_copy({"a": [1, leaf]}, "cpu" if to_host else device)
    assert_next_copy_works(device)


@pytest.mark.parametrize("kind", STORAGES)
def test_one_byte_of_storage_more_is_enough(device, kind):
    view, storage_bytes = STORAGES[kind]
    base = torch.arange(24.0)
    leaf = view(base)
    enough = {0: 96, 16: 32, 91: 92, 83: 84, 95: 96}[storage_bytes]
    leaf.untyped_storage().resize_(enough)
    assert_same(tdcopier.copy([leaf], device), oracle([leaf], device))


def test_a_tensor_without_elements_needs_no_storage(device):
    leaf = torch.ones(24)[3:3]
    leaf.untyped_storage().resize_(0)
    assert_same(tdcopier.copy([leaf], device), oracle([leaf], device))


# ---- the handle ----------------------------------------------------------------------------------


def test_what_is_no_stream_is_refused(device):
    handle = tdcopier.start_copy([torch.ones(2)], device)
    message = f"stream must be None or a torch.Stream of {device}, not int"
    with raises_exactly(TypeError, message):
        handle.wait(0)
    assert handle.get()[0].tolist() == [1, 1]


def test_a_stream_of_another_device_is_refused(device, other_device):
    handle = tdcopier.start_copy([torch.ones(2)], device)
    message = (
        f"stream is on {other_device}, but the result is on {device}: give a stream of that device"
    )
    with raises_exactly(ValueError, message):
        handle.wait(torch.Stream(device=other_device))
    assert handle.get()[0].tolist() == [1, 1]


def test_on_the_host_too_a_stream_must_be_one(device):
    handle = tdcopier.start_copy([torch.ones(2)], "cpu")
    with raises_exactly(TypeError, "stream must be None or a torch.Stream of cpu, not str"):
        handle.wait("a stream")
    assert handle.wait(torch.Stream(device=device))[0].tolist() == [1, 1]
