"""Rows of storages, and the learners that they feed."""
