"""Checks of what the caller gives to `prefetch`, before anything is read."""

from __future__ import annotations

import functools
import inspect
import operator
import sys
import types
from collections.abc import AsyncIterable, Callable, Iterable, Mapping
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn

from tdcopier._C import AsyncCopyHandle
from tdcopier._containers.delegated_parts import is_tensor_collection
from tdcopier._options import CopyOptions, refuse_unknown_options

_ACCEPTED = "an iterable of batches, or a callable without arguments that returns the next one"


def is_to_be_called(source: Any) -> bool:
    """Return whether to call the source; if not, it is to be iterated.

    Raises:
        TypeError: it is no source of batches.
    """
    if isinstance(source, type):
        raise TypeError(f"source is the class {source.__name__}: pass an instance of it")
    if isinstance(source, nn.Module):  # calling it, or iterating over its parts, gives no batches
        raise TypeError(
            f"source is a module ({_class(source)}), not what yields its batches: pass "
            f"{_ACCEPTED}; if its forward() makes batches, pass source.forward"
        )
    if isinstance(source, Iterable) or hasattr(type(source), "__getitem__"):
        _refuse_batch(source)
        _refuse_samples(source)
        return False
    if not callable(source):
        _refuse(source)
    _refuse_call(source)
    return True


def batches_of_call(source: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that calls the source for the next batch.

    It raises a TypeError if it gets None, which would go on without an end.
    """

    def read() -> Any:
        batch = source()
        if batch is None:
            raise TypeError(
                f"{_name(source)}() returned None in place of a batch, as a function without "
                "`return` does: let it return the next batch, and raise StopIteration at the end"
            )
        return batch

    return read


def refuse_other_options(options: Mapping[str, Any]) -> None:
    """Raise a TypeError that says where an option belongs that `prefetch` does not take."""
    loaders = _options_of_data_loader() if options.keys() - CopyOptions.__annotations__ else ()
    for name in options:
        if name in loaders:
            raise TypeError(
                f"prefetch() takes no {name}, which is an option of DataLoader: "
                + _NOTES.get(
                    name,
                    f"make the loader with it, as in prefetch(DataLoader(dataset, {name}=...), "
                    "device)",
                )
            )
    refuse_unknown_options("prefetch", options, "depth", "threaded", "pack_in_workers")


def has_draws_in_this_process(source: Any) -> bool:
    """Return whether the source is a `DataLoader` without workers.

    Its sampler and its dataset draw from torch's global generator, as the loop does.
    """
    loader = getattr(sys.modules.get("torch.utils.data"), "DataLoader", ())
    return isinstance(source, loader) and source.num_workers == 0


def checked_depth(depth: int) -> int:
    """Return the depth as an int.

    Raises:
        TypeError, ValueError: it is not a positive int.
    """
    if isinstance(depth, bool) or not hasattr(depth, "__index__"):
        raise TypeError(f"depth must be a positive int; got {depth!r}")
    depth = operator.index(depth)
    if depth < 1:
        raise ValueError(f"depth must be at least 1; got {depth}")
    return depth


# ---- sources -------------------------------------------------------------------------------------


def _refuse_batch(source: Any) -> None:
    """Raise a TypeError for an iterable that is one batch: its rows, keys or fields are none."""
    if isinstance(source, str | bytes | bytearray | memoryview):
        raise TypeError(
            f"source must be {_ACCEPTED}; got the {_class(source)} {source!r:.60}: the order is "
            "prefetch(source, device)"
        )
    if isinstance(source, set | frozenset):
        raise TypeError(f"source is a {_class(source)}, which has no order: pass a list of batches")
    is_named_tuple = isinstance(source, tuple) and hasattr(source, "_fields")
    if isinstance(source, np.ndarray) and source.dtype.hasobject:
        return  # an array of batches
    has_rows = isinstance(source, torch.Tensor | np.ndarray) or is_tensor_collection(type(source))
    if not (has_rows or is_named_tuple or isinstance(source, Mapping)):
        return
    raise TypeError(
        f"source is one batch ({_class(source)}), not a source of batches: copy it with "
        "start_copy(batch, device), or pass prefetch([batch], device)"
        + ("; to take each row as a batch, pass iter(batch)" if has_rows else "")
    )


def _refuse_samples(source: Any) -> None:
    """Raise a TypeError for a dataset whose samples a loader has to collect."""
    dataset = getattr(sys.modules.get("torch.utils.data"), "Dataset", ())
    if isinstance(source, dataset) and not isinstance(source, Iterable):
        raise TypeError(
            f"source is a dataset ({_class(source)}), whose items are samples: pass "
            "DataLoader(dataset, batch_size=...), with batch_size=None if each item is a batch"
        )


def _refuse_call(source: Callable[..., Any]) -> None:
    """Raise a TypeError for a callable that would not return a batch, where that can be told."""
    is_function = isinstance(source, types.FunctionType | types.MethodType | functools.partial)
    for called in (source, type(source).__call__) if is_function else (type(source).__call__,):
        if inspect.isgeneratorfunction(called):
            raise TypeError(
                "source is a generator function, which returns a generator instead of a batch: "
                f"call it, as in prefetch({_name(source)}(), device)"
            )
        if inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called):
            _refuse_asynchronous(called)
    if not is_function:
        return  # an object may say anything of itself
    function = source.__func__ if isinstance(source, types.MethodType) else source
    if hasattr(function, "__wrapped__") or hasattr(function, "__signature__"):
        return  # a wrapper may give arguments to what it wraps
    try:
        signature = inspect.signature(source)
    except (TypeError, ValueError):  # some native callables have none
        return
    try:
        signature.bind()
    except TypeError as error:
        name = _name(source)
        raise TypeError(
            f"source is called without arguments, and {name}() is {error}; give it what it needs, "
            f"as in prefetch(lambda: {name}(...), device)"
        ) from None


def _name(source: Callable[..., Any]) -> str:
    """Return the name of a function with one, else "source"."""
    is_function = isinstance(source, types.FunctionType | types.MethodType)
    return source.__name__ if is_function and source.__name__.isidentifier() else "source"


def _refuse(source: Any) -> NoReturn:
    if isinstance(source, AsyncCopyHandle):
        raise TypeError(
            "source is the handle of one copy, not a source of batches: call its wait() or get()"
        )
    if isinstance(source, AsyncIterable) or inspect.iscoroutine(source):
        _refuse_asynchronous(source)
    found = "None" if source is None else _class(source)
    raise TypeError(f"source must be {_ACCEPTED}; got {found}")


def _refuse_asynchronous(source: Any) -> NoReturn:
    raise TypeError(
        f"source must be {_ACCEPTED}; got an asynchronous one ({_class(source)}), and no event "
        "loop reads it: make an ordinary generator or function of it"
    )


def _class(source: Any) -> str:
    return type(source).__name__


# ---- options -------------------------------------------------------------------------------------

_NOTES = {
    "pin_memory": "leave it off there too, since prefetch() pins memory itself",
    "prefetch_factor": "give it to the loader; the batches ahead on the device are depth=...",
}


def _options_of_data_loader() -> set[str]:
    from torch.utils.data import DataLoader

    return set(inspect.signature(DataLoader).parameters) - {"dataset"}
