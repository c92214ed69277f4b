"""torchrl support: replay buffers whose batches reach the device packed. Imports torchrl."""

from tdcopier.torchrl._buffer import PackedTensorDictReplayBuffer
from tdcopier.torchrl._pinned import PackedLazyTensorStorage, WriteStats
from tdcopier.torchrl._samplers import (
    DeviceRandomSampler,
    PackedPrioritizedSampler,
    PriorityStats,
)
from tdcopier.torchrl._storage import PackedLazyMemmapStorage, ReadStats
from tdcopier.torchrl._to_device import ToDevice

__all__ = [
    "DeviceRandomSampler",
    "PackedLazyMemmapStorage",
    "PackedLazyTensorStorage",
    "PackedPrioritizedSampler",
    "PackedTensorDictReplayBuffer",
    "PriorityStats",
    "ReadStats",
    "ToDevice",
    "WriteStats",
]
