"""`await handle`: the event loop runs until the copy has arrived, and the result is that of get."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from scenario_world import held
from sim_support import BRIEFLY
from support import assert_same, oracle, run_python

import tdcopier
from tdcopier import _C
from tdcopier._asyncio import Pauses

LARGE = 1 << 20
"""4 MiB of floats, which workers stage."""


def tree(elements: int = 10, value: float = 1.0) -> dict[str, Any]:
    return {
        "large": torch.full((elements,), value),
        "small": [torch.arange(5), torch.rand(4, 6).t()],
        "empty": torch.empty(0, 3),
        "name": "rows",
    }


async def briefly() -> None:
    """Lets the event loop run until a task that is not held up would have looked several times."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + BRIEFLY
    while loop.time() < deadline:
        await asyncio.sleep(0.001)


async def result_of(handle: tdcopier.AsyncCopyHandle) -> Any:
    return await handle


def awaited(handle: tdcopier.AsyncCopyHandle) -> Any:
    return asyncio.run(result_of(handle))


# ---- every kind of copy ends without help from the task that waits -------------------------------

Start = Callable[[str], tuple[tdcopier.AsyncCopyHandle, Any]]
"""Starts a copy that involves a device; returns its handle and the expected result."""


def _to_device(elements: int, **options: Any) -> Start:
    def start(device: str) -> tuple[tdcopier.AsyncCopyHandle, Any]:
        source = tree(elements)
        return tdcopier.start_copy(source, device, **options), oracle(source, device)

    return start


def _to_host(elements: int, **options: Any) -> Start:
    def start(device: str) -> tuple[tdcopier.AsyncCopyHandle, Any]:
        source = oracle(tree(elements), device)
        return tdcopier.start_copy(source, "cpu", **options), oracle(source, "cpu")

    return start


def _within_the_host(device: str) -> tuple[tdcopier.AsyncCopyHandle, Any]:
    source = {"rows": torch.rand(300, 1000)}
    rows = torch.arange(0, 300, 2)
    return tdcopier.start_gather(source, rows, "cpu"), {"rows": source["rows"][rows]}


def _deferred(sending: _C.Sending) -> Start:
    def start(device: str) -> tuple[tdcopier.AsyncCopyHandle, Any]:
        with held(sending):
            return _to_device(LARGE)(device)

    return start


def _delegated(device: str) -> tuple[tdcopier.AsyncCopyHandle, Any]:
    source = [torch.rand(3, requires_grad=True)]
    return tdcopier.start_copy(source, device), [source[0].to(device)]


def _delegated_to_host(device: str) -> tuple[tdcopier.AsyncCopyHandle, Any]:
    source = [torch.rand(3).to(device).to_sparse()]
    return tdcopier.start_copy(source, "cpu"), [source[0].to("cpu")]


def _on_device_already(device: str) -> tuple[tdcopier.AsyncCopyHandle, Any]:
    source = [torch.rand(3, device=device)]
    return tdcopier.start_copy(source, device), source


def _into_device(device: str) -> tuple[tdcopier.AsyncCopyHandle, Any]:
    source = [torch.rand(LARGE), torch.rand(3)]
    filled = [torch.zeros(LARGE, device=device), torch.zeros(3, device=device)]
    return tdcopier.start_copy_into(source, filled), oracle(source, device)


def _into_host(**options: Any) -> Start:
    def start(device: str) -> tuple[tdcopier.AsyncCopyHandle, Any]:
        source = [torch.rand(LARGE), torch.rand(3)]
        filled = [torch.zeros(LARGE), torch.zeros(3)]
        handle = tdcopier.start_copy_into(oracle(source, device), filled, **options)
        return handle, source

    return start


def _gather(device: str) -> tuple[tdcopier.AsyncCopyHandle, Any]:
    storage, rows = {"x": torch.rand(500, 1000)}, torch.arange(0, 500, 3)
    handle = tdcopier.start_gather(storage, rows, device)
    return handle, {"x": storage["x"][rows].to(device)}


def _scatter(device: str) -> tuple[tdcopier.AsyncCopyHandle, Any]:
    storage, batch = {"x": torch.zeros(500, 1000)}, {"x": torch.rand(400, 1000)}
    handle = tdcopier.start_scatter(oracle(batch, device), storage, slice(0, 400))
    return handle, {"x": torch.cat([batch["x"], torch.zeros(100, 1000)])}


def _prepared(device: str) -> tuple[tdcopier.AsyncCopyHandle, Any]:
    source = tree()
    return tdcopier.prepare(source, device).start_copy(source), oracle(source, device)


KINDS: dict[str, Start] = {
    "to the device, inline": _to_device(10),
    "to the device, by workers": _to_device(LARGE),
    "to the device, in the call": _to_device(LARGE, use_background_thread=False),
    "to the device, pageable": _to_device(LARGE, use_pinned_staging=False),
    "to the host": _to_host(10),
    "to the host, large": _to_host(LARGE),
    "to the host, pageable": _to_host(LARGE, use_pinned_staging=False),
    "within the host": _within_the_host,
    "deferred": _deferred(_C.Sending.DEFERRED),
    "deferred, staged": _deferred(_C.Sending.DEFERRED_STAGED),
    "delegated": _delegated,
    "delegated, to the host": _delegated_to_host,
    "on the device already": _on_device_already,
    "into the device": _into_device,
    "into the host": _into_host(),
    "into the host, pageable": _into_host(use_pinned_staging=False),
    "gather": _gather,
    "scatter": _scatter,
    "prepared": _prepared,
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_copy_is_awaited_with_the_values_of_to(device, kind):
    handle, expected = KINDS[kind](device)
    result = awaited(handle)
    assert handle.ready()
    assert_same(result, expected)
    assert handle.get() is result


def test_more_copies_than_staging_buffers_are_awaited_together(device):
    tdcopier.limits.set_staging_bytes(_C.STAGING_BUFFER_BYTES)
    tdcopier.limits.set_run_ahead(100)

    async def scene() -> list[Any]:
        handles = [
            tdcopier.start_copy(torch.full((LARGE,), float(value)), device) for value in range(6)
        ]
        return await asyncio.gather(*handles)

    assert [moved.unique().tolist() for moved in asyncio.run(scene())] == [[v] for v in range(6)]


# ---- the event loop ------------------------------------------------------------------------------


@pytest.mark.parametrize("elements", [10, LARGE], ids=["inline", "background"])
def test_other_tasks_run_while_a_copy_is_on_its_way(device, stall, copy_stream, elements):
    async def scene() -> Any:
        with stall(copy_stream):
            handle = tdcopier.start_copy(tree(elements), device)
            waiting = asyncio.ensure_future(handle)
            await briefly()
            assert not waiting.done()
            assert not handle.ready()
        return await waiting

    assert asyncio.run(scene())["large"].eq(1).all()


def test_a_task_looks_again_after_a_tenth_of_its_wait_within_limits(monkeypatch):
    async def scene() -> list[float]:
        loop, slept = asyncio.get_running_loop(), []
        now = [5.0]

        async def sleep(seconds: float) -> None:
            slept.append(seconds)
            now[0] += seconds

        monkeypatch.setattr(loop, "time", lambda: now[0])
        monkeypatch.setattr(asyncio, "sleep", sleep)
        pauses = Pauses("get()")
        while now[0] < 6:
            await pauses.pause()
        monkeypatch.undo()
        return slept

    slept = asyncio.run(scene())
    assert slept[:10] == [0.001] * 10
    assert slept == sorted(slept)
    waited = 0.0
    for pause in slept:
        assert pause <= max(0.001, 0.1 * waited) * (1 + 1e-9)
        waited += pause
    assert slept[-1] == 0.020


@pytest.mark.parametrize("way", ["await", "wait_for", "gather", "TaskGroup"])
def test_asyncio_takes_handles_in_each_of_its_ways(device, way):
    if way == "TaskGroup" and sys.version_info < (3, 11):
        pytest.skip("Python 3.11 has it first")

    async def scene() -> list[Any]:
        handles = [tdcopier.start_copy(tree(value=float(v)), device) for v in range(3)]
        if way == "await":
            return [await handle for handle in handles]
        if way == "wait_for":
            return [await asyncio.wait_for(handle, 60) for handle in handles]
        if way == "gather":
            return await asyncio.gather(*handles)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(result_of(handle)) for handle in handles]
        return [task.result() for task in tasks]

    assert [moved["large"].unique().tolist() for moved in asyncio.run(scene())] == [[0], [1], [2]]


def test_awaiting_twice_and_from_several_tasks_gives_the_same_object(device, stall, copy_stream):
    async def scene() -> list[Any]:
        with stall(copy_stream):
            handle = tdcopier.start_copy([torch.ones(3)], device)
            tasks = [asyncio.create_task(result_of(handle)) for _ in range(3)]
            await briefly()
            assert not any(task.done() for task in tasks)
        results = await asyncio.gather(*tasks)
        return [*results, await handle, await handle, handle.get(), handle.wait()]

    results = asyncio.run(scene())
    assert all(result is results[0] for result in results)
    assert results[0][0].tolist() == [1, 1, 1]


@pytest.mark.parametrize("how", ["cancel", "wait_for"])
def test_a_cancelled_task_leaves_the_copy_running(device, stall, copy_stream, how):
    source = torch.full((10,), 7.0)

    async def scene() -> tdcopier.AsyncCopyHandle:
        with stall(copy_stream):
            handle = tdcopier.start_copy([source], device)
            if how == "cancel":
                waiting = asyncio.ensure_future(handle)
                await briefly()
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
            else:
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(handle, 0.001)
            assert not handle.ready()
        return handle

    handle = asyncio.run(scene())
    assert handle.get()[0].tolist() == [7] * 10
    assert awaited(handle) is handle.get()


@pytest.mark.sim
def test_ctrl_c_ends_the_loop_and_a_later_get_is_right(sim, device, copy_stream):
    handles = []

    async def scene() -> None:
        handles.append(tdcopier.start_copy([torch.ones(3)], device))
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
        await handles[0]

    with sim.hold(copy_stream), pytest.raises(KeyboardInterrupt):
        asyncio.run(scene())
    assert handles[0].get()[0].tolist() == [1, 1, 1]


def test_without_an_event_loop_the_error_says_what_to_call(device, stall, copy_stream):
    with stall(copy_stream):
        handle = tdcopier.start_copy([torch.ones(3)], device)
        with pytest.raises(RuntimeError, match=r"no asyncio event loop .*: use get\(\), or"):
            result_of(handle).send(None)
    handle.get()
    with pytest.raises(RuntimeError, match=r"no asyncio event loop .*: use get\(\), or"):
        result_of(handle).send(None)


@pytest.mark.sim
def test_a_forked_child_is_told_that_it_cannot_await_its_parents_copy():
    program = """
        import asyncio, os, torch, tdcopier, warnings
        from tdcopier import sim, _C
        sim.enable()
        warnings.simplefilter("ignore", DeprecationWarning)

        async def result_of(handle):
            return await handle

        with sim.hold(_C.copy_stream("sim")):
            handle = tdcopier.start_copy([torch.ones(1 << 20)], "sim")
            child = os.fork()
            if child == 0:
                try:
                    asyncio.run(result_of(handle))
                except RuntimeError as error:
                    os._exit(0 if "before the process was forked" in str(error) else 2)
                os._exit(3)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert asyncio.run(result_of(handle))[0].sum().item() == 1 << 20
        print("fine")
    """
    assert run_python(program) == "fine\n"


# ---- values and order ----------------------------------------------------------------------------


@pytest.mark.parametrize("elements", [100, LARGE], ids=["inline", "background"])
def test_sources_may_be_overwritten_when_await_returns(ends, accelerator, stall, elements):
    """At the earliest moment, by the host or by a stream that nothing orders after the copy."""
    source_device, target = ends
    is_on_host = source_device == "cpu"
    side = nullcontext() if is_on_host else accelerator.stream(accelerator.Stream(source_device))
    moving = (
        _C.copy_stream(target, "to_device")
        if is_on_host
        else _C.copy_stream(source_device, "from_device")
    )

    async def scene() -> None:
        source = [torch.full((elements,), 3.0, device=source_device) for _ in range(4)]
        torch.accelerator.synchronize()
        with stall(moving):
            waiting = asyncio.ensure_future(tdcopier.start_copy(source, target))
            await briefly()
            assert not waiting.done()
        result = await waiting
        with side:
            for leaf in source:
                leaf.zero_()
        assert [leaf.unique().tolist() for leaf in result] == [[3]] * 4

    asyncio.run(scene())


def test_memory_is_not_reused_while_the_stream_that_awaited_can_still_read_it(
    device, accelerator, stall
):
    consumer = accelerator.Stream(device=device)
    tdcopier.limits.set_run_ahead(1000)

    async def scene() -> list[torch.Tensor]:
        kept = []
        with accelerator.stream(consumer), stall(consumer):
            for value in range(20):
                (moved,) = await tdcopier.start_copy([torch.full((50,), float(value))], device)
                late = torch.empty(50, device=device)
                late.copy_(moved, non_blocking=True)
                kept.append(late)
                del moved  # returned to the allocator; only the record keeps it from the next copy
        consumer.synchronize()
        return kept

    assert [late[0].item() for late in asyncio.run(scene())] == list(range(20))


# ---- errors --------------------------------------------------------------------------------------


class Failing:
    def to(self, device: Any) -> Any:
        raise KeyError("lost")


def test_an_error_of_the_copy_is_raised_each_time(device):
    handle = tdcopier.start_copy([torch.ones(3), Failing()], device)
    for _ in range(2):
        with pytest.raises(KeyError, match="lost"):
            awaited(handle)
    assert tdcopier.copy([torch.ones(2)], device)[0].tolist() == [1, 1]


@pytest.mark.sim
@pytest.mark.parametrize("elements", [10, LARGE], ids=["inline", "background"])
def test_an_error_of_the_device_is_raised_each_time(sim, device, copy_stream, elements):
    async def scene(handle: tdcopier.AsyncCopyHandle) -> None:
        for _ in range(2):
            with pytest.raises(torch.AcceleratorError, match="made to fail when it ran"):
                await handle

    with sim.fail_transfer(when="execution"):
        handle = tdcopier.start_copy([torch.ones(elements)], device)
        asyncio.run(scene(handle))
    assert tdcopier.copy([torch.ones(2)], device)[0].tolist() == [1, 1]


def test_checked_handles_are_awaited_and_name_a_modified_source(device, monkeypatch):
    monkeypatch.setattr("tdcopier._checking.enabled", True)
    source = {"good": torch.ones(3), "bad": torch.ones(4)}
    kept = awaited(tdcopier.start_copy(source, device))
    assert_same(kept, oracle(source, device))
    handle = tdcopier.start_copy(source, device)
    source["bad"] += 1
    for _ in range(2):
        with pytest.raises(tdcopier.SourceModifiedError, match=r"^data\['bad'\] was modified"):
            awaited(handle)
