"""The result equals `.to` on every leaf, whatever its kind."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import assert_same, oracle

import tdcopier
from tdcopier.workloads import detection_batch

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint16, torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.complex32, torch.complex64, torch.complex128, torch.float8_e4m3fn,
    torch.float8_e5m2,
]  # fmt: skip


def ramp(*shape: int) -> torch.Tensor:
    return torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape)


# name -> (make, packed leaves, alone leaves, delegated leaves)
LEAVES = {
    "0-dim": (lambda: torch.tensor(3.5), 1, 0, 0),
    "empty": (lambda: torch.empty(0), 1, 0, 0),
    "empty with a shape": (lambda: torch.empty(3, 0, 2), 1, 0, 0),
    "transposed": (lambda: ramp(3, 5).t(), 1, 0, 0),
    "channels_last": (
        lambda: ramp(2, 3, 4, 5).contiguous(memory_format=torch.channels_last), 1, 0, 0),
    "a view in the middle of a storage": (lambda: ramp(10)[3:7], 1, 0, 0),
    "one element with an odd stride": (lambda: ramp(9)[2::7][:1], 1, 0, 0),
    "exactly 256 KiB": (lambda: torch.randn(65536), 1, 0, 0),
    "256 KiB and one element": (lambda: torch.randn(65537), 0, 1, 0),
    "several staging buffers": (lambda: torch.randn(3 * 1024 * 1024 + 5), 0, 1, 0),
    "in shared memory": (lambda: ramp(6).share_memory_(), 1, 0, 0),
    "parameter without gradient": (
        lambda: torch.nn.Parameter(ramp(4), requires_grad=False), 1, 0, 0),
    "inference tensor": (lambda: _in_inference_mode(ramp, 4), 1, 0, 0),
    "expanded": (lambda: ramp(1, 4).expand(3, 4), 0, 0, 1),
    "gapped": (lambda: ramp(4, 6)[:, ::2], 0, 0, 1),
    "requires grad": (lambda: ramp(4).requires_grad_(), 0, 0, 1),
    "parameter": (lambda: torch.nn.Parameter(ramp(4)), 0, 0, 1),
    "conjugate view": (lambda: torch.complex(ramp(4), ramp(4)).conj(), 0, 0, 1),
    "negative view": (lambda: torch.complex(ramp(4), ramp(4)).conj().imag, 0, 0, 1),
}  # fmt: skip


def _in_inference_mode(make, *args):
    with torch.inference_mode():
        return make(*args)


@pytest.mark.parametrize("kind", LEAVES)
@pytest.mark.parametrize(
    "wrap", [lambda leaf: leaf, lambda leaf: [{"a": (leaf,)}]], ids=["bare", "nested"]
)
def test_a_leaf_arrives_as_through_to_and_is_counted(device, kind, wrap):
    make, packed, alone, delegated = LEAVES[kind]
    leaf = make()
    handle = tdcopier.start_copy(wrap(leaf), device)
    assert_same(handle.get(), oracle(wrap(leaf), device))
    stats = handle.stats
    assert (stats.packed_leaves, stats.alone_leaves, stats.delegated_leaves) == (
        packed,
        alone,
        delegated,
    )


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_arrives(device, dtype):
    raw = torch.randint(
        0, 2 if dtype is torch.bool else 256, (5 * dtype.itemsize,), dtype=torch.uint8
    )
    tensor = raw.view(dtype) if dtype is not torch.uint8 else raw
    handle = tdcopier.start_copy([tensor, tensor[2:]], device)
    assert_same(handle.get(), oracle([tensor, tensor[2:]], device))
    assert handle.stats.packed_leaves == 2


def test_a_sparse_tensor_is_left_to_torch(device):
    if device.startswith("sim"):
        pytest.skip("the simulated device has no sparse tensors")
    sparse = torch.eye(3).to_sparse()
    handle = tdcopier.start_copy([sparse], device)
    assert_same(handle.get(), oracle([sparse], device))
    assert handle.stats.delegated_leaves == 1


def test_gradients_flow_through_a_leaf_that_needs_them(device):
    leaf = ramp(3).requires_grad_()
    (moved,) = tdcopier.copy([leaf], device)
    (moved * 2).sum().backward()
    assert leaf.grad.tolist() == [2, 2, 2]


def test_under_no_grad_a_leaf_that_needs_gradients_is_packed(device):
    leaf = ramp(3).requires_grad_()
    with torch.no_grad():
        handle = tdcopier.start_copy([leaf], device)
        assert_same(handle.get(), oracle([leaf], device))
    assert handle.stats.packed_leaves == 1


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script:DeprecationWarning"
)  # torch's own decompositions
def test_a_forward_gradient_is_kept(device):
    import torch.autograd.forward_ad as fwad

    with fwad.dual_level():
        dual = fwad.make_dual(ramp(3), torch.ones(3))
        (moved,) = tdcopier.copy([dual], device)
        tangent = fwad.unpack_dual(moved).tangent
        assert tangent is not None
        assert tangent.tolist() == [1, 1, 1]


def test_a_tensor_subclass_is_left_to_torch(device):
    class Labelled(torch.Tensor):
        pass

    leaf = ramp(3).as_subclass(Labelled)
    handle = tdcopier.start_copy([leaf], device)
    assert type(handle.get()[0]) is Labelled
    assert handle.stats.delegated_leaves == 1


def test_inside_vmap_every_leaf_is_left_to_torch(device):
    seen = []

    def body(x):
        handle = tdcopier.start_copy([x, ramp(2)], device)
        seen.append(handle.stats)
        return handle.get()[0] + 1

    result = torch.vmap(body)(ramp(3, 2))
    assert result.tolist() == (ramp(3, 2) + 1).tolist()
    assert seen[0].delegated_leaves == 2


def test_under_a_function_mode_every_leaf_is_left_to_torch(device):
    from torch.overrides import TorchFunctionMode

    class Count(TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            Count.calls += func is torch.Tensor.to
            return func(*args, **(kwargs or {}))

    with Count():
        handle = tdcopier.start_copy([ramp(2), ramp(3)], device)
    assert Count.calls == 2
    assert handle.stats.delegated_leaves == 2


def test_under_a_dispatch_mode_every_leaf_is_left_to_torch(device):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Pass(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with Pass():
        handle = tdcopier.start_copy([ramp(2)], device)
    assert handle.stats.delegated_leaves == 1


def test_a_default_device_does_not_keep_leaves_from_being_packed(device):
    with torch.device(device):
        handle = tdcopier.start_copy([torch.ones(2, device="cpu")], device)
    assert handle.stats.packed_leaves == 1


def test_outputs_have_version_counters_of_their_own(device):
    first, second = tdcopier.copy([ramp(3), ramp(3)], device)
    weight = torch.ones(3, device=device, requires_grad=True)
    loss = (first * weight).sum()
    second.add_(1)  # would break the backward of a shared counter
    loss.backward()
    assert weight.grad.tolist() == [0, 1, 2]


def test_growing_an_empty_output_leaves_its_neighbours_alone(device):
    before, empty, after = tdcopier.copy([torch.ones(4), torch.empty(0), torch.ones(4)], device)
    empty.resize_(64).zero_()
    assert before.tolist() == after.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("elements", [4, 1 << 20], ids=["inline", "background"])
@pytest.mark.parametrize("inside", [True, False])
def test_outputs_are_inference_tensors_if_the_call_was_in_inference_mode(device, elements, inside):
    source = torch.ones(elements)
    with torch.inference_mode(inside):
        handle = tdcopier.start_copy([source], device)
        expected = source.to(device)
    with torch.inference_mode(not inside):
        (moved,) = handle.get()
    assert moved.is_inference() == expected.is_inference() == inside


def test_the_same_tensor_twice_becomes_two_tensors_as_through_to(device):
    leaf = ramp(3)
    first, second = tdcopier.copy([leaf, leaf], device)
    first.add_(1)
    assert second.tolist() == [0, 1, 2]


def test_a_leaf_on_the_target_is_the_same_object(device):
    there = ramp(3).to(device)
    handle = tdcopier.start_copy({"a": there, "b": ramp(3)}, device.split(":")[0])
    assert handle.get()["a"] is there
    assert handle.stats.reused_leaves == 1
    assert handle.stats.packed_leaves == 1


def test_a_leaf_on_another_device_is_left_to_torch(device, accelerator):
    if accelerator.device_count() < 2:
        pytest.skip("needs two devices")
    leaf = ramp(3).to(device[:-1] + "1")
    handle = tdcopier.start_copy([leaf], device)
    assert_same(handle.get(), oracle([leaf], device))
    assert handle.stats.delegated_leaves == 1


def test_back_to_the_host_is_left_to_torch(device):
    leaf = ramp(3).to(device)
    handle = tdcopier.start_copy([leaf, ramp(2)], "cpu")
    assert_same(handle.get(), [ramp(3), ramp(2)])
    assert (handle.stats.delegated_leaves, handle.stats.reused_leaves) == (1, 1)


def test_containers_and_opaque_values_keep_class_order_and_identity(device):
    marker = object()
    tree = {
        ("a", 1): [marker, None, "text", 2.5],
        3: ({}, [], ()),
        "t": (ramp(2), [ramp(1), {"x": marker}]),
    }
    handle = tdcopier.start_copy(tree, device)
    assert_same(handle.get(), oracle(tree, device))
    assert handle.stats.opaque_leaves == 5


@pytest.mark.parametrize("root", [None, 3, "text", [], {}, ()], ids=repr)
def test_the_root_may_be_opaque_or_empty(device, root):
    assert tdcopier.copy(root, device) == root


def test_a_source_tree_changed_after_the_call_does_not_change_the_result(device):
    tree = {"a": [ramp(2)], "b": ramp(3)}
    handle = tdcopier.start_copy(tree, device)
    tree["a"].clear()
    del tree["b"]
    assert_same(handle.get(), oracle({"a": [ramp(2)], "b": ramp(3)}, device))


ARRAYS = {
    "float32": lambda: np.arange(6, dtype=np.float32).reshape(2, 3),
    "0-dim": lambda: np.array(2.5),
    "empty": lambda: np.empty((0, 3), np.int32),
    "fortran order": lambda: np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "permuted": lambda: np.arange(24.0).reshape(2, 3, 4).transpose(1, 0, 2),
    "gapped": lambda: np.arange(24.0).reshape(4, 6)[:, ::2],
    "bool": lambda: np.array([True, False]),
    "uint16": lambda: np.array([1, 65535], np.uint16),
    "complex64": lambda: np.array([1 + 2j], np.complex64),
    "half": lambda: np.array([1.5], np.float16),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_a_numpy_array_becomes_the_tensor_of_from_numpy(device, kind):
    array = ARRAYS[kind]()
    assert_same(tdcopier.copy([array], device), oracle([array], device))


def test_arrays_that_torch_cannot_view_are_copied(device):
    reversed_array = np.arange(5.0)[::-1]
    big_endian = np.arange(4, dtype=">i4")
    unaligned = np.frombuffer(b"x" + np.arange(3.0).tobytes(), np.uint8)[1:].view(np.float64)
    got = tdcopier.copy([reversed_array, big_endian, unaligned], device)
    assert [t.tolist() for t in got] == [[4, 3, 2, 1, 0], [0, 1, 2, 3], [0, 1, 2]]
    assert got[1].dtype == torch.int32


def test_a_read_only_array_is_copied_without_a_warning(device):
    array = np.arange(3.0)
    array.flags.writeable = False
    assert tdcopier.copy(array, device).tolist() == [0, 1, 2]
    assert tdcopier.copy(array, "cpu").tolist() == [0, 1, 2]


def test_on_the_host_an_array_shares_its_memory_with_the_tensor():
    array = np.arange(3.0)
    tensor = tdcopier.copy([array], "cpu")[0]
    array[0] = 7
    assert tensor[0] == 7


@pytest.mark.parametrize(
    "array",
    [
        np.array(["a"]), np.array([None]), np.array(["2020-01-01"], "datetime64[D]"),
        np.zeros(2, [("x", float)]), np.ma.masked_array([1.0, 2.0], [True, False]), np.float32(1.5),
    ],
    ids=["string", "object", "datetime", "structured", "masked", "scalar"],
)  # fmt: skip
def test_arrays_that_no_tensor_can_hold_are_opaque(device, array):
    handle = tdcopier.start_copy([array], device)
    assert handle.get()[0] is array
    assert handle.stats.opaque_leaves == 1


def test_the_detection_batch_arrives_in_one_transfer(device):
    batch = detection_batch()
    handle = tdcopier.start_copy(batch, device)
    assert_same(handle.get(), oracle(batch, device))
    assert handle.stats.packed_leaves == 528
    assert handle.stats.transfers == 1


tensors = st.builds(
    lambda shape, dtype, transpose: (
        torch.randint(0, 100, shape).to(dtype).t() if transpose and len(shape) == 2
        else torch.randint(0, 100, shape).to(dtype)
    ),
    st.lists(st.integers(0, 5), max_size=4),
    st.sampled_from([torch.bool, torch.uint8, torch.int64, torch.float16, torch.complex128]),
    st.booleans(),
)  # fmt: skip
trees = st.recursive(
    st.one_of(tensors, st.none(), st.integers(), st.just(np.arange(3, dtype=np.int16))),
    lambda children: st.one_of(
        st.lists(children, max_size=5),
        st.lists(children, max_size=5).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers()), children, max_size=5),
    ),
    max_leaves=40,
)


@given(
    tree=trees,
    pinned=st.booleans(),
    pack=st.booleans(),
    alignment=st.sampled_from([1, 16, 24, 512, 4096]),
    chunk=st.sampled_from([1, 100, 4096, 1 << 25]),
    background=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_random_trees_equal_to_under_any_options(
    request, tree, pinned, pack, alignment, chunk, background
):
    target = request.getfixturevalue("device")
    got = tdcopier.copy(
        tree, target, use_pinned_staging=pinned, pack_cpu_tensors=pack,
        min_packed_alignment_bytes=alignment, max_packed_chunk_bytes=chunk,
        use_background_thread=background,
    )  # fmt: skip
    assert_same(got, oracle(tree, target))
