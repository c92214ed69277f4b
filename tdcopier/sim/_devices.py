"""Conversion of device, stream and direction arguments."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import torch

from tdcopier import _sim

DeviceLike: TypeAlias = torch.device | str | int | None
Direction: TypeAlias = Literal["h2d", "d2h", "d2d", "within"]


def device_index(device: DeviceLike) -> int:
    """Return the index of a simulated device; None and ``"sim"`` are the current one.

    Raises:
        ValueError: the device is of another type.
        RuntimeError: the simulation is not enabled, or has no device with this index.

    """
    if _sim.device_count() == 0:
        raise RuntimeError("the simulation is not enabled; call tdcopier.sim.enable() first")
    if device is None:
        return _sim.current_device()
    if isinstance(device, int):
        index = device
    else:
        parsed = torch.device(device)
        if parsed.type != "sim":
            raise ValueError(f"expected a simulated device, got {parsed}")
        index = _sim.current_device() if parsed.index is None else parsed.index
    if not 0 <= index < _sim.device_count():
        raise RuntimeError(
            f"there is no device sim:{index}; the simulation has {_sim.device_count()} device(s); "
            "ask for more with tdcopier.sim.enable(devices=...) at the start of the program"
        )
    return index


def stream_key(stream: torch.Stream | None) -> tuple[int, int]:
    """Return the device index and the id of a stream; None is the current one.

    Raises:
        ValueError: the stream belongs to a device of another type.
        RuntimeError: the simulation is not enabled.

    """
    index = device_index(None)
    if stream is None:
        stream = torch.accelerator.current_stream(index)
    if stream.device.type != "sim":
        raise ValueError(f"expected a stream of a simulated device, got {stream}")
    return stream.device_index, stream.stream_id


def direction_index(direction: Direction) -> int:
    """Return the native module's number of a direction.

    Raises:
        ValueError: there is no such direction.

    """
    names = get_args(Direction)
    if direction not in names:
        raise ValueError(f"expected one of the directions {names}, got {direction!r}")
    return names.index(direction)
