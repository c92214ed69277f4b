"""Runs the benchmarks: see `tool/run.py`."""

import sys

from tool.run import main

if __name__ == "__main__":
    sys.exit(main())
