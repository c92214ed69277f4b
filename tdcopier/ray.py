"""TensorDicts in Ray's object store, each as one buffer. Imports ray."""

from __future__ import annotations

from typing import Any

from tdcopier._pack import Parcel, pack

try:
    from ray.util import register_serializer
except ModuleNotFoundError as error:
    if error.name not in ("ray", "ray.util"):
        raise
    raise ModuleNotFoundError("tdcopier.ray needs Ray: pip install ray", name="ray") from error

__all__ = ["register"]


def register(*classes: type) -> None:
    """Let Ray send objects of these classes as parcels, as `pack` makes them.

    That is for `ray.put`, and for the arguments and results of tasks and actors. Ray asks that
    each process that sends makes the call, after it has connected; one that only receives need
    not. For example, for the driver and all workers::

        import tdcopier.ray

        ray.init(runtime_env={"worker_process_setup_hook": tdcopier.ray.register})
        tdcopier.ray.register()

    The objects arrive on the host, as from `start_copy(td, "cpu")`, with memory of their own, which
    may be written: `ray.get` copies the leaves out of the object store. To read them where they
    are, put a parcel: `ray.get(ray.put(pack(batch)))` copies nothing, and `start_copy` takes it.

    Args:
        classes: by default, `tensordict.TensorDict`. Ray asks for each class by itself: subclasses,
            tensorclasses and lazy stacks are sent as before unless they are named.
    """
    for cls in classes or _tensordicts():
        register_serializer(cls, serializer=pack, deserializer=_arrived)


def _tensordicts() -> tuple[type, ...]:
    from tensordict import TensorDict

    return (TensorDict,)


def _arrived(parcel: Parcel) -> Any:
    """Return what was packed. Ray sends this function by its name."""
    return parcel.tree()
