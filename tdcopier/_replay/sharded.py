"""Several replay buffers as one: a client of them all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from typing_extensions import Self

from tdcopier._distributed.ends import ChannelClosedError
from tdcopier._replay.client import ReplayClient
from tdcopier._replay.stats import ReplayStats

_SIZES_HOLD_S = 1.0
"""How long the sizes of the shards are taken for those that were read."""
_NAP_S = 0.02
"""Between two looks whether a shard has rows."""
_INDEX = "index"


class ShardedReplayClient:
    """The buffers of several servers, the shards, as one buffer.

    For example, with a server in each of two processes::

        clients = [ReplayClient(store=store, name=name) for name in ("replay 0", "replay 1")]
        with ShardedReplayClient(clients, batch_size=256) as buffer:
            buffer.extend(rollout)
            batch = buffer.sample()

    An index tells the shard: row `i` of shard `s` of `n` has the index ``i * n + s``. Priorities go
    back to the shard that has the row. Weights of a prioritized sampler are those of each shard.
    """

    def __init__(self, clients: Sequence[ReplayClient], *, batch_size: int | None = None) -> None:
        """Take clients, one for each shard, which are closed with this one.

        Args:
            clients: of different servers. Samples arrive on the device of each.
            batch_size: of samples; by default the clients', together.

        Raises:
            ValueError: there is none.
        """
        if not clients:
            raise ValueError("give a client for each shard; there is none")
        self._clients = list(clients)
        self._batch_size = batch_size
        self._lock = threading.Lock()
        self._turn = 0
        self._owed = [0.0] * len(self._clients)
        """Rows that each shard has drawn too few of, for its size."""
        self._sizes: list[int] = []
        self._sizes_at = 0.0

    # ---- rows ------------------------------------------------------------------------------------

    def extend(self, data: Any, *, update_priority: bool | None = None, wait: bool = True) -> Any:
        """Write rows to the shard whose turn it is, and return their index.

        Args:
            data: as for `ReplayClient.extend`, as for the others.
            update_priority: as there.
            wait: False: return None when the rows are on their way, as there.

        Raises:
            Exception: as `ReplayClient.extend`.
        """
        shard = self._next_shard()
        client = self._clients[shard]
        index = client.extend(data, update_priority=update_priority, wait=wait)
        return self._outer(index, shard) if wait else None

    def flush(self) -> None:
        """Wait until all rows are in the shards that `extend` was called for without a wait.

        Raises:
            Exception: as `ReplayClient.flush`.
        """
        for client in self._clients:
            client.flush()

    def add(self, data: Any) -> Any:
        """Write one row to the shard whose turn it is, and return its index."""
        shard = self._next_shard()
        return self._outer(self._clients[shard].add(data), shard)

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """Return a batch that has rows of each shard in proportion to its size.

        Over several batches that is so to the row. The shards draw at the same time.

        Args:
            batch_size: number of rows; by default that of this client.
            return_info: return a pair of the batch and its info.

        Raises:
            ValueError: there is no `batch_size`.
            Exception: as `ReplayClient.sample`.
        """
        counts = self._counts(self._rows(batch_size))
        most = max(range(len(counts)), key=lambda each: self._sizes[each])
        shards = [shard for shard, count in enumerate(counts) if count] or [most]
        asked = [
            (shard, self._clients[shard], self._clients[shard]._ask_for_samples(count, return_info))
            for shard, count in ((each, counts[each]) for each in shards)
        ]
        parts = [(shard, client._take_sample(number)) for shard, client, number in asked]
        if not return_info:
            return self._joined(parts)
        batches = [(shard, part[0]) for shard, part in parts]
        infos = [(shard, part[1]) for shard, part in parts]
        return self._joined(batches), self._joined(infos)

    def __iter__(self) -> Iterator[Any]:
        """Yield samples, until a client or a server is closed."""
        while True:
            try:
                sampled = self.sample()
            except ChannelClosedError:
                return
            yield sampled

    # ---- priorities ------------------------------------------------------------------------------

    def update_priority(self, index: Any, priority: Any) -> None:
        """Give rows another priority, each in its shard.

        Args:
            index: of the rows, as in a sample: a tensor on any device, or numbers.
            priority: of each row, or of all.

        Raises:
            Exception: as `ReplayClient.update_priority`.
        """
        index = torch.as_tensor(index)
        if not index.dim():
            index = index.unsqueeze(0)
        for shard, client in enumerate(self._clients):
            is_its = _rowwise(index) % len(self._clients) == shard
            if bool(is_its.any()):
                its = priority
                if isinstance(priority, torch.Tensor) and priority.dim():
                    its = priority[is_its.to(priority.device)]
                client.update_priority(self._inner(index[is_its]), its)

    def update_tensordict_priority(self, data: Any) -> None:
        """Give the rows of a sample the priorities in it, each in its shard."""
        index = data[_INDEX]
        for shard, client in enumerate(self._clients):
            is_its = _rowwise(index) % len(self._clients) == shard
            if bool(is_its.any()):
                if isinstance(data, dict):
                    its: Any = {key: value[is_its] for key, value in data.items()}
                else:
                    its = data[is_its]
                its[_INDEX] = self._inner(index[is_its])
                client.update_tensordict_priority(its)

    # ---- the shards ------------------------------------------------------------------------------

    def __len__(self) -> int:
        return sum(self._read_sizes())

    @property
    def batch_size(self) -> int | None:
        """Of samples."""
        return self._batch_size

    @property
    def write_count(self) -> int:
        """How many rows were written, by the buffers' counts."""
        return sum(stats.write_count for stats in self.stats)

    @property
    def stats(self) -> list[ReplayStats]:
        """The counts of each server."""
        return [client.stats for client in self._clients]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each server."""
        return {"shards": [client.state_dict() for client in self._clients]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that `state_dict` has returned.

        Raises:
            ValueError: it has another number of shards.
        """
        shards = state["shards"]
        if len(shards) != len(self._clients):
            raise ValueError(f"the state has {len(shards)} shards, not {len(self._clients)}")
        for client, each in zip(self._clients, shards, strict=True):
            client.load_state_dict(each)

    def close(self) -> None:
        """Close the clients."""
        for client in self._clients:
            client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<ShardedReplayClient of {len(self._clients)} shards>"

    # ---- parts -----------------------------------------------------------------------------------

    def _next_shard(self) -> int:
        with self._lock:
            shard, self._turn = self._turn, (self._turn + 1) % len(self._clients)
        return shard

    def _rows(self, batch_size: int | None) -> int:
        size = self._batch_size if batch_size is None else batch_size
        if size is None:
            sizes = [client.batch_size for client in self._clients]
            if None in sizes:
                raise ValueError(
                    "give a batch_size here, or when the client or its shards are made"
                )
            size = sum(each for each in sizes if each is not None)
        return size

    def _counts(self, rows: int) -> list[int]:
        """Return how many rows of a batch each shard draws."""
        while not self._have_rows() and rows:  # one of them may never get any
            time.sleep(_NAP_S)  # without the lock, which `extend` takes too
        with self._lock:
            whole = sum(self._sizes)
            shares = [size / whole if whole else 1 / len(self._sizes) for size in self._sizes]
            self._owed = [o + rows * share for o, share in zip(self._owed, shares, strict=True)]
            counts = [0] * len(shares)
            for _ in range(rows):
                shard = max(range(len(shares)), key=lambda each: self._owed[each])
                counts[shard] += 1
                self._owed[shard] -= 1
        return counts

    def _have_rows(self) -> bool:
        """Return whether a shard has rows, as of not long ago."""
        with self._lock:
            if time.monotonic() - self._sizes_at > _SIZES_HOLD_S or not any(self._sizes):
                self._sizes, self._sizes_at = self._read_sizes(), time.monotonic()
            return any(self._sizes)

    def _read_sizes(self) -> list[int]:
        return [stats.size for stats in self.stats]

    def _outer(self, index: Any, shard: int) -> Any:
        """Return the index of rows of a shard, as all shards know it."""
        return _each(lambda inner: inner * len(self._clients) + shard, index)

    def _inner(self, index: Any) -> Any:
        return _each(lambda outer: outer // len(self._clients), index)

    def _joined(self, parts: list[tuple[int, Any]]) -> Any:
        """Return the rows of all shards, with an index that tells the shard."""
        trees = []
        for shard, tree in parts:
            if _INDEX in tree.keys():  # noqa: SIM118  (a TensorDict iterates over its rows)
                tree[_INDEX] = self._outer(tree[_INDEX], shard)
            trees.append(tree)
        return _cat(trees)


def _rowwise(index: torch.Tensor) -> torch.Tensor:
    """Return one number for each row, also where an index has several."""
    return index if index.dim() < 2 else index.reshape(len(index), -1)[:, 0]


def _each(change: Callable[[Any], Any], index: Any) -> Any:
    return tuple(change(each) for each in index) if isinstance(index, tuple) else change(index)


def _cat(parts: list[Any]) -> Any:
    """Join trees of the same structure along their rows; of other values, return the first."""
    first = parts[0]
    if isinstance(first, dict):
        return {key: _cat([part[key] for part in parts]) for key in first}
    if isinstance(first, (list, tuple)):
        return type(first)(_cat(list(each)) for each in zip(*parts, strict=True))
    has_rows = first.dim() > 0 if isinstance(first, torch.Tensor) else hasattr(first, "batch_size")
    return torch.cat(parts) if has_rows else first
