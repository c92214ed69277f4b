"""`prepare`: copies that are planned once, for batches with the same layout."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any, NamedTuple, NoReturn, TypeVar, overload

import numpy as np
import torch
from typing_extensions import Unpack

from tdcopier import _C, _checking
from tdcopier._C import AsyncCopyHandle
from tdcopier._checking import SourceCheck, checked
from tdcopier._compile import keep_out_of_graphs
from tdcopier._options import (
    SENDING,
    CopyOptions,
    Device,
    bool_option,
    native_options,
    refuse_unknown_options,
)
from tdcopier._words import counted

__all__ = ["PreparedCopy", "prepare"]

T = TypeVar("T")


class LeafLayout(NamedTuple):
    """The layout of a leaf that the engine copies: all leaves that fit in its place share it."""

    device: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    in_bytes: bool
    """Whether strides are in bytes: for leaves with gaps, repeats or a reversed order."""

    def text(self, with_strides: bool = False) -> str:
        """Return for example `(5, 4) float32`."""
        strides = f" with strides {self.strides}{' bytes' * self.in_bytes}" if with_strides else ""
        return f"{self.shape} {self.dtype}{strides}"


class BatchLayout(NamedTuple):
    """How a copy of a batch treats each of its leaves."""

    groups: list[list[tuple[str, LeafLayout]]]
    """Paths and layouts of the leaves that the engine copies, by source device."""
    delegated: list[str]
    """Paths of the leaves that are delegated to their own ``.to``."""
    on_target: list[str]
    """Paths of the leaves that are on the target already."""
    altered: bool
    """Whether a mode or transform of torch is active."""

    @classmethod
    def of(cls, native: _C.PreparedCopy, batch: Any) -> BatchLayout:
        """Return the layout that the walk finds in a batch."""
        groups, delegated, on_target, altered = native.layout_of(batch)
        named = [[(path, LeafLayout(*layout)) for path, layout in group] for group in groups]
        return cls(named, delegated, on_target, altered)

    def why_not(self, batch: BatchLayout, device: torch.device) -> str | None:
        """Return how a batch differs from this layout, in words; None if it fits."""
        difference = self._difference(batch)
        if difference is None:
            return None
        if batch.altered:
            return "a torch mode or transform is active: every leaf is left to its own .to"
        if len(batch.delegated) > len(self.delegated):
            return (
                f"{batch.delegated[0]} is left to its own .to, as "
                f"{counted(len(batch.delegated), 'leaf or container')} in all; the example had "
                f"{len(self.delegated)}"
            )
        if len(batch.on_target) > len(self.on_target):
            return (
                f"{batch.on_target[0]} is on {device} already, as "
                f"{counted(len(batch.on_target), 'tensor')} in all; the example had "
                f"{len(self.on_target)}"
            )
        return difference

    def _difference(self, batch: BatchLayout) -> str | None:
        for ours, theirs in zip_longest(self.groups, batch.groups[: len(self.groups)]):
            for mine, its in zip_longest(ours, theirs or ()):
                if mine is None:
                    return f"{its[0]} is a leaf more than the example had"
                path, was = mine
                if its is None:
                    return f"data has no leaf that is like {path} of the example, {was.text()}"
                where, found = its
                if found == was:
                    continue
                if found.device != was.device:
                    return f"{where} is on {found.device}, the example's {path} was on {was.device}"
                only_strides = found[:3] == was[:3]
                whose = "" if path == where else f"{path} "
                return (
                    f"{where} is {found.text(only_strides)}, the example's {whose}was "
                    f"{was.text(only_strides)}"
                )
        if len(batch.groups) > len(self.groups):
            devices = counted(len(batch.groups), "device")
            return f"data has leaves on {devices}, the example on {len(self.groups)}"
        return None


class PreparedCopy:
    """Starts copies of batches that have the layout of an example; made by `prepare`.

    For example::

        plan = tdcopier.prepare(batches[0], "cuda")
        handle = plan.start_copy(batches[1])
        if plan.misfits:
            print(plan.why_not(batches[1]))

    A batch fits if its leaves match those of the example: the same number from each device, in the
    same order, with the same dtypes, shapes and strides. Values, memory addresses, the containers
    around the leaves and their keys, and opaque values may differ from batch to batch. So may
    leaves that are delegated to their own ``.to`` or are on the device already. A batch that does
    not fit is copied as by `start_copy`, and counted in `misfits`.

    Several threads may use it at the same time.
    """

    __slots__ = ("__weakref__", "_example", "_native")

    _instead_in_a_tree = "give a batch, to its start_copy()"

    def __init__(self, native: _C.PreparedCopy, example: BatchLayout) -> None:
        """Do not call this: use `prepare`.

        Raises:
            TypeError: the caller has given an example.
        """
        if not isinstance(native, _C.PreparedCopy):
            raise TypeError("prepare() makes plans: call prepare(example, device)")
        self._native = native
        self._example = example

    @overload
    def start_copy(self, data: np.ndarray[Any, Any]) -> AsyncCopyHandle[torch.Tensor]: ...
    @overload
    def start_copy(self, data: _C.Parcel) -> AsyncCopyHandle[Any]: ...
    @overload
    def start_copy(self, data: T) -> AsyncCopyHandle[T]: ...
    @keep_out_of_graphs("start_copy()")
    def start_copy(self, data: Any) -> AsyncCopyHandle[Any]:
        """Start to copy a batch, like `tdcopier.start_copy` with the options given to `prepare`.

        Raises:
            Exception: as `tdcopier.start_copy`.
        """
        if _checking.enabled:
            check = SourceCheck.of_copy(data, self.device)
            return checked(self._native.start_copy(data, SENDING.now), check)
        return self._native.start_copy(data, SENDING.now)

    def why_not(self, data: Any) -> str | None:
        """Return why a batch does not fit, with a path; None if it fits. Counts and copies nothing.

        Raises:
            Exception: an error in the batch, as `tdcopier.start_copy`.
        """
        return self._example.why_not(BatchLayout.of(self._native, data), self.device)

    @property
    def device(self) -> torch.device:
        """The device that batches are copied to."""
        return self._native.device

    @property
    def fits(self) -> int:
        """Number of batches that had the layout of the example."""
        return self._native.fits

    @property
    def misfits(self) -> int:
        """Number of batches that did not fit, and were copied as by `tdcopier.start_copy`."""
        return self._native.misfits

    @property
    def reuses_outputs(self) -> bool:
        """Whether output tensors are reused, since `reuse_outputs` is set and batches are small."""
        return self._native.keeps_outputs

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be copied or pickled."""
        raise TypeError("a plan of prepare() cannot be copied or pickled: prepare it where it runs")

    def __repr__(self) -> str:
        """`<PreparedCopy of 528 leaves, 153152 bytes, to cuda:0: 10 fits, 0 misfits>`, say."""
        native = self._native
        leaves = sum(map(len, self._example.groups))
        reuses = ", reuses outputs" if native.keeps_outputs else ""
        return (
            f"<PreparedCopy of {counted(leaves, 'leaf')}, {counted(native.bytes, 'byte')}, to "
            f"{native.device}{reuses}: {counted(native.fits, 'fit')}, "
            f"{counted(native.misfits, 'misfit')}>"
        )


@keep_out_of_graphs("prepare()")
def prepare(
    example: Any,
    device: Device,
    *,
    reuse_outputs: bool = False,
    **options: Unpack[CopyOptions],
) -> PreparedCopy:
    """Analyse an example batch once, so that copies of batches like it cost less.

    For example::

        plan = tdcopier.prepare(example, "cuda")
        for batch in loader:
            train_step(plan.start_copy(batch).wait())

    The result of each copy is what `start_copy` gives, whether or not the batch fits. Of the
    example, only the shapes and paths of its leaves are kept.

    Args:
        example: a batch, as for `start_copy`. Nothing is copied. Under a torch mode every leaf is
            delegated to its own ``.to``, so a plan made there contains no leaves.
        device: the target, as for `start_copy`. "cuda" is the current CUDA device at this call.
        reuse_outputs: reuse the output tensors of an earlier result for a later one, once the
            caller has dropped them, which saves a tenth of the time for many small tensors. A
            tensor is reused only if the plan has the only reference to it and nothing but its
            values was changed: it has no weak reference, attribute, hook or gradient, no view
            or autograd graph depends on the version of its memory, and its shape is unchanged. The
            option changes when memory is freed: a result that you drop is freed with a later copy
            or with the plan. Until then, attributes and autograd graphs of its tensors stay alive,
            and weak references to them stay valid. Up to four results are kept in this way, each
            until sixteen copies have not used it. Batches of more than 4 MiB are never kept:
            `reuses_outputs` tells whether results are kept.
        **options: see `CopyOptions`. `on_unknown` applies to the example, and to each batch.

    Raises:
        Exception: as `start_copy`.
    """
    if options:
        refuse_unknown_options("prepare", options, "reuse_outputs")
    reuses = bool_option("reuse_outputs", reuse_outputs)
    native = _C.PreparedCopy(example, device, native_options(**options), reuses)
    return PreparedCopy(native, BatchLayout.of(native, example))
