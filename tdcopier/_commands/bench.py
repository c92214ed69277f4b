"""`python -m tdcopier bench`: compares tdcopier with the usual ways of copying, on your machine.

It copies a detection batch (528 small tensors) and one large tensor to the device and back. Exit
status: 0; 1 if a result differs from that of ``.to()``; 2 if the benchmark cannot run here.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import tdcopier
from tdcopier import _C
from tdcopier._commands.copies import HOST, Case, WrongValuesError, batches, run
from tdcopier._commands.tables import aligned, number, size
from tdcopier._progress import show_rounds

SCHEMA = 1
SIMULATED = "Figures of a simulated device say nothing on speed: it runs in the host's memory."


class CannotRunError(Exception):
    """There is no device, or too little memory; the message says what to do."""


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and return the exit status."""
    options = _parse(arguments)
    try:
        device = chosen_device(options.device)
        result = _result(device, options)
    except CannotRunError as error:
        print(error, file=sys.stderr)
        return 2
    except torch.OutOfMemoryError as error:
        print(
            f"Too little memory for {options.megabytes} MB: give less with --megabytes. "
            f"({str(error).splitlines()[0]})",
            file=sys.stderr,
        )
        return 2
    except WrongValuesError as error:
        print(f"WRONG: {error}. No figures are given.", file=sys.stderr)
        return 1
    print(as_text(result))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
        print(f"wrote {options.json}", file=sys.stderr)
    return 0


def chosen_device(asked: str) -> torch.device:
    """Return the device with its index, and make it the current one of its kind.

    Raises:
        CannotRunError: the device is not available, or the engine does not support it.
    """
    kind = asked.partition(":")[0]
    if kind == "cuda" and not torch.cuda.is_available():
        raise CannotRunError(
            "There is no CUDA device here. `--device sim` runs the comparison without one, but its "
            "times mean nothing."
        )
    try:
        if kind == "sim":
            _enable_simulation()
        device = torch.device(asked)
        if device.type == "cpu" or not _C.engine_takes(device):
            raise CannotRunError(f"The engine does not copy between the host and {asked!r}.")
        module = torch.get_device_module(device)
        index = module.current_device() if device.index is None else device.index
        module.set_device(index)
    except (RuntimeError, ValueError) as error:
        raise CannotRunError(f"{asked!r} cannot be used: {str(error).splitlines()[0]}") from None
    return torch.device(device.type, index)


def _enable_simulation() -> None:
    from tdcopier import sim

    if not sim.is_enabled():
        sim.enable()


def _result(device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    cases = [
        Case(batch, source, target)
        for batch in batches(options.megabytes * 1_000_000, quick=options.quick)
        for source, target in ((HOST, device), (device, HOST))
    ]
    return {
        "schema": SCHEMA,
        "what": "time from the call to the tree on the target, built and host synchronised",
        "taken": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "device": str(device),
        "quick": options.quick,
        "cases": [run(case, show_rounds) for case in cases],
        "info": tdcopier.info(),
    }


def as_text(result: dict[str, Any]) -> str:
    """Return a table for each case, followed by notes on how to read them."""
    return "\n\n".join([_machine(result), *map(_case_as_text, result["cases"]), _notes(result)])


def _machine(result: dict[str, Any]) -> str:
    """Return the name of the device and the versions, as one line."""
    info = result["info"]
    names = {device["device"]: device["name"] for device in info["devices"]}
    versions = info["versions"]
    parts = [f"{result['device']}: {names[result['device']]}"]
    parts += [f"{name} {versions[name]}" for name in ("tdcopier", "torch", "python")]
    if isinstance(versions["driver"], str):
        parts.append(f"driver {versions['driver']}")
    return ", ".join(parts)


def _case_as_text(case: dict[str, Any]) -> str:
    leaves = "1 leaf" if case["leaves"] == 1 else f"{case['leaves']} leaves"
    transfers = case["stats"]["transfers"]
    heading = (
        f"{case['batch']}, {case['source']} to {case['target']}: {leaves}, {size(case['bytes'])}; "
        f"tdcopier: {transfers} transfer{'' if transfers == 1 else 's'}"
    )
    rows = [("", "median us", "quartiles us", "GB/s", "over tdcopier")]
    for way, times in case["contenders"].items():
        ratio = case["ratios"].get(way)
        rows.append(
            (
                f"  {way}",
                number(times["median_us"]),
                f"{number(times['q1_us'])} - {number(times['q3_us'])}",
                number(case["bytes"] / times["median_us"] / 1e3),
                "" if ratio is None else f"{number(ratio)} x",
            )
        )
    return f"{heading}\n{aligned(rows)}"


def _notes(result: dict[str, Any]) -> str:
    notes = [
        "Times are from the call to the tree on the target, with the host synchronised; the ways "
        "take turns.",
        "Every result was compared with .to(), before and after. Pinning beforehand is not timed.",
    ]
    if result["quick"]:
        notes.append("Few rounds (--quick): expect noise.")
    if result["device"].startswith("sim"):
        notes.append(SIMULATED)
    return "\n".join(notes)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tdcopier bench", description=__doc__)
    parser.add_argument(
        "--device", default="cuda", help='such as "cuda:1", or "sim"; default: the CUDA device'
    )
    parser.add_argument("--megabytes", type=int, help="of the large tensor; default: 256, quick 32")
    parser.add_argument("--quick", action="store_true", help="few rounds, to see that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    options = parser.parse_args(arguments)
    if options.megabytes is None:
        options.megabytes = 32 if options.quick else 256
    if options.megabytes < 1:
        parser.error("--megabytes must be at least 1")
    if options.json is not None and not options.json.parent.is_dir():
        parser.error(f"--json: there is no folder {options.json.parent}")
    if options.json is not None and options.json.is_dir():
        parser.error(f"--json: {options.json} is a folder")
    return options
