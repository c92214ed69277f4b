"""Makes tables and plots of result files: see `tool/report.py`."""

import sys

from tool.report import main

if __name__ == "__main__":
    sys.exit(main())
