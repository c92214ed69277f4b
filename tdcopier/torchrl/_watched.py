"""What a captured step depends on: the modules, optimizers and tensors that its function uses.

A graph reads and writes the memory that its tensors had when it was captured, and every number that
Python knew then is constant in it. So a parameter or an optimizer's state that is replaced, and a
learning rate or a mode that is changed, need a new graph; and a function that counts in Python
counts no further.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import is_tensor_collection
from torch import nn
from torch.optim import Optimizer

_DEEPEST = 6
"""Objects within objects, in which modules and optimizers are looked for."""
_NUMBERS = (bool, int, float, np.generic)
_WATCHED = (torch.Tensor, nn.Module, Optimizer)
_ATOMS = (str, bytes, torch.Tensor, type, types.ModuleType, torch.device, torch.dtype)
_OF_MODULES = ("_parameters", "_buffers", "_modules", "_param_td")


class _Seen(NamedTuple):
    """What a captured step depends on, in a form that `==` compares."""

    bindings: list[int]
    children: list[int]
    modes: list[bool]
    tensors: list[int]
    places: list[int]
    needs_grad: list[bool]
    settings: list[Any]


class Watched:
    """The modules, optimizers and tensors that functions use. Thread: one at a time."""

    def __init__(self, roots: Iterable[Any]) -> None:
        """Watch what functions find in their closures, their globals and their objects.

        Args:
            roots: functions, modules, optimizers, or objects that have some.
        """
        self._roots = list(roots)
        self._seen: _Seen | None = None
        self._walk()

    def _walk(self) -> None:
        walk = _Walk(self._roots)
        self._holders = walk.holders
        self.optimizers = [each for each in walk.found if isinstance(each, Optimizer)]
        self.modules = [each for each in walk.found if isinstance(each, nn.Module)]
        modules = {id(m): m for root in self.modules for m in root.modules()}
        self._all_modules = list(modules.values())
        self._held = [held for module in self._all_modules for held in _dicts_of(module)]
        self._loose = [each for each in walk.found if isinstance(each, torch.Tensor)]
        self._kept: list[Any] = []

    def remember(self) -> None:
        """Take what is there now as what a step depends on, and keep its memory alive."""
        self._walk()
        self._seen, tensors = self._look()
        # Of objects that are gone, others would get the identity; and a graph writes to gradients.
        self._kept = [*tensors, *(t.grad for t in tensors if t.is_leaf), *self._bound()]

    def difference(self) -> str | None:
        """Return in words what differs from what was remembered; None: nothing."""
        if self._seen is None:
            return None
        now, _ = self._look()
        before = self._seen
        if now == before:
            return None
        if now.children != before.children:
            return "a module was replaced"
        if now.modes != before.modes:
            return "a module changed between training and evaluation"
        if now.settings != before.settings:
            return "a setting of an optimizer was changed, such as its learning rate"
        if now.bindings != before.bindings:
            return "an object that the function uses was replaced"
        if now.tensors == before.tensors and now.places == before.places:
            return "requires_grad of a parameter was changed"
        return "a parameter, a buffer or an optimizer's state was replaced"

    def counters(self) -> list[tuple[str, Any]]:
        """Return the numbers that the functions see, and their tensors, each with its name."""
        return [
            (name + key, value)
            for name, holder in self._holders
            for key, value in holder().items()
            if isinstance(value, (*_NUMBERS, torch.Tensor))
        ]

    def _bound(self) -> list[Any]:
        return [
            value
            for _, holder in self._holders
            for value in holder().values()
            if isinstance(value, _WATCHED)
        ]

    def _look(self) -> tuple[_Seen, list[torch.Tensor]]:
        tensors: list[torch.Tensor] = list(self._loose)
        settings: list[Any] = []
        held = [*self._held]
        for optimizer in self.optimizers:
            held += optimizer.state.values()
            for group in optimizer.param_groups:
                held.append(group)
                tensors += group["params"]
                settings += [_setting(value) for key, value in group.items() if key != "params"]
        for each in held:
            tensors += [value for value in each.values() if isinstance(value, torch.Tensor)]
        seen = _Seen(
            list(map(id, self._bound())),
            [id(child) for module in self._all_modules for child in module._modules.values()],
            [module.training for module in self._all_modules],
            list(map(id, tensors)),
            [tensor.data_ptr() for tensor in tensors],
            [tensor.requires_grad for tensor in tensors],
            settings,
        )
        return seen, tensors

    def gradients(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Return the parameters with their gradients, to put these back."""
        _, tensors = self._look()
        return [(tensor, tensor.grad) for tensor in tensors if tensor.is_leaf]

    def make_capturable(self, device: torch.device) -> None:
        """Let optimizers of parameters on the device count their steps there, as a graph needs it.

        Torch's optimizers have the option `capturable` for that; their results are those of the
        option.
        """
        self._walk()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if group.get("capturable", True):
                    continue
                if any(parameter.device != device for parameter in group["params"]):
                    continue
                group["capturable"] = True
                optimizer._warned_capturable_if_run_uncaptured = True
                for parameter in group["params"]:
                    step = optimizer.state.get(parameter, {}).get("step")
                    if isinstance(step, torch.Tensor) and step.device != parameter.device:
                        optimizer.state[parameter]["step"] = step.to(parameter.device)


def _setting(value: Any) -> Any:
    """Return a value of an optimizer's group as a graph has it: torch reads numbers on the host."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.item() if value.is_cpu and value.numel() == 1 else None


def _dicts_of(module: nn.Module) -> Iterator[dict[str, Any]]:
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


class _Walk:
    """Finds the modules, optimizers and tensors that functions use, as far as Python shows it.

    Of an object it looks at the attributes and methods that are named in the code of the functions,
    since others may change at each step.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self.names: set[str] = {"__call__"}
        known = 0
        while known < len(self.names):  # methods that are found name further attributes
            known = len(self.names)
            self.found: list[Any] = []
            self.holders: list[tuple[str, Callable[[], dict[str, Any]]]] = []
            """Each binds names to values: its own name, and a function that returns the others."""
            self._seen: dict[int, Any] = {}
            for root in roots:
                self._visit(root, 0)

    def _visit(self, value: Any, depth: int) -> None:
        if id(value) in self._seen or depth > _DEEPEST:
            return
        self._seen[id(value)] = value  # kept, or another object might get its identity
        if isinstance(value, _WATCHED):
            self.found.append(value)
        for part in self._parts_of(value):
            self._visit(part, depth + 1)

    def _parts_of(self, value: Any) -> list[Any]:
        if isinstance(value, (*_ATOMS, *_NUMBERS, Optimizer)):
            return []
        if isinstance(value, dict):
            return list(value.values())
        if isinstance(value, (list, tuple, set, frozenset)):
            return list(value)
        if isinstance(value, functools.partial):
            return [value.func, *value.args, *value.keywords.values()]
        if isinstance(value, types.MethodType):
            return [value.__self__, value.__func__]
        if isinstance(value, types.FunctionType):
            return self._parts_of_function(value)
        if is_tensor_collection(value) and not isinstance(value, nn.Module):
            return self._bound_by("", lambda: _leaves_of(value))
        name = f"{type(value).__qualname__}."
        return [*self._methods_of(value), *self._bound_by(name, lambda: self.attributes_of(value))]

    def _methods_of(self, value: Any) -> list[Any]:
        if isinstance(value, nn.Module):
            return []
        found = (inspect.getattr_static(type(value), name, None) for name in self.names)
        return [method for method in found if isinstance(method, types.FunctionType)]

    def attributes_of(self, value: Any) -> dict[str, Any]:
        """Return the attributes of an object that functions name; of a module, not its parts."""
        slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
        own = {name: getattr(value, name) for name in slots if hasattr(value, name)}
        own.update(getattr(value, "__dict__", {}))
        if isinstance(value, nn.Module):
            inner = (name for name in own if name in _OF_MODULES or name.endswith("_hooks"))
            return {name: own[name] for name in own.keys() - set(inner)}
        return {name: own[name] for name in own.keys() & self.names}

    def _parts_of_function(self, function: types.FunctionType) -> list[Any]:
        known, names = function.__globals__, list(_names_in(function.__code__))
        self.names.update(names)
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

        def of_globals() -> dict[str, Any]:
            found = {name: known[name] for name in names if name in known}
            return {name: value for name, value in found.items() if not _is_foreign(value, known)}

        def of_closure() -> dict[str, Any]:
            return {n: cell.cell_contents for n, cell in cells.items() if _is_assigned(cell)}

        parts = list(function.__dict__.values())  # what decorators wrap, and torch compiles
        parts += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        return [*parts, *self._bound_by("", of_globals), *self._bound_by("", of_closure)]

    def _bound_by(self, name: str, holder: Callable[[], dict[str, Any]]) -> list[Any]:
        self.holders.append((name, holder))
        return list(holder().values())


def _leaves_of(tree: Any) -> dict[str, Any]:
    """Return the leaves of a TensorDict, with the names of nested ones in one text."""
    leaves = tree.items(include_nested=True, leaves_only=True)
    return {key if isinstance(key, str) else ".".join(key): leaf for key, leaf in leaves}


def _is_assigned(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _is_foreign(value: Any, known: dict[str, Any]) -> bool:
    """Return whether a global is a function of another file."""
    return isinstance(value, types.FunctionType) and value.__globals__ is not known


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)
