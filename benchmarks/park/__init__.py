"""Parking of device memory, and snapshots."""
