"""Runs, times, compares and shows the benchmarks."""
