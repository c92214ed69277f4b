"""Random states of modules, optimizers, containers and objects that hide tensors, in all calls.

Each value that a state is made of says what is expected of its tensors; the code of `tdcopier` that
finds them is not used.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import random
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from park_support import LARGE, has_memory
from support import same_bytes
from tensordict import TensorDict, TensorDictBase
from torch import nn

import tdcopier

pytestmark = pytest.mark.usefixtures("nothing_is_told")

Pair = collections.namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass
class Batch:
    first: Any
    second: Any


class Attributes(nn.Module):
    """Has a tensor that is neither a parameter nor a buffer."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.tensor = [tensor]


class Maker:
    """Makes a state, and keeps what is expected of it."""

    def __init__(self, seed: int, device: str) -> None:
        self.random = random.Random(seed)
        self.device = device
        self.bases = [
            torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(device)
            for n in (6, 300, LARGE)
        ]
        self.models: list[nn.Module] = []
        self.given: list[torch.Tensor] = []
        self.leaves: list[torch.Tensor] = []  # of these, those that are no parts of modules
        self.on_host = 0
        self.owners = 0
        self.hiders: list[tuple[str, list[torch.Tensor]]] = []
        self.attributes: list[torch.Tensor] = []
        self.richness = self.random.choice([0, 1, 1])  # 0: states in which no tensor is found

    def state(self) -> Any:
        return self.container("state", 0)

    def value(self, path: str, depth: int) -> Any:
        makers: list[Callable[[str, int], Any]] = [self.plain, self.hider, self.attribute]
        if self.richness:
            makers += [self.tensor, self.tensor, self.collection, self.module, self.optimizer]
        else:
            makers += [self.plain, self.fresh]
        if depth < 3:
            makers += [self.container, self.container]
        return self.random.choice(makers)(path, depth)

    # ---- what is found ---------------------------------------------------------------------------

    def some_tensor(self) -> torch.Tensor:
        base = self.random.choice(self.bases)
        first = self.random.randrange(len(base))
        return self.random.choice(
            [lambda: base, lambda: base[first:], lambda: base[::2], lambda: base.clone()]
        )()

    def tensor(self, path: str, depth: int) -> torch.Tensor:
        if self.random.random() < 0.2:
            self.on_host += 1
            return torch.randn(3)
        self.given.append(self.some_tensor())
        self.leaves.append(self.given[-1])
        return self.given[-1]

    def collection(self, path: str, depth: int) -> TensorDict:
        made = TensorDict({"a": self.tensor(path, depth), "b": {"c": self.tensor(path, depth)}})
        self.given += [t for t in made.values(True, True) if t.device.type != "cpu"]
        return made

    def new_model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)).to(self.device)
        if self.random.random() < 0.3:
            model[2].weight = model[0].weight
        self.models.append(model)
        return model

    def module(self, path: str, depth: int) -> nn.Module:
        is_old = bool(self.models) and self.random.random() < 0.3
        model = self.random.choice(self.models) if is_old else self.new_model()
        self.owners += 1
        self.given += [*model.parameters(), *model.buffers()]
        self.given += [each.grad for each in model.parameters() if each.grad is not None]
        return model

    def optimizer(self, path: str, depth: int) -> torch.optim.Optimizer:
        parameters = [nn.Parameter(self.some_tensor().clone()) for _ in range(2)]
        kind = self.random.choice(
            [torch.optim.SGD, functools.partial(torch.optim.SGD, momentum=0.9), torch.optim.Adam]
        )
        made = kind(parameters, lr=0.1)
        if self.random.random() < 0.7:
            for each in parameters:
                each.grad = torch.ones_like(each)
            made.step()
        self.owners += 1
        found = [each for values in made.state.values() for each in values.values()]
        found = [each for each in found if isinstance(each, torch.Tensor)]
        self.given += [each for each in found if each.device.type != "cpu"]
        self.on_host += sum(each.device.type == "cpu" for each in found)
        return made

    # ---- what has none ---------------------------------------------------------------------------

    def plain(self, path: str, depth: int) -> Any:
        return self.random.choice([None, 3, "text", torch.float32, (1, "a"), {"lr": 0.1}])

    def fresh(self, path: str, depth: int) -> Any:
        self.owners += 1
        parameters = [nn.Parameter(torch.ones(3, device=self.device))]
        return self.random.choice([nn.ReLU(), torch.optim.Adam(parameters), nn.Sequential()])

    # ---- what hides them -------------------------------------------------------------------------

    def hider(self, path: str, depth: int) -> Any:
        hidden = [self.some_tensor() for _ in range(self.random.randrange(3))]
        model = self.new_model()
        if self.random.random() < 0.5:
            hidden += model.parameters()
        content = {"t": [each for each in hidden if not isinstance(each, nn.Parameter)]}
        if len(content["t"]) < len(hidden):
            content["m"] = (model,)
            hidden += model.buffers()
        self.hiders.append((path, hidden))
        kind = type(f"Hider{len(self.hiders)}", (types.SimpleNamespace,), {})  # warned of once each
        return kind(content=content, name="a")

    def attribute(self, path: str, depth: int) -> nn.Module:
        self.owners += 1
        self.attributes.append(self.some_tensor())
        return Attributes(self.attributes[-1])

    # ---- containers ------------------------------------------------------------------------------

    def container(self, path: str, depth: int) -> Any:
        kind = self.random.choice(
            [dict, collections.OrderedDict, list, tuple, "deque", Pair, Batch]
        )
        if kind in (Pair, Batch):
            names = ("first", "second")
            return kind(*[self.value(f"{path}.{name}", depth + 1) for name in names])
        count = self.random.randrange(1, 4)
        if kind in (dict, collections.OrderedDict):
            return kind((f"k{i}", self.value(f"{path}['k{i}']", depth + 1)) for i in range(count))
        children = [self.value(f"{path}[{i}]", depth + 1) for i in range(count)]
        return collections.deque(children) if kind == "deque" else kind(children)

    # ---- what is expected ------------------------------------------------------------------------

    def tensors(self) -> list[torch.Tensor]:
        hidden = [tensor for _, tensors in self.hiders for tensor in tensors]
        return [*self.given, *hidden, *self.attributes, *self.bases]

    def storages(self) -> set[int]:
        """Returns the storages of the tensors that are to be found."""
        return {storage_of(each) for each in self.given}

    def is_refused(self) -> bool:
        """Whether a state in which no tensor is found is to be refused by default."""
        if any(tensors for _, tensors in self.hiders) or self.attributes:
            return True
        return bool(self.hiders) and not self.owners


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def made(seed: int, device: str) -> tuple[Maker, Any]:
    maker = Maker(seed, device)
    return maker, maker.state()


SEEDS = range(60)


@pytest.mark.parametrize("seed", SEEDS)
def test_each_tensor_is_parked_and_resumed_or_reported(device: Any, seed: int) -> None:
    maker, state = made(seed, device)
    tensors = maker.tensors()
    before = [(each, storage_of(each), each.detach().cpu().clone()) for each in tensors]
    storages = {storage_of(each): each.untyped_storage() for each in maker.given}
    # Counted now: with some torch versions a parked storage has no bytes.
    expected_bytes = sum(each.nbytes() for each in storages.values())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if maker.given or not maker.on_host:
            parked = tdcopier.park(state, on_unknown="warn")
        else:
            with pytest.raises(ValueError, match=r"^nothing to park: "):
                tdcopier.park(state, on_unknown="warn")
            return
    texts = [str(each.message) for each in caught]
    found = maker.storages()
    for each in tensors:
        assert has_memory(each) == (storage_of(each) not in found)
    for path, _ in maker.hiders:
        assert sum(text.startswith(f"{path} is ") for text in texts) == 1, (path, texts)
    assert parked.nbytes == expected_bytes
    parked.resume()
    for each, storage, values in before:
        assert storage_of(each) == storage
        assert same_bytes(each.detach().cpu(), values)


@pytest.mark.parametrize("call", [tdcopier.park, tdcopier.snapshot])
@pytest.mark.parametrize("seed", SEEDS)
def test_refusals_name_a_value_that_hides_tensors(device: Any, seed: int, call: Any) -> None:
    maker, state = made(seed, device)
    paths = [path for path, _ in maker.hiders]
    if paths:
        with pytest.raises(TypeError) as caught:
            call(state, on_unknown="raise")
        assert str(caught.value).split(" is ")[0] == paths[0]
    if not maker.given and not maker.on_host and maker.is_refused():
        with pytest.raises(TypeError, match=r"^state.* is an? .*: nothing is (parked|copied)"):
            call(state)
    elif maker.given or not maker.on_host:
        handle = call(state)
        if isinstance(handle, tdcopier.Parked):
            handle.resume()
    assert all(map(has_memory, maker.tensors()))


def as_saved(value: Any, memo: dict[int, Any]) -> Any:
    """Returns what a snapshot is to have: state dicts, and deep copies of all other values.

    An object that also has a tensor of the state gets the copy of it, by the memo.
    """
    if isinstance(value, nn.Module | torch.optim.Optimizer):
        value = value.state_dict()
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, TensorDictBase):
        return value.cpu().clone()
    if isinstance(value, dict):
        return type(value)((key, as_saved(child, memo)) for key, child in value.items())
    if isinstance(value, Pair | Batch):
        return type(value)(as_saved(value.first, memo), as_saved(value.second, memo))
    if isinstance(value, list | tuple | collections.deque):
        return type(value)(as_saved(child, memo) for child in value)
    return copy.deepcopy(value, memo)


def assert_same(got: Any, wanted: Any) -> None:
    assert type(got) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert got.device == wanted.device
        assert same_bytes(got.detach().cpu(), wanted.detach().cpu())
    elif isinstance(wanted, TensorDictBase):
        assert_same(got.to_dict(), wanted.to_dict())
    elif isinstance(wanted, dict):
        assert list(got) == list(wanted)
        for key in wanted:
            assert_same(got[key], wanted[key])
    elif isinstance(wanted, list | tuple | collections.deque):
        assert len(got) == len(wanted)
        for one, other in zip(got, wanted, strict=True):
            assert_same(one, other)
    elif isinstance(wanted, Batch | types.SimpleNamespace):
        assert_same(vars(got), vars(wanted))
    elif isinstance(wanted, nn.Module):
        assert_same(got.state_dict(), wanted.state_dict())
    else:
        assert got == wanted


@pytest.mark.parametrize("device_copy", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_snapshot_has_the_values_of_a_deep_copy(
    device: Any, seed: int, device_copy: bool
) -> None:
    maker, state = made(seed, device)
    wanted = as_saved(state, {id(each): each.cpu().clone() for each in maker.leaves})
    taken = tdcopier.snapshot(state, device_copy=device_copy, on_unknown="ignore")
    taken.before_update()
    for each in maker.tensors():
        each.detach().fill_(-1)
    assert_same(taken.get(), wanted)
    assert all(each.detach().eq(-1).all() for each in maker.tensors())


def test_the_states_have_what_the_tests_are_about(device: Any) -> None:
    makers = [made(seed, device)[0] for seed in SEEDS]
    assert sum(bool(each.hiders and each.given) for each in makers) >= 5
    assert sum(each.is_refused() and not each.given and not each.on_host for each in makers) >= 5
    assert sum(not each.is_refused() and not each.given for each in makers) >= 2
    assert sum(len(each.storages()) < len(each.given) for each in makers) >= 5
