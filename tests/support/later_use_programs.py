"""Random programs: copy a mixture of TensorDicts in some way, then use the result.

A seed is a program. It runs twice, with tdcopier's result and with that of `.to()`, and everything
that users can see must be the same after each use.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import inspect
import multiprocessing.util
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch
from catalogue_cases import OPTIONS
from later_uses import (
    LEAF,
    WHOLE,
    Side,
    collections_in,
    leaves_for,
    moves_too_early,
    tensors_in,
    without_addresses,
)
from later_uses_of_tensordicts import COLLECTION
from support import is_collection, oracle
from tensordict import TensorDict, lazy_stack
from tensordict_classes import Frames
from tensordict_kinds import TD_KINDS, TdKind
from tensordict_same import Twins, assert_same_tensordict

import tdcopier

DIRECTIONS = ("H2D", "D2H", "D2D", "H2H", "on the device")
MOST_VALUES = 5
MOST_LEAVES = 400
"""Values with more leaves are dropped, because stacks of stacks grow fast."""

# ---- sources -------------------------------------------------------------------------------------

Make = Callable[[list[Any], str], Any]


def _beside(made: list[Any], device: str) -> Any:
    data = {f"n{i}": each for i, each in enumerate(made)}
    return TensorDict({**data, "z": torch.arange(3.0).to(device)})


def _tree(made: list[Any], device: str) -> Any:
    plain = {"t": torch.arange(6.0).to(device).view(2, 3), "array": np.arange(4.0), "text": "word"}
    return [made[0], plain, *[(each, None) for each in made[1:]]]


AROUND: dict[str, Make] = {
    "alone": lambda made, _: made[0],
    "in a TensorDict": _beside,
    "in a TensorDict with a device": lambda made, d: TensorDict(
        {**{f"n{i}": each for i, each in enumerate(made)}, "z": torch.ones(2, device=d)}, device=d
    ),
    "in a locked TensorDict": lambda made, d: _beside(made, d).lock_(),
    "in a lazy stack": lambda made, _: lazy_stack([made[0], made[0].clone()]),
    "in a tensorclass": lambda made, d: Frames(torch.ones(2, device=d), label=made[0]),
    "in a list": _tree,
    "in a dict": lambda made, _: {"batch": {"deep": made}, "n": torch.ones(2)},
    "in a tuple": lambda made, _: (torch.zeros(1), tuple(made)),
}
"""How to make the source of the kinds of TensorDict."""

# ---- copies --------------------------------------------------------------------------------------

Entry = Callable[[Any, str, dict[str, Any]], Any]


def _by_backend(source: Any, target: str, _options: dict[str, Any]) -> Any:
    with tdcopier.tensordict.backend():
        return source.to(target)


def _prepared(source: Any, target: str, options: dict[str, Any], *, times: int, reuse: bool) -> Any:
    plan = tdcopier.prepare(source, target, reuse_outputs=reuse, **options)
    for _ in range(times):
        result = plan.start_copy(source).get()
    return result


def _rows(source: Any) -> torch.Tensor:
    return torch.tensor([0, source.batch_size[0] - 1, 0])


def _cleared(source: Any, target: str) -> Any:
    """Returns a place for a copy, with other values in it."""
    place = source.to(target).clone()
    for leaf in tensors_in(place):
        leaf.zero_()
    return place


@torch.no_grad()
def _copied_into(source: Any, target: str, options: dict[str, Any]) -> Any:
    place = _cleared(source, target)
    taken = {name: each for name, each in options.items() if name in _OF_COPY_INTO}
    tdcopier.copy_into(source, place, **taken)
    return place


_OF_COPY_INTO = inspect.signature(tdcopier.copy_into).parameters


ENTRIES: dict[str, Entry] = {
    "start_copy": lambda source, to, options: tdcopier.start_copy(source, to, **options).get(),
    "start_copy, waited for": lambda source, to, options: tdcopier.start_copy(
        source, to, **options
    ).wait(),
    "async_to": lambda source, to, options: tdcopier.async_to(source, to, **options).get(),
    "copy": lambda source, to, options: tdcopier.copy(source, to, **options),
    "to": lambda source, to, options: tdcopier.to(source, to, **options),
    "prepare": functools.partial(_prepared, times=2, reuse=False),
    "prepare, outputs reused": functools.partial(_prepared, times=3, reuse=True),
    "tensordict_backend": _by_backend,
    "start_gather": lambda source, to, options: tdcopier.start_gather(
        source, _rows(source), to, **options
    ).get(),
    "copy_into": _copied_into,
}
ENTRIES_OF_TREES = list(ENTRIES)[:7]


def _expected(entry: str, data: Any, source: str, target: str) -> Any:
    """Returns what the same entry gives without tdcopier."""
    if entry == "start_gather":
        rows = data[_rows(data)]
        stays = target in (source, *(str(leaf.device) for leaf in tensors_in(rows)))
        return (rows.clone() if stays else rows).to(target)  # always new memory
    if entry == "copy_into":
        with torch.no_grad():
            place = _cleared(data, target)
            for leaf, value in zip(tensors_in(place), tensors_in(data), strict=True):
                leaf.copy_(value)
        return place
    return oracle(data, target)


# ---- programs ------------------------------------------------------------------------------------

USES = [*WHOLE, *LEAF, *COLLECTION]
_WEIGHTS = {"send to another process": 0.2, "send a leaf": 0.2, "repr": 0.3} | dict.fromkeys(
    COLLECTION, 3.0
)


@dataclass(frozen=True)
class Program:
    kinds: tuple[str, ...]
    around: str
    direction: str
    entry: str
    options: str
    used_within: bool
    """Whether the later uses are in the context that the kind is copied in."""
    uses: tuple[tuple[str, int], ...]
    """Names, and seeds of their choices."""


def program_of(seed: int) -> Program:
    rng = Random(seed)
    around = rng.choice(["alone"] * len(AROUND) + list(AROUND))
    kinds = tuple(rng.choice(list(TD_KINDS)) for _ in range(1 if around == "alone" else 2))
    uses = rng.choices(USES, [_WEIGHTS.get(use, 1.0) for use in USES], k=rng.randrange(1, 7))
    is_tree = around in ("in a list", "in a dict", "in a tuple")
    return Program(
        kinds,
        around,
        rng.choice(DIRECTIONS),
        rng.choice(ENTRIES_OF_TREES if is_tree else list(ENTRIES)),
        rng.choice(["default", *OPTIONS]),
        rng.random() < 0.5,
        tuple((use, rng.randrange(1 << 30)) for use in uses),
    )


class NotMade(Exception):
    """There is no such program here: the source cannot be made, or the entry refuses it."""


def ends_of(direction: str, device_type: str) -> tuple[str, str]:
    """Returns source and target."""
    here, there = f"{device_type}:0", f"{device_type}:1"
    if direction == "D2D" and torch.get_device_module(device_type).device_count() < 2:
        raise NotMade("needs two devices")
    return {
        "H2D": ("cpu", here),
        "D2H": (here, "cpu"),
        "D2D": (there, here),
        "H2H": ("cpu", "cpu"),
        "on the device": (here, here),
    }[direction]


def play(program: Program, device_type: str) -> Counter[str]:
    """Runs a program and compares; returns how often its uses gave a result and an error.

    Raises:
        AssertionError: There is a difference.
        NotMade: It cannot be run.
    """
    with warnings.catch_warnings(), _temporary_files():
        warnings.simplefilter("ignore")
        return _play(program, device_type)


def _play(program: Program, device_type: str) -> Counter[str]:
    source, target = ends_of(program.direction, device_type)
    kinds = [TD_KINDS[name] for name in program.kinds]
    within = _context_of(kinds, source, target)
    counts: Counter[str] = Counter()
    with within():
        sides = [_started(program, kinds, source, target, engine) for engine in (True, False)]
    try:
        _compare(sides, "the result")
    except Unreadable as error:
        raise NotMade("the result cannot be read") from error
    with within() if program.used_within else contextlib.nullcontext():
        for number, (use, seed) in enumerate(program.uses):
            outcomes = [_outcome(use, side, Random(seed)) for side in sides]
            where = f"use {number}, {use}"
            try:
                _compare(sides, where)
                _compare_outcomes(*outcomes, where)
            except Unreadable:
                counts[f"{use}: unreadable"] += 1
                break
            failed = isinstance(outcomes[0], Exception)
            counts[f"{use}: {'error' if failed else 'result'}"] += 1
            for side, outcome in zip(sides, outcomes, strict=True):
                if not failed and _is_kept(outcome, side):
                    side.values = [*side.values, outcome][-MOST_VALUES:]
    return counts


def _context_of(kinds: list[TdKind], source: str, target: str) -> Callable[[], Any]:
    special = [kind.within for kind in kinds if kind.within is not contextlib.nullcontext]
    if len(special) > 1:
        raise NotMade("two contexts")
    for kind in kinds:
        missing = kind.why_missing(source.split(":")[0], target.split(":")[0])
        if missing or (kind.d2h is None and source != "cpu"):
            raise NotMade(missing or "only on the host")
    return special[0] if special else contextlib.nullcontext


def _started(
    program: Program, kinds: list[TdKind], source: str, target: str, by_engine: bool
) -> Side:
    try:
        made = [kind.make(target if kind.on_target else source) for kind in kinds]
        data = AROUND[program.around](made, source)
        if target == "cpu" and moves_too_early(data):
            raise NotMade("moves too early")
        expected = _expected(program.entry, data, source, target)
    except NotMade:
        raise
    except Exception as error:
        raise NotMade(f"{type(error).__name__}: {error}") from error
    if by_engine:
        # Made once more, because making what is expected may have changed it.
        made = [kind.make(target if kind.on_target else source) for kind in kinds]
        data = AROUND[program.around](made, source)
        expected = _copied(program, data, target)
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return Side(by_engine, data, ("cpu", source, target), [expected])


REFUSING = ("start_gather", "copy_into")
"""Entries that refuse some kinds, which tests of their own cover."""


def _copied(program: Program, data: Any, target: str) -> Any:
    try:
        return ENTRIES[program.entry](data, target, OPTIONS[program.options])
    except (TypeError, ValueError) as error:
        if program.entry in REFUSING:
            raise NotMade(f"{program.entry} refuses it: {error}") from error
        raise AssertionError(f"the copy raises {type(error).__name__}: {error}") from error
    except Exception as error:
        raise AssertionError(f"the copy raises {type(error).__name__}: {error}") from error


def _outcome(use: str, side: Side, rng: Random) -> Any:
    """Returns what the use of one of the values gives, or its error."""
    torch.manual_seed(rng.randrange(1 << 30))
    value = rng.choice([side.values[0], side.values[-1], rng.choice(side.values)])
    failure: Exception | None = None
    made = None
    try:
        made = _used(use, side, value, rng)
    except NameError:
        raise  # in the use itself
    except Exception as error:
        failure = error
    # All are read, whatever has failed, so that none is left for a later use or a comparison.
    errors = [failure, *_errors_of_devices()]
    found = next((error for error in errors if error is not None), None)
    if found is None:
        return made
    # Its frames would keep nodes alive, which count as parents of those that they lock.
    found.__context__ = found.__cause__ = None
    return found.with_traceback(None)


def _errors_of_devices() -> list[Exception]:
    """Returns the errors of operations on all devices; they will not be raised again."""
    errors = []
    for device in range(torch.accelerator.device_count()):
        try:
            torch.accelerator.synchronize(device)
        except Exception as error:
            errors.append(error)
    return errors


def _used(use: str, side: Side, value: Any, rng: Random) -> Any:
    if use in WHOLE:
        return WHOLE[use](side, value, rng)
    if use in LEAF:
        leaves = leaves_for(use, value)
        return LEAF[use](rng.choice(leaves), rng) if leaves else None
    nodes = collections_in(value)
    node = rng.choice([*nodes[:1] * 2, *nodes]) if nodes else None
    made = None if node is None else COLLECTION[use](node, rng)
    return None if made is node else made


class Unreadable(Exception):
    """A use has left something on both sides that torch or tensordict refuses to read."""


def _compare(sides: list[Side], where: str) -> None:
    ours, theirs = ([side.source, *side.values] for side in sides)
    _assert_same(ours, theirs, where)


def _assert_same(ours: Any, theirs: Any, where: str) -> None:
    try:
        assert_same_tensordict(ours, theirs, where, Twins())
    except AssertionError:
        raise
    except Exception as error:
        refusals = [_refusal(each) for each in (ours, theirs)]
        assert refusals[0] == refusals[1] is not None, f"{where}: reading it raises {refusals}"
        raise Unreadable(where) from error


def _refusal(value: Any) -> type[Exception] | None:
    try:
        assert_same_tensordict(value, value)
    except Exception as error:
        return type(error)
    return None


def _compare_outcomes(ours: Any, theirs: Any, where: str) -> None:
    for mine, other in ((ours, theirs), (theirs, ours)):
        if isinstance(mine, Exception) and not isinstance(other, Exception):
            raise AssertionError(
                f"{where}: {'tdcopier' if mine is ours else '.to()'} alone raises "
                f"{type(mine).__name__}: {mine}"
            ) from mine
    if isinstance(theirs, Exception):
        assert type(ours) is type(theirs), f"{where}: {ours!r}, not {theirs!r}"
        texts = [_told(error) for error in (ours, theirs)]
        assert texts[0] == texts[1], f"{where}: {texts[0]!r}, not {texts[1]!r}"
    else:
        _assert_same(ours, theirs, where)


def _told(error: Exception) -> str:
    """Returns the text of an error that both sides must have.

    Of several operations that fail on a device, any may be told, since a stream runs beside others.
    """
    text = without_addresses(str(error))
    of_a_stream = "an operation on a stream of the simulated device failed"
    return of_a_stream if text.startswith(of_a_stream) else text


def _is_kept(outcome: Any, side: Side) -> bool:
    """Whether later uses may have it. An array is not kept: sharing a leaf's memory frees it."""
    is_value = is_collection(outcome) or len(tensors_in(outcome)) > 0
    return is_value and len(tensors_in([*side.values, outcome])) <= MOST_LEAVES


@contextlib.contextmanager
def _temporary_files() -> Iterator[None]:
    """Puts files of this program into a folder, which is deleted with it."""
    multiprocessing.util.get_temp_dir()  # made once, outside of this folder
    before = tempfile.tempdir
    tempfile.tempdir = tempfile.mkdtemp(prefix="tdcopier-later-")
    try:
        yield
    finally:
        gc.collect(0)
        shutil.rmtree(tempfile.tempdir, ignore_errors=True)
        tempfile.tempdir = before


# ---- failures ------------------------------------------------------------------------------------


def difference(program: Program, device_type: str) -> str | None:
    """Returns the first difference of a program; None if there is none."""
    try:
        play(program, device_type)
    except NotMade:
        return None
    except AssertionError as error:
        return str(error)
    return None


def shrink(program: Program, device_type: str) -> Program:
    """Drops what the difference does not need."""
    for number in reversed(range(len(program.uses))):
        uses = program.uses[:number] + program.uses[number + 1 :]
        program = _if_different(program, device_type, uses=uses)
    program = _if_different(program, device_type, options="default")
    program = _if_different(program, device_type, entry="copy")
    program = _if_different(program, device_type, used_within=False)
    return _if_different(program, device_type, around="alone", kinds=program.kinds[:1])


def _if_different(program: Program, device_type: str, **changes: Any) -> Program:
    changed = dataclasses.replace(program, **changes)
    return changed if difference(changed, device_type) is not None else program
