"""What a captured step depends on: the modules and optimizers that a learner's function uses.

A graph reads and writes the memory that its tensors had when it was captured, and every number that
Python knew then is constant in it. So a parameter or an optimizer's state that is replaced, and a
learning rate or a mode that is changed, need a new graph.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from tensordict import is_tensor_collection
from torch import nn
from torch.optim import Optimizer

_SETTINGS = (bool, int, float, str, tuple)
_DEEPEST = 4
"""Objects within objects, in which modules and optimizers are looked for."""


class _Seen(NamedTuple):
    """What a captured step depends on, in a form that `==` compares."""

    children: list[int]
    modes: list[bool]
    tensors: list[int]
    places: list[int]
    needs_grad: list[bool]
    settings: list[Any]


class Watched:
    """The modules and optimizers that a function uses. Thread: one at a time."""

    def __init__(self, found: Iterable[Any]) -> None:
        found = list(found)
        self.optimizers = [each for each in found if isinstance(each, Optimizer)]
        self._roots = [each for each in found if isinstance(each, nn.Module)]
        self._modules: list[nn.Module] = []
        self._held: list[Mapping[str, Any]] = []
        """The dicts of modules that hold their parameters and buffers."""
        self._kept: list[torch.Tensor] = []
        """Keeps tensors alive, so that no other gets the identity of one."""
        self._seen: _Seen | None = None

    @classmethod
    def of(cls, function: Callable[..., Any], others: Iterable[Any] = ()) -> Watched:
        """Watch what a function finds in its closure, its globals and its object, and others."""
        found: dict[int, Any] = {}
        for each in (function, *others):
            for held in _held(each):
                found[id(held)] = held
        return cls(found.values())

    def remember(self) -> None:
        """Take what is there now as what a step depends on."""
        found: dict[int, nn.Module] = {}
        for root in self._roots:
            found.update((id(module), module) for module in root.modules())
        self._modules = list(found.values())
        self._held = [held for module in self._modules for held in _dicts_of(module)]
        self._seen, self._kept = self._look()

    def difference(self) -> str | None:
        """Return in words what differs from what was remembered; None: nothing."""
        if self._seen is None:
            return None
        now, _ = self._look()
        if now == self._seen:
            return None
        before = self._seen
        if now.children != before.children:
            return "a module was replaced"
        if now.modes != before.modes:
            return "a module changed between training and evaluation"
        if now.settings != before.settings:
            return "a setting of an optimizer was changed, such as its learning rate"
        if now.needs_grad != before.needs_grad and now.tensors == before.tensors:
            return "requires_grad of a parameter was changed"
        return "a parameter, a buffer or an optimizer's state was replaced"

    def _look(self) -> tuple[_Seen, list[torch.Tensor]]:
        tensors: list[torch.Tensor] = []
        settings: list[Any] = []
        held = [*self._held]
        for optimizer in self.optimizers:
            held += optimizer.state.values()
            for group in optimizer.param_groups:
                held.append(group)
                tensors += group["params"]
                settings += [value for value in group.values() if type(value) in _SETTINGS]
        for each in held:
            tensors += [value for value in each.values() if isinstance(value, torch.Tensor)]
        seen = _Seen(
            [id(child) for module in self._modules for child in module._modules.values()],
            [module.training for module in self._modules],
            list(map(id, tensors)),
            [tensor.data_ptr() for tensor in tensors],
            [tensor.requires_grad for tensor in tensors],
            settings,
        )
        return seen, tensors

    def make_capturable(self) -> None:
        """Let each optimizer count its steps on the device, as a graph needs it.

        Torch's optimizers have the option `capturable` for that; their results are those of the
        option.
        """
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if group.get("capturable", True):
                    continue
                group["capturable"] = True
                optimizer._warned_capturable_if_run_uncaptured = True
                for parameter in group["params"]:
                    step = optimizer.state.get(parameter, {}).get("step")
                    if isinstance(step, torch.Tensor) and step.device != parameter.device:
                        optimizer.state[parameter]["step"] = step.to(parameter.device)


def _dicts_of(module: nn.Module) -> Iterator[Mapping[str, Any]]:
    """Yield the dicts with a module's parameters and buffers, without those of its children."""
    if "_param_td" not in module.__dict__:
        yield module._parameters
        yield module._buffers
        return
    nodes: list[Any] = [module._param_td]  # of tensordict's TensorDictParams
    while nodes:
        held = nodes.pop()._tensordict
        yield held
        nodes += [value for value in held.values() if is_tensor_collection(value)]


def _held(value: Any, depth: int = 0, seen: set[int] | None = None) -> Iterator[Any]:
    """Yield the modules and optimizers that an object is or holds, as far as Python shows it."""
    seen = set() if seen is None else seen
    if id(value) in seen or depth > _DEEPEST:
        return
    seen.add(id(value))
    if isinstance(value, (nn.Module, Optimizer)):
        yield value
        if isinstance(value, nn.Module):
            return
    for part in _parts_of(value):
        yield from _held(part, depth + 1, seen)


def _parts_of(value: Any) -> Iterable[Any]:
    if isinstance(value, (str, bytes, int, float, torch.Tensor, type, types.ModuleType)):
        return ()
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, types.MethodType):
        return (value.__self__, value.__func__)
    if isinstance(value, types.FunctionType):
        return _parts_of_function(value)
    return list(getattr(value, "__dict__", {}).values())


def _parts_of_function(function: types.FunctionType) -> list[Any]:
    parts = list(function.__dict__.values())  # what decorators wrap, and torch compiles
    parts += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        try:
            parts.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            continue
    known = function.__globals__
    for name in _names_in(function.__code__):
        value = known.get(name)
        is_library = isinstance(value, types.FunctionType) and value.__globals__ is not known
        if value is not None and not is_library:
            parts.append(value)
    return parts


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)
