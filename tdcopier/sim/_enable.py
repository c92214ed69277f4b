"""Registers the simulated device with torch."""

from __future__ import annotations

import atexit
import threading

import torch
from torch.utils import backend_registration

from tdcopier import _C, _sim

_lock = threading.Lock()


def is_enabled() -> bool:
    """Whether :func:`enable` has been called in this process.

    For example::

        device = "sim" if sim.is_enabled() else "cuda"
    """
    return _sim.device_count() > 0


def enable(devices: int = 2) -> None:
    """Register ``devices`` simulated devices, ``sim:0`` and so on, with torch as ``torch.sim``.

    For example::

        from tdcopier import sim

        sim.enable(devices=1)
        ones = torch.ones(3, device="sim")

    From then on until the process ends, ``torch.accelerator`` means ``sim``, even on a machine with
    a GPU. It may follow a ``backward()`` on other devices: autograd gets the threads that it lacks.
    No thread may be in a ``backward()`` meanwhile. On a machine with a GPU, ``pin_memory=True``
    still means CUDA's pinned memory unless the process is started with ``CUDA_VISIBLE_DEVICES=``.
    At the end of the process all streams are released and finish their work.

    Args:
        devices: number of devices, 1 to 16. Calling again with the same number does nothing.

    Raises:
        ValueError: ``devices`` is not between 1 and 16.
        RuntimeError: the simulation is enabled with another number of devices, or another backend
            uses torch's only slot for external devices (``PrivateUse1``).

    """
    if not 1 <= devices <= _sim.MAX_DEVICES:
        raise ValueError(
            f"the number of simulated devices must be 1 to {_sim.MAX_DEVICES}, got {devices}"
        )
    with _lock:
        if is_enabled():
            if _sim.device_count() != devices:
                raise RuntimeError(
                    f"the simulation is enabled with {_sim.device_count()} device(s) and cannot be "
                    f"enabled with {devices} in the same process"
                )
            return
        backend = torch._C._get_privateuse1_backend_name()
        if backend not in ("privateuseone", "sim"):
            raise RuntimeError(
                f"the simulation needs torch's PrivateUse1 device, which in this process is the "
                f"backend {backend!r}"
            )
        _sim.enable(devices)
        _C.testing.set_stream_maker(_sim.stream_maker())
        _C.testing.set_pinning_calls(_sim.pinning_calls())
        _C.testing.set_row_kernels(_sim.row_kernels())
        atexit.register(_sim.shut_down)

        from tdcopier.sim import device_module

        backend_registration.rename_privateuse1_backend("sim")
        torch._register_device_module("sim", device_module)  # type: ignore[no-untyped-call]
        backend_registration.generate_methods_for_privateuse1_backend()
