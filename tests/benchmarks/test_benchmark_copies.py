"""The benchmark of copies: its directions, its check of trees and its count of transfers."""

from types import ModuleType, SimpleNamespace

import pytest
import torch
from benchmark_support import load

from tdcopier import workloads

baselines, copies = load("baselines"), load("copies")
directions, witness = load("directions"), load("witness")

CUDA = [torch.device("cuda", index) for index in range(2)]
ON_CUDA = {
    "h2d": directions.h2d(CUDA[0]),
    "d2h": directions.d2h(CUDA[0]),
    "d2d": directions.d2d(*CUDA),
}
ENDS_ON_CUDA_0, ENDS_ON_CUDA_1 = (
    {"h2d": ("cpu", name), "d2h": (name, "cpu")} for name in ("cuda:0", "cuda:1")
)


@pytest.mark.parametrize(
    ("name", "records", "count"),
    [
        ("h2d", ["Memcpy HtoD (Pinned -> Device)", "Memcpy DtoH (Device -> Pinned)"], 1),
        ("d2h", ["Memcpy DtoH (Device -> Pinned)", "Memcpy DtoH (Device -> Pageable)"], 2),
        ("d2h", ["void gather<16>(char*)", "Memset (Device)"], 0),
        ("d2d", ["Memcpy PtoP (Device -> Device)", "Memcpy DtoD (Device -> Device)"], 1),
        ("d2d", ["Memcpy DtoD (Device -> Device)"] * 2, 2),
        ("d2d", ["void gather<16>(char*)", "Memcpy HtoD (Pageable -> Device)"], 0),
    ],
)
def test_memcpys_of_the_direction_alone_are_counted(name: str, records, count: int) -> None:
    assert witness.memcpys_among(records, ON_CUDA[name].witness) == count


@pytest.mark.parametrize(
    ("asked", "count", "found"),
    [
        (0, 1, ENDS_ON_CUDA_0),
        (0, 2, {**ENDS_ON_CUDA_0, "d2d": ("cuda:0", "cuda:1")}),
        (1, 2, {**ENDS_ON_CUDA_1, "d2d": ("cuda:1", "cuda:0")}),
    ],
)
def test_between_devices_is_a_direction_only_where_there_are_two(
    monkeypatch, asked: int, count: int, found
) -> None:
    devices = SimpleNamespace(device_count=lambda: count)
    monkeypatch.setattr(torch, "get_device_module", lambda device: devices)
    possible = directions.possible(CUDA[asked])
    assert {n: (str(d.source), str(d.target)) for n, d in possible.items()} == found


def test_both_ends_of_a_direction_are_synchronised_unless_one_is_the_host(monkeypatch) -> None:
    seen: list[torch.device] = []
    monkeypatch.setattr(
        torch, "get_device_module", lambda device: SimpleNamespace(synchronize=seen.append)
    )
    for direction in ON_CUDA.values():
        directions.synchroniser(direction.devices)()
    assert seen == [CUDA[0], CUDA[0], CUDA[0], CUDA[1]]


def test_large_trees_get_fewer_rounds_towards_the_host_and_small_ones_the_same() -> None:
    small, large = (workloads.WORKLOADS[n] for n in ("detection_batch", "one_large"))
    towards, back = ON_CUDA["h2d"], ON_CUDA["d2h"]
    assert copies.rounds_of(towards, small, 500) == copies.rounds_of(back, small, 500) == 100
    assert copies.rounds_of(towards, large, 500) == 10
    assert copies.rounds_of(back, large, 500) == copies.MIN_ROUNDS


@pytest.mark.parametrize("name", ["h2d", "d2h", "d2d"])
def test_every_contender_of_a_direction_gives_a_right_tree(sim: ModuleType, name: str) -> None:
    direction = directions.possible(torch.device("sim", 0))[name]
    on_host = workloads.detection_batch(samples=2, cameras=2)
    source = workloads.map_tensors(on_host, lambda leaf: leaf.to(direction.source))
    ways = baselines.contenders(direction)
    if name == "h2d":
        ways += baselines._pinned_to_device(direction.target)
    if name == "d2h":
        ways.append(baselines._device_to_pinned())
    assert len({way.name for way in ways}) == len(ways) >= 4
    for way in ways:
        assert copies._wrong(way, source, direction) == [], way.name


def test_a_wrong_value_a_wrong_place_and_a_lost_leaf_are_found() -> None:
    source = {"a": torch.zeros(2), "b": torch.ones(2)}
    host = directions.HOST
    assert baselines.differences(source, source, host) == []
    wrong_value = source | {"b": torch.zeros(2)}
    assert baselines.differences(wrong_value, source, host) == ["['b']"]
    elsewhere = source | {"a": torch.zeros(2, device="meta")}
    assert baselines.differences(elsewhere, source, host) == ["['a']"]
    assert baselines.differences({"a": source["a"]}, source, host) == ["<structure>"]


def test_the_simulated_device_counts_the_transfers_of_one_run(sim: ModuleType) -> None:
    runs: list[int] = []
    leaves = [torch.ones(4, device="sim:0") for _ in range(3)]

    def once() -> dict:
        runs.append(len([leaf.to("cpu") for leaf in leaves]))
        return {"run": len(runs)}

    towards_host = directions.d2h(torch.device("sim", 0)).witness
    stats, counted = witness.count(towards_host, "sim", once)
    assert counted == (3, "tdcopier.sim")
    assert stats == {"run": 2}
    between = directions.d2d(*(torch.device("sim", index) for index in range(2))).witness
    assert witness.count(between, "sim", once) == ({"run": 4}, (0, "tdcopier.sim"))
