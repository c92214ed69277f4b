"""What runs, times, compares and shows the benchmarks."""
