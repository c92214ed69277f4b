"""One slab as its worker has it, and as the process that trains has it, both in this process."""

from __future__ import annotations

import gc
import os
from typing import Any

import tdcopier
from tdcopier import _C
from tdcopier._pack import Memory


class SlabPair:
    """Both ends of one slab."""

    def __init__(self, nbytes: int = 1 << 20) -> None:
        self.made = _C.Slab.make(nbytes)
        path = f"/proc/{os.getpid()}/fd/{self.made.descriptor}"
        self.opened = _C.Slab.open(path, self.made.token)

    def send(self, tree: Any) -> tdcopier.Parcel:
        """Pack a tree into the slab, which is free, and return the parcel that arrives."""
        given = Memory(lambda nbytes, device: self.made.take(nbytes))
        parcel = given.noted(_C.pack(tree, given.of))
        assert self.made.take(1) is None  # the parcel shows it
        nbytes = parcel.nbytes
        del parcel, given
        assert self.made.send()
        return self.opened.receive(nbytes)

    def is_free(self) -> bool:
        gc.collect()
        return self.made.take(1) is not None

    def scribble(self) -> None:
        """Write to the slab as its worker would, if it is free."""
        if (memory := self.made.take(self.made.nbytes)) is not None:
            memory.fill_(255)
