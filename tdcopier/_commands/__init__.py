"""`python -m tdcopier info` and `python -m tdcopier bench`."""
