"""What a result file says about the machine and the versions it was taken with."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]

_COMMIT_VARIABLE = "TDCOPIER_BENCH_COMMIT"
"""Names the commit that was measured, where the tree is a copy without its history."""


def describe(device: torch.device) -> dict[str, object]:
    """Hardware and versions; what cannot be known is None."""
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
        "tdcopier": _version("tdcopier"),
        **_commit(),
    }


def slug(name: str) -> str:
    """A name as it goes into a file name: ``NVIDIA H200`` becomes ``nvidia-h200``."""
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


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> dict[str, object]:
    """What was measured, and whether it had changed since that commit."""
    if named := os.environ.get(_COMMIT_VARIABLE):
        return {"git_commit": named, "git_dirty": False}
    status = _output("git", "-C", str(ROOT), "status", "--porcelain", empty="")
    return {
        "git_commit": _output("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "git_dirty": None if status is None else bool(status),
    }


def _output(*command: str, empty: str | None = None) -> str | None:
    """First line a command prints; ``empty`` if it prints nothing, None if it cannot run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[0] if lines else empty
