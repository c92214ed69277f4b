"""The functions and classes of this package that the native module calls.

C++ code knows no other name here: `csrc/python/runtime/hooks.h` has the same names. Modules that
only some programs need are imported when a hook of theirs is called.
"""

from __future__ import annotations

from typing import Any

import torch

from tdcopier import _C, _packed_forms
from tdcopier._asyncio import arrived
from tdcopier._containers import unknown
from tdcopier._containers.arrays import as_tensor
from tdcopier._containers.delegated_parts import plain_parts
from tdcopier._containers.registry import rule_of
from tdcopier._containers.rule import Refused
from tdcopier._into import is_plain_class, mismatch
from tdcopier._stats import stats_of


def _level_of(collection: Any) -> tuple[bool, Any]:
    from tdcopier.tensordict._levels import level_of  # tensordict is imported already

    return level_of(collection)


def _table_as_tensor(leaf: Any, written: bool) -> torch.Tensor | str:
    from tdcopier._rows.scatter import as_tensor

    return as_tensor(leaf, written)


def _tell_of_attributes(data: Any, target: torch.device, only_warn: bool) -> None:
    from tdcopier._containers.beside import refuse_or_warn

    refuse_or_warn(data, target, only_warn)


def _differ(source: Any, destination: Any) -> bool:
    from tdcopier._opaque import differ

    return differ(source, destination)


def _replacements(pairs: list[Any]) -> Any:
    from tdcopier._opaque import Replacements

    return Replacements(pairs)


def _dump_values(values: list[Any], path_of: Any, device: torch.device) -> Any:
    from tdcopier._pickled_values import dump

    return dump(values, path_of, device)


def _load_values(pickled: bytes, memory: list[torch.Tensor]) -> list[Any]:
    from tdcopier._pickled_values import load

    return load(pickled, memory)


def _refuse_pickle(path: str, pickled: bytes) -> None:
    from tdcopier._refused_pickles import refuse

    refuse(path, pickled)


_C.set_hooks(
    rule_of=rule_of,
    Refused=Refused,
    level_of=_level_of,
    plain_parts=plain_parts,
    as_tensor=as_tensor,
    table_as_tensor=_table_as_tensor,
    may_hold_tensors=unknown.may_hold_tensors,
    is_to_be_told=unknown.is_to_be_told,
    warn_of_unknown=unknown.warn,
    refuse_unknown=unknown.refuse,
    refuse_root=unknown.refuse_root,
    tell_of_attributes=_tell_of_attributes,
    is_plain_class=is_plain_class,
    mismatch=mismatch,
    differ=_differ,
    replacements=_replacements,
    arrived=arrived,
    stats_of=stats_of,
    packed_form=_packed_forms.packed_form,
    from_packed_form=_packed_forms.from_packed_form,
    are_current=_packed_forms.are_current,
    dump_values=_dump_values,
    load_values=_load_values,
    refuse_pickle=_refuse_pickle,
)
