"""Reading and copying batches ahead of a loop."""
