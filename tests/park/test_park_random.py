"""Random programs that park, resume, write, drop and copy tensors that share storages."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
from park_support import LARGE

import tdcopier

STEPS = 60
SIZES = (1, 7, 1000, LARGE, LARGE + 3)


class Program:
    """Applies each operation to tensors on the device, and to a model of them on the host."""

    def __init__(self, seed: int, device: str) -> None:
        self.random = random.Random(seed)
        self.device = device
        self.tensors: list[torch.Tensor] = []
        self.models: list[torch.Tensor] = []  # views of the same shape, of storages of their own
        self.parked: dict[tdcopier.Parked, set[int]] = {}  # with the storages of each handle
        self.taken: list[tuple[tdcopier.Snapshot, list[torch.Tensor]]] = []

    def storage(self, tensor: torch.Tensor) -> int:
        return tensor.untyped_storage()._cdata

    def out(self) -> set[int]:
        return set().union(*self.parked.values())

    def resident(self) -> list[int]:
        out = self.out()
        return [i for i, t in enumerate(self.tensors) if self.storage(t) not in out]

    def some(self, numbers: list[int]) -> list[int]:
        return self.random.sample(numbers, self.random.randint(0, len(numbers)))

    def make(self) -> None:
        values = torch.randn(self.random.choice(SIZES))
        self.tensors.append(values.to(self.device))
        self.models.append(values)

    def view(self) -> None:
        numbers = self.resident()
        if numbers:
            number = self.random.choice(numbers)
            first = self.random.randrange(len(self.models[number]))
            self.tensors.append(self.tensors[number][first:])
            self.models.append(self.models[number][first:])

    def write(self) -> None:
        for number in self.some(self.resident()):
            value = self.random.random()
            self.tensors[number].fill_(value)
            self.models[number].fill_(value)

    def forget(self) -> None:
        if len(self.tensors) > 3:
            number = self.random.randrange(len(self.tensors))
            del self.tensors[number], self.models[number]

    def park(self) -> None:
        numbers = self.some(self.resident())
        storages = {self.storage(self.tensors[i]) for i in numbers}
        handle = tdcopier.park({str(i): self.tensors[i] for i in numbers})
        self.parked[handle] = storages

    def refuse(self) -> None:
        out = self.out()
        gone = [t for t in self.tensors if self.storage(t) in out]
        if gone:
            with pytest.raises(ValueError, match="has no memory"):
                tdcopier.park(
                    [*[self.tensors[i] for i in self.resident()], self.random.choice(gone)]
                )

    def resume(self) -> None:
        for handle in self.random.sample(list(self.parked), len(self.parked) // 2 + 1):
            handle.resume()
            del self.parked[handle]
            if self.random.random() < 0.3:
                handle.resume()

    def drop(self) -> None:
        if self.parked:
            handle = self.random.choice(list(self.parked))
            del self.parked[handle]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                del handle

    def snapshot(self) -> None:
        numbers = self.some(self.resident())
        taken = tdcopier.snapshot([self.tensors[i] for i in numbers])
        taken.before_update()
        self.taken.append((taken, [self.models[i].clone() for i in numbers]))

    def use_memory(self) -> None:
        for size in SIZES:
            torch.full((size,), -1.0, device=self.device)

    def check(self) -> None:
        for number in self.resident():
            assert torch.equal(self.tensors[number].cpu(), self.models[number])
        for taken, expected in self.taken:
            for got, wanted in zip(taken.get(), expected, strict=True):
                assert torch.equal(got, wanted)
        self.taken.clear()


@pytest.mark.parametrize("seed", range(25))
def test_a_random_program_leaves_every_value_as_the_model_has_it(device: Any, seed: int) -> None:
    program = Program(seed, device)
    operations = [
        program.make, program.view, program.write, program.forget, program.park, program.park,
        program.resume, program.refuse, program.drop, program.snapshot, program.use_memory,
        program.check,
    ]  # fmt: skip
    for _ in range(4):
        program.make()
    for _ in range(STEPS):
        operation = program.random.choice(operations)
        if operation != program.resume or program.parked:
            operation()
    for handle in list(program.parked):
        handle.resume()
    program.parked.clear()
    program.check()
