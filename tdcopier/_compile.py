"""Calls in a function that `torch.compile` compiles: each breaks the graph, and says what to do.

A copy cannot be part of a graph: its result depends on the structure and sizes of each batch, and
it is ordered on the stream that is current at the call.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._C._dynamo import eval_frame

from tdcopier import _C
from tdcopier._checking import CheckedHandle
from tdcopier._prefetch.prefetcher import Prefetcher, _Pass
from tdcopier._prepared import PreparedCopy

_REASON = (
    "tdcopier works between graphs: call {call} before the compiled function and pass in {result}, "
    "or, without fullgraph=True, accept a graph break here"
)
_TREE = "the tree that wait() returns"


def keep_out_of_graphs(functions: Iterable[Any]) -> None:
    """Mark the public functions, and the methods that move or hand over batches.

    Called once, at import.
    """
    for function in functions:
        _mark(function, f"{function.__name__}()", _TREE)
    _mark(PreparedCopy.start_copy, "start_copy()", _TREE)
    for method in (Prefetcher.__iter__, Prefetcher.__next__, _Pass.__next__):
        _mark(method, "next() on the prefetcher", "the batch")
    for native, replacement in ((_native_get, _get), (_native_wait, _wait)):
        replacement.__name__, replacement.__doc__ = native.__name__, native.__doc__
        replacement.__qualname__ = f"AsyncCopyHandle.{native.__name__}"
        setattr(_C.AsyncCopyHandle, native.__name__, replacement)
    for kind in (_C.AsyncCopyHandle, CheckedHandle):
        _mark(kind.get, "get()", "the tree")
        _mark(kind.wait, "wait()", "the tree")


def _mark(function: Any, call: str, result: str) -> None:
    """Do what `torch.compiler.disable` does, without a wrapper.

    The wrapper would slow down each eager call, and the import of the compiler takes longer than
    that of torch. Nothing but the compiler reads these marks.
    """
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = _REASON.format(call=call, result=result)
    # At a graph break torch calls the function, and would compile it and the functions it calls.
    # (Not public: a torch that has another way for this compiles them, which takes time only.)
    if hasattr(eval_frame, "set_code_exec_strategy"):
        skip = eval_frame._FrameAction.SKIP
        skipped = eval_frame._FrameExecStrategy(skip, skip)
        eval_frame.set_code_exec_strategy(function.__code__, skipped)


# The compiler finds marks on Python functions only, so these two replace the native methods.
_native_get: Any = _C.AsyncCopyHandle.get
_native_wait: Any = _C.AsyncCopyHandle.wait


def _get(self: _C.AsyncCopyHandle[Any]) -> Any:
    return _native_get(self)


def _wait(self: _C.AsyncCopyHandle[Any], stream: torch.Stream | None = None) -> Any:
    return _native_wait(self, stream)
