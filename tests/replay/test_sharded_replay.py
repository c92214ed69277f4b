"""The buffers of several servers as one."""

from __future__ import annotations

import pytest
import torch
from replay_support import RowBuffer, rows_of

from tdcopier.replay import ShardedReplayClient

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def sharded(serve, connect):
    """Returns a function that opens servers, and a client of them all."""

    def open_shards(count: int = 3, device: str = "cpu", **options) -> ShardedReplayClient:
        clients = []
        for shard in range(count):
            serve(RowBuffer(100, seed=shard), name=f"shard {shard}")
            clients.append(connect(name=f"shard {shard}", device=device, prefetch=0))
        return ShardedReplayClient(clients, **options)

    return open_shards


def test_shards_are_written_in_turns_and_an_index_tells_the_shard(sharded):
    with sharded() as buffer:
        assert repr(buffer) == "<ShardedReplayClient of 3 shards>"
        found = [buffer.extend(rows_of(10 * turn, 2)).tolist() for turn in range(4)]
        assert found == [[0, 3], [1, 4], [2, 5], [6, 9]]
        assert buffer.add({key: row[0] for key, row in rows_of(99, 1).items()}) == 7
        assert [stats.size for stats in buffer.stats] == [4, 3, 2]
        assert len(buffer) == buffer.write_count == 9


def test_rows_that_were_written_without_a_wait_are_there_after_flush(sharded):
    with sharded() as buffer:
        for turn in range(9):
            assert buffer.extend(rows_of(10 * turn, 2), wait=False) is None
        buffer.flush()
        assert [stats.size for stats in buffer.stats] == [6, 6, 6]


def test_samples_have_rows_of_each_shard_in_proportion_to_its_size(sharded, device):
    with sharded(device=device, batch_size=8) as buffer:
        for shard, count in enumerate((60, 30, 10)):
            buffer.extend(rows_of(1000 * shard, count))
        counts = torch.zeros(3)
        for _ in range(50):
            batch, info = buffer.sample(return_info=True)
            assert batch["number"].device.type == torch.device(device).type
            assert torch.equal(batch["index"], info["index"])
            index, number = batch["index"].cpu(), batch["number"].cpu()
            assert torch.equal(index % 3, number // 1000)
            assert torch.equal(index // 3, number % 1000)
            counts += torch.bincount(index % 3, minlength=3)
        assert counts.tolist() == pytest.approx([240, 120, 40], abs=1)
        assert len(buffer.sample(5)["number"]) == 5


def test_priorities_go_back_to_the_shard_that_has_the_row(sharded):
    with sharded(2) as buffer:
        for shard in range(2):
            buffer.extend(rows_of(100 * shard, 4))
        index = torch.arange(8)
        buffer.update_priority(index, torch.where((index == 2) | (index == 7), 1.0, 0.0))
        assert set(buffer.sample(20)["index"].tolist()) == {2, 7}
        batch = buffer.sample(8)
        batch["index"], batch["error"] = index, (index < 2).float()
        buffer.update_tensordict_priority(batch)
        assert set(buffer.sample(20)["number"].tolist()) == {0, 100}
        buffer.update_priority(index, 1.0)
        assert len(set(buffer.sample(100)["index"].tolist())) > 4


def test_the_state_has_that_of_each_shard(sharded):
    with sharded(2) as buffer:
        for shard in range(2):
            buffer.extend(rows_of(100 * shard, 4))
        state = buffer.state_dict()
        first = buffer.sample(6)
        buffer.load_state_dict(state)
        assert torch.equal(buffer.sample(6)["index"], first["index"])
        with pytest.raises(ValueError, match="the state has 1 shards, not 2"):
            buffer.load_state_dict({"shards": state["shards"][:1]})


def test_mistakes_are_refused(sharded):
    with pytest.raises(ValueError, match="give a client for each shard"):
        ShardedReplayClient([])
    with sharded(1) as buffer, pytest.raises(ValueError, match="give a batch_size"):
        buffer.sample()
