"""The benchmark of TensorDicts: what it times, which results are wrong, which targets are hit."""

from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from benchmark_support import a_tensordict_result, load, measure

from tdcopier import workloads

tensordict = pytest.importorskip("tensordict")
td_batches, td_copies, td_nodes = load("td_batches"), load("td_copies"), load("td_nodes")
directions, into, tensordicts = load("directions"), load("into"), load("tensordicts")
run = load("run")

TensorDict = tensordict.TensorDict
LEAVES_AND_BYTES = {
    "flat": (1000, 256_000),
    "control": (13, 48_640),
    "tensorclass": (8, 29_440),
    "lazy stack": (128, 58_368),
}


def direction(name: str) -> Any:
    return getattr(directions, name)(torch.device("sim", 0))


def no_progress(label: str) -> Any:
    return iter


def a_tensordict(**changes: torch.Tensor) -> Any:
    inner = TensorDict({"c": torch.ones(2, 3)}, [2])
    return TensorDict({"a": torch.zeros(2), "b": torch.ones(2), "inner": inner} | changes, [2])


# ---- batches -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(td_batches.BATCHES))
def test_batches_have_the_same_size_for_every_seed_and_other_values(name: str) -> None:
    batches = [td_batches.BATCHES[name].make(seed) for seed in (0, 1)]
    for batch in batches:
        found = td_batches.count_leaves(batch), td_batches.total_bytes(batch)
        assert found == LEAVES_AND_BYTES[name]
    again = td_batches.BATCHES[name].make(0)
    assert td_batches.differences(again, batches[0]) == []
    assert td_batches.differences(batches[1], batches[0]) != []


def test_a_replay_batch_has_a_row_for_each_step_in_every_leaf() -> None:
    batch = td_batches.control(0)
    assert list(batch["next"].keys()) == [
        "observation",
        "done",
        "terminated",
        "truncated",
        "reward",
    ]
    assert {leaf.shape[0] for leaf in batch.values(True, True)} == {td_batches.ROWS}


def test_members_of_the_lazy_stack_are_ragged() -> None:
    stack = td_batches.ragged(0)
    assert type(stack) is tensordict.LazyStackedTensorDict
    lengths = [len(member["tokens"]) for member in stack.tensordicts]
    assert len(set(lengths)) == len(lengths) == td_batches.MEMBERS


# ---- wrong results -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "places"),
    [
        (lambda td: td, []),
        (lambda td: td.set("b", torch.zeros(2)), ["['b']"]),
        (lambda td: td.set("b", torch.ones(2, dtype=torch.int64)), ["['b']"]),
        (lambda td: td.set("b", torch.ones(2, device="meta")), ["['b']"]),
        (lambda td: td.set("b", torch.nn.Parameter(torch.ones(2))), ["['b']"]),
        (lambda td: td.exclude("b"), ["<structure>"]),
        (lambda td: td.set("b", td.pop("b")).select("b", "a", "inner"), ["<structure>"]),
        (lambda td: tensordict.LazyStackedTensorDict(*td.unbind(0)), ["<structure>"]),
        (lambda td: td.auto_device_(), ["", "['inner']"]),
        (lambda td: setattr(td["inner"], "batch_size", [2, 3]) or td, ["['inner']"]),
        (lambda td: td.set_non_tensor("b", 1), ["['b']"]),
    ],
)
def test_another_class_device_batch_size_leaf_value_or_order_is_a_difference(
    changed, places
) -> None:
    assert td_batches.differences(changed(a_tensordict()), a_tensordict()) == places


def test_a_string_in_a_tensorclass_and_a_member_of_a_stack_are_compared() -> None:
    batch = td_batches.frames(0)
    batch.clip = "another"
    assert td_batches.differences(batch, td_batches.frames(0)) == ["['clip']"]
    stack = td_batches.ragged(0)
    stack.tensordicts[3]["reward"] += 1
    assert td_batches.differences(stack, td_batches.ragged(0)) == ["[3]['reward']"]


def test_an_error_of_another_way_is_a_finding_and_one_of_ours_is_raised(sim: ModuleType) -> None:
    def fail(td: Any) -> Any:
        raise TypeError("cannot do that\nin many words")

    other, ours = (measure.Contender(name, fail) for name in (td_copies.TO, td_copies.OURS))
    td = a_tensordict()
    found = td_copies.tried(other, td, td, direction("h2d"))
    assert found == "TypeError: cannot do that"
    with pytest.raises(TypeError, match="cannot do that"):
        td_copies.tried(ours, td, td, direction("h2d"))


# ---- on the simulated device ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["h2d", "d2h"])
@pytest.mark.parametrize("batch", list(td_batches.BATCHES))
def test_every_way_of_moving_a_tensordict_gives_what_its_to_gives(
    sim: ModuleType, name: str, batch: str
) -> None:
    where = direction(name)
    source = td_batches.BATCHES[batch].make(0).to(where.source)
    expected = source.to(where.target)
    ways = td_copies.contenders(where)
    assert len({way.name for way in ways}) == len(ways) == (4 if name == "h2d" else 3)
    for way in ways:
        assert td_copies.tried(way, source, expected, where) == [], way.name


def test_the_trees_of_the_node_benchmark_differ_in_nodes_only() -> None:
    trees = td_nodes.trees()
    values = [torch.stack(td_batches._leaves(tree)) for tree in trees.values()]
    assert all(torch.equal(found, values[0]) for found in values)
    assert len(values[0]) == 2 * td_nodes.NODES
    nodes = {kind: {type(node) for node in tree.values()} for kind, tree in trees.items()}
    assert nodes == {
        td_nodes.FLAT: {torch.Tensor},
        td_nodes.NESTED: {TensorDict},
        td_nodes.CLASSES: {td_nodes.Pair},
    }


def test_a_node_costs_what_it_adds_to_its_leaves(sim: ModuleType, monkeypatch) -> None:
    monkeypatch.setattr(td_nodes, "NODES", 5)
    result = td_nodes.run(direction("h2d"), 5, no_progress, keep_gc=False)
    assert result["wrong"] == dict.fromkeys(td_nodes.trees(), 0)
    assert result["leaves"] == 10
    for kind, added_us in result["us_per_node"].items():
        for way, us in added_us.items():
            nodes, flat = (
                result["times"][tree][way]["median_us"] for tree in (kind, td_nodes.FLAT)
            )
            assert us == pytest.approx((nodes - flat) / 5)


@pytest.mark.parametrize("kind", [td_nodes.FLAT, td_nodes.NESTED, td_nodes.CLASSES])
def test_rebuilding_alone_makes_every_node_anew_around_leaves_that_have_arrived(
    sim: ModuleType, monkeypatch, kind: str
) -> None:
    monkeypatch.setattr(td_nodes, "NODES", 2)
    trees = td_nodes.trees()
    ways = {way.name: way for way in td_nodes.ways(kind, direction("h2d"))}
    rebuild = ways[td_nodes.REBUILD]
    parts = rebuild.prepare(trees)
    sim.reset_counts()
    first, second = (rebuild.run(parts) for _ in range(2))
    assert sim.counts().h2d.transfers == 0
    assert td_batches.differences(first, trees[kind].to("sim:0")) == []
    nodes = [
        [td, *(node for node in td.values() if kind != td_nodes.FLAT)] for td in (first, second)
    ]
    assert all(one is not other for one, other in zip(*nodes, strict=True))
    leaves = [td_batches._leaves(td) for td in (first, second)]
    assert all(one is other for one, other in zip(*leaves, strict=True))


def test_taking_apart_alone_gives_the_leaves_and_moves_none(sim: ModuleType, monkeypatch) -> None:
    monkeypatch.setattr(td_nodes, "NODES", 2)
    trees = td_nodes.trees()
    ways = {way.name: way for way in td_nodes.ways(td_nodes.NESTED, direction("h2d"))}
    apart = ways[td_nodes.APART]
    taken, _, _ = apart.run(apart.prepare(trees))
    leaves = [leaf for entries in taken for leaf in entries.values()]
    wanted = td_batches._leaves(trees[td_nodes.NESTED])
    assert all(got is leaf for got, leaf in zip(leaves, wanted, strict=True))


@pytest.mark.parametrize(
    ("name", "places"),
    [("h2d", [into.CHUNK, into.SCATTERED]), ("d2h", [into.MAPPED])],
)
def test_every_way_of_filling_a_tree_leaves_the_sources_values(
    sim: ModuleType, monkeypatch, tmp_path: Path, name: str, places: list[str]
) -> None:
    small = workloads.detection_batch(samples=2, cameras=2)
    monkeypatch.setattr(into, "detection_batch", lambda seed: small)
    result = into.run(direction(name), 5, no_progress, keep_gc=False)
    assert set(result["wrong"].values()) == {0}
    assert list(result["counts"]) == [into.into(place) for place in places]
    assert len(result["contenders"]) == 3 + (name == "h2d")
    assert into.FRESH not in result["ratios"]


def test_a_destination_that_was_not_filled_is_wrong(
    sim: ModuleType, monkeypatch, tmp_path: Path
) -> None:
    where = direction("h2d")
    case = into.filling(where, 0, tmp_path)
    way = measure.Contender("lazy", lambda case: case.destinations[into.CHUNK])
    leaves = workloads.leaves(case.source)
    assert into.wrong_leaves(way, case, where) == sum(bool(leaf.any()) for leaf in leaves)


def test_memory_mapped_destinations_are_files_of_the_folder(
    sim: ModuleType, tmp_path: Path
) -> None:
    case = into.filling(direction("d2h"), 0, tmp_path / "files")
    mapped = workloads.leaves(case.destinations[into.MAPPED])
    assert {type(leaf) for leaf in mapped} == {tensordict.MemoryMappedTensor}
    assert len({leaf.filename for leaf in mapped}) == len(mapped) == 528
    assert len(list((tmp_path / "files").iterdir())) == 528


def test_without_tensordict_the_runner_says_why_it_leaves_it_out(
    sim: ModuleType, monkeypatch, tmp_path: Path, capsys
) -> None:
    monkeypatch.delenv("FAIL_WITHOUT_CUDA", raising=False)
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: None)
    asked = ["--device", "sim", "--out", str(tmp_path), "--only", "tensordict"]
    assert run.main(asked) == 1
    assert "Skipped tensordict: it needs the package tensordict.\n" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


# ---- targets -------------------------------------------------------------------------------------


def change(result: dict, path: str, value: Any) -> dict:
    changed = deepcopy(result)
    *outer, last = path.split("/")
    part = changed
    for key in outer:
        part = part[key]
    assert last in part
    part[last] = value
    return changed


def test_targets_are_hit_at_their_bounds() -> None:
    targets = tensordicts.targets(a_tensordict_result())
    assert len(targets) == 9
    assert all(target["hit"] for target in targets)


@pytest.mark.parametrize(
    ("path", "value", "missed"),
    [
        ("copies/h2d/flat/ratios/td.to()", 14.9, "flat, host to device, td.to() over"),
        ("copies/h2d/flat/ratios/td.consolidate().to()", 24.9, "td.consolidate().to() over"),
        ("copies/h2d/control/ratios/td.to()", 2.4, "control, host to device"),
        ("copies/h2d/flat/memcpys", 1000, "flat: packed leaves, transfers"),
        ("copies/h2d/flat/stats/transfers", 2, "flat: packed leaves, transfers"),
        (f"into/h2d/counts/{into.into(into.CHUNK)}/memcpys", 2, "copy_into() one earlier chunk"),
        (f"into/h2d/ratios/{into.into(into.CHUNK)}", 0.51, "into one earlier chunk"),
        (f"nodes/us_per_node/TensorDict/{td_nodes.REBUILD}", 3.1, "one TensorDict node"),
        (f"nodes/us_per_node/tensorclass/{td_nodes.REBUILD}", 10.1, "one tensorclass node"),
        ("nodes/wrong/tensorclass", 1, "differ from td.to()"),
        ("copies/d2h/flat/wrong/tdcopier", 1, "differ from td.to()"),
        (f"into/h2d/wrong/{into.into(into.CHUNK)}", 1, "differ from td.to()"),
        (f"into/d2h/wrong/{into.FRESH}", 1, "differ from td.to()"),
    ],
)
def test_a_figure_beyond_its_bound_misses_its_own_target_only(path, value, missed) -> None:
    targets = tensordicts.targets(change(a_tensordict_result(), path, value))
    (found,) = [target["what"] for target in targets if not target["hit"]]
    assert missed in found


def test_another_way_that_is_wrong_misses_no_target_of_ours() -> None:
    result = change(a_tensordict_result(), "copies/h2d/flat/wrong/td.to()", 5)
    assert tensordicts.count_wrong(result) == 0


def test_another_way_that_fails_shows_nothing_and_misses_its_target() -> None:
    result = a_tensordict_result()
    flat = result["copies"]["h2d"]["flat"]
    del flat["ratios"]["td.to()"]
    flat["failed"]["td.to()"] = "TypeError: no"
    (missed,) = [target for target in tensordicts.targets(result) if not target["hit"]]
    assert missed["found"] == "TypeError: no"


def test_without_speed_only_values_and_counts_are_targets() -> None:
    targets = tensordicts.targets(a_tensordict_result(), speed=False)
    assert len(targets) == 3
    assert not [target for target in targets if "us" in target["wanted"]]
