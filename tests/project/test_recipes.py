"""The recipes of the docs run as printed, and do what their page says."""

from __future__ import annotations

import copy
import importlib.util
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from recipe_stand_ins import Accelerator, Signs, stand_in_for_stable_baselines3
from torch.utils.data import DataLoader, TensorDataset

import tdcopier

RECIPES = Path(__file__).resolve().parents[2] / "docs" / "recipes"
HAS_SB3 = importlib.util.find_spec("stable_baselines3") is not None
HAS_ACCELERATE = importlib.util.find_spec("accelerate") is not None


def recipe(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", RECIPES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def seeded() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> list[tdcopier.AsyncCopyHandle]:
    """Returns the handles of all gathers that the test starts."""
    return recorded(monkeypatch, "start_gather")


@pytest.fixture
def prefetchers(monkeypatch: pytest.MonkeyPatch) -> list[tdcopier.Prefetcher]:
    """Returns all prefetchers that the test makes."""
    return recorded(monkeypatch, "prefetch")


def recorded(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Any]:
    made, make = [], getattr(tdcopier, name)

    def record(*args: Any, **options: Any) -> Any:
        made.append(make(*args, **options))
        return made[-1]

    monkeypatch.setattr(tdcopier, name, record)
    return made


def test_the_page_shows_every_recipe_and_no_other():
    page = (RECIPES.parent / "guide" / "recipes.md").read_text()
    shown = [line.split("recipes/")[1] for line in page.splitlines() if "literalinclude" in line]
    assert sorted(shown) == sorted(path.name for path in RECIPES.glob("*.py"))


# ---- stable-baselines3 ---------------------------------------------------------------------------


@pytest.fixture(params=["its stand-in", "stable-baselines3"])
def sb3(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The recipe, with the real base class if it can be imported, and with a stand-in."""
    if request.param == "its stand-in":
        stand_in_for_stable_baselines3(monkeypatch)
    elif not HAS_SB3:
        pytest.skip("stable-baselines3 is not installed")
    return recipe("sb3_replay_buffer")


def spaces(observed: tuple[int, ...], dtype: type) -> tuple[Any, Any]:
    if HAS_SB3:
        from gymnasium import spaces

        return spaces.Box(0, 255, observed, dtype), spaces.Discrete(6)
    box = SimpleNamespace(shape=observed, dtype=np.dtype(dtype))
    return box, SimpleNamespace(shape=(), dtype=np.dtype(np.int64))


def add_rows(buffer: Any, count: int, seed: int) -> None:
    rows, envs = np.random.default_rng(seed), buffer.n_envs
    shape, dtype = buffer.observations.shape[1:], buffer.observations.dtype
    for _ in range(count):
        buffer.add(
            rows.integers(0, 255, shape).astype(dtype),
            rows.integers(0, 255, shape).astype(dtype),
            rows.integers(0, 6, envs),
            rows.random(envs, np.float32),
            rows.integers(0, 2, envs),
            [{"TimeLimit.truncated": bool(rows.integers(2))} for _ in range(envs)],
        )


def both_buffers(sb3: ModuleType, device: str, *, lean: bool, envs: int, images: bool) -> list[Any]:
    """Fills the recipe's buffer and its base class's with the same rows, beyond the ring's end."""
    shape = (3, 20, 20) if images else (5,)
    found = []
    for kind in (sb3.GatheredReplayBuffer, sb3.ReplayBuffer):
        buffer = kind(
            40 * envs,
            *spaces(shape, np.uint8 if images else np.float32),
            device=device,
            n_envs=envs,
            optimize_memory_usage=lean,
            handle_timeout_termination=not lean,
        )
        add_rows(buffer, 50, seed=1)
        found.append(buffer)
    return found


def sampled(buffer: Any, env: Any = None) -> Any:
    np.random.seed(3)
    return buffer.sample(64, env=env)


def assert_same(got: Any, wanted: Any, device: str) -> None:
    assert type(got) is type(wanted)
    for name in got._fields:
        one, other = getattr(got, name), getattr(wanted, name)
        if other is None:  # a field of later versions, which this buffer does not fill
            assert one is None, name
            continue
        assert (one.device, one.dtype) == (torch.device(device), other.dtype), name
        assert torch.equal(one.cpu(), other.cpu()), name


@pytest.mark.parametrize("images", [False, True], ids=["vectors", "images"])
@pytest.mark.parametrize("envs", [1, 3])
@pytest.mark.parametrize("lean", [False, True], ids=["plain", "optimize_memory_usage"])
def test_the_sb3_buffer_gives_the_batches_of_its_base_class(
    sb3, device, gathers, lean, envs, images
):
    gathered, plain = both_buffers(sb3, device, lean=lean, envs=envs, images=images)
    assert_same(sampled(gathered), sampled(plain), device)
    assert len(gathers) == 1 + lean
    assert all(0 < handle.stats.transfers <= handle.stats.chunks for handle in gathers)
    assert [handle.stats.fallbacks for handle in gathers] == [0] * (1 + lean)


def test_rows_that_are_added_after_a_sample_do_not_change_it(sb3, device):
    gathered, plain = both_buffers(sb3, device, lean=False, envs=2, images=True)
    wanted = sampled(plain)
    got = sampled(gathered)
    add_rows(gathered, 40, seed=2)
    assert_same(got, wanted, device)


def test_a_batch_is_normalised_on_the_host_where_the_environment_says_so(sb3, device, gathers):
    class Halving:
        def normalize_obs(self, observations):
            return observations / 2

        def normalize_reward(self, rewards):
            return rewards / 2

    gathered, plain = both_buffers(sb3, device, lean=False, envs=1, images=False)
    assert_same(sampled(gathered, Halving()), sampled(plain, Halving()), device)
    assert not torch.equal(sampled(plain, Halving()).rewards, sampled(plain).rewards)
    assert gathers == []


@pytest.mark.skipif(not HAS_SB3, reason="stable-baselines3 is not installed")
def test_a_dqn_of_sb3_learns_the_same_with_the_gathered_buffer(device, gathers):
    from stable_baselines3 import DQN

    module = recipe("sb3_replay_buffer")
    weights = []
    for kind in (module.ReplayBuffer, module.GatheredReplayBuffer):
        model = DQN(
            "MlpPolicy",
            "CartPole-v1",
            replay_buffer_class=kind,
            learning_starts=50,
            policy_kwargs={"net_arch": [16]},
            # DQN makes its optimizers first; the simulated device then replaces the parameters.
            device=device if device.startswith("cuda") else "cpu",
            seed=0,
        )
        fresh = [leaf.clone() for leaf in model.q_net.parameters()]
        model.learn(150)
        weights.append(list(model.q_net.parameters()))
    assert len(gathers) == 26  # every fourth step from the 52nd to the 152nd
    for one, other, before in zip(*weights, fresh, strict=True):
        assert torch.equal(one, other)
        assert not torch.equal(one, before)


# ---- a loop like cleanrl's -----------------------------------------------------------------------


def test_the_dqn_loop_learns_from_prefetched_batches(seeded, device, prefetchers):
    module = recipe("cleanrl_dqn")
    values = module.train(Signs(0), device, steps=600, learning_starts=100, batch_size=32)
    seen = torch.tensor([[-1.0], [1.0]], device=device)
    assert values(seen).argmax(1).tolist() == [0, 1]
    (prefetcher,) = prefetchers
    assert prefetcher.stats.batches == 125  # every fourth step of the last 500
    with pytest.raises(RuntimeError, match="is closed"):
        next(prefetcher)


def test_the_rows_of_the_dqn_are_read_and_written_under_its_lock():
    buffer = recipe("cleanrl_dqn").Buffer(8, observed=1, batch_size=4)
    was_locked = []

    class Watched(dict):
        def __getitem__(self, name):
            was_locked.append(buffer.lock.locked())
            return super().__getitem__(name)

        def items(self):
            was_locked.append(buffer.lock.locked())
            return super().items()

    buffer.rows = Watched(buffer.rows)
    zero = dict.fromkeys(buffer.rows, 0)
    buffer.add(**zero)
    buffer.sample()
    assert was_locked == [True] * (len(zero) + 1)


# ---- Accelerate ----------------------------------------------------------------------------------


def regression(
    device: str | torch.device,
) -> tuple[torch.nn.Module, torch.optim.Optimizer, DataLoader]:
    """Makes the optimizer after moving the model: not all devices keep its parameters."""
    torch.manual_seed(0)
    inputs = torch.randn(64, 3)
    model = torch.nn.Linear(3, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    labels = inputs @ torch.tensor([[1.0], [2.0], [3.0]])
    return model, optimizer, DataLoader(TensorDataset(inputs, labels), batch_size=16)


def plain_means(device: str | torch.device, epochs: int) -> list[float]:
    """Returns the losses of the same loop without Accelerate and tdcopier."""
    model, optimizer, loader = regression(device)
    means = []
    for _ in range(epochs):
        losses = []
        for inputs, labels in loader:
            loss = (model(inputs.to(device)) - labels.to(device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        means.append((sum(losses) / len(losses)).item())
    return means


def real_accelerator(device: str) -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=not device.startswith("cuda"))


@pytest.fixture(params=["its stand-in", "accelerate"])
def accelerator_of(request: pytest.FixtureRequest) -> Callable[[str], Any]:
    if request.param == "its stand-in":
        return Accelerator
    if not HAS_ACCELERATE:
        pytest.skip("accelerate is not installed")
    return real_accelerator


def test_the_loop_of_accelerate_trains_as_the_same_loop_by_hand(
    accelerator_of, device, prefetchers
):
    accelerator = accelerator_of(device)
    means = recipe("accelerate_loop").train(accelerator, *regression(accelerator.device), epochs=3)
    assert means == plain_means(accelerator.device, epochs=3)
    assert means[2] < means[0] / 4
    assert [prefetcher.stats.batches for prefetcher in prefetchers] == [3 * 4]


def test_accelerate_is_told_to_leave_batches_where_they_are(device):
    accelerator = Accelerator(device)
    recipe("accelerate_loop").train(accelerator, *regression(device))
    assert accelerator.places_batches == [False]


# ---- the state of an optimizer -------------------------------------------------------------------


def trained(device: str, kind: str) -> tuple[torch.optim.Optimizer, Callable[[], None]]:
    """Returns an optimizer, and a function that takes a step and changes the learning rate."""
    model = torch.nn.Linear(3, 2).to(device)
    if kind == "SGD":
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    else:  # its scheduler changes betas too
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=20)

    def step() -> None:
        model(torch.randn(2, 3).to(device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

    return optimizer, step


def tensors_of(state: dict[str, Any]) -> list[torch.Tensor]:
    values = [value for each in state["state"].values() for value in each.values()]
    return [value for value in values if isinstance(value, torch.Tensor)]


def assert_same_state(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert got["param_groups"] == wanted["param_groups"]
    assert got["state"].keys() == wanted["state"].keys()
    for one, other in zip(tensors_of(got), tensors_of(wanted), strict=True):
        assert torch.equal(one.cpu(), other.cpu())


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_the_state_of_an_optimizer_is_refreshed_and_restored(seeded, device, kind):
    optimizer, step = trained(device, kind)
    step()
    host = recipe("optimizer_state").HostState(optimizer)
    assert_same_state(host.state, optimizer.state_dict())
    addresses = [leaf.data_ptr() for leaf in tensors_of(host.state)]
    for _ in range(3):
        step()
        wanted = copy.deepcopy(optimizer.state_dict())
        assert host.state["param_groups"] != wanted["param_groups"]
        handle = host.refresh()
        step()  # at once
        assert handle.get() is host.state
        assert (handle.stats.reused_leaves, handle.stats.opaque_differences) == (0, 0)
        assert_same_state(host.state, wanted)
        assert [leaf.data_ptr() for leaf in tensors_of(host.state)] == addresses
        assert not any(leaf.device.type != "cpu" for leaf in tensors_of(host.state))
        host.restore()
        assert_same_state(optimizer.state_dict(), wanted)
        step()
        assert_same_state(host.state, wanted)
        host.restore()
