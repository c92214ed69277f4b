"""Describes the machine and the versions for result files."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path

import torch

import tdcopier

BENCHMARKS = Path(__file__).resolve().parents[1]
ROOT = BENCHMARKS.parent

_COMMIT_VARIABLE = "TDCOPIER_BENCH_COMMIT"
"""Environment variable with the measured commit, for a working tree without Git history."""


def describe(device: torch.device) -> dict[str, object]:
    """Return hardware and versions; unknown values are None."""
    return {
        "slug": slug(gpu_name(device) or device.type),
        "device": str(device),
        "gpu": gpu_name(device),
        "gpus": torch.cuda.device_count() if device.type == "cuda" else None,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        if device.type == "cuda"
        else None,
        "cuda": torch.version.cuda,
        "cpu": cpu_name(),
        "logical_cpus": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tdcopier": tdcopier.__version__,
        **_commit(),
    }


def slug(name: str) -> str:
    """Return a name in the form for file names: ``NVIDIA H200`` becomes ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def gpu_name(device: torch.device) -> str | None:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else None


def _commit() -> dict[str, object]:
    """Return the measured commit, and whether the working tree has other changes."""
    if named := os.environ.get(_COMMIT_VARIABLE):
        return {"git_commit": named, "git_dirty": False}
    status = _output("git", "-C", str(ROOT), "status", "--porcelain", empty="")
    return {
        "git_commit": _output("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "git_dirty": None if status is None else bool(status),
    }


def _output(*command: str, empty: str | None = None) -> str | None:
    """Return the first line that a command prints, ``empty`` if none, or None if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[0] if lines else empty
