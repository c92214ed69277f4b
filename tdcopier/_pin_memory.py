"""Pins the memory of trees that exist, so that devices read and write it in place."""

from __future__ import annotations

from typing import Any

import torch

from tdcopier._C import PinnedMemory
from tdcopier._compile import keep_out_of_graphs
from tdcopier._mistaken_use import say_what_to_use
from tdcopier._options import Device
from tdcopier._words import counted

__all__ = ["PinnedMemory", "pin_memory_"]


@keep_out_of_graphs("pin_memory_()", "the tree")
def pin_memory_(data: Any, device: Device | None = None) -> PinnedMemory:
    """Pin the memory of every leaf of `data` in place, and return the handle that undoes it.

    Of a view, the whole storage or array is pinned that it is a view of. No byte is copied, and all
    objects stay as they are; `tensor.is_pinned()` becomes true. From then on copies to a device
    read leaves of more than 256 KiB where they are, without staging, and
    ``.to(device, non_blocking=True)`` does not block. For example::

        storage = {"pixels": torch.zeros(100_000, 3, 84, 84, dtype=torch.uint8)}
        with tdcopier.pin_memory_(storage):
            train(storage)

    The system never swaps pinned memory out, and other programs cannot have it, so pin what is
    copied again and again: a storage, a dataset in RAM, parameters.

    Memory that several handles name stays pinned until the last one is closed. The handle keeps the
    memory alive. A tensor may get other memory meanwhile, which is not pinned: when it is resized,
    converted, or sent to another process. Leaves in pinned memory of torch's own are left as they
    are, and so are empty ones. Shared memory can be pinned; each process pins it
    for itself, and a forked child cannot.

    Args:
        data: any tree of tensors and arrays on the host, also of TensorDicts. Opaque values are
            left out.
        device: a device of the type that will access the memory: all devices of that type may. None
            is the current accelerator.

    Returns:
        The handle. Keep it: when it is dropped, the memory is unpinned, as by `close`.

    Raises:
        ValueError: a leaf cannot be pinned, and then none is; the message names its path and the
            reason: it is on a device, it is mapped from a file, it is sparse, the system refuses to
            lock the memory, or another call has pinned a part of it; or it is an object whose
            tensors only its own `.to` knows, for example a module (give its parameters). Or the
            device is the host, or `data` is no container and has no leaf.
        RuntimeError: there is no accelerator, or this is a forked child.
        Exception: an error from the `flatten` function of a registered container.
    """
    if device is None:
        device = torch.accelerator.current_accelerator()
        if device is None:
            raise RuntimeError("there is no accelerator that could access pinned memory")
    return PinnedMemory(data, device)


def _described(self: PinnedMemory) -> str:
    """Return `<tdcopier.pinned.PinnedMemory: 4096 bytes, pinned>`, for example."""
    if self.closed:
        return "<tdcopier.pinned.PinnedMemory: closed>"
    return f"<tdcopier.pinned.PinnedMemory: {counted(self.nbytes, 'byte')}, pinned>"


PinnedMemory.__repr__ = _described  # type: ignore[method-assign, assignment]  # a class of the native module
say_what_to_use(
    PinnedMemory,
    "the handle of pin_memory_()",
    "use the tree that you gave, which is pinned in place",
    "give the tree that you pinned",
)
