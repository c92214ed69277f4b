"""Checkpoints beside training through `torch.distributed.checkpoint`."""

from tdcopier._park.stager import SnapshotStager

__all__ = ["SnapshotStager"]
