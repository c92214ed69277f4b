"""Runs functions of `distributed_cases` and `gathered_cases` on ranks in processes of their own."""

from __future__ import annotations

import importlib
import os
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_TIMEOUT_S = 90
_MODULES = ("distributed_cases", "gathered_cases")


class Ranks:
    """Processes that each have a rank in one process group."""

    def __init__(self, count: int, backend: str, folder: Path) -> None:
        context = mp.get_context("forkserver")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(count):
            here, there = context.Pipe()
            arguments = (there, rank, count, backend, str(folder / "rendezvous"))
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, case: str, *arguments: Any) -> list[Any]:
        """Returns the case's result on each rank; fails with the traceback of one that raises."""
        for pipe in self._pipes:
            pipe.send((case, arguments))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(_TIMEOUT_S), f"rank {rank} hangs in {case}{arguments}"
            answers.append(pipe.recv())
        for rank, (is_fine, answer) in enumerate(answers):
            assert is_fine, f"on rank {rank}:\n{answer}"
        return [answer for _, answer in answers]

    def end(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def _serve(pipe: Connection, rank: int, count: int, backend: str, file: str) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=count)
    modules = [importlib.import_module(name) for name in _MODULES]
    cases = {name: case for module in modules for name, case in vars(module).items()}
    while True:
        try:
            case, arguments = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send((True, cases[case](rank, *arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()
