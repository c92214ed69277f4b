"""Short programs in which a channel works beside other copies, for `scenario_table.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from scenario_world import ScenarioWorld, Tree, small_limits
from scheduled_channel import (
    STORE,
    TIMEOUT_S,
    Exchange,
    channels,
    check_empty,
    receiver_on,
    sender_of,
)
from scheduled_reader import scheduled_reader

import tdcopier
from tdcopier import distributed

Batches = list[Tree]

SIZES = ((5, 40, 17), (33, 2, 61), (90, 3), (200, 30), (64, 64), (240,), (7, 50))
"""Of batches, more than slots. The receiver's slots grow for the fourth."""


def _send(batches: Batches) -> None:
    """Sends batches from the host, and changes each as soon as it has been started."""
    tx = sender_of()
    for batch in batches:
        tx.start(batch)
        for leaf in batch:
            leaf.fill_(-1)
    tx.flush()
    tx.close()


def _take(
    world: ScenarioWorld,
    exchange: Exchange,
    batches: Batches,
    beside: Callable[[], None] = lambda: None,
) -> None:
    """Takes batches as callers may: with `wait()` on two streams, `get()`, or not at all."""
    device = world.devices[0]
    streams = [world.stream(device) for _ in range(2)]
    rx = receiver_on(device)
    sending = exchange.thread(lambda: _send(batches))
    expected = [[leaf.clone() for leaf in batch] for batch in batches]
    for number, batch in enumerate(expected):
        handle = rx.next()
        with world.on(streams[number % 2]):
            if number % 4 < 2:
                world.read_late(handle.wait(), batch)
            elif number % 4 == 2:
                world.expect(handle.get(), batch)
        del handle  # in the other case before it is used
        beside()
    _end(exchange, rx, sending)


def _end(exchange: Exchange, rx: distributed.Receiver, sending: Any) -> None:
    assert rx.stats.waiting == 0, "a batch was not taken"
    check_empty(exchange)
    sending.join()
    rx.close()
    assert rx.stats.lost_peers == 0, rx.problems


def slots_are_sent_to_while_the_device_reads(world: ScenarioWorld) -> None:
    """H2D from the slots of a channel, each of which gets a later batch, or larger memory."""
    with channels(world) as exchange:
        _take(world, exchange, [world.batch(sizes) for sizes in SIZES])


def results_on_the_host_keep_their_slots(world: ScenarioWorld) -> None:
    """H2H, whose results are views of their slots, and H2D of those that are not kept."""
    device = world.devices[0]
    with channels(world) as exchange:
        batches = [world.batch(sizes) for sizes in SIZES]
        expected = [[leaf.clone() for leaf in batch] for batch in batches]
        rx = receiver_on("cpu")
        sending = exchange.thread(lambda: _send(batches))
        kept = []
        for number, batch in enumerate(expected):
            result = rx.next().get()
            if number % 3 == 0:
                kept.append((result, batch))
            else:
                handle = tdcopier.start_copy(result, device)
                del result
                with world.on(world.stream(device)):
                    world.read_late(handle.wait(), batch)
        for result, batch in kept:
            world.expect(result, batch)
        del kept, result
        _end(exchange, rx, sending)


def a_batch_on_a_device_is_overwritten_when_it_is_sent(world: ScenarioWorld) -> None:
    """D2H, by a channel with one slot, and H2D at the other end, on another device."""
    near, far = world.devices
    with channels(world) as exchange:
        batches = [world.batch(sizes) for sizes in SIZES[1:6]]

        def send() -> None:
            with world.on(world.stream(near)):
                tx = sender_of(slots=1)
                for batch in batches:
                    source = world.write(near, batch)
                    tx.start(source)
                    world.overwrite(source)
                    del source
                    world.churn(near, batch)
                tx.flush()
                tx.close()

        rx = receiver_on(far)
        sending = exchange.thread(send)
        with world.on(world.stream(far)):
            for batch in batches:
                world.read_late(rx.next().wait(), batch)
        _end(exchange, rx, sending)


# ---- weights -------------------------------------------------------------------------------------


def _publish(world: ScenarioWorld, exchange: Exchange, versions: Sequence[Tree]) -> None:
    """Publishes versions from a device, and overwrites the weights after each."""
    device = world.devices[0]
    with world.on(world.stream(device)):
        weights = dict(zip("abc", world.write(device, versions[0]), strict=True))
        tree = list(weights.values())
        weights_of = distributed.publish(weights, store=STORE, peer_timeout_s=TIMEOUT_S)
        world.overwrite(tree)
        weights_of._wait(lambda: bool(weights_of.peers), None)
        for number, version in enumerate(versions[1:], 2):
            world.fill(tree, version)
            assert weights_of.publish() == number
            world.overwrite(tree)
        weights_of.close()


def _versions(world: ScenarioWorld) -> list[Tree]:
    """Returns four versions of weights; of two of them, less than half is new."""
    first, second = (world.batch((60, 25, 200)) for _ in range(2))
    return [
        first,
        [*world.batch((60,)), *first[1:]],
        second,
        [second[0], *world.batch((25,)), second[2]],
    ]


def _follow(
    world: ScenarioWorld,
    exchange: Exchange,
    device: str,
    beside: Callable[[], None] = lambda: None,
) -> None:
    versions = _versions(world)
    publishing = exchange.thread(lambda: _publish(world, exchange, versions))
    with world.on(world.stream(device)):
        mine = world.write(device, world.batch((60, 25, 200)))
        followed = distributed.follow(
            dict(zip("abc", mine, strict=True)), store=STORE, peer_timeout_s=TIMEOUT_S
        )
        version = 0
        while version < len(versions):
            newer = followed.update(timeout_s=None)
            assert newer > version
            version = newer
            world.read_late(mine, versions[version - 1])  # kernels that the next update waits for
            beside()
    check_empty(exchange)
    publishing.join()
    followed.close()


def weights_are_written_behind_the_kernels_that_read_them(world: ScenarioWorld) -> None:
    """D2H of weights that are overwritten when they are published, and H2D between kernels."""
    with channels(world) as exchange:
        _follow(world, exchange, world.devices[1])


# ---- company -------------------------------------------------------------------------------------


def _both_ways(world: ScenarioWorld, checks: list[Callable[[], None]]) -> Callable[[], None]:
    """Returns a step that copies a batch to the device and another one back, on other streams."""
    device = world.devices[0]
    there, back = world.stream(device), world.stream(device)

    def step() -> None:
        batch = world.batch((30, 12))
        with world.on(there):
            world.read_late(tdcopier.start_copy(batch, device).wait(), batch)
        with world.on(back):
            source = world.write(device, batch)
            handle = tdcopier.start_copy(source, "cpu")
            handle.wait_staged()
            world.overwrite(source)
        checks.append(lambda: world.expect(handle.get(), batch))

    return step


def a_channel_beside_copies_both_ways(world: ScenarioWorld) -> None:
    """H2D from slots, beside H2D of other batches and D2H."""
    checks: list[Callable[[], None]] = []
    with small_limits(), channels(world) as exchange:
        step = _both_ways(world, checks)
        _take(world, exchange, [world.batch(sizes) for sizes in SIZES[:6]], step)
        for check in checks:
            check()


def weights_beside_copies_both_ways(world: ScenarioWorld) -> None:
    """D2H and H2D of weights on one device, beside H2D of batches and D2H."""
    checks: list[Callable[[], None]] = []
    with channels(world) as exchange:
        _follow(world, exchange, world.devices[0], _both_ways(world, checks))
        for check in checks:
            check()


def a_channel_beside_a_loader_and_memory_that_is_filled(world: ScenarioWorld) -> None:
    """H2D from slots, beside a reader that prefetches collated samples, and copies into memory."""
    device = world.devices[0]
    sizes = SIZES[2:6]

    def source() -> Iterator[Any]:
        for batch in loaded:
            yield tdcopier.collate([{"x": batch[0][:20]}, {"x": batch[0][20:]}])

    with (
        small_limits(),
        channels(world) as exchange,
        scheduled_reader(world.schedule),
        world.on(world.stream(device)),
    ):
        loaded = [world.batch((40,)) for _ in sizes]
        fills = [world.batch((50, 20)) for _ in sizes]
        left = iter(zip(loaded, fills, strict=True))
        static = world.write(device, world.batch((50, 20)))
        with tdcopier.prefetch(source(), device, depth=2) as prefetcher:

            def step() -> None:
                batch, fill = next(left)
                world.read_late([next(prefetcher)["x"].view(-1)], batch)
                tdcopier.start_copy_into(fill, static).wait()
                world.read_late(static, fill)

            _take(world, exchange, [world.batch(each) for each in sizes], step)


CHANNELS = (
    slots_are_sent_to_while_the_device_reads,
    results_on_the_host_keep_their_slots,
    a_batch_on_a_device_is_overwritten_when_it_is_sent,
    weights_are_written_behind_the_kernels_that_read_them,
    a_channel_beside_copies_both_ways,
    weights_beside_copies_both_ways,
    a_channel_beside_a_loader_and_memory_that_is_filled,
)
