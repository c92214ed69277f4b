"""Times a replay buffer of another process, beside one tensor of the bytes by gloo, and torchrl's.

Both processes are on this host. A block is a number of calls of the process that acts, or learns,
one after the other; the blocks of all ways take turns. A call of `extend` ends when the rows are in
the buffer. torchrl's own remote buffer is called by torch's RPC.
"""

from __future__ import annotations

import atexit
import functools
import os
import socket
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tool.measure import Bench, summaries
from tool.tables import OURS
from tool.target_forms import Target, at_least, at_most, count_wrong, none

from tdcopier.replay import ReplayClient, ReplayServer
from travel.two_ranks import HERE, THERE, Other, two_ranks

EXTEND, SAMPLE = f"{OURS}, extend", f"{OURS}, sample"
EXTEND_ON = f"{OURS}, extend, wait=False"
SAMPLE_AT_ONCE = f"{OURS}, sample, prefetch=0"
SENT, GOT = "one tensor and an answer", "an answer and one tensor"
SENT_ALONE = "one tensor"
LOCAL_EXTEND, LOCAL_SAMPLE = "the buffer itself, extend", "the buffer itself, sample"
RPC_EXTEND, RPC_SAMPLE = "torchrl by RPC, extend", "torchrl by RPC, sample"
CALLS, FEW = 40, 4
"""Of a block; of one by RPC."""
ROWS, BATCHES = 16, 32
"""Of a batch; of the buffer."""
MOST_OVER_ONE, LEAST_OVER_RPC = 1.3, 10.0


class Case(NamedTuple):
    count: int
    floats: int
    """Of each leaf, in each row."""


CASES = {"200 leaves of 8 KB": Case(200, 125), "5 leaves of 320 KB": Case(5, 5000)}


def run(bench: Bench) -> dict[str, Any]:
    found: dict[str, Any] = {}
    # RPC keeps a processor busy as long as it runs, and cannot be ended before its process.
    for make_end in (Ends, RpcEnds) if bench.is_real else (Ends,):
        with two_ranks("gloo", make_end) as other:
            for name, case in CASES.items():
                timed = _timed(bench, name, case, other)
                for key, part in timed.items():
                    before = found.setdefault(name, {}).get(key)
                    found[name][key] = {**before, **part} if isinstance(before, dict) else part
    return {
        "what": "A replay buffer of another process of this host, beside gloo's own messages",
        "settings": {"calls of a block": CALLS, "by RPC": FEW, "rows": ROWS, "torchrl": _torchrl()},
        "cases": found,
    }


def _timed(bench: Bench, name: str, case: Case, other: Other) -> dict[str, Any]:
    with other.end(name, case) as end:
        times = other.times(bench, name, end)
        wrong = end.count_wrong()
    return {
        "leaves": case.count,
        "bytes": _bytes_of(case),
        "wall_us": summaries(times.wall_us),
        "process_us": summaries(times.process_us),
        "wrong": wrong,
    }


def _torchrl() -> str:
    import torchrl

    return str(torchrl.__version__)


def _bytes_of(case: Case) -> int:
    return 4 * case.count * case.floats * ROWS


def _batch(case: Case) -> Any:
    """Return rows, the same numbers in each leaf of a row."""
    from tensordict import TensorDict

    rows = torch.arange(float(ROWS)).unsqueeze(1)
    leaves = {f"leaf {number}": rows + torch.zeros(case.floats) for number in range(case.count)}
    return TensorDict(leaves, [ROWS], device="cpu")


def _buffer(kind: Any, storage: Any) -> Any:
    return kind(storage=storage(ROWS * BATCHES), batch_size=ROWS)


class Ends:
    """One process: rank 0 has the buffers, rank 1 uses them."""

    def __init__(self, rank: int, name: str, case: Case) -> None:
        from tdcopier.torchrl import PackedLazyTensorStorage, PackedTensorDictReplayBuffer

        self.rank, self.batch, self.number = rank, _batch(case), torch.zeros(1)
        self.tensor = torch.zeros(_bytes_of(case), dtype=torch.uint8)
        self.local = _buffer(PackedTensorDictReplayBuffer, PackedLazyTensorStorage)
        self.local.extend(self.batch.clone())
        name = name.replace(" ", "-")
        if rank == THERE:
            buffer = _buffer(PackedTensorDictReplayBuffer, PackedLazyTensorStorage)
            self.server = ReplayServer(buffer, name=name, host="127.0.0.1")
        else:
            self.clients = [
                ReplayClient(name=name, host="127.0.0.1", prefetch=prefetch) for prefetch in (2, 0)
            ]
        self.extend(1)

    @property
    def ways(self) -> dict[str, Any]:
        return {
            EXTEND: self.extend,
            EXTEND_ON: self.extend_on,
            SAMPLE: self.sample,
            SAMPLE_AT_ONCE: self.sample_at_once,
            SENT_ALONE: self.sent_alone,
            SENT: self.sent,
            GOT: self.got,
            LOCAL_EXTEND: self.local_extend,
            LOCAL_SAMPLE: self.local_sample,
        }

    def batches_of(self, way: str) -> int:
        return CALLS

    # ---- ours ------------------------------------------------------------------------------------

    def extend(self, count: int) -> None:
        for _ in range(count if self.rank == HERE else 0):
            self.clients[0].extend(self.batch)
        self._meet()

    def extend_on(self, count: int) -> None:
        for _ in range(count if self.rank == HERE else 0):
            self.clients[0].extend(self.batch, wait=False)
        if self.rank == HERE:
            self.clients[0].flush()
        self._meet()

    def sample(self, count: int, client: int = 0) -> None:
        for _ in range(count if self.rank == HERE else 0):
            self.last = self.clients[client].sample()
        self._meet()

    def sample_at_once(self, count: int) -> None:
        self.sample(count, client=1)

    def count_wrong(self) -> dict[str, int]:
        """Return how many rows of the last sample have other numbers."""
        rows = self.last["index"].remainder(ROWS).unsqueeze(1)
        leaves = [leaf for key, leaf in self.last.items() if key != "index"]
        return {OURS: int(sum((leaf != rows).any(1).sum() for leaf in leaves))}

    # ---- beside ----------------------------------------------------------------------------------

    def sent_alone(self, count: int) -> None:
        for _ in range(count):
            self._message(self.tensor, HERE)
        self._meet()

    def sent(self, count: int) -> None:
        for _ in range(count):
            self._message(self.tensor, HERE)
            self._message(self.number, THERE)

    def got(self, count: int) -> None:
        for _ in range(count):
            self._message(self.number, HERE)
            self._message(self.tensor, THERE)

    def local_extend(self, count: int) -> None:
        for _ in range(count if self.rank == HERE else 0):
            self.local.extend(self.batch)
        self._meet()

    def local_sample(self, count: int) -> None:
        for _ in range(count if self.rank == HERE else 0):
            self.local.sample()
        self._meet()

    def _message(self, tensor: torch.Tensor, sender: int) -> None:
        _message(tensor, self.rank, sender)

    def _meet(self) -> None:
        """Let the other process wait for the end of the block."""
        self._message(self.number, HERE)

    def close(self) -> None:
        if self.rank == THERE:
            self.server.close()
        else:
            for client in self.clients:
                client.close()


class RpcEnds:
    """The same with torchrl's own remote buffer."""

    def __init__(self, rank: int, name: str, case: Case) -> None:
        from torch.distributed import rpc
        from torchrl.data import LazyTensorStorage, RemoteTensorDictReplayBuffer

        _start_rpc(rank)
        self.rank, self.batch, self.number = rank, _batch(case), torch.zeros(1)
        if rank == HERE:
            how = {"storage": LazyTensorStorage(ROWS * BATCHES), "batch_size": ROWS}
            self.remote = rpc.remote(f"rank_{THERE}", RemoteTensorDictReplayBuffer, kwargs=how)
        self.extend(1)

    @property
    def ways(self) -> dict[str, Any]:
        return {RPC_EXTEND: self.extend, RPC_SAMPLE: self.sample}

    def batches_of(self, way: str) -> int:
        return FEW

    def extend(self, count: int) -> None:
        self._call(count, "extend", self.batch)

    def sample(self, count: int) -> None:
        self._call(count, "sample")

    def count_wrong(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        self.remote = None

    def _call(self, count: int, method: str, *arguments: Any) -> None:
        from torch.distributed import rpc
        from torchrl.data import RemoteTensorDictReplayBuffer

        function = getattr(RemoteTensorDictReplayBuffer, method)
        for _ in range(count if self.rank == HERE else 0):
            rpc.rpc_sync(self.remote.owner(), function, args=(self.remote, *arguments))
        _message(self.number, self.rank, HERE)


def _message(tensor: torch.Tensor, rank: int, sender: int) -> None:
    dist.send(tensor, 1 - sender) if rank == sender else dist.recv(tensor, sender)


@functools.cache
def _start_rpc(rank: int) -> None:
    from torch.distributed import rpc

    os.environ["TP_SOCKET_IFNAME"] = "lo"
    port = torch.zeros(1, dtype=torch.int64)
    if rank == THERE:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port[0] = free.getsockname()[1]
    dist.broadcast(port, THERE)
    # By the loopback interface, as the other ways, and as between hosts; by default it would use
    # shared memory here.
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://127.0.0.1:{int(port)}", _transports=["uv"], _channels=["basic"]
    )
    rpc.init_rpc(f"rank_{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    atexit.register(rpc.shutdown, graceful=False)


# ---- targets -------------------------------------------------------------------------------------


def value_targets(result: dict[str, Any]) -> Iterator[Target]:
    yield none("rows with other values", count_wrong(result["cases"].values()))


def speed_targets(result: dict[str, Any]) -> Iterator[Target]:
    for name, found in result["cases"].items():
        medians = {way: each["median_us"] for way, each in found["wall_us"].items()}
        for what, ours, one, rpc in (
            ("extend", EXTEND, SENT, RPC_EXTEND),
            ("extend, wait=False", EXTEND_ON, SENT_ALONE, RPC_EXTEND),
            ("sample", SAMPLE, GOT, RPC_SAMPLE),
        ):
            over = medians[ours] / medians[one]
            yield at_most(f"{name}: {what}, over one tensor of the bytes", over, MOST_OVER_ONE)
            over = medians[rpc] / medians[ours]
            yield at_least(f"{name}: torchrl's {what} by RPC, over ours", over, LEAST_OVER_RPC)
