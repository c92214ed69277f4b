"""Copies that are prepared once, for batches that are like one another."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any, NamedTuple

import torch

from tdcopier import _C, _copy
from tdcopier._C import AsyncCopyHandle
from tdcopier._checking import SourceCheck, checked
from tdcopier._copy import Device

__all__ = ["PreparedCopy", "prepare"]


class LeafLayout(NamedTuple):
    """What a leaf that the engine moves has in common with all that fit in its place."""

    device: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    in_bytes: bool
    """The strides: of a leaf with gaps, repeats or a reversed order, which arrives without."""

    def text(self, with_strides: bool = False) -> str:
        """Such as `(5, 4) float32`."""
        strides = f" with strides {self.strides}{' bytes' * self.in_bytes}" if with_strides else ""
        return f"{self.shape} {self.dtype}{strides}"


class BatchLayout(NamedTuple):
    """What a copy of a batch does with its leaves."""

    groups: list[list[tuple[str, LeafLayout]]]
    """Paths and layouts of those that the engine moves, by source device."""
    delegated: list[str]
    """Paths of those that are left to their own `.to`."""
    on_target: list[str]
    """Paths of those that are there already."""
    altered: bool
    """Whether a mode or transform of torch is active."""

    @classmethod
    def of(cls, native: _C.PreparedCopy, batch: Any) -> BatchLayout:
        """As the walk finds it."""
        groups, delegated, on_target, altered = native.layout_of(batch)
        named = [[(path, LeafLayout(*layout)) for path, layout in group] for group in groups]
        return cls(named, delegated, on_target, altered)

    def why_not(self, batch: BatchLayout, device: torch.device) -> str | None:
        """What of a batch is not as it is here, in words; None if it fits."""
        difference = self._difference(batch)
        if difference is None:
            return None
        if batch.altered:
            return "a torch mode or transform is active: every leaf is left to its own .to"
        if len(batch.delegated) > len(self.delegated):
            return (
                f"{batch.delegated[0]} is left to its own .to, as "
                f"{_in_words(len(batch.delegated), 'leaf or container')} in all; the example had "
                f"{len(self.delegated)}"
            )
        if len(batch.on_target) > len(self.on_target):
            return (
                f"{batch.on_target[0]} is on {device} already, as "
                f"{_in_words(len(batch.on_target), 'tensor')} in all; the example had "
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
            devices = _in_words(len(batch.groups), "device")
            return f"data has leaves on {devices}, the example on {len(self.groups)}"
        return None


def _in_words(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


class PreparedCopy:
    """What `prepare` makes of an example: starts copies of batches that are like it.

    A batch fits if its leaves are those of the example: as many from each device, in the same
    order, with the same dtypes, shapes and strides. Values, places in memory, the containers around
    the leaves with their keys, and opaque values may differ from batch to batch; so may leaves that
    are left to their own `.to` or are on the device already. A batch that does not fit is copied
    all the same, as by `start_copy`, and counted in `misfits`.

    Any thread may use it, and any number of them at a time.
    """

    __slots__ = ("__weakref__", "_example", "_native")

    def __init__(self, native: _C.PreparedCopy, example: BatchLayout) -> None:
        """Use `prepare`."""
        self._native = native
        self._example = example

    def start_copy(self, batch: Any) -> AsyncCopyHandle:
        """Begin to copy a batch, as `tdcopier.start_copy` does with the options of `prepare`.

        Raises:
            Exception: as `tdcopier.start_copy`.
        """
        if _copy._CHECKING:
            check = SourceCheck.of_copy(batch, self.device)
            return checked(self._native.start_copy(batch), check)
        return self._native.start_copy(batch)

    def why_not(self, batch: Any) -> str | None:
        """What of a batch does not fit, by its path; None if it fits. Counts and copies nothing.

        Raises:
            Exception: what is wrong with the batch, as `tdcopier.start_copy`.
        """
        return self._example.why_not(BatchLayout.of(self._native, batch), self.device)

    @property
    def device(self) -> torch.device:
        """Where batches go."""
        return self._native.device

    @property
    def fits(self) -> int:
        """How many batches were like the example."""
        return self._native.fits

    @property
    def misfits(self) -> int:
        """How many batches were not, and were copied as by `tdcopier.start_copy`."""
        return self._native.misfits

    @property
    def reuses_outputs(self) -> bool:
        """Whether tensors of earlier results are used again: asked for, and not too large."""
        return self._native.keeps_outputs

    def __repr__(self) -> str:
        """Such as `<PreparedCopy of 528 leaves, 153152 bytes, to cuda:0: 10 fits, 0 misfits>`."""
        native = self._native
        leaves = sum(map(len, self._example.groups))
        reuses = ", reuses outputs" if native.keeps_outputs else ""
        return (
            f"<PreparedCopy of {leaves} leaves, {native.bytes} bytes, to {native.device}"
            f"{reuses}: {native.fits} fits, {native.misfits} misfits>"
        )


def prepare(
    example: Any,
    device: Device,
    *,
    use_pinned_staging: bool = True,
    pack_cpu_tensors: bool = True,
    min_packed_alignment_bytes: int = 16,
    max_packed_chunk_bytes: int = 32 * 1024 * 1024,
    use_background_thread: bool = True,
    reuse_outputs: bool = False,
) -> PreparedCopy:
    """Look at an example batch once, so that copies of others like it cost less.

    The result of each copy is what `start_copy` gives, whatever the batch. Nothing of the example
    is kept but the shapes and paths of its leaves.

    Args:
        example: a batch, as for `start_copy`. Nothing is copied. Under a torch mode every leaf is
            left to its own `.to`, and a plan that is made there knows of none.
        device: the target, as for `start_copy`. "cuda" is the CUDA device that is current now.
        use_pinned_staging: as for `start_copy`, like the next four.
        pack_cpu_tensors: see there.
        min_packed_alignment_bytes: see there.
        max_packed_chunk_bytes: see there.
        use_background_thread: see there.
        reuse_outputs: make tensors of earlier results, once nobody has them any more, those of the
            next one, which saves most of what a copy of many small tensors takes. A tensor is only
            reused if nothing but the plan refers to it and nothing but its values was changed:
            there is no weak reference to it, it has no attribute, hook or gradient, no view and no
            graph refers to its memory's version, and its shape is as it was. What this changes is
            when memory goes: a result that you drop goes with a later copy or with the plan, and so
            does what refers to it only through its tensors (weak references, attributes, graphs);
            up to four results are kept so, each until sixteen copies did without it. Batches of
            more than 4 MiB are never kept: `reuses_outputs` says whether they are.

    Raises:
        Exception: as `start_copy`.
    """
    native = _C.PreparedCopy(
        example,
        device,
        _copy.checked_options(
            use_pinned_staging,
            pack_cpu_tensors,
            min_packed_alignment_bytes,
            max_packed_chunk_bytes,
            use_background_thread,
        ),
        bool(reuse_outputs),
    )
    return PreparedCopy(native, BatchLayout.of(native, example))
