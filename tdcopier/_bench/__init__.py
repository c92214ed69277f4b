"""The parts of `python -m tdcopier.bench`; the repository's benchmarks use its timing code too."""
