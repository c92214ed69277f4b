"""Calls in a function that `torch.compile` compiles: each breaks the graph, and says what to do.

A copy cannot be part of a graph: its result depends on the structure and sizes of each batch, and
it is ordered on the stream that is current at the call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame

from tdcopier import _C

F = TypeVar("F", bound=Callable[..., Any])

_REASON = (
    "tdcopier works between graphs: call {call} before the compiled function and pass in {result}, "
    "or, without fullgraph=True, accept a graph break here"
)


def keep_out_of_graphs(call: str, result: str = "the tree that wait() returns") -> Callable[[F], F]:
    """Mark a public function, or a method that moves or hands over batches: a decorator.

    Does what `torch.compiler.disable` does, without a wrapper. The wrapper would slow down each
    eager call, and the import of the compiler takes longer than that of torch. Nothing but the
    compiler reads these marks.

    Args:
        call: the call, for the reason that the compiler gives.
        result: what the caller is to pass into the compiled function instead.
    """

    def mark(function: F) -> F:
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = _REASON.format(  # type: ignore[attr-defined]
            call=call, result=result
        )
        # At a graph break torch calls the function, and would compile it and those that it calls.
        # (Not public: a torch that has another way for this compiles them, which only takes time.)
        if hasattr(eval_frame, "set_code_exec_strategy"):
            skip = eval_frame._FrameAction.SKIP
            skipped = eval_frame._FrameExecStrategy(skip, skip)
            code = inspect.unwrap(function).__code__
            eval_frame.set_code_exec_strategy(code, skipped)
        return function

    return mark


# The compiler finds marks on Python functions only, so these two replace the native methods.
_native_get: Any = _C.AsyncCopyHandle.get
_native_wait: Any = _C.AsyncCopyHandle.wait


@keep_out_of_graphs("get()", "the tree")
def _get(self: _C.AsyncCopyHandle[Any]) -> Any:
    return _native_get(self)


@keep_out_of_graphs("wait()", "the tree")
def _wait(self: _C.AsyncCopyHandle[Any], stream: torch.Stream | None = None) -> Any:
    return _native_wait(self, stream)


for _native, _replacement in ((_native_get, _get), (_native_wait, _wait)):
    _replacement.__name__, _replacement.__doc__ = _native.__name__, _native.__doc__
    _replacement.__qualname__ = f"AsyncCopyHandle.{_native.__name__}"
    setattr(_C.AsyncCopyHandle, _native.__name__, _replacement)
