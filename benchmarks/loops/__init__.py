"""Loops with a batch in each step, and copies beside kernels and other copies."""
