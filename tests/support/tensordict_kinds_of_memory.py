"""TensorDicts in special memory: mapped, shared, consolidated, in files."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from typing import Any

from catalogue import ramp
from tensordict import MemoryMappedTensor, TensorDict
from tensordict_classes import Decorated
from tensordict_kind import Counts, TdKind, anywhere, delegated, host_only, packed
from tensordict_kinds_of_leaves import flat


def folder() -> str:
    """Returns a new folder that is deleted when the process ends."""
    made = tempfile.mkdtemp(prefix="tdcopier-test-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


def _two_nodes(device: str) -> TensorDict:
    return TensorDict({"x": flat(device), "a": ramp(device, 2)}, [2], device=device)


def _with_text(device: str) -> TensorDict:
    return TensorDict({"x": {"text": "word"}, "a": ramp(device, 2)}, [2], device=device)


def _mapped_like() -> TensorDict:
    like = _two_nodes("cpu").memmap_like(folder())
    for leaf in like.values(True, True):
        leaf.fill_(3)
    return like


def _loaded() -> TensorDict:
    prefix = folder()
    _two_nodes("cpu").memmap(prefix)
    return TensorDict.load_memmap(prefix)


def _with_a_mapped_leaf() -> TensorDict:
    mapped = MemoryMappedTensor.from_tensor(ramp("cpu", 2, 3))
    return TensorDict({"a": ramp("cpu", 2), "mapped": mapped}, [2], device="cpu")


def _with_a_mapped_node() -> TensorDict:
    return TensorDict({"a": ramp("cpu", 2), "x": flat("cpu").memmap_()}, [2], device="cpu")


def _with_a_shared_node() -> TensorDict:
    return TensorDict({"a": ramp("cpu", 2), "x": flat("cpu").share_memory_()}, [2], device="cpu")


def _mapped_tensorclass() -> Any:
    made = Decorated(ramp("cpu", 2, 3), label="cat", mask=ramp("cpu", 2), batch_size=[2])
    return made.memmap_(folder())


def _persistent() -> Any:
    from tensordict import PersistentTensorDict

    return PersistentTensorDict.from_dict(_two_nodes("cpu"), filename=f"{folder()}/x.h5")


MEMORY: dict[str, TdKind] = {
    "memory-mapped": host_only(lambda: _two_nodes("cpu").memmap_(), packed(3)),
    "memory-mapped, without device": host_only(
        lambda: TensorDict({"a": ramp("cpu", 2), "x": {"b": ramp("cpu", 2)}}, [2]).memmap_(),
        packed(2),
    ),
    "memory-mapped to a folder": host_only(lambda: _two_nodes("cpu").memmap_(folder()), packed(3)),
    "memory-mapped, copy": host_only(lambda: _two_nodes("cpu").memmap(folder()), packed(3)),
    "memory-mapped, `memmap_like`": host_only(_mapped_like, packed(3)),
    "memory-mapped, loaded": host_only(_loaded, packed(3)),
    "memory-mapped, indexed": host_only(lambda: _two_nodes("cpu").memmap_()[0], packed(3)),
    "memory-mapped, with text": host_only(
        lambda: _with_text("cpu").memmap_(folder()), packed(1, opaque=1)
    ),
    "memory-mapped tensorclass": host_only(_mapped_tensorclass, packed(2, opaque=1)),
    "memory-mapped leaf": host_only(_with_a_mapped_leaf, packed(2)),
    "memory-mapped node": host_only(_with_a_mapped_node, packed(3)),
    "shared memory": host_only(lambda: _two_nodes("cpu").share_memory_(), packed(3)),
    "shared node": host_only(_with_a_shared_node, packed(3)),
    "consolidated": anywhere(lambda d: _two_nodes(d).consolidate(), delegated()),
    "consolidated, with metadata": anywhere(
        lambda d: _two_nodes(d).consolidate(metadata=True), delegated()
    ),
    "consolidated, locked": anywhere(lambda d: _two_nodes(d).consolidate().lock_(), delegated()),
    "consolidated, with text": anywhere(lambda d: _with_text(d).consolidate(), delegated()),
    "consolidated node": anywhere(
        lambda d: TensorDict({"x": flat(d).consolidate(), "a": ramp(d, 2)}, [2], device=d),
        packed(3),
    ),
    "HDF5 file": host_only(_persistent, delegated(), needs="h5py"),
    "HDF5 file in a plain one": host_only(
        lambda: TensorDict({"x": _persistent(), "a": ramp("cpu", 2)}, [2]),
        Counts(packed=1, delegated=1),
        needs="h5py",
    ),
}
