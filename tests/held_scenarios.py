"""Short programs in which one thread stages copies and another sends them."""

from __future__ import annotations

from stage import Play, held, small_limits

import tdcopier


def batches_are_sent_by_their_consumer(play: Play) -> None:
    """H2D: memory of a sent batch is not reused for the next one before the device has read it."""
    device = play.devices[0]
    with small_limits(), held():
        batches = [play.batch((100, 3)), play.batch((90, 30)), play.batch((70,))]
        expected = [[leaf.clone() for leaf in batch] for batch in batches]
        for batch, wanted in zip(batches, expected, strict=True):
            handle = tdcopier.start_copy(batch, device)
            handle.wait_staged()
            for leaf in batch:
                leaf.fill_(-1)
            handle._send_if_staged()
            play.read_late(handle.wait(), wanted)
            del handle


def batches_are_dropped_before_they_are_sent(play: Play) -> None:
    """H2D: workers may still stage a batch that is dropped, and the next one takes its memory."""
    device = play.devices[0]
    with small_limits(), held():
        for _ in range(2):
            tdcopier.start_copy(play.batch((100, 30)), device)
        batch = play.batch((100, 30))
        handle = tdcopier.start_copy(batch, device)
        while not handle.ready():
            pass
        play.expect(handle.get(), batch)


def a_batch_is_sent_by_two_threads(play: Play) -> None:
    """H2D: the batch is sent once, whichever thread is first."""
    device = play.devices[0]
    with small_limits(), held():
        batch = play.batch((100, 30))
        handle = tdcopier.start_copy(batch, device)
        thread = play.schedule.thread(handle._send_if_staged)
        play.read_late(handle.wait(), batch)
        thread.join()
        assert handle.stats.transfers == 1


HELD = (
    batches_are_sent_by_their_consumer,
    batches_are_dropped_before_they_are_sent,
    a_batch_is_sent_by_two_threads,
)
