"""What the user of a training loop feels, by how a DataLoader's batches get to the device.

``python benchmarks/trainers/run.py`` runs it; `benchmark.py` is what `benchmarks/run.py` calls.
"""
