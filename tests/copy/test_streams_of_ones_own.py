"""The engine's streams are not in torch's pools: `torch.Stream()` never returns one to a caller."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from calls import calls_for, work_of
from torch.profiler import ProfilerActivity, profile

pytestmark = pytest.mark.cuda

STREAMS_OF_EACH_KIND = 64  # a pool has 32, which it hands out in turn
SPIN = "spin_kernel"  # of torch.cuda._sleep


def pool_streams(device: str) -> list[torch.cuda.Stream]:
    """Returns every stream of torch's pools, each twice or more."""
    made: list[torch.cuda.Stream] = []
    for _ in range(STREAMS_OF_EACH_KIND):
        generic = torch.Stream(device, priority=-1)
        made += [
            torch.cuda.Stream(device),
            torch.cuda.Stream(device, priority=-1),
            torch.cuda.Stream(
                stream_id=generic.stream_id,
                device_index=generic.device_index,
                device_type=generic.device_type,
            ),
        ]
    return made


def work_by_stream(run: Callable[[], None], trace: Path) -> list[tuple[str, tuple[int, int]]]:
    """Returns name, device and stream of all device work in the call, from the profiler."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        run()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(trace))
    ran = [
        event
        for event in json.loads(trace.read_text())["traceEvents"]
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    places = [event["args"] for event in ran]
    # A copy between two devices names both, and the one whose stream it is on.
    devices = [place["device"] if "device" in place else place["inDevice"] for place in places]
    return [
        (event["name"], (device, place["stream"]))
        for event, device, place in zip(ran, devices, places, strict=True)
    ]


def test_no_stream_of_torchs_pools_is_one_of_the_engines(device: str, tmp_path: Path):
    streams = pool_streams(device)
    calls = calls_for(torch.cuda.device_count())
    works = [work_of(call, device, 1, [10, 20, 1 << 20]) for call in calls]

    def run() -> None:
        for work in works:
            for handle in (work.start(), work.start()):
                handle.get()
        torch.cuda.synchronize()
        for stream in streams:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(1000)

    run()  # first use makes streams and loads modules
    work = work_by_stream(run, tmp_path / "trace.json")
    of_pools = {stream for name, stream in work if SPIN in name}
    of_copies = {stream for name, stream in work if SPIN not in name}
    assert sum(SPIN in name for name, _ in work) == len(streams)
    assert len(of_pools) == len({stream.stream_id for stream in streams})
    assert any(name.startswith("Memcpy HtoD") for name, _ in work)
    assert of_copies
    shared = of_copies & of_pools
    assert not shared, sorted({(name, s) for name, s in work if s in shared and SPIN not in name})
