"""TensorDicts as trees: the only subpackage that imports tensordict, and only when it is needed.

`backend` runs TensorDict's own `to`, `cuda`, `cpu` and constructor on the engine within a block,
and `install_backend` does so for the whole process.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tdcopier.tensordict._backend import backend, install_backend, remove_backend

__all__ = ["backend", "install_backend", "remove_backend"]


def __getattr__(name: str) -> Any:
    """Import tensordict, which takes a second, when a name is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tdcopier.tensordict import _backend

    globals().update({each: getattr(_backend, each) for each in __all__})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
