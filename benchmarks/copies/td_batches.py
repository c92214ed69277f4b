"""The TensorDict batches that are timed, and the comparison of a copy with its source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    TensorDict,
    TensorDictBase,
    is_tensor_collection,
    lazy_stack,
    tensorclass,
)

from tdcopier.workloads import WORKLOADS, Workload, flat_dict

ROWS = 256  # in a replay batch
OBSERVED, CONTROLLED = 17, 6  # sizes of a walking robot's observations and actions
FRAMES = 64
MEMBERS = 32
AGENTS = 64


@tensorclass
class Camera:
    projection: torch.Tensor
    distortion: torch.Tensor
    exposure: torch.Tensor


@tensorclass
class Labels:
    boxes: torch.Tensor
    class_ids: torch.Tensor
    scores: torch.Tensor


@tensorclass
class Frames:
    """Frames of a clip, with their labels and their camera."""

    clip: str
    labels: Labels
    camera: Camera
    times: torch.Tensor
    poses: torch.Tensor


def flat(seed: int) -> TensorDict:
    """Return 1000 leaves of 64 floats in one node: 256,000 bytes."""
    return TensorDict(flat_dict(seed=seed), [])


def nested(seed: int) -> TensorDict:
    """Return 1000 leaves of 64 floats in 111 nodes, three deep: 256,000 bytes."""
    values = iter(torch.randn(1000, 64, generator=torch.Generator().manual_seed(seed)))

    def node(depth: int) -> TensorDict:
        below = (next(values).clone() if depth == 0 else node(depth - 1) for _ in range(10))
        return TensorDict({f"key_{i}": child for i, child in enumerate(below)}, [])

    return node(2)


def many_agents(seed: int) -> TensorDict:
    """Return steps of 64 agents in 84 rows: 640 leaves, 2,042,880 bytes."""
    return agents(seed, rows=84)


def agents(seed: int, rows: int = 8) -> TensorDict:
    """Return steps of 64 agents, with 8 rows 194,560 bytes: 640 leaves in 193 nodes."""
    generator = torch.Generator().manual_seed(seed)

    def moment(**more: int) -> TensorDict:
        sizes = {"position": 3, "velocity": 3, "lidar": 32, "mask": 8, **more}
        entries = {k: torch.randn(rows, size, generator=generator) for k, size in sizes.items()}
        return TensorDict(entries, [rows])

    def agent() -> TensorDict:
        action = torch.randn(rows, 2, generator=generator)
        both = {"observation": moment(), "next": moment(reward=1)}
        return TensorDict({**both, "action": action}, [rows])

    return TensorDict({f"agent_{i}": agent() for i in range(AGENTS)}, [rows])


def atari(seed: int) -> TensorDict:
    """Return 256 rows of an Atari replay buffer: 11 leaves, of which two have 7 MB each."""
    return TensorDict.from_dict(WORKLOADS["atari_replay"].make(seed), batch_size=[ROWS])


def control(seed: int) -> TensorDict:
    """Return a replay batch of continuous control: 13 leaves in three nodes, 48,640 bytes.

    It is nested like the batches of torchrl's collectors and replay buffers: the step, its outcome
    under ``"next"``, the trajectory's number under ``"collector"``, and the sampler's row index and
    weight.
    """
    generator = torch.Generator().manual_seed(seed)
    step, after = (_moment(generator) for _ in range(2))
    after["reward"] = torch.randn(ROWS, 1, generator=generator)
    return TensorDict(
        {
            **step,
            "action": torch.rand(ROWS, CONTROLLED, generator=generator),
            "next": TensorDict(after, [ROWS]),
            "collector": TensorDict(
                {"traj_ids": torch.randint(0, 100, (ROWS,), generator=generator)}, [ROWS]
            ),
            "index": torch.randint(0, 1_000_000, (ROWS,), generator=generator),
            "priority_weight": torch.rand(ROWS, generator=generator),
        },
        [ROWS],
    )


def frames(seed: int) -> Any:
    """Return a tensorclass that contains two others: 8 leaves and a string."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.rand(FRAMES, *shape, generator=generator)

    return Frames(
        clip=f"clip {seed}",
        labels=Labels(
            boxes=numbers(12, 4),
            class_ids=torch.randint(0, 10, (FRAMES, 12), generator=generator),
            scores=numbers(12),
            batch_size=[FRAMES],
        ),
        camera=Camera(
            projection=numbers(3, 4), distortion=numbers(5), exposure=numbers(), batch_size=[FRAMES]
        ),
        times=numbers(),
        poses=numbers(3, 4),
        batch_size=[FRAMES],
    )


def ragged(seed: int) -> TensorDictBase:
    """Return a lazy stack of 32 language-model answers of different lengths: 128 leaves."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.linspace(16, 264, MEMBERS).long()  # the total is the same for every seed
    order = torch.randperm(MEMBERS, generator=generator)
    return lazy_stack([_answer(length, generator) for length in lengths[order].tolist()])


BATCHES = {
    "flat": Workload(flat, 2, 0.2),
    "control": Workload(control, 4, 1.0),
    "tensorclass": Workload(frames, 4, 1.0),
    "lazy stack": Workload(ragged, 2, 0.3),
}
"""The batches that are timed, by name."""


def differences(got: Any, expected: Any) -> list[str]:
    """Return the paths where class, device, batch size, leaf or value of two TensorDicts differ."""
    found, wanted = dict(_places(got)), dict(_places(expected))
    if list(found) != list(wanted):
        return ["<structure>"]
    return [path for path, place in wanted.items() if not _alike(found[path], place)]


def leaves_of(data: Any) -> list[torch.Tensor]:
    return [place for _, place in _places(data) if isinstance(place, torch.Tensor)]


def _places(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every node and leaf with its path; for a node, its class, device and batch size."""
    if not is_tensor_collection(value):
        yield path, value
        return
    yield path, (type(value), value.device, value.batch_size)
    if isinstance(value, LazyStackedTensorDict):
        children = [(f"[{index}]", member) for index, member in enumerate(value.tensordicts)]
    else:
        children = [(f"[{key!r}]", value.get(key)) for key in value.keys()]  # noqa: SIM118 (iterating a TensorDict goes over rows)
    for name, child in children:
        yield from _places(child, path + name)


def _alike(got: Any, expected: Any) -> bool:
    if not isinstance(expected, torch.Tensor):
        return bool(got == expected)
    return (
        type(got) is type(expected)
        and got.device == expected.device
        and got.dtype == expected.dtype
        and torch.equal(got.cpu(), expected.cpu())
    )


def _moment(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return an environment's output at one step: 4 leaves."""
    ended = torch.rand(ROWS, 2, generator=generator) < 0.01
    return {
        "observation": torch.randn(ROWS, OBSERVED, generator=generator),
        "done": ended.any(1, keepdim=True),
        "terminated": ended[:, :1].clone(),
        "truncated": ended[:, 1:].clone(),
    }


def _answer(length: int, generator: torch.Generator) -> TensorDict:
    return TensorDict(
        {
            "tokens": torch.randint(0, 50_000, (length,), generator=generator),
            "mask": torch.rand(length, generator=generator) < 0.9,
            "log_probs": -torch.rand(length, generator=generator),
            "reward": torch.rand((), generator=generator),
        },
        [],
    )
