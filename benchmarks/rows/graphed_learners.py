"""Off-policy learners whose rows are in host memory: updates in one graph, and in torchrl's ways.

The agents, losses and optimizers are those of `docs/examples/learners.py`, which are torchrl's. In
all of torchrl's ways the learner itself is in a graph too (tensordict's `CudaGraphModule`), so they
differ in how a batch gets there.
"""

from __future__ import annotations

import importlib.util
import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from tool.machine import ROOT
from tool.measure import Bench, summaries
from tool.tables import OURS
from tool.target_forms import Target, at_least, at_most, count_wrong, none

UPDATES, ROUNDS = 200, 15
"""Updates of a block, and rounds with a block of each way."""
FLOOR = "the same graph, on a batch that stays"
RESIDENT, RESIDENT_AHEAD = "torchrl, rows on the device", "torchrl, rows on the device, prefetch"
RAM, RAM_AHEAD = "torchrl, rows in RAM, .to(device)", "torchrl, rows in RAM, .to(device), prefetch"
BY_SAMPLE = f"{OURS}, sample() and CudaGraphModule"
OF_ONE_GRAPH = f"{OURS}, GraphedLearner"
AHEAD = f"{OURS}, GraphedLearner, read_ahead"
DEPTH, SEED = 3, 5
BETWEEN_CALLS_S, MAX_SAMPLE_US = 0.002, 150.0


class Case(NamedTuple):
    agent: Callable[[Any, str], Any]
    """Takes the module of the examples, and a device."""
    rows: Callable[[int], Any]
    count: int
    """Rows of the storage on a real device."""
    batch: int
    least_over_floor: float


def _rows(count: int, leaves: dict[str, Any], after: dict[str, Any]) -> Any:
    from tensordict import TensorDict

    never = torch.zeros(count, 1, dtype=torch.bool)
    after = {**after, "reward": torch.randn(count, 1), "done": never, "terminated": never.clone()}
    return TensorDict({**leaves, "next": after}, [count], device="cpu")


def _pendulum(count: int) -> Any:
    """Return rows with the 13 leaves that torchrl's collectors store."""
    leaves = {
        "observation": torch.randn(count, 3),
        "action": torch.rand(count, 1) * 1.8 - 0.9,
        "loc": torch.randn(count, 1),
        "scale": torch.rand(count, 1),
        "done": torch.zeros(count, 1, dtype=torch.bool),
        "step_count": torch.arange(count)[:, None],
        "traj_ids": torch.arange(count) // 200,
    }
    after = {
        "observation": torch.randn(count, 3),
        "episode_reward": torch.randn(count, 1),
        "step_count": torch.arange(count)[:, None],
    }
    return _rows(count, leaves, after)


def _frames(count: int) -> Any:
    def frames() -> torch.Tensor:
        return torch.randint(0, 256, (count, 4, 84, 84), dtype=torch.uint8)

    actions = torch.nn.functional.one_hot(torch.randint(0, 6, (count,)), 6)
    return _rows(count, {"observation": frames(), "action": actions}, {"observation": frames()})


CASES = {
    "SAC, 13 leaves, 256 rows": Case(
        agent=lambda examples, device: examples.sac(3, 1, device),
        rows=_pendulum,
        count=200_000,
        batch=256,
        least_over_floor=0.97,
    ),
    "DQN, 256 rows of 4x84x84 frames": Case(
        agent=lambda examples, device: examples.dqn(6, device),
        rows=_frames,
        count=10_000,
        batch=256,
        least_over_floor=0.93,
    ),
}


def run(bench: Bench) -> dict[str, Any]:
    return {
        "what": "Off-policy learners, rows in host memory: time of an update",
        "settings": {"updates of a block": UPDATES if bench.is_real else 2, "prefetch": DEPTH},
        "learners": {name: _measured(bench, name, case) for name, case in CASES.items()},
        "sample": _sample_alone(bench),
    }


def _measured(bench: Bench, name: str, case: Case) -> dict[str, Any]:
    device = str(bench.device) if bench.is_real else "cpu"
    count, batch = (case.count, case.batch) if bench.is_real else (40, 4)
    torch.manual_seed(SEED)
    rows = case.rows(count)
    examples = _examples()
    found: dict[str, Callable[[], Any]] = {}
    for way, make in _ways(device, bench.is_real).items():
        agent = case.agent(examples, device)
        found[way] = make(agent.update, rows, batch)
    updates, rounds = (UPDATES, bench.rounds(ROUNDS / 500)) if bench.is_real else (2, 2)
    taken: dict[str, list[float]] = {way: [] for way in found}
    for step in found.values():  # warm-ups, captures
        for _ in range(12 if bench.is_real else 1):
            step()
    dice = random.Random(SEED)
    for _ in bench.progress(f"learners, {name}")(range(rounds)):
        for way in dice.sample(list(found), len(found)):
            taken[way].append(_us_of(found[way], updates, device))
    medians = {way: sorted(times)[len(times) // 2] for way, times in taken.items()}
    return {
        "rows": count,
        "batch": batch,
        "update": summaries(taken),
        "updates_per_s": {way: 1e6 / us for way, us in medians.items()},
        "wrong": {
            way: _wrong_rows(device, rows, batch, read_ahead=way == AHEAD)
            for way in (OF_ONE_GRAPH, AHEAD)
        },
    }


def _sample_alone(bench: Bench) -> dict[str, Any]:
    """Return how long a call of `sample` keeps the host, if it is called now and then."""
    device = str(bench.device)
    count, calls = (100_000, 300) if bench.is_real else (40, 2)
    torch.manual_seed(SEED)
    leaves = {f"leaf {number}": torch.randn(count, 4) for number in range(13)}
    rows = _rows(count, leaves, {})
    size = min(256, count // 4)
    buffers = {OURS: _ours(device, rows, size)}
    if bench.is_real:
        buffers[RESIDENT] = _resident(device, rows, size)
    taken: dict[str, list[float]] = {way: [] for way in buffers}
    for _ in bench.progress("learners, sample() alone")(range(calls)):
        for way, buffer in buffers.items():
            _spin(BETWEEN_CALLS_S if bench.is_real else 0.0)
            begin = time.perf_counter()
            sampled = buffer.sample()
            taken[way].append((time.perf_counter() - begin) * 1e6)
            del sampled
        _synchronize(device)
    return {
        "leaves": len(list(rows.keys(include_nested=True, leaves_only=True))),
        "between calls, s": BETWEEN_CALLS_S,
        "host": summaries(taken),
    }


def _spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def _us_of(step: Callable[[], Any], updates: int, device: str) -> float:
    _synchronize(device)
    begin = time.perf_counter()
    for _ in range(updates):
        step()
    _synchronize(device)
    return (time.perf_counter() - begin) * 1e6 / updates


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize(device)


def _wrong_rows(device: str, rows: Any, batch: int, *, read_ahead: bool) -> int:
    """Return the number of steps of a `GraphedLearner` with other rows than their index names."""
    from tdcopier.torchrl import GraphedLearner

    buffer, wrong = _ours(device, rows, batch), 0
    with GraphedLearner(buffer, lambda found: found, read_ahead=read_ahead) as learner:
        for _ in range(10):
            found = learner.step().cpu()
            right = rows[found["index"]]
            keys = right.keys(include_nested=True, leaves_only=True)
            wrong += not all(torch.equal(found[key], right[key]) for key in keys)
    return wrong


def _examples() -> Any:
    name = "learners"
    if name not in sys.modules:
        path = ROOT / "docs" / "examples" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


# ---- ways: each takes the update, the rows and the size of a batch, and returns a step -----------

Make = Callable[[Callable[[Any], Any], Any, int], Callable[[], Any]]


def _ways(device: str, is_real: bool) -> dict[str, Make]:
    return {
        **({FLOOR: partial(_floor, device)} if is_real else {}),
        OF_ONE_GRAPH: partial(_in_one_graph, device),
        AHEAD: partial(_in_one_graph, device, read_ahead=True),
        BY_SAMPLE: partial(_by_sample, device, is_real),
        RESIDENT: partial(_torchrl, device, is_real, on_device=True),
        RESIDENT_AHEAD: partial(_torchrl, device, is_real, on_device=True, prefetch=DEPTH),
        RAM: partial(_torchrl, device, is_real),
        RAM_AHEAD: partial(_torchrl, device, is_real, prefetch=DEPTH),
    }


def _ours(device: str, rows: Any, batch: int) -> Any:
    from tdcopier.torchrl import (
        DeviceRandomSampler,
        PackedLazyTensorStorage,
        PackedTensorDictReplayBuffer,
    )

    buffer = PackedTensorDictReplayBuffer(
        storage=PackedLazyTensorStorage(len(rows), sample_device=device, pinned=True),
        sampler=DeviceRandomSampler(device),
        batch_size=batch,
    )
    buffer.extend(rows)
    return buffer


def _in_one_graph(
    device: str, update: Any, rows: Any, batch: int, *, read_ahead: bool = False
) -> Callable[[], Any]:
    from tdcopier.torchrl import GraphedLearner

    return GraphedLearner(_ours(device, rows, batch), update, read_ahead=read_ahead).step


def _by_sample(device: str, is_real: bool, update: Any, rows: Any, batch: int) -> Callable[[], Any]:
    buffer, learn = _ours(device, rows, batch), _graphed(update, device, is_real)
    return lambda: learn(buffer.sample())


def _floor(device: str, update: Any, rows: Any, batch: int) -> Callable[[], Any]:
    from tdcopier.torchrl._watched import Watched

    Watched([update]).make_capturable(torch.device(device))
    found = _ours(device, rows, batch).sample()
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):
            update(found.copy())
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        kept = update(found.copy())

    def step(kept: Any = (kept, found, update)) -> Any:  # update: its parameters are in the graph
        graph.replay()
        return kept

    return step


def _torchrl(
    device: str,
    is_real: bool,
    update: Any,
    rows: Any,
    batch: int,
    *,
    on_device: bool = False,
    prefetch: int | None = None,
) -> Callable[[], Any]:
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

    if on_device:
        buffer = _resident(device, rows, batch, prefetch)
    else:
        storage = LazyTensorStorage(len(rows))
        buffer = TensorDictReplayBuffer(storage=storage, batch_size=batch, prefetch=prefetch)
        buffer.append_transform(lambda found: found.to(device))
        buffer.extend(rows)
    learn = _graphed(update, device, is_real)
    return lambda: learn(buffer.sample())


def _resident(device: str, rows: Any, batch: int, prefetch: int | None = None) -> Any:
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

    storage = LazyTensorStorage(len(rows), device=device)
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=batch, prefetch=prefetch)
    buffer.extend(rows)
    return buffer


def _graphed(update: Any, device: str, is_real: bool) -> Any:
    """Return the update in a graph, as torchrl's scripts make it."""
    if not is_real:
        return update
    from tensordict.nn import CudaGraphModule

    from tdcopier.torchrl._watched import Watched

    Watched([update]).make_capturable(torch.device(device))
    return CudaGraphModule(update, in_keys=[], out_keys=[], warmup=5)


# ---- targets -------------------------------------------------------------------------------------


def value_targets(result: dict[str, Any]) -> Iterator[Target]:
    wrong = count_wrong(result["learners"].values())
    yield none("steps with other rows than those of the index", wrong)


def speed_targets(result: dict[str, Any]) -> Iterator[Target]:
    for name, found in result["learners"].items():
        rate = found["updates_per_s"]
        ours = rate[AHEAD]  # as torchrl's ways have prefetch
        what = f"{name}, {AHEAD}: updates/s over those on a batch that stays"
        yield at_least(what, ours / rate[FLOOR], CASES[name].least_over_floor)
        if "SAC" in name:
            from_ram, resident = (max(rate[way] for way in ways) for ways in _OF_TORCHRL)
            yield at_least(f"{name}: the same over torchrl's best from RAM", ours / from_ram, 1.3)
            yield at_least(f"{name}: over torchrl's best on the device", ours / resident, 1.1)

    us = result["sample"]["host"][OURS]["median_us"]
    leaves = result["sample"]["leaves"]
    yield at_most(f"sample() alone, {leaves} leaves: time of the host", us, MAX_SAMPLE_US, "us")


_OF_TORCHRL = ((RAM, RAM_AHEAD), (RESIDENT, RESIDENT_AHEAD))
