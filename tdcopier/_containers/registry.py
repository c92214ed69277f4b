"""Rules for all classes but `list`, `tuple`, `dict` and plain tensors, built in or registered.

`by_bases.py` has those of dataclasses, named tuples and derived containers.
"""

from __future__ import annotations

import enum
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch.nn.utils.rnn import PackedSequence

from tdcopier import _C
from tdcopier._compile import keep_out_of_graphs
from tdcopier._containers import graphs, pytree, wrapped
from tdcopier._containers.by_bases import rule_by_bases
from tdcopier._containers.delegated_parts import DelegatedPart, is_tensor_collection
from tdcopier._containers.own_to import OWN_TO, has_own_to
from tdcopier._containers.rule import Flat, OfClass, Refused, Rule, unless_placed

T = TypeVar("T")

DELEGATED = _C.WhyDelegated.CLASS
"""The rule of a class whose values have a ``.to`` of their own, which moves everything in them."""


_KNOWN_TO_THE_WALK = {list, tuple, dict, int, str, float, bool, bytes, type(None)}

_lock = threading.RLock()  # reentrant: a look-up may run the code of a class's metaclass
os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
)


class _Registration:
    """A rule that a user gave for a class. Its functions usually refer to the class.

    The class itself keeps it, so that both are freed together, for example when a notebook cell
    defines the class again.
    """

    __slots__ = ("__weakref__", "rule", "subclasses")

    def __init__(self, rule: Rule, subclasses: bool) -> None:
        self.rule = rule
        self.subclasses = subclasses

    def __reduce__(self) -> Any:
        """Leave it out where a class is pickled by value."""
        return _no_registration, ()


def _no_registration() -> None:
    return None


def _unflatten_of(cls: type) -> Callable[[list[Any], Any], Any]:
    rule = _registered_rule(cls)
    if rule is None:
        raise TypeError(
            f"{cls.__qualname__} is not registered in this process: call "
            "tdcopier.containers.register here too"
        )
    return rule.unflatten


_ANCHOR = "__tdcopier_registration__"
_registered: weakref.WeakKeyDictionary[type, Callable[[], _Registration | None]] = (
    weakref.WeakKeyDictionary()
)
_found: weakref.WeakKeyDictionary[type, tuple[Rule | _C.WhyDelegated | None, int]] = (
    weakref.WeakKeyDictionary()
)
"""Rules with the mark of the class in torch's pytrees when the rule was found."""


@keep_out_of_graphs("containers.register()")
def register(
    cls: type[T],
    flatten: Callable[[T], tuple[Iterable[Any], Any]],
    unflatten: Callable[[list[Any], Any], T],
    *,
    subclasses: bool = False,
) -> None:
    """Register a class as a container, so that its children are copied.

    For example::

        tdcopier.containers.register(
            Graph,
            flatten=lambda graph: ((graph.nodes, graph.edges), graph.name),
            unflatten=lambda children, name: Graph(*children, name),
        )

    Without it, values of the class are opaque or are moved by a ``.to`` of their own. A class that
    is defined again, for example in a notebook cell, is another class: register it too. The old
    registration is freed with the old class.

    Args:
        cls: the class.
        flatten: takes a value and returns `(children, context)`. Children may be leaves, containers
            or opaque values. The context must not contain references to the children.
        unflatten: takes the moved children, as a list in the same order, and the context, and
            returns a new value. It may be called before the copy is done, so it must not read the
            children's data on the host.
        subclasses: include all subclasses, also those that are defined later. `unflatten` must then
            return the subclass, so the context needs its name or `type(value)`. Of several
            registered base classes the first one in the method resolution order counts.

    Raises:
        TypeError: `cls` is not a class, or is one that the engine handles itself (`list`, `tuple`,
            `dict`, tensors, arrays); or a function is not callable.
        ValueError: `cls` is registered already; see `containers.unregister`.
    """
    if not isinstance(cls, type):
        raise TypeError(f"cls must be a class; got {cls!r}")
    if cls in _KNOWN_TO_THE_WALK or _is_leaf_class(cls):
        raise TypeError(f"{cls.__qualname__} is known to the engine and cannot be registered")
    for name, function in (("flatten", flatten), ("unflatten", unflatten)):
        if not callable(function):
            raise TypeError(f"{name} must be callable; got {function!r}")

    def flatten_checked(value: Any) -> Flat:
        answer: Any = flatten(value)
        if isinstance(answer, tuple) and len(answer) == 2 and _may_be_children(answer[0]):
            return list(answer[0]), answer[1], None
        raise Refused(
            f"is a {type(value).__qualname__}, whose flatten function must return a pair "
            f"(children, context); it returned {answer!r}"
        )

    _register(cls, Rule(flatten_checked, OfClass(cls, unflatten, _unflatten_of)), subclasses)


@keep_out_of_graphs("register_tensor_subclass()")
def register_tensor_subclass(
    cls: type[torch.Tensor],
    wrap: Callable[[torch.Tensor, Any], Any] = wrapped.as_subclass,
    *,
    subclasses: bool = False,
) -> None:
    """Register a subclass of `torch.Tensor` over plain memory, so that its tensors are packed.

    Without it, they are delegated to their own ``.to``. `torchvision.tv_tensors` need no
    registration. For example::

        class Boxes(torch.Tensor):
            format: str


        def wrap(tensor: torch.Tensor, like: Boxes) -> Boxes:
            boxes = tensor.as_subclass(type(like))
            boxes.format = like.format
            return boxes


        tdcopier.containers.register_tensor_subclass(Boxes, wrap)

    The engine reads and writes the memory of such tensors, also in `copy_into`, and does not call
    their `__torch_function__`. Tensors that it cannot copy as plain bytes, for example those that
    need a gradient, are still delegated to their own ``.to``.

    Args:
        cls: the class. It must not override `__torch_dispatch__`.
        wrap: takes a plain tensor on the target, and `like`: a tensor of the source's class that
            has the attributes (`__dict__`) that the source had at the call, and no elements. It
            returns what ``.to`` would have returned. It may be called before the copy is done, so
            it must not read the tensor's data on the host. By default
            `tensor.as_subclass(type(like))`, which is what ``.to`` does for a class that does not
            override `__torch_function__`; it drops attributes.
        subclasses: include all subclasses, as in `containers.register`.

    Raises:
        TypeError: `cls` is not a subclass of `torch.Tensor`, is one that the engine handles itself,
            or overrides `__torch_dispatch__`; or `wrap` is not callable.
        ValueError: `cls` is registered already; see `containers.unregister`.
    """
    if not isinstance(cls, type) or not issubclass(cls, torch.Tensor):
        raise TypeError(f"cls must be a subclass of torch.Tensor; got {cls!r}")
    if cls in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or _is_jagged(cls):
        raise TypeError(f"{cls.__qualname__} is known to the engine and cannot be registered")
    if cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise TypeError(
            f"{cls.__qualname__} overrides __torch_dispatch__, so its memory may not be that of a "
            "plain tensor: leave it to its own .to"
        )
    if not callable(wrap):
        raise TypeError(f"wrap must be callable; got {wrap!r}")
    _register(cls, wrapped.rule_with(wrap), subclasses)


@keep_out_of_graphs("containers.unregister()")
def unregister(cls: type) -> None:
    """Undo `containers.register` or `register_tensor_subclass`.

    For example::

        tdcopier.containers.unregister(Graph)

    Copies that have been started keep to the registration.

    Raises:
        TypeError: `cls` is no class.
        ValueError: `cls` is not registered.
    """
    if not isinstance(cls, type):
        raise TypeError(f"cls must be a class; got {cls!r}")
    with _lock:
        if _registration_of(cls) is None:
            raise ValueError(f"{cls.__qualname__} is not registered")
        _forget_rules()
        del _registered[cls]


def _register(cls: type, rule: Rule, subclasses: bool) -> None:
    registration = _Registration(rule, bool(subclasses))
    with _lock:
        if _registration_of(cls) is not None:
            raise ValueError(f"{cls.__qualname__} is registered already")
        _forget_rules()  # first, so that an interrupt in between changes nothing
        _registered[cls] = _kept_by(cls, registration)


def _forget_rules() -> None:
    _found.clear()
    _C.forget_rules()


def _kept_by(cls: type, registration: _Registration) -> Callable[[], _Registration | None]:
    try:
        type.__setattr__(cls, _ANCHOR, registration)
    except TypeError:  # a class written in C, which is never freed
        return lambda: registration
    return weakref.ref(registration)


def _registration_of(cls: type) -> _Registration | None:
    registered = _registered.get(cls)
    return None if registered is None else registered()


def _registered_rule(cls: type) -> Rule | None:
    """Return the rule that was registered for the class, or for a base class with subclasses."""
    for base in cls.__mro__:
        registration = _registration_of(base) if type(base).__hash__ is not None else None
        if registration is not None and (base is cls or registration.subclasses):
            return registration.rule
    return None


def _may_be_children(value: Any) -> bool:
    """Return false for an iterable that is a single child, for example a tensor."""
    one = (torch.Tensor, str, bytes, Mapping)
    return isinstance(value, Iterable) and not isinstance(value, one) and not _is_array(value)


def _is_array(value: Any) -> bool:
    return hasattr(type(value), "__array_interface__")


def rule_of(cls: type) -> Rule | _C.WhyDelegated | None:
    """Return the rule of a class, `DELEGATED`, `OWN_TO`, or None if its values are opaque."""
    if type(cls).__hash__ is None:
        return None  # a class that cannot be hashed cannot be registered
    with _lock:  # without it, a rule found before a registration could be stored after it
        mark = pytree.mark_of(cls)
        found = _found.get(cls)
        if found is not None and found[1] == mark:
            return found[0]
        registered = _registered_rule(cls)
        if registered is not None:
            return registered  # not stored: it may refer to the class
        rule = _find_rule(cls)
        _found[cls] = rule, mark
        return rule


def is_wrapped(cls: type) -> bool:
    """Return whether this is a tensor subclass whose memory is that of a plain tensor."""
    rule = rule_of(cls)
    return isinstance(rule, Rule) and rule.wraps


def _find_rule(cls: type) -> Rule | _C.WhyDelegated | None:
    """Return how to treat instances of a class that is not registered; None: they are opaque.

    In this order: handles of this package, jagged tensors, tensor subclasses, TensorDicts, packed
    sequences, enumerations, modules, graphs, dataclasses and classes derived from known containers
    (`by_bases.py`), nodes of torch's pytrees, objects with a ``.to`` of their own.
    """
    if any("_instead_in_a_tree" in vars(base) for base in cls.__mro__):
        return _HANDLES
    if _is_jagged(cls):
        from tdcopier._containers.jagged import (
            JAGGED,  # torch has imported its dependencies already
        )

        return JAGGED
    if issubclass(cls, torch.Tensor):
        return wrapped.TV_TENSOR if wrapped.is_tv_tensor(cls) else DELEGATED
    if is_tensor_collection(cls):
        from tdcopier.tensordict import _walk  # tensordict is imported already

        return _walk.rule_of(cls)
    if issubclass(cls, (PackedSequence, DelegatedPart)):
        return DELEGATED
    if issubclass(cls, enum.Enum):
        return None  # its members are compared by identity
    own_to = OWN_TO if has_own_to(cls) else None
    if issubclass(cls, torch.nn.Module):
        return own_to  # even if it is a dataclass: it cannot be rebuilt without its `__init__`
    if graphs.is_graph(cls):
        return graphs.GRAPH if graphs.is_plain_graph(cls) else own_to
    by_bases = rule_by_bases(cls)
    if by_bases is not None or issubclass(cls, tuple):  # a Size, for example, stays as it is
        return by_bases if by_bases is None or own_to is None else unless_placed(by_bases)
    if pytree.is_node(cls):
        return pytree.PYTREE if own_to is None else pytree.PYTREE_WITH_TO
    return own_to


def _refuse_handle(value: Any) -> Flat:
    """Refuse a handle of this package: the caller means what it stands for."""
    cls = type(value)
    what = getattr(cls, "_what_it_is", f"a {cls.__name__}, which is no data")
    raise Refused(f"is {what}: {cls._instead_in_a_tree}")


_HANDLES = Rule(_refuse_handle, lambda children, context: None)


def _is_leaf_class(cls: type) -> bool:
    bases = {f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__}
    return not bases.isdisjoint({"torch.Tensor", "numpy.ndarray"})


def _is_jagged(cls: type) -> bool:
    """Return whether this is the class of jagged nested tensors, without importing it."""
    module = sys.modules.get("torch.nested._internal.nested_tensor")
    return module is not None and cls is getattr(module, "NestedTensor", None)
