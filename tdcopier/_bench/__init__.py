"""The parts of `python -m tdcopier.bench`; the repository's benchmarks time with them too."""
