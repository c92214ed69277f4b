"""Models copies of random programs: computes each result before the engine is called.

Results are compared with the host's own bytes. A *lane* is a number that selects one stream of each
device: work on a lane runs with these as the current streams. `call_model.py` models the public
calls and their leaves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from model_memory import DEVICES, JUNK, Memory, Tables, bytes_of
from not_yet import NOT_YET

import tdcopier
from tdcopier import _C

LANES = 3  # lane 0 consists of the default streams
MADE_TO_FAIL = "was made to fail"

Wrap = Callable[[list[Any]], Any]


class Sample(NamedTuple):
    head: Any
    rest: Any


# ---- plans of copies: drawn at random, printed when a program fails ------------------------------


@dataclass(frozen=True)
class LeafPlan:
    kind: str = "tensor"  # or "array", "delegated", "opaque"
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.int32  # of tensors
    layout: str = "dense"  # or "transposed", "sliced", "expanded"
    elsewhere: bool = False  # on another device than the other leaves
    memory: str = "pageable"  # of tensors on the host; or "pinned", "mapped"


@dataclass(frozen=True)
class CopyPlan:
    source: str
    target: str
    leaves: tuple[LeafPlan, ...]
    wrapping: str = "list"
    options: tuple[tuple[str, Any], ...] = ()
    call: str = "start_copy"  # or another one of `call_model.CALLS`
    into: str = "alone"  # layout of the destinations of copy_into
    into_memory: str = "pageable"  # of destinations and storages on the host
    rows: tuple[int, ...] = ()  # rows to gather or scatter

    @property
    def feature(self) -> str:
        """Names the call and the direction, for example `copy_into H2D`."""
        source, target = self.source, self.target
        if self.call == "start_gather":
            source = "cpu"
        if self.call == "start_scatter":
            target = "cpu"
        if source == target != "cpu":
            return f"{self.call} within"
        return f"{self.call} {'HD'[source != 'cpu']}2{'HD'[target != 'cpu']}"


WRAPPINGS: dict[str, Wrap] = {
    "list": list,
    "tuple": tuple,
    "dict": lambda leaves: {f"k{i}": leaf for i, leaf in enumerate(leaves)},
    "named tuple": lambda leaves: Sample(leaves[:1], leaves[1:]),
    "nested": lambda leaves: {"a": leaves[::2], 7: ({"b": tuple(leaves[1::2])}, [])},
}


def view(leaf: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "transposed" and leaf.dim() > 1:
        return leaf.transpose(0, -1)
    if layout == "sliced" and leaf.dim() > 0:
        return leaf[..., ::2]
    if layout == "expanded":
        return leaf.unsqueeze(0).expand(2, *leaf.shape)
    return leaf


# ---- copies, their sources and expected results --------------------------------------------------


@dataclass(frozen=True)
class Source:
    """Memory that a copy reads, and how to overwrite it."""

    place: str
    base: Any  # a flat tensor, or a flat array of bytes
    is_read_in_place: bool = False  # by the device, if it comes from the host

    @property
    def is_pinned(self) -> bool:
        return isinstance(self.base, torch.Tensor) and self.base.is_pinned()

    def overwrite(self, world: World) -> None:
        """Writes junk to it on the current stream, without waiting."""
        if isinstance(self.base, np.ndarray):
            self.base[:] = JUNK
        else:
            world.overwrite_tensor(self.base)

    @property
    def is_the_callers_after_wait(self) -> bool:
        """Whether the stream that was current at `wait()` may write to it after `wait()`."""
        if self.place != "cpu":
            return "device_sources_are_overwritten_after_wait" not in NOT_YET
        in_place_is_safe = "a_large_pinned_source_is_refilled_after_wait" not in NOT_YET
        return in_place_is_safe or not self.is_read_in_place


@dataclass(frozen=True)
class Same:
    """Expects the very object that was passed in."""

    value: Any


@dataclass(frozen=True)
class Moved:
    """Expects a tensor with these values and strides."""

    values: torch.Tensor  # on the host
    place: str
    requires_grad: bool = False


@dataclass(frozen=True)
class Filled:
    """Expects a destination, this very tensor, with these values."""

    leaf: torch.Tensor
    values: torch.Tensor  # on the host


@dataclass(eq=False)
class Copy:
    """One copy: its handle, and what the model knows about it."""

    plan: CopyPlan
    tree: Any = None
    destination: Any = None  # the whole tree, for calls that fill one
    destinations: list[torch.Tensor | None] = field(default_factory=list)  # one per leaf
    readers: set[torch.Stream] = field(default_factory=set)  # streams that read the result late
    is_shared: bool = False  # another thread uses it too
    expected: Any = None
    sources: list[Source] = field(default_factory=list)  # that may be overwritten later
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            ("moved", "alone", "delegated", "reused", "opaque"), 0
        )
    )
    payload_bytes: int = 0  # bytes that the engine moves
    delegated_bytes: list[int] = field(default_factory=list)
    handle: tdcopier.AsyncCopyHandle | None = None
    is_enqueued: bool = False  # as far as the model knows
    is_done: bool = False  # as far as the model knows
    fallible: frozenset[type[Exception]] = frozenset()  # errors that it may raise
    failed: type[Exception] | None = None  # the error it raised, and must raise again
    may_recover: bool = False  # it may succeed when asked again

    def let_go(self) -> None:
        self.tree = self.expected = self.handle = self.destination = None
        self.sources = []
        self.destinations = []


class World(Memory):
    """The state of a program: lanes, unique values, and checks that are still to be made."""

    def __init__(self, sim: ModuleType, tables: Tables, schedule: Any) -> None:
        super().__init__(tables)
        self.sim = sim
        self.schedule = schedule
        self.lanes = [
            {
                device: torch.sim.Stream(device=device) if i else torch.sim.default_stream(device)
                for device in DEVICES
            }
            for i in range(LANES)
        ]
        self.prepared: dict[CopyPlan, tdcopier.PreparedCopy] = {}
        # Enqueued reads, and the values they must return.
        self.reads: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.pinned: list[torch.Tensor] = []  # filled with junk by the host
        # Transfers and their bytes, as far as the model can predict them.
        self.counts_before = sim.counts()
        self.counted = [0, 0]
        self.counts_are_known = True

    @contextlib.contextmanager
    def on(self, lane: int) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for device in reversed(DEVICES):  # so that the first ends up as the current device
                stack.enter_context(torch.sim.stream(self.lanes[lane][device]))
            yield

    # ---- calls that may fail ---------------------------------------------------------------------

    def attempt(self, copy: Copy, begin: Callable[[], None]) -> None:
        """Starts a copy whose call may raise the errors that the copy may raise."""
        try:
            begin()
        except Exception as error:
            if type(error) not in copy.fallible or MADE_TO_FAIL not in str(error):
                raise
            copy.failed = type(error)

    def ask(self, copy: Copy, call: Callable[[], Any]) -> tuple[bool, Any]:
        """Returns whether the call succeeded, and its result; raises errors it may not have."""
        try:
            result = call()
        except Exception as error:
            if type(error) not in copy.fallible or MADE_TO_FAIL not in str(error):
                raise
            self.note_failure(copy, type(error))
            copy.is_enqueued = True
            return False, None
        if copy.may_recover:  # the handover failed, not the copy
            copy.failed = None
        assert copy.failed is None, f"it did not raise {copy.failed} again"
        copy.is_enqueued = True
        return True, result

    def note_failure(self, copy: Copy, kind: type[Exception]) -> None:
        assert copy.failed in (None, kind), f"{kind} after {copy.failed}"
        copy.failed = kind

    def wait_staged(self, copy: Copy) -> None:
        """Waits until the sources may be written, which holds even if the copy fails."""
        assert copy.handle is not None
        if copy.plan.call == "start_gather":
            copy.handle.wait_gathered()
            return
        copy.handle.wait_staged()
        copy.is_enqueued = True

    def get(self, copy: Copy) -> tuple[bool, Any]:
        assert copy.handle is not None
        succeeded, result = self.ask(copy, copy.handle.get)
        if succeeded:
            self.note_done(copy)
        return succeeded, result

    def note_done(self, copy: Copy) -> None:
        if not copy.is_done:
            copy.is_done = copy.is_enqueued = True
            self.check_stats(copy)

    def read_now(self, copy: Copy, result: Any) -> None:
        """Checks the values, and waits for the current streams as far as that requires."""
        for got, wanted in self.matched(result, copy.expected):
            self.check_values(got, wanted)

    def read_late(self, copy: Copy, result: Any) -> None:
        """Enqueues reads on the current stream, as a kernel would read; `drain` checks them."""
        for got, wanted in self.matched(result, copy.expected):
            if got.device.type == "cpu":
                self.check_values(got, wanted)
                continue
            stream = torch.sim.current_stream(got.device)
            copy.readers.add(stream)
            self.read_leaf_late(got, wanted)
            if copy.destinations:  # the caller's memory, perhaps another stream's
                got.record_stream(stream)

    def read_leaf_late(self, got: torch.Tensor, wanted: torch.Tensor) -> None:
        kept = torch.empty(got.shape, dtype=got.dtype, device=got.device)
        kept.copy_(got.detach(), non_blocking=True)
        self.reads.append((kept, wanted))

    def matched(self, got: Any, expected: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Checks everything but values; yields each tensor with the values it must have."""
        if isinstance(expected, Same):
            assert got is expected.value
        elif isinstance(expected, Filled):
            assert got is expected.leaf
            yield got, expected.values
        elif isinstance(expected, Moved):
            wanted = expected.values
            for name in ("dtype", "shape"):
                assert getattr(got, name) == getattr(wanted, name), name
            assert got.stride() == wanted.stride()
            assert str(got.device) == expected.place
            assert got.requires_grad == expected.requires_grad
            yield got, wanted
        else:
            assert type(got) is type(expected)
            assert len(got) == len(expected)
            if isinstance(expected, dict):
                assert list(got) == list(expected)
                got, expected = got.values(), expected.values()
            for part, wanted in zip(got, expected, strict=True):
                yield from self.matched(part, wanted)

    def check_values(self, got: torch.Tensor, wanted: torch.Tensor) -> None:
        if got.device.type != "cpu" and got.numel():
            self.counted[0] += 1
            self.counted[1] += got.numel() * got.element_size()
            got = got.detach().cpu()
        seen, should = bytes_of(got), bytes_of(wanted)
        assert seen == should, f"{seen[:16].hex(' ')}... is not {should[:16].hex(' ')}..."

    def check_stats(self, copy: Copy) -> None:
        """Checks the statistics of a copy that is done."""
        assert copy.handle is not None
        stats, options = copy.handle.stats, dict(copy.plan.options)
        assert (stats.transfers > 0) == (stats.transfer_bytes > 0)
        assert not stats.background or options.get("use_background_thread", True)
        self.counted[0] += stats.transfers
        self.counted[1] += stats.transfer_bytes
        if copy.destinations or copy.plan.call == "start_gather":
            # No handle counts the transfers of leaves that are delegated to torch.
            self.counts_are_known &= stats.delegated_leaves == stats.fallbacks == 0
            return
        counts = copy.counts
        told = (stats.packed_leaves, stats.alone_leaves, *stats[2:5])
        packed = counts["moved"] - counts["alone"]
        rest = (counts[name] for name in ("alone", "delegated", "reused", "opaque"))
        assert told == (packed, *rest)
        gap = 2 * max(16, options.get("min_packed_alignment_bytes", 16))
        least = copy.payload_bytes
        assert least <= stats.transfer_bytes <= least + gap * counts["moved"]

    # ---- everything else -------------------------------------------------------------------------

    def overwrite(self, copy: Copy) -> None:
        """Overwrites the sources once: a second write would have to be ordered after this one."""
        for source in copy.sources:
            source.overwrite(self)
        copy.sources = []

    def overwrite_after_wait(self, copy: Copy) -> None:
        """Overwrites sources on the streams that were current when `wait()` returned."""
        for source in copy.sources:
            if source.is_the_callers_after_wait:
                source.overwrite(self)
        copy.sources = [source for source in copy.sources if not source.is_the_callers_after_wait]

    def take_back(self, copy: Copy) -> None:
        """Writes to the destinations of a failed copy, and checks that these values stay."""
        for leaf in copy.destinations:
            if not isinstance(leaf, torch.Tensor):
                continue
            self.overwrite_tensor(leaf)
            junk = self.tables.junk(leaf.dtype).expand(leaf.shape)
            if leaf.device.type == "cpu":
                self.reads.append((leaf, junk))
            else:
                self.read_leaf_late(leaf, junk)

    def drop(self, copy: Copy) -> None:
        if not copy.is_done:
            self.counts_are_known = False
        copy.let_go()

    def churn(self, lane: int, device: str, size: int) -> None:
        """Uses memory of a stream for other data, in the sizes of chunks and sources."""
        with self.on(lane):
            for part in (size, size, size // 2, 64):
                junk = torch.empty(part, dtype=torch.uint8, device=device)
                self.overwrite_tensor(junk)

    def churn_host(self, sizes: list[int]) -> None:
        for _ in range(2):
            self.schedule.point()
            for size in sizes:
                torch.full((size,), JUNK, dtype=torch.uint8)

    def pin(self, size: int) -> None:
        self.pinned.append(torch.full((size,), JUNK, dtype=torch.uint8, pin_memory=True))

    def synchronize(self) -> None:
        for device in DEVICES:
            torch.sim.synchronize(device)

    def drain(self) -> None:
        """Waits for all enqueued work; checks the reads, and the junk in pinned memory."""
        self.synchronize()
        reads, self.reads = self.reads, []
        for got, wanted in reads:
            self.check_values(got, wanted)
        for leaf in self.pinned:
            assert set(bytes_of(leaf)) == {JUNK}
        self.pinned.clear()

    def check_counts(self) -> None:
        """Checks that the device saw only the engine's transfers and the model's own."""
        if not self.counts_are_known:
            return
        before, now = self.counts_before, self.sim.counts()
        for i in range(2):
            seen = sum(now[way][i] - before[way][i] for way in range(3))
            assert seen == self.counted[i], f"{seen} is not {self.counted[i]}"

    def clear(self) -> None:
        self.prepared.clear()
        self.reads.clear()
        self.pinned.clear()


def staging_bytes() -> int:
    """Returns the staging bytes of the device that has the most."""
    return max(_C.staging_bytes(device) for device in DEVICES)
