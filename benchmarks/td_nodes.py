"""Times the nodes of a TensorDict: the same leaves in many nodes, and in a single one."""

from __future__ import annotations

from typing import Any

import torch
from baselines import OURS
from copies import BURST, MIN_ROUNDS, Progress
from directions import Direction, synchroniser
from measure import Contender, Summary, collector_paused, interleave, summarise
from quiet import QuietProcessor
from td_batches import differences
from td_copies import TO
from tensordict import TensorDict, tensorclass

import tdcopier
from tdcopier._containers.registry import Rule, rule_of

NODES = 200
REPEAT_SHARE = 0.2
FLAT, NESTED, CLASSES = "side by side", "TensorDict", "tensorclass"
WHOLE, APART, REBUILD = OURS, f"{OURS}, taking apart alone", f"{OURS}, rebuilding alone"


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


def run(direction: Direction, repeats: int, progress: Progress, *, keep_gc: bool) -> dict[str, Any]:
    """Return the times of the three trees, and the time that a node adds.

    Args:
        direction: From the host to a device.
        repeats: Calls with the fastest batches of a run; these get a fraction of that.
        progress: Returns a wrapper of the rounds for a label.
        keep_gc: Leave Python's garbage collector on while timing.

    """
    made = trees()
    synchronise = synchroniser(direction.devices)
    found = {(tree, way.name): way for tree in made for way in ways(tree, direction)}
    wrong = {
        tree: sum(
            len(differences(way.run(way.prepare(made)), td.to(direction.target)))
            for way in (found[tree, WHOLE], found[tree, REBUILD])
        )
        for tree, td in made.items()
    }
    with collector_paused(not keep_gc), QuietProcessor() as quiet:
        times = interleave(
            [way._replace(name=f"{way.name}: {tree}") for (tree, _), way in found.items()],
            [made],
            synchronise,
            rounds=max(MIN_ROUNDS, round(repeats * REPEAT_SHARE / BURST)),
            progress=progress("TensorDict, cost of a node"),
            before_round=quiet.seek,
            burst=BURST,
        )
    summaries = {key: summarise(times[f"{key[1]}: {key[0]}"]) for key in found}
    return {
        "nodes": NODES,
        "leaves": len(made[FLAT].keys()),
        "times": {
            tree: {way: summaries[tree, way]._asdict() for way in (WHOLE, APART, REBUILD, TO)}
            for tree in made
        },
        "us_per_node": {
            tree: {
                way: per_node_us(summaries[tree, way], summaries[FLAT, way])
                for way in (WHOLE, APART, REBUILD, TO)
            }
            for tree in (NESTED, CLASSES)
        },
        "wrong": wrong,
        "processor": quiet.described(),
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


def per_node_us(nodes: Summary, flat: Summary) -> float:
    """Return the microseconds that a node adds to its leaves."""
    return (nodes.median_us - flat.median_us) / NODES
