"""Options of copies: what they mean, and checks of what the caller gives."""

from __future__ import annotations

import operator
import threading
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal, TypeAlias, TypedDict

import numpy as np
import torch  # its libraries must be loaded before the native module

from tdcopier import _C

Device: TypeAlias = str | torch.device | int
OnUnknown: TypeAlias = Literal["ignore", "warn", "raise"] | None

_LARGEST_ALIGNMENT_BYTES = 1 << 30
LARGEST_CHUNK_BYTES = 1 << 62


class _Sending(threading.local):
    """When copies are sent that this thread starts.

    Set by prefetchers while they read, because their sources may start copies themselves. Not in a
    context, which a task that the source creates would keep after the read.
    """

    now: _C.Sending | None = None
    """None: at once."""
    in_callers_order = False
    """Whether the results are in memory of the current stream, and written after its work."""

    def end(self) -> None:
        self.now, self.in_callers_order = None, False

    def apply(self, options: _C.CopyOptions) -> _C.CopyOptions:
        if self.now is None:
            return options
        return options.with_sending(self.now, self.in_callers_order)


SENDING = _Sending()


class CopyOptions(TypedDict, total=False):
    """Keyword options of `start_copy` and of every function that passes options on to it.

    For example::

        options: tdcopier.CopyOptions = {"pack_cpu_tensors": False, "on_unknown": "raise"}
        batch = tdcopier.copy(batch, "cuda", **options)

    `copy`, `async_to`, `to`, `prepare`, `explain`, `prefetch`, `start_gather`, `gather` and
    `torchrl.ToDevice` take all of them. `start_copy_into` and `start_scatter`, and the same without
    `start_`, take `use_pinned_staging` and `use_background_thread`.
    A value of the wrong type raises a `TypeError`, and a size out of range a `ValueError`.

    Attributes:
        use_pinned_staging: Stage through pinned memory, so that transfers run in parallel with the
            host, and put results on the host into pinned memory. If False, transfers read or write
            pageable memory and block the thread that makes them. Copies within the host or between
            devices are never staged. Default: True.
        pack_cpu_tensors: Let small leaves share chunks, whether they are on the host or on a
            device. If False, each leaf has its own allocation and transfer. Default: True.
        min_packed_alignment_bytes: Alignment of packed leaves, from 1 byte to 1 GiB. The offset of
            each packed leaf from the beginning of its chunk is a multiple of the larger of this and
            its element size, rounded up to a multiple of its element size. The address of the chunk
            is a multiple of the largest power of two that divides this alignment. Default: 16.
        max_packed_chunk_bytes: Maximum number of bytes that the leaves of one chunk span, padding
            included; at least 1. (The allocation is larger if an alignment above 64 bytes requires
            it.) Default: 32 MiB.
        use_background_thread: Leave large copies to worker threads and return at once. Up to 512
            KiB of host data are staged in the call even so, because that is faster, unless they
            would have to wait for a staging buffer. Gathers and transfers from a device are
            enqueued in the call too. (The first results of a size that arrive on the host take as
            long as it takes to pin their memory.) If False, all staging happens in the call.
            Default: True.
        require_pinned_results: Fail if the results on the host cannot be in pinned memory: because
            no more can be pinned (with the allocator's error, when the copy is awaited), or because
            no accelerator is in use. If False, they are then in pageable memory, as those of
            `Tensor.to` are, and `stats.fallbacks` counts it if more could not be pinned. Leaves
            that are reused or delegated, and existing memory (``out=``), are where they are.
            Default: False.
        on_unknown: What to do with opaque values whose class tdcopier does not know to be plain
            data: objects of any other class, sets, iterators, views of dicts, modules. Tensors in
            them stay on their device. None: raise a `TypeError` if the data itself is such a value,
            since nothing would be copied, and pass those in a container through. "ignore": pass all
            of them through. "warn": also warn, with an `UnknownTypeWarning` for each class once per
            process, with a path. "raise": raise a `TypeError` for the first one, with its path.
            Plain data are numbers, text, bytes, None, dates, paths, members of enumerations,
            functions, classes, Python modules, numpy scalars, arrays that torch cannot take, and
            torch's own small values (`torch.Size`, devices, dtypes, generators, streams). Default:
            None.
    """

    use_pinned_staging: bool
    pack_cpu_tensors: bool
    min_packed_alignment_bytes: int
    max_packed_chunk_bytes: int
    use_background_thread: bool
    require_pinned_results: bool
    on_unknown: OnUnknown


@lru_cache(maxsize=64, typed=True)
def checked_options(
    use_pinned_staging: bool,
    pack_cpu_tensors: bool,
    min_packed_alignment_bytes: int,
    max_packed_chunk_bytes: int,
    use_background_thread: bool,
) -> _C.CopyOptions:
    """Validate the options of a copy and return them as the native module takes them.

    Raises:
        TypeError, ValueError: as documented for `CopyOptions`.
    """
    return _C.CopyOptions(
        bool_option("use_pinned_staging", use_pinned_staging),
        bool_option("pack_cpu_tensors", pack_cpu_tensors),
        _size_option(
            "min_packed_alignment_bytes", min_packed_alignment_bytes, _LARGEST_ALIGNMENT_BYTES
        ),
        _size_option("max_packed_chunk_bytes", max_packed_chunk_bytes, LARGEST_CHUNK_BYTES),
        bool_option("use_background_thread", use_background_thread),
    )


def native_options(
    *,
    use_pinned_staging: bool = True,
    pack_cpu_tensors: bool = True,
    min_packed_alignment_bytes: int = 16,
    max_packed_chunk_bytes: int = 32 * 1024 * 1024,
    use_background_thread: bool = True,
    require_pinned_results: bool = False,
    on_unknown: OnUnknown = None,
) -> _C.CopyOptions:
    """Return all options as the native module takes them, where time does not matter.

    Raises:
        TypeError, ValueError: as documented for `CopyOptions`.
    """
    options = checked_options(
        use_pinned_staging,
        pack_cpu_tensors,
        min_packed_alignment_bytes,
        max_packed_chunk_bytes,
        use_background_thread,
    )
    options = options_for_results(options, use_pinned_staging, require_pinned_results)
    return options_for_unknown(options, on_unknown)


def options_for_unknown(options: _C.CopyOptions, on_unknown: OnUnknown) -> _C.CopyOptions:
    """Return the options with this `on_unknown`. Separate, so that the default costs nothing.

    Raises:
        TypeError, ValueError: as documented for `CopyOptions`.
    """
    check_on_unknown(on_unknown)
    return options.with_on_unknown(_ON_UNKNOWN[on_unknown])


def options_for_results(
    options: _C.CopyOptions, use_pinned_staging: bool, require_pinned_results: bool
) -> _C.CopyOptions:
    """Return the options with this `require_pinned_results`. Separate, as `options_for_unknown`.

    Raises:
        TypeError: `require_pinned_results` is no bool.
        ValueError: `use_pinned_staging` contradicts it.
    """
    if not bool_option("require_pinned_results", require_pinned_results):
        return options
    if not use_pinned_staging:
        raise ValueError("require_pinned_results=True needs use_pinned_staging=True")
    return options.requiring_pinned_results()


def check_on_unknown(on_unknown: OnUnknown) -> None:
    """Raise a TypeError or a ValueError for another value of the option."""
    message = f'on_unknown must be "ignore", "warn", "raise" or None; got {on_unknown!r}'
    if on_unknown is not None and not isinstance(on_unknown, str):
        raise TypeError(message)
    if on_unknown not in _ON_UNKNOWN:
        raise ValueError(message)


@lru_cache(maxsize=16, typed=True)
def options_for_filling(use_pinned_staging: bool, use_background_thread: bool) -> _C.CopyOptions:
    """Return the options of a copy into existing memory, where the packing options do not apply."""
    return checked_options(use_pinned_staging, True, 16, LARGEST_CHUNK_BYTES, use_background_thread)


def refuse_unknown_options(function: str, options: Mapping[str, Any], *own: str) -> None:
    """Raise a TypeError that names the function if it does not take one of these options.

    Args:
        function: the name of the function, for the message.
        options: the keyword arguments that are to be options of copies.
        *own: names of the other options that the function has, for the message.
    """
    for name in options:
        if name not in CopyOptions.__annotations__:
            why = {**_INSTEAD, **_INSTEAD_IN.get(function, {})}.get(name) or (
                f"got an unexpected keyword argument {name!r}: its options are "
                f"{', '.join((*own, *CopyOptions.__annotations__))}"
            )
            raise TypeError(f"{function}() {why}")


def bool_option(name: str, value: Any) -> bool:
    """Return the value of an option that is on or off; raise a TypeError for another one."""
    if not isinstance(value, (int, np.bool_)):  # `"no"` would count as True
        raise TypeError(f"{name} must be a bool; got {value!r}")
    return bool(value)


def _size_option(name: str, value: int, largest: int) -> int:
    if type(value) is not int:  # the common case costs one comparison
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{name} must be a positive int; got {value!r}")
        value = operator.index(value)
    if not 0 < value <= largest:
        raise ValueError(f"{name} must be a positive int of at most {largest}; got {value}")
    return value


_STAGES = "takes no {}: it stages through pinned memory by itself, see use_pinned_staging"
_INSTEAD = {
    "dtype": "keeps dtypes: convert the result with .to(dtype)",
    "memory_format": "keeps strides: convert the result with .to(memory_format=...)",
    "batch_size": "keeps batch sizes: set the batch_size of the result",
    "other": "takes no other: give its device, and convert the result with .to(other.dtype)",
    "non_blocking": (
        "takes no non_blocking: it blocks until the data has arrived; async_to() and start_copy() "
        "do not"
    ),
    "copy": (
        "takes no copy: leaves that are on the device already come back as the same objects; "
        "clone() these, or copy_into() a tree of their torch.empty_like()"
    ),
    "inplace": "returns a new tree: copy_into() fills an existing one",
    **{name: _STAGES.format(name) for name in ("pin_memory", "non_blocking_pin", "num_threads")},
}
"""Keywords of `Tensor.to` and `TensorDict.to` that a call has not, and what to do instead."""

_INSTEAD_IN = {
    "async_to": {
        "non_blocking": "takes no non_blocking: it never blocks; get() and wait() of its handle do",
    },
    "explain": {
        "non_blocking": "takes no non_blocking: it copies nothing",
    },
    "gather": {
        "non_blocking": (
            "takes no non_blocking: it blocks until the rows have arrived; start_gather() does not"
        ),
        "copy": "takes no copy: the rows are new memory always",
        "inplace": "returns a new tree: with out= it fills an existing one",
    },
    "prepare": {
        "non_blocking": "takes no non_blocking: its start_copy() does not wait for the copy",
    },
    "prefetch": {
        "non_blocking": "takes no non_blocking: its copies never block",
        "inplace": "yields new trees: copy_into() fills an existing one",
    },
}
"""By call: the sentences in which it differs from `_INSTEAD`."""

_ON_UNKNOWN: dict[OnUnknown, _C.OnUnknown] = {
    None: _C.OnUnknown.REFUSE_ROOT,
    "ignore": _C.OnUnknown.IGNORE,
    "warn": _C.OnUnknown.WARN,
    "raise": _C.OnUnknown.RAISE,
}
