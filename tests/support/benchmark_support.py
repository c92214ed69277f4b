"""Loads the scripts of benchmarks/ as modules, and makes up results for them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def load(name: str) -> ModuleType:
    """Loads a module of benchmarks/, which is a folder of scripts and not a package."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCHMARKS))


measure = load("measure")


def a_result(name: str = "h2d", **changes) -> dict:
    """Returns a result of one direction: 528 leaves in one transfer, 2 us against 6100 us."""
    times = measure.summarise([1.0, 2.0, 3.0])._asdict()
    slow = measure.summarise([6000.0, 6100.0, 6200.0])._asdict()
    stats = {"packed_leaves": 528, "alone_leaves": 0, "delegated_leaves": 0, "transfers": 1}
    batch = {
        "leaves": 528,
        "bytes": 153_152,
        "contenders": {"tdcopier": times, ".to() per leaf": slow},
        "ratios": {".to() per leaf": 3050.0},
        "kinds": {"tdcopier": "way", ".to() per leaf": "way"},
        "limits": {
            "dma": {
                "way": "limit: one pinned DMA",
                "median_us": 1.6,
                "gb_per_s": 54.0,
                "ours_over": 1.25,
            }
        },
        "first_calls": {"tdcopier": times, ".to() per leaf": slow},
        "ratios_of_first_calls": {".to() per leaf": 3050.0},
        "steps": dict.fromkeys(("start_copy", "get", "synchronise", "drop"), times),
        "stats": stats,
        f"{name}_memcpys": 1,
        "wrong_leaves": {"tdcopier": 0, ".to() per leaf": 0},
    }
    machine = {
        "slug": "nvidia-h200",
        "device": "cuda:0",
        "gpu": "NVIDIA <H200>",
        "driver": "1.2",
        "logical_cpus": 16,
        "cpu": None,
        "torch": "2.11.0",
        "python": "3.12.1",
        "tdcopier": "0.1.0",
        "git_commit": "0123456789abcdef",
    }
    return {
        "name": name,
        "what": "Copies",
        "taken": "2030-01-01 00:00 UTC",
        "machine": machine,
        "workloads": {"detection_batch": batch},
        "targets": [{"what": "speed", "wanted": ">= 35", "found": 3050.0, "hit": True}],
    } | changes


def a_structure_result(**changes) -> dict:
    """Returns a result on trees without tensors: 0.05 us per opaque value, opaque dataclasses."""

    def case(opaque_values: int, **us: float) -> dict:
        summaries = {way: measure.summarise([median])._asdict() for way, median in us.items()}
        ratios = {way: median / us["tdcopier"] for way, median in us.items() if way != "tdcopier"}
        return {"opaque_values": opaque_values, "contenders": summaries, "ratios": ratios}

    return a_result(
        name="structure",
        what="Structure",
        cases={
            "empty list": case(0, tdcopier=1.0, tree_map=3.0),
            "opaque values": case(1000, tdcopier=51.0, tree_map=403.0),
            "integers in a dict of lists": case(960, tdcopier=40.0, tree_map=400.0),
            "list": case(400, tdcopier=24.0),
        },
        us_per_opaque_value={"tdcopier": 0.05, "tree_map": 0.4},
        us_per_container={"list": 0.015, "dataclass": None},
        changed_values=0,
        **changes,
    )


def a_tensordict_result(**changes) -> dict:
    """Returns a TensorDict result that hits every target: a good batch each way, one that fails."""

    def times(**us: float) -> dict:
        return {way: measure.summarise([median])._asdict() for way, median in us.items()}

    def compared(reference: str, **us: float) -> dict:
        ratios = {way: median / us[reference] for way, median in us.items() if way != reference}
        return {
            "contenders": times(**us),
            "ratios": ratios,
            "first_calls": times(**us),
            "ratios_of_first_calls": ratios,
            "wrong": dict.fromkeys(us, 0),
        }

    def counts(packed: int) -> dict:
        stats = dict.fromkeys(("alone_leaves", "delegated_leaves"), 0)
        return {"stats": {"packed_leaves": packed, "transfers": 1, **stats}, "memcpys": 1}

    def batch(leaves: int, **us: float) -> dict:
        return {
            "leaves": leaves,
            "bytes": 1000,
            "failed": {},
            "steps": times(start_copy=3.0, get=2.0, synchronise=0.0, drop=1.0),
            **compared("tdcopier", tdcopier=10.0, **us),
            **counts(leaves),
        }

    chunk, fresh = "tdcopier.copy_into(), one earlier chunk", "start_copy().get()"
    rebuild = "tdcopier, rebuilding alone"
    filled = compared(fresh, **{fresh: 100.0, chunk: 40.0})
    mapped = compared(fresh, **{fresh: 100.0, "copy_() per leaf, memory-mapped tensors": 800.0})
    flat = batch(1000, **{"td.to()": 150.0, "td.consolidate().to()": 250.0})
    nodes = {"TensorDict": (500.0, 3.0), "tensorclass": (1500.0, 10.0)}
    return (
        a_result(
            name="tensordict",
            what="TensorDicts",
            settings={"tensordict": "1.2.3"},
            copies={
                "h2d": {"flat": flat, "control": batch(13, **{"td.to()": 25.0})},
                "d2h": {"flat": flat | {"failed": {"td.consolidate().to()": "TypeError: no"}}},
            },
            nodes={
                "nodes": 200,
                "leaves": 400,
                "times": {
                    "side by side": times(**{"tdcopier": 200.0, rebuild: 100.0}),
                    **{
                        kind: times(**{"tdcopier": whole_us, rebuild: 100.0 + 200 * node_us})
                        for kind, (whole_us, node_us) in nodes.items()
                    },
                },
                "us_per_node": {
                    kind: {"tdcopier": (whole_us - 200.0) / 200, rebuild: node_us}
                    for kind, (whole_us, node_us) in nodes.items()
                },
                "wrong": {"side by side": 0, "TensorDict": 0, "tensorclass": 0},
            },
            into={
                "h2d": {"leaves": 528, "bytes": 153_152, "counts": {chunk: counts(528)}, **filled},
                "d2h": {"leaves": 528, "bytes": 153_152, "counts": {}, **mapped},
            },
        )
        | changes
    )


def a_loop_result(**changes) -> dict:
    """Returns a result on training loops that hits every target exactly."""

    def loop(over_resident: float, copy_calls_us: float) -> dict:
        def times(*us: float) -> dict:
            ways = ("on the device already", "tdcopier", ".to() per leaf")
            return {way: measure.summarise([u])._asdict() for way, u in zip(ways, us, strict=True)}

        return {
            "leaves": 528,
            "bytes": 153_152,
            "steps_per_block": 20,
            "step": times(3400.0, 3400.0 * over_resident, 10_200.0),
            "ratios": {
                "on the device already": 1.0,
                "tdcopier": over_resident,
                ".to() per leaf": 3.0,
            },
            "copy_calls": times(0.5, copy_calls_us, 8400.0),
            "wrong": {"on the device already": 0, "tdcopier": 0, ".to() per leaf": 0},
        }

    def summary(us: float) -> dict:
        return measure.summarise([us])._asdict()

    return (
        a_result(
            name="loop",
            what="A training loop",
            loops={
                "detection_batch": loop(1.02, 150.0),
                "detection_batch_with_images": loop(1.05, 500.0),
                "atari_replay": loop(1.02, 300.0),
            },
            beside_host_work={
                "host_work_us": 1000.0,
                "start_copy": summary(70.0),
                "get": summary(10.0),
                "together": summary(80.0),
                "wrong": 0,
            },
        )
        | changes
    )


def a_sizes_result(**changes) -> dict:
    """Returns a result by number of leaves: a leaf in 100,000 costs 1.5 times one in 1,000."""

    def size(count: int, **us_per_leaf: float) -> dict:
        return {
            "leaves": count,
            "bytes": 256 * count,
            "contenders": {
                way: measure.summarise([us * count])._asdict() for way, us in us_per_leaf.items()
            },
            "us_per_leaf": us_per_leaf,
            "wrong": dict.fromkeys(us_per_leaf, 0),
        }

    return (
        a_result(
            name="sizes",
            what="Sizes",
            sizes={
                "1000": size(1000, **{"tdcopier": 0.5, ".to() per leaf": 12.0}),
                "100000": size(100_000, tdcopier=0.75),
            },
        )
        | changes
    )


class Clock:
    """A fake clock: advances by one microsecond per reading, and by the times added to it."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        self.now_ns += 1000
        return self.now_ns

    def take_us(self, us: int) -> None:
        self.now_ns += us * 1000
