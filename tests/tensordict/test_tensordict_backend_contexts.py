"""Where and how long a `tensordict.backend` block is active: contexts, tasks and forks."""

from __future__ import annotations

import asyncio
import contextvars
import threading

import pytest
import torch
from support import run_python
from tensordict import TensorDict
from tensordict_backend_support import methods
from tensordict_backend_support import restored as restored
from tensordict_kinds_of_leaves import flat
from thread_support import in_a_thread

import tdcopier


def test_a_block_that_ends_in_another_context_is_off_everywhere(device):
    own = methods()
    began_in = contextvars.copy_context()
    block = tdcopier.tensordict.backend()
    use = began_in.run(block.__enter__)
    block.__exit__(None, None, None)
    assert methods() == own
    with tdcopier.tensordict.backend():
        began_in.run(lambda: flat("cpu").to(device))
    assert use.by_engine == 0


def test_blocks_may_end_in_any_order(device):
    first, second = tdcopier.tensordict.backend(), tdcopier.tensordict.backend()
    of_first, of_second = first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    flat("cpu").to(device)
    second.__exit__(None, None, None)
    tdcopier.tensordict.install_backend()
    try:
        flat("cpu").to(device)
    finally:
        tdcopier.tensordict.remove_backend()
    assert (of_first.by_engine, of_second.by_engine) == (0, 1)


def test_a_task_that_outlives_the_block_it_was_started_in_is_on_until_the_block_ends(device):
    async def move(may_go_on: asyncio.Event) -> None:
        flat("cpu").to(device)
        await may_go_on.wait()
        flat("cpu").to(device)

    async def program() -> tuple[int, int]:
        ended = asyncio.Event()
        with tdcopier.tensordict.backend() as use:
            task = asyncio.create_task(move(ended))
            await asyncio.sleep(0)
        within = use.by_engine
        ended.set()
        await task
        return within, use.by_engine

    def keep_patched(patched: threading.Event, over: threading.Event) -> None:
        with tdcopier.tensordict.backend():
            patched.set()
            over.wait()

    patched, over = threading.Event(), threading.Event()
    other = threading.Thread(target=keep_patched, args=(patched, over))
    other.start()
    patched.wait()
    try:
        assert asyncio.run(program()) == (1, 1)
    finally:
        over.set()
        other.join()


def test_a_block_in_a_generator_of_another_thread_counts_there_only(device):
    def body() -> tuple[int, int]:
        with tdcopier.tensordict.backend() as use:
            flat("cpu").to(device)
            return use.by_engine, use.by_tensordict

    with tdcopier.tensordict.backend() as outer:
        assert in_a_thread(body) == (1, 0)
    assert outer.by_engine == 0


def test_a_child_that_is_forked_while_another_thread_counts_a_call_can_count_its_own():
    program = """
        import os, signal, threading, warnings
        import torch
        from tensordict import TensorDict
        import tdcopier
        from tdcopier.tensordict import _backend

        warnings.simplefilter("ignore", DeprecationWarning)  # of Python, on forks beside threads
        taken, forking = threading.Event(), threading.Event()

        def count():
            with _backend._lock:
                taken.set()
                forking.wait()

        thread = threading.Thread(target=count)
        thread.start()
        taken.wait()
        os.register_at_fork(before=forking.set)  # what is registered last comes first
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            with tdcopier.tensordict.backend() as use:
                TensorDict({"a": torch.ones(2)}).to("cpu")
            os._exit(0 if use.by_engine == 1 else 3)
        print(os.waitpid(child, 0)[1])
        thread.join()
    """
    assert run_python(program) == "0\n"


@pytest.mark.parametrize("target", ["cpu", "cpu:0", "cpu:1"])
def test_the_host_has_the_number_that_it_was_asked_for_with(device, target):
    td = flat(device)
    expected = (td.to(target).device, TensorDict({"a": td["a"]}, device=target).device)
    with tdcopier.tensordict.backend():
        got = (td.to(target).device, TensorDict({"a": td["a"]}, device=target).device)
    torch.get_device_module(device).synchronize()
    assert got == expected
