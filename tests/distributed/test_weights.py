"""Weights to followers: each has the values of a version, whatever came between."""

from __future__ import annotations

import os
import pickle
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support import comes_true
from torch import nn

import tdcopier
from tdcopier import distributed
from tdcopier._distributed import follower, publisher

TIMEOUT_S = 2.5
Open = Callable[..., Any]


@pytest.fixture
def ends(store: Any) -> Iterator[tuple[Open, Open]]:
    """Returns functions that open a publisher and a follower in this process."""
    opened: list[Any] = []

    def opens(call: Any) -> Open:
        def one(weights: Any, **options: Any) -> Any:
            options = {"store": store, "peer_timeout_s": TIMEOUT_S, "host": "127.0.0.1", **options}
            opened.append(call(weights, **options))
            return opened[-1]

        return one

    yield opens(distributed.publish), opens(distributed.follow)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda end: end.close(timeout_s=10), opened))


class Model(nn.Module):
    """Has tied parameters, buffers and several dtypes."""

    def __init__(self, device: Any = "cpu", width: int = 40) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, 30), nn.BatchNorm1d(30), nn.Linear(30, width))
        self.tied = self.body[0]
        self.small = nn.Parameter(torch.rand(7, dtype=torch.bfloat16))
        self.register_buffer("mask", torch.rand(3, 5) > 0.5)
        self.register_buffer("own", torch.rand(2), persistent=False)
        self.scale = nn.Parameter(torch.rand(()))
        self.wide = nn.Parameter(torch.rand(4, 6).t())
        self.to(device)


def assert_follows(found: nn.Module, wanted: nn.Module) -> None:
    for named in ("named_parameters", "named_buffers"):
        pairs = zip(getattr(found, named)(), getattr(wanted, named)(), strict=True)
        for (name, own), (_, other) in pairs:
            bits = own.detach().cpu().numpy if own.dtype is not torch.bfloat16 else None
            assert torch.equal(own.cpu(), other.cpu()), name
            if bits is not None:
                assert bits().tobytes() == other.detach().cpu().numpy().tobytes(), name


@pytest.mark.parametrize("there", ["cpu", "device"])
@pytest.mark.parametrize("here", ["cpu", "device"])
def test_a_follower_has_the_values_of_each_version(ends, device, there, here):
    places = {"cpu": "cpu", "device": device}
    publish, follow = ends
    source, target = Model(places[there]), Model(places[here])
    published = publish(source)
    kept = [parameter.data_ptr() for parameter in target.parameters()]
    followed = follow(target)
    assert followed.version == 0
    assert followed.update(timeout_s=10) == published.version == 1
    assert_follows(target, source)
    optimizer = torch.optim.SGD(source.parameters(), lr=0.1)
    for version in range(2, 6):
        for parameter in source.parameters():
            parameter.grad = torch.rand_like(parameter)
        optimizer.step()
        source.mask.logical_not_()
        assert published.publish() == version
        assert followed.update(timeout_s=10) == version
        assert_follows(target, source)
    assert [parameter.data_ptr() for parameter in target.parameters()] == kept
    assert all(parameter.requires_grad for parameter in target.parameters())


def test_only_tensors_that_have_changed_are_sent(ends):
    publish, follow = ends
    source, target = Model(width=2000), Model(width=2000)
    published = publish(source)
    followed = follow(target)
    followed.update(timeout_s=10)
    before = published.stats
    writes: list[Callable[[], Any]] = [
        lambda: source.scale.data.add_(1.0),  # which no version counter tells
        lambda: source.own.neg_(),
        lambda: source.own.zero_(),
        lambda: source.own.neg_(),  # -0.0, which is equal to 0.0
        lambda: source.own.fill_(float("nan")),
        lambda: source.small.data.view(torch.int16).add_(1),
        lambda: setattr(source, "scale", nn.Parameter(torch.rand(()))),
    ]
    for number, write in enumerate(writes):
        write()
        assert published.publish() == number + 2
        assert followed.update(timeout_s=10) == number + 2
        assert source.own.numpy().tobytes() == target.own.numpy().tobytes()
        assert source.scale == target.scale
        time.sleep(0.1)  # a step, after which the publisher knows that the follower has memory
    stats = published.stats
    assert stats.parts == stats.messages - before.messages == len(writes)
    assert stats.nbytes - before.nbytes < 1000 * len(writes)
    late = Model(width=2000)
    assert follow(late).update(timeout_s=10) == published.version
    assert late.own.numpy().tobytes() == source.own.numpy().tobytes()
    assert torch.equal(late.small, source.small)


def test_names_shapes_and_dtypes_may_change_between_versions(ends):
    publish, follow = ends
    source = {"a": torch.zeros(1000), "b": torch.zeros(3), "c": torch.zeros(2).to(torch.complex128)}
    target = {name: torch.ones_like(tensor) for name, tensor in source.items()}
    published, followed = publish(source), follow(target)
    followed.update(timeout_s=10)
    source["c"].neg_()  # to -0
    assert published.publish() == followed.update(timeout_s=10) == 2
    source["b"] = target["b"] = torch.ones(4)
    assert published.publish() == followed.update(timeout_s=10) == 3
    source["b"] = torch.full((4,), 2.0).double()
    target["b"] = torch.zeros(4).double()
    with torch.inference_mode():
        assert published.publish() == 4
    assert followed.update(timeout_s=10) == 4
    source["d"], target["d"] = source.pop("b"), target.pop("b")
    assert published.publish() == followed.update(timeout_s=10) == 5
    source["c"] = torch.ones(2, dtype=torch.complex128).mul_(1j).conj()
    assert published.publish() == followed.update(timeout_s=10) == 6
    assert target["d"].tolist() == [2.0] * 4
    assert target["c"].tolist() == [-1j, -1j]


def test_a_module_without_tensors_has_a_version(ends):
    publish, follow = ends
    assert publish(nn.ReLU()).version == follow(nn.ReLU()).update(timeout_s=10) == 1


def test_threads_share_a_follower(ends):
    publish, follow = ends
    source, target = {"a": torch.zeros(2000)}, {"a": torch.ones(2000)}
    published, followed = publish(source), follow(target)
    followed.update(timeout_s=10)
    with ThreadPoolExecutor(4) as pool:
        updates = [
            pool.submit(lambda: [followed.update(timeout_s=0.01) for _ in range(60)])
            for _ in "1234"
        ]
        for number in range(1, 60):
            source["a"].fill_(number)
            published.publish()
        for each in updates:
            each.result()
    while followed.version < published.version:
        followed.update(timeout_s=10)
    assert torch.equal(source["a"], target["a"])


def test_a_closed_follower_writes_nothing(ends):
    publish, follow = ends
    publish({"a": torch.ones(3)})
    target = {"a": torch.zeros(3)}
    followed = follow(target)
    time.sleep(0.3)
    followed.close(timeout_s=10)
    with pytest.raises(distributed.ChannelClosedError, match="this follower is closed"):
        followed.update()
    assert target["a"].eq(0).all()


def test_what_has_not_changed_is_no_version(ends):
    publish, follow = ends
    source, target = Model(), Model()
    published, followed = publish(source), follow(target)
    followed.update(timeout_s=10)
    assert [published.publish() for _ in range(3)] == [1, 1, 1]
    assert followed.update() == 1
    assert published.stats.messages == 1


def test_a_follower_that_was_away_gets_the_last_version(ends):
    publish, follow = ends
    source = {"a": torch.zeros(50_000), "b": torch.zeros(3)}
    target = {name: torch.empty_like(tensor) for name, tensor in source.items()}
    published, followed = publish(source), follow(target)
    followed.update(timeout_s=10)
    for number in range(1, 30):
        source["a" if number % 3 else "b"].fill_(number)
        begin = time.monotonic()
        published.publish()
        assert time.monotonic() - begin < 1.0  # does not wait for it
    while followed.version < 30:
        followed.update(timeout_s=10)
    assert all(torch.equal(source[name], target[name]) for name in source)
    assert published.stats.messages < 30


def test_followers_come_and_go(ends):
    publish, follow = ends
    source = {"a": torch.zeros(1000)}
    published = publish(source)
    versions: dict[Any, int] = {}
    for number in range(2, 8):
        target = {"a": torch.ones(1000)}
        followed = follow(target)
        versions[followed] = followed.update(timeout_s=10)
        source["a"].fill_(number)
        assert published.publish() == number
        for each in versions:
            assert each.update(timeout_s=10) == number
        assert target["a"].eq(number).all()
    assert len(published.peers) == 6
    for followed in list(versions)[:3]:
        followed.close(timeout_s=10)
    assert comes_true(lambda: published.stats.closed_peers == 3)  # when its thread has noticed
    assert published.stats.open_peers == 3
    assert published.problems == []


def test_the_last_version_comes_before_the_end(ends):
    publish, follow = ends
    source, target = {"a": torch.zeros(100_000)}, {"a": torch.ones(100_000)}
    published, followed = publish(source), follow(target)
    followed.update(timeout_s=10)
    source["a"].fill_(5)
    published.publish()
    published.close(timeout_s=10)
    while followed.version < 2:
        followed.update(timeout_s=10)
    assert target["a"].eq(5).all()
    with pytest.raises(distributed.ChannelClosedError, match=r"the publisher, .*, has closed"):
        followed.update()
    with pytest.raises(distributed.ChannelClosedError, match="this publisher is closed"):
        published.publish()
    followed.close()
    with pytest.raises(distributed.ChannelClosedError, match="this follower is closed"):
        followed.update()


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ({"a": torch.zeros(3)}, "only one of the two has b"),
        ({"a": torch.zeros(3), "b": torch.zeros(2), "c": torch.zeros(1)}, "has c"),
        ({"a": torch.zeros(4), "b": torch.zeros(2)}, r"a is torch.float32 \[3\] there"),
        ({"a": torch.zeros(3).double(), "b": torch.zeros(2)}, r"torch.float64 \[3\] here"),
    ],
)
def test_other_weights_are_refused_and_stay_as_they_are(ends, target, says):
    publish, follow = ends
    source = {"a": torch.ones(3), "b": torch.ones(2)}
    published, followed = publish(source), follow(target)
    with pytest.raises(ValueError, match=says):
        followed.update(timeout_s=10)
    assert followed.version == 0
    assert all(tensor.eq(0).all() for tensor in target.values())
    source["b"].add_(1)
    published.publish()
    with pytest.raises(ValueError, match=says):
        followed.update(timeout_s=10)
    target.clear()  # as the user may change it
    target.update({"a": torch.zeros(3), "b": torch.zeros(2)})
    assert followed.update(timeout_s=10) in (1, 2)
    while followed.version < 2:
        followed.update(timeout_s=10)
    assert all(torch.equal(source[name], target[name]) for name in source)


def test_an_interrupted_publish_leaves_nothing_out(ends, monkeypatch):
    publish, follow = ends
    source = {"a": torch.zeros(50_000), "b": torch.zeros(3), "c": torch.zeros(3)}
    target = {name: torch.ones_like(tensor) for name, tensor in source.items()}
    published, followed = publish(source), follow(target)
    followed.update(timeout_s=10)
    source["b"].fill_(1)

    def interrupted(*arguments: Any) -> None:
        tdcopier.copy_into(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(publisher, "copy_into", interrupted)
    with pytest.raises(KeyboardInterrupt):
        published.publish()
    monkeypatch.undo()
    assert published.version == 1
    source["c"].fill_(2)
    published.publish()
    assert followed.update(timeout_s=10) == 2
    assert all(torch.equal(source[name], target[name]) for name in source)


def test_an_interrupted_update_is_done_by_the_next(ends, monkeypatch):
    publish, follow = ends
    source, target = {"a": torch.ones(5), "b": torch.ones(5)}, {"a": torch.zeros(5)}
    target["b"] = torch.zeros(5)
    publish(source)
    followed = follow(target)

    def interrupted(*_: Any) -> None:
        target["a"].fill_(1)
        raise KeyboardInterrupt

    monkeypatch.setattr(follower, "copy_into", interrupted)
    with pytest.raises(KeyboardInterrupt):
        followed.update(timeout_s=10)
    monkeypatch.undo()
    assert followed.version == 0
    assert followed.update() == 1
    assert target["b"].eq(1).all()


def test_ends_belong_to_their_process(ends):
    publish, follow = ends
    published = publish({"a": torch.zeros(1)})
    followed = follow({"a": torch.zeros(1)})
    followed.update(timeout_s=10)
    assert repr(published) == "<Publisher to 1 followers, version 1>"
    assert repr(followed) == f"<Follower of {followed.peer}, open, version 1>"
    for end in (published, followed):
        with pytest.raises(TypeError, match="make one in each"):
            pickle.dumps(end)
    child = os.fork()
    if child == 0:
        try:
            published.close()
            followed.close()
            with pytest.raises(RuntimeError, match="the process that forked this one"):
                followed.update()
            with pytest.raises(RuntimeError, match="the process that forked this one"):
                published.publish()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert published.publish() == 1


@pytest.mark.parametrize("wrong", [3, {"a": 1}, {1: torch.zeros(1)}])
def test_what_has_no_tensors_by_names_is_refused(store, wrong):
    for call in (distributed.publish, distributed.follow):
        with pytest.raises(TypeError, match="weights"):
            call(wrong, store=store)


def test_random_versions_arrive_as_they_are(ends):
    choose = random.Random(3)
    publish, follow = ends
    source = {
        f"{n}": torch.zeros(choose.choice([1, 50, 4000]), dtype=torch.int64) for n in "abcdef"
    }
    published = publish(source)
    of_version = {1: dict.fromkeys(source, 0)}
    followers: list[tuple[Any, dict[str, torch.Tensor]]] = []
    for number in range(400):
        what = choose.random()
        if what < 0.02 and len(followers) < 6:
            target = {name: torch.full_like(tensor, -1) for name, tensor in source.items()}
            followers.append((follow(target), target))
        elif what < 0.6:
            for name in choose.sample(sorted(source), choose.choice([1, 1, 2, 6])):
                source[name].fill_(number)
            version = published.publish()
            of_version[version] = {name: int(tensor[0]) for name, tensor in source.items()}
        elif followers:
            followed, target = choose.choice(followers)
            version = followed.update(timeout_s=choose.choice([0.0, 0.01]))
            if version:
                wanted = of_version[version]
                assert all(target[name].eq(wanted[name]).all() for name in source), number
    for followed, target in followers:
        while followed.version < published.version:
            followed.update(timeout_s=10)
        assert all(torch.equal(target[name], source[name]) for name in source)
    assert published.problems == []
