"""The benchmarks of replay storages: how they time a step, check rows and set targets."""

from contextlib import contextmanager
from types import ModuleType

import pytest
import torch
from benchmark_support import load

storages, feeds_of, replay = load("storages"), load("replay_feeds"), load("replay")
rows_of = load("rows")

ROWS = 40


@pytest.fixture
def device(sim: ModuleType) -> torch.device:
    return torch.device("sim", 0)


@pytest.fixture(scope="module")
def storage() -> dict:
    return storages.REPLAYS["sac"].make(ROWS)


@pytest.fixture(scope="module")
def indices() -> list:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, ROWS, (6,), generator=generator) for _ in range(5)]


class Idle:
    """A step without work for the device."""

    def enqueue(self) -> None:
        pass


def no_progress(label: str):
    return lambda rounds: rounds


@pytest.mark.parametrize("name", storages.REPLAYS)
def test_each_storage_has_the_rows_that_it_is_asked_for_and_knows_them_by_number(name) -> None:
    replay_of = storages.REPLAYS[name]
    made = replay_of.make(ROWS)
    assert {len(leaf) for leaf in made.values()} == {ROWS}
    assert made[storages.ROW].flatten().tolist() == list(range(ROWS))
    taken = {key: leaf[: replay_of.batch % ROWS] for key, leaf in made.items()}
    assert storages.bytes_of_batch(made, replay_of.batch % ROWS) == sum(
        leaf.nbytes for leaf in taken.values()
    )


def test_what_does_not_fit_in_memory_is_left_out_and_named(capsys) -> None:
    assert set(storages.that_fit(1000, free_bytes=1 << 40)) == set(storages.REPLAYS)
    assert capsys.readouterr().err == ""
    assert set(storages.that_fit(1000, free_bytes=20_000_000)) == {"sac", "agents"}
    told = capsys.readouterr().err
    assert [line.split(":")[0] for line in told.splitlines()] == [
        "Skipped atari_32", "Skipped atari_256", "Skipped rgb",
    ]  # fmt: skip


def test_all_feeds_bring_the_right_rows_to_each_step(device, storage, indices) -> None:
    for feed in feeds_of.feeds():
        step, host, wrong = replay._one(feed, storage, indices, Idle(), device)
        assert wrong == 0, feed.name
        assert 0 < host < step, feed.name


def test_a_feed_that_is_a_step_behind_is_wrong_in_every_step(device, storage, indices) -> None:
    @contextmanager
    def behind(storage, indices, device):
        with feeds_of._plain(storage, indices[1:] + indices[:1], device) as batches:
            yield batches

    feed = feeds_of.ReplayFeed("behind", behind)
    _, _, wrong = replay._one(feed, storage, indices, Idle(), device)
    assert wrong == replay.WARM_UP_STEPS + replay.STEPS


def test_a_batch_with_other_values_is_wrong(device, storage, indices) -> None:
    @contextmanager
    def torn(storage, indices, device):
        with feeds_of._plain(storage, indices, device) as batches:
            yield ({**batch, "0": batch["0"] + 1} for batch in batches)

    _, _, wrong = replay._one(feeds_of.ReplayFeed("torn", torn), storage, indices, Idle(), device)
    assert wrong == 1


def test_a_step_ends_when_the_device_has_done_it(device, storage, indices) -> None:
    """The clock is read after a synchronization, at both ends."""
    ticks = iter(range(0, 10**9, 1000))
    batch = {name: leaf[indices[0]].to(device) for name, leaf in storage.items()}

    def batches():
        while True:
            yield batch

    step, host, seen, last = replay.block(batches(), Idle(), device, lambda: next(ticks))
    steps = replay.STEPS
    assert step == (2 * steps + 1) / steps  # two readings in each step, and one at the end
    assert host == 1
    assert len(seen) == replay.WARM_UP_STEPS + steps
    assert last is batch


def result_of(device: torch.device, module: ModuleType, monkeypatch) -> dict:
    monkeypatch.setattr(module, "that_fit", lambda rows: {"sac": storages.REPLAYS["sac"]})
    monkeypatch.setattr(module, "ROWS_OF_SIM", ROWS)
    return module.run(device, 10, no_progress, keep_gc=False)


@pytest.mark.parametrize(("ratio", "hit"), [(1.02, True), (1.04, False)])
def test_a_step_is_wanted_close_to_one_on_the_device(device, monkeypatch, ratio, hit) -> None:
    result = result_of(device, replay, monkeypatch)
    for learner in result["replays"]["sac"]["learners"].values():
        learner["ratios"][feeds_of.OURS] = ratio
    assert [target["hit"] for target in replay.targets(result)] == [True, hit, hit]


def test_the_number_of_torchs_threads_is_as_it_was(device, monkeypatch) -> None:
    before = torch.get_num_threads()
    result_of(device, rows_of, monkeypatch)
    assert torch.get_num_threads() == before
