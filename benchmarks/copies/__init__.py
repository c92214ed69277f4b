"""Copies of trees, TensorDicts and pinned memory, each alone."""
