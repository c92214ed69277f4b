"""Copies that are prepared once, for batches that are like one another."""

from __future__ import annotations

from typing import Any

import torch

from tdcopier import _C, _copy
from tdcopier._C import AsyncCopyHandle
from tdcopier._checking import SourceCheck, checked
from tdcopier._copy import Device

__all__ = ["PreparedCopy", "prepare"]


class PreparedCopy:
    """What `prepare` makes of an example: starts copies of batches that are like it.

    A batch fits if its leaves are those of the example: as many from each device, in the same
    order, with the same dtypes, shapes and strides. Values, places in memory, the containers around
    the leaves with their keys, and opaque values may differ from batch to batch; so may leaves that
    are left to their own `.to` or are on the device already. A batch that does not fit is copied
    all the same, as by `start_copy`, and counted in `misfits`.

    Any thread may use it, and any number of them at a time.
    """

    __slots__ = ("__weakref__", "_native")

    def __init__(self, native: _C.PreparedCopy) -> None:
        """Use `prepare`."""
        self._native = native

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
        return self._native.why_not(batch)

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
        reuses = ", reuses outputs" if native.keeps_outputs else ""
        return (
            f"<PreparedCopy of {native.leaves} leaves, {native.bytes} bytes, to {native.device}"
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
    return PreparedCopy(
        _C.PreparedCopy(
            example,
            device,
            *_copy.checked_options(
                use_pinned_staging,
                pack_cpu_tensors,
                min_packed_alignment_bytes,
                max_packed_chunk_bytes,
                use_background_thread,
            ),
            bool(reuse_outputs),
        )
    )
