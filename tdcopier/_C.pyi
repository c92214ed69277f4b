import enum
import os
from collections.abc import Callable, Generator, Sequence
from types import GenericAlias
from typing import Any, ClassVar, Generic, Literal, TypeVar, final

import torch

from tdcopier import _testing
from tdcopier._rows.request import RowIndex, RowReaders
from tdcopier._stats import CopyStats

_T_co = TypeVar("_T_co", covariant=True)
_T = TypeVar("_T")

testing = _testing

MAX_INLINE_BYTES: int
STAGING_BUFFER_BYTES: int
DEFAULT_STAGING_LIMIT_BYTES: int
DEFAULT_RUN_AHEAD_LIMIT: int

class InternalError(RuntimeError):
    """An invariant of the engine does not hold. This is a bug in tdcopier: please report it.

    For example::

        try:
            batch = tdcopier.copy(batch, "cuda")
        except tdcopier.InternalError:
            print(tdcopier.info())  # for the report
            raise
    """

class AsyncCopyHandle(Generic[_T_co]):
    """The handle of a copy, as `start_copy` and the other `start_` functions return it.

    For example::

        handle = tdcopier.start_copy(batch, "cuda")
        following = next(batches)  # meanwhile
        loss = model(handle.wait())
        if handle.ready() and handle.stats.fallbacks:
            print(handle.stats)

    You may drop it at any time: the copy goes on, and nothing blocks or leaks. Any thread may use
    it. Its methods release the GIL while they wait.
    """

    @property
    def stats(self) -> CopyStats:
        """Counts of this copy, a `CopyStats`; complete once `ready()` returns True."""
    def ready(self) -> bool:
        """Return whether the copy has ended, with a result or an error. Never blocks."""
    def get(self) -> _T_co:
        """Block until the copy has arrived, and return the result, the same object at each call.

        The result is safe on the calling thread's current stream of the target device: its memory
        is not reused while that stream can still read it. Another stream that reads it needs
        `wait(stream)`, a `get()` while it is current, or `record_stream`.

        Raises:
            Exception: the error of a copy that failed, for example `torch.OutOfMemoryError`; every
                time.
            RuntimeError: the current stream is capturing a CUDA graph.
        """
    def wait(self, stream: torch.Stream | None = None) -> _T_co:
        """Make a stream wait for the copy, and return the result, the same object as `get()`.

        Work that is enqueued on the stream after this call sees the result. The host blocks only
        until host sources have been read, so you may then write to them, pinned ones included:
        until the last byte is in a staging buffer, which is already so for small copies, or until
        the device has read large pinned leaves in place. It does not wait for rows that an index on
        the device selects: for those there is `wait_gathered`. The calling thread's current stream
        of each device with sources waits until they have been read, so work that is enqueued there
        after this call may overwrite them. If the target is the host, this is `get()`.

        Args:
            stream: a `torch.Stream` of the target device; None means the calling thread's current
                one.

        Raises:
            Exception: the error of a copy that is known to have failed; every time. If the device
                fails later, the stream does too.
            TypeError: `stream` is not a stream.
            ValueError: `stream` is on another device.
            RuntimeError: the stream, or the current stream of a source's device, is capturing a
                CUDA graph.
        """
    def wait_staged(self) -> None:
        """Block until you may write to the sources again, which is before the copy is done.

        When it returns, host sources have been read: they are in staging buffers, or the device has
        read large pinned leaves in place. Sources on a device are read in the order of streams: it
        returns when their reads are enqueued, and the calling thread's current stream of that
        device waits for them, so work that is enqueued there after this call may overwrite them. A
        copy that has failed reads nothing any more, and this returns: `get` and `wait` raise its
        error.

        Raises:
            RuntimeError: a source is on a device whose current stream is capturing a CUDA graph.
        """
    def wait_gathered(self) -> None:
        """Block until every row has been read: `wait_staged`, under the name that fits a gather.

        Raises:
            IndexError: a row of an index on the device is out of range.
        """
    def __class_getitem__(cls, item: Any, /) -> GenericAlias: ...
    def __await__(self) -> Generator[Any, None, _T_co]: ...
    def _enqueued(self) -> _T_co: ...
    def _hand_over(self, stream: torch.Stream | None = None) -> _T_co: ...
    def _device_access(self) -> DeviceAccess: ...
    def _send_if_staged(self) -> bool: ...
    def _is_wait_instant(self) -> bool: ...
    def _refuse_in_child(self) -> None: ...
    @property
    def _reuses_leaves(self) -> bool: ...

class WhyDelegated(enum.Enum):
    CLASS = 0
    OBJECT = 1
    TORCH_MODE = 2
    DEVICE = 3
    NOT_PLAIN = 4

class Reason(enum.Enum):
    PACKED = 0
    PACKED_BY_KERNEL = 1
    PACKING_IS_OFF = 2
    LARGE = 3
    LARGER_THAN_CHUNK = 4
    CLASS = 5
    OBJECT = 6
    TORCH_MODE = 7
    DEVICE = 8
    OTHER_KEYS = 9
    NAMED = 10
    NO_STORAGE = 11
    GRADIENT = 12
    FORWARD_GRADIENT = 13
    TOO_LARGE = 14
    UNALIGNED = 15
    REUSED = 16
    OPAQUE = 17

class Step(enum.Enum):
    INDEX = 0
    KEY = 1
    NESTED_KEY = 2
    ATTRIBUTE = 3

class MemoryPlace(enum.Enum):
    UNKNOWN = 0
    HOST = 1
    DEVICE = 2
    OTHER_DEVICE = 3

def set_hooks(**hooks: Any) -> None: ...

class Sending(enum.Enum):
    AT_ONCE = 0
    DEFERRED = 1
    DEFERRED_ALONE = 2
    DEFERRED_STAGED = 3

class OnUnknown(enum.Enum):
    REFUSE_ROOT = 0
    IGNORE = 1
    WARN = 2
    RAISE = 3

class CopyOptions:
    def __init__(
        self,
        use_pinned_staging: bool,
        pack_cpu_tensors: bool,
        min_packed_alignment_bytes: int,
        max_packed_chunk_bytes: int,
        use_background_thread: bool,
        /,
    ) -> None: ...
    def with_on_unknown(self, on_unknown: OnUnknown, /) -> CopyOptions: ...
    def with_sending(self, sending: Sending, in_callers_order: bool, /) -> CopyOptions: ...
    def requiring_pinned_results(self) -> CopyOptions: ...
    def reading_pinned_in_place(self) -> CopyOptions: ...

class StorageMemory:
    MISSING: ClassVar[int]
    def __init__(self, tensors: list[torch.Tensor], /) -> None: ...
    @property
    def numbers(self) -> list[int]: ...
    @property
    def sizes_bytes(self) -> list[int]: ...
    def tensors(self) -> list[torch.Tensor]: ...
    def like(
        self, tensors: list[torch.Tensor], bytes: list[torch.Tensor], /
    ) -> list[torch.Tensor]: ...
    def take_out(self, users: list[torch.Stream], message: str, /) -> None: ...
    def are_waiting(self) -> list[bool]: ...
    def put_in(self, memory: list[torch.Tensor | None], /) -> None: ...
    def release_kept(self) -> None: ...
    @property
    def is_out(self) -> bool: ...

class PreparedCopy:
    def __init__(
        self,
        example: Any,
        device: str | torch.device | int,
        options: CopyOptions,
        reuse_outputs: bool,
        /,
    ) -> None: ...
    def start_copy(self, data: _T, sending: Sending | None, /) -> AsyncCopyHandle[_T]: ...
    def layout_of(
        self, data: Any, /
    ) -> tuple[
        list[list[tuple[str, tuple[str, str, tuple[int, ...], tuple[int, ...], bool]]]],
        list[str],
        list[str],
        bool,
    ]: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def fits(self) -> int: ...
    @property
    def misfits(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def keeps_outputs(self) -> bool: ...

def start_copy(
    data: _T,
    device: str | torch.device | int,
    options: CopyOptions,
    /,
) -> AsyncCopyHandle[_T]: ...

@final
class Parcel:
    """A nested batch as one run of bytes: what `pack` returns.

    For example::

        tdcopier.pack(batch).save("batch.parcel")
        parcel = tdcopier.Parcel.load("batch.parcel")  # perhaps in another process
        print(parcel.nbytes, parcel.needs_pickle)
        batch = parcel.to("cuda")

    It has the buffer protocol, so `bytes(parcel)`, `memoryview(parcel)`, files and sockets take all
    its bytes without walking leaves. `start_copy` and the other calls of this package take it in
    the place of its tree, anywhere in a batch. Its bytes change only if you write to them: to the
    leaves of `tree()`, whose memory they are, or by `copy_into`.
    """

    def tree(self) -> Any:
        """Return the tree, built anew by each call.

        Its leaves are views of the parcel's memory, without a copy. Each view keeps the whole
        parcel alive: `clone()` one that outlives its batch by far. Leaves of a parcel in read-only
        memory, for example one from `bytes`, are copied, and so are those of a loader's batch in a
        slab that is pinned: to pinned memory of torch's. A parcel on a device gives leaves there
        with memory of their own, written on the current stream. Values that were pickled are
        unpickled.

        Raises:
            Exception: what the code of a pickled class raises.
        """
    @property
    def needs_pickle(self) -> bool:
        """Whether values of the tree are pickled in it: then `from_buffer` needs `allow_pickle`."""
    @property
    def nbytes(self) -> int:
        """The number of bytes of header, layout and leaves together."""
    @property
    def device(self) -> torch.device:
        """The `torch.device` of the memory, which is that of the leaves that were packed."""
    def is_pinned(self) -> bool:
        """Return whether the leaves are in pinned memory, from which a device reads them without
        staging.
        """
    @staticmethod
    def from_buffer(buffer: Any, *, allow_pickle: bool = False) -> Parcel:
        """Read a parcel from its bytes, which may come from anywhere.

        Args:
            buffer: an object with the buffer protocol, or a uint8 tensor on the host or a device.
                The parcel uses its memory without a copy, if it begins at a multiple of 8 bytes (of
                16 for complex128 leaves and pickled values): do not write to it or resize it
                meanwhile.
            allow_pickle: accept bytes with pickled values. Unpickling runs any code that the bytes'
                maker has chosen: only for bytes from a source that you trust.

        Raises:
            ValueError: the bytes are no parcel, are damaged, are of another version of the format,
                or have pickled values and `allow_pickle` is False. No code of the bytes has run.
            TypeError: `buffer` has no buffer.
        """
    @staticmethod
    def load(path: str | os.PathLike[str], *, allow_pickle: bool = False) -> Parcel:
        """Map a file that `save` has written; leaves are read from disk when they are used.

        Writing to the leaves of `tree()` changes neither the file nor another process's leaves. The
        file must not be shortened while the parcel is in use; `save` replaces files instead.

        Raises:
            OSError: the file cannot be read.
            ValueError: as `from_buffer`.
        """
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all bytes to a file, which replaces one of this name once it is complete."""
    def to(self, device: str | torch.device | int, non_blocking: bool = False) -> Any:
        """Return the tree on a device, as trainers that call ``batch.to(device)`` expect.

        With `non_blocking` it returns before the bytes have arrived; the current stream waits for
        them.
        """
    def pin_memory(self, device: str | torch.device | int | None = None) -> Parcel:
        """Return the parcel in pinned memory, from which a device reads it without staging.

        `DataLoader(..., pin_memory=True)` calls this for a batch that is a parcel, in some versions
        of torch with a device, which changes nothing. A parcel that is pinned is returned as it is.
        """
    def __buffer__(self, flags: int, /) -> memoryview: ...
    @property
    def _is_read_only(self) -> bool: ...
    @property
    def _may_unpickle(self) -> bool: ...
    @property
    def _head(self) -> bytes: ...
    @property
    def _bytes(self) -> torch.Tensor: ...

PACKING_DEVICE: torch.device

@final
class Bell:
    def __init__(self) -> None: ...
    @property
    def count(self) -> int: ...
    def ring(self) -> None: ...
    def wait(self, seen: int, longest_s: float, /) -> None: ...

@final
class Connection:
    @staticmethod
    def of_socket(descriptor: int, /) -> Connection: ...
    @staticmethod
    def pipe(capacity_bytes: int, /) -> tuple[Connection, Connection]: ...

@final
class MessagePool:
    def __init__(self, most: int, *, pinned: bool) -> None: ...
    def take(self, nbytes: int, /) -> torch.Tensor: ...
    @property
    def allocations(self) -> int: ...

class Link:
    def __init__(
        self,
        connection: Connection,
        bell: Bell,
        *,
        timeout_s: float,
        their_timeout_s: float,
        receives: bool,
        slots: int,
        pinned: bool,
    ) -> None: ...
    @property
    def may_send(self) -> bool: ...
    def send(self, parcel: Parcel, checksum: int, /) -> bool: ...
    def is_sending(self, parcel: Parcel, /) -> bool: ...
    @property
    def unwritten(self) -> int: ...
    def ask(self) -> None: ...
    @property
    def sent(self) -> int: ...
    @property
    def arrived(self) -> int: ...
    def take_into(self, messages: list[Any], /) -> bool: ...
    @property
    def waiting(self) -> int: ...
    @property
    def allocations(self) -> int: ...
    @property
    def in_use(self) -> int: ...
    def close(self) -> None: ...
    @property
    def peer_closes(self) -> bool: ...
    @property
    def has_ended(self) -> bool: ...
    @property
    def lost(self) -> str | None: ...
    def abandon(self) -> None: ...

@final
class Slab:
    @staticmethod
    def make(bytes: int, /) -> Slab: ...
    @staticmethod
    def open(path: str, token: bytes, /) -> Slab: ...
    @staticmethod
    def of(parcel: Parcel, /) -> Slab | None: ...
    @staticmethod
    def of_tensor(tensor: object, /) -> Slab | None: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def token(self) -> bytes: ...
    @property
    def descriptor(self) -> int: ...
    @property
    def is_retired(self) -> bool: ...
    def take(self, nbytes: int, /) -> torch.Tensor | None: ...
    def send(self) -> bool: ...
    def retire(self) -> bool: ...
    def close_if_received(self) -> None: ...
    def receive(self, nbytes: int, /) -> Parcel: ...
    def pin(self, device: str | torch.device | int, /) -> str | None: ...

def drop_slabs(slabs: list[Slab], /) -> None: ...
def pinned_slab_bytes() -> int: ...
def slab_limit_bytes() -> int: ...
def set_slab_limit_bytes(limit_bytes: int, /) -> None: ...
def pack(data: Any, out: Callable[[int, torch.device], Any] | MessagePool | None, /) -> Parcel: ...
def reserve(
    data: Any, out: Callable[[int, torch.device], Any] | None, /
) -> tuple[Parcel | None, list[tuple[int, int]]]: ...
def parcel_from(
    buffer: Any,
    *,
    may_unpickle: bool,
    is_mapped: bool = False,
    is_owned: bool = False,
    head: bytes = b"",
) -> Parcel: ...
def explain(
    data: Any,
    device: str | torch.device | int,
    options: CopyOptions,
    /,
) -> tuple[
    torch.device,
    list[tuple[str, Any, Reason, list[str], int | None, int | None, bool]],
    tuple[int, int, int],
]: ...
def start_copy_into(
    source: Any,
    destination: _T,
    fill: Callable[[Any, Any], None],
    options: CopyOptions,
    copy_opaque: bool,
    /,
) -> AsyncCopyHandle[_T]: ...
def start_gather(
    storage: _T,
    rows: RowIndex,
    readers: RowReaders,
    device: str | torch.device | int,
    options: CopyOptions,
    /,
) -> AsyncCopyHandle[_T]: ...
def start_gather_into(
    storage: Any,
    out: _T,
    rows: RowIndex,
    fill: Callable[[Any, Any], None],
    options: CopyOptions,
    /,
) -> AsyncCopyHandle[_T]: ...
def start_scatter(
    batch: Any,
    storage: _T,
    rows: RowIndex,
    fill: Callable[[Any, Any], None],
    options: CopyOptions,
    /,
) -> AsyncCopyHandle[_T]: ...
def raise_bad_rows() -> None: ...

class PinnedMemory:
    """Memory that `pin_memory_` has pinned.

    For example::

        memory = tdcopier.pin_memory_(dataset.tensors)
        print(f"{memory.nbytes / 1e9:.1f} GB are pinned")
        memory.close()

    It stays pinned, and alive, until `close`, the end of a `with` block, or the end of this object.
    """

    def __init__(self, data: Any, device: str | torch.device | int, /) -> None: ...
    def close(self) -> None:
        """Unpin the memory, after all work that is enqueued on any device. Blocks for that long.

        Memory that another `PinnedMemory` names too stays pinned. A second call does nothing. No
        other thread may start a copy or a gather from the memory meanwhile.

        Raises:
            Exception: the error of a device that cannot be waited for, for example while a stream
                is capturing a CUDA graph. The memory stays pinned then.
        """
    def __enter__(self) -> PinnedMemory: ...
    def __exit__(self, *_: object) -> None: ...
    @property
    def nbytes(self) -> int:
        """Bytes of memory that this keeps pinned; 0 when it is closed."""
    @property
    def closed(self) -> bool: ...

class LeasedTensors:
    def __init__(self, sizes_bytes: Sequence[int], device: str | torch.device | int, /) -> None: ...
    def __iter__(self) -> LeasedTensors: ...
    def __next__(self) -> torch.Tensor: ...

def reserve_pinned(n_bytes: int, device: str | torch.device | int, /) -> int: ...
def trim_pinned() -> int: ...
def pinned_use() -> tuple[int, int, int, int, int | None]: ...
def set_pinned_limit_bytes(limit_bytes: int, /) -> None: ...
def place_of(tensor: torch.Tensor, /) -> MemoryPlace: ...
def parts_of_bytes(
    bytes: torch.Tensor, begins: list[int], sizes: list[int], /
) -> list[torch.Tensor]: ...
def record_stream(tensor: torch.Tensor, stream: torch.Stream, /) -> None: ...
def empty_bytes(n_bytes: int, stream: torch.Stream, /) -> torch.Tensor: ...
def pack_bytes(
    parts: list[torch.Tensor],
    chunk: torch.Tensor,
    begins: list[int],
    stream: torch.Stream,
    record: bool,
    /,
) -> bool: ...
def over_bytes(bytes: torch.Tensor, tensor: torch.Tensor, /) -> torch.Tensor: ...

EMPTY_STORAGES_RAISE: bool

class DeviceAccess:
    def __init__(self, stream: torch.Stream, /) -> None: ...
    def has_ended(self) -> bool: ...
    def wait(self) -> None: ...
    def order(self) -> None: ...

def pairs_with_paths(
    source: Any,
    destination: Any,
    source_name: str = "source",
    destination_name: str = "destination",
) -> list[tuple[str, Any, Any]]: ...
def tables_with_paths(
    storage: Any, rows: RowIndex, readers: RowReaders, device: str | torch.device | int, /
) -> list[tuple[str, Any]]: ...
def is_dict_of_tensors(value: Any, /) -> bool: ...
def forget_rules() -> None: ...
def leaves_with_paths(data: Any, device: str | torch.device | int, /) -> list[tuple[str, Any]]: ...
def engine_takes(device: str | torch.device | int, /) -> bool: ...
def copy_stream(
    device: str | torch.device | int,
    which: Literal["to_device", "from_device", "ordered"] = "to_device",
) -> torch.Stream: ...
def staging_bytes(device: str | torch.device | int, /) -> int: ...
def why_no_segment_kernel(device: str | torch.device | int, /) -> str: ...
def default_worker_count() -> int: ...
def set_most_workers(workers: int, /) -> None: ...
def time_steps(on: bool, /) -> None: ...
def are_steps_timed() -> bool: ...
def use_segment_kernel(use: bool, /) -> None: ...
def has_row_kernels(device: str | torch.device | int, /) -> bool: ...

MAX_STRAIGHT_BYTES: int

def set_staging_limit_bytes(limit_bytes: int, /) -> None: ...
def set_run_ahead_limit(batches: int, /) -> None: ...
def wait_for_release() -> bool: ...
def reclaim() -> None: ...
def shut_down() -> None: ...
