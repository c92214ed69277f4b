"""Times the nodes of a TensorDict: the same leaves in many nodes, and in a single one."""

from __future__ import annotations

from typing import Any

import torch
from directions import Direction, synchroniser
from measure import BURST, MIN_ROUNDS, Bench, Contender, summaries
from tables import OURS
from td_batches import differences
from td_copies import TO
from tensordict import TensorDict, tensorclass

import tdcopier
from tdcopier._containers.registry import Rule, rule_of

NODES = 200
REPEAT_SHARE = 0.2
FLAT, NESTED, CLASSES = "side by side", "TensorDict", "tensorclass"
WHOLE, APART, REBUILD = OURS, f"{OURS}, taking apart alone", f"{OURS}, rebuilding alone"
WAYS = (WHOLE, APART, REBUILD, TO)


@tensorclass
class Pair:
    first: torch.Tensor
    second: torch.Tensor


def trees() -> dict[str, TensorDict]:
    """Return the same leaves in one node, and in a TensorDict or tensorclass per pair."""
    flat, nested, classes = {}, {}, {}
    for index in range(NODES):
        first, second = torch.full((4,), 2.0 * index), torch.full((4,), 2.0 * index + 1)
        flat[f"first_{index}"], flat[f"second_{index}"] = first, second
        nested[f"node_{index}"] = TensorDict({"first": first, "second": second}, [])
        classes[f"node_{index}"] = Pair(first=first, second=second, batch_size=[])
    return {
        FLAT: TensorDict(flat, []),
        NESTED: TensorDict(nested, []),
        CLASSES: TensorDict(classes, []),
    }


def run(bench: Bench, direction: Direction) -> dict[str, Any]:
    """Return the times of the three trees, and the time that a node adds."""
    made = trees()
    found = {(tree, way.name): way for tree in made for way in ways(tree, direction)}
    wrong = {
        tree: sum(
            len(differences(way.run(way.prepare(made)), td.to(direction.target)))
            for way in (found[tree, WHOLE], found[tree, REBUILD])
        )
        for tree, td in made.items()
    }
    times_us, processor = bench.interleaved(
        "TensorDict, cost of a node",
        [way._replace(name=f"{way.name}: {tree}") for (tree, _), way in found.items()],
        [made],
        synchroniser(direction.devices),
        rounds=bench.rounds(REPEAT_SHARE / BURST, MIN_ROUNDS),
    )
    by_name = summaries(times_us)
    times = {tree: {way: by_name[f"{way}: {tree}"] for way in WAYS} for tree in made}
    return {
        "nodes": NODES,
        "leaves": len(made[FLAT].keys()),
        "times": times,
        "us_per_node": {
            tree: {way: per_node_us(times[tree][way], times[FLAT][way]) for way in WAYS}
            for tree in (NESTED, CLASSES)
        },
        "wrong": wrong,
        "processor": processor,
    }


def ways(tree: str, direction: Direction) -> list[Contender]:
    """Return the whole copy, two parts of it, and the reference; each receives all trees.

    A copy builds its result as early as it can, often within the call, so the time of `get` would
    not show the cost of rebuilding. Instead, the two calls that the walk makes to a container's
    class are timed alone: flattening, and unflattening with leaves on the target.
    """
    target = direction.target

    def rebuild(parts: tuple[Rule, list[Any], Any]) -> Any:
        rule, leaves, context = parts
        # The walk makes a new dict for each node whose flatten() returned one.
        return rule.unflatten([_anew(leaf) for leaf in leaves], context)

    return [
        Contender(WHOLE, lambda made: tdcopier.async_to(made[tree], target).get()),
        Contender(
            APART,
            lambda asked: asked[0].flatten(asked[1], target, False),
            prepare=lambda made: (rule_of(type(made[tree])), made[tree]),
        ),
        Contender(REBUILD, rebuild, prepare=lambda made: parts_on(made[tree], target)),
        Contender(TO, lambda made: made[tree].to(target)),
    ]


def _anew(leaf: Any) -> Any:
    return leaf.copy() if type(leaf) is dict else leaf


def parts_on(td: TensorDict, device: torch.device) -> tuple[Rule, list[Any], Any]:
    """Return the parts to rebuild a TensorDict: the walk's rule, leaves on the device, context."""
    rule = rule_of(type(td))
    leaves, context, _ = rule.flatten(td, device, False)
    return rule, tdcopier.copy(leaves, device), context


def per_node_us(nodes: dict[str, Any], flat: dict[str, Any]) -> float:
    """Return the microseconds that a node adds to its leaves."""
    return (nodes["median_us"] - flat["median_us"]) / NODES
