"""Random trees of values of random classes, and what a copy has to make of them.

    python tests/support/random_class_trees.py --minutes 15
    python tests/support/random_class_trees.py --seed 4711

The oracle walks the items and attributes that the objects store, side by side with those of the
result, and uses none of tdcopier's code. The program ends at the first difference.
"""

from __future__ import annotations

import argparse
import random
import re
import time
import warnings
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from random_classes import MAPPINGS, Made, raw_attributes, raw_items
from random_field_classes import random_class

import tdcopier

BUILT_IN = (list, tuple, dict, OrderedDict, defaultdict, deque, UserDict)
ROWS = [2, 0]


class Tree:
    """A tree that is made from a seed."""

    def __init__(self, seed: int, device: str) -> None:
        self.device = device
        self._draw = random.Random(seed)
        self.classes = [random_class(self._draw) for _ in range(self._draw.randrange(1, 4))]
        self.made = {each.cls: each for each in self.classes}
        self.mode = self._draw.choice(["copy"] * 6 + ["gather", "into"])
        self._shared: list[Any] = []
        first = self.classes[0]
        self.data = self._value(self._draw.randrange(1, 4), first)
        if self._draw.random() < 0.7 or first.base is object:
            self.data = self._draw.choice([lambda x: [x], lambda x: {"k": x}, lambda x: (1, x)])(
                self.data
            )

    def _value(self, depth: int, made: Made | None = None) -> Any:
        draw = self._draw
        if made is None and (depth == 0 or draw.random() < 0.5):
            return self._leaf()
        if made is None and self._shared and draw.random() < 0.1:
            return draw.choice(self._shared)
        children = [self._value(depth - 1) for _ in range(draw.choice([0, 1, 2, 3]))]
        if made is None:
            made = draw.choice(self.classes)
            if draw.random() < 0.3:
                wrap = draw.choice([list, tuple, lambda c: dict(enumerate(c)), deque])
                return wrap(children)
        value = made.make(children)
        self._shared.append(value)
        return value

    def _leaf(self) -> Any:
        draw = self._draw
        values = torch.arange(6.0).reshape(3, 2) + draw.randrange(100)
        return draw.choice([
            lambda: values, lambda: values, lambda: values.to(torch.int16).T.contiguous().T,
            lambda: values.to(self.device) if self.mode == "copy" else values + 1,
            lambda: values.numpy(), lambda: draw.choice([None, 5, "text", object]),
        ])()  # fmt: skip

    def describe(self) -> str:
        return f"{self.mode}: " + "; ".join(
            f"{each.cls.__name__}({', '.join(each.features)})" for each in self.classes
        )


class Different(AssertionError):
    """A copy is not what the oracle says."""


def _require(true: bool, path: str, message: str) -> None:
    if not true:
        raise Different(f"{path}: {message}")


class Oracle:
    """Compares a result with its source."""

    def __init__(self, tree: Tree, move: Callable[[Any], Any]) -> None:
        self._tree = tree
        self._move = move
        self.leaves = 0

    def compare(self, source: Any, got: Any, path: str = "data") -> None:
        if isinstance(source, (torch.Tensor, np.ndarray)):
            return self._compare_leaf(source, got, path)
        made = self._tree.made.get(type(source))
        if type(source) not in BUILT_IN and (made is None or made.base is object):
            _require(got is source, path, "an opaque value is another object")
            return None
        _require(type(got) is type(source), path, f"{type(got)} is not {type(source)}")
        if made is None or made.base is not type:
            self._compare_items(source, got, path)
        self._compare_attributes(source, got, path, made)
        return None

    def _compare_leaf(self, source: Any, got: Any, path: str) -> None:
        self.leaves += 1
        wanted = self._move(source)
        _require(type(got) is torch.Tensor, path, f"is a {type(got)}")
        if wanted is source:
            return _require(got is source, path, "was on the target, and is another tensor")
        _require(got is not source, path, "is the source")
        facts = [
            (each.device, each.dtype, tuple(each.shape), each.cpu().tolist())
            for each in (got, wanted)
        ]
        return _require(facts[0] == facts[1], path, f"{facts[0]} is not {facts[1]}")

    def _compare_items(self, source: Any, got: Any, path: str) -> None:
        ours, theirs = raw_items(source), raw_items(got)
        # Iterating is another thing than the stored order for a class with an order of its own.
        is_mapping = isinstance(source, MAPPINGS)
        keys = [key for key, _ in ours]
        found = [key for key, _ in theirs]
        _require(sorted(map(str, found)) == sorted(map(str, keys)), path, f"has the keys {found}")
        if is_mapping and "__iter__" not in vars(type(source)):
            _require(found == keys, path, f"has the order {found}, not {keys}")
        _require(not ours or got is not source, path, "is the container of the source")
        for name in ("default_factory", "maxlen"):
            values = [getattr(each, name, None) for each in (source, got)]
            _require(values[0] == values[1], path, f"{name} is {values[1]}")
        by_key = dict(theirs)
        for key, child in ours:
            self.compare(child, by_key[key], f"{path}[{key!r}]")

    def _compare_attributes(self, source: Any, got: Any, path: str, made: Made | None) -> None:
        ours, theirs = raw_attributes(source), raw_attributes(got)
        stored = {} if made is None else made.stored
        places = {place for each in stored.values() for place in each}
        fields = [ours[place] for place in places & ours.keys()]
        for name, attribute in ours.items():
            where = f"{path}.{name}"
            kept = theirs.get(name) is attribute
            if name in places:
                _require(name in theirs, where, "is missing")
                if name == next(each for each in stored.values() if name in each)[0]:
                    self.compare(attribute, theirs[name], where)
            elif name == "cache" and (has_leaf(attribute) or name not in theirs):
                _require(name not in theirs, where, "keeps tensors that were not moved")
            elif _is_one_of(attribute, fields):  # it may move along, or is reported
                moved = [theirs[place] for place in places & theirs.keys()]
                _require(kept or _is_one_of(theirs.get(name), moved), where, "is another object")
            elif is_set_again(made, name):
                moved = [child for _, child in raw_items(got)]
                _require(kept or _is_one_of(theirs.get(name), moved), where, "is another object")
            elif name != "writes":
                _require(kept, where, f"is another {type(theirs.get(name))}")
        # With a `__getattr__` that knows any name, `copy.copy` itself fills empty slots.
        fills = made is not None and "__getattr__ knows any name" in made.features
        added = theirs.keys() - ours.keys() - {"writes", "alias", *["tag"] * fills}
        _require(not added, path, f"has the attributes {added}")
        for name, kept in stored.items():
            if kept and kept[0] in ours:
                same = getattr(got, name) is theirs[kept[0]]
                _require(same, f"{path}.{name}", "is not what the object stores")
        # The same tensor in two places of one object is one tensor.
        for kept in stored.values():
            if len(kept) > 1:
                _require(theirs[kept[0]] is theirs[kept[1]], path, "two places have two objects")


def is_set_again(made: Made | None, name: str) -> bool:
    """Whether the constructor, if it is used, sets this attribute to an item."""
    return made is not None and name == "alias" and "__init__ keeps an item" in made.features


def _is_one_of(value: Any, others: list[Any]) -> bool:
    return any(value is other for other in others)


def has_leaf(value: Any) -> bool:
    """Whether a tensor or an array can be reached from a value."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return True
    parts = list(raw_attributes(value).values()) if type(value).__module__ != "builtins" else []
    if isinstance(value, BUILT_IN):
        parts += [child for _, child in raw_items(value)]
    return any(map(has_leaf, parts))


def ids_of(value: Any, found: dict[int, Any]) -> dict[int, Any]:
    """Returns what each object in a tree stores, to see that a copy leaves it as it is."""
    if id(value) in found or isinstance(value, (torch.Tensor, np.ndarray)):
        return found
    is_container = isinstance(value, BUILT_IN)
    if not is_container and type(value).__module__ != "random_classes":
        return found
    items = raw_items(value) if is_container else []
    attributes = raw_attributes(value)
    found[id(value)] = (
        [(key, id(child)) for key, child in items],
        {name: id(each) for name, each in attributes.items()},
    )
    for child in [*(child for _, child in items), *attributes.values()]:
        ids_of(child, found)
    return found


def play(seed: int, device: str) -> str:
    """Copies a random tree, and returns `copied`, `refused` or `reported`.

    Raises:
        Different: the copy is not what the oracle says.
    """
    tree = Tree(seed, device)
    before = ids_of(tree.data, {})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcome = _copy(tree)
            if outcome == "copied":
                _ask_for_unknown(tree)
    except Different as error:
        raise Different(f"seed {seed}, {tree.describe()}: {error}") from error
    except Exception as error:
        raise Different(f"seed {seed}, {tree.describe()}: {error!r}") from error
    _require(ids_of(tree.data, {}) == before, f"seed {seed}", f"the source: {tree.describe()}")
    return outcome


def _copy(tree: Tree) -> str:
    data, device = tree.data, tree.device

    def move(leaf: Any) -> torch.Tensor:
        tensor = torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf
        return (tensor[ROWS] if tree.mode == "gather" else tensor).to(device)

    oracle = Oracle(tree, move)
    try:
        if tree.mode == "gather":
            got = tdcopier.gather(data, ROWS, device)
        else:
            handle = tdcopier.start_copy(data, device)
            got = handle.get()
    except TypeError as error:
        return _judge_refusal(tree, error)
    oracle.compare(data, got)
    if tree.mode == "copy":
        explained = tdcopier.explain(data, device)
        _require(tuple(explained.counts[:5]) == tuple(handle.stats[:5]), "data", "explain differs")
        counted = sum(handle.stats[:4])
        _require(counted == oracle.leaves, "data", f"{counted} leaves, not {oracle.leaves}")
    if tree.mode == "into":
        _fill(tree, got, oracle)
    return "copied"


def _fill(tree: Tree, got: Any, oracle: Oracle) -> None:
    """Fills the result, after its leaves were cleared, with the same data again."""
    filled = []

    def clear(leaf: Any) -> None:
        if isinstance(leaf, torch.Tensor):
            filled.append(leaf)
            leaf.zero_()

    _each_leaf(tree, got, clear)
    tdcopier.copy_into(tree.data, got)
    oracle.compare(tree.data, got)


def _each_leaf(tree: Tree, value: Any, do: Callable[[Any], None]) -> None:
    if isinstance(value, torch.Tensor):
        return do(value)
    made = tree.made.get(type(value))
    if type(value) not in BUILT_IN and (made is None or made.base is object):
        return None
    if made is None or made.base is not type:
        children = [child for _, child in raw_items(value)]
    else:
        attributes = raw_attributes(value)
        children = [
            attributes[each[0]] for each in made.stored.values() if each and each[0] in attributes
        ]
    for child in children:
        _each_leaf(tree, child, do)
    return None


def _judge_refusal(tree: Tree, error: TypeError) -> str:
    found = re.match(r"(data.*?) is a (\w+), ", str(error))
    _require(found is not None, "data", f"refused without a path: {error}")
    names = {each.cls.__name__: each for each in tree.classes}
    made = names.get(found.group(2))
    _require(made is not None and made.may_be_refused, "data", f"refused: {error}")
    _require(found.group(1) in _paths(tree), "data", f"no such path: {error}")
    return "refused"


def _paths(tree: Tree) -> dict[str, Any]:
    """Returns every container and opaque value by its path."""
    found: dict[str, Any] = {}

    def visit(value: Any, path: str) -> None:
        found[path] = value
        made = tree.made.get(type(value))
        if made is not None and made.base is type:
            attributes = raw_attributes(value)
            for name, kept in made.stored.items():
                if kept and kept[0] in attributes:
                    visit(attributes[kept[0]], f"{path}.{name}")
        elif type(value) in BUILT_IN or (made is not None and made.base is not object):
            fields = getattr(type(value), "_fields", None)
            for key, child in raw_items(value):
                visit(child, f"{path}.{fields[key]}" if fields else f"{path}[{key!r}]")

    visit(tree.data, "data")
    return found


def _ask_for_unknown(tree: Tree) -> None:
    """Checks that `on_unknown` reports a value exactly if a tensor may have stayed."""
    paths = _paths(tree)
    unknown = {path for path, value in paths.items() if _is_unknown(tree, value)}
    left = tdcopier.explain(tree.data, tree.device).left_in_attributes
    try:
        if tree.mode == "gather":
            tdcopier.gather(tree.data, ROWS, tree.device, on_unknown="raise")
        else:
            tdcopier.copy(tree.data, tree.device, on_unknown="raise")
    except TypeError as error:
        known = {*unknown, *left}
        path = max((each for each in known if str(error).startswith(f"{each} ")), default="data")
        _require(path in unknown or path in left, path, f"reported: {error}")
    else:
        _require(not unknown and not left, "data", f"{sorted(unknown)}, {left} are not reported")
    wanted = set()
    for path, value in paths.items():
        wanted |= {f"{path}.{name}" for name in _attributes_left(tree, value)}
    differing = {path for path in wanted ^ set(left) if not _may_be_set_again(tree, paths, path)}
    _require(not differing, "data", f"of {sorted(wanted)} and {sorted(left)}: {differing}")


def _may_be_set_again(tree: Tree, paths: dict[str, Any], path: str) -> bool:
    owner, _, name = path.rpartition(".")
    made = tree.made.get(type(paths[owner]))
    if is_set_again(made, name):
        return True
    attributes = raw_attributes(paths[owner])
    places = [] if made is None else [place for each in made.stored.values() for place in each]
    fields = [attributes[place] for place in places if place in attributes]
    return _is_one_of(attributes[name], fields)


def _is_unknown(tree: Tree, value: Any) -> bool:
    made = tree.made.get(type(value))
    return made is not None and made.base is object


def _attributes_left(tree: Tree, value: Any) -> set[str]:
    """Returns the attributes with tensors that a copy carries as they are."""
    made = tree.made.get(type(value))
    if made is None or made.base is object:
        return set()
    places = {place for each in made.stored.values() for place in each}
    return {
        name
        for name, attribute in raw_attributes(value).items()
        if name not in places and name != "cache" and _has_tensor(attribute)
    }


def _has_tensor(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, dict):
        return any(map(_has_tensor, dict.values(value)))
    if isinstance(value, (list, tuple)):
        return any(_has_tensor(child) for _, child in raw_items(value))
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1)
    parser.add_argument("--seed", type=int, help="play this one only")
    parser.add_argument("--first-seed", type=int, default=0)
    given = parser.parse_args()
    from tdcopier import sim

    sim.enable(devices=1)
    if given.seed is not None:
        print(Tree(given.seed, "sim:0").describe())
        print(play(given.seed, "sim:0"))
        return
    end = time.monotonic() + given.minutes * 60
    played: Counter[str] = Counter()
    seed = given.first_seed
    while time.monotonic() < end:
        played[play(seed, "sim:0")] += 1
        seed += 1
    print(f"seeds {given.first_seed} to {seed}: {dict(played)}")


if __name__ == "__main__":
    main()
