"""Parcels on their way to other processes."""
