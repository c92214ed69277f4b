"""Refusals of `copy_into`: the message names the leaf, and nothing is written."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support import raises_exactly

import tdcopier


class Refused(NamedTuple):
    make: Callable[[], tuple[Any, Any]]
    """Makes source and destination: further leaves, after a first one in each that fits."""
    message: str
    error: type[Exception] = ValueError


def two(n: int = 2) -> torch.Tensor:
    return torch.zeros(n)


def read_only() -> np.ndarray[Any, Any]:
    array = np.zeros(2, np.float32)
    array.flags.writeable = False
    return array


def shrunk() -> torch.Tensor:
    leaf = torch.zeros(2)
    leaf.untyped_storage().resize_(4)
    return leaf


def of_inference_mode() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(2)


def two_of_one(first: slice, second: slice) -> tuple[Any, Any]:
    whole = torch.zeros(10)
    left, right = whole[first], whole[second]
    return [torch.ones_like(left), torch.ones_like(right)], [left, right]


def interleaved() -> tuple[Any, Any]:
    whole = torch.zeros(4, 3)
    return [torch.ones(4, 2), torch.ones(4, 2)], [whole[:, :2], whole[:, 1:]]


def shifted() -> tuple[Any, Any]:
    whole = torch.zeros(10)
    return whole[:5], whole[2:7]


def kept_and_written() -> tuple[Any, Any]:
    leaf = torch.zeros(2)
    return [leaf, two()], [leaf, leaf]


def transposed_in_place() -> tuple[Any, Any]:
    """Source and destination share memory, with more rows than are compared one by one."""
    square = torch.zeros(1100, 1100)
    return square.t(), square


def twice_within_many_rows() -> tuple[Any, Any]:
    wide = torch.zeros(1100, 4000)
    row = wide[7, 2100:2200]
    return (
        [torch.ones(1100, 1000), torch.ones(100), torch.ones(100)],
        [wide[:, 0:2000:2], row, row],
    )


def handed_on() -> tuple[Any, Any]:
    shared = torch.zeros(2)
    return [shared, two()], [two(), shared]


Pair = collections.namedtuple("Pair", "left right")
BOTH = ": both must have the same"
REACHED = (
    ": both must be leaves, or containers that are reached in the same way (by key, by attribute "
    "or by index), or neither"
)
SHARE = (
    " share memory: the memory of a destination must not belong to another leaf too; give a "
    "clone() of one"
)
TIED = (
    " share memory: only tied leaves may, which have the same address, shape, strides and dtype, "
    "and are tied in the source too. Views of one tensor, such as x and x.t(), do not count as "
    "tied: leave one out of both trees if the other fills it, or give a clone() of one"
)
GRADIENT = (
    "destination['x'] requires a gradient, and writing in place would break it: make the call "
    "within torch.no_grad(), or give detach()"
)

REFUSED = {
    "another shape": Refused(
        lambda: ([two(), two(2)], [two(), two(3)]),
        "source['x'][1] has shape (2,), but destination['x'][1] has shape (3,)" + BOTH,
    ),
    "another dtype": Refused(
        lambda: (two(), two().double()),
        "source['x'] has dtype torch.float32, but destination['x'] has dtype torch.float64"
        + BOTH
        + "; convert one with to() first",
    ),
    "an array's other dtype": Refused(
        lambda: (two(), np.zeros(2)),
        "source['x'] has dtype torch.float32, but destination['x'] has dtype torch.float64"
        + BOTH
        + "; convert one with to() first",
    ),
    "an array's other shape": Refused(
        lambda: (np.zeros((1, 2)), torch.zeros(2, 1, dtype=torch.float64)),
        "source['x'] has shape (1, 2), but destination['x'] has shape (2, 1)" + BOTH,
    ),
    "a delegated leaf's other shape": Refused(
        lambda: (two().requires_grad_(), two(3)),
        "source['x'] has shape (2,), but destination['x'] has shape (3,)" + BOTH,
    ),
    "a delegated leaf's other shape, before that of a plain one": Refused(
        lambda: ([two().requires_grad_(), two()], [two(3), two(4)]),
        "source['x'][0] has shape (2,), but destination['x'][0] has shape (3,)" + BOTH,
    ),
    "fewer children": Refused(
        lambda: ({"in": [two()]}, {"in": [two(), two()]}),
        "source['x']['in'] has 1 children, but destination['x']['in'] has 2: both must have the "
        "same number",
    ),
    "a key that the destination lacks": Refused(
        lambda: ({"a": two(), "b": two()}, {"a": two(), "c": two()}),
        "source['x'] has 'b', which destination['x'] lacks" + BOTH,
    ),
    "a key that the source lacks": Refused(
        lambda: ({"a": two()}, {"a": two(), "c": two()}),
        "destination['x'] has 'c', which source['x'] lacks" + BOTH,
    ),
    "a key that another kind of mapping lacks": Refused(
        lambda: ({"a": two()}, collections.OrderedDict(b=two())),
        "source['x'] has 'a', which destination['x'] lacks" + BOTH,
    ),
    "a list for a dict": Refused(
        lambda: ({"a": two()}, [two()]),
        "source['x'] is a dict, a container by key, but destination['x'] is a list, a container by "
        "index" + REACHED,
    ),
    "a leaf for a named tuple": Refused(
        lambda: (two(), Pair(two(), two())),
        "source['x'] is a Tensor, a leaf, but destination['x'] is a Pair, a container by attribute"
        + REACHED,
    ),
    "an opaque value for a leaf": Refused(
        lambda: (two(), 3),
        "source['x'] is a Tensor, a leaf, but destination['x'] is an int, which is opaque"
        + REACHED,
    ),
    "a destination with a gradient": Refused(lambda: (two(), two().requires_grad_()), GRADIENT),
    "one for a delegated leaf": Refused(
        lambda: (two().requires_grad_(), two().requires_grad_()), GRADIENT
    ),
    "a read-only array": Refused(
        lambda: (two(), read_only()),
        "destination['x'] is a read-only array: give one that may be written, such as a copy",
    ),
    "an expanded destination": Refused(
        lambda: (two(), torch.zeros(1).expand(2)),
        "destination['x'] has elements that share memory (was it made with expand() or "
        "as_strided()?): give one with memory for each, such as a clone()",
    ),
    "a destination whose rows overlap": Refused(
        lambda: (torch.ones(3, 3), torch.zeros(9).as_strided((3, 3), (2, 1))),
        "destination['x'] has elements that share memory (was it made with expand() or "
        "as_strided()?): give one with memory for each, such as a clone()",
    ),
    "destinations that overlap": Refused(
        lambda: two_of_one(slice(0, 4), slice(3, 6)),
        "destination['x'][0] and destination['x'][1]" + TIED,
    ),
    "destinations whose columns overlap": Refused(
        interleaved, "destination['x'][0] and destination['x'][1]" + TIED
    ),
    "one destination twice": Refused(
        lambda: two_of_one(slice(0, 4), slice(0, 4)),
        "destination['x'][0] and destination['x'][1]" + TIED,
    ),
    "a source that overlaps its destination": Refused(
        shifted, "source['x'] and destination['x']" + SHARE
    ),
    "a source that is another leaf's destination": Refused(
        handed_on, "source['x'][0] and destination['x'][1]" + SHARE
    ),
    "a leaf that is its own destination and another's": Refused(
        kept_and_written, "source['x'][0] and destination['x'][1]" + SHARE
    ),
    "a large square that is transposed in place": Refused(
        transposed_in_place, "destination['x'] and source['x']" + SHARE
    ),
    "one destination twice, between more rows than are compared": Refused(
        twice_within_many_rows, "destination['x'][1] and destination['x'][2]" + TIED
    ),
    "a destination without memory": Refused(
        lambda: (two(), shrunk()),
        "destination['x'] reaches beyond its storage, which has only 4 bytes (was it parked, or "
        "shrunk with untyped_storage().resize_()?)",
    ),
    "a source without memory": Refused(
        lambda: (shrunk(), two()),
        "source['x'] reaches beyond its storage, which has only 4 bytes (was it parked, or "
        "shrunk with untyped_storage().resize_()?)",
    ),
    "a packed sequence": Refused(
        lambda: tuple(torch.nn.utils.rnn.pack_sequence([two()]) for _ in range(2)),
        "destination['x'] is a PackedSequence, which cannot be filled: give the tensors in it",
    ),
    "a packed sequence for a tensor": Refused(
        lambda: (torch.nn.utils.rnn.pack_sequence([two()]), two()),
        "source['x'] is a PackedSequence, but destination['x'] is a Tensor: give the tensors in it",
    ),
    "a destination of inference mode": Refused(
        lambda: (two(), of_inference_mode()),
        "destination['x'] was made in inference mode, and can be written in place only there: "
        "make the call in inference mode, or give a clone()",
        RuntimeError,
    ),
    "numbers that torch lacks": Refused(
        lambda: (np.zeros(2, np.longdouble), two()),
        "source['x'] is a numpy array of dtype float128, which torch cannot take: convert it with "
        ".astype(...) first",
        TypeError,
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_by_its_path_and_nothing_is_written(name):
    refused = REFUSED[name]
    source, destination = refused.make()
    first = torch.zeros(5)
    with raises_exactly(refused.error, refused.message):
        tdcopier.start_copy_into(
            {"first": torch.ones(5), "x": source}, {"first": first, "x": destination}
        )
    assert first.tolist() == [0] * 5
    assert first._version == 0


def test_memory_is_looked_up_behind_all_code_of_classes():
    """A class may shrink the memory of another leaf when it is asked for its tensors."""
    from torch.testing._internal.two_tensor import TwoTensor

    class Shrinks(TwoTensor):
        def __tensor_flatten__(self):
            victim.untyped_storage().resize_(4)
            return super().__tensor_flatten__()

    victim, first = torch.ones(50), torch.zeros(50)
    source = {"a": victim, "b": Shrinks(torch.ones(2), torch.ones(2))}
    with pytest.raises(ValueError, match=r"source\['a'\] reaches beyond its storage"):
        tdcopier.start_copy_into(source, {"a": first, "b": torch.zeros(2)})
    assert first._version == 0


def test_columns_beside_one_another_are_no_overlap():
    whole = torch.zeros(6, 4)
    source = [torch.full((6,), float(i)) for i in range(4)]
    tdcopier.start_copy_into(source, [whole[:, i] for i in range(4)]).get()
    assert whole.tolist() == [[0, 1, 2, 3]] * 6


def test_one_source_may_fill_several_destinations():
    source, left, right = torch.ones(3), torch.zeros(3), torch.zeros(3)
    tdcopier.start_copy_into([source, source], [left, right]).get()
    assert left.tolist() == right.tolist() == [1, 1, 1]


def test_a_tree_that_contains_itself_is_refused():
    source: list[Any] = [torch.ones(2)]
    destination: list[Any] = [torch.zeros(2)]
    source.append(source)
    destination.append(destination)
    with pytest.raises(RecursionError, match="does it contain itself"):
        tdcopier.start_copy_into(source, destination)
    assert destination[0].tolist() == [0, 0]


def test_a_tensordict_of_foreign_memory_is_refused():
    from tensordict import TensorDict

    part = TensorDict({"a": torch.zeros(4)}, [4])._get_sub_tensordict(slice(2))
    with pytest.raises(TypeError, match=r"destination is a _SubTensorDict, whose leaves"):
        tdcopier.start_copy_into(TensorDict({"a": torch.zeros(2)}, [2]), part)


def test_a_stream_of_a_device_that_is_not_filled_is_refused(device, other_device, accelerator):
    handle = tdcopier.start_copy_into([torch.ones(3)], [torch.zeros(3, device=device)])
    with pytest.raises(ValueError, match="give a stream of that device"):
        handle.wait(accelerator.Stream(device=other_device))
    with pytest.raises(TypeError, match="stream must be None or"):
        handle.wait(3)
    handle.get()


def test_options_are_keywords_only():
    with pytest.raises(TypeError):
        tdcopier.start_copy_into([], [], True)  # type: ignore[misc]


def test_destinations_that_overlap_are_refused_wherever_their_sources_are(device):
    host = torch.zeros(4)
    source = [torch.ones(2), torch.ones(2, device=device)]
    with pytest.raises(ValueError, match=r"destination\[0\] and destination\[1\] share memory"):
        tdcopier.start_copy_into(source, [host[:2], host[1:3]])
    assert host.tolist() == [0] * 4


@pytest.mark.parametrize("places", [("cpu", "cpu"), ("cpu", "device"), ("device", "device")])
def test_delegated_leaves_that_overlap_are_refused_too(device, places):
    """Torch copies them leaf by leaf, so the result would depend on the order."""
    source, target = (device if place == "device" else place for place in places)
    tied = torch.zeros(4, device=target)
    needing = [torch.full((4,), float(i), device=source, requires_grad=True) for i in range(2)]
    with pytest.raises(ValueError, match=r"destination\[0\] and destination\[1\] share memory"):
        tdcopier.start_copy_into(needing, [tied, tied])
    conjugate = torch.ones(4, dtype=torch.complex64, device=source).conj()
    read = torch.zeros(4, dtype=torch.complex64, device=target)
    with pytest.raises(ValueError, match=r"source\[0\] and destination\[1\] share memory"):
        tdcopier.start_copy_into([read, conjugate], [torch.ones_like(read), read])
    repeated = torch.zeros(1, device=target).expand(4)
    with pytest.raises(ValueError, match=r"destination\[1\] has elements that share memory"):
        tdcopier.start_copy_into(needing, [tied, repeated])
    assert tied.tolist() == [0] * 4
    assert tied._version == 0


def test_a_delegated_leaf_may_be_filled_from_its_own_memory(device):
    value = torch.full((3,), 1 + 2j, device=device)
    tdcopier.copy_into([value.conj()], [value])
    assert value.tolist() == [1 - 2j] * 3
    parameter = torch.nn.Parameter(torch.ones(3, 1, device=device))
    other = torch.zeros(3, 1, device=device)
    column = parameter.detach().as_strided((3, 1), (1, 5))
    sources, destinations = [parameter] * 2, [parameter.detach(), other]
    try:
        column.copy_(parameter.detach())
    except RuntimeError:  # torch on CUDA takes no other strides of the same memory
        pass
    else:
        sources, destinations = [parameter, *sources], [column, *destinations]
    tdcopier.copy_into(sources, destinations)
    assert other.tolist() == [[1]] * 3
    with pytest.raises(ValueError, match="share memory"):
        tdcopier.copy_into([value.conj(), value], [value, torch.zeros_like(value)])


@pytest.mark.parametrize("is_altered", [False, True])
def test_delegated_leaves_may_share_what_their_classes_only_read(is_altered):
    from torch._subclasses import FakeTensorMode
    from torch.overrides import TorchFunctionMode

    offsets = torch.tensor([0, 2, 5])

    def jagged(value: float) -> list[torch.Tensor]:
        make = torch.nested.nested_tensor_from_jagged
        return [make(torch.full((5, 3), value), offsets) for _ in range(2)]

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **kwargs or {})

    source, destination = jagged(3), jagged(0)
    x, y = torch.ones(3), torch.zeros(3)
    with Mode() if is_altered else contextlib.nullcontext():
        tdcopier.copy_into(source, destination)
        tdcopier.copy_into([x, x], [x, y])
    assert all((each.values() == 3).all() for each in destination)
    assert y.tolist() == [1] * 3
    with FakeTensorMode():
        fake = [torch.empty(3) for _ in range(4)]
        tdcopier.copy_into(fake[:2], fake[2:])


def test_code_of_a_delegated_leaf_may_give_another_leaf_new_memory():
    x, copied = torch.ones(65536), torch.zeros(65536)
    kept: list[torch.Tensor] = []

    class Hooked(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if function is torch.Tensor.copy_:
                x.data = torch.full((65536,), 5.0)
                kept.extend(torch.full((65536,), 7.0) for _ in range(8))
            return super().__torch_function__(function, types, args, kwargs)

    first, second = (torch.zeros(2).as_subclass(Hooked) for _ in range(2))
    tdcopier.copy_into([first, x], [second, copied])
    assert kept
    assert copied.unique().tolist() == [1]
