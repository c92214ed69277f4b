"""`python -m tdcopier info`: prints what a bug report needs, as text or as JSON.

`info_facts.py` finds the facts and lists the sections; this module prints them.
By default it creates a context on every CUDA device, which takes device memory while it runs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import Any

from tdcopier._commands.info_facts import Info, info


def main(arguments: list[str] | None = None) -> int:
    """Print the report and return the exit status, 0."""
    parser = argparse.ArgumentParser(
        prog="python -m tdcopier info",
        description="Print what a bug report needs: versions, devices, limits. By default it "
        "creates a context on every CUDA device, which takes device memory while it runs.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--no-contexts",
        action="store_true",
        help="create no CUDA contexts; answers that need one are left out",
    )
    options = parser.parse_args(arguments)
    found = info(make_contexts=not options.no_contexts)
    print(json.dumps(found, indent=1) if options.json else as_text(found))
    return 0


def as_text(found: Info) -> str:
    """Return the report as text: sections with one line per entry."""
    lines: list[str] = []
    for section, answers in found.items():
        if section == "devices":
            for device in found["devices"]:
                lines += ["", device["device"], *_rows(device)]
        elif isinstance(answers, Mapping):
            rows = _rows(answers) if answers else ["  none"]
            lines += ["", section.replace("_", " "), *rows]
    return "\n".join(lines[1:])


def _rows(answers: Mapping[str, Any]) -> Iterator[str]:
    shown = {name: value for name, value in answers.items() if name != "device"}
    width = max(len(_label(name)) for name in shown)
    for name, value in shown.items():
        yield f"  {_label(name):<{width}}  {_value(name, value)}"


def _label(name: str) -> str:
    """Return a label: variables keep their names; sizes lose their unit, which is in the value."""
    return name if name.isupper() else name.removesuffix("_bytes").replace("_", " ")


def _value(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return f"unknown: {value['unknown']}"
    if value is None:
        return "not installed"
    if isinstance(value, bool):
        return "on" if value else "off"
    return _size(value) if name.endswith("_bytes") else str(value)


def _size(count: int) -> str:
    """Format in the largest unit of which there is at least one, and in bytes."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale:
            return f"{count / scale:.4g} {unit} ({count:,} bytes)"
    return f"{count} bytes"
