"""Lets the next `step` of an optimizer wait for snapshots, where torch calls hooks before it."""

from __future__ import annotations

import weakref
from types import MethodType
from typing import Any, Protocol

from torch.optim import Optimizer

_WRAPPERS = {
    "AcceleratedOptimizer": ("accelerate", "optimizer"),
    "_FabricOptimizer": ("lightning", "_optimizer"),
    "LightningOptimizer": ("lightning", "_optimizer"),
}
"""Wrappers of trainers whose `step` changes nothing before it calls that of the optimizer in them:
by class, a part of the name of its package, and the attribute with that optimizer."""


class _Snapshot(Protocol):
    def before_update(self) -> None: ...


class _Waiting:
    """A hook that makes a step wait: bound to its snapshots, whichever object torch passes to it.

    A wrapper may share the hooks of the optimizer in it. One hook per optimizer, because a hook
    cannot remove itself while torch calls it.
    """

    def __init__(self) -> None:
        self.snapshots: list[weakref.ref[_Snapshot]] = []

    def __call__(self, *_: Any) -> None:
        waiting = self.snapshots
        while waiting:
            last = waiting[-1]
            taken = last()
            if taken is not None:
                taken.before_update()
            waiting.remove(last)  # a signal handler may have added another one


_hooks: weakref.WeakKeyDictionary[Optimizer, _Waiting] = weakref.WeakKeyDictionary()


def wait_in_step(optimizer: Optimizer, taken: _Snapshot) -> bool:
    """Let the next `step` call the snapshot's `before_update`.

    Returns:
        False if torch's hooks do not come before all that the `step` does: nothing is changed then.
    """
    optimizer = _in_wrappers(optimizer)
    if not _calls_hooks_first(optimizer):
        return False
    if optimizer not in _hooks:
        hook = _Waiting()
        optimizer.register_step_pre_hook(hook)
        _hooks[optimizer] = hook
    _hooks[optimizer].snapshots.append(weakref.ref(taken))
    return True


def _in_wrappers(optimizer: Any) -> Any:
    for base in type(optimizer).__mro__:
        package, attribute = _WRAPPERS.get(base.__name__, ("", ""))
        if package and package in base.__module__.partition(".")[0]:
            inner = vars(optimizer).get(attribute)
            step = vars(optimizer).get("step")
            is_its_own = step is None or getattr(step, "_wrapped_by_lr_sched", False)
            if inner is None or not is_its_own or type(optimizer).step is not vars(base)["step"]:
                return optimizer  # of a class derived from the wrapper, say
            return _in_wrappers(inner)
    return optimizer


def _step_of_torch() -> None:
    """Do nothing: torch wraps this like a `step`."""


_HOOKED = Optimizer.profile_hook_step(_step_of_torch).__code__


def _calls_hooks_first(optimizer: Any) -> bool:
    """Return whether its `step` is the function in which torch calls hooks, with nothing before."""
    if "_optimizer_step_pre_hooks" not in vars(optimizer):  # it has not run `Optimizer.__init__`
        return False
    step = vars(optimizer).get("step", type(optimizer).step)
    if getattr(step, "_wrapped_by_lr_sched", False):  # a scheduler counts the calls
        step = step.__wrapped__
    elif isinstance(step, MethodType) and step.__self__ is optimizer:  # Accelerate puts it back
        step = step.__func__
    return getattr(step, "__code__", None) is _HOOKED
