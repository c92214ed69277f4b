"""Sentences of the docs with figures of results: `report.py --readme` writes the figures anew."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tool.tables import OURS

Named = Mapping[str, dict[str, Any]]
"""Results by the name of the benchmark."""

FIGURE = r"\d[\d,]*(?:\.\d+)?"
"""How a figure is found: digits with commas or a point between them."""


class Sentence(NamedTuple):
    """A part of a page; each ``{}`` is a figure."""

    page: str
    text: str
    figures: Callable[[Named], Sequence[float]]


def rewritten(sentence: Sentence, page: str, results: Named) -> str:
    """Return the page with the figures of these results in the sentence.

    Raises:
        ValueError: The page does not have the sentence, or has it twice.

    """
    pattern = re.escape(sentence.text).replace(r"\{\}", FIGURE)
    if len(re.findall(pattern, page)) != 1:
        raise ValueError(f"{sentence.page} does not have this once: {sentence.text}")
    made = sentence.text.format(*map(short, sentence.figures(results)))
    return re.sub(pattern, lambda _: made, page)


def short(number: float) -> str:
    """Return a number with two digits that count, and no fewer than it has before the point.

    Raises:
        ValueError: It is so small, or negative, that the text would be no `FIGURE`.

    """
    if number < 0.001:
        raise ValueError(f"{number} is no figure for a sentence")
    if number >= 9.95:  # which rounds to 10
        return f"{number:,.0f}"
    return f"{number:.1f}" if number >= 1 else f"{number:.2g}"


def _ms(times: Mapping[str, Any], *ways: str) -> list[float]:
    return [times[way]["median_us"] / 1e3 for way in ways]


def _queue(results: Named) -> list[float]:
    sent = results["travel"]["sent"]
    ways = "leaf by leaf", "tdcopier, pack() to tree()"
    batches = sent["detection batch"], sent["16 leaves"]
    return [ms for batch in batches for ms in _ms(batch["queue"]["contenders"], *ways)]


def _channel(results: Named) -> list[float]:
    times = results["channels"]["cases"]["200 leaves of 8 KB"]["wall_us"]
    single = _ms(times, "one tensor, send and recv", "one tensor, isend and irecv of two")
    return [*_ms(times, OURS), *sorted(single), *_ms(times, "each leaf, send and recv")]


def _broadcast(results: Named) -> list[float]:
    times = results["collectives"]["cases"]["500 leaves, 64 MB"]["wall_us"]
    return _ms(times, OURS, "one tensor, broadcast", "each leaf, broadcast")


def _one_tensor_to_a_server(results: Named) -> list[float]:
    ways = "one tensor and an answer", "an answer and one tensor"
    cases = results["remote_replay"]["cases"].values()
    single = [ms for case in cases for ms in _ms(case["wall_us"], *ways)]
    return [min(single), max(single)]


def _served(prefix: str) -> Callable[[Named], list[float]]:
    ways = f"{prefix}, extend", f"{prefix}, sample"

    def figures(results: Named) -> list[float]:
        cases = results["remote_replay"]["cases"]
        order = cases["200 leaves of 8 KB"], cases["5 leaves of 320 KB"]
        return [ms for case in order for ms in _ms(case["wall_us"], *ways)]

    return figures


def _check_on_device(results: Named) -> list[float]:
    added = []
    for case in results["gather"]["from_pinned"].values():
        on_host, on_device = _ms(case["contenders"], OURS, f"{OURS}, index on the device")
        added.append((on_device - on_host) * 1e3)
    return [min(added), max(added)]


def _rows_by_kernel(results: Named) -> list[float]:
    ranges = []
    for way in (f"{OURS}, by host threads", "index_select, pin_memory() and .to() per leaf"):
        over = [1 / case["ratios"][way] for case in results["gather"]["from_pinned"].values()]
        ranges += [min(over), max(over)]
    return ranges


def _pinning_of_a_gigabyte(results: Named) -> list[float]:
    request = results["pinning"]["requests"]["1 tensor of 1 GiB"]
    cold_ms = request["times"]["lease of the pool"]["cold"]["all_ms"]
    return [cold_ms / request["bytes"] * 1e9]


def _new_pinned_memory(results: Named) -> list[float]:
    asked = results["pinning"]["requests"]["510 tensors of 5.36 GB together"]
    new_ms = asked["times"]["torch.empty(pin_memory=True)"]["cold"]["all_ms"]
    parked = results["park"]["parked"]["510 tensors"]["park"]
    return [asked["bytes"] / 1e9, new_ms / 1e3, *(ms / 1e3 for ms in _ms(parked, OURS))]


def _saved_by_reuse(results: Named) -> list[float]:
    batches = results["h2d"]["workloads"]
    small = batches["detection_batch"], batches["flat_dict"]
    over = [_ms(batch["contenders"], f"{OURS}, prepared, outputs reused", OURS) for batch in small]
    saved = [100 * (1 - reused / plain) for reused, plain in over]
    return [min(saved), max(saved)]


SENTENCES = (
    Sentence(
        "docs/guide/prepared_copies.md",
        "This saves {} to {} % of the time for many small tensors.",
        _saved_by_reuse,
    ),
    Sentence(
        "docs/guide/between_processes.md",
        "a queue takes {} ms for 528 leaves (153 KB) one by one, and {} from `pack()` to `tree()`; "
        "for 16 leaves (67 MB), {} and {}",
        _queue,
    ),
    Sentence(
        "docs/guide/which_call.md",
        "many leaves one by one: a queue of `multiprocessing` takes {} ms for 528.",
        lambda results: _queue(results)[:1],
    ),
    Sentence(
        "docs/guide/scale_out.md",
        "200 leaves (1.6 MB) take {} ms, one tensor {} to {}, and a gloo message for each leaf {}.",
        _channel,
    ),
    Sentence(
        "docs/guide/scale_out.md",
        "500 leaves of 64 MB take {} ms, one tensor {}, and a broadcast for each leaf {}.",
        _broadcast,
    ),
    Sentence(
        "docs/guide/replay_service.md",
        "(one tensor and an answer: {} to {})",
        _one_tensor_to_a_server,
    ),
    Sentence(
        "docs/guide/replay_service.md",
        "| of a client | {}, {} | {}, {} |",
        _served(OURS),
    ),
    Sentence(
        "docs/guide/replay_service.md",
        "| of torchrl's `RemoteTensorDictReplayBuffer` over RPC | {}, {} | {}, {} |",
        _served("torchrl by RPC"),
    ),
    Sentence(
        "docs/design/data_path.md",
        "it adds {} to {} us, and saves the host's wait",
        _check_on_device,
    ),
    Sentence(
        "docs/design/data_path.md",
        "takes {} to {} of the time of host threads, and {} to {} of that of `index_select`",
        _rows_by_kernel,
    ),
    Sentence(
        "docs/guide/park.md",
        "in about {} ms per gigabyte on an H200's host",
        _pinning_of_a_gigabyte,
    ),
    Sentence(
        "docs/design/engine.md",
        "{} GB take torch's allocator {} s, and the transfer {} s",
        _new_pinned_memory,
    ),
)
