"""The recipes of the docs run as printed, and do what their page says."""

from __future__ import annotations

import importlib.util
import random
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from libraries import library
from ray_stand_ins import stand_in_for_ray
from recipe_stand_ins import Signs, stand_in_for_stable_baselines3
from recipe_support import RECIPES, recipe

HAS_RAY = importlib.util.find_spec("ray") is not None
HAS_SB3 = importlib.util.find_spec("stable_baselines3") is not None


@pytest.fixture
def seeded() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def test_the_page_shows_every_recipe_and_no_other():
    page = (RECIPES.parent / "guide" / "recipes.md").read_text("utf-8")
    shown = [line.split("recipes/")[1] for line in page.splitlines() if "literalinclude" in line]
    assert sorted(shown) == sorted(path.name for path in RECIPES.glob("*.py"))


@pytest.mark.filterwarnings("ignore:::lightning", "ignore:::ray")
@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.py")))
def test_a_recipe_runs_and_prints_one_line(
    seeded, device, monkeypatch, capsys, prefetchers, gathers, copies, name
):
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", device)  # what the recipe sets is undone
    if name == "cleanrl_dqn":
        library("gymnasium")
    if name.startswith("ray_") and not HAS_RAY:
        stand_in_for_ray(monkeypatch)
    module = recipe(name)
    module.main()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(device.partition(":")[0])
    assert len(prefetchers) + len(gathers) + len(copies) > 0


# ---- stable-baselines3 ---------------------------------------------------------------------------


@pytest.fixture(params=["its stand-in", "stable-baselines3"])
def sb3(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The recipe, with the real base class if it can be imported, and with a stand-in."""
    if request.param == "its stand-in":
        stand_in_for_stable_baselines3(monkeypatch)
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


def test_dict_observations_are_refused_with_the_buffer_that_takes_them(sb3, device):
    spaces = library("gymnasium").spaces
    with pytest.raises(ValueError, match="DictReplayBuffer"):
        sb3.GatheredReplayBuffer(
            9, spaces.Dict({"x": spaces.Discrete(3)}), spaces.Discrete(3), device
        )


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


def test_a_dqn_of_sb3_learns_the_same_with_the_gathered_buffer(device, gathers):
    DQN = library("stable_baselines3").DQN
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
