"""TensorDicts beside other containers: taken apart level by level, as dicts and lists are."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict, UnbatchedTensor

from tdcopier._containers.rule import Refused
from tdcopier.tensordict import _kinds, _walk


def level_of(value: Any) -> tuple[bool, Any]:
    """Take only the outermost level of a collection apart, to pair it with other containers.

    Returns:
        True and the children: by key in a dict, or of a lazy stack in a list. Or False and the
        value that non-tensor data consist of.

    Raises:
        Refused: the collection is of a kind that cannot be taken apart.
    """
    cls = type(value)
    taker = _walk.taker_of_any(cls)
    if cls is TensorDict or taker is _walk.take_subclass:
        entries: dict[str, Any] = value._tensordict
        return True, {key: _without_batch(each) for key, each in entries.items()}
    if taker is _walk.take_stack and value.tensordicts and not _walk.has_hooks(value):
        return True, list(value.tensordicts)
    if taker is _walk.take_typed:
        return level_of(value._source)
    state = _walk.state_of(value)
    if taker is _walk.take_tensorclass:
        is_container, children = level_of(state["_tensordict"])
        if isinstance(children, dict):
            others = state["_non_tensordict"]
            children |= {name: each for name, each in others.items() if each is not None}
        return is_container, children
    if taker is _walk.take_data and _walk.leaves_of(value) is not None:
        data = state["_non_tensordict"]["data"]
        if type(data) in _kinds.NON_TENSOR_CLASSES:
            raise Refused(f"is a {cls.__qualname__} of a {type(data).__qualname__}: give its data")
        return False, data
    raise _walk.refused(value)


def _without_batch(entry: Any) -> Any:
    """Return the tensor in an `UnbatchedTensor`, and any other entry as it is."""
    if not isinstance(entry, UnbatchedTensor):
        return entry
    leaves = _walk.leaves_of(entry)
    if leaves is None:
        raise _walk.refused(entry)
    return leaves[0]
