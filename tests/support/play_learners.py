"""Plays random steps of a GraphedLearner with writes and changes between them.

    python tests/support/play_learners.py --cases 100000 --jobs 8
    python tests/support/play_learners.py --seed 4711

A seed makes two equal buffers and two equal models. One learns by a `GraphedLearner`, the other by
a loop that is written by hand, and between steps both get the same rows, settings and parameters.
A case is a step; its rows, its loss and, at the end of the seed, the parameters must be equal, and
the rows those that the storage has at the index. Some learners read ahead. Cases with other values
are printed with their seed.
"""

from __future__ import annotations

import copy
import logging
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from played_seeds import DEVICE_TYPE, Tally, played_by_arguments, print_played
from tensordict import TensorDict
from torch import nn
from torchrl.data import RandomSampler

from tdcopier.torchrl import (
    DeviceRandomSampler,
    GraphedLearner,
    PackedLazyTensorStorage,
    PackedTensorDictReplayBuffer,
)

CASES = 25  # of a seed
A_BATCH = 20  # seeds that a process plays at a time
DTYPES = (torch.float32, torch.float64, torch.int64, torch.int16, torch.uint8, torch.bool)
_RATES = (0.1, 0.01, 0.003)


@dataclass
class Played(Tally):
    """The outcome of a number of cases."""

    cases: int = 0
    replays: int = 0
    captures: int = 0
    wrong: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)


def play_seeds(seeds: range) -> Played:
    total = Played()
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "GraphedLearner began anew")  # changes come often here
        for seed in seeds:
            total.add(Game(seed, f"{DEVICE_TYPE}:0").play())
    return total


class Side:
    """A buffer and a model that learns from it."""

    def __init__(self, device: str, capacity: int, batch: int, samples_on: str | None) -> None:
        storage = PackedLazyTensorStorage(capacity, sample_device=device, pinned=True)
        sampler = RandomSampler() if samples_on is None else DeviceRandomSampler(samples_on)
        self.buffer = PackedTensorDictReplayBuffer(
            storage=storage, sampler=sampler, batch_size=batch
        )
        self.device = device
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.25), nn.Linear(4, 1)).to(device)
        is_cuda = torch.device(device).type == "cuda"
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01, capturable=is_cuda)

    def update(self, batch: Any) -> TensorDict:
        loss = (self.model(batch["x"]) - batch["next", "y"]).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return batch.clone().set("loss", loss.detach().expand(batch.batch_size))

    def state(self) -> list[torch.Tensor]:
        return [parameter.detach().cpu() for parameter in self.model.parameters()]


class Game:
    """The cases of a seed. Those that come after an unexpected error are not played."""

    def __init__(self, seed: int, device: str) -> None:
        self.seed, self.device = seed, device
        self.dice = dice = random.Random(seed)
        self.capacity, self.batch = dice.randrange(8, 60), dice.randrange(1, 20)
        samples_on = dice.choice((device, device, None))
        extra = (f"leaf {number}" for number in range(dice.randrange(4)))
        self.extra = {
            key: (dice.choice(DTYPES), dice.choice(((), (2,), (0,), (3, 5)))) for key in extra
        }
        self.sides = []
        for _ in range(2):
            torch.manual_seed(seed)
            self.sides.append(Side(device, self.capacity, self.batch, samples_on))
        self.ours, self.theirs = self.sides
        self.reads_ahead = samples_on is not None and dice.random() < 0.3
        self.learner = GraphedLearner(
            self.ours.buffer,
            self.ours.update,
            warmup=dice.choice((1, 1, 2)),
            read_ahead=self.reads_ahead,
        )
        self.ahead: tuple[TensorDict, TensorDict] | None = None
        self.played = Played()
        self.written = 0
        is_cuda = torch.device(device).type == "cuda"
        self.streams = [None, torch.cuda.Stream(device)] if is_cuda else [None]

    def play(self) -> Played:
        case = ""
        try:
            self._extend()
            for number in range(CASES):
                case = f"seed {self.seed}, case {number}"
                for _ in range(self.dice.choice((0, 0, 1, 1, 2))):
                    change = self.dice.choices(list(_CHANGES), list(_CHANGES.values()))[0]
                    case += f", {change.__name__}"
                    change(self)
                    self.played.kinds[change.__name__.strip("_")] += 1
                self._step(case)
                self.played.cases += 1
            pairs = zip(self.ours.state(), self.theirs.state(), strict=True)
            if not all(torch.equal(mine, other) for mine, other in pairs):
                self.played.wrong.append(f"seed {self.seed}: other parameters")
        except Exception as error:
            self.played.wrong.append(f"{case}: {type(error).__name__}: {error}")
        self.played.replays += self.learner.stats.replays
        self.played.captures += self.learner.stats.captures
        self.learner.close()
        return self.played

    def _step(self, case: str) -> None:
        count = self.dice.choice((1, 1, 1, 2, 5))
        seed = self.dice.randrange(2**31)
        torch.manual_seed(seed)
        if (stream := self.dice.choice(self.streams)) is not None:
            stream.wait_stream(torch.cuda.current_stream())  # for what was changed there
        with torch.cuda.stream(stream):
            found = self.learner.steps(count).cpu()
        torch.manual_seed(seed)
        for _ in range(count):
            batch, rows = self._batch_by_hand()
            wanted = self.theirs.update(batch)
        wanted = wanted.cpu()
        keys = set(wanted.keys(True, True))
        if keys != set(found.keys(True, True)):
            self.played.wrong.append(f"{case}: other keys")
        elif not all(torch.equal(found[key], wanted[key]) for key in keys):
            self.played.wrong.append(f"{case}: other values")
        elif not all(torch.equal(found[key], rows[key]) for key in rows.keys(True, True)):
            self.played.wrong.append(f"{case}: other rows than the storage has")

    def _batch_by_hand(self) -> tuple[TensorDict, TensorDict]:
        """Returns a batch of the buffer of the loop by hand, and what its storage had there."""
        batch = self.ahead or self._sample_by_hand()
        if self.reads_ahead:
            self.ahead = self._sample_by_hand()
        return batch

    def _sample_by_hand(self) -> tuple[TensorDict, TensorDict]:
        batch = self.theirs.buffer.sample()
        return batch, self.theirs.buffer.storage[:][batch["index"].cpu()]

    # ---- changes ---------------------------------------------------------------------------------

    def _rows(self, count: int) -> TensorDict:
        numbers = torch.arange(self.written, self.written + count)
        self.written += count
        rows = {"x": torch.randn(count, 3), "next": {"y": torch.randn(count, 1), "n": numbers}}
        for key, (dtype, shape) in self.extra.items():
            values = torch.randint(0, 100, (count, *shape))
            rows[key] = (values > 50) if dtype is torch.bool else values.to(dtype)
        return TensorDict(rows, [count], device="cpu")

    def _extend(self) -> None:
        rows = self._rows(self.dice.randrange(1, self.capacity))
        place = self.dice.choice(("cpu", self.device))
        for side in self.sides:
            given = rows.clone().to(place)
            side.buffer.extend(given)
            given.zero_()  # at the earliest permitted moment

    def _write_in_place(self) -> None:
        rows = self._rows(1)
        number = self.dice.randrange(len(self.ours.buffer))
        for side in self.sides:
            side.buffer[number : number + 1] = rows.clone()

    def _write_leaf(self) -> None:
        value = self.dice.random()
        for side in self.sides:
            with side.buffer.storage.writing():
                side.buffer.storage._storage["x"][: len(side.buffer)] += value

    def _replace_leaf(self) -> None:
        for side in self.sides:
            with side.buffer.storage.writing():
                side.buffer.storage._storage["x"] = side.buffer.storage._storage["x"] * 2
        self.ahead = None

    def _load(self) -> None:
        state = self.theirs.buffer.state_dict()
        for side in self.sides:
            side.buffer.load_state_dict(copy.deepcopy(state))
        self.ahead = None

    def _empty(self) -> None:
        for side in self.sides:
            side.buffer.empty()
        self.ahead = None
        self._extend()

    def _sample(self) -> None:
        torch.manual_seed(self.seed)
        mine = self.ours.buffer.sample()
        torch.manual_seed(self.seed)
        other = self.theirs.buffer.sample()
        assert bool((mine == other).all()), "other samples"

    def _change_rate(self) -> None:
        rate = self.dice.choice(_RATES)
        for side in self.sides:
            side.optimizer.param_groups[0]["lr"] = rate

    def _replace_parameter(self) -> None:
        for side in self.sides:
            fresh = nn.Parameter(torch.ones_like(side.model[2].bias))
            side.optimizer.state.pop(side.model[2].bias, None)
            side.model[2].bias = fresh
            side.optimizer.param_groups[0]["params"][-1] = fresh

    def _write_parameter(self) -> None:
        with torch.no_grad():
            for side in self.sides:
                side.model[0].weight.mul_(0.5)

    def _change_mode(self) -> None:
        is_training = self.dice.random() < 0.5
        for side in self.sides:
            side.model.train(is_training)

    def _load_optimizer(self) -> None:
        for side in self.sides:
            side.optimizer.load_state_dict(side.optimizer.state_dict())

    def _fail(self) -> None:
        """Let the user's function raise an error, which is no step."""
        own = self.ours.model.forward

        def failing(batch: Any) -> Any:
            raise ZeroDivisionError

        self.ours.model.forward = failing
        learner = GraphedLearner(self.ours.buffer, self.ours.update, graph=False)
        try:
            learner.step()
        except ZeroDivisionError:
            pass
        else:
            raise AssertionError("the error was lost")
        finally:
            self.ours.model.forward = own


_CHANGES: dict[Callable[[Game], None], int] = {
    Game._extend: 8,
    Game._write_in_place: 2,
    Game._write_leaf: 2,
    Game._replace_leaf: 1,
    Game._load: 1,
    Game._empty: 1,
    Game._sample: 3,
    Game._change_rate: 1,
    Game._replace_parameter: 1,
    Game._write_parameter: 2,
    Game._change_mode: 1,
    Game._load_optimizer: 1,
    Game._fail: 1,
}
"""Changes between two steps, with weights."""


def main() -> int:
    total = played_by_arguments(__doc__, play_seeds, Played(), "cases", CASES, A_BATCH)
    print_played(total.kinds, total.wrong)
    print(
        f"{total.cases:,} cases on {DEVICE_TYPE}, {total.replays:,} replays of {total.captures:,} "
        f"graphs, torch {torch.__version__}: {len(total.wrong)} wrong"
    )
    return bool(total.wrong)


if __name__ == "__main__":
    sys.exit(main())
