"""Compares two builds of tdcopier: see `tool/compare.py`."""

from tool.compare import script

if __name__ == "__main__":
    script()
