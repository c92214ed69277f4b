"""torchrl support: replay buffers whose batches reach the device packed. Imports torchrl."""

try:
    from tdcopier.torchrl._buffer import PackedTensorDictReplayBuffer
    from tdcopier.torchrl._learner import GraphedLearner, LearnerStats
    from tdcopier.torchrl._pinned import PackedLazyTensorStorage
    from tdcopier.torchrl._samplers import (
        DeviceRandomSampler,
        PackedPrioritizedSampler,
        PriorityStats,
    )
    from tdcopier.torchrl._storage import PackedLazyMemmapStorage, ReadStats, WriteStats
    from tdcopier.torchrl._to_device import ToDevice
except ModuleNotFoundError as error:
    if error.name != "torchrl":
        raise
    raise ModuleNotFoundError(
        "tdcopier.torchrl needs torchrl: pip install 'tdcopier[torchrl]'", name="torchrl"
    ) from error

__all__ = [
    "DeviceRandomSampler",
    "GraphedLearner",
    "LearnerStats",
    "PackedLazyMemmapStorage",
    "PackedLazyTensorStorage",
    "PackedPrioritizedSampler",
    "PackedTensorDictReplayBuffer",
    "PriorityStats",
    "ReadStats",
    "ToDevice",
    "WriteStats",
]
