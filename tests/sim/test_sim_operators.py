"""Operators on tensors of the simulated device, which run on the host."""

from __future__ import annotations

import copy
import threading
from types import ModuleType

import pytest
import torch
from sim_support import fresh as fresh
from sim_support import gate as gate
from sim_support import pinned

from tdcopier.sim import Gate

pytestmark = pytest.mark.sim


def test_operators_see_what_the_current_stream_was_given_before(
    sim: ModuleType, gate: Gate
) -> None:
    source = pinned(1, 2)
    sim.busy(gate)
    target = source.to("sim", non_blocking=True)
    opener = threading.Thread(target=gate.open)
    opener.start()
    assert (target * 2).tolist() == [2, 4]
    opener.join()


@pytest.mark.hazardous
def test_operators_do_not_wait_for_other_streams(sim: ModuleType) -> None:
    side = torch.sim.Stream()
    target = torch.zeros(1, device="sim")
    source = pinned(5)
    with sim.hold(side):
        with torch.sim.stream(side):
            target.copy_(source, non_blocking=True)
        early = target + 1
    torch.sim.current_stream().wait_stream(side)
    assert early.tolist() == [1]
    assert (target + 1).tolist() == [6]


def test_the_usual_operators_work() -> None:
    a = torch.arange(6.0, device="sim").view(2, 3)
    assert (a + a * 2 - 1).tolist() == [[-1, 2, 5], [8, 11, 14]]
    assert (a > 2).tolist() == [[False] * 3, [True] * 3]
    assert a[a > 2].tolist() == [3, 4, 5]
    assert a[:, [2, 0]].tolist() == [[2, 0], [5, 3]]
    assert a.sum().item() == 15
    assert torch.equal(a, a.clone())
    assert not torch.equal(a, a + 1)
    assert torch.cat([a, a]).shape == (4, 3)
    assert torch.stack([a, a], 1).shape == (2, 2, 3)
    assert (a @ a.t()).tolist() == [[5, 14], [14, 50]]
    a[0] = 7
    a[:, 1:].mul_(2)
    assert a.tolist() == [[7, 14, 14], [3, 8, 10]]
    assert repr(a[1]) == "tensor([ 3.,  8., 10.], device='sim:0')"
    assert a.device == torch.device("sim:0")


def test_views_share_memory() -> None:
    a = torch.zeros(2, 6, device="sim")
    for view in (
        a.t(),
        a.view(3, 4),
        a.reshape(12),
        a.unfold(1, 2, 2),
        a[:, 1],
        a.view(torch.int32),
        torch.view_as_complex(a.view(2, 3, 2)),
        a.unbind(1)[3],
        a.split(2, 1)[1],
    ):
        assert view.untyped_storage().data_ptr() == a.untyped_storage().data_ptr()


def test_tensors_move_by_all_the_usual_names() -> None:
    a = torch.arange(3.0)
    assert a.sim().is_sim
    assert a.sim(1).device == torch.device("sim:1")
    assert not a.is_sim
    assert a.to("sim:1").cpu().equal(a)
    assert torch.nn.Linear(2, 2).sim(1).weight.device.index == 1
    with torch.device("sim:1"):
        assert torch.zeros(2).device.index == 1


def test_deep_copies_stay_on_their_device() -> None:
    a = torch.arange(6.0).view(2, 3).to("sim:1")
    pair = copy.deepcopy([a, a.t()])
    a.zero_()
    assert pair[0].device == torch.device("sim:1")
    assert pair[0].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert pair[1].untyped_storage().data_ptr() == pair[0].untyped_storage().data_ptr()


def test_gradients_flow_through_moves() -> None:
    a = torch.tensor([1.0, 2.0], requires_grad=True)
    ((a.to("sim") ** 2).to("sim:1").sum() * 3).cpu().backward()
    assert a.grad is not None
    assert a.grad.tolist() == [6, 12]
    b = torch.nn.Parameter(torch.ones(2, device="sim"))
    (b * 5).sum().backward()
    assert b.grad.tolist() == [5, 5]


@pytest.mark.hazardous
def test_a_tensor_that_grows_keeps_its_bytes_in_stream_order(sim: ModuleType) -> None:
    source = pinned(1, 2)
    with sim.hold():
        a = source.to("sim", non_blocking=True)
        a.resize_(1000)
        source.fill_(4)
    assert a[:2].tolist() == [4, 4]
    a.untyped_storage().resize_(0)
    assert a.untyped_storage().nbytes() == 0


def test_storages_can_be_set() -> None:
    a = torch.arange(6.0, device="sim")
    b = torch.empty(0, device="sim").set_(a.untyped_storage(), 1, (2, 2), (3, 1))
    assert b.tolist() == [[1, 2], [4, 5]]
    c = torch.empty(0, device="sim").set_(b)
    assert c.data_ptr() == b.data_ptr()
    assert c.set_().numel() == 0


def test_random_numbers_follow_the_seed_of_the_host() -> None:
    torch.manual_seed(3)
    a = torch.randn(4, device="sim")
    state = torch.sim.get_rng_state()
    b = torch.randn(4, device="sim")
    torch.sim.set_rng_state(state)
    assert torch.equal(torch.randn(4, device="sim"), b)
    torch.manual_seed(3)
    assert torch.equal(torch.randn(4), a.cpu())


def test_only_tensors_of_the_host_can_be_pinned() -> None:
    with pytest.raises(RuntimeError, match="pin"):
        torch.empty(2, device="sim", pin_memory=True)


def test_results_are_on_the_first_simulated_device_among_the_arguments() -> None:
    host, first, second = (torch.ones(2, device=name) for name in ("cpu", "sim:0", "sim:1"))
    assert (host + second).device == torch.device("sim:1")
    assert (second + first).device == torch.device("sim:1")
    assert torch.cat([host, first, second]).device == torch.device("sim:0")
    assert (host.add_(second)) is host
    assert host.tolist() == [2, 2]


def test_a_view_of_another_library_is_refused() -> None:
    library = torch.library.Library("tdcopier_test", "FRAGMENT")
    library.define("first(Tensor(a) x) -> Tensor(a)")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("first", lambda x: x[0], "CPU")
    library.impl("twice", lambda x: x * 2, "CPU")
    given = torch.arange(3.0, device="sim")
    assert torch.ops.tdcopier_test.twice(given).tolist() == [0, 2, 4]
    with pytest.raises(RuntimeError, match=r"no kernel for tdcopier_test::first.* shares memory"):
        torch.ops.tdcopier_test.first(given)


def test_a_result_that_is_given_takes_the_shape_and_the_layout_of_the_host() -> None:
    images = torch.rand(1, 3, 4, 4).to(memory_format=torch.channels_last).to("sim")
    result = torch.empty(0, device="sim")
    assert torch.add(images, 1, out=result) is result
    assert result.shape == images.shape
    assert result.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(result, images + 1)


def test_statistics_of_batch_norm_change_only_in_training(sim: ModuleType) -> None:
    norm = torch.nn.BatchNorm2d(3).to("sim")
    images = torch.rand(2, 3, 4, 4, device="sim")
    norm(images)
    mean = norm.running_mean.clone()
    assert mean.abs().sum() > 0
    norm.eval()
    side = torch.sim.Stream()
    with sim.detect():  # two streams may read the same statistics
        norm(images)
        with torch.sim.stream(side):
            norm(images)
    assert torch.equal(norm.running_mean, mean)
