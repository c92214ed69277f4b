"""A model of copies for random programs: what they must give is known before the engine is asked.

Every leaf has bytes that no other leaf of the program has, cut from one table of random ones. What
arrives is held against the host's own bytes. A *lane* is a number, for one stream of each device:
what is done on a lane is done with these as the current streams.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

import tdcopier
from tdcopier import _C

DEVICES = ("sim:0", "sim:1")
PLACES = ("cpu", *DEVICES)
LANES = 3  # the first has the default streams
MADE_TO_FAIL = "was made to fail"

_TABLE_BYTES = 1 << 16
_JUNK_BYTES = 1 << 10  # at the beginning: no leaf is larger
_JUNK = 0x77

Wrap = Callable[[list[Any]], Any]


class Sample(NamedTuple):
    head: Any
    rest: Any


# ---- what is to be copied: drawn, printed when a program fails -----------------------------------


@dataclass(frozen=True)
class LeafPlan:
    kind: str = "tensor"  # or "array", "delegated", "opaque"
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.int32  # of tensors
    layout: str = "dense"  # or "transposed", "sliced", "expanded"
    elsewhere: bool = False  # not where the other leaves are


@dataclass(frozen=True)
class CopyPlan:
    source: str
    target: str
    leaves: tuple[LeafPlan, ...]
    wrapping: str = "list"
    options: tuple[tuple[str, Any], ...] = ()


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


# ---- what becomes of it --------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """Memory that a copy reads, and how to write to it."""

    place: str
    base: Any  # a flat tensor, or a flat array of bytes

    def overwrite(self, world: World) -> None:
        """On the current stream, without waiting for anything."""
        if isinstance(self.base, np.ndarray):
            self.base[:] = _JUNK
            return
        self.base.copy_(world.junk(self.place, self.base), non_blocking=True)
        if self.place != "cpu" and self.base.numel():
            # It may be freed with this write pending, which is on another stream than its own.
            self.base.record_stream(torch.sim.current_stream(self.place))


@dataclass(frozen=True)
class Same:
    """The very object that was given."""

    value: Any


@dataclass(frozen=True)
class Moved:
    """A tensor with these values and strides."""

    values: torch.Tensor  # on the host
    place: str
    requires_grad: bool = False


@dataclass(eq=False)
class Copy:
    """One copy: its handle, and what the host knows about it."""

    plan: CopyPlan
    tree: Any = None
    expected: Any = None
    sources: list[Source] = field(default_factory=list)  # those that may be written to, some day
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            ("moved", "alone", "delegated", "reused", "opaque"), 0
        )
    )
    payload_bytes: int = 0  # that the engine moves
    delegated_bytes: list[int] = field(default_factory=list)
    handle: tdcopier.AsyncCopyHandle | None = None
    is_enqueued: bool = False  # known to be
    is_done: bool = False  # known to be
    fallible: frozenset[type[Exception]] = frozenset()  # what it may raise
    failed: type[Exception] | None = None  # what it did raise, and must raise again

    def let_go(self) -> None:
        self.tree = self.expected = self.handle = None
        self.sources = []

    @property
    def places(self) -> set[str]:
        return {source.place for source in self.sources}


KINDS = ("moved", "alone", "delegated", "reused", "opaque")


def flat(leaf: torch.Tensor) -> torch.Tensor:
    """A dense tensor in the order of its memory."""
    return leaf.detach().as_strided((leaf.numel(),), (1,), leaf.storage_offset())


def bytes_of(leaf: torch.Tensor) -> bytes:
    return flat(leaf).view(torch.uint8).numpy().tobytes() if leaf.numel() else b""


class Tables:
    """The random bytes of which all leaves are cut, on each place."""

    def __init__(self) -> None:
        random = np.random.default_rng(0).integers(0, 256, _TABLE_BYTES, dtype=np.uint8)
        random[:_JUNK_BYTES] = _JUNK
        host = torch.from_numpy(random)
        self.by_place = {place: host.to(place) for place in PLACES}

    def cut(self, place: str, dtype: torch.dtype, begin: int, elements: int) -> torch.Tensor:
        size = elements * dtype.itemsize
        return self.by_place[place][begin : begin + size].view(dtype)


class World:
    """Where a program runs: lanes, unique values, and what is still to be checked."""

    def __init__(self, sim: ModuleType, tables: Tables, schedule: Any) -> None:
        self.sim = sim
        self.tables = tables
        self.schedule = schedule
        self.lanes = [
            {
                device: torch.sim.Stream(device=device) if i else torch.sim.default_stream(device)
                for device in DEVICES
            }
            for i in range(LANES)
        ]
        self.next_begin = _JUNK_BYTES
        # Reads that are enqueued, and what they must give.
        self.reads: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.pinned: list[torch.Tensor] = []  # that the host has filled with junk
        # Transfers and their bytes, as far as they can be told beforehand.
        self.counts_before = sim.counts()
        self.counted = [0, 0]
        self.counts_are_known = True

    @contextlib.contextmanager
    def on(self, lane: int) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for device in reversed(DEVICES):  # the first is the current one then
                stack.enter_context(torch.sim.stream(self.lanes[lane][device]))
            yield

    def junk(self, place: str, like: torch.Tensor) -> torch.Tensor:
        return self.tables.cut(place, like.dtype, 0, like.numel())

    # ---- start -----------------------------------------------------------------------------------

    def _unique(self, size: int) -> int:
        begin = self.next_begin
        if begin + size > _TABLE_BYTES:
            begin = _JUNK_BYTES
        self.next_begin = begin + -(-size // 16) * 16
        return begin

    def prepare(self, plan: CopyPlan) -> Copy:
        """Make the sources. Those on a device are written when their stream comes to it."""
        copy = Copy(plan)
        pairs = [self._leaf(copy, leaf) for leaf in plan.leaves]
        wrap = WRAPPINGS[plan.wrapping]
        copy.tree = wrap([value for value, _ in pairs])
        copy.expected = wrap([expected for _, expected in pairs])
        return copy

    def _leaf(self, copy: Copy, leaf: LeafPlan) -> tuple[Any, Any]:
        target, options = copy.plan.target, dict(copy.plan.options)
        if leaf.kind == "opaque":
            value = f"opaque {self.next_begin}"
            copy.counts["opaque"] += 1
            return value, Same(value)
        elements = int(np.prod(leaf.shape))
        if leaf.kind == "array":
            base = self.tables.cut("cpu", torch.uint8, self._unique(8 * elements), 8 * elements)
            array_bytes = base.numpy().copy()
            value: Any = array_bytes.view(">i8").reshape(leaf.shape)
            expected = torch.from_numpy(value.astype("=i8"))
            if target == "cpu":  # perhaps over the same memory
                copy.counts["reused"] += 1
                return value, Moved(expected, "cpu")
            source = Source("cpu", array_bytes)
        else:
            place = copy.plan.source
            if leaf.elsewhere:
                place = PLACES[(PLACES.index(place) + 1) % len(PLACES)]
            dtype = torch.float32 if leaf.kind == "delegated" else leaf.dtype
            begin = self._unique(elements * dtype.itemsize)
            on_host = self.tables.cut("cpu", dtype, begin, elements)
            base = torch.empty(elements, dtype=dtype, device=place)
            base.copy_(self.tables.cut(place, dtype, begin, elements), non_blocking=True)
            source = Source(place, base)
            layout = "dense" if leaf.kind == "delegated" else leaf.layout
            value = view(base.view(leaf.shape), layout)
            if leaf.kind == "delegated":
                value = value.detach().requires_grad_()
            if place == target:
                copy.counts["reused"] += 1
                return value, Same(value)
            expected = view(on_host.view(leaf.shape), layout).clone()
        copy.sources.append(source)
        size = expected.numel() * expected.element_size()
        if leaf.kind == "delegated":
            copy.counts["delegated"] += 1
            copy.delegated_bytes += [size] if size else []
            return value, Moved(expected, target, True)
        copy.counts["moved"] += 1
        copy.payload_bytes += size
        packs = options.get("pack_cpu_tensors", True)
        if not packs or size > options.get("max_packed_chunk_bytes", 1 << 25):
            copy.counts["alone"] += 1
        return value, Moved(expected, target)

    def launch(self, copy: Copy) -> None:
        copy.handle = tdcopier.start_copy(copy.tree, copy.plan.target, **dict(copy.plan.options))
        copy.tree = None
        self.counted[0] += len(copy.delegated_bytes)
        self.counted[1] += sum(copy.delegated_bytes)

    # ---- ask -------------------------------------------------------------------------------------

    def ask(self, copy: Copy, call: Callable[[], Any]) -> tuple[bool, Any]:
        """Whether the call succeeded, and with what; it may fail only as this copy may."""
        try:
            result = call()
        except Exception as error:
            if type(error) not in copy.fallible or MADE_TO_FAIL not in str(error):
                raise
            self.note_failure(copy, type(error))
            copy.is_enqueued = True
            return False, None
        assert copy.failed is None, f"it did not raise {copy.failed} again"
        copy.is_enqueued = True
        return True, result

    def note_failure(self, copy: Copy, kind: type[Exception]) -> None:
        assert copy.failed in (None, kind), f"{kind} after {copy.failed}"
        copy.failed = kind

    def wait_staged(self, copy: Copy) -> None:
        """From now on the sources may be written, even if the copy has failed."""
        assert copy.handle is not None
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
        """Check values, and wait for the current streams as far as that needs it."""
        for got, wanted in self.matched(result, copy.expected):
            self.check_values(got, wanted)

    def read_late(self, copy: Copy, result: Any) -> None:
        """Enqueue on the current stream what a kernel would read; checked at `drain`."""
        for got, wanted in self.matched(result, copy.expected):
            if got.device.type == "cpu":
                self.check_values(got, wanted)
                continue
            kept = torch.empty(got.numel(), dtype=got.dtype, device=got.device)
            kept.copy_(flat(got), non_blocking=True)
            self.reads.append((kept, flat(wanted)))

    def matched(self, got: Any, expected: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Check all but values; give each tensor with the host's values for it."""
        if isinstance(expected, Same):
            assert got is expected.value
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
            got = flat(got).cpu()
        seen, should = bytes_of(got), bytes_of(wanted)
        assert seen == should, f"{seen[:16].hex(' ')}... is not {should[:16].hex(' ')}..."

    def check_stats(self, copy: Copy) -> None:
        """Of a copy that is done."""
        assert copy.handle is not None
        stats, counts, options = copy.handle.stats, copy.counts, dict(copy.plan.options)
        told = (stats.packed_leaves, stats.alone_leaves, *stats[2:5])
        packed = counts["moved"] - counts["alone"]
        rest = (counts[name] for name in ("alone", "delegated", "reused", "opaque"))
        assert told == (packed, *rest)
        gap = 2 * max(16, options.get("min_packed_alignment_bytes", 16))
        least = copy.payload_bytes
        assert least <= stats.transfer_bytes <= least + gap * counts["moved"]
        assert (stats.transfers > 0) == (stats.transfer_bytes > 0)
        assert not stats.background or options.get("use_background_thread", True)
        self.counted[0] += stats.transfers
        self.counted[1] += stats.transfer_bytes

    # ---- everything else -------------------------------------------------------------------------

    def overwrite(self, copy: Copy) -> None:
        """Once: a second write on another stream would have to be ordered behind this one."""
        for source in copy.sources:
            source.overwrite(self)
        copy.sources = []

    def drop(self, copy: Copy) -> None:
        if not copy.is_done:
            self.counts_are_known = False
        copy.let_go()

    def churn(self, lane: int, device: str, size: int) -> None:
        """Use memory of a stream for something else, in the sizes that chunks and sources have."""
        with self.on(lane):
            for part in (size, size, size // 2, 64):
                junk = torch.empty(part, dtype=torch.uint8, device=device)
                junk.copy_(self.junk(device, junk), non_blocking=True)

    def churn_host(self, sizes: list[int]) -> None:
        for _ in range(2):
            self.schedule.point()
            for size in sizes:
                torch.full((size,), _JUNK, dtype=torch.uint8)

    def pin(self, size: int) -> None:
        self.pinned.append(torch.full((size,), _JUNK, dtype=torch.uint8, pin_memory=True))

    def synchronize(self) -> None:
        for device in DEVICES:
            torch.sim.synchronize(device)

    def drain(self) -> None:
        """Wait for everything that is enqueued; check what was read, and what nobody may write."""
        self.synchronize()
        reads, self.reads = self.reads, []
        for got, wanted in reads:
            self.check_values(got, wanted)
        for leaf in self.pinned:
            assert set(bytes_of(leaf)) == {_JUNK}
        self.pinned.clear()

    def check_counts(self) -> None:
        """The engine's transfers and the model's own ones are all that the device has seen."""
        if not self.counts_are_known:
            return
        before, now = self.counts_before, self.sim.counts()
        for i in range(2):
            seen = sum(now[way][i] - before[way][i] for way in range(3))
            assert seen == self.counted[i], f"{seen} is not {self.counted[i]}"

    def clear(self) -> None:
        self.reads.clear()
        self.pinned.clear()


def staging_bytes() -> int:
    """On the device that has most."""
    return max(_C.staging_bytes(device) for device in DEVICES)
