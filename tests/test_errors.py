"""Mistakes in the call: a sentence that helps, and nothing broken afterwards."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

import tdcopier


def assert_next_copy_works(device: str) -> None:
    assert tdcopier.copy([torch.ones(2)], device)[0].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("device_argument", "error", "message"),
    [
        ("no-such-device", ValueError, "unknown device 'no-such-device'"),
        ("", ValueError, "unknown device ''"),
        (3.5, TypeError, "device must be a str, a torch.device or an int, not float"),
        (None, TypeError, "device must be a str, a torch.device or an int, not NoneType"),
        (True, TypeError, "device must be a str, a torch.device or an int, not bool"),
    ],
)
def test_what_is_no_device_is_refused(device, device_argument, error, message):
    with pytest.raises(error, match=re.escape(message)):
        tdcopier.start_copy([torch.ones(2)], device_argument)
    assert_next_copy_works(device)


def test_a_device_that_does_not_exist_is_refused(device, accelerator):
    kind = device.split(":")[0]
    count = accelerator.device_count()
    message = f"device {kind}:7 does not exist: this machine has {count} {kind} device(s)"
    if count > 7:
        pytest.skip("this machine has it")
    with pytest.raises(ValueError, match=re.escape(message)):
        tdcopier.start_copy([torch.ones(2)], f"{kind}:7")
    assert_next_copy_works(device)


@pytest.mark.sim
@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_a_backend_that_torch_lacks_is_refused(sim):
    message = "device cuda is not available: this torch was built without cuda"
    with pytest.raises(ValueError, match=re.escape(message)):
        tdcopier.start_copy([torch.ones(2)], "cuda")


@pytest.mark.parametrize("option", ["min_packed_alignment_bytes", "max_packed_chunk_bytes"])
@pytest.mark.parametrize("value", [0, -16])
def test_a_size_that_is_not_positive_is_refused(device, option, value):
    with pytest.raises(
        ValueError, match=rf"^{option} must be a positive int of at most \d+; got {value}$"
    ):
        tdcopier.start_copy([torch.ones(2)], device, **{option: value})
    assert_next_copy_works(device)


@pytest.mark.parametrize("option", ["min_packed_alignment_bytes", "max_packed_chunk_bytes"])
@pytest.mark.parametrize("value", [1.5, "16", None, True])
def test_a_size_that_is_not_an_int_is_refused(device, option, value):
    with pytest.raises(
        TypeError, match=re.escape(f"{option} must be a positive int; got {value!r}")
    ):
        tdcopier.start_copy([torch.ones(2)], device, **{option: value})
    assert_next_copy_works(device)


def test_sizes_may_be_numpy_integers(device):
    tdcopier.copy([torch.ones(2)], device, min_packed_alignment_bytes=np.int64(32))


def test_a_structure_that_contains_itself_raises_recursion_error(device):
    cyclic: list = [torch.ones(2)]
    cyclic.append({"again": cyclic})
    message = (
        "data is nested more than 1000 containers deep, from "
        "data[1]['again'][1]['again'][1]['again'][1]['again']... on: does it contain itself?"
    )
    with pytest.raises(RecursionError, match=re.escape(message)):
        tdcopier.start_copy(cyclic, device)
    assert_next_copy_works(device)


@pytest.mark.parametrize(
    "wrap", [lambda x: [x], lambda x: (x,), lambda x: {"k": x}], ids=["list", "tuple", "dict"]
)
def test_a_structure_100000_deep_raises_recursion_error(device, wrap):
    deep = torch.ones(2)
    for _ in range(100_000):
        deep = wrap(deep)
    with pytest.raises(RecursionError, match="more than 1000 containers deep"):
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


def test_a_number_type_that_torch_lacks_is_named_with_its_path(device):
    tree = {"a": [1, {"b": np.zeros(2, np.longdouble)}]}
    message = (
        f"data['a'][1]['b'] is a numpy array of dtype {np.dtype(np.longdouble)}, "
        "which torch does not have: convert it with .astype(...) first"
    )
    with pytest.raises(TypeError, match=re.escape(message)):
        tdcopier.start_copy(tree, device)
    assert_next_copy_works(device)


def test_a_stream_of_another_kind_is_refused(device, accelerator):
    handle = tdcopier.start_copy([torch.ones(2)], device)
    with pytest.raises(TypeError, match=r"stream must be None or a torch\.Stream"):
        handle.wait(0)
    if accelerator.device_count() > 1:
        other = torch.Stream(device=device[:-1] + "1")
        with pytest.raises(ValueError, match="give a stream of that device"):
            handle.wait(other)
    assert handle.get()[0].tolist() == [1, 1]


def test_on_the_host_too_a_stream_must_be_one(device):
    handle = tdcopier.start_copy([torch.ones(2)], "cpu")
    with pytest.raises(TypeError, match=r"stream must be None or a torch\.Stream of cpu, not str"):
        handle.wait("a stream")
    assert handle.wait(torch.Stream(device=device))[0].tolist() == [1, 1]


@pytest.mark.parametrize("limit", [0, -1, 4 * 1024 * 1024 - 1])
def test_a_staging_limit_below_one_buffer_is_refused(limit):
    with pytest.raises(ValueError, match=f"limit_bytes must be at least 4194304.*got {limit}"):
        tdcopier.set_staging_limit_bytes(limit)


def test_a_run_ahead_limit_below_one_is_refused():
    with pytest.raises(ValueError, match="batches must be at least 1; got 0"):
        tdcopier.set_run_ahead_limit(0)


def test_a_failing_delegated_leaf_fails_the_copy_every_time_with_its_own_error(device):
    class Broken(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is torch.Tensor.to:
                raise KeyError("cannot move")
            return super().__torch_function__(func, types, args, kwargs or {})

    handle = tdcopier.start_copy([torch.ones(2), torch.ones(2).as_subclass(Broken)], device)
    for _ in range(2):
        assert handle.ready()
        with pytest.raises(KeyError, match="cannot move"):
            handle.get()
        with pytest.raises(KeyError, match="cannot move"):
            handle.wait()
    assert_next_copy_works(device)


def test_an_interrupt_in_a_delegated_leaf_is_raised_by_the_call(device):
    class Interrupted(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is torch.Tensor.to:
                raise KeyboardInterrupt
            return super().__torch_function__(func, types, args, kwargs or {})

    with pytest.raises(KeyboardInterrupt):
        tdcopier.start_copy([torch.ones(2).as_subclass(Interrupted)], device)
    assert_next_copy_works(device)


@pytest.mark.sim
@pytest.mark.parametrize(
    "leaf", [torch.ones(1000), torch.ones(1 << 22)], ids=["inline", "background"]
)
def test_out_of_memory_keeps_its_type_and_the_next_copy_works(sim, device, leaf):
    torch.sim.synchronize()
    torch.sim.empty_cache()
    sim.set_memory_limit_bytes(0, 0)
    try:
        handle = tdcopier.start_copy([leaf], device)
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                handle.get()
            with pytest.raises(torch.OutOfMemoryError):
                handle.wait()
        assert handle.ready()
    finally:
        sim.set_memory_limit_bytes(0, None)
    assert_next_copy_works(device)


def test_internal_errors_are_runtime_errors():
    assert issubclass(tdcopier.InternalError, RuntimeError)
    assert tdcopier.InternalError.__module__ == "tdcopier"
