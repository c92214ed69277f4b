"""Tensor subclasses over plain memory: copied as plain tensors, and wrapped again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from tdcopier._containers.rule import Rule

Wrap = Callable[[torch.Tensor, Any], Any]
"""wrap(tensor, like): returns a tensor of `like`'s class with the memory of `tensor`."""

_EMPTY = torch.empty(0, device="cpu")


def rule_with(wrap: Wrap) -> Rule:
    """Return the rule of a class whose tensors are wrapped by `wrap`."""

    def like_of(value: Any) -> tuple[Wrap, Any]:
        return wrap, _like(value)

    return Rule(like_of, _rewrap, wraps=True)


def _like(value: Any) -> Any:
    """Return a tensor of the same class with the same attributes, but without elements.

    So the copy does not keep the memory of its source, and later changes of the source's
    attributes do not reach the result.
    """
    like: Any = _EMPTY.as_subclass(type(value))
    like.__dict__.update(value.__dict__)
    return like


def _rewrap(children: list[Any], context: tuple[Wrap, Any]) -> Any:
    wrap, like = context
    (tensor,) = children
    # It has its class already if it was reused, or delegated to its own ``.to``.
    return wrap(tensor, like) if type(tensor) is torch.Tensor else tensor


def as_subclass(tensor: torch.Tensor, like: Any) -> Any:
    """Wrap as ``.to`` does for a class that inherits ``__torch_function__`` from torch.Tensor."""
    return tensor.as_subclass(type(like))


# ---- torchvision.tv_tensors ----------------------------------------------------------------------


def is_tv_tensor(cls: type) -> bool:
    """Return whether it is a class of `torchvision.tv_tensors`, or one that moves as they do.

    Does not import torchvision.
    """
    base: Any = getattr(sys.modules.get("torchvision.tv_tensors"), "TVTensor", None)
    if base is None or not issubclass(cls, base) or not hasattr(cls, "_wrap_output"):
        return False
    mine: Any = cls
    return (
        mine.__torch_function__.__func__ is base.__torch_function__.__func__
        and mine.to is torch.Tensor.to
    )


def _wrap_tv_tensor(tensor: torch.Tensor, like: Any) -> Any:
    """Wrap with the method that ``.to`` wraps its result with; it keeps the class's metadata."""
    return type(like)._wrap_output(tensor, (like,), None)


TV_TENSOR = rule_with(_wrap_tv_tensor)
