"""Parks device memory of models and optimizers in pinned host memory, and takes snapshots of it."""
