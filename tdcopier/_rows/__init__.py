"""Gather and scatter of rows of a storage."""
